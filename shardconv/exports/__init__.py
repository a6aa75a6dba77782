"""Other forms of a converted directory or a model: an ordinary checkpoint, DCP, a ``tp_plan``, files for vLLM."""
