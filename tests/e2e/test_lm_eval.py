"""lm-eval with the model type ``shardconv``: the scores of the type ``hf`` in one process."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from distributed import forget_launcher, run_errors, run_processes
from places import ROOT

pytest.importorskip("lm_eval")

import shardconv

LINES = [f"{i} times {k} is {i * k}" for i in range(2, 5) for k in range(3, 6)]

TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: [" right", " wrong", " both of it"]
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


def evaluate(place: Path, kind: str, model: str, given: dict[str, str] | None = None) -> None:
    """What the command line does."""
    os.chdir(place)
    if kind == "hf":
        forget_launcher()
    from shardconv_runtime.integrations.lm_eval import main

    arguments = {
        "model": kind, "model_args": f"pretrained={model},dtype=float32", "device": "cpu", "batch_size": "3",
        "include_path": "tasks", "tasks": ",".join(TASKS), "output_path": f"{kind}.json", **(given or {}),
    }  # fmt: skip
    sys.argv = [
        "lm_eval",
        "run",
        *(word for name, value in arguments.items() for word in (f"--{name}", value)),
    ]
    main()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``plain`` with its tokenizer, ``out`` for two ranks, and tasks."""
    root = tmp_path_factory.mktemp("evaluated")
    config = transformers.LlamaConfig(
        vocab_size=259, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, pad_token_id=0, eos_token_id=1, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(root / "plain")
    transformers.ByT5Tokenizer(extra_ids=0).save_pretrained(root / "plain")
    shardconv.convert(root / "plain", root / "out", 2)
    (root / "tasks").mkdir()
    rows = [json.dumps({"text": line, "answer": i % 3}) for i, line in enumerate(LINES)]
    (root / "rows.jsonl").write_text("\n".join(rows))
    for name, text in TASKS.items():
        common = f"task: {name}\ndataset_path: json\ntest_split: test\ntarget_delimiter: ''\n"
        files = f"dataset_kwargs: {{data_files: {{test: {root / 'rows.jsonl'}}}}}"
        (root / "tasks" / f"{name}.yaml").write_text(common + files + text)
    return root


def results(place: Path, kind: str) -> dict[str, dict[str, Any]]:
    (file,) = place.glob(f"{kind}_*.json")  # one, though each rank ran
    found: dict[str, dict[str, Any]] = json.loads(file.read_text())["results"]
    return found


def test_the_scores_are_those_of_one_process(place: Path) -> None:
    run_processes(1, evaluate, place, "hf", "plain")
    run_processes(2, evaluate, place, "shardconv", "out")
    expected, found = results(place, "hf"), results(place, "shardconv")
    assert found.keys() == expected.keys() == TASKS.keys()
    for task, values in expected.items():
        assert found[task].keys() == values.keys()
        for name, value in values.items():
            if isinstance(value, float):
                assert math.isclose(found[task][name], value, rel_tol=1e-5), (task, name)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"batch_size": "auto"}, "each rank would choose its own"),
        ({"model_args": "pretrained=out,peft=there"}, "peft= is about loading an ordinary model"),
        ({"model_args": "pretrained=out,tp_plan=auto"}, "tp_plan= is about loading an ordinary model"),
    ],
    ids=str,
)
def test_what_ranks_cannot_do_is_refused_on_each(place: Path, given: dict[str, str], why: str) -> None:
    for error in run_errors(2, evaluate, place, "shardconv", "out", given):
        assert why in str(error)


def test_an_incomplete_cache_of_one_rank_is_an_error_on_each(place: Path, tmp_path: Path) -> None:
    """What an interrupted run with ``use_cache`` leaves: a file for each rank."""
    given = {"use_cache": str(tmp_path / "cache"), "tasks": "choices"}
    run_processes(2, evaluate, place, "shardconv", "out", given)
    for rank, lost in enumerate((2, 3)):
        with sqlite3.connect(tmp_path / f"cache_rank{rank}.db") as cache:
            cache.execute("DELETE FROM unnamed WHERE rowid IN (SELECT rowid FROM unnamed LIMIT ?)", (lost,))
    for error in run_errors(2, evaluate, place, "shardconv", "out", given):
        assert "loglikelihood was called with another requests" in str(error)


@pytest.mark.slow
def test_the_table_of_scores(place: Path, tmp_path: Path) -> None:
    """``benchmarks/evaluation.py`` in a small size."""
    table = tmp_path / "table.md"
    script = ROOT / "benchmarks" / "evaluation.py"
    command = [sys.executable, script, place / "plain", "--tp", "2", "--markdown", table]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
    subprocess.run(command, env=env, check=True, capture_output=True)
    rows = table.read_text().splitlines()
    alone, sharded = ([cell.strip() for cell in row.split("|")] for row in rows[2:])
    assert list(map(float, sharded[2:7])) == pytest.approx(list(map(float, alone[2:7])), rel=1e-4)
    assert float(sharded[7]) < 1e-4
    assert sharded[8] == "20 of 20"
