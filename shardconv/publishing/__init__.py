"""Converted directories on the Hugging Face Hub: what is sent, the model card, and its pictures."""
