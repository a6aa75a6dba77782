"""Names of tensors in checkpoints that were saved of a wrapped model: without the wrapper's part.

``torch.compile``, ``DistributedDataParallel``, FSDP, activation checkpointing and trainers put a model
into their own module, or wrap modules inside of it. A state dict that is taken of the wrapper has
names such as ``_orig_mod.lm_head.weight`` or
``model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ..errors import SourceError

_WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Names of wrapped modules that no model uses for its own parts."""


_ORDINARY = "module"
"""The name in ``DistributedDataParallel``, which a model may use as well."""


_MOST_LEVELS = 4
"""Most levels of modules around a model, each of which has a name."""


def without_wrappers(names: Collection[str]) -> Iterator[Mapping[str, str]]:
    """Yield other names for all tensors of a checkpoint, the likeliest first.

    The caller finds out which of them belong to the model.

    Yields:
        Name -> without the parts of wrappers. Two tensors never get one name.
    """
    candidates = [dict.fromkeys(names, "")]  # only to compare
    for left_out in (_WRAPPERS, _WRAPPERS | {_ORDINARY}):
        renamed = {name: ".".join(p for p in name.split(".") if p not in left_out) for name in names}
        for _ in range(_MOST_LEVELS):
            if renamed not in candidates and any(old != new for old, new in renamed.items()):
                candidates.append(renamed)
                if len(set(renamed.values())) == len(renamed):
                    yield renamed
            parts: dict[str, set[str]] = {}
            for name in renamed.values():
                outermost, _, rest = name.partition(".")
                parts.setdefault(outermost, set()).add(rest)
            first, *rest_of_parts = sorted(parts, key=lambda part: -len(parts[part]))
            if rest_of_parts and all(parts[other] == parts[first] for other in rest_of_parts):
                raise SourceError(
                    f"the checkpoint has tensors of several models, whose names begin with {first}. and "
                    f"{', '.join(f'{other}.' for other in rest_of_parts)}; save only one of them"
                )
            renamed = {old: name.removeprefix(f"{first}.") for old, name in renamed.items()}


def wrapped_name(names: Collection[str]) -> str | None:
    """Return a name that shows that the checkpoint is one of a wrapped model; None if there is none."""
    return next((name for name in names if not _WRAPPERS.isdisjoint(name.split("."))), None)
