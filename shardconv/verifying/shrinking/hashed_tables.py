"""Tables that are looked up by hashes, of which a smaller model has fewer rows.

The hashes are remainders by an attribute of a module. Where that divides the rows of the table, such as one
part of it for each hash function, a smaller attribute gives ids of a smaller table.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...tracing.ints import traced_ints
from ...tracing.tape import Mark, Op, Tape, TensorInfo


@dataclass(frozen=True, slots=True)
class HashedTable:
    """How the ids of a table are made."""

    fqn: str
    attribute: str
    """Of the module: what hashes are reduced by."""
    value: int
    """Of the attribute."""


def hashed_tables(tape: Tape) -> dict[int, HashedTable]:
    """The parameters that are looked up by hashes alone, and what these are reduced by."""
    made = _remainders(tape)
    tables: dict[int, set[HashedTable | None]] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            if event.source in made:
                made[event.target] = made[event.source]
        elif event.name.startswith("aten.embedding."):
            tables.setdefault(event.inputs[0], set()).add(made.get(event.inputs[-1]))
        elif known := [made[t] for t in event.inputs if t in made]:
            shape = tape.tensors[event.inputs[0]].shape
            made.update((t, known[0]) for t in event.outputs if _is_like(tape.tensors[t], shape))
    out: dict[int, HashedTable] = {}
    for table, found in tables.items():
        (how, *others) = found
        if how is not None and not others and tape.tensors[table].shape[0] % how.value == 0:
            out[table] = how
    return out


def _remainders(tape: Tape) -> dict[int, HashedTable]:
    """Tensors that are remainders by an attribute."""
    makers = {t: e for e in tape.events if isinstance(e, Op) for t in e.outputs}
    out: dict[int, HashedTable] = {}
    for replay in tape.replays:
        numbers = list(traced_ints((replay.args, replay.kwargs)))
        if len(numbers) != 1 or numbers[0].expr[0] != "attr":
            continue
        _, fqn, attribute, value = numbers[0].expr
        for tid in replay.outputs:
            if tid in makers and makers[tid].name.startswith("aten.remainder."):
                out[tid] = HashedTable(fqn, attribute, value)
    return out


def _is_like(info: TensorInfo, shape: tuple[int, ...]) -> bool:
    """Whether these are ints of one shape, as hashes with an offset are."""
    return not info.dtype.is_floating_point and info.shape == shape
