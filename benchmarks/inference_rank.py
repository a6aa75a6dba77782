"""What one process of ``inference.py`` measures; it writes a JSON file.

inference_rank.py start VARIANT DIRECTORY RESULT         the first and the second load of a process
inference_rank.py load VARIANT DIRECTORY RESULT          load a model, and touch every page of it
inference_rank.py steps CONVERTED SOURCE RESULT OPTIONS  prefill and decode, beside transformers

The place among the other ranks comes from the environment that torchrun sets.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from disk import resident_share
from torch import Tensor
from torch.distributed.tensor import DTensor

PAGE_BYTES = 4096
WARM_UP_STEPS = 3
MODES = ("eager", "compiled")
IMPORTS = (
    "accelerate",
    "safetensors.torch",
    "shardconv_runtime.loading.load",
    "torch._dynamo",
    "transformers.distributed",
    "transformers.generation",
    "transformers.integrations.accelerate",
    "transformers.modeling_utils",
)
Step = Callable[[], Any]

TIMEOUT = timedelta(minutes=5)
"""If a compiler fails on one rank, the others wait in a collective; by default gloo waits half an hour."""


def world_size() -> int:
    """Of the launch."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def join() -> None:
    """Meet the other ranks, if there are any."""
    if world_size() > 1:
        dist.init_process_group("gloo", timeout=TIMEOUT)


def rank() -> int:
    """Of this process."""
    return int(os.environ.get("RANK", "0"))


def barrier() -> None:
    """Wait for the other ranks."""
    if world_size() > 1:
        dist.barrier()


def model_class(directory: Path) -> Any:
    """The class that the config names; this imports the modeling file, which belongs to no measurement."""
    config = json.loads((directory / "config.json").read_text())
    return getattr(transformers, config["architectures"][0])


# ---------------------------------------------------------------------------------------------- loading


def load_converted(directory: Path, plan: Path | None) -> tuple[Any, float]:
    """This rank's model, sharded by a plan if it is not converted, and the seconds of reading."""
    from shardconv_runtime.loading import load, rank_files

    seconds = 0.0
    fill = rank_files.fill

    def timed(*arguments: Any) -> None:
        nonlocal seconds
        start = time.perf_counter()
        fill(*arguments)
        seconds += time.perf_counter() - start

    rank_files.fill = timed
    try:
        return load.load(directory, plan=plan, device="cpu"), seconds
    finally:
        rank_files.fill = fill


def measure_start(variant: str, directory: Path) -> dict[str, float]:
    """Seconds of the first load of a process, with the imports of this loader, and of a second one."""
    model_class(directory)
    join()
    seconds = []
    for _ in range(2):
        barrier()
        start = time.perf_counter()
        if variant == "shardconv":
            import shardconv_runtime

            loaded = shardconv_runtime.load(directory, device="cpu")
        else:
            loaded = load_transformers(directory, parallel=True)
        seconds.append(time.perf_counter() - start)
        del loaded
    return {"first_s": seconds[0], "second_s": seconds[1]}


def load_safetensors(directory: Path) -> dict[str, Tensor]:
    """The tensors of this rank's files, of a converted directory."""
    from safetensors.torch import load_file

    return {name: x for path in rank_paths(directory) for name, x in load_file(path).items()}


def load_transformers(directory: Path, *, parallel: bool) -> Any:
    """The model of transformers, unsharded or with its own tensor parallelism."""
    options: dict[str, Any] = {}
    if parallel:
        options["distributed_config"] = _tensor_parallel()
    return model_class(directory).from_pretrained(directory, dtype="auto", **options).eval()


def _tensor_parallel() -> Any:
    from transformers.distributed import DistributedConfig

    return DistributedConfig(tp_plan="auto")  # replaces the deprecated ``tp_plan="auto"``


def rank_paths(directory: Path) -> list[Path]:
    """The weight files that this rank of a converted directory needs."""
    folders = (f"rank-{rank():05}-of-{world_size():05}", "common")
    return sorted(path for folder in folders for path in (directory / folder).glob("*.safetensors"))


