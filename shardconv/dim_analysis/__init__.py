"""Which dims of a tape are the same, what may be sharded and what must be replicated."""
