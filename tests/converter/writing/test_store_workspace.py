"""Writing to an object store: the same bytes as to a directory, whatever happens in between."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from s3_server import BUCKET, Store, s3_store
from shardconv_runtime.checkpoint.lazy_tensor import LazyTensor
from shardconv_runtime.files import checksums
from shardconv_runtime.files.manifest import MANIFEST_NAME
from shardconv_runtime.files.small_files import CACHE_VARIABLE
from shardconv_runtime.storage import store_client
from small_conversion import Model, Stages, placed

from shardconv.writing import local_files, store_objects, streamed_files, writer
from shardconv.writing.job import target_file
from shardconv.writing.outputs import output_at
from shardconv.writing.store_objects import StoreDirectory
from shardconv.writing.streamed_files import StreamedFiles

pytest.importorskip("obstore")

URL = f"s3://{BUCKET}/out"
PART = 500


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    """A store that takes small parts, and parts that are not those of checksums."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(streamed_files, "PART_BYTES", PART)
    for module in (checksums, local_files, streamed_files):
        monkeypatch.setattr(module, "PIECE_BYTES", 700)
    monkeypatch.setattr(store_objects, "WRITE_RETRIES", 4)
    monkeypatch.setattr(writer, "tool_versions", lambda: {"shardconv": "1", "torch": "1"})
    with s3_store(monkeypatch) as started:
        started.least_part = 0
        yield started


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return Model.save(tmp_path / "model", hidden_size=16, intermediate_size=32)