def measure_load(variant: str, directory: Path, plan: Path | None) -> dict[str, Any]:
    """Seconds until the load returns and until every page is touched, and the bytes that the system read."""
    from_shards = variant in ("shardconv", "safetensors")
    files = rank_paths(directory) if from_shards else sorted(directory.glob("*.safetensors"))
    _import_everything(directory)
    join()
    cached = resident_share(files)
    modules = set(sys.modules)
    barrier()
    before, start, reading = counters(), time.perf_counter(), math.nan
    if variant in ("shardconv", "plan"):
        loaded, reading = load_converted(directory, plan)
    elif variant == "safetensors":
        loaded = load_safetensors(directory)
    else:
        loaded = load_transformers(directory, parallel=variant == "tensor parallel")
    returned = time.perf_counter() - start
    touched_bytes = touch(tensors_of(loaded))
    touched = time.perf_counter() - start
    after = counters()
    return {
        "returned_s": returned,
        "touched_s": touched,
        "reading_s": reading,
        "cached_share": cached,
        "file_bytes": sum(path.stat().st_size for path in files),
        "touched_bytes": touched_bytes,
        "imported": sorted(set(sys.modules) - modules),
        **{name: after[name] - before[name] for name in after},
    }


def _import_everything(directory: Path) -> None:
    """All that any of the variants imports while it loads, or at its first step."""
    for name in IMPORTS:
        importlib.import_module(name)
    transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    with torch.device("meta"):  # imports the modules for building a model
        model_class(directory)(model_class(directory).config_class(num_hidden_layers=1))


def counters() -> dict[str, int]:
    """What the system counts for this process: bytes that came from the disk, bytes of calls that read."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(fields[name]) for name in ("read_bytes", "rchar")}


def tensors_of(loaded: Any) -> Iterator[Tensor]:
    """The plain tensors of a model or of a dict, local parts of distributed ones."""
    found = loaded.values() if isinstance(loaded, dict) else loaded.parameters()
    for tensor in found:
        yield tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def touch(tensors: Iterable[Tensor]) -> int:
    """Read a byte of each page of the tensors; returns how many bytes the tensors have."""
    num_bytes = 0
    for tensor in tensors:
        num_bytes += tensor.nbytes
        octets = tensor.view(torch.uint8)
        if octets.is_contiguous():
            octets = octets.reshape(-1)
            int(octets[-1])
        int(octets[..., ::PAGE_BYTES].sum())
    return num_bytes


# ------------------------------------------------------------------------------------------------ steps


class Subject:
    """A model that takes steps of one kind.

    Args:
        model: as its library loads it.
        compiled: whether its forward pass is compiled, each library in its own way.
    """

    def __init__(self, model: Any, compiled: bool) -> None:
        self.model = model
        self.compiled = compiled

    def prefill(self, ids: Tensor, num_logits: int) -> Step:
        """The full prompt in one pass, for the last logits only (1), as in ``generate``, or for all (0)."""
        return lambda: self.model(ids, use_cache=False, logits_to_keep=num_logits).logits

    def decode(self, ids: Tensor, kind: str, num_steps: int) -> Step:
        """One more token at each call; the prompt fills the cache first."""
        length = ids.shape[1]
        if kind == "static":
            cache = transformers.StaticCache(self.model.config, max_cache_len=length + num_steps)
        else:
            cache = transformers.DynamicCache(config=self.model.config)
        eager = getattr(self.model, "_eager_forward", self.model)
        self._call(eager, ids, 0, cache)
        position = length - 1
        token = ids[:, -1:]

        def step() -> Any:
            nonlocal position, token
            position += 1
            logits = self._call(self.model, token, position, cache)
            token = logits[:, -1:].argmax(-1)
            return logits

        return step

    @staticmethod
    def _call(call: Any, ids: Tensor, start: int, cache: Any) -> Tensor:
        """As ``generate`` calls a model: with positions, and for the last token alone."""
        positions = torch.arange(start, start + ids.shape[1])[None]
        out = call(ids, past_key_values=cache, use_cache=True, position_ids=positions, logits_to_keep=1)
        logits: Tensor = out.logits
        return logits


def load_pair(converted: Path, source: Path, mode: str) -> dict[str, Subject]:
    """Our model and the one of transformers: sharded, or unsharded for a single process."""
    import shardconv_runtime

    compiled = mode == "compiled"
    ours = shardconv_runtime.load(converted, device="cpu", compile=compiled)
    theirs = load_transformers(source, parallel=world_size() > 1)
    if compiled:
        theirs._eager_forward = theirs.forward
        theirs.forward = torch.compile(theirs.forward)
    share_weights(ours, theirs)
    return {"shardconv": Subject(ours, compiled), "transformers": Subject(theirs, compiled)}


def share_weights(model: torch.nn.Module, other: torch.nn.Module) -> None:
    """Let two models compute with the same memory, as far as they hold the same on this rank.

    Where a matrix lies in physical memory changes the time of its products: by up to a quarter for one that
    was read from the disk once more.
    """
    mine = dict(model.named_parameters())
    for name, parameter in other.named_parameters():
        is_sharded = isinstance(parameter, DTensor)
        local = parameter.to_local() if is_sharded else parameter.data
        if name in mine and mine[name].shape == local.shape and torch.equal(mine[name].data, local):
            if is_sharded:
                parameter._local_tensor = mine[name].detach()
            else:
                parameter.data = mine[name].data


def rows(mode: str, prompt: Tensor, options: argparse.Namespace) -> Iterator[tuple[str, Any, int]]:
    """The lines of the table: their name, the maker of a subject's step, and the number of steps."""
    yield "prefill", lambda subject: subject.prefill(prompt, 1), options.prefills
    if mode == "eager":
        yield "prefill, all logits", lambda subject: subject.prefill(prompt, 0), options.prefills
    steps = options.tokens + WARM_UP_STEPS + 1
    for kind in ("dynamic", "static") if mode == "eager" else ("static",):
        yield f"decode, {kind} cache", lambda s, kind=kind: s.decode(prompt, kind, steps), options.tokens


