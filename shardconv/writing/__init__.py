"""Files on disk: planned to the byte, moved into place at once, continued after a crash."""
