"""Which borders to cut at: those that share out bytes and work most evenly."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shardconv_runtime.errors import ShardconvError


@dataclass(frozen=True)
class StageLoad:
    """What lies between two borders."""

    num_bytes: int
    """Of parameters."""
    work: float
    """Multiplications for a token."""

    def __add__(self, other: StageLoad) -> StageLoad:
        return StageLoad(self.num_bytes + other.num_bytes, self.work + other.work)


NOTHING = StageLoad(0, 0.0)


def balanced(loads: Sequence[StageLoad], allowed: Sequence[bool], num_stages: int) -> list[int]:
    """The cuts for which the largest load of a stage, relative to the mean, is smallest.

    The load of a stage is the larger one of its shares of all bytes and of all work. Of cuts that are equal
    in that, those with the smallest sum of squares are taken. Exact, by dynamic programming.

    Args:
        loads: of the stretches between borders: one more than there are borders.
        allowed: for each border, whether the tape can be cut there.
        num_stages: one more than there are cuts.

    Returns:
        Indices of borders, ascending.

    Raises:
        ShardconvError: there are fewer allowed borders than cuts.
    """
    if sum(allowed) < num_stages - 1:
        raise ShardconvError(
            f"the model can be cut at {sum(allowed)} places, which makes {sum(allowed) + 1} stages at most, "
            f"not {num_stages}; give a smaller --pp"
        )
    sums = list(itertools.accumulate(loads, initial=NOTHING))
    total = sums[-1]

    def cost(start: int, stop: int) -> float:
        num_bytes = (sums[stop].num_bytes - sums[start].num_bytes) / max(1, total.num_bytes)
        return max(num_bytes, (sums[stop].work - sums[start].work) / max(1.0, total.work))

    places = [0, *(i + 1 for i, ok in enumerate(allowed) if ok), len(loads)]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        found: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for stop in places[1:] if stage < num_stages - 1 else places[-1:]:
            for start, (worst, squares, cuts) in best.items():
                if start < stop:
                    own = cost(start, stop)
                    candidate = (max(worst, own), squares + own * own, (*cuts, stop))
                    found[stop] = min(found.get(stop, candidate), candidate)
        best = found
    return [stop - 1 for stop in best[len(loads)][2][:-1]]


def parse_stages(text: str, num_layers: int) -> list[int]:
    """The borders of stages that are given as ``0-39,40-79``.

    Args:
        text: first and last layer of each stage, in order, with all layers.
        num_layers: of the model; they are counted in the order in which they run.

    Returns:
        For each stage but the last, the index of its last layer.

    Raises:
        ShardconvError: the text is not such a list.
    """
    expected, borders = 0, []
    for item in text.split(","):
        first, _, last = item.strip().partition("-")
        if not first.isdigit() or not (last or first).isdigit() or int(first) != expected:
            raise _malformed(text, num_layers)
        expected = int(last or first) + 1
        borders.append(expected - 1)
        if expected <= int(first):
            raise _malformed(text, num_layers)
    if expected != num_layers:
        raise _malformed(text, num_layers)
    return borders[:-1]


def _malformed(text: str, num_layers: int) -> ShardconvError:
    return ShardconvError(
        f"{text!r} does not share out the {num_layers} layers 0 to {num_layers - 1}; give the layers of each "
        f"stage, as 0-{num_layers // 2 - 1},{num_layers // 2}-{num_layers - 1}"
    )
