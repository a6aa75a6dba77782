"""Converting from and to an object store, and loading from it, beside copies on a disk and other loaders.

python benchmarks/stores.py --gigabytes 1                 moto serves the S3 protocol on this machine
python benchmarks/stores.py --megabytes-per-second 100    through a link of this rate for all ranks together
python benchmarks/stores.py --port 4568                   another server with the bucket "models"
python benchmarks/stores.py --gigabytes 15 --pairs store-store --tp 8 --no-loads   twice its disk
python benchmarks/stores.py --gigabytes 15 --tp 2 --watch --port 4568              memory over time

It needs ``moto[server]`` (which reads a whole object for each range, and is slow), ``s3fs`` and, for one row,
``runai-model-streamer[s3]``. Each rank connects through a proxy, which counts its bytes and slows it down.
Memory is the peak above that before the work begins; for loads, that of the rank with the most.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert import render, show, tell
from disk import machine
from ports import free_port
from synthetic import SMALLER, shape_of_size, write_checkpoint

BUCKET = "models"
MEASURED = Path(__file__).with_name("measured.py")
RANK = Path(__file__).with_name("stores_rank.py")
LOADS = {
    "shardconv, converted, from the store": "load converted",
    "shardconv, converted, through a copy on the disk": "cached converted",
    "s3fs copies the converted directory to the disk, then load": "copied converted",
    "shardconv, ordinary model, from the store": "load plain",
    "Run:ai streams the full model to each rank": "runai plain",
    "s3fs copies the full model to the disk, from_pretrained on each rank": "full plain",
}
"""What is measured -> the way and the source, for ``stores_rank.py``."""
FILE_BYTES = 100_000_000
PAIRS = ["directory-directory", "store-directory", "directory-store", "store-store"]


@dataclass
class Link:
    """A rate that all connections share."""

    bytes_per_second: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0

    def take(self, num_bytes: int) -> None:
        """Wait until these bytes have passed."""
        if not self.bytes_per_second:
            return
        with self.lock:
            # Threads wake late on a busy machine: what was not used lately may pass at once.
            self.free_at = max(self.free_at, time.monotonic() - 0.2) + num_bytes / self.bytes_per_second
            rest = self.free_at - time.monotonic()
        time.sleep(max(0.0, rest))


class Proxy:
    """Passes connections on to a port, and counts the bytes of the answers."""

    def __init__(self, port: int, link: Link) -> None:
        self._target, self._link = port, link
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.num_bytes = 0
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            near, _ = self._socket.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            for source, target, counts in ((near, far, False), (far, near, True)):
                threading.Thread(target=self._pass, args=(source, target, counts), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 20):
                if counts:
                    self.num_bytes += len(data)
                self._link.take(len(data))
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def environment(url: str) -> dict[str, str]:
    return {
        **os.environ,
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": os.environ.get("AWS_ACCESS_KEY_ID", "key"),
        "AWS_SECRET_ACCESS_KEY": os.environ.get("AWS_SECRET_ACCESS_KEY", "secret"),
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }


@contextmanager
def moto() -> Iterator[int]:
    """A server with an empty bucket; its port."""
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        for _ in range(100):
            with suppress(OSError):
                urllib.request.urlopen(request).close()
                break
            time.sleep(0.2)
        yield port
    finally:
        server.kill()
        server.wait()


def python(arguments: Sequence[str | Path], env: dict[str, str]) -> dict[str, Any]:
    """What a process prints as JSON in its last line, with its seconds."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {arguments}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**result, "process_s": time.perf_counter() - start}


def conversions(source: Path, scratch: Path, tp: int, url: str, pairs: Sequence[str]) -> list[dict[str, str]]:
    """A row for each pair of places; the output is removed again."""
    rows = []
    env = environment(url) | {"SHARDCONV_CACHE": str(scratch / "cache")}
    places = {
        "directory": (str(source), str(scratch / "out")),
        "store": (f"s3://{BUCKET}/plain", f"s3://{BUCKET}/out"),
    }
    for pair in pairs:
        origin, target = pair.split("-")
        place = places[target][1]
        # s3rver needs long to put the parts of a large file together.
        command = ["convert", places[origin][0], place, "--tp", str(tp), "--no-check"]
        result = python([MEASURED, *command, "--max-file-size", f"{FILE_BYTES}"], env)
        if target == "store":
            python([RANK, "remove", place, str(scratch)], env)
        else:
            shutil.rmtree(place)
        rows.append(
            {
                "from": origin,
                "to": target,
                "write phase, s": f"{result['phase_s']:.1f}",
                "peak above start, MB": f"{result['peak_above'] / 1e6:.0f}",
            }
        )
        tell(str(rows[-1]))
    return rows


