"""Which dims of a tape are the same, which may be sharded and which must be replicated."""
