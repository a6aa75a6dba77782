"""Inputs for a model, one forward pass on meta tensors as a tape, and the layers that repeat."""
