"""Converted directories and weight files, on this machine and on the Hub."""
