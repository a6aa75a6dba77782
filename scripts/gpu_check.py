"""Runs the sections of ``scripts/gpu_check``, each in its own process, and prints one line for each check.

Sections run in the order of their worth, until the seconds of ``--seconds`` are over (``gpu_sections.py`` has
their code; all but ``gpus`` need one GPU):

- rank: one rank of eight of an 8B model alone, its collectives replaced by local ones.
- nccl: the same with NCCL, in a group of this one process.
- tp1: models of 1B and 8B beside transformers: tokens, generate, eager and in CUDA graphs.
- load: from the disk to the device, in GB/s; the peak of memory.
- training: loss, gradients and a step beside the unsharded model.
- ranks: several ranks over gloo that share the GPU, against the unsharded model.
- packed: quantized checkpoints beside transformers.
- gpus: ranks over NCCL, one for each GPU.

Each line is in the file of ``--json`` as soon as it is known; the output of a section is in a log beside it.
The exit code is 1 if a check failed, else 0, even if no check could run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / name) for name in ("", "runtime", "benchmarks", "scripts", "tests/helpers")]
SECTIONS_FILE = Path(__file__).with_name("gpu_sections.py")
TABLE_FILE = ROOT / "docs" / "gpu.md"
TABLE_MARKS = ("<!-- results -->", "<!-- end of results -->")
NEEDED = ("torch", "transformers", "safetensors", "click", "tqdm", "huggingface_hub")
SECONDS = {"cuda": 520, "cpu": 3600}
"""For all sections, by default; the speed of a CPU is irrelevant."""
LEAST_S = 10
"""A section is not started with less."""

SECTIONS = {
    "rank": (130, "rank 0 of 8 of an 8B model: prefill, generate, roofline"),
    "nccl": (100, "the same with collectives over NCCL, in a group of one process"),
    "tp1": (130, "1B and 8B at tp 1 beside transformers: tokens, generate, CUDA graphs"),
    "load": (100, "GB/s from disk to device, cold and warm; peak memory"),
    "training": (70, "loss, gradients, seconds and memory of a step beside the unsharded model"),
    "ranks": (70, "ranks over gloo that share the GPU: outputs and tokens equal the unsharded model's"),
    "packed": (70, "quantized checkpoints: outputs and tokens beside transformers"),
    "gpus": (480, "ranks over NCCL, one for each GPU, beside the unsharded model; tokens per second"),
}
"""The most seconds that each may take of the default, in the order of their worth, and what each is about."""

Line = dict[str, Any]


class Results:
    """All lines so far, printed, and written to a file after each one.

    Args:
        file: of JSON; None for no file.
        about: the machine and the versions.
    """

    def __init__(self, file: Path | None, about: Line) -> None:
        self.file = file
        self.about = about
        self.lines: list[Line] = []

    def add(self, line: Line) -> None:
        """Print a line, and write all lines."""
        self.lines.append(line)
        print(render(line), flush=True)
        self.write()

    def write(self) -> None:
        """Replace the file, so that it is complete at any moment."""
        if self.file is None:
            return
        unfinished = self.file.with_name(self.file.name + ".unfinished")
        unfinished.write_text(json.dumps({"machine": self.about, "lines": self.lines}, indent=1) + "\n")
        unfinished.replace(self.file)

    def num(self, status: str) -> int:
        """How many lines have a status."""
        return sum(line["status"] == status for line in self.lines)


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


def run_section(
    name: str, limit_s: float, options: argparse.Namespace, scratch: str, log: Path
) -> Iterator[Line]:
    """The lines of a section as it prints them, and one about its failure. All output goes to a log."""
    command = [sys.executable, "-X", "faulthandler", str(SECTIONS_FILE), name, "--device", options.device]
    command += ["--scratch", scratch, "--seconds", str(limit_s), *(["--small"] * options.small)]
    with log.open("w") as output:
        child = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment(),
            start_new_session=True,
        )
        killer = threading.Timer(limit_s, _end, [child])
        killer.start()
        try:
            assert child.stdout is not None
            for text in child.stdout:
                output.write(text)
                output.flush()
                if text.startswith('{"section"'):
                    yield json.loads(text)
            code = child.wait()
        finally:
            timed_out = not killer.is_alive()
            killer.cancel()
            _end(child)
    if code:
        said = [line for line in log.read_text().splitlines() if line.strip() and not line.startswith("{")]
        last = said[-1].strip()[:300] if said else "no output"
        why = f"ran past {limit_s:.3g} s; it said last: {last}" if timed_out else f"exit code {code}: {last}"
        line: Line = {"section": name, "what": "the section", "status": "FAILED", "why": why}
        yield line | {"traceback": "\n".join(said[-40:])}


def _end(child: subprocess.Popen[str]) -> None:
    """Kill a section and the ranks that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


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


