"""Generation in step on every rank, and compiled forward passes."""
