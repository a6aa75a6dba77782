"""Converted directories, on this machine, on the Hub and in object stores."""