def numbers(line: Line) -> str:
    """The number of a line and what it is a multiple of."""
    text = ""
    if line.get("number") is not None:
        text = f"{line['number']:.4g} {line['unit']}".rstrip()
    if line.get("ratio") is not None:
        text += f", {line['ratio']:.3g} x {line['of']}"
    return text


def render(line: Line) -> str:
    """One line of text."""
    text = f"{line['status']:<12} {line['section']:<8} {line['what']}"
    if found := numbers(line):
        text += f": {found}"
    if line.get("why"):
        text += f" ({line['why']})"
    return text


def machine() -> Line:
    """The machine and the versions that the numbers depend on."""
    import torch
    import transformers

    found: Line = {"date": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0]}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    found |= {"cores": len(os.sched_getaffinity(0))}
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()}
        found |= {"cuda": torch.version.cuda}
    return found


def check(options: argparse.Namespace, results: Results) -> list[str]:
    """Run the sections; returns those for which there was no time."""
    end = time.monotonic() + options.seconds
    scale = options.seconds / SECONDS["cuda"]
    missed = []
    with tempfile.TemporaryDirectory(prefix="shardconv-gpu-", dir=options.directory) as scratch:
        logs = Path(scratch) / "logs" if options.json is None else options.json.with_suffix(".logs")
        logs.mkdir(parents=True, exist_ok=True)
        for name in options.sections:
            began = time.monotonic()
            limit = min(options.section_limit or SECTIONS[name][0] * scale, end - began - 1)
            if limit < LEAST_S and options.section_limit is None:
                missed.append(name)
                why = f"the {options.seconds:.3g} s were over"
                results.add({"section": name, "what": "the section", "status": "not checked", "why": why})
                continue
            for line in run_section(name, limit, options, scratch, logs / f"{name}.log"):
                results.add(line)
            print(f"{'':<12} {name:<8} took {time.monotonic() - began:.0f} s", flush=True)
    return missed


def table(found: Line) -> str:
    """The results as a table of Markdown."""
    about = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    rows = [f"Run with {about}.", "", "| section | check | result | status |", "|---|---|---|---|"]
    for line in found["lines"]:
        result = " · ".join(filter(None, (numbers(line), line.get("why", "").replace("|", "\\|"))))
        rows.append(f"| {line['section']} | {line['what']} | {result} | {line['status']} |")
    return "\n".join(rows)


def write_table(file: Path) -> None:
    """Put the results of a JSON file into the page about GPUs."""
    begin, end = TABLE_MARKS
    before, _, rest = TABLE_FILE.read_text().partition(begin)
    _, _, after = rest.partition(end)
    TABLE_FILE.write_text(f"{before}{begin}\n{table(json.loads(file.read_text()))}\n{end}{after}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, help="for everything (default: 520)")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to check that it works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all lines there, and logs beside it")
    parser.add_argument("--directory", help="for up to 40 GB of files (default: temporary files)")
    parser.add_argument("--table", type=Path, metavar="FILE", help="only write such a file to docs/gpu.md")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--section-limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.seconds = options.seconds or SECONDS[options.device]
    options.json = options.json and options.json.absolute()
    return options


def main() -> int:
    """The exit code."""
    options = parse_arguments()
    if options.table is not None:
        write_table(options.table)
        return 0
    # An end by a signal is an end in order: the last lines say what is missing.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    why = why_no_package()
    if not why and options.device == "cuda":
        why = why_no_gpu()
    missed: list[str] = []
    results = Results(options.json, {"python": sys.version.split()[0]} if why else machine())
    try:
        if why:
            for name in options.sections:
                what = SECTIONS[name][1]
                results.add({"section": name, "what": what, "status": "not checked", "why": why})
        else:
            print(", ".join(f"{name} {value}" for name, value in results.about.items()))
            missed = check(options, results)
    except (SystemExit, KeyboardInterrupt):
        seen = {line["section"] for line in results.lines}
        missed = [name for name in options.sections if name not in seen]
        print("ended by a signal")
        raise
    finally:
        if options.device == "cpu" or not (results.num("ok") or results.num("FAILED")):
            print("nothing was checked on a GPU")
        if missed:
            print(f"not reached: {', '.join(missed)}")
        ok, failed, skipped = map(results.num, ("ok", "FAILED", "not checked"))
        print(f"{ok} ok, {failed} FAILED, {skipped} not checked", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
