"""From an assignment to a plan: the shards of each rank, and the overrides and steps of its code."""
