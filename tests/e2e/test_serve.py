"""The server, as a client of OpenAI's API sees it: its ranks are forked, and in the slow tests torchrun's."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostile_requests
import pytest
import torch
import transformers
from checkpoints import VOCAB, save_causal
from distributed import torchrun_env
from forked import Forked, run_forked
from ports import free_port
from shardconv_runtime import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import shardconv

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

START_S = 120
SOON_S = 40
"""Well under any timeout of torch; these machines are slow."""
PROMPTS = ["w11 w245 w3", "w88 w5 w250 w19 w77", "w7"]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}w9"


def save_words(path: Path) -> None:
    """A tokenizer with a word for each token, and a chat template."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2")
    fast.add_tokens(["added"])  # beyond the model's rows
    fast.chat_template = TEMPLATE
    fast.save_pretrained(path)


@dataclass(frozen=True)
class Serving:
    """A running server, and the unsharded model."""

    port: int
    unsharded: Any
    tokenizer: Any

    @property
    def client(self) -> Any:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60
        )

    def continued(self, text: str, number: int) -> str:
        """What the unsharded model continues a text with, greedily."""
        inputs = self.tokenizer(text, return_tensors="pt")
        inputs.pop("token_type_ids", None)
        tokens = self.unsharded.generate(**inputs, max_new_tokens=number, do_sample=False, pad_token_id=0)
        decoded: str = self.tokenizer.decode(
            tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return decoded


def arguments(out: Path, port: int) -> list[str]:
    """Of a small server."""
    sizes = ["--num-blocks", "32", "--max-batch-tokens", "64"]
    return [str(out), "--port", str(port), "--name", "tiny", *sizes]


def fork_ranks(out: Path, port: int) -> list[Forked]:
    """Both ranks of a server, as torchrun starts them; they need not import torch again."""
    others = free_port()
    return [
        Forked(
            _exit_with,
            serve.main,
            argv=["serve", *arguments(out, port)],
            env=os.environ | torchrun_env(rank, 2, others) | {"TRANSFORMERS_VERBOSITY": "error"},
        )
        for rank in range(2)
    ]


def _exit_with(main: Callable[[], int]) -> None:
    sys.exit(main())


def start(out: Path, port: int, tp: int) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    command = [*torchrun, "-m", "shardconv_runtime.serve", *arguments(out, port)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait_until_healthy(port: int, *processes: subprocess.Popen[str] | Forked) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        for process in processes:
            assert process.poll() is None, process.communicate(timeout=1)
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("the server does not answer")


@contextlib.contextmanager
def running_ranks(out: Path) -> Iterator[int]:
    """Serve at two ranks, and give the port; when they are told to end, all processes end well."""
    port = free_port()
    ranks = fork_ranks(out, port)
    try:
        wait_until_healthy(port, *ranks)
        yield port
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
        printed = ["".join(rank.communicate(timeout=60)) for rank in ranks]
    assert not any("Error" in each for each in printed), printed


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """At two ranks; when it is told to end, all processes end well."""
    root = tmp_path_factory.mktemp("serve")
    source = save_causal("llama", root / "llama")
    save_words(source)
    shardconv.convert(source, root / "out", tp=2, check=False)
    unsharded = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    with running_ranks(root / "out") as port:
        yield Serving(port, unsharded, transformers.AutoTokenizer.from_pretrained(source))


def test_models(serving: Serving) -> None:
    assert [model.id for model in serving.client.models.list()] == ["tiny"]


def test_completions(serving: Serving) -> None:
    """Many at once, streamed and not, have the unsharded model's text."""

    def complete(index: int) -> str:
        options = {"model": "tiny", "prompt": PROMPTS[index % 3], "max_tokens": 6, "temperature": 0}
        if index % 2 == 0:
            return str(serving.client.completions.create(**options).choices[0].text)
        pieces = list(serving.client.completions.create(**options, stream=True))
        assert len(pieces) > 2
        assert pieces[-1].choices[0].finish_reason == "length"
        return "".join(piece.choices[0].text for piece in pieces)

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(complete, range(12)))
    want = [serving.continued(prompt, 6) for prompt in PROMPTS]
    assert [text.split() for text in texts] == [want[i % 3].split() for i in range(12)]


def test_chats(serving: Serving) -> None:
    messages = [{"role": "user", "content": "w5 w6"}, {"role": "assistant", "content": "w7"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 5, "temperature": 0}
    whole = serving.client.chat.completions.create(**options)
    pieces = list(
        serving.client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    want = serving.continued("user w5 w6 assistant w7 w9", 5)
    assert whole.choices[0].message.content.split() == want.split()
    assert whole.usage.completion_tokens == 5
    streamed = "".join(piece.choices[0].delta.content for piece in pieces if piece.choices)
    assert streamed == whole.choices[0].message.content
    assert pieces[-1].usage == whole.usage


def test_a_stop_string_ends_the_answer(serving: Serving) -> None:
    words = serving.continued(PROMPTS[1], 8).split()
    answer = serving.client.completions.create(
        model="tiny", prompt=PROMPTS[1], max_tokens=8, temperature=0, stop=[words[4]]
    )
    assert answer.choices[0].text.split() == words[: words.index(words[4])]
    assert answer.choices[0].finish_reason == "stop"


def test_sampled(serving: Serving) -> None:
    """Requests with their own temperature, at the same time as others."""
    options = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": 8}
    texts = [serving.client.completions.create(**options, temperature=2.0).choices[0].text for _ in range(3)]
    assert len(set(texts)) > 1
    greedy = serving.client.completions.create(**options, temperature=2.0, extra_body={"top_k": 1})
    assert greedy.choices[0].text.split() == serving.continued(PROMPTS[0], 8).split()


SETTINGS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0, "repetition_penalty": 1.4}, {"repetition_penalty": 1.4}),
    (
        {"temperature": 0, "logit_bias": {"40": 4, "50": -100}},
        {"sequence_bias": [[[40], 4.0], [[50], -100.0]]},
    ),
    ({"temperature": 1.3, "seed": 5}, {"temperature": 1.3, "top_k": 0}),
    (
        {"temperature": 0.9, "seed": -1, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    ),
]


def test_each_request_gets_what_generate_gives_it_alone(serving: Serving) -> None:
    """All at once, so that others share their steps."""

    def answer(index: int) -> Any:
        asked, _ = SETTINGS[index % len(SETTINGS)]
        return serving.client.completions.create(
            model="tiny", prompt=PROMPTS[index % 3], max_tokens=8, extra_body={"ignore_eos": True, **asked}
        )

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(answer, range(12)))
    for index, found in enumerate(answers):
        asked, options = SETTINGS[index % len(SETTINGS)]
        inputs = serving.tokenizer(PROMPTS[index % 3], return_tensors="pt")
        inputs.pop("token_type_ids", None)
        torch.manual_seed(asked.get("seed", 0))
        config = transformers.GenerationConfig(
            max_new_tokens=8, do_sample="seed" in asked, pad_token_id=0, eos_token_id=-1, **options
        )
        tokens = serving.unsharded.generate(**inputs, generation_config=config)
        want = serving.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        assert found.choices[0].text == want, asked


