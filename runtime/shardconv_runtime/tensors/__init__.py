"""Lazy tensors: which bytes a tensor is made of, and copying them to where they belong."""
