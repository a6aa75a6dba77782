"""Converted directories on the Hugging Face Hub: pushes, the model card, and its pictures."""
