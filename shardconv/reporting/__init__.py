"""What is said while work is done, and of a plan when it is."""
