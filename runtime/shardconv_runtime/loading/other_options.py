"""Options of transformers' ``from_pretrained`` that people give to ``load``: refused, with what to do."""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

from ..errors import PlanError

_CONVERTED = "it was decided when the model was converted; leave it out, or convert with another setting"
_REMEDIES = {
    "torch_dtype": "pass dtype=",
    "device_map": "each rank loads its own part to its own device; leave it out, or pass device=",
    "max_memory": "each rank loads its own part; `shardconv plan --device-memory` says what fits",
    "low_cpu_mem_usage": "no rank builds the full model; leave it out",
    "tp_plan": "the converted directory has a plan; leave it out",
    "tp_size": "convert with --tp, or `shardconv reshard`",
    "distributed_config": "pass mesh=; the converted directory has a plan",
    "device_mesh": "pass mesh=",
    "attn_implementation": "call model.set_attn_implementation(...) on every rank after loading",
    "quantization_config": _CONVERTED,
    "load_in_8bit": _CONVERTED,
    "load_in_4bit": _CONVERTED,
    "config": _CONVERTED,
    "use_auth_token": "pass token=",
    "force_download": "remove the files from the cache, or pass cache_dir=",
    "subfolder": "pass the path of the directory itself",
}
"""Options -> what to do instead."""


def refuse_options(names: Collection[str]) -> NoReturn:
    """Raises ``PlanError``, which names the first option and what to do instead."""
    name = sorted(names)[0]
    remedy = _REMEDIES.get(name, "see help(shardconv_runtime.load) for its arguments")
    raise PlanError(f"load does not take {name}=: {remedy}")
