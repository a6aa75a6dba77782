"""Keyword arguments that ``load``, ``convert`` and ``plan`` do not have."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
from shardconv_runtime import Hub, ShardconvError, UnknownOptionError
from shardconv_runtime.default_modes import in_default_modes
from shardconv_runtime.keywords import Moved, checked_keywords
from shardconv_runtime.loading import load_options

import shardconv


@in_default_modes
@checked_keywords({"token": Moved("hub", Hub), "group": Moved("process_group")}, {"tp_size": "start ranks"})
def function(path: str, *, hub: Hub | None = None, process_group: Any = None, dtype: str = "") -> Any:
    return hub, process_group


def test_a_misspelled_keyword_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"function\(\) has no argument dtpye=; the nearest is dtype="):
        function("", dtpye="float32")  # type: ignore[call-arg]
    with pytest.raises(ShardconvError, match="its arguments are path, hub, process_group, dtype"):
        function("", xyz=1)  # type: ignore[call-arg]
    with pytest.raises(UnknownOptionError, match="tp_size=: start ranks"):
        function("", tp_size=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("module", "name", "nearest"), [(shardconv_runtime, "laod", "load"), (shardconv, "plna", "plan")]
)
def test_a_misspelled_function_names_the_nearest(module: Any, name: str, nearest: str) -> None:
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'; the nearest is {nearest}$"):
        getattr(module, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'xyz'$"):
        module.xyz  # noqa: B018


def test_a_moved_keyword_still_works() -> None:
    with pytest.warns(FutureWarning, match=r"token= is now hub=Hub\(token=\.\.\.\)") as caught:
        assert function("", token="x", hub=Hub("v1"))[0] == Hub("v1", token="x")  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    with pytest.warns(FutureWarning, match="group= is now process_group="):
        assert function("", group=3)[1] == 3  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="group= is the old name of process_group="):
        function("", group=3, process_group=4)  # type: ignore[call-arg]


def test_moved_keywords_are_fields() -> None:
    parameters = inspect.signature(shardconv_runtime.load).parameters
    for name, moved in load_options.MOVED.items():
        assert name not in parameters
        assert moved.argument in parameters
        if moved.value_class is not None:
            assert name in moved.value_class.__dataclass_fields__  # type: ignore[attr-defined]
    assert not load_options.REMEDIES.keys() & (parameters.keys() | load_options.MOVED.keys())


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"device_map": "auto"}, "each rank loads its own part to its own device"),
        ({"trainig": True}, "the nearest is training="),
        ({"warm_up": [(1, 8)]}, r"warm_up= is a field of compile=Compiling\(\.\.\.\), and compile= was not"),
        ({"regather": True}, r"regather= is a field of training=Training"),
    ],
)
def test_keywords_of_load(tmp_path: Path, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        shardconv_runtime.load(tmp_path, **keywords)


def test_keywords_of_the_converter(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the nearest is writing="):
        shardconv.convert(tmp_path, tmp_path / "out", 2, writting=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="the nearest is experts="):
        shardconv.plan(tmp_path, 2, expert="ep")  # type: ignore[call-arg]


def test_values_of_another_class(tmp_path: Path) -> None:
    with pytest.raises(ShardconvError, match=r"hub= should be a Hub\(\.\.\.\), got 'main'"):
        shardconv_runtime.load(tmp_path, hub="main")  # type: ignore[arg-type]
    with pytest.raises(ShardconvError, match=r"training= should be a Training\(\.\.\.\), got 'yes'"):
        shardconv_runtime.load(tmp_path, training="yes")  # type: ignore[arg-type]


def test_an_editor_sees_the_names() -> None:
    assert {"load", "parallelize", "save", "Training", "LoadedModel"} <= set(dir(shardconv_runtime))
    parameters = inspect.signature(shardconv_runtime.load).parameters.values()
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
