"""Other forms of a converted directory or a model: a plain checkpoint, DCP, a ``tp_plan``, files for vLLM."""
