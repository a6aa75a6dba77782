"""Whether a plan holds: the ranks' shapes and slices, and their numbers."""
