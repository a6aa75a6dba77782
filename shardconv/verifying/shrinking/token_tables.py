"""Tables that are looked up by token ids, of which a smaller model has fewer rows.

The ids are an input of the model. Other code may compare them with special ids that are attributes of
modules: these are mapped like the tokens. Where ids are used in any other way, the table keeps its rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from shardconv_runtime.format.dims import Leaf
from shardconv_runtime.format.slices import share
from torch import Tensor

from ...tracing.ints import TracedInt, traced_ints
from ...tracing.tape import Mark, Op, Tape

_PASSING = frozenset(
    f"aten.{name}"
    for name in (
        "alias", "clone", "contiguous", "detach", "expand", "flatten", "reshape", "select", "slice",
        "squeeze", "to", "_to_copy", "unbind", "unsqueeze", "view", "_unsafe_view",
    )
)  # fmt: skip
"""Operators whose result has the ids of their operand."""
_COMPARING = frozenset(("aten.eq", "aten.ne", "aten.isin"))
_FILLING = frozenset(("aten.masked_fill", "aten.where"))
_SHAPING = frozenset(f"aten.{n}" for n in ("zeros_like", "ones_like", "full_like", "new_ones", "new_zeros"))


@dataclass(frozen=True)
class TokenUse:
    """What a model does with the token ids that it is given."""

    tables: frozenset[int]
    """The parameters and buffers that are looked up by token ids alone, whose ids may be mapped."""
    inputs: frozenset[int]
    """Inputs that are looked up, and not used in other ways."""
    special: Mapping[tuple[str, str], int]
    """Attributes that token ids are compared with: (FQN of the module, attribute) -> id."""
    num_rows: Mapping[int, int]
    """Inputs that are looked up, however else they are used -> rows of the smallest table."""


def token_use(tape: Tape) -> TokenUse:
    """Walks the tape; ask once."""
    tokens, spoiled = _tokens(tape)
    tables: dict[int, bool] = {}
    num_rows: dict[int, int] = {}
    for event in tape.events:
        if isinstance(event, Op) and _looks_up(tape, event):
            table, origin = event.inputs[0], tokens.get(event.inputs[-1])
            tables[table] = tables.get(table, True) and origin is not None and origin not in spoiled
            if origin is not None:
                rows = tape.tensors[table].shape[0]
                num_rows[origin] = min(rows, num_rows.get(origin, rows))
    return TokenUse(
        frozenset(table for table, is_right in tables.items() if is_right),
        frozenset(num_rows) - spoiled,
        _special_ids(tape, tokens),
        num_rows,
    )


def _looks_up(tape: Tape, op: Op) -> bool:
    """Whether an operator takes the rows of a table that its last input names."""
    if op.name.startswith("aten.embedding."):
        return True
    stored = tape.tensors[op.inputs[0]].kind in ("parameter", "buffer") if op.inputs else False
    return stored and op.name.startswith("aten.index.") and len(op.inputs) == 2 and op.args[1][0] is not None


def _special_ids(tape: Tape, tokens: Mapping[int, int]) -> dict[tuple[str, str], int]:
    compared = {
        t
        for e in tape.events
        if isinstance(e, Op) and e.name.rsplit(".", 1)[0].rstrip("_") in (_COMPARING | _FILLING)
        for t in e.outputs
        if any(i in tokens for i in e.inputs)
    }
    found = [
        number.expr
        for replay in tape.replays
        if compared.intersection(replay.outputs)
        for number in traced_ints((replay.args, replay.kwargs))
    ]
    return {(expr[1], expr[2]): int(expr[3]) for expr in found if expr[0] == "attr"}


def _tokens(tape: Tape) -> tuple[dict[int, int], set[int]]:
    """Tensors of token ids -> the input that they come from; inputs whose ids are used in other ways."""
    tokens = {t: t for t in tape.inputs if not tape.tensors[t].dtype.is_floating_point}
    spoiled: set[int] = set()
    traced = {
        t for r in tape.replays if any(True for _ in traced_ints((r.args, r.kwargs))) for t in r.outputs
    }
    zeros: set[int] = set()
    for event in tape.events:
        if isinstance(event, Mark):
            if event.source in tokens:
                tokens[event.target] = tokens[event.source]
            continue
        if event.name.startswith("aten.scalar_tensor.") and event.args[0] == 0:
            zeros.update(event.outputs)
        for tid in (t for t in event.inputs if t in tokens):
            base = event.name.rsplit(".", 1)[0].rstrip("_")
            is_first = tid == event.inputs[0]
            is_passed = base == "aten.index" or (base == "aten.index_put" and event.inputs[-1] in zeros)
            if (
                base in _PASSING
                or (is_first and is_passed)
                or (base in _FILLING and _fills_a_known_id(event, traced))
            ):
                tokens.update(dict.fromkeys(event.outputs, tokens[tid]))
            elif not (
                base in _SHAPING
                or (_looks_up(tape, event) and tid != event.inputs[0])
                or (base in _COMPARING and _compares_a_known_id(event, traced))
            ):
                spoiled.add(tokens[tid])
    return tokens, spoiled


def _compares_a_known_id(op: Op, traced: set[int]) -> bool:
    return traced.issuperset(op.outputs) or any(isinstance(a, int) and a < 0 for a in op.args)


def _fills_a_known_id(op: Op, traced: set[int]) -> bool:
    return traced.issuperset(op.outputs) or any(a == 0 for a in op.args if type(a) in (int, TracedInt))


@dataclass(frozen=True)
class FewerTokens:
    """Which token of a smaller vocabulary stands for each token: those of one rank stay on one rank."""

    ids: Mapping[int, int]

    def tensor(self, ids: Tensor) -> Tensor:
        """Token ids of any shape, int; negative ones are no tokens, and stay."""
        return ids.clone().apply_(lambda i: self.ids.get(i, i)) if ids.numel() else ids


def fewer_tokens(used: Sequence[int], size: int, small: int, parts: int) -> FewerTokens | None:
    """Map the tokens in use; None if they are too many.

    Args:
        used: token ids.
        size: of the vocabulary.
        small: size of the smaller one.
        parts: ranks among which both are divided.
    """
    tokens = sorted({i for i in used if 0 <= i < size})
    out: dict[int, int] = {}
    for part in range(parts):
        first, end = share(Leaf(size, (0,)), (parts,), part)
        start, stop = share(Leaf(small, (0,)), (parts,), part)
        inside = [i for i in tokens if first <= i < end]
        if len(inside) > stop - start:
            return None
        for index, token in enumerate(inside):
            wanted = start + (token - first) % (stop - start)
            start = min(max(wanted, start), stop - len(inside) + index) + 1
            out[token] = start - 1
    return FewerTokens(out)


def token_inputs(
    use: TokenUse, tape: Tape, names: Sequence[str], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Those of the inputs that are looked up in a table of tokens."""
    found = {name for tid, name in zip(tape.inputs, names, strict=True) if tid in use.inputs}
    return {n: t for n, t in tensors.items() if n in found and t.dtype in (torch.int64, torch.int32)}


def beyond_tables(tape: Tape, names: Sequence[str], tensors: Mapping[str, Tensor]) -> str:
    """Which ids of the inputs lie beyond the table in which they are looked up; empty if none does."""
    use = token_use(tape)
    for tid, name in zip(tape.inputs, names, strict=True):
        rows = use.num_rows.get(tid)
        beyond = {i for i in tensors[name].flatten().tolist() if i >= rows} if rows is not None else set()
        if beyond:
            known = {a.rpartition(".")[2]: i for (_, a), i in use.special.items() if i in beyond}
            ids = ", ".join(f"{attribute}={i}" for attribute, i in known.items()) or f"{name} {min(beyond)}"
            return f"{ids} lies beyond the vocabulary of {rows} rows; correct config.json"
    return ""
