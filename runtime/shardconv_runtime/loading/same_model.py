"""Whether all ranks load the same model: ranks of different ones would run, and compute nothing of use."""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

from ..comm.agreement import exchange
from ..comm.mesh import Launch
from ..errors import LaunchError
from ..format.manifest import Manifest

if TYPE_CHECKING:
    from ..adapters.adapter_set import AdapterSet

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
