"""What to call a model with, one forward pass on meta tensors as a tape, and the layers that repeat."""
