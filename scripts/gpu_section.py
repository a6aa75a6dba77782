"""The common parts of the sections of ``gpu_check``: results, random models, and the timing of steps."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from synthetic import Shape
from torch import Tensor

GROUPS = 5
"""Of steps; their result is the median of the means."""

WARM_UP = 3
REPEATS = 3
"""Of calls of ``generate``, whose median counts."""

TINY = Shape(hidden=64, intermediate=128, heads=8, kv_heads=4, vocab=500, layers=2)
SMALL = Shape(hidden=256, intermediate=512, heads=8, kv_heads=4, vocab=1000, layers=4)
MIDDLE = Shape(hidden=2048, intermediate=7168, heads=16, kv_heads=8, vocab=32000, layers=16)
NEW_TOKENS = 16
TOLERANCE = {torch.bfloat16: 2**-5, torch.float32: 1e-3}
"""Of the largest logit: for bfloat16 four units in its last place, since kernels round differently."""


class Section:
    """The sizes, device, files and results of a section.

    Args:
        name: of the section.
        device: ``cuda``, or ``cpu`` to test the code.
        small: tiny sizes.
        scratch: directory for files, shared by the sections of a run.
        seconds: how long the section may take.
    """

    def __init__(self, name: str, device: str, small: bool, scratch: Path, seconds: float = 1e9) -> None:
        self.end = time.monotonic() + seconds
        self.name = name
        self.device = torch.device(device, 0) if device == "cuda" else torch.device(device)
        self.small = small
        self.scratch = scratch

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def tell(
        self,
        what: str,
        number: float | None = None,
        unit: str = "",
        *,
        ratio: float | None = None,
        of: str = "",
        ok: bool = True,
        why: str = "",
    ) -> None:
        """Print a result."""
        status = "ok" if ok else "FAILED"
        self._print(what=what, status=status, number=number, unit=unit, ratio=ratio, of=of, why=why)

    def skip(self, what: str, why: str) -> None:
        """Print that something was not checked."""
        self._print(what=what, status="not checked", why=why)

    def _print(self, **line: Any) -> None:
        print("\n" + json.dumps({"section": self.name, **line}), flush=True)

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """A context whose error is a failed check; the section continues."""
        try:
            yield
        except Exception as error:
            text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            why = f"{type(error).__name__}: {text[:300]}"
            self._print(what=what, status="FAILED", why=why, traceback=traceback.format_exc())
            error.__traceback__ = None  # whose frames hold models
        self.free()

    def has_time(self, what: str, needed_s: float) -> bool:
        """Whether there is time for something that takes so many seconds on a GPU; if not, says so."""
        left = self.end - time.monotonic()
        if left < needed_s and self.is_cuda:
            self.skip(what, f"{left:.0f} s were left, and it takes about {needed_s:.0f} s")
            return False
        return True

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        """Seconds of a call, until the device is idle."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def free(self) -> None:
        """Free the memory of deleted models, which have reference cycles."""
        gc.collect()
        if self.is_cuda:
            torch.cuda.empty_cache()

    # ------------------------------------------------------------------------------------------- models

    def checkpoint(self, name: str, shape: Shape, dtype: torch.dtype) -> Path:
        """The directory of a random model, made if it does not exist."""
        path = self.scratch / name
        if not path.exists():
            unfinished = path.with_suffix(".unfinished")  # a section may be killed at any time
            shutil.rmtree(unfinished, ignore_errors=True)
            self.random_model(shape, dtype).save_pretrained(unfinished, max_shard_size="2GB")
            unfinished.rename(path)
        return path

    def random_model(self, shape: Shape, dtype: torch.dtype) -> Any:
        """An unsharded model with random weights, on the device."""
        torch.manual_seed(0)
        fields = {**shape.config(), "dtype": dtype, "max_position_embeddings": 4096}
        del fields["torch_dtype"]
        with self.device:
            model = build(shape, fields, dtype)
        return model.requires_grad_(False).eval()

    def converted(self, source: Path, tp: int, *options: str) -> Path:
        """The converted directory of a model; ``options`` are of the command."""
        out = source.with_name("-".join((source.name, f"tp{tp}", *(o.strip("-") for o in options))))
        if not (out / "manifest.json").exists():
            command = [sys.executable, "-m", "shardconv", "convert", str(source), "--tp", str(tp), str(out)]
            done = subprocess.run(
                [*command, *options, "--no-check", "--quiet"], capture_output=True, text=True
            )
            if done.returncode:
                raise RuntimeError(f"convert failed: {done.stderr.strip().splitlines()[-1:]}")
        return out

    def unsharded(self, source: Path) -> Any:
        """The model as transformers loads it."""
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
        return model.to(self.device).requires_grad_(False).eval()

    def prompt(self, length: int, vocab: int) -> Tensor:
        """The same ids in every process."""
        ids = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(1))
        return ids.to(self.device)

    # -------------------------------------------------------------------------------------------- steps

    def prefill_s(self, model: Any, ids: Tensor) -> float:
        """Seconds of a pass over the full prompt."""

        def call() -> Any:
            return model(ids, use_cache=False, logits_to_keep=1)

        for _ in range(WARM_UP):
            call()
        return statistics.median(self.seconds(call) for _ in range(GROUPS))

    def token_s(self, model: Any, ids: Tensor, **options: Any) -> float:
        """Seconds of a token of ``generate``: the difference of a long and a short call."""
        few, many = (2, 18) if self.small else (16, 112)

        def call(count: int) -> Callable[[], Tensor]:
            return lambda: continued(model, ids, count, **options)

        for count in (few, many):
            call(count)()  # what is compiled or recorded
        times = [(self.seconds(call(few)), self.seconds(call(many))) for _ in range(REPEATS)]
        shortest = [min(found) for found in zip(*times, strict=True)]  # what another process took is in none
        return (shortest[1] - shortest[0]) / (many - few)

    def bandwidth(self) -> float:
        """Bytes per second of the device's memory, by a large copy that reads and writes."""
        source = torch.empty((1 << 20) if self.small else (2 << 30), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        target.copy_(source)
        best = min(self.seconds(lambda: target.copy_(source)) for _ in range(GROUPS))
        return 2 * source.nbytes / best

    def flops(self) -> float:
        """Operations per second of products of large bfloat16 matrices."""
        size = 256 if self.small else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        a @ b
        return 2 * size**3 / min(self.seconds(lambda: a @ b) for _ in range(GROUPS))

    def tell_time(self, what: str, seconds: float, unit: str, than_s: float, than: str) -> None:
        """A time beside another one."""
        self.tell(what, seconds * 1e3, unit, ratio=seconds / than_s, of=than)


def build(shape: Shape, fields: dict[str, Any], dtype: torch.dtype) -> Any:
    """A model of random weights on the default device."""
    model_class = getattr(transformers, fields.pop("architectures")[0])
    fields.pop("model_type")
    return model_class._from_config(model_class.config_class(**fields), dtype=dtype)


def continued(model: Any, ids: Tensor, count: int, **options: Any) -> Tensor:
    """The text with exactly so many new tokens; greedy unless an option says otherwise."""
    fixed = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
    tokens: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **{**fixed, **options})
    assert tokens.shape[1] == ids.shape[1] + count, "the model stopped by itself"
    return tokens


