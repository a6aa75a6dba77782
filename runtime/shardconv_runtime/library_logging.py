"""Contexts without the logs, warnings and progress bars of transformers and of the Hub client."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars


@contextmanager
def without_hub_logging() -> Iterator[None]:
    """Disable huggingface_hub's logs and bars; restore them on exit."""
    verbosity, had_bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
    hub_logging.set_verbosity(logging.ERROR)
    disable_progress_bars()
    try:
        yield
    finally:
        hub_logging.set_verbosity(verbosity)
        if had_bars:
            enable_progress_bars()


@contextmanager
def without_library_logging() -> Iterator[None]:
    """Disable transformers' and huggingface_hub's logs, warnings and bars; restore them on exit."""
    from transformers.utils import logging as transformers_logging  # takes seconds, see `without_hub_logging`

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with without_hub_logging(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
