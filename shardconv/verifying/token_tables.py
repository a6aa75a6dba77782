"""Find tables that are looked up by token ids, of which a smaller model has fewer rows.

The ids are an input of the model. Other code may compare them with special ids that are attributes of
modules; these are mapped like the tokens. Code may also compare ids with the size of a table. If ids are used
in any other way, the table keeps its rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.slices import share
from torch import Tensor

from ..tracing.functions import TracedInt, traced_ints
from ..tracing.tape import Mark, Op, Tape
from ..tracing.values import VALUE_FREE

# Tables may also be looked up by hashes, which are remainders modulo an attribute of a module.
#
# If the attribute divides the rows of the table (one part of the table for each hash function), a smaller
# attribute gives ids of a smaller table.


@dataclass(frozen=True, slots=True)
class HashedTable:
    """How the ids of a hashed table are computed."""

    fqn: str
    attribute: str
    """The attribute of the module that hashes are reduced by."""
    value: int
    """Value of the attribute."""


def hashed_tables(tape: Tape) -> dict[int, HashedTable]:
    """Return the parameters that are looked up only by hashes, and how these are computed."""
    made: dict[int, HashedTable] = {}
    """Tensors that are remainders by an attribute, or such a remainder with an offset."""
    makers = {t: e for e in tape.events if isinstance(e, Op) for t in e.outputs}
    for replay in tape.replays:
        numbers = list(traced_ints((replay.args, replay.kwargs)))
        if len(numbers) != 1 or numbers[0].expr[0] != "attr":
            continue
        _, fqn, attribute, value = numbers[0].expr
        for tid in replay.outputs:
            if tid in makers and makers[tid].base == "aten.remainder":
                made[tid] = HashedTable(fqn, attribute, value)
    tables: dict[int, set[HashedTable | None]] = {}
    for event in tape.events:
        if isinstance(event, Mark):
            if event.source in made:
                made[event.target] = made[event.source]
        elif event.base == "aten.embedding":
            tables.setdefault(event.inputs[0], set()).add(made.get(event.inputs[-1]))
        elif tables_read := [made[t] for t in event.inputs if t in made]:
            shape = tape.tensors[event.inputs[0]].shape
            for tid in event.outputs:
                if not tape.tensors[tid].dtype.is_floating_point and tape.tensors[tid].shape == shape:
                    made[tid] = tables_read[0]
    out: dict[int, HashedTable] = {}
    for table, hashes in tables.items():
        (how, *rest) = hashes
        if how is not None and not rest and tape.tensors[table].shape[0] % how.value == 0:
            out[table] = how
    return out


_PASSING = frozenset(
    f"aten.{name}"
    for name in (
        "alias", "clone", "contiguous", "detach", "expand", "flatten", "flip", "permute", "repeat", "reshape",
        "roll", "select", "slice", "squeeze", "t", "to", "_to_copy", "transpose", "unbind", "unsqueeze",
        "view", "_unsafe_view",
    )
)  # fmt: skip
"""Operators whose result contains the ids of their operand."""
_COMPARING = frozenset(("aten.eq", "aten.ne", "aten.isin"))
_BOUNDING = frozenset(f"aten.{name}" for name in ("ge", "gt", "le", "lt"))
_FILLING = frozenset(("aten.masked_fill", "aten.where"))
_ZEROS = frozenset(("aten.zeros", "aten.zeros_like", "aten.new_zeros"))
_FULL = {"aten.scalar_tensor": 0, "aten.full": 1, "aten.full_like": 1, "aten.new_full": 2}
"""Operators that fill a tensor with one number -> the position of this argument."""


@dataclass(frozen=True, slots=True)
class SpecialId:
    """A token id that is stored in an attribute."""

    id: int
    input: int
    """The input whose tokens are compared with it."""


@dataclass(frozen=True)
class TokenUse:
    """How a model uses its token ids."""

    tables: frozenset[int]
    """Parameters and buffers that are looked up only by token ids that may be mapped."""
    inputs: Mapping[int, frozenset[int]]
    """Inputs that are only looked up -> the tables in which they are."""
    special: Mapping[tuple[str, str], SpecialId]
    """(FQN of a module, attribute) that token ids are compared with."""
    fixed: Mapping[int, frozenset[int]]
    """Inputs -> ids that code adds to them; tables -> constant ids that code looks up. These are not
    mapped."""
    num_rows: Mapping[int, int]
    """All inputs that are looked up -> rows of the smallest table."""


def token_use(tape: Tape) -> TokenUse:
    """Find out how a model uses its token ids. This walks the tape, so call it once."""
    flow = _flow(tape)
    tables: dict[int, bool] = {}
    looked_up: dict[int, set[int]] = {}
    for event in tape.events:
        if isinstance(event, Op) and _looks_up(tape, event):
            table, origin = event.inputs[0], flow.tokens.get(event.inputs[-1])
            constant = flow.constants.get(event.inputs[-1])
            tables[table] = tables.get(table, True) and (origin is not None or constant is not None)
            if constant is not None:
                flow.fixed.setdefault(table, set()).add(constant)
            if origin is not None:
                looked_up.setdefault(origin, set()).add(table)
    num_rows = {origin: min(tape.tensors[t].shape[0] for t in tids) for origin, tids in looked_up.items()}
    bounded = {origin for origin, least in flow.bounds if least < num_rows.get(origin, 0)}
    inputs = {i: frozenset(tids) for i, tids in looked_up.items() if i not in flow.spoiled | bounded}
    spoiled = {t for i, tids in looked_up.items() if i not in inputs for t in tids}
    return TokenUse(
        frozenset(table for table, is_right in tables.items() if is_right and table not in spoiled),
        inputs,
        _special_ids(tape, flow.tokens),
        {tid: frozenset(ids) for tid, ids in flow.fixed.items()},
        num_rows,
    )


def _looks_up(tape: Tape, op: Op) -> bool:
    """Return whether an operator looks up rows of a table by its last input."""
    if op.base == "aten.embedding":
        return True
    stored = tape.tensors[op.inputs[0]].kind in ("parameter", "buffer") if op.inputs else False
    return stored and op.base == "aten.index" and len(op.inputs) == 2 and op.args[1][0] is not None


def _special_ids(tape: Tape, tokens: Mapping[int, int]) -> dict[tuple[str, str], SpecialId]:
    compared = {
        t: next(tokens[i] for i in e.inputs if i in tokens)
        for e in tape.events
        if isinstance(e, Op) and e.base.rstrip("_") in (_COMPARING | _FILLING)
        for t in e.outputs
        if any(i in tokens for i in e.inputs)
    }
    ids = [
        (number.expr, compared[output])
        for replay in tape.replays
        for output in [t for t in replay.outputs if t in compared][:1]
        for number in traced_ints((replay.args, replay.kwargs))
    ]
    return {(e[1], e[2]): SpecialId(int(e[3]), origin) for e, origin in ids if e[0] == "attr"}


@dataclass
class _Flow:
    """The paths of token ids through a tape."""

    tokens: dict[int, int]
    """Tensors of ids -> the input that they come from."""
    spoiled: set[int]
    """Inputs whose ids are used in other ways."""
    bounds: list[tuple[int, int]]
    """(input, the least number above all ids for which a comparison has the same result)."""
    fixed: dict[int, set[int]]
    """Input -> ids that code adds."""
    constants: dict[int, int]
    """Tensors that are filled with one number."""


def _flow(tape: Tape) -> _Flow:
    tokens = {t: t for t in tape.inputs if not tape.tensors[t].dtype.is_floating_point}
    constants: dict[int, int] = {}
    flow = _Flow(tokens, set(), [], {}, constants)
    traced = {
        t for r in tape.replays if any(True for _ in traced_ints((r.args, r.kwargs))) for t in r.outputs
    }
    for event in tape.events:
        if isinstance(event, Mark):
            for table in (tokens, constants):
                if event.source in table:
                    table[event.target] = table[event.source]
            continue
        base = event.base.rstrip("_")
        constant = _constant(base, event)
        if constant is None and base in _PASSING and event.inputs:
            constant = constants.get(event.inputs[0])
        if constant is not None:
            constants.update(dict.fromkeys(event.outputs, constant))
        for tid in (t for t in event.inputs if t in tokens):
            is_first = tid == event.inputs[0]
            is_passed = base == "aten.index" or (
                base == "aten.index_put" and constants.get(event.inputs[-1]) == 0
            )
            added = _added_id(base, event)
            if added is not None:
                flow.fixed.setdefault(tokens[tid], set()).add(added)
            if (
                base in _PASSING
                or (is_first and is_passed)
                or (base in _FILLING and _fills_a_known_id(event, traced, constants))
                or added is not None
            ):
                tokens.update(dict.fromkeys(event.outputs, tokens[tid]))
            elif base in _BOUNDING and (bound := _bound(base, event)) is not None:
                flow.bounds.append((tokens[tid], bound))
            elif not (
                base in VALUE_FREE
                or (_looks_up(tape, event) and tid != event.inputs[0])
                or (base in _COMPARING and _compares_a_known_id(event, traced))
            ):
                flow.spoiled.add(tokens[tid])
    return flow


def _constant(base: str, op: Op) -> int | None:
    """Return the number with which an operator fills a tensor."""
    if base in _ZEROS:
        return 0
    value = op.args[_FULL[base]] if base in _FULL and len(op.args) > _FULL[base] else None
    return int(value) if isinstance(value, (int, TracedInt)) and not isinstance(value, bool) else None


def _added_id(base: str, op: Op) -> int | None:
    """Return the id with which an operator pads."""
    if base != "aten.constant_pad_nd":
        return None
    value = op.args[2] if len(op.args) > 2 else 0
    return int(value) if value >= 0 and value == int(value) else None


def _bound(base: str, op: Op) -> int | None:
    """Return the end of the range of ids from 0 for which a comparison has the same result; None if
    unknown."""
    number = op.args[1]
    if len(op.inputs) != 1 or type(number) not in (int, TracedInt):
        return None
    first = int(number) + (base in ("aten.gt", "aten.le"))  # the first id with another result
    return first if first > 0 else sys.maxsize


def _compares_a_known_id(op: Op, traced: set[int]) -> bool:
    return traced.issuperset(op.outputs) or any(isinstance(a, int) and a < 0 for a in op.args)


def _fills_a_known_id(op: Op, traced: set[int], constants: Mapping[int, int]) -> bool:
    is_zero = any(a == 0 for a in op.args if type(a) in (int, TracedInt))
    is_zero = is_zero or any(constants.get(t) == 0 for t in op.inputs)
    return traced.issuperset(op.outputs) or is_zero


@dataclass(frozen=True)
class FewerTokens:
    """A map of tokens to a smaller vocabulary. Tokens of one rank stay on this rank."""

    ids: Mapping[int, int]

    def tensor(self, ids: Tensor) -> Tensor:
        """Map token ids of any shape. Negative ids are not tokens, and stay."""
        return ids.clone().apply_(lambda i: self.ids.get(i, i)) if ids.numel() else ids


def fewer_tokens(
    used: Sequence[int],
    size: int,
    small: int,
    parts: int,
    *,
    alone: Collection[int] = (),
    fixed: Collection[int] = (),
) -> FewerTokens | None:
    """Map the tokens in use, to different ones as far as there are enough."""
    alone = {*alone, *fixed}
    tokens = sorted({i for i in (*used, *alone) if 0 <= i < size})
    out: dict[int, int] = {}
    for part in range(parts):
        first, end = share(Leaf(size, (0,)), (parts,), part)
        start, stop = share(Leaf(small, (0,)), (parts,), part)
        inside = [i for i in tokens if first <= i < end]
        crowd = []
        if len(inside) > stop - start:
            crowd = [i for i in inside if i not in alone]
            inside = [i for i in inside if i in alone]
        if len(inside) > stop - start - bool(crowd):
            return None
        least = start  # no id grows: code may take a larger one for a size
        for index, token in enumerate(inside):
            new_token = start + (token - first) % (stop - start)
            out[token] = min(max(new_token, least), stop - len(inside) + index)
            least = out[token] + 1
        left = sorted({*range(start, stop)}.difference(out.values()))
        out.update(zip(crowd, itertools.cycle(left)))
    return FewerTokens(out) if all(out.get(i) == i for i in fixed) else None


def beyond_tables(tape: Tape, names: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    """Describe input ids that are beyond the table in which they are looked up; empty if there are none."""
    use = token_use(tape)
    for tid, name in zip(tape.inputs, names, strict=True):
        rows = use.num_rows.get(tid)
        beyond = {i for i in tensors[name].flatten().tolist() if i >= rows} if rows is not None else set()
        if beyond:
            ids_beyond = {a.rpartition(".")[2]: s.id for (_, a), s in use.special.items() if s.id in beyond}
            ids = (
                ", ".join(f"{attribute}={i}" for attribute, i in ids_beyond.items())
                or f"{name} {min(beyond)}"
            )
            return (
                f"{ids} lies beyond the vocabulary of {rows} rows; correct the example inputs, or config.json"
            )
    return ""