def test_several_answers_with_their_probabilities(serving: Serving) -> None:
    body = {"temperature": 1, "seed": 3, "ignore_eos": True}
    found = serving.client.completions.create(
        model="tiny", prompt=list(PROMPTS[:2]), n=2, max_tokens=5, logprobs=3, extra_body=body
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert found.usage.completion_tokens == 20
    assert found.choices[0].text != found.choices[1].text
    shown = found.choices[0].logprobs
    prompt = serving.tokenizer(PROMPTS[0])["input_ids"]
    new = serving.tokenizer.convert_tokens_to_ids([token.strip() for token in shown.tokens])
    with torch.no_grad():
        logits = serving.unsharded(torch.tensor([[*prompt, *new]])).logits[0]
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    assert shown.token_logprobs == pytest.approx(
        [float(rows[i, token]) for i, token in enumerate(new)], abs=1e-4
    )
    for row, likely in zip(rows, shown.top_logprobs, strict=True):
        assert list(likely.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    chat = serving.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "w5"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=1,
    )
    assert 1 <= len(chat.choices[0].logprobs.content) <= 2


def test_a_client_that_goes_away(serving: Serving) -> None:
    """The next one is answered; that the request has ended is seen below."""
    leave(serving.client, 100)
    answer = serving.client.completions.create(model="tiny", prompt=PROMPTS[2], max_tokens=6, temperature=0)
    assert answer.choices[0].text.split() == serving.continued(PROMPTS[2], 6).split()


def leave(client: Any, max_tokens: int) -> None:
    """Read two pieces of an answer, and close the connection."""
    options = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": max_tokens, "temperature": 0}
    with client.completions.create(**options, stream=True) as stream:
        assert all(next(stream).choices[0].text for _ in range(2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "not served"),
        ({"n": 300}, "n: Input should be less"),
        ({"seed": 0.5}, "seed"),
        ({"best_of": 2}, "best_of is not supported"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
            "schema|xgrammar",
        ),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias names"),
        ({"temperature": -1}, "temperature: Input should be greater"),
        ({"temperature": "hot"}, "temperature: Input should be a valid number"),
        ({"max_tokens": 2.9}, "max_tokens: Input should be a valid integer"),
        ({"max_tokens": 5000}, "the model's context has 128 tokens"),
        ({"prompt": ["a", ""]}, "without tokens"),
        ({"prompt": [VOCAB]}, f"the prompt has the id {VOCAB}"),
        ({"prompt": "w5 added"}, f"the prompt has the id {VOCAB}"),
        ({"prompt": ""}, "without tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused(serving: Serving, changes: dict[str, Any], message: str) -> None:
    options = {"model": "tiny", "prompt": "w5", "max_tokens": 2} | changes
    known = {name: options.pop(name) for name in ("model", "prompt", "max_tokens")}
    for streams in ({}, {"stream": True}):
        with pytest.raises(openai.APIStatusError, match=message) as error:
            list(serving.client.completions.create(**known, **streams, extra_body=options))
        assert 400 <= error.value.status_code < 500


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 1, "top_p": 1},
        {"temperature": 2},
        {"temperature": 1e-40},
        {"temperature": 1e-7, "top_p": 0},
        {"temperature": 100, "min_p": 1},
        {"top_k": -1, "min_p": 0},
        {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "n": 1, "echo": False},
    ],
)
def test_numbers_of_any_kind(serving: Serving, changes: dict[str, Any]) -> None:
    answer = serving.client.completions.create(
        model="tiny",
        prompt=PROMPTS[0],
        max_tokens=4,
        extra_body={"temperature": 0, "ignore_eos": True} | changes,
    )
    assert answer.usage.completion_tokens == 4
    if changes.get("temperature", 0) < 1 or changes.get("min_p") == 1:
        assert answer.choices[0].text.split() == serving.continued(PROMPTS[0], 4).split()


