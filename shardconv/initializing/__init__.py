"""The weights of a new model: transformers' own initialisation, recorded and drawn parameter by parameter."""
