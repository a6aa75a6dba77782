"""Where the model comes from: a directory, the Hub or a config object, made into one frozen value.

``locate`` finds (or downloads) the directory, ``config`` reads the configuration and finds the model
class, ``checkpoint`` finds and validates the weight files, ``resolve`` puts these together, and
``weights`` reads the parameters, or ``initialised`` draws those of a new model.
"""

from __future__ import annotations

from .initialised import initial_weights
from .locate import Hub
from .resolve import resolve
from .spec import ModelSpec
from .weights import lazy_weights, select

__all__ = ["Hub", "ModelSpec", "initial_weights", "lazy_weights", "resolve", "select"]
