"""Ordinary models, in a directory or on the Hub: class, config, and the bytes of their parameters."""
