"""Files on disk: each byte has a planned place, files appear at once, and a crashed run can continue."""