def test_the_default_of_a_chat_is_what_is_left(serving: Serving) -> None:
    messages = [{"role": "user", "content": " ".join(["w5"] * 60)}]
    options = {"model": "tiny", "extra_body": {"ignore_eos": True}}
    answer = serving.client.chat.completions.create(messages=messages, **options)
    assert answer.usage.total_tokens == 128
    assert answer.choices[0].finish_reason == "length"


def test_messages_with_calls_of_tools(serving: Serving) -> None:
    """The template of this model shows what has content; that it gets all is tested with the schemas."""
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    messages = [
        {"role": "user", "content": "w5"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "w8"},
    ]
    options = {"model": "tiny", "max_tokens": 3, "temperature": 0}
    assert serving.client.chat.completions.create(messages=messages, **options).usage.completion_tokens == 3


def test_stops_that_are_tokens(serving: Serving) -> None:
    """A special token, which the text does not show, and the id of a word."""
    words = serving.continued(PROMPTS[1], 8).split()
    token = serving.tokenizer.convert_tokens_to_ids(words[3])
    options = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 8, "temperature": 0}
    stop = words.index(words[3])
    answer = serving.client.completions.create(**options, extra_body={"stop_token_ids": [token]})
    assert answer.choices[0].text.split() == words[:stop]
    assert answer.choices[0].finish_reason == "stop"
    answer = serving.client.completions.create(**options, stop=["w2"])
    assert answer.choices[0].text.split() == words[: words.index("w2") if "w2" in words else 8]


