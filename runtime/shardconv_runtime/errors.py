"""The errors that a user can cause; both packages raise only these.

A message names the problem, where it is (FQN, file, rank), its cause, and the remedy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar


class ShardconvError(Exception):
    """Base of all errors of the project. The command line prints the message in one line."""

    exit_code: ClassVar[int] = 5
    """The exit code of a command that ends with this error, see docs/commands.md."""


# What is wrong with it: the model, the plan, the files, the processes.


class SourceError(ShardconvError):
    """The model to convert cannot be used: missing, unknown, incomplete or corrupt."""


class PlanError(ShardconvError):
    """A plan file is malformed, of another version, or does not fit the model or the request."""


class CheckpointError(ShardconvError):
    """A converted directory is missing files, or they do not agree with its manifest."""

    exit_code = 3


class CodeMismatchError(ShardconvError):
    """The installed model code differs from the code that the plan was solved for."""


class LaunchError(ShardconvError):
    """The process group does not fit the plan (world size, device, backend)."""


class SolveError(ShardconvError):
    """No plan could be found or proven for this model."""


# What happened. These also derive from the built-in error that a caller would catch.


class OptionError(PlanError, SourceError, ValueError):
    """An argument has a value that it cannot have, or contradicts another one."""

    exit_code = 2


class UnknownOptionError(ShardconvError, TypeError):
    """A function was called with a keyword argument that it does not have."""

    exit_code = 2


class MissingModelError(SourceError, FileNotFoundError):
    """There is no such model: no directory and no repository of that name."""

    exit_code = 2


class NotConvertedError(SourceError, CheckpointError, FileNotFoundError):
    """Where a converted model was named, there is none."""

    exit_code = 2


class OutputExistsError(CheckpointError, FileExistsError):
    """The output exists, and may not be replaced."""

    exit_code = 5


class DamagedError(CheckpointError, ValueError):
    """Files are missing or differ from those that were written.

    Args:
        message: the summary.
        problems: all problems, each in one line. They are also notes of the exception.
        remarks: differences that may be intended.
    """

    def __init__(self, message: str, problems: Sequence[str] = (), remarks: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
        self.remarks = tuple(remarks)
        for problem in problems:
            self.add_note(problem)


class MissingFileError(DamagedError, FileNotFoundError):
    """A file of a converted directory is missing."""


class DamagedModelError(SourceError, DamagedError):
    """A file of the model to convert is missing, cut off or corrupt."""

    exit_code = 3


class NetworkError(SourceError, ConnectionError):
    """The Hub cannot be reached, or does not answer."""

    exit_code = 4


class AccessError(SourceError, PermissionError):
    """The Hub does not let this user read or write a repository."""


class MissingPackageError(PlanError, SourceError, LaunchError, ImportError):
    """A package that the request needs is not installed."""


class UnsupportedError(PlanError, SourceError, NotImplementedError):
    """The model or the call is of a kind that is not supported."""


class RefusedCallError(PlanError, RuntimeError):
    """A call, or a change of the model, would be wrong on this rank's part of it."""


class InputsDifferError(LaunchError, PlanError, ValueError):
    """The ranks were given files or arguments that differ."""


class RanksTimeoutError(LaunchError, TimeoutError):
    """A rank did not answer in time, or ended."""


def brief(error: BaseException, limit: int = 200) -> str:
    """Return an error's message in one line of at most ``limit`` characters, or its type's name."""
    text = " ".join(str(error).split()).rstrip(".:;")
    return (text if len(text) <= limit else text[:limit] + "...") or type(error).__name__


def missing(names: Collection[str], noun: str, owner: str, holder: str) -> str:
    """Return ``"3 parameters of the plan are missing from the model, e.g. X"``."""
    if len(names) == 1:
        return f"1 {noun} of {owner} is missing from {holder}: {min(names)}"
    return f"{len(names)} {noun}s of {owner} are missing from {holder}, e.g. {min(names)}"
