"""What is made of a converted directory: the same for another plan, or another format."""
