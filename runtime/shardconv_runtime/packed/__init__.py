"""Quantized formats: how each stores a weight, and the weight that its tensors stand for."""
