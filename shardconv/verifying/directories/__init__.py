"""Whether a converted directory is intact, equals its source, and computes the same."""
