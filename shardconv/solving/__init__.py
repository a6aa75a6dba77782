"""Which axes are split: the cheapest assignment that holds every constraint."""
