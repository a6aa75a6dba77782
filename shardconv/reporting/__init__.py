"""Progress while work is done, and reports of a plan."""
