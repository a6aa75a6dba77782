"""Finds out with numbers whether a module computes a norm or a sum over experts."""
