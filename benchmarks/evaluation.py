#!/usr/bin/env python3
"""Scores of lm-eval: the model type ``shardconv`` at several numbers of ranks, beside ``hf`` in one process.

Three local tasks: 64 multiple choices, perplexity of texts, 20 short answers; float32 on CPUs. The quantized
rows compare a checkpoint with weights of 8 bits (torchao) that both load packed.

    python benchmarks/evaluation.py MODEL [--tp 1 2 3] [--quantized] [--markdown FILE]

MODEL is an ordinary checkpoint with its tokenizer: ``scripts/demo_checkpoint.py DIRECTORY`` writes one. Needs
``pip install 'shardconv-runtime[lm-eval]'``, and torchao with ``--quantized``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import shardconv

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Germany": "Berlin", "Spain": "Madrid", "Japan": "Tokyo",
    "Egypt": "Cairo", "Greece": "Athens", "Russia": "Moscow", "China": "Beijing", "Cuba": "Havana",
    "Austria": "Vienna", "Ireland": "Dublin", "Norway": "Oslo", "Peru": "Lima", "Portugal": "Lisbon",
    "Poland": "Warsaw", "Hungary": "Budapest", "Sweden": "Stockholm", "Kenya": "Nairobi", "Iran": "Tehran",
}  # fmt: skip
TEXTS = [
    "The sun rises in the east and sets in the west.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "A quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "Two and two make four; four and four make eight; eight and eight make sixteen.",
    "She opened the old book, and a letter fell out of it that nobody had ever read.",
    "Tensor parallelism divides the weights of each layer among several processors.",
]
COMMON = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
TASKS = {
    "choices": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
    "answers": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {until: [".", "\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}, {metric: bleu}]
""",
}
SCORES = {
    "acc": ("choices", "acc,none"),
    "acc_norm": ("choices", "acc_norm,none"),
    "word perplexity": ("texts", "word_perplexity,none"),
    "bits per byte": ("texts", "bits_per_byte,none"),
    "bleu": ("answers", "bleu,none"),
}
"""Columns of the table: the task, and lm-eval's name of the score."""
BATCH_SIZE = 8


@dataclass(frozen=True)
class Run:
    """What lm-eval wrote of one model."""

    scores: dict[str, float]
    log_likelihoods: list[float]
    texts: list[str]


def write_tasks(folder: Path) -> None:
    """The tasks and their rows."""
    folder.mkdir()
    choices = [
        {
            "question": f"{a} times {b} is",
            "choices": [f" {n}" for n in (a * b, a * b + 1, a * b + a, (a - 1) * b)],
            "answer": 0,
        }
        for a in range(3, 11)
        for b in range(3, 11)
    ]
    answers = [{"question": f"The capital of {a} is", "answer": b} for a, b in CAPITALS.items()]
    rows = {"choices": choices, "texts": [{"text": text} for text in TEXTS], "answers": answers}
    for name, task in TASKS.items():
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(map(json.dumps, rows[name])))
        (folder / f"{name}.yaml").write_text(COMMON.format(name=name, file=file) + task)


def evaluate(place: Path, kind: str, model: Path, num_ranks: int, dtype: str) -> Run:
    """Run lm-eval as a command."""
    here = place / f"{kind}-{model.name}-{num_ranks}"
    module = "shardconv_runtime.integrations.lm_eval"
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "-m", module]
    start = launch if kind == "shardconv" else ["-m", "lm_eval"]
    arguments = [
        *("run", "--model", kind, "--model_args", f"pretrained={model},dtype={dtype}", "--device", "cpu"),
        *(
            "--batch_size",
            str(BATCH_SIZE),
            "--include_path",
            str(place / "tasks"),
            "--tasks",
            ",".join(TASKS),
        ),
        *("--output_path", str(here / "results.json"), "--log_samples"),
    ]
    here.mkdir()
    env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    done = subprocess.run([sys.executable, *start, *arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    (file,) = here.glob("results_*.json")
    results = json.loads(file.read_text())["results"]
    scores = {name: results[task][score] for name, (task, score) in SCORES.items()}
    likelihoods = [float(each[0]) for row in samples(here, "choices") for each in row["filtered_resps"]]
    likelihoods += [float(row["filtered_resps"][0]) for row in samples(here, "texts")]
    return Run(scores, likelihoods, [row["filtered_resps"][0] for row in samples(here, "answers")])


def samples(place: Path, task: str) -> list[dict[str, Any]]:
    (file,) = place.glob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["doc_id"])


def row(label: str, run: Run, beside: Run | None) -> str:
    """Of the table; the last two columns compare with ``hf``."""
    cells = [label, *(f"{value:.4f}" for value in run.scores.values())]
    if beside is None:
        return f"| {' | '.join(cells)} | | |"
    pairs = zip(run.log_likelihoods, beside.log_likelihoods, strict=True)
    difference = max(abs(a - b) / abs(b) for a, b in pairs)
    same = sum(a == b for a, b in zip(run.texts, beside.texts, strict=True))
    return f"| {' | '.join(cells)} | {difference:.0e} | {same} of {len(run.texts)} |"


def quantized(model: Path, target: Path) -> Path:
    """The model with weights of 8 bits."""
    from torchao.quantization import Int8WeightOnlyConfig

    found = transformers.AutoModelForCausalLM.from_pretrained(
        model, quantization_config=transformers.TorchAoConfig(Int8WeightOnlyConfig()), dtype=torch.float32
    )
    found.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(model).save_pretrained(target)
    return target


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--quantized", action="store_true")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    given = parser.parse_args()
    columns = ["model", *SCORES, "largest difference of a log-likelihood", "texts"]
    table = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_tasks(place / "tasks")
        sources = {"float32": given.model.resolve()}
        if given.quantized:
            sources["int8"] = quantized(given.model, place / "int8")
        for name, source in sources.items():
            alone = evaluate(place, "hf", source, 1, "float32")
            table.append(row(f"`hf`, {name}", alone, None))
            for tp in given.tp if name == "float32" else given.tp[-2:-1] or given.tp:
                out = place / f"{name}-tp-{tp}"
                shardconv.convert(source, out, tp)
                table.append(
                    row(
                        f"`shardconv`, {name}, tp {tp}",
                        evaluate(place, "shardconv", out, tp, "float32"),
                        alone,
                    )
                )
    text = "\n".join(table)
    print(text)
    if given.markdown is not None:
        given.markdown.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
