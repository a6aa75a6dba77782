"""A smaller model of the same code, on which a plan is proven in little memory."""
