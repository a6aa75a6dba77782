"""Whether a model on other shapes does what the traced model does, operator by operator."""
