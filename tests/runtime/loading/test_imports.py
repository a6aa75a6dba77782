"""What an inference job has to wait for and to hold beside torch, transformers and the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from converted import llama_plan, random_llama, write_directory

MOST_BYTES = 15e6

PACKAGE = """
import sys
import shardconv_runtime, shardconv_runtime.format.plan, shardconv_runtime.files.manifest
print(*{"torch", "transformers", "shardconv", "click", "tqdm"} & set(sys.modules))
"""

JOB = """
import json, sys
import torch
import transformers

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

model = transformers.LlamaForCausalLM(transformers.AutoConfig.from_pretrained(sys.argv[1]))
before = resident()
import shardconv_runtime
model = shardconv_runtime.load(sys.argv[1])
num_bytes = resident() - before
ids = torch.ones(1, 4, dtype=torch.long)
tokens = model.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
print(json.dumps([num_bytes, sorted({"shardconv", "click"} & set(sys.modules)), tokens.shape[1]]))
"""


def printed(code: str, *arguments: Path) -> str:
    """The last line of a new interpreter's output."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_importing_the_package_imports_neither_torch_nor_transformers() -> None:
    assert printed(PACKAGE) == ""


def test_a_job_takes_little_memory_and_nothing_of_the_converter(tmp_path: Path) -> None:
    """Seconds are in ``benchmarks/start.py``."""
    model = random_llama()
    out = write_directory(tmp_path / "out", model, llama_plan(model.config, (1,)))
    num_bytes, heavy, num_tokens = json.loads(printed(JOB, out))
    assert num_bytes < MOST_BYTES
    assert heavy == []
    assert num_tokens == 4 + 3