class Child:
    """A process that does some work: one with the library's threads could not be forked."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(60)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                work()
            except BaseException as error:
                os.write(write, f"{type(error).__name__}: {error}".encode())
            finally:
                os._exit(0)
        os.close(write)

    def end(self) -> str:
        """Wait for it; the error that it ended with, or ``killed``."""
        with os.fdopen(self._read) as stream:
            text = stream.read()
        status = os.waitpid(self.pid, 0)[1]
        return "killed" if os.WIFSIGNALED(status) else text


def written(store: Store) -> dict[str, bytes]:
    """The objects of the directory by their paths in it."""
    return {key.removeprefix("out/"): data for key, data in store.objects.items() if key.startswith("out/")}


def convert(model: Model, **options: Any) -> str:
    """Convert to the store; the error."""
    return Child(lambda: model.convert(URL, **options)).end()


@pytest.mark.parametrize("has_conditions", [True, False])
def test_the_same_bytes_as_in_a_directory(
    model: Model, store: Store, tmp_path: Path, has_conditions: bool
) -> None:
    store.has_conditions = has_conditions
    for options in ({"tp": 4}, {"tp": 2, "max_file_size": 3000, "overwrite": True}):
        model.convert(tmp_path / "out", **options)
        store.written.clear()
        assert convert(model, **options) == ""
        assert written(store) == placed(tmp_path / "out")
        assert not store.uploads
        last = [name for name in store.written if "/.partial/" not in name[1]][-1]
        assert last == ("put", f"out/{MANIFEST_NAME}")
    parts = [key for operation, key in store.written if operation == "part"]
    assert len(parts) > len(set(parts)) == 5


@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_it_goes_on_after_a_death_at_any_request(
    model: Model, store: Store, tmp_path: Path, stride: int
) -> None:
    """Before it is carried out, and after it."""
    model.convert(tmp_path / "out")
    expected = placed(tmp_path / "out")
    for carries_out in (True, False):
        for number in range(1 + (4 + 8 * carries_out) % stride, 1000, stride):
            store.objects.clear()
            was_killed = killed_at(number, carries_out, model, store)
            files = {path: data for path, data in written(store).items() if ".partial/" not in path}
            if MANIFEST_NAME in files:
                assert files == expected
            else:
                assert was_killed
                assert convert(model) == ""
                assert written(store) == expected
            if not was_killed:
                break
        assert number > 15


def killed_at(number: int, carries_out: bool, model: Model, store: Store) -> bool:
    """Convert and kill the process at one of its requests; whether it came to that."""
    requests: list[str] = []
    started = threading.Event()

    def kill(operation: str, key: str) -> str:
        started.wait()
        requests.append(operation)
        if len(requests) != number:
            return ""
        os.kill(child.pid, signal.SIGKILL)
        return "" if carries_out else "403"

    store.write_fault = kill
    child = Child(lambda: model.convert(URL))
    started.set()
    try:
        return child.end() == "killed"
    finally:
        store.write_fault = lambda operation, key: ""


def test_finished_files_are_not_sent_again(model: Model, store: Store) -> None:
    assert convert(model, ranks=[0]) == ""
    store.written.clear()
    assert convert(model) == ""
    sent = {key.split("/")[1] for operation, key in store.written if operation == "part"}
    assert sent == {"rank-00001-of-00002"}


def test_faults_cost_time_only(model: Model, store: Store, tmp_path: Path) -> None:
    """Answers with errors, connections that end in the middle of a part, answers that are lost."""
    model.convert(tmp_path / "out")
    faults = random.Random(0)

    def fault(operation: str, key: str) -> str:
        kinds = ["500", "503", "429"] + (["cut", "lost"] if operation in ("part", "put") else [])
        return faults.choice(kinds) if faults.random() < 0.3 else ""

    store.write_fault = fault
    assert convert(model) == ""
    assert written(store) == placed(tmp_path / "out")


def test_a_silent_connection_is_given_up(
    model: Model, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.convert(tmp_path / "out", tp=1)
    monkeypatch.setattr(store_client, "TIMEOUT_S", 1.0)
    silences = iter(["silence"])
    store.write_fault = lambda operation, key: next(silences, "") if operation == "part" else ""
    start = time.monotonic()
    assert convert(model, tp=1) == ""
    assert written(store) == placed(tmp_path / "out")
    assert time.monotonic() - start < 3  # less than the silence of the server


def test_a_store_that_fails_for_good_is_an_error(model: Model, store: Store) -> None:
    store.write_fault = lambda operation, key: "500" if operation == "part" else ""
    error = convert(model)
    assert error.startswith(f"NetworkError: {URL}/")
    assert "the store cannot be reached (status 500, Fault); check the network" in error
    assert "secret" not in error
    assert not store.uploads  # they were aborted
    assert MANIFEST_NAME not in written(store)


@pytest.mark.parametrize("refused", ["put", "delete"])
def test_a_store_that_may_not_be_written_is_refused_before_the_work(
    store: Store, model: Model, refused: str
) -> None:
    store.write_fault = lambda operation, key: "403" if operation == refused else ""

    def work() -> None:
        output_at(URL, overwrite=False, source=model.path, owners=None)

    error = Child(work).end()
    assert error.startswith(f"AccessError: {URL}")
    assert "the store refuses access (status 403, Fault); check the credentials" in error
    assert len(error.splitlines()) == 1
    assert "secret" not in error


def test_a_lost_end_of_an_upload_is_an_error_that_continues(
    model: Model, store: Store, tmp_path: Path
) -> None:
    model.convert(tmp_path / "out")
    losses = iter(["lost"])
    store.write_fault = lambda operation, key: next(losses, "") if operation == "complete" else ""
    assert "the upload is gone: the answer to its end was lost" in convert(model)
    assert convert(model) == ""
    assert written(store) == placed(tmp_path / "out")


def test_an_interruption_aborts_uploads(model: Model, store: Store) -> None:
    child: list[Child] = []
    started, interrupted = threading.Event(), threading.Event()

    def interrupt(operation: str, key: str) -> str:
        if operation == "part" and not interrupted.is_set():
            started.wait()
            interrupted.set()
            os.kill(child[0].pid, signal.SIGINT)
        return ""

    store.write_fault = interrupt
    child.append(Child(lambda: model.convert(URL, tp=1)))
    started.set()
    assert child[0].end().startswith("KeyboardInterrupt")
    assert MANIFEST_NAME not in written(store)
    assert not store.uploads


def test_parts_on_several_machines(model: Model, store: Store, tmp_path: Path) -> None:
    """The part with the first rank writes the common files."""
    model.convert(tmp_path / "out")
    assert convert(model, ranks=[1]) == ""
    assert not any(path.startswith("common/") for path in written(store))
    assert "holds parts of another conversion (max_file_size" in convert(model, ranks=[0], max_file_size=3000)
    assert convert(model, ranks=[0]) == ""
    assert written(store) == placed(tmp_path / "out")
    assert convert(model, ranks=[1]) == ""  # a part that is started again


def test_the_last_process_takes_the_place_of_another(model: Model, store: Store, tmp_path: Path) -> None:
    """The first one, which stands still meanwhile, then ends with an error and changes nothing."""
    model.convert(tmp_path / "out")
    has_begun, go_on = threading.Event(), threading.Event()

    def stand_still(operation: str, key: str) -> str:
        if operation == "create" and not has_begun.is_set() and "rank-00000" in key:
            has_begun.set()
            store.lock.release()  # the others are answered meanwhile
            go_on.wait(30)
            store.lock.acquire()
        return ""

    store.write_fault = stand_still
    first = Child(lambda: model.convert(URL, ranks=[0]))
    assert has_begun.wait(30)
    assert convert(model, ranks=[0]) == ""
    go_on.set()
    error = first.end()
    assert "another process has begun to write" in error
    assert "let that one go on" in error
    assert convert(model, ranks=[1]) == ""
    assert written(store) == placed(tmp_path / "out")


def test_a_conversion_that_was_discarded_never_completes(model: Model, store: Store, tmp_path: Path) -> None:
    """It stands still while another one begins, and goes on before that ends."""
    model.convert(tmp_path / "out", tp=4)
    has_begun, go_on, second_may = threading.Event(), threading.Event(), threading.Event()

    def stand_still(operation: str, key: str) -> str:
        for part, begun, event in (("of-00002", has_begun, go_on), ("of-00004", go_on, second_may)):
            if operation == "create" and part in key and "rank-00000" in key:
                begun.set()
                store.lock.release()
                event.wait(30)
                store.lock.acquire()
        return ""

    store.write_fault = stand_still
    first = Child(lambda: model.convert(URL, tp=2))
    assert has_begun.wait(30)
    second = Child(lambda: model.convert(URL, tp=4))
    first.end()
    assert MANIFEST_NAME not in written(store)
    second_may.set()
    assert second.end() == ""
    files = written(store)
    assert {path: files[path] for path in placed(tmp_path / "out")} == placed(tmp_path / "out")


def test_an_unfinished_output_of_another_job_is_discarded(model: Model, store: Store, tmp_path: Path) -> None:
    model.convert(tmp_path / "out", tp=2)
    assert convert(model, tp=4, ranks=[0, 1, 2]) == ""
    progress = Stages()

    def work() -> None:
        model.convert(URL, tp=2, progress=progress)
        raise AssertionError(progress.told)

    assert "the unfinished output in s3://models/out is discarded" in Child(work).end()
    assert written(store) == placed(tmp_path / "out")


def test_a_complete_directory(model: Model, store: Store) -> None:
    """Nothing is written for the same job, another one is refused, and files of others are never removed."""
    assert convert(model) == ""
    store.written.clear()
    assert convert(model) == ""
    assert not store.written
    assert "it is complete, and of another conversion" in convert(model, max_file_size=3000)
    store.objects["out/notes.txt"] = b"mine"
    assert "holds notes.txt, which shardconv did not write" in convert(model, tp=4, overwrite=True)
    del store.objects[f"out/{MANIFEST_NAME}"]
    assert "is not empty, and has no manifest.json" in convert(model, tp=4)
    assert store.objects["out/notes.txt"] == b"mine"


def test_an_old_output_is_not_complete_while_it_is_replaced(model: Model, store: Store) -> None:
    assert convert(model, tp=4) == ""
    store.write_fault = lambda operation, key: "403" if operation == "create" else ""
    assert "refuses access" in convert(model, tp=2, overwrite=True)
    assert MANIFEST_NAME not in written(store)
    assert not any("of-00004" in path for path in written(store))


def test_an_object_that_was_replaced_is_sent_again(model: Model, store: Store, tmp_path: Path) -> None:
    """Another conversion that was given up may end with the file of the same name and size."""
    model.convert(tmp_path / "out")
    assert convert(model, ranks=[0]) == ""
    key = next(key for key in store.objects if "rank-00000" in key and key.endswith(".safetensors"))
    store.objects[key] = bytes(len(store.objects[key]))
    assert convert(model, ranks=[1]) == ""
    assert MANIFEST_NAME not in written(store)
    assert convert(model, ranks=[0]) == ""
    assert written(store) == placed(tmp_path / "out")


class SlowStore(StoreDirectory):
    """Takes a part at a time."""

    def stream(self, name: str, parts: Iterator[memoryview], part_bytes: int, num_requests: int) -> str:
        for part in parts:
            received.append(bytes(part))
            time.sleep(0.002)
        return ""


received: list[bytes] = []


def test_few_parts_are_kept_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are faster than the store wait for it, also if they fill parts in another order."""
    monkeypatch.setattr(streamed_files, "PART_BYTES", PART)
    monkeypatch.setattr(streamed_files, "UNIT_BYTES", PART)
    received.clear()
    file = target_file("a.safetensors", "rank", {"a": ("uint8", (100 * PART,))}, {}, missing_tensor)
    content = random.Random(0).randbytes(100 * PART)
    stretches = [(start, content[start : start + 300]) for start in range(0, len(content), 300)]
    for index in range(0, len(stretches) - 4, 4):  # as workers that begin together may end
        stretches[index : index + 4] = [*stretches[index + 3 : index : -1], stretches[index]]
    most = 0
    with StreamedFiles({0: file}, SlowStore(URL), 5 * PART, lambda index, digests: None) as target:

        def put(stretch: tuple[int, bytes]) -> None:
            nonlocal most
            target.begin_unit()
            target.put(0, file.offsets["a"] + stretch[0], memoryview(stretch[1]))
            most = max(most, len(target._streams[0].parts))
            target.end_unit(len(stretch[1]))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(put, stretches))
        target.finish()
    assert b"".join(received) == file.header + content
    assert 2 <= most <= 8


def test_parts_may_be_filled_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a transpose: then more of them are kept, and nothing waits for ever."""
    monkeypatch.setattr(streamed_files, "PART_BYTES", PART)
    monkeypatch.setattr(streamed_files, "UNIT_BYTES", PART)
    received.clear()
    file = target_file("a.safetensors", "rank", {"a": ("uint8", (20 * PART,))}, {}, missing_tensor)
    content = random.Random(0).randbytes(20 * PART)
    with StreamedFiles({0: file}, SlowStore(URL), 5 * PART, lambda index, digests: None) as target:
        for start in range(len(content) - PART, -1, -PART):
            target.begin_unit()
            target.put(0, file.offsets["a"] + start, memoryview(content[start : start + PART]))
            target.end_unit(PART)
        target.finish()
    assert b"".join(received) == file.header + content


def missing_tensor(name: str) -> LazyTensor:
    raise AssertionError("it is not read here")
