"""Ahead-of-time tensor parallelism for transformers models."""