def never_stop(model: Any) -> Any:
    """Let a model generate as many tokens as it is asked for."""
    model.generation_config.eos_token_id = None
    return model


def greedy(model: Any, ids: Tensor) -> list[int]:
    """The ids of greedily generated tokens."""
    out = continued(never_stop(model), ids, NEW_TOKENS)
    return [int(token) for token in out[0, ids.shape[1] :]]


def prompts(section: Section, vocab: int) -> list[Tensor]:
    """Of several lengths, each ``[1, length]``."""
    return [section.prompt(length, vocab) for length in (3, 24, 40)]


def one_by_one(model: Any, given: list[Tensor]) -> list[list[int]]:
    """The new tokens after each prompt, of ``generate``."""
    return [greedy(model, ids) for ids in given]


def batched(model: Any, given: list[Tensor]) -> list[list[int]]:
    """The same of ``generate_batch``, from a small cache."""
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    pages = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=256)
    answers = model.generate_batch(
        [ids[0].tolist() for ids in given],
        generation_config=config,
        continuous_batching_config=pages,
        warmup=False,
    )
    return [answer.generated_tokens for answer in answers.values()]


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit."""
    found, expected = found.float(), expected.float()
    return float((found - expected).abs().max() / expected.abs().max())


def why_no_compiler(section: Section) -> str:
    """The reason why nothing can be compiled here; empty if it can be."""
    if section.is_cuda and importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))):
        return "compiled kernels need a C compiler, which is missing"
    return ""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment variables that torchrun sets for a rank; all ranks use the first GPU."""
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": world_size}
    return {n: str(v) for n, v in {**numbers, "MASTER_PORT": port}.items()} | {"MASTER_ADDR": "127.0.0.1"}


def start_rank(command: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
    """A process of one rank, with more environment variables; its last line of JSON is its result."""
    threads = {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env={**os.environ, **env, **threads}, stdout=subprocess.PIPE, stderr=sys.stderr, text=True
    )


def rank_result(child: subprocess.Popen[str]) -> Any:
    """The result that a rank prints.

    Raises:
        RuntimeError: it failed.
    """
    output, _ = child.communicate()
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if child.returncode or not lines:
        raise RuntimeError(f"a rank ended with exit code {child.returncode}")
    result = json.loads(lines[-1])
    if "error" in result:
        raise RuntimeError(result["error"])
    return result


def run_ranks(section: Section, source: Path, converted: Path, tp: int) -> list[dict[str, Any]]:
    """What each of some ranks over gloo says of its model beside the unsharded one."""
    port = free_port()
    script = Path(__file__).with_name("gpu_sections.py")
    command = [sys.executable, str(script), "one-of-ranks", "--device", section.device.type]
    command += ["--scratch", str(section.scratch), "--models", str(source), str(converted)]
    children = [start_rank(command, rank_variables(number, tp, port)) for number in range(tp)]
    return [rank_result(child) for child in children]
