"""One rank of ``stores.py``: loads a model in a way, and prints seconds and memory as JSON.

python stores_rank.py WAY URL DIRECTORY
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured import Phase


def load(url: str, directory: Path) -> Any:
    import shardconv_runtime

    return shardconv_runtime.load(url, device="cpu")


def cached(url: str, directory: Path) -> Any:
    import shardconv_runtime
    from shardconv_runtime.hub_options import Hub

    return touched(shardconv_runtime.load(url, device="cpu", hub=Hub(cache_dir=directory)))


def copied(url: str, directory: Path) -> Any:
    """Rank 0 copies the directory of all ranks, as the command of a store does."""
    if dist.get_rank() == 0:
        copy(url, directory)
    dist.barrier()
    return touched(load(str(directory), directory))


def full(url: str, directory: Path) -> Any:
    """The ranks of a host share the copy, and each holds the full model."""
    import transformers

    if dist.get_rank() == 0:
        copy(url, directory)
    dist.barrier()
    return touched(transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="auto"))


def runai(url: str, directory: Path) -> Any:
    """Each rank streams all tensors to its memory, as loaders do that slice them afterwards."""
    import s3fs
    from runai_model_streamer import SafetensorsStreamer

    there = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    files = sorted(f"s3://{name}" for name in there.glob(f"{url}/*.safetensors"))
    with SafetensorsStreamer() as streamer:
        streamer.stream_files(files)
        return {name: tensor.clone() for name, tensor in streamer.get_tensors()}


def copy(url: str, directory: Path) -> None:
    import s3fs

    there = s3fs.S3FileSystem(endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    there.get(f"{url}/", f"{directory}/", recursive=True)


def upload(url: str, directory: Path) -> Any:
    import obstore
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True, "timeout": "600s"})
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        obstore.put(store, path.relative_to(directory).as_posix(), path, chunk_size=1 << 25)


def remove(url: str, directory: Path) -> Any:
    import obstore
    from obstore.store import from_url

    store = from_url(url, client_options={"allow_http": True})
    names = [each["path"] for some in obstore.list(store) for each in some]
    for name in names:  # one by one: not all servers remove several
        obstore.delete(store, name)


def touched(model: Any) -> Any:
    """Read the pages of mapped files, as the first use would."""
    for tensor in model.state_dict().values():
        tensor.reshape(-1).view(torch.uint8)[::4096].sum()
    return model


IMPORTED = (
    "shardconv_runtime.loading.load",
    "transformers.models.llama.modeling_llama",
    "s3fs",
    "obstore",
    "runai_model_streamer",
)

WAYS: dict[str, Callable[[str, Path], Any]] = {
    "load": load,
    "cached": cached,
    "copied": copied,
    "full": full,
    "runai": runai,
    "upload": upload,
    "remove": remove,
}


def main() -> None:
    way, url, directory = sys.argv[1:]
    if "RANK" in os.environ:
        for name in IMPORTED:  # is not measured
            with suppress(ImportError):
                importlib.import_module(name)
        dist.init_process_group("gloo")
        dist.barrier()
    phase = Phase.begin()
    held = WAYS[way](url, Path(directory))
    measured = phase.end()
    print(json.dumps({"seconds": measured["phase_s"], "peak": measured["peak_above"]}))
    del held
    if "RANK" in os.environ:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
