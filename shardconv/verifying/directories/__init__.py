"""Whether a converted directory is what it should be, and computes what it should."""
