"""Whether a plan holds before a byte is written: its tape on other shapes, its numbers on a smaller model."""
