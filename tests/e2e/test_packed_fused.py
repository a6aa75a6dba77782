"""Fused products of packed weights, in real processes: the numbers and the memory of single layers."""

from __future__ import annotations

import functools
import json
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import plain_kernels
import pytest
import shardconv_runtime
import torch
from distributed import run_processes
from library_checkpoints import dense_model, save_fp8
from packed_ranks import held_bytes
from shardconv_runtime.packed.formats import format_of
from shardconv_runtime.parallel import packed_modules
from shardconv_runtime.parallel.fused_products import fused_products
from shardconv_runtime.parallel.packed_modules import PackedProduct
from test_packed_load import IDS, KERNELS, SAVE, require_packages
from torch import Tensor
from torch._dynamo.utils import counters

import shardconv

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

TOLERANCE = 1e-6
"""Relative to the largest logit: a product of more rows may add in another order."""

KINDS = ["nf4", "nested", "int8", "torchao", "float8-rows", "fp8"]


def save(kind: str, path: Path) -> None:
    """Runs in a process of its own: libraries of formats start threads."""
    save_fp8(path, dense_model(), (32, 32)) if kind == "fp8" else SAVE[kind](path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= KERNELS.get(kind, {})
    (path / "config.json").write_text(json.dumps(config))


def calls(model: Any) -> tuple[Tensor, Tensor]:
    """Logits and tokens."""
    ids = torch.tensor(IDS)
    with torch.no_grad():
        return model(ids).logits, model.generate(ids, **OPTIONS)


def count_calls(model: Any) -> list[int]:
    """Gets the rows of each product that is called."""
    rows: list[int] = []
    for product in fused_products(model):
        if isinstance(product, PackedProduct) and product.wide is not None:
            product.wide.register_forward_hook(lambda *_: rows.append(1))
    return rows


def shares_memory(product: PackedProduct) -> bool:
    """Whether the weights of the members are the parts of that of the product, one after another."""
    address = values_of(product.wide).data_ptr()
    for member in product.members:
        values = values_of(member)
        if values.data_ptr() != address:
            return False
        address += values.nbytes
    return True


def values_of(module: Any) -> Tensor:
    values: Tensor = getattr(module.weight, "qdata", module.weight)
    return values


def on_rank(path: Path) -> list[Any]:
    """How far a fused model is from one that is not, and what is the same in both."""
    plain_kernels.use_those_of_cpus()
    plain = shardconv_runtime.load(path, dtype="float32", fuse=False)
    with mock.patch.object(packed_modules, "joined", wraps=packed_modules.joined) as joined:
        fused = shardconv_runtime.load(path, dtype="float32", fuse=True)
    for (parts,), _ in joined.call_args_list:  # in the mapped file; factors of factors are multiplied out
        is_stored = not path.match("nested/*") or parts[0].dtype == torch.uint8
        assert all(a.data_ptr() + a.nbytes == b.data_ptr() for a, b in pairwise(parts)) == is_stored
    assert not fused_products(plain)
    rows = count_calls(fused)
    assert held_bytes(plain) == held_bytes(fused)
    state = fused.state_dict()
    assert list(state) == list(plain.state_dict())
    assert all(bytes_of(state[n]).equal(bytes_of(t)) for n, t in plain.state_dict().items())
    (want, tokens), (found, drawn) = calls(plain), calls(fused)
    assert torch.equal(tokens, drawn)
    products = fused_products(fused)
    assert all(isinstance(product, PackedProduct) and shares_memory(product) for product in products)
    return [float((found - want).abs().max() / want.abs().max()), len(products), len(rows)]


def bytes_of(tensor: Tensor) -> Tensor:
    tensor = getattr(tensor, "qdata", tensor)
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.formats
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_of_the_layers_by_themselves(kind: str, tp: int, tmp_path: Path) -> None:
    """At three ranks they have uneven rows, and share two heads of keys and values."""
    require_packages(kind)
    out = tmp_path / kind / "out"
    run_processes(1, save, kind, tmp_path / "q")
    shardconv.convert(tmp_path / "q", out, tp, check=False)
    for error, num_products, num_calls in run_processes(tp, on_rank, out):
        print(f"{kind} tp {tp}: {error:.1e}, {num_products} products, {num_calls} calls")
        assert error <= TOLERANCE
        assert num_products == (
            1 if (kind, tp) == ("fp8", 3) else 2
        )  # keys and values are row-parallel there
        assert num_calls == num_products * (1 + OPTIONS["max_new_tokens"])


def compiled_on_rank(path: Path) -> tuple[float, int]:
    """How far a compiled model is from one that is not, and the number of graphs."""
    without_code = functools.partial(torch.compile, backend="eager")
    with mock.patch.object(torch, "compile", without_code):
        fused = shardconv_runtime.load(path, dtype="float32", compile=True, fuse=True)
    plain = shardconv_runtime.load(path, dtype="float32", fuse=False)
    counters.clear()
    with torch.no_grad():
        want, found = (model(torch.tensor(IDS), use_cache=False).logits for model in (plain, fused))
    assert len(fused_products(fused)) == 2
    return float((found - want).abs().max() / want.abs().max()), counters["stats"]["unique_graphs"]


@pytest.mark.formats
def test_one_graph(tmp_path: Path) -> None:
    require_packages("torchao")
    run_processes(1, save, "torchao", tmp_path / "q")
    shardconv.convert(tmp_path / "q", tmp_path / "out", 2, check=False)
    for error, num_graphs in run_processes(2, compiled_on_rank, tmp_path / "out"):
        assert error <= TOLERANCE
        assert num_graphs == 1


def columns_on_rank(path: Path) -> int:
    plain_kernels.use_those_of_cpus()
    return len(fused_products(shardconv_runtime.load(path, fuse=True)))


@pytest.mark.formats
def test_formats_that_pack_columns_are_not_fused(tmp_path: Path) -> None:
    require_packages("gptq")
    assert not format_of("gptq").can_be_joined
    run_processes(1, save, "gptq", tmp_path / "q")
    shardconv.convert(tmp_path / "q", tmp_path / "out", 2, check=False)
    assert run_processes(2, columns_on_rank, tmp_path / "out") == [0, 0]
