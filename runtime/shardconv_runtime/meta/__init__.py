"""The unsharded model on the meta device, and how its tensors are made."""
