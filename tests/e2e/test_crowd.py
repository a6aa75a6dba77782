"""Many clients that come, go, hang up and send nonsense: nothing is lost, all tokens are right."""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from checkpoints import save_causal
from distributed import free_port
from test_serve import PROMPTS, SOON_S, Serving, openai, ranks_of, save_words, start, wait_until_healthy

import shardconv

CROWD_S = float(os.environ.get("SHARDCONV_CROWD_S", "300"))
CLIENTS = 64
SEEDS = (3, 4)
LENGTHS = (1, 5, 16)
MOST_GROWTH = 30e6
"""Bytes of a rank, from when a fifth of the time is over and the cache was used."""
NONSENSE = (
    b"",
    b"{",
    b"[" * 10_000,
    b'{"prompt": "\\ud800"}',
    b'{"prompt": 3}',
    b'{"prompt": "w5", "n": -1}',
)


@dataclass
class Crowd:
    """What the clients did, and what went wrong."""

    serving: Serving
    wanted: dict[tuple[int, int | None, int], str]
    """(prompt, seed, number of tokens) -> the text."""
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def client(self, number: int) -> None:
        """One of them, until the end."""
        draw = random.Random(number)
        acts = (
            self.whole,
            self.whole,
            self.streamed,
            self.streamed,
            self.hung_up,
            self.hung_up_whole,
            self.nonsense,
        )
        while time.monotonic() < self.end:
            act = draw.choice(acts)
            try:
                act(draw)
                self.counts[act.__name__] += 1
            except Exception as error:
                self.wrong.append(f"{act.__name__}: {error!r}")
            time.sleep(draw.random() * 0.2)

    def request(self, draw: random.Random) -> tuple[str, dict[str, Any]]:
        """The text that is right, and the request."""
        key = draw.choice(list(self.wanted))
        prompt, seed, length = key
        drawing = {"temperature": 0} if seed is None else {"temperature": 1.2, "seed": seed}
        options = {
            "model": "tiny",
            "prompt": PROMPTS[prompt],
            "max_tokens": length,
            "ignore_eos": True,
            **drawing,
        }
        return self.wanted[key], options

    def posted(self, body: bytes) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.port, timeout=60)
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection

    def whole(self, draw: random.Random) -> None:
        text, options = self.request(draw)
        answer = self.posted(json.dumps(options).encode()).getresponse()
        found = json.loads(answer.read())
        assert found["choices"][0]["text"] == text, (options, found)

    def streamed(self, draw: random.Random) -> None:
        text, options = self.request(draw)
        answer = self.posted(json.dumps({**options, "stream": True}).encode()).getresponse()
        events = answer.read().decode().split("\n\n")
        assert events[-2] == "data: [DONE]", events
        found = "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2])
        assert found == text, (options, found)

    def hung_up(self, draw: random.Random) -> None:
        body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 100, "ignore_eos": True, "stream": True}
        connection = self.posted(json.dumps(body).encode())
        connection.getresponse().read(20)
        connection.close()

    def hung_up_whole(self, draw: random.Random) -> None:
        body = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 100, "ignore_eos": True}
        connection = self.posted(json.dumps(body).encode())
        time.sleep(draw.random() * 0.1)
        connection.close()

    def nonsense(self, draw: random.Random) -> None:
        answer = self.posted(draw.choice(NONSENSE)).getresponse()
        found = json.loads(answer.read())
        assert 400 <= answer.status < 500, (answer.status, found)
        assert found["error"]["message"]


def right_texts(model: Any, tokenizer: Any) -> dict[tuple[int, int | None, int], str]:
    """What ``generate`` answers to each request alone."""
    found = {}
    for index, prompt in enumerate(PROMPTS):
        inputs = tokenizer(prompt, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        for seed in (None, *SEEDS):
            torch.manual_seed(seed or 0)
            drawing = (
                {"do_sample": False} if seed is None else {"temperature": 1.2, "top_k": 0, "do_sample": True}
            )
            config = transformers.GenerationConfig(
                max_new_tokens=max(LENGTHS), pad_token_id=0, eos_token_id=-1, **drawing
            )
            tokens = model.generate(**inputs, generation_config=config)[0, inputs["input_ids"].shape[1] :]
            for length in LENGTHS:
                found[index, seed, length] = tokenizer.decode(tokens[:length], skip_special_tokens=True)
    return found


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_crowd(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    save_words(source)
    shardconv.convert(source, tmp_path / "out", tp=2, check=False)
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    port = free_port()
    process = start(tmp_path / "out", port, 2)
    printed: list[str] = []
    try:
        wait_until_healthy(port, process)
        assert process.stdout is not None
        threading.Thread(
            target=lambda: printed.extend(process.stdout), daemon=True
        ).start()  # or it would fill up
        ranks = ranks_of(process)
        serving = Serving(port, process, unsharded, tokenizer)
        crowd = Crowd(serving, right_texts(unsharded, tokenizer), time.monotonic() + CROWD_S)
        threads = [threading.Thread(target=crowd.client, args=(number,)) for number in range(CLIENTS)]
        for thread in threads:
            thread.start()
        time.sleep(CROWD_S / 5)
        assert all(Path(f"/proc/{rank}").exists() for rank in ranks), "".join(printed[-40:])
        share = float(metrics(port).split("\nshardconv_cache_use ")[1].split()[0])
        assert 0 < share <= 1, "64 clients fill 32 pages"
        before = [resident(rank) for rank in ranks]
        for thread in threads:
            thread.join()
        after = [resident(rank) for rank in ranks]
        print(f"in {CROWD_S:g} s: {dict(crowd.counts)}; bytes of ranks {before} -> {after}")
        assert not crowd.wrong, (len(crowd.wrong), crowd.wrong[:5])
        assert min(crowd.counts.values()) > CROWD_S / 5, crowd.counts
        assert max(b - a for a, b in zip(before, after, strict=True)) < MOST_GROWTH
        deadline = time.monotonic() + SOON_S
        while "shardconv_requests_running 0.0" not in metrics(port) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert "shardconv_requests_running 0.0" in metrics(port), "requests of clients that left go on"
        os.kill(ranks[-1], signal.SIGKILL)
        assert process.wait(timeout=SOON_S) != 0
        with pytest.raises(openai.APIConnectionError):
            serving.client.models.list()
        assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    finally:
        process.kill()


def metrics(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", "/metrics")
    return connection.getresponse().read().decode()
