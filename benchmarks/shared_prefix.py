#!/usr/bin/env python3
"""The first token of prompts that begin alike, by servers of OpenAI's API beside each other.

The model and the servers are those of ``servers.py``. One client asks greedily, one question after another.
Each prompt has a system message of at least 512 tokens. First every message is another one, so that nothing
can be shared. Then all questions follow one message, which the server has seen once. *Answers alike* compares
the answers to these with those of the first server.

    python benchmarks/shared_prefix.py --vllm .venv/vllm/bin/python [--markdown FILE]
    python benchmarks/shared_prefix.py --small          to see that everything comes out
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import openai
import transformers
from convert import render, show, tell, versions
from disk import machine
from ports import free_port
from servers import QUESTIONS, Server, converted_model, running, servers

COLUMNS = (
    "server",
    "first token, nothing shared, ms",
    "first token, shared, ms",
    "ratio",
    "cached tokens",
    "answers alike",
)


_answers: dict[str, str] = {}
"""Question -> the answer of the first server behind the shared message."""


def message(number: int, num_tokens: int, tokenizer: Any) -> str:
    """A text of at least so many tokens that begins as no other one."""
    sentences, text = 0, ""
    while len(tokenizer(text)["input_ids"]) < num_tokens:
        text += f"Rule {number}.{sentences}: answer question {sentences} of group {number} in short words. "
        sentences += 1
    return text


def ask(
    client: openai.OpenAI, model: str, system: str, question: str, num_tokens: int
) -> tuple[float, str, int]:
    """Seconds to the first piece of an answer, its text, and the tokens of the prompt that were cached."""
    begin, first_s, text, cached = time.perf_counter(), None, "", 0
    for piece in client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        max_tokens=num_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if piece.choices and piece.choices[0].delta.content:
            first_s = first_s or time.perf_counter() - begin
            text += piece.choices[0].delta.content
        details = piece.usage and piece.usage.prompt_tokens_details
        cached = (details and details.cached_tokens) or cached
    return first_s or time.perf_counter() - begin, text, cached


def row(server: Server, base: str, options: argparse.Namespace, tokenizer: Any) -> dict[str, str]:
    """Ask each question behind a message of its own, then all behind one message."""
    with openai.OpenAI(base_url=f"{base}/v1", api_key="none", timeout=600, max_retries=0) as client:

        def answer(number: int, question: str) -> tuple[float, str, int]:
            system = message(number, options.prefix, tokenizer)
            return ask(client, server.model, system, question, options.tokens)

        questions = QUESTIONS[: options.questions]
        alone = [answer(1 + number, question) for number, question in enumerate(questions)]
        answer(0, "Hello")
        shared = [answer(0, question) for question in questions]
    alike = sum(
        _answers.setdefault(question, text) == text
        for question, (_, text, _) in zip(questions, shared, strict=True)
    )
    ratio = median(s for s, _, _ in shared) / median(s for s, _, _ in alone)
    values = (
        server.name,
        f"{1000 * median(s for s, _, _ in alone):.0f}",
        f"{1000 * median(s for s, _, _ in shared):.0f}",
        f"{ratio:.2f}",
        f"{median(cached for _, _, cached in shared):.0f}",
        f"{alike} of {len(questions)}",
    )
    return dict(zip(COLUMNS, values, strict=True))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", help="the Python of an environment with vLLM for CPUs")
    parser.add_argument("--prefix", type=int, default=512, help="least tokens of the system message")
    parser.add_argument("--questions", type=int, default=len(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=16, help="most new tokens")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of servers")
    parser.add_argument("--small", action="store_true", help="two questions, shardconv at one rank only")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    options = parser.parse_args()
    if options.small:
        options.questions, options.tokens = 2, 4
    return options


def main() -> None:
    options = parse_arguments()
    load = os.getloadavg()[0]
    rows = []
    with tempfile.TemporaryDirectory(prefix="shardconv-") as scratch:
        root, begin = Path(scratch), time.monotonic()
        source, converted = converted_model(root, (1,) if options.small else (1, 2))
        port = free_port()
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        for server in servers(options, source, converted, port)[: 1 if options.small else None]:
            if not any(part in server.name for part in options.only):
                continue
            try:
                with running(server, port, root / "log") as (base, _):
                    rows.append(row(server, base, options, tokenizer))
            except (RuntimeError, openai.OpenAIError) as error:
                empty = dict.fromkeys(COLUMNS, "")
                rows.append({**empty, "server": f"{server.name}: not measured: {str(error)[:160]}"})
            tell(str(rows[-1]))
        notes = [
            f"{machine(root)}, {versions('torch', 'transformers')}",
            f"SmolLM2-135M-Instruct, float32, {options.cores} cores a server, a prefix of {options.prefix}",
            f"load of the machine {load:.1f} before; {time.monotonic() - begin:.0f} s in all",
        ]
    show(render(rows, notes), options.markdown)


if __name__ == "__main__":
    main()
