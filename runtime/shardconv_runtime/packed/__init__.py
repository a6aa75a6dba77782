"""Quantized formats: how each stores a weight, and how to dequantize it."""
