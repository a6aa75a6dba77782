"""Keep the libraries quiet: what transformers and the Hub client log is not addressed to our user."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .hub.quiet import quiet_client


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Silence transformers' and huggingface_hub's logs, warnings and bars; restore them on leaving."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        with quiet_client(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
