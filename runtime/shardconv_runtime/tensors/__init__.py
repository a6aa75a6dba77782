"""Lazy tensors: the bytes that a tensor consists of, and copying them to files or to memory."""
