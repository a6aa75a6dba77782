"""The command line."""

from .entry import cli, main, run

__all__ = ["cli", "main", "run"]
