"""Errors are of the kind that a caller would catch, and their text is the message."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
import shardconv_runtime
from huggingface_hub.errors import OfflineModeIsEnabled
from shardconv_runtime import errors
from shardconv_runtime.errors import (
    CheckpointError,
    DamagedError,
    LaunchError,
    NetworkError,
    PlanError,
    ShardconvError,
    SourceError,
)
from shardconv_runtime.storage.hub_errors import hub_failure

import shardconv


def all_kinds(kind: type[ShardconvError] = ShardconvError) -> Iterator[type[ShardconvError]]:
    """A class of errors and all classes below it."""
    yield kind
    for sub in kind.__subclasses__():
        yield from all_kinds(sub)


KINDS = sorted({kind for kind in all_kinds() if kind.__module__ == errors.__name__}, key=lambda k: k.__name__)

BUILT_IN = {
    "OptionError": (ValueError, PlanError),
    "UnknownOptionError": (TypeError, ShardconvError),
    "MissingModelError": (FileNotFoundError, SourceError),
    "NotConvertedError": (FileNotFoundError, CheckpointError),
    "OutputExistsError": (FileExistsError, CheckpointError),
    "DamagedError": (ValueError, CheckpointError),
    "MissingFileError": (FileNotFoundError, DamagedError),
    "DamagedModelError": (ValueError, SourceError),
    "NetworkError": (ConnectionError, SourceError),
    "AccessError": (PermissionError, SourceError),
    "MissingPackageError": (ImportError, PlanError),
    "UnsupportedError": (NotImplementedError, PlanError),
    "InputsDifferError": (ValueError, LaunchError),
    "RanksTimeoutError": (TimeoutError, LaunchError),
    "RefusedCallError": (RuntimeError, PlanError),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_error_is_of_a_built_in_kind_and_of_its_earlier_one(name: str) -> None:
    assert issubclass(getattr(errors, name), BUILT_IN[name])


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_message(kind: type[ShardconvError]) -> None:
    error = kind("a message; with a remedy")
    assert str(error) == "a message; with a remedy"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert kind.__doc__
    assert kind.exit_code in (2, 3, 4, 5)


def test_all_are_public() -> None:
    assert {kind.__name__ for kind in KINDS} <= set(shardconv_runtime.__all__)


def test_a_damaged_directory_lists_its_problems() -> None:
    error = DamagedError("out: 2 problems", ["a: is missing", "b: is short"], ["c is new"])
    assert (str(error), error.problems, error.remarks) == (
        "out: 2 problems",
        ("a: is missing", "b: is short"),
        ("c is new",),
    )
    assert error.__notes__ == ["a: is missing", "b: is short"]


class TestWhereAUserMeetsThem:
    """A few of each kind."""

    def test_options(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="tp must be a whole number"):
            shardconv.convert(tmp_path, tmp_path / "out", tp=0)
        with pytest.raises(ValueError, match="format must be one of hf, dcp, vllm"):
            shardconv.export(tmp_path, tmp_path / "out", format="gguf")
        with pytest.raises(TypeError, match="adaptor"):
            shardconv_runtime.load(tmp_path, adaptor="lora/")

    def test_paths(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no such directory"):
            shardconv.convert(tmp_path / "nowhere", tmp_path / "out", tp=2)
        with pytest.raises(FileNotFoundError, match="it is not a converted model"):
            shardconv.verify(tmp_path)
        (tmp_path / "file").touch()
        model = tmp_path / "model"
        model.mkdir()
        (model / "config.json").write_text("{}")
        (model / "model.safetensors").touch()
        with pytest.raises(FileExistsError, match="is a file; name a directory"):
            shardconv.convert(model, tmp_path / "file", tp=2)

    def test_the_network(self) -> None:
        for error in (OfflineModeIsEnabled("offline"), OSError("no route")):
            failure = hub_failure("a text", error)
            assert isinstance(failure, NetworkError)
            assert isinstance(failure, ConnectionError)
            assert str(failure) == "a text"
        assert not isinstance(hub_failure("a text", ZeroDivisionError()), NetworkError)
