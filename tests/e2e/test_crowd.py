"""Many clients that come, go, hang up, send nonsense and do harm: nothing is lost, all tokens are right."""

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
import xgrammar
from checkpoints import save_causal
from hostile_requests import REPETITIONS, chats, completions, letters
from ports import free_port
from test_serve import SOON_S, Serving, openai, ranks_of, start, wait_until_healthy

import shardconv

CROWD_S = float(os.environ.get("SHARDCONV_CROWD_S", "300"))
CLIENTS = 64
PROMPTS = ["abc de", "hello world", "7"]
SCHEMA = '{"enum": ["yes", "no", 12, null]}'
SEEDS = (3, 4)
LENGTHS = (1, 5, 16)
WAIT_S = 120
"""Most seconds of an answer: all wait for two cores."""
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
    followed: list[str]
    """The answer to each prompt that follows the schema."""
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
            self.harmful,
            self.with_schema,
            self.with_logprobs,
            self.chat,
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

    def posted(self, body: bytes, path: str = "/v1/completions") -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.port, timeout=WAIT_S)
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        return connection

    def answered(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        sent = json.dumps({"model": "tiny", "temperature": 0} | body).encode()
        answer = self.posted(sent, path).getresponse()
        found = json.loads(answer.read())
        assert answer.status == 200, (body, found)
        return found["choices"][0]

    def harmful(self, draw: random.Random) -> None:
        bodies = [("/v1/completions", body) for body in completions(draw)]
        path, body = draw.choice(bodies + [("/v1/chat/completions", body) for body in chats()])
        sent = json.dumps({"model": "tiny", "max_tokens": 30} | body).encode()
        answer = self.posted(sent, path).getresponse()
        found = json.loads(answer.read())
        # A short answer may follow nested repetitions before they become slow.
        accepted = (200, 400) if REPETITIONS in str(body) else (400,)
        assert answer.status in accepted, (str(body)[:300], answer.status, str(found)[:500])

    def with_schema(self, draw: random.Random) -> None:
        index = draw.randrange(len(PROMPTS))
        schema = {"type": "json_schema", "json_schema": {"schema": json.loads(SCHEMA)}}
        found = self.answered({"prompt": PROMPTS[index], "max_tokens": 9, "response_format": schema})
        assert found["text"] == self.followed[index], (index, found)

    def with_logprobs(self, draw: random.Random) -> None:
        index = draw.randrange(len(PROMPTS))
        body = {"prompt": PROMPTS[index], "max_tokens": 5, "logprobs": 5, "ignore_eos": True}
        found = self.answered(body)
        assert found["text"] == self.wanted[index, None, 5], (index, found)
        shown = found["logprobs"]
        assert [len(top) for top in shown["top_logprobs"]] == [5] * 5, found
        assert [max(top.values()) for top in shown["top_logprobs"]] == shown["token_logprobs"], found

    def chat(self, draw: random.Random) -> None:
        """Its template makes the prompt of a completion: the content, a space and the note."""
        index = draw.randrange(len(PROMPTS))
        content, space, note = PROMPTS[index].rpartition(" ")
        if not space:
            return
        options = {"note": note, "add_generation_prompt": False}
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "chat_template_kwargs": options, "max_tokens": 5, "ignore_eos": True}
        found = self.answered(body, "/v1/chat/completions")
        assert found["message"]["content"] == self.wanted[index, None, 5], (index, found)

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


def followed_texts(model: Any, tokenizer: Any) -> list[str]:
    """The likeliest answers to each prompt that follow the schema, token by token."""
    size = model.config.vocab_size
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=[2])
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, max_whitespace_cnt=8)
    mask, texts = xgrammar.allocate_token_bitmask(1, size), []
    for prompt in PROMPTS:
        ids, matcher = tokenizer(prompt)["input_ids"], xgrammar.GrammarMatcher(grammar)
        answer: list[int] = []
        while not matcher.is_terminated():
            with torch.no_grad():
                scores = model(torch.tensor([ids + answer])).logits[:, -1].float()
            matcher.fill_next_token_bitmask(mask)
            xgrammar.apply_token_bitmask_inplace(scores, mask)
            answer.append(int(scores.argmax()))
            assert matcher.accept_token(answer[-1])
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    return texts


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.slow
def test_a_crowd(tmp_path: Path) -> None:
    source = save_causal("llama", tmp_path / "llama")
    letters().save_pretrained(source)
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
        serving = Serving(port, unsharded, tokenizer)
        right = right_texts(unsharded, tokenizer), followed_texts(unsharded, tokenizer)
        crowd = Crowd(serving, *right, time.monotonic() + CROWD_S)
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
        assert min(crowd.counts.values()) > CROWD_S / 10, crowd.counts
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
