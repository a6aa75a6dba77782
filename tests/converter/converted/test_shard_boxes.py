"""The boxes of a plan: they say where each element of a rank's tensor is in the global one."""

from __future__ import annotations

import importlib.util
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_causal
from hypothesis import given, settings
from places import ROOT
from random_plans import declared, plans
from safetensors.torch import load_file
from shardconv_runtime.format.plan import Plan, global_shape, parameter_plans
from shardconv_runtime.format.slices import ranges
from shardconv_runtime.format.stored_layout import holds_values, stored_plans

import shardconv
from shardconv import cli
from shardconv.exports.tp_plan import dumps, shard_boxes


def example() -> Any:
    spec = importlib.util.spec_from_file_location("copy_shards", ROOT / "examples" / "copy_shards.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def local_tensors(plan: Plan, values: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """What a rank holds, by the positions of each dim."""
    found = {}
    for name, entry in stored_plans(plan).items():
        tensor = values[name]
        for dim, tree in enumerate(entry.dims):
            held = [torch.arange(*span) for span in ranges(tree, plan.mesh, rank)]
            tensor = tensor.index_select(dim, torch.cat(held) if held else torch.arange(0))
        found[name] = tensor if holds_values(entry, plan.mesh, rank) else torch.zeros_like(tensor)
    return found


def numbered(plan: Plan) -> dict[str, torch.Tensor]:
    """A different number in each element of every tensor."""
    shapes = {name: global_shape(entry) for name, entry in stored_plans(plan).items()}
    return {n: torch.arange(1, 1 + int(torch.tensor(s).prod())).reshape(s) for n, s in shapes.items()}


@settings(max_examples=40, deadline=None)
@given(declared().flatmap(plans))
def test_boxes_are_the_positions_of_the_plan(plan: Plan) -> None:
    values, document = numbered(plan), shard_boxes(plan)
    for rank in range(plan.tp):
        for name, wanted in local_tensors(plan, values, rank).items():
            shard = document["parameters"][name]["ranks"][rank]
            made = torch.zeros(shard["shape"], dtype=torch.long)
            for box in shard["boxes"]:
                where, there = (
                    tuple(slice(a, a + n) for a, n in zip(box[key], box["sizes"], strict=True))
                    for key in ("local_offsets", "offsets")
                )
                made[where] = values[name][there]
            assert torch.equal(made, wanted)


def test_the_text_is_the_document(tmp_path: Path) -> None:
    plan = shardconv.plan(save_causal("llama", tmp_path / "model"), 2, check=False)
    assert json.loads(dumps(plan)) == shard_boxes(plan)
    assert len(dumps(plan).splitlines()) == len(parameter_plans(plan)) + 8


@pytest.mark.parametrize(("training", "inference"), [(2, 4), (4, 2), (1, 4)])
def test_the_example_copies_shards_to_another_tp(tmp_path: Path, training: int, inference: int) -> None:
    model = save_causal("mixtral", tmp_path / "model")
    one, other = (shardconv.plan(model, tp, check=False) for tp in (training, inference))
    values = numbered(one)
    held = {rank: local_tensors(one, values, rank) for rank in range(training)}
    for rank in range(inference):
        found = example().copy_shards(shard_boxes(one), held, shard_boxes(other), rank)
        wanted = local_tensors(other, values, rank)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_causal("llama", tmp_path / "model")
    assert cli.run(["plan", str(model), "--tp", "2", "--format", "shards", "-q"]) == 0
    document = json.loads(capsys.readouterr().out)
    stored = load_file(model / "model.safetensors")
    assert (document["format"], document["tp"]) == ("shardconv.shards", 2)
    assert {name: found["shape"] for name, found in document["parameters"].items()} == {
        name: list(tensor.shape) for name, tensor in stored.items()
    }


def test_the_docs_show_the_loop_of_the_example() -> None:
    text = (ROOT / "docs" / "plan-format.md").read_text()
    shown = text.partition("<!-- the loop of examples/copy_shards.py -->\n```python\n")[2].partition("```")[0]
    assert textwrap.indent(shown, "    ") in (ROOT / "examples" / "copy_shards.py").read_text()
