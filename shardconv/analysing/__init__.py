"""Which dims of a tape are one axis, what may be split and what must be whole."""
