"""Finds the dims of a tape that are the same, that may be sharded and that must be replicated."""
