"""The errors that a user can cause; both packages raise only these.

A message names the problem, where it is (FQN, file, rank), its cause, and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection


class ShardconvError(Exception):
    """Base of all errors of the project. The command line prints it in one line and exits with 2."""


class SourceError(ShardconvError):
    """The model to convert cannot be used: missing, unknown, incomplete or corrupt."""


class PlanError(ShardconvError):
    """A plan file is malformed, of another version, or does not fit the model."""


class CheckpointError(ShardconvError):
    """A converted directory is missing files, or they do not agree with its manifest."""


class CodeMismatchError(ShardconvError):
    """The installed model code differs from the code that the plan was solved for."""


class LaunchError(ShardconvError):
    """The process group does not fit the plan (world size, device, backend)."""


class InputsDifferError(LaunchError, ValueError):
    """The ranks were given files or arguments that differ."""


class UnknownOptionError(ShardconvError, TypeError):
    """A function was called with a keyword argument that it does not have."""


class SolveError(ShardconvError):
    """No plan could be found or proven for this model."""


def brief(error: BaseException, limit: int = 200) -> str:
    """Return an error's message in one line of at most ``limit`` characters, or its type's name."""
    text = " ".join(str(error).split()).rstrip(".:;")
    return (text if len(text) <= limit else text[:limit] + "...") or type(error).__name__


def missing(names: Collection[str], noun: str, owner: str, holder: str) -> str:
    """Return ``"3 parameters of the plan are missing from the model, e.g. X"``."""
    if len(names) == 1:
        return f"1 {noun} of {owner} is missing from {holder}: {min(names)}"
    return f"{len(names)} {noun}s of {owner} are missing from {holder}, e.g. {min(names)}"
