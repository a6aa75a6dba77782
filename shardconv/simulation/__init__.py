"""All ranks in one process, on made-up weights, in float64."""
