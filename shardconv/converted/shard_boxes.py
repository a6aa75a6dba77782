"""A plan as boxes: for each parameter and rank, which part of the global tensor the rank holds, as JSON.

For programs that move weights between processes that are sharded in different ways, such as from training to
inference. ``docs/plan-format.md`` has the format.
"""

from __future__ import annotations

import json
from typing import Any

from shardconv_runtime.format.plan import ParameterPlan, Plan, global_shape, local_shape
from shardconv_runtime.format.stored_layout import stored_plans
from shardconv_runtime.saving.dcp_boxes import full_window, held_boxes

FORMAT = "shardconv.shards"
VERSION = 1


def shard_boxes(plan: Plan) -> dict[str, Any]:
    """The document: ``parameters`` has dtype, global shape, and the shards of all ranks by name.

    A packed parameter is there as its stored tensors, by the names that they have in a converted directory.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "tp": plan.tp,
        "tied": dict(plan.tied),
        "parameters": {name: _parameter(plan, entry) for name, entry in stored_plans(plan).items()},
    }


def dumps(plan: Plan) -> str:
    """The document as text, one parameter in each line."""
    found = shard_boxes(plan)
    parameters = found.pop("parameters")
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items()]
    each = [f"    {json.dumps(name)}: {json.dumps(value)}" for name, value in parameters.items()]
    return "{\n" + ",\n".join(lines) + ',\n  "parameters": {\n' + ",\n".join(each) + "\n  }\n}\n"


def _parameter(plan: Plan, entry: ParameterPlan) -> dict[str, Any]:
    return {
        "dtype": entry.dtype,
        "shape": list(global_shape(entry)),
        "ranks": [_shard(plan, entry, rank) for rank in range(plan.tp)],
    }


def _shard(plan: Plan, entry: ParameterPlan, rank: int) -> dict[str, Any]:
    boxes = held_boxes(entry, plan.mesh, rank, full_window(entry, plan.mesh, rank))
    return {
        "shape": list(local_shape(entry, plan.mesh, rank)),
        "boxes": [
            {
                "offsets": list(box.offsets),
                "sizes": list(box.sizes),
                "local_offsets": list(box.local_offsets),
            }
            for box in boxes
        ],
    }
