"""Find a smaller model of the same code, and compare it with the traced one operator by operator.

Whether a plan is right does not depend on the width of a model. The smaller model has a small hidden size,
small feed-forward sizes and a small vocabulary, but the heads, experts and layers of the large one. It is
found like the model of a rank: by attribute overrides with which the model's own code runs on other shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from shardconv_runtime.errors import ShardconvError
from shardconv_runtime.format.plan import AttributeOverride
from shardconv_runtime.parallel.attribute_overrides import apply_overrides
from shardconv_runtime.parallel.build import owner_of, stored_tensors
from torch import nn

from ..dim_analysis.analysis import Analysis
from ..dim_analysis.dim_trees import Node, leaves
from ..dim_analysis.rules import RULES
from ..inputs.trace_inputs import TraceInputs
from ..planning.conflict import Conflict
from ..planning.localize import Attribute, Change, localized
from ..planning.solution import stand_in
from ..simulation.layer_bypass import Bypass, bypassed_copy
from ..simulation.random_weights import fill
from ..tracing.fold import Folded
from ..tracing.functions import sources, traced_ints
from ..tracing.tape import Mark, Tape, prefixes, starred
from ..tracing.trace import trace
from .leaf_groups import LeafGroup
from .retrace import compare_tapes
from .small_shapes import SmallShapes, activation_elements
from .token_tables import FewerTokens, TokenUse, fewer_tokens

Changes = Mapping[Attribute, Change]
_LARGE = 1 << 25
"""Elements of all activations."""


@dataclass(frozen=True, slots=True)
class Resized:
    """Global shapes of a tensor."""

    before: tuple[int, ...]
    """The value in the model that the plan is for."""
    after: tuple[int, ...]


@dataclass(frozen=True)
class FullModel:
    """A traced model at its true size."""

    model: nn.Module
    """The model, on meta."""
    inputs: TraceInputs
    folded: Folded
    analysis: Analysis
    """The analysis of the folded tape."""
    resized: Mapping[str, Resized] = field(default_factory=dict)
    """Stored tensors that have other shapes than in the model that the plan is for, by FQN."""


@dataclass(frozen=True)
class SmallModel:
    """A model that runs the code of the full one on smaller shapes."""

    model: nn.Module
    """The smaller model on meta, without the layers that are left out."""
    inputs: TraceInputs
    shapes: SmallShapes
    changes: Changes
    """Changes of attributes, by the layers that represent others."""
    stand_ins: Mapping[str, str]
    """Layer -> the layer that represents it."""
    resized: Mapping[str, Resized] = field(default_factory=dict)
    """The sizes that changed, as in ``FullModel``."""


class Attempt:
    """One choice of sizes."""

    def __init__(
        self,
        full: FullModel,
        tp: int,
        skipped: Mapping[str, Bypass],
        use: TokenUse,
        sizes: Mapping[LeafGroup, int],
    ) -> None:
        self.full = full
        self.tp = tp
        self.skipped = skipped
        self.use = use
        self.sizes = sizes
        self.tape = full.analysis.tape
        self.stand_ins = full.folded.representatives()
        self.compared: dict[Attribute, list[int]] = {}
        """Attributes that code only compares -> smaller values that were not tried yet."""
        self.shapes = SmallShapes.of(full.analysis, sizes)

    def run(self) -> SmallModel | Conflict:
        """Return the smaller model, or a conflict with leaves that must keep their size."""
        model = bypassed_copy(self.full.model, self.skipped)
        if not self.sizes:
            return self._small(model, self.full.inputs, {})
        tokens = self._tokens()
        if isinstance(tokens, Conflict):
            return tokens
        settled = self._settled(tokens)
        attributes = localized(self.shapes, given={a: c.local for a, c in settled.items()})
        if isinstance(attributes, Conflict):
            return attributes
        changes = {**settled, **attributes}
        # Attributes of the model itself that hold the number of logits change too. Losses read them untraced.
        out: dict[Attribute, Change] = {}
        for group in (g for g in self.sizes if g.rows):
            for path, value in _ints(model):
                if ("", path) not in changes and value == group.size:
                    out["", path] = Change(group.size, self.sizes[group])
        changes |= out
        try:
            self._apply(model, changes)
        except ShardconvError as error:
            return Conflict((), str(error))
        named = zip(self.tape.inputs, self.full.inputs.tensors.items(), strict=True)
        mapped = {name: tokens[tid].tensor(t) if tid in tokens else t for tid, (name, t) in named}
        inputs = replace(self.full.inputs, tensors=mapped)
        return self._difference(model, inputs, changes) or self._small(
            model, self._fewer_rows(model, inputs), changes
        )

    def _small(self, model: nn.Module, inputs: TraceInputs, changes: Changes) -> SmallModel:
        return SmallModel(model, inputs, self.shapes, changes, self.stand_ins, self.full.resized)

    def _fewer_rows(self, model: nn.Module, inputs: TraceInputs) -> TraceInputs:
        """Keep one row of inputs if the activations are large, for example of images and sounds."""
        if activation_elements(self.shapes) > _LARGE:
            for tensors in single_rows(inputs.tensors):
                try:
                    trace(model, tensors, RULES, inputs.options)
                except ShardconvError:
                    continue  # the model does not accept this row
                return replace(inputs, tensors=tensors)
        return inputs

    # Tokens ----------------------------------------------------------------------------------

    def _tokens(self) -> Mapping[int, FewerTokens] | Conflict:
        """Choose the tokens of the smaller vocabularies, by input; a conflict if one has too few."""
        out: dict[int, FewerTokens] = {}
        inputs = dict(zip(self.tape.inputs, self.full.inputs.tensors.values(), strict=True))
        paddings = {table: padding for (table, _), padding in self._padding_ids.items()}
        for tid, tables in self.use.inputs.items():
            is_smaller = any(map(self.shapes.is_changed, tables))
            if not is_smaller or inputs[tid].dtype not in (torch.int64, torch.int32):
                continue
            sizes = {t: self.tape.tensors[t].shape[0] for t in tables}
            rows = {t: self.shapes.local_shape(t)[0] for t in tables}
            table = min(rows, key=lambda t: (rows[t], sizes[t]))
            alone = [special.id for special in self.use.special.values() if special.input == tid]
            alone += [paddings[t] for t in tables if t in paddings]
            used = [*inputs[tid].flatten().tolist(), *alone]
            fixed = {i for t in (tid, *tables) for i in self.use.fixed.get(t, ())}
            tokens = fewer_tokens(used, sizes[table], rows[table], self.tp, alone=alone, fixed=fixed)
            if tokens is None or any(sizes[table] <= i < max(sizes.values()) for i in used):
                return Conflict(tuple(leaves(self.full.analysis.dims[table][0])), "tokens")
            out[tid] = tokens
        return out

    @cached_property
    def _padding_ids(self) -> dict[tuple[int, str], int]:
        """Tables of tokens and FQNs of the modules that have or share them -> the modules' padding ids."""
        model = self.full.model
        tables = {getattr(*owner_of(model, self.tape.tensors[t].name)): t for t in self.use.tables}
        return {
            (tables[tensor], fqn): module.padding_idx
            for fqn, module in model.named_modules()
            if isinstance(getattr(module, "padding_idx", None), int)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if tensor in tables
        }

    def _settled(self, tokens: Mapping[int, FewerTokens]) -> dict[Attribute, Change]:
        """Return the changes that are known without a search: ids, sizes of norms, and divisors of hashes."""
        out: dict[Attribute, Change] = {}
        for attribute, special in self.use.special.items():
            if special.input in tokens:
                small = tokens[special.input].ids.get(special.id, special.id)
                if small != special.id:
                    out[attribute] = Change(special.id, small)
        for (table, fqn), padding in self._padding_ids.items():
            ids = next((m.ids for i, m in tokens.items() if table in self.use.inputs[i]), {})
            if ids.get(padding, padding) != padding:
                out[fqn, "padding_idx"] = Change(padding, ids[padding])
        # The search does not see attributes inside of norms, since a norm is one operator.
        sites = {use.site.fqn: use for use in self.full.analysis.norms}
        for replay in self.tape.replays:
            use = sites.get(replay.fqn)
            for number in traced_ints((replay.args, replay.kwargs)) if use else ():
                for _, fqn, name, value in (s for s in sources(number.expr) if s[0] == "attr"):
                    assert use is not None
                    nodes = [*self.full.analysis.dims[use.site.output], use.normalized]
                    sizes = {self.shapes.size(n) for n in nodes if n.size == value}
                    if len(sizes) == 1 and sizes != {value}:
                        out[fqn, name] = Change(value, sizes.pop())
        for group, size in self.sizes.items():
            if (hashed := group.hashed) is not None:
                change = Change(hashed.value, size * hashed.value // group.size)
                out[hashed.fqn, hashed.attribute] = change
        return out

    # The model -------------------------------------------------------------------------------

    def _apply(self, model: nn.Module, changes: Changes) -> None:
        """Set attributes and parameters to their smaller values and shapes, in place."""
        by_module: dict[str, list[AttributeOverride]] = {}
        for (fqn, attribute), change in changes.items():
            by_module.setdefault(fqn, []).append(AttributeOverride(attribute, change.value, (change.local,)))
        for fqn, module in model.named_modules():
            overrides = by_module.get(stand_in(fqn, self.stand_ins), ())
            apply_overrides(module, tuple(overrides), 0)
        tids = {i.name: t for t, i in enumerate(self.tape.tensors) if i.name}
        smaller = {}
        for name, tensor in stored_tensors(model):
            tid = tids.get(stand_in(name, self.stand_ins))
            if tid is not None and self.shapes.is_changed(tid):
                smaller[name] = torch.empty(self.shapes.local_shape(tid), dtype=tensor.dtype, device="meta")
        fill(model, smaller, gradients=True)
        for module in model.modules():
            if isinstance(module, nn.Linear):  # fused products read these
                module.out_features, module.in_features = module.weight.shape
        for name, buffer in list(model.named_buffers()):
            tid = tids.get(stand_in(name, self.stand_ins))
            if name not in smaller and tid is not None and self.shapes.is_changed(tid):
                for dim, node in enumerate(self.full.analysis.dims[tid]):
                    buffer = buffer.index_select(dim, torch.tensor(self.shapes.held(node)))
                path, _, attribute = name.rpartition(".")
                model.get_submodule(path)._buffers[attribute] = buffer

    def _difference(
        self, model: nn.Module, inputs: TraceInputs, changes: dict[Attribute, Change]
    ) -> Conflict | None:
        """Return the first difference between the smaller and the full model.

        Sizes that code only compares are not traced. If a module fails, its attributes are changed as well,
        and added to ``changes``.
        """
        tape: Tape | None = None
        while tape is None:
            try:
                tape = trace(model, inputs.tensors, RULES, inputs.options, self.tape)
            except ShardconvError as error:
                where = str(error).partition(":")[0]
                if not self._change_compared(model, where, changes):
                    # Errors often name the sizes: blame leaves whose size and smaller size are both named.
                    named = {int(n) for n in re.findall(r"\b\d+\b", str(error))}
                    groups = [group for group, small in self.sizes.items() if {group.size, small} <= named]
                    nodes = tuple(leaf for group in groups for leaf in group.leaves)
                    return Conflict(nodes or self._changed_in(where), str(error))
        # Modules around skipped layers may return something of each layer.
        around = {"", *(p for fqn in self.skipped for p in prefixes(fqn))} if self.skipped else set()
        conflict = compare_tapes(
            self.shapes, tape, (), numbers=False, left_out=around, pass_on=bool(self.skipped)
        )
        if conflict is None or conflict.nodes:
            return conflict
        return replace(conflict, nodes=self._changed_in(conflict.where.partition(" ")[0]))

    def _change_compared(self, model: nn.Module, where: str, changes: dict[Attribute, Change]) -> bool:
        """Set int attributes that hold a size that shrinks, in modules named like ``where``, to a smaller
        size.

        If dims of this size have different smaller sizes, these are tried one after the other.
        """
        new: dict[Attribute, Change] = {}
        for fqn, module in model.named_modules():
            if starred(fqn) != starred(where):
                continue
            for name, value in list(vars(module).items()):
                attribute = (stand_in(fqn, self.stand_ins), name)
                if type(value) is not int or (attribute in changes and attribute not in self.compared):
                    continue
                if attribute not in new:
                    left = self.compared.setdefault(attribute, self._smaller(where, value))
                    if not left:
                        continue
                    full = changes[attribute].value if attribute in changes else value
                    new[attribute] = Change(full, left.pop(0))
                setattr(module, name, new[attribute].local)
        changes |= new
        return bool(new)

    def _smaller(self, fqn: str, size: int) -> list[int]:
        """Return the smaller sizes of groups and of dims of a module's tensors that have a size."""
        sizes = [small for group, small in self.sizes.items() if group.size == size]
        sizes += [self.shapes.size(dim) for dim in self._dims_in(fqn) if dim.size == size]
        return [small for small in dict.fromkeys(sizes) if small != size]

    def _changed_in(self, fqn: str) -> tuple[Node, ...]:
        """Return leaves that shrink, of the tensors that a module reads or computes."""
        return tuple({x: None for dim in self._dims_in(fqn) for x in leaves(dim) if self.shapes.changed(x)})

    def _dims_in(self, fqn: str) -> list[Node]:
        """Return the dims of the tensors that a module reads or computes."""
        tape, dims = self.tape, self.full.analysis.dims
        return [
            dim
            for e in tape.events
            if tape.calls[e.call].fqn == fqn
            for t in ((e.source, e.target) if isinstance(e, Mark) else (*e.inputs, *e.outputs))
            for dim in dims.get(t, ())
        ]


def single_rows(tensors: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the first row of each input, in each way to divide the inputs; nothing if there is only one row.

    Inputs with other rows, such as the patches of all images, are divided by the same number. An input with a
    single row may be for all rows, or hold them one after the other in its last dim.
    """
    rows = num_rows(tensors)
    if rows == 1:
        return
    first = {n: t if _is_single(t) else t[: len(t) // rows] for n, t in tensors.items()}
    if any(map(_is_single, tensors.values())):
        yield {
            n: t[..., : t.shape[-1] // rows] if _is_single(t) and t.shape[-1] % rows == 0 else t
            for n, t in first.items()
        }
    yield first


def num_rows(tensors: Mapping[str, torch.Tensor]) -> int:
    """Return the number of rows into which all inputs with several rows can be divided; otherwise 1."""
    lengths = [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors.values()]
    lengths = [length for length in lengths if length != 1]
    rows = math.gcd(*lengths)
    return rows if rows in lengths and 0 not in lengths else 1


def _is_single(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == 1


def _ints(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield (path, value) of the int attributes of a model, of its config, and of nested configs.

    They are read with ``vars``: configs of layers that differ raise errors for attributes that depend on the
    layer.
    """
    yield from ((name, value) for name, value in vars(model).items() if type(value) is int)
    config = getattr(model, "config", None)
    todo: list[tuple[str, Any]] = [("config", config)] if config is not None else []
    while todo:
        path, current = todo.pop()
        for name, value in vars(current).items():
            if type(value) is int:
                yield f"{path}.{name}", value
            elif hasattr(value, "to_diff_dict"):
                todo.append((f"{path}.{name}", value))
