"""Finds the dims that each mesh axis shards: the cheapest assignment that holds every constraint."""
