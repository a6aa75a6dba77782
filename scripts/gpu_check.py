"""Runs the sections of ``scripts/gpu_check``, each in its own process, and prints one line for each check.

Sections, all but ``gpus`` on one GPU (``gpu_sections.py`` has their code):

- nccl: world size 1 over NCCL, beside the unsharded model: eager, compiled, CUDA graphs.
- rank: one rank of eight of an 8B model alone, its collectives replaced by local stand-ins.
- ranks: several ranks over gloo that share the GPU, against the unsharded model.
- gpus: ranks over NCCL, one for each GPU: mesh axes, experts, beams, many requests, a loss, repeated calls,
  tokens per second, a rank that fails.
- load: from the disk to the device, in GB/s.
- memory: the peak of a load; tokens of CUDA graphs against eager ones.

The exit code is 1 if a check failed, else 0, even if no check could run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / name) for name in ("", "runtime", "benchmarks", "scripts")]
SECTIONS_FILE = Path(__file__).with_name("gpu_sections.py")
NEEDED = ("torch", "transformers", "safetensors", "click", "tqdm", "huggingface_hub")
LIMIT_S = 950
"""Of the full run."""

SECTIONS = {
    "nccl": (
        150,
        "one rank over NCCL, compiled and not: outputs, tokens and times of the unsharded model",
    ),
    "ranks": (120, "ranks over gloo that share the GPU: outputs and tokens equal the unsharded model's"),
    "gpus": (480, "ranks over NCCL, one for each GPU, beside the unsharded model; tokens per second"),
    "memory": (120, "peak device memory of a load; CUDA graphs give the tokens of eager"),
    "load": (120, "GB/s from disk to device, cold and warm, beside safetensors and a pinned copy"),
    "rank": (200, "one rank of eight of an 8B model: prefill, decode, roofline"),
}
"""Time limit in seconds and description of each; the longest is last."""

Line = dict[str, Any]


def why_no_package() -> str:
    """The reason why no section can run here; empty if they can."""
    for name in NEEDED:
        try:
            importlib.import_module(name)
        except Exception as error:  # some check their requirements on import
            return f"{sys.executable} cannot import {name}: {error}"
    return ""


def why_no_gpu() -> str:
    """The reason why a GPU cannot be used here; empty if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} was built without CUDA"
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return "torch finds no GPU"
    return ""


def run_section(name: str, limit_s: float, options: argparse.Namespace, scratch: str) -> Iterator[Line]:
    """The lines of a section as it prints them, and one about its failure."""
    command = [sys.executable, str(SECTIONS_FILE), name, "--device", options.device, "--scratch", scratch]
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command + ["--small"] * options.small,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
            start_new_session=True,
        )
        killer = threading.Timer(limit_s, _end, [child])
        killer.start()
        assert child.stdout is not None
        for text in child.stdout:
            if text.startswith("{"):
                yield json.loads(text)
        code = child.wait()
        timed_out = not killer.is_alive()
        killer.cancel()
        _end(child)
        if code:
            errors.seek(0)
            last = next((x.strip() for x in reversed(errors.read().splitlines()) if x.strip()), "no output")
            why = f"ran past {limit_s:.3g} s" if timed_out else f"exit code {code}: {last[:300]}"
            yield {"section": name, "what": "the section", "status": "FAILED", "why": why}


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a section and the ranks that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, 9)


def environment() -> dict[str, str]:
    """The environment of a section: imports the packages of this repository, installed or not."""
    paths = [*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # All ranks are on this machine, whose own name may not resolve.
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", "lo"),
    }


def render(line: Line) -> str:
    """One line of text."""
    text = f"{line['status']:<12} {line['section']:<7} {line['what']}"
    if line.get("number") is not None:
        text += f": {line['number']:.4g} {line['unit']}".rstrip()
    if line.get("ratio") is not None:
        text += f", {line['ratio']:.3g} x {line['of']}"
    if line.get("why"):
        text += f" ({line['why']})"
    return text


def machine() -> Line:
    """The machine and the versions that the numbers depend on."""
    import torch
    import transformers

    found: Line = {"python": sys.version.split()[0], "torch": torch.__version__}
    found |= {"transformers": transformers.__version__, "cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": torch.version.cuda}
    return found


def check(options: argparse.Namespace) -> list[Line]:
    """Run the sections and print their lines."""
    lines: list[Line] = []
    start = time.monotonic()
    patience = 1 if options.device == "cuda" else 8  # the speed of a CPU is irrelevant
    with tempfile.TemporaryDirectory(prefix="shardconv-gpu-", dir=options.directory) as scratch:
        for name in options.sections:
            began = time.monotonic()
            own_limit = options.section_limit or SECTIONS[name][0] * patience
            limit = min(own_limit, LIMIT_S * patience - (began - start))
            if limit <= 0:
                why = f"the {LIMIT_S} s of the full run were over"
                lines.append({"section": name, "what": "the section", "status": "not checked", "why": why})
                print(render(lines[-1]), flush=True)
                continue
            for line in run_section(name, limit, options, scratch):
                lines.append(line)
                print(render(line), flush=True)
            print(f"{'':<12} {name:<7} took {time.monotonic() - began:.0f} s", flush=True)
    return lines


def skipped(sections: list[str], why: str) -> list[Line]:
    """A line for each section that was not checked."""
    told = [
        {"section": name, "what": SECTIONS[name][1], "status": "not checked", "why": why} for name in sections
    ]
    for line in told:
        print(render(line))
    return told


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--directory", help="for up to 40 GB of files (default: temporary files)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--section-limit", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """The exit code."""
    options = parse_arguments()
    why = why_no_package()
    if not why and options.device == "cuda":
        why = why_no_gpu()
    if why:
        lines = skipped(options.sections, why)
        about: Line = {"python": sys.version.split()[0]}
    else:
        about = machine()
        print(", ".join(f"{name} {value}" for name, value in about.items()))
        lines = check(options)
    failed = sum(line["status"] == "FAILED" for line in lines)
    missed = sum(line["status"] == "not checked" for line in lines)
    passed = len(lines) - failed - missed
    if options.device == "cpu" or (not passed and not failed):
        print("nothing was checked on a GPU")
    print(f"{passed} ok, {failed} FAILED, {missed} not checked")
    if options.json:
        options.json.write_text(json.dumps({"machine": about, "lines": lines}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
