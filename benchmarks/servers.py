#!/usr/bin/env python3
"""Servers of OpenAI's API beside each other: shardconv's, transformers' and vLLM's for CPUs.

Each server in turn has a real model (the demo's SmolLM2-135M-Instruct, float32), both cores, and the same
chats, greedily: 1, 8 and 64 clients at a time stream their answers. Tokens are those of the answers' texts.
The first token is counted from the request, the others between pieces of one answer. A server that cannot be
started is left out, with its error.

    python benchmarks/servers.py --vllm .venv/vllm/bin/python [--clients 1 8 64] [--markdown FILE]
    python benchmarks/servers.py --small          to see that everything comes out
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import openai
import transformers
from convert import render, show, tell, versions
from disk import machine
from ports import free_port
from synthetic import DEMO_CHECKPOINT

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a short story about a dog and a cat.",
    "Explain how rain forms, in a few sentences.",
    "List five animals that live in the sea.",
    "What is the difference between a tree and a bush?",
    "Tell me about the history of bread.",
    "How do I boil an egg?",
)
START_S = 300
NUM_WARM_UP = 2
PAGES = ("--num-blocks", "96", "--max-batch-tokens", "512")


@dataclass(frozen=True)
class Server:
    """How a server is started, and what it calls the model."""

    name: str
    command: Sequence[str]
    model: str
    env: dict[str, str]


@dataclass(frozen=True)
class Answer:
    """Times of the pieces of an answer, in seconds since the request, and its text."""

    times: tuple[float, ...]
    text: str


def servers(options: argparse.Namespace, source: Path, converted: dict[int, Path], port: int) -> list[Server]:
    """All that are measured."""
    found = []
    for tp, out in converted.items():
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
        serve = ["-m", "shardconv_runtime.serve", str(out), "--port", str(port), "--name", "model", *PAGES]
        env = {"OMP_NUM_THREADS": str(max(1, options.cores // tp))}
        found.append(Server(f"shardconv, tp {tp}", [sys.executable, *torchrun, *serve], "model", env))
    program = str(Path(sys.executable).with_name("transformers"))
    command = [program, "serve", str(source), "--port", str(port), "--dtype", "float32"]
    env = {"OMP_NUM_THREADS": str(options.cores)}
    found.append(Server("transformers serve", [*command, "--device", "cpu"], str(source), env))
    pages = ["--cb-num-blocks", PAGES[1], "--cb-max-batch-tokens", PAGES[3], "--cb-block-size", "256"]
    batching = [*command, "--device", "cpu", "--continuous-batching", *pages]
    found.append(Server("transformers serve, continuous batching", batching, str(source), env))
    if options.vllm:
        module = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(source)]
        arguments = [*module, "--port", str(port), "--served-model-name", "model"]
        limits = ["--dtype", "float32", "--max-model-len", "1024"]
        env = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": str(options.cores)}
        found.append(Server("vLLM for CPUs", [options.vllm, *arguments, *limits], "model", env))
    return found


async def answer(client: openai.AsyncOpenAI, model: str, question: str, num_tokens: int) -> Answer:
    """Stream one answer."""
    begin, times, text = time.perf_counter(), [], ""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
    )
    async for piece in stream:
        if piece.choices and piece.choices[0].delta.content:
            times.append(time.perf_counter() - begin)
            text += piece.choices[0].delta.content
    return Answer(tuple(times), text)


async def measure(base: str, model: str, num_clients: int, num_each: int, num_tokens: int) -> dict[str, Any]:
    """Answers of clients that ask one question after another, and the seconds of all."""
    async with openai.AsyncOpenAI(
        base_url=f"{base}/v1", api_key="none", timeout=600, max_retries=0
    ) as client:

        async def ask(number: int) -> list[Answer]:
            return [
                await answer(client, model, QUESTIONS[(number + turn) % len(QUESTIONS)], num_tokens)
                for turn in range(num_each)
            ]

        begin = time.perf_counter()
        answers = [each for some in await asyncio.gather(*map(ask, range(num_clients))) for each in some]
        return {"seconds": time.perf_counter() - begin, "answers": answers}


def wait_until_it_answers(base: str, process: subprocess.Popen[bytes], model: str, log: Path) -> None:
    """Ask until there is an answer: the first one waits for what is made once."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(log.read_text(errors="replace").strip()[-600:] or "it ended")
        try:
            for number in range(NUM_WARM_UP):
                asyncio.run(measure(base, model, 1 + number, 1, 4))
            return
        except openai.APIStatusError as error:
            if error.status_code < 500:
                raise
            time.sleep(0.5)
        except openai.APIConnectionError:
            time.sleep(0.5)
    raise RuntimeError(f"no answer in {START_S} s")


@contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[tuple[str, float]]:
    """Start a server; gives its address and the seconds until it answered."""
    base = f"http://127.0.0.1:{port}"
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **server.env},
            start_new_session=True,
        )
    try:
        wait_until_it_answers(base, process, server.model, log)
        yield base, time.monotonic() - begin
    finally:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, sign)
                process.wait(30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def rows_of(
    server: Server, options: argparse.Namespace, tokenizer: Any, port: int, log: Path
) -> list[dict[str, str]]:
    """A row for each number of clients, or one with the error."""
    try:
        with running(server, port, log) as (base, started_s):
            rows = []
            for num_clients in options.clients:
                num_each = max(1, options.answers // num_clients)
                found = asyncio.run(measure(base, server.model, num_clients, num_each, options.tokens))
                rows.append(row(server.name, num_clients, found, tokenizer, started_s))
                tell(str(rows[-1]))
            return rows
    except (RuntimeError, openai.OpenAIError) as error:
        tell(f"{server.name}: {error}")
        return [
            {
                **dict.fromkeys(COLUMNS, ""),
                "server": server.name,
                "tokens / s": f"not measured: {str(error)[:160]}",
            }
        ]


COLUMNS = (
    "server",
    "clients",
    "tokens / s",
    "first token, s",
    "between tokens, ms",
    "answers alike",
    "start, s",
)
_known: dict[str, str] = {}
"""Question -> the answer of the first server."""


def row(
    name: str, num_clients: int, found: dict[str, Any], tokenizer: Any, started_s: float
) -> dict[str, str]:
    """One line of the table."""
    answers: list[Answer] = found["answers"]
    counts = [len(tokenizer(each.text, add_special_tokens=False)["input_ids"]) for each in answers]
    firsts = [each.times[0] for each in answers if each.times]
    gaps = [
        (each.times[-1] - each.times[0]) / (count - 1)
        for each, count in zip(answers, counts, strict=True)
        if count > 1 and each.times
    ]
    turns = len(answers) // num_clients
    asked = [
        QUESTIONS[(client + turn) % len(QUESTIONS)] for client in range(num_clients) for turn in range(turns)
    ]
    alike = sum(_known.setdefault(q, each.text) == each.text for q, each in zip(asked, answers, strict=True))
    values = (
        name,
        str(num_clients),
        f"{sum(counts) / found['seconds']:.1f}",
        f"{median(firsts):.2f}",
        f"{1000 * median(gaps):.0f}",
        f"{alike} of {len(answers)}",
        f"{started_s:.0f}",
    )
    return dict(zip(COLUMNS, values, strict=True))


def converted_model(root: Path, ranks: Sequence[int]) -> tuple[Path, dict[int, Path]]:
    """The demo's model, and it converted to float32 for each number of ranks."""
    source, converted = root / "model", {tp: root / f"tp{tp}" for tp in ranks}
    subprocess.run([sys.executable, DEMO_CHECKPOINT, source], check=True)
    for tp, out in converted.items():
        convert = [sys.executable, "-m", "shardconv", "convert", source, "--tp", str(tp), out]
        subprocess.run([*convert, "--dtype", "float32", "--no-check", "--quiet"], check=True)
    return source, converted


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", help="the Python of an environment with vLLM for CPUs")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--answers", type=int, default=8, help="at least so many for each number of clients")
    parser.add_argument("--tokens", type=int, default=48, help="most new tokens")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of servers")
    parser.add_argument(
        "--small", action="store_true", help="few clients and tokens, shardconv at one rank only"
    )
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    if options.small:
        options.clients, options.answers, options.tokens = [1, 2], 2, 4
    return options


def main() -> None:
    options = parse_arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="shardconv-") as scratch:
        root, begin = Path(scratch), time.monotonic()
        source, converted = converted_model(root, (1,) if options.small else (1, 2))
        port = free_port()
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        rows = []
        for server in servers(options, source, converted, port)[: 1 if options.small else None]:
            if any(part in server.name for part in options.only):
                rows += rows_of(server, options, tokenizer, port, root / "log")
        notes = [
            f"{machine(root)}, {versions('torch', 'transformers')}",
            f"SmolLM2-135M-Instruct, float32, {options.cores} cores a server, up to {options.tokens} tokens",
            f"load of the machine {load:.1f} before; {time.monotonic() - begin:.0f} s in all",
        ]
    show(render(rows, notes), options.markdown)


if __name__ == "__main__":
    main()
