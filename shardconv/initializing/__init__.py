"""The weights of a new model: transformers' own initialization, recorded and drawn parameter by parameter."""