def post(serving: Serving, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    """The status and the JSON of an answer."""
    url = f"http://127.0.0.1:{serving.port}{path}"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"prompt": NaN}',
        b'{"prompt": "w5", "temperature": NaN}',
        b"\xff\xfe",
        b"null",
        b"",
    ],
)
def test_nonsense_is_the_clients_fault(serving: Serving, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, found = post(serving, path, body)
        assert status == 400
        assert found["error"]["type"] == "invalid_request_error"


def test_hostile_requests_beside_ordinary_ones(serving: Serving) -> None:
    """Each is refused, the others are answered rightly, and nobody waits. The long form is a crowd."""
    bodies = [("/v1/completions", body) for body in hostile_requests.completions(random.Random(0))]
    bodies += [("/v1/chat/completions", body) for body in hostile_requests.chats()]

    def ask(path: str, body: dict[str, Any]) -> tuple[int, str]:
        status, found = post(serving, path, json.dumps({"model": "tiny", "max_tokens": 30} | body).encode())
        return status, found["error"]["message"] if "error" in found else ""

    def complete(index: int) -> str:
        options = {"model": "tiny", "prompt": PROMPTS[index % 3], "max_tokens": 6, "temperature": 0}
        return str(serving.client.completions.create(**options).choices[0].text)

    want = [serving.continued(prompt, 6).split() for prompt in PROMPTS]
    with ThreadPoolExecutor(len(bodies)) as pool, ThreadPoolExecutor(1) as other:
        asked = [pool.submit(ask, *each) for each in bodies]
        for index in range(8):
            begin = time.monotonic()
            assert other.submit(complete, index).result().split() == want[index % 3]
            assert time.monotonic() - begin < LONGEST_WAIT_S
        for (_, body), answer in zip(bodies, asked, strict=True):
            status, message = answer.result()
            assert status == 400, (body, status, message)
            assert message
            assert ".cc" not in message


LONGEST_WAIT_S = 4
"""What one compiler, or one template, took of everybody's time was more."""


def test_other_paths(serving: Serving) -> None:
    assert serving.client.models.retrieve("tiny").id == "tiny"
    for name in ("other", "a/b"):
        with pytest.raises(openai.NotFoundError, match="not served"):
            serving.client.models.retrieve(name)
    assert post(serving, "/v1/embeddings", b"{}")[0] == 404
    assert post(serving, "/v1/models", b"{}")[0] == 405


def test_metrics(serving: Serving) -> None:
    serving.client.completions.create(model="tiny", prompt=PROMPTS[0], max_tokens=3, temperature=0)
    text = urllib.request.urlopen(f"http://127.0.0.1:{serving.port}/metrics", timeout=5).read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["shardconv_new_tokens_total"]) >= 3
    assert float(values["shardconv_first_token_seconds_count"]) >= 1
    assert float(values["shardconv_requests_running"]) == 0
    assert float(values["shardconv_cache_use"]) == 0


# A server of its own --------------------------------------------------------------------------------


def endless(path: Path) -> Path:
    """A model with a long context, whose answers no token ends."""
    save_causal("llama", path, max_position_embeddings=8192)
    save_words(path)
    for name in ("config.json", "generation_config.json"):
        found = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**found, "eos_token_id": None}))
    return path


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started, in the order of their ranks."""
    found: dict[int, int] = {}
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ranks = [int(v.split(b"=")[1]) for v in variables if v.startswith(b"RANK=")]
        found |= dict.fromkeys(ranks, int(pid))
    return [found[rank] for rank in sorted(found)]


def cpu_s(pids: list[int]) -> float:
    """Seconds that processes have computed."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


@dataclass
class Endless:
    """A running server of an endless model."""

    process: subprocess.Popen[str]
    pids: list[int]
    """Of its ranks."""
    client: Any
    printed: str = ""
    """All of it, at the end."""


@contextlib.contextmanager
def serving_endless(path: Path) -> Iterator[Endless]:
    """At two ranks; whatever is left of it in the end is killed."""
    shardconv.convert(endless(path / "llama"), path / "out", tp=2, check=False)
    port = free_port()
    process = start(path / "out", port, 2)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    server = Endless(process, [], client)
    try:
        wait_until_healthy(port, process)
        server.pids = ranks_of(process)
        yield server
    finally:
        process.kill()
        for pid in server.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.printed, _ = process.communicate(timeout=60)


