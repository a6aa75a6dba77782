"""Conversions of converted directories, and checks that one is intact and computes the same."""
