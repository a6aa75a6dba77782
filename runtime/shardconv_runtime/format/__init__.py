"""What is on disk: the plan, the manifest, headers, and which positions each rank holds. Imports no torch."""
