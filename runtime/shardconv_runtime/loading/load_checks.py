"""What ``load`` checks before it builds anything: options, forms, remote code, the same model on all."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from torch import nn
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from ..comm import mesh as launching
from ..comm.agreement import exchange
from ..comm.collectives import AllReduce, ProcessCommunicator
from ..comm.mesh import Launch
from ..errors import CheckpointError, LaunchError, PlanError
from ..format.manifest import Manifest, read_plan
from ..format.plan import Plan
from ..format.plan_json import of_sequence, require_training
from ..hub.fetch import Repository, find
from ..hub.tp_folders import folder_in
from ..hub_options import Hub, looks_like_path

if TYPE_CHECKING:
    from ..adapters.adapter_set import AdapterSet

# A converted directory in a repository of the Hub, whose manifest and plan were fetched.


def find_converted(
    path: str, hub: Hub, rank: int, world_size: int
) -> tuple[Path, Manifest, Plan, Repository]:
    """Directory, manifest and plan for ``world_size`` ranks in a repository, and the repository; of several
    stages, those of the stage of ``rank``.

    Raises:
        CheckpointError: ``path`` cannot be the id of a repository.
        SourceError: it cannot be reached, or has no directory for so many ranks.
    """
    if Path(path).expanduser().exists() or "/" not in path or looks_like_path(folder_in(path)[0]):
        raise CheckpointError(
            f"{path}: no such directory; give the directory that `shardconv convert` wrote, or the id of a "
            "repository on the Hub"
        )
    repository, found = find(path, hub, world_size, rank)
    return repository.directory, found, read_plan(repository.directory, found), repository


# Classes of models whose code is in the converted directory.


def remote_class(directory: Path, class_name: str) -> type[nn.Module]:
    """Import a class from Python code in a directory.

    Raises:
        PlanError: the code is in another repository.
    """
    reference = class_name.replace(":", ".")
    if "--" in reference:
        raise PlanError(f"{directory}: the model class {reference!r} is code of another repository")
    found: type[nn.Module] = get_class_from_dynamic_module(reference, str(directory), local_files_only=True)
    return found


# Whether all ranks load the same model: ranks of different ones would run, and compute nothing of use.

FORM = (
    "dtype",
    "training",
    "data_parallel",
    "sequence_parallel",
    "regather",
    "stages_per_process",
    "gather_logits",
    "dequantize",
    "all_reduce",
)
"""Arguments of ``load`` that decide what the ranks compute."""


def require_same(
    start: Launch, manifest: Manifest, wanted: object, adapters: AdapterSet | None = None
) -> None:
    """Compare what the ranks load; every rank calls it.

    Args:
        start: the ranks.
        manifest: of this rank's directory. Copies of it in other places have the same checksums.
        wanted: has the arguments of ``load``.
        adapters: of the model.

    Raises:
        LaunchError: a rank loads another conversion, or the same one in another form.
    """
    content = sha256(repr((manifest.plan_sha256, manifest.files, manifest.source.revision)).encode())
    form = ", ".join(f"{name}={getattr(wanted, name)}" for name in FORM)
    own = {"conversion": f"{content.hexdigest()[:12]} of {manifest.source.name}", "form": form}
    if adapters is not None:
        own["adapters"] = adapters.content
    found = exchange(start, own)
    for what in own:
        for rank, theirs in enumerate(found):
            if theirs.get(what) != found[0].get(what):
                raise LaunchError(
                    f"the ranks must load the same {what}: rank 0 loads {found[0].get(what)}, and rank "
                    f"{rank} loads {theirs.get(what)}; give all ranks the same files and arguments"
                )


# Options of transformers' ``from_pretrained`` that people give to ``load``: refused, with what to do.

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


WITH_BACKWARD = frozenset({"bnb_4bit"})
"""Methods of packings whose modules give the gradients of their inputs."""


def require_form(
    plan: Plan,
    *,
    training: bool,
    sequence_parallel: bool,
    stays_packed: bool,
    in_parts: bool,
    adapted: bool = False,
) -> None:
    """Check that a plan has the wanted form.

    Args:
        plan: of the model.
        training: it is to have a backward pass.
        sequence_parallel: its activations are to be sharded over the sequence.
        stays_packed: packed parameters are to stay so.
        adapted: the model has adapters, which alone are trained.
        in_parts: each process is to read a part of a rank's tensors.

    Raises:
        PlanError: it has not that form, or has packed parameters that are in the way.
    """
    packings = sorted({entry.packing.method for entry in plan.parameters if entry.packing is not None})
    if stays_packed and not (adapted and not sequence_parallel and set(packings) <= WITH_BACKWARD):
        raise PlanError(
            f"packed weights ({', '.join(packings)}) are for inference, without sequence parallelism, and of "
            f"{', '.join(WITH_BACKWARD)} under adapters that are trained; pass dequantize=True"
        )
    if in_parts and packings:
        raise PlanError(
            f"data_parallel=: packed weights ({', '.join(packings)}) are dequantized as whole tensors of a "
            "rank; leave it out, and call shardconv_runtime.data_parallel afterwards; or convert the model "
            "with --dtype bfloat16"
        )
    if training:
        require_training(plan)
    if sequence_parallel:
        of_sequence(plan)


def connect(
    plan: Plan, start: Launch, all_reduce: AllReduce | None, *, training: bool, sequence_parallel: bool
) -> ProcessCommunicator:
    """The process groups of all collectives that the wanted form of the model issues."""
    used = of_sequence(plan) if sequence_parallel else plan
    from ..training.backward_axes import backward_axes

    return launching.connect(used, start, all_reduce, backward_axes(used) if training else ())
