"""Weights of one set of ranks into the shards of another, by ``shardconv export MODEL --format shards``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def copy_shards(
    source: Mapping[str, Any], held: Mapping[int, Mapping[str, Tensor]], target: Mapping[str, Any], rank: int
) -> dict[str, Tensor]:
    """The tensors of a rank of ``target``, made of what ranks of ``source`` hold.

    Args:
        source, target: the shards of the two plans, as JSON.
        held: the local tensors of the ranks of ``source``; in a real program, each is sent by its rank.
        rank: of ``target``.
    """
    made = {}
    for name, parameter in target["parameters"].items():
        shard, shards = parameter["ranks"][rank], source["parameters"][name]["ranks"]
        made[name] = next(iter(held.values()))[name].new_zeros(shard["shape"])
        for to in shard["boxes"]:
            for other, at in ((r, box) for r in held for box in shards[r]["boxes"]):
                low = list(map(max, to["offsets"], at["offsets"]))
                high = [min(end(to, dim), end(at, dim)) for dim in range(len(low))]
                if all(map(int.__lt__, low, high)):
                    made[name][window(to, low, high)] = held[other][name][window(at, low, high)]
    return made


def end(box: Mapping[str, Any], dim: int) -> int:
    """One past its last position in a dim of the global tensor."""
    end: int = box["offsets"][dim] + box["sizes"][dim]
    return end


def window(box: Mapping[str, Any], low: list[int], high: list[int]) -> tuple[slice, ...]:
    """Where global positions of a box are in the local tensor."""
    shift = [a - b for a, b in zip(box["local_offsets"], box["offsets"], strict=True)]
    return tuple(slice(a + s, b + s) for a, b, s in zip(low, high, shift, strict=True))