def watched(arguments: Sequence[str], env: dict[str, str]) -> dict[str, str]:
    """A row of a command of shardconv: its memory at tenths of its time, and the seconds of CPUs."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "shardconv", *arguments, "--quiet"], env=env)
    status = Path(f"/proc/{process.pid}/status")
    resident: list[int] = []
    while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        resident.append(int(fields.get("VmRSS", "0 kB").removesuffix("kB")) * 1024)
        time.sleep(0.5)
    if ended[1]:
        raise SystemExit(f"error: {arguments}: status {ended[1]}")
    usage, tenth = ended[2], len(resident) / 10
    tenths = [max(resident[int(i * tenth) : int((i + 1) * tenth)], default=0) for i in range(10)]
    row = {
        "command": arguments[0],
        "s": f"{time.perf_counter() - start:.0f}",
        "CPU, s": f"{usage.ru_utime + usage.ru_stime:.0f}",
        "peak, MB": f"{usage.ru_maxrss * 1024 / 1e6:.0f}",
        "MB in tenths of the time": " ".join(f"{each / 1e6:.0f}" for each in tenths),
    }
    tell(str(row))
    return row


def loads(scratch: Path, tp: int, port: int, link: Link, names: Sequence[str]) -> list[dict[str, str]]:
    """A row for each way to load."""
    rows = []
    for name in names:
        way, source = LOADS[name].split()
        url = f"s3://{BUCKET}/{'plain' if source == 'plain' else f'tp-{tp}'}"
        shutil.rmtree(scratch / "copy", ignore_errors=True)
        proxies, rendezvous = [Proxy(port, link) for _ in range(tp)], free_port()
        ranks = []
        for rank, proxy in enumerate(proxies):
            env = environment(proxy.url) | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(tp),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(rendezvous),
                "SHARDCONV_CACHE": str(scratch / "cache"),
            }
            command = [sys.executable, str(RANK), way, url, str(scratch / "copy")]
            ranks.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [rank.communicate() for rank in ranks]
        if any(rank.returncode for rank in ranks):
            tell(f"{name}: failed: {outputs[0][1][-600:]}")
            continue
        results = [json.loads(out.splitlines()[-1]) for out, _ in outputs]
        read = [proxy.num_bytes / 1e6 for proxy in proxies]
        rows.append(
            {
                "tp": str(tp),
                "way": name,
                "s": f"{max(each['seconds'] for each in results):.1f}",
                "MB read by a rank": f"{max(read):.0f}",
                "by all": f"{sum(read):.0f}",
                "peak above start, MB": f"{max(each['peak'] for each in results) / 1e6:.0f}",
            }
        )
        tell(str(rows[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--tp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabytes-per-second", type=float, default=0, help="of the link (default: none)")
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS, help="from and to where")
    parser.add_argument("--no-loads", action="store_true")
    parser.add_argument("--watch", action="store_true", help="only from store to store, and verify --against")
    parser.add_argument("--quantize", metavar="SCHEME", help="with --watch")
    parser.add_argument("--port", type=int, help="of a server on this machine (default: moto is started)")
    parser.add_argument("--directory", type=Path, help="for files (default: that of temporary files)")
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    # With --watch without large embeddings: s3rver fails when it puts the parts of a file of 0.5 GB together.
    shape = shape_of_size(options.gigabytes * 1e9, SMALLER[1:] if options.watch else SMALLER)
    server = nullcontext(options.port) if options.port else moto()
    with tempfile.TemporaryDirectory(prefix="shardconv-", dir=options.directory) as place, server as port:
        scratch, link = Path(place), Link(options.megabytes_per_second * 1e6)
        notes = [machine(scratch), f"source: llama, bfloat16, {shape.num_bytes / 1e9:.2f} GB"]
        notes.append(f"link: {options.megabytes_per_second or 'no limit'} MB/s")
        source = scratch / "plain"
        write_checkpoint(shape, source, shard_bytes=FILE_BYTES)
        direct = environment(f"http://127.0.0.1:{port}")
        python([RANK, "upload", f"s3://{BUCKET}/plain", str(source)], direct)
        if options.watch:
            shutil.rmtree(source)
            env = direct | {"SHARDCONV_CACHE": str(scratch / "cache")}
            url, out = f"s3://{BUCKET}/plain", f"s3://{BUCKET}/out"
            more = ["--quantize", options.quantize] if options.quantize else []
            command = ["convert", url, out, "--tp", str(options.tp[-1]), "--no-check", *more]
            watch_rows = [watched([*command, "--max-file-size", f"{FILE_BYTES}"], env)]
            watch_rows.append(watched(["verify", out, "--against", url], env))
            python([RANK, "remove", out, str(scratch)], env)
            show(render(watch_rows, notes), options.markdown)
            return
        if options.no_loads and not any(pair.startswith("directory") for pair in options.pairs):
            shutil.rmtree(source)
        near = Proxy(port, link).url
        text = render(conversions(source, scratch, options.tp[-1], near, options.pairs), notes)
        rows = []
        for tp in [] if options.no_loads else options.tp:
            out = scratch / f"tp-{tp}"
            arguments = [str(source), str(out), "--tp", str(tp), "--no-check"]
            python([MEASURED, "convert", *arguments], direct)
            python([RANK, "upload", f"s3://{BUCKET}/tp-{tp}", str(out)], direct)
            rows += loads(scratch, tp, port, link, list(LOADS))
        show("\n\n".join([text, *([render(rows, ())] if rows else [])]), options.markdown)


if __name__ == "__main__":
    main()
