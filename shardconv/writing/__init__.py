"""Files on disk: planned to the byte, written at once, continued after a crash."""
