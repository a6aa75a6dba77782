"""What is made of a converted directory, and whether it is intact and computes the same."""
