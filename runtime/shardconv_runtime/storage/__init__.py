"""Bytes of files, read by ranges: on this machine, on the Hub and in object stores."""
