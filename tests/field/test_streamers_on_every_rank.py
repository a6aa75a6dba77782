"""A thread on each rank waits for the text of a streamer, as transformers' documentation shows it.

On ranks other than 0 a silent streamer stood in for the user's, whose ``end`` was never called: the thread
waited forever, and its rank never came to the next call.
https://github.com/huggingface/transformers/issues/36634
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from captured import capturing
from checkpoints import save_causal
from distributed import run_processes
from shardconv_runtime import Communication
from torch import Tensor
from warm_compiler import warm_up

import shardconv

IDS = torch.tensor([[3, 14, 15, 9, 26]])
WAIT_S = 60
COMMON: dict[str, Any] = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 6, "pad_token_id": 0}


class Numbers:
    """A tokenizer whose words are ids."""

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(f"{int(i)} " for i in ids)


class Waited:
    """A streamer of one's own, whose consumer waits for ``None``."""

    def __init__(self) -> None:
        self.queue: Queue[Any] = Queue()

    def put(self, value: Tensor) -> None:
        self.queue.put(value.flatten().tolist())

    def end(self) -> None:
        self.queue.put(None)


class Signalled(transformers.TextStreamer):
    """Prints, and says that it has ended."""

    has_ended = False

    def end(self) -> None:
        super().end()
        self.has_ended = True


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


def in_thread(model: Any, streamer: Any, **options: Any) -> Thread:
    torch.manual_seed(1)
    thread = Thread(target=lambda: model.generate(IDS, streamer=streamer, **COMMON, **options), daemon=True)
    thread.start()
    return thread


def of_iterator(model: Any, **options: Any) -> str:
    """The usual loop over a text."""
    streamer = transformers.TextIteratorStreamer(Numbers(), timeout=WAIT_S)
    thread = in_thread(model, streamer, **options)
    text = "".join(streamer)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    return text


def of_async_iterator(model: Any, **options: Any) -> str:
    async def read() -> str:
        streamer = transformers.AsyncTextIteratorStreamer(Numbers(), timeout=WAIT_S)
        thread = in_thread(model, streamer, **options)
        text = "".join([part async for part in streamer])
        thread.join(WAIT_S)
        return text

    return asyncio.run(read())


def of_own(model: Any, **options: Any) -> str:
    streamer = Waited()
    thread = in_thread(model, streamer, **options)
    text = "".join(Numbers().decode(ids) for ids in iter(lambda: streamer.queue.get(timeout=WAIT_S), None))
    thread.join(WAIT_S)
    return text


READERS: dict[str, Callable[..., str]] = {"iterator": of_iterator, "async": of_async_iterator, "own": of_own}


def read_all(model: Any, ways: Iterable[str] = WAYS) -> dict[str, str]:
    """The text of each reader in each way of decoding."""
    found = {f"{name}, {way}": read(model, **WAYS[way]) for name, read in READERS.items() for way in ways}
    with redirect_stdout(io.StringIO()) as printed:
        streamer = Signalled(Numbers())
        model.generate(IDS, streamer=streamer, do_sample=False, **COMMON)
    assert streamer.has_ended
    assert "on_finalized_text" not in vars(streamer)
    return found | {"printed": printed.getvalue()}


def read_on_rank(out: Path) -> dict[str, str]:
    return read_all(shardconv_runtime.load(out, device="cpu", communication=Communication(timeout_s=100)))


def read_compiled(out: Path) -> dict[str, str]:
    with capturing():
        model = shardconv_runtime.load(
            out, device="cpu", compile=True, communication=Communication(timeout_s=100)
        )
        return read_all(model, ["greedy"])  # each way would be captured anew


@pytest.mark.parametrize(
    ("tp", "pp", "read"),
    [
        (2, 1, read_on_rank),
        (1, 2, read_on_rank),
        pytest.param(2, 1, read_compiled, marks=pytest.mark.slow),
    ],
)
def test_every_rank_reads_the_text(
    tp: int, pp: int, read: Callable[[Path], dict[str, str]], tmp_path: Path
) -> None:
    source = save_causal("llama", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    want = read_all(model)
    assert len(set(want.values())) >= 3, "prompts, greedy and sampled texts, and a line break"
    shardconv.convert(source, tmp_path / "out", tp=tp, pp=pp, check=False)
    if read is read_compiled:
        warm_up()
    for rank, found in enumerate(run_processes(2, read, tmp_path / "out")):
        wanted = want | {"printed": want["printed"] if rank == 0 else ""}
        assert found == {name: wanted[name] for name in found}
        assert len(found) == (len(READERS) + 1 if read is read_compiled else len(want))
