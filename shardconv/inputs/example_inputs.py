"""Inputs that the user gives as an example of a call, for models whose inputs cannot be made up.

An example is the keyword arguments of one call of the model's forward method. It comes from a safetensors
file, or from a function of the model's config: with a function, the converter can call a smaller model of the
same code, too. A converted directory keeps the example, and later plans and proofs of the model use it.
"""

from __future__ import annotations

import inspect
import json
import os
import runpy
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from shardconv_runtime.errors import MissingModelError, SourceError
from shardconv_runtime.files.small_files import EXAMPLE_NAME
from shardconv_runtime.parallel.outside_calls import EMBEDDINGS
from torch import Tensor, nn

from ..arguments import ExampleInputs

FUNCTION = "example_inputs"
"""Name of the function in a Python file."""
_ARGUMENTS = "arguments"
"""Key in the metadata of a safetensors file: the arguments that are not tensors, as a JSON object."""
NOT_IN_EXAMPLES = {
    "labels": "a plan is solved for a call without, and the converter tries calls with labels by itself",
    **dict.fromkeys(EMBEDDINGS, "give ids, and the converter tries embeddings in their place by itself"),
    "output_attentions": "the converter tries calls that ask for attention weights by itself",
    "output_hidden_states": "ranks return those that a plan keeps replicated; one is solved without them",
}
"""Arguments that a traced call cannot have, and why."""
_PLAIN = (bool, int, float, str, type(None))

Example = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | str | os.PathLike[str]
"""Keyword arguments of a call, a function that returns them for a config, or the path of a file."""


def example_call(example: ExampleInputs, config: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the other arguments of the call for a config; the same ones each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a function may draw its values
        try:
            arguments = example.call(config)
        except Exception as error:
            raise SourceError(f"{example.source} fails ({type(error).__name__}: {error})") from error
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise SourceError(f"{example.source} should give a dict of the keyword arguments of a call")
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in arguments.items() if name not in tensors}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            raise SourceError(f"{example.source}: {name} should be a dense tensor with values, on the CPU")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise SourceError(f"{example.source}: {name} has values that are not finite")
    for name, value in plain.items():
        if not isinstance(value, _PLAIN):
            raise SourceError(
                f"{example.source}: {name} is a {type(value).__name__}; an example can have tensors, "
                "numbers, text, true, false and None"
            )
    if not tensors:
        raise SourceError(
            f"{example.source} has no tensor among its arguments: {', '.join(arguments) or 'none'}"
        )
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}, plain


def example_call_of(example: ExampleInputs, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the example for a model. Floating point tensors get its dtype."""
    tensors, plain = example_call(example, getattr(model, "config", None))
    parameters = inspect.signature(model.forward).parameters
    name = type(model).__name__
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = {*tensors, *plain}
    if unknown := sorted(names - set(parameters)) if not takes_any else []:
        raise SourceError(
            f"{example.source}: {name} takes no argument {unknown[0]!r}; it takes {', '.join(parameters)}"
        )
    if missing := required_arguments(parameters, names):
        raise SourceError(f"{example.source}: {name} also needs {', '.join(missing)}")
    for argument, why in NOT_IN_EXAMPLES.items():
        if argument in names:
            raise SourceError(f"{example.source} has {argument}: leave it out; {why}")
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}, plain


def required_arguments(parameters: Mapping[str, inspect.Parameter], given: Collection[str]) -> list[str]:
    """Return the parameters that a function cannot be called without, except the given ones."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind in kinds]
    return [n for n in required if n not in given]


def save_example(example: ExampleInputs, config: Any, directory: Path) -> Path:
    """Write the example to a converted directory, and return its path relative to the directory."""
    tensors, plain = example_call(example, config)
    # safetensors writes several keys of metadata in random order, so there is only one.
    metadata = {_ARGUMENTS: json.dumps(plain, sort_keys=True)}
    stored = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(stored, directory / EXAMPLE_NAME, metadata)
    return Path(EXAMPLE_NAME)


def read_example(example: Example) -> ExampleInputs:
    """Read the example that a user gives."""
    if isinstance(example, Mapping):
        arguments = dict(example)
        return ExampleInputs("the example inputs", lambda config: arguments)
    if callable(example):
        return ExampleInputs(f"{FUNCTION}={getattr(example, '__name__', example)}", _of_config(example))
    if not isinstance(example, str | os.PathLike):
        raise SourceError(
            f"the example inputs are a {type(example).__name__}; give a dict of the keyword arguments of a "
            "call, a function that returns it, or a file"
        )
    path = Path(example).expanduser()
    if not path.is_file():
        raise MissingModelError(f"{path}: there is no such file of example inputs")
    if path.suffix != ".py":
        return _safetensors(path)
    try:
        function = runpy.run_path(str(path)).get(FUNCTION)
    except Exception as error:
        raise SourceError(f"{path} cannot be run ({type(error).__name__}: {error})") from error
    if not callable(function):
        raise SourceError(
            f"{path} defines no function {FUNCTION}(config), which returns the arguments of a call"
        )
    return ExampleInputs(f"{FUNCTION} of {path}", _of_config(function))


def stored_example(directory: Path | None) -> ExampleInputs | None:
    """Return the example that a directory contains; None if there is none."""
    path = None if directory is None else directory / EXAMPLE_NAME
    return _safetensors(path) if path is not None and path.is_file() else None


def _of_config(function: Callable[..., Mapping[str, Any]]) -> Callable[[Any], Mapping[str, Any]]:
    """Return a function of the config. The given function may take no argument."""
    return function if inspect.signature(function).parameters else lambda config: function()


def _safetensors(path: Path) -> ExampleInputs:
    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no iterator)
            plain = json.loads((file.metadata() or {}).get(_ARGUMENTS, "{}"))
    except (SafetensorError, OSError, ValueError) as error:
        raise SourceError(
            f"{path}: example inputs come from a safetensors file, or from a Python file that ends in .py "
            f"({error})"
        ) from error
    if not isinstance(plain, dict):
        raise SourceError(f"{path}: {_ARGUMENTS!r} in its metadata should be a JSON object")
    return ExampleInputs(str(path), lambda config: {**tensors, **plain})
