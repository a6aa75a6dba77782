"""A model on the meta device and a plan: the same model, with one rank's modules and shapes."""
