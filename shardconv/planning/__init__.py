"""From an assignment to a plan: the shards of each rank, and the edits and steps with which its code runs."""
