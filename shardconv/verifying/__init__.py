"""Everything that is checked: plans before a byte is written, converted directories afterwards."""