@pytest.mark.slow
def test_requests_end_with_their_clients_and_the_server_with_its_ranks(tmp_path: Path) -> None:
    with serving_endless(tmp_path) as server:
        client, pids = server.client, server.pids
        options = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0}
        begin, before = time.monotonic(), cpu_s(pids)
        client.completions.create(**options, max_tokens=200)
        busy = (cpu_s(pids) - before) / (time.monotonic() - begin)

        def require_idle() -> None:
            time.sleep(1)
            before = cpu_s(pids)
            time.sleep(3)
            assert (cpu_s(pids) - before) / 3 < busy / 3, "nobody waits for an answer"

        leave(client, 8000)
        assert client.completions.create(**options, max_tokens=3).usage.completion_tokens == 3
        require_idle()
        with pytest.raises(openai.APITimeoutError):  # it asked for all in one piece, and hangs up
            client.completions.create(**options, max_tokens=8000, timeout=1)
        require_idle()

        stream = client.completions.create(**options, max_tokens=8000, stream=True)
        next(stream)
        begin = time.monotonic()
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(openai.OpenAIError):
            list(stream)
        assert server.process.wait(timeout=SOON_S) != 0
        assert time.monotonic() - begin < SOON_S
    assert "another rank" in server.printed or "rank 1" in server.printed, server.printed


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM to all", "SIGTERM to the launcher", "the launcher is killed"])
def test_a_server_that_is_told_to_end_while_it_answers(how: str, tmp_path: Path) -> None:
    with serving_endless(tmp_path) as server:
        stream = server.client.completions.create(model="tiny", prompt="w5", max_tokens=8000, stream=True)
        next(stream)
        begin = time.monotonic()
        if how == "the launcher is killed":
            server.process.kill()
        else:
            for pid in server.pids if how == "SIGTERM to all" else []:
                os.kill(pid, signal.SIGTERM)
            server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)
        while any(Path(f"/proc/{pid}").exists() for pid in server.pids):
            assert time.monotonic() - begin < 60
            time.sleep(0.1)
        assert time.monotonic() - begin < (10 if how == "the launcher is killed" else 25)


@pytest.mark.slow
def test_a_request_that_fails_on_the_last_stage_fails_alone(tmp_path: Path) -> None:
    """Rank 0, on the first stage, has no logits, and hears of it in place of the token."""
    source = save_causal("llama", tmp_path / "llama")
    hostile_requests.letters().save_pretrained(source)
    shardconv.convert(source, tmp_path / "out", tp=1, pp=2, check=False)
    port = free_port()
    process = start(tmp_path / "out", port, 2)
    try:
        wait_until_healthy(port, process)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        options = {"model": "tiny", "prompt": "abc", "max_tokens": 20}
        for temperature in (0, 1):
            for values, text in ((["Yes", "No"], None), (["yes"], '"yes"')):
                form = {"type": "json_schema", "json_schema": {"schema": {"enum": values}}}
                body = {"extra_body": {"response_format": form}, "temperature": temperature}
                if text is not None:
                    assert client.completions.create(**options, **body).choices[0].text == text
                    continue
                with pytest.raises(openai.BadRequestError, match="no token may come next"):
                    client.completions.create(**options, **body)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON_S)


def test_without_its_packages_it_says_what_to_install(tmp_path: Path) -> None:
    for name in ("fastapi", "pydantic"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not here')")
    code = (
        "import importlib.util, sys; found = importlib.util.find_spec; "
        "importlib.util.find_spec = lambda name, *a: None if name == 'uvicorn' else found(name, *a); "
        "from shardconv_runtime.serve import main; sys.argv[1:] = ['out']; sys.exit(main())"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=START_S
    )
    assert done.returncode == 5
    assert "serving needs uvicorn: pip install fastapi prometheus-client uvicorn" in done.stderr


def test_a_generation_config_that_cannot_be_granted_is_refused_at_the_start(tmp_path: Path) -> None:
    source = endless(tmp_path / "llama")
    found = json.loads((source / "generation_config.json").read_text())
    (source / "generation_config.json").write_text(json.dumps({**found, "no_repeat_ngram_size": 2}))
    shardconv.convert(source, tmp_path / "out", tp=1, check=False)
    argv = ["serve", *arguments(tmp_path / "out", free_port())]
    env = os.environ | torchrun_env(0, 1, free_port())
    done = run_forked(_exit_with, serve.main, argv=argv, env=env, timeout=START_S)
    assert done.returncode == 5
    assert "--ignore no_repeat_ngram_size" in done.stderr


def test_a_prompt_whose_logits_are_not_numbers(tmp_path: Path) -> None:
    """It is an error, also for requests that share a step with it; the server goes on, with right answers."""
    source = save_causal("llama", tmp_path / "llama")
    save_words(source)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float64).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[90] = float("nan")
    model.save_pretrained(source)
    shardconv.convert(source, tmp_path / "out", tp=2, check=False)
    port = free_port()
    process = start(tmp_path / "out", port, 2)
    try:
        wait_until_healthy(port, process)
        served = Serving(port, model, transformers.AutoTokenizer.from_pretrained(source))
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="not numbers for this prompt"):
                served.client.completions.create(model="tiny", prompt="w90 w5", max_tokens=4)
            answer = served.client.completions.create(
                model="tiny", prompt=PROMPTS[0], max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
            )
            assert answer.choices[0].text.split() == served.continued(PROMPTS[0], 8).split()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SOON_S)
