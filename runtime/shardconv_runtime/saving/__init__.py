"""Saving trained models as converted directories, and optimizer states as torch's distributed checkpoints."""
