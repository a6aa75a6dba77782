"""The formats on disk: plan, manifest, headers, and the positions of each rank. Imports no torch."""