def measure_steps(converted: Path, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step, by mode, row and column; a text where a subject cannot take it."""
    torch.set_num_threads(options.threads)
    _import_everything(source)
    join()
    vocab = json.loads((source / "config.json").read_text())["vocab_size"]
    prompt = torch.randint(vocab, (1, options.prompt), generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {}
    for mode in options.modes:
        subjects = load_pair(converted, source, mode)
        for row, make, count in rows(mode, prompt, options):
            found[f"{mode}: {row}"] = _interleaved(subjects, make, count)
            tell(f"{mode}, {row}")
    return found


def _interleaved(subjects: dict[str, Subject], make: Callable[[Subject], Step], count: int) -> dict[str, Any]:
    """Alternate steps of all subjects, so that other load of the machine affects them alike."""
    steps: dict[str, Step] = {}
    found: dict[str, Any] = {}
    outputs: dict[str, Tensor] = {}
    for name, subject in subjects.items():
        start = time.perf_counter()
        try:
            steps[name] = _warmed_up(make(subject), outputs, name)
            found[name] = []
        except Exception as error:
            found[name] = why(error)
        found[f"{name} first_s"] = time.perf_counter() - start
    for number in range(count):
        for name in sorted(steps, reverse=number % 2 == 1):
            found[name].append(_seconds(steps[name]))
    if len(outputs) == len(subjects):
        ours, theirs = outputs["shardconv"], outputs["transformers"]
        found["difference"] = float((ours - theirs).abs().max() / theirs.abs().max())
    return found


def _warmed_up(step: Step, outputs: dict[str, Tensor], name: str) -> Step:
    """Compile, and fault in; the first output of each subject is kept, for comparison."""
    for number in range(WARM_UP_STEPS):
        out = step()
        if number == 0:
            outputs[name] = out.detach().clone()
    return step


def _seconds(step: Step) -> float:
    barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def why(error: BaseException) -> str:
    """The first two lines of an error, in one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".replace("|", "/")[:200]


def tell(text: str) -> None:
    """Print a line of progress at rank 0."""
    if not rank():
        print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    starting, loading = commands.add_parser("start"), commands.add_parser("load")
    for command in (starting, loading):
        command.add_argument("variant")
        command.add_argument("directory", type=Path)
        command.add_argument("result", type=Path)
    loading.add_argument("--plan", type=Path, help="Of a directory that is not converted.")
    steps = commands.add_parser("steps")
    for name in ("converted", "source", "result"):
        steps.add_argument(name, type=Path)
    steps.add_argument("--modes", nargs="+", default=MODES)
    for name, default in (("prompt", 128), ("prefills", 7), ("tokens", 30), ("threads", 1)):
        steps.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    if options.command == "start":
        result = measure_start(options.variant, options.directory)
    elif options.command == "load":
        result = measure_load(options.variant, options.directory, options.plan)
    else:
        with torch.no_grad():  # as ``generate`` has it
            result = measure_steps(options.converted, options.source, options)
    options.result.write_text(json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
