"""Models in an object store: what is read from there, and what happens if the store fails."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import save_causal
from distributed import run_errors, run_processes
from forked import Forked
from hub_server import HubServer
from interrupted import save_large
from s3_server import BUCKET, Store, s3_store
from shardconv_runtime.checkpoint.copying import read_tensors
from shardconv_runtime.errors import (
    AccessError,
    DamagedError,
    MissingModelError,
    NetworkError,
    OptionError,
    OutputExistsError,
    SourceError,
)
from shardconv_runtime.files import manifest, object_stores
from shardconv_runtime.files.small_files import CACHE_VARIABLE
from shardconv_runtime.hub_options import Hub, is_url
from shardconv_runtime.storage import remote_files

import shardconv
from shardconv import cli
from shardconv.exports import vllm_files
from shardconv.hub import branch
from shardconv.writing import streamed_files

pytest.importorskip("obstore")

IDS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in two files, and its conversion for two ranks."""
    root = tmp_path_factory.mktemp("stores")
    plain = save_causal("llama", root / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    model.save_pretrained(plain, max_shard_size="150KB")
    (plain / "model.safetensors").unlink(missing_ok=True)
    shardconv.convert(plain, root / "out", tp=2, check=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.save_pretrained(root / "plain-zeros")
    shardconv.convert(root / "plain-zeros", root / "zeros", tp=2, check=False)
    return root


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Store]:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(remote_files, "FIRST_WAIT_S", 0.01)
    with s3_store(monkeypatch) as started:
        yield started


def logits_of(url: str, **options: Any) -> torch.Tensor:
    model = shardconv_runtime.load(url, **options)
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def unsharded(models: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(models / "plain", dtype="auto").eval()
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits
    return result


def shard_bytes(out: Path) -> int:
    return sum(path.stat().st_size for path in out.rglob("*.safetensors"))


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a process of its own: the library has threads, after which none could be forked."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(function, *args).result()


@pytest.mark.parametrize("page", [1000, 3])
def test_each_rank_reads_its_own_bytes(models: Path, store: Store, page: int, tmp_path: Path) -> None:
    """No weights are on the disk afterwards, and the ranks have read what their files hold, once."""
    store.page = page
    url = store.upload(models / "out", "converted")
    for logits in run_processes(2, logits_of, url):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)
    read = store.num_bytes_read() - shard_bytes(models / "out")
    common = sum(path.stat().st_size for path in (models / "out" / "common").glob("*.safetensors"))
    samples_and_headers = 2 * 3 * (64 * 4096 + 100_000)
    assert 0 <= read - common <= samples_and_headers
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_copy_on_the_host_is_shared(models: Path, store: Store, tmp_path: Path) -> None:
    """Each file is downloaded once by all ranks, and again when it was replaced or is not complete."""
    url = store.upload(models / "out", "converted")
    for logits in run_processes(2, logits_from_copy, url, tmp_path / "nvme"):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)
    assert store.num_bytes_read() == shard_bytes(models / "out")
    assert not list(tmp_path.rglob("*.part"))
    copied = next((tmp_path / "nvme").rglob("common/*.safetensors"))
    copied.rename(copied.with_name(f"{copied.name}.part"))  # as a process leaves it that is killed
    store.requests.clear()
    assert len(run_processes(2, logits_from_copy, url, tmp_path / "nvme")) == 2
    assert store.num_bytes_read() == (models / "out" / "common" / copied.name).stat().st_size
    store.upload(models / "zeros", "converted")
    for logits in run_processes(2, logits_from_copy, url, tmp_path / "nvme"):
        assert not logits.any()


def logits_from_copy(url: str, cache_dir: Path) -> torch.Tensor:
    return logits_of(url, hub=Hub(cache_dir=cache_dir))


def test_checksums_are_compared_if_asked(models: Path, store: Store) -> None:
    url = store.upload(models / "out", "converted")
    assert run_processes(2, verified, url) == [None, None]
    key = next(key for key in store.objects if "rank-00001" in key)
    middle = len(store.objects[key]) // 2 + 5000
    data = bytearray(store.objects[key])
    data[middle] ^= 1
    store.objects[key] = bytes(data)
    for error in run_errors(2, verified, url):
        assert "is damaged" in str(error)


def verified(url: str) -> None:
    shardconv_runtime.load(url, verify=True)


def test_the_folder_for_the_number_of_ranks(models: Path, store: Store) -> None:
    store.upload(models / "out", "folders/tp-2")
    for logits in run_processes(2, logits_of, f"s3://{BUCKET}/folders"):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)
    for error in run_errors(1, logits_of, f"s3://{BUCKET}/folders"):
        assert "holds no converted model for 1 rank, but for 2" in str(error)


def test_each_stage_is_a_folder(models: Path, store: Store, tmp_path: Path) -> None:
    shardconv.convert(models / "plain", tmp_path / "out", tp=1, pp=2, check=False)
    url = store.upload(tmp_path / "out", "staged")
    for logits in run_processes(2, logits_of, url):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)


def test_a_loaded_model_is_saved(models: Path, store: Store, tmp_path: Path) -> None:
    """Config and other small files come from the copies of those in the store."""
    run_processes(2, loaded_and_saved, store.upload(models / "out", "converted"), tmp_path / "saved")
    for path in sorted((models / "out").rglob("*.safetensors")):
        saved = tmp_path / "saved" / path.relative_to(models / "out")
        assert saved.read_bytes() == path.read_bytes()
    assert (tmp_path / "saved" / "config.json").is_file()


def loaded_and_saved(url: str, out: Path) -> None:
    shardconv_runtime.save(shardconv_runtime.load(url), out)


def test_an_ordinary_model_is_planned_and_read(models: Path, store: Store) -> None:
    url = store.upload(models / "plain", "plain")
    for logits in run_processes(2, logits_of, url):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)
    # Columns are read with the gaps between them: one request for a tensor, and two for the header of a file.
    requests = [each for each in store.requests if each.key.endswith(".safetensors")]
    num_files = len(list((models / "plain").glob("*.safetensors")))
    assert len(requests) <= 2 * (21 + 2 * num_files)


def test_it_is_converted_to_the_same_bytes(models: Path, store: Store, tmp_path: Path) -> None:
    url = store.upload(models / "plain", "plain")
    apart(converted, url, tmp_path / "out")
    shards = sorted(path.relative_to(models / "out") for path in (models / "out").rglob("*.safetensors"))
    for path in shards:
        assert (tmp_path / "out" / path).read_bytes() == (models / "out" / path).read_bytes()
    assert store.num_bytes_read() <= shard_bytes(models / "plain") + 200_000


def converted(url: str, out: Path) -> None:
    shardconv.convert(url, out, tp=2, check=False)


def test_from_a_store_to_a_store(models: Path, store: Store) -> None:
    """The directory is the same as one that was copied there, and is loaded."""
    store.quotes_marks = False
    url = store.upload(models / "plain", "plain")
    out = f"s3://{BUCKET}/out"
    arguments = ["convert", url, out, "--tp", "2", "--no-check"]
    code, text = apart(commanded, arguments)
    assert code == 0
    assert f"shardconv inspect {out}" in text
    for path in (models / "out").rglob("*.safetensors"):
        assert store.objects[f"out/{path.relative_to(models / 'out')}"] == path.read_bytes()
    assert (0, f"{out}: already complete\n") == apart(commanded, arguments)
    for logits in run_processes(2, logits_of, out):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)


def test_stages_are_written_to_a_store(models: Path, store: Store, tmp_path: Path) -> None:
    shardconv.convert(models / "plain", tmp_path / "out", tp=1, pp=2, check=False)
    apart(converted_in_stages, models / "plain", f"s3://{BUCKET}/staged")
    assert written(store, "staged") == files_of(tmp_path / "out")


def converted_in_stages(source: Path, url: str) -> None:
    shardconv.convert(source, url, tp=1, pp=2, check=False)


def commanded(arguments: list[str]) -> tuple[int, str]:
    """Run a command; its exit code and what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = cli.run([*arguments, "--quiet"] if "verify" in arguments else arguments)
    return code, printed.getvalue()


def files_of(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def written(store: Store, prefix: str) -> dict[str, bytes]:
    start = f"{prefix}/"
    return {key.removeprefix(start): data for key, data in store.objects.items() if key.startswith(start)}


def test_a_directory_in_a_store_is_verified(models: Path, store: Store) -> None:
    url = store.upload(models / "out", "converted")
    result = apart(shardconv.verify, url)
    assert result == shardconv.verify(models / "out")
    assert store.num_bytes_read() >= shard_bytes(models / "out")
    key = next(key for key in store.objects if "rank-00001" in key)
    store.objects[key] = store.objects[key][:-1] + bytes([store.objects[key][-1] ^ 1])
    del store.objects["converted/common/model-00001-of-00001.safetensors"]
    store.objects["converted/other.safetensors"] = b""
    code, _ = apart(commanded, ["verify", url])
    assert code == 3
    with pytest.raises(DamagedError) as caught:
        apart(shardconv.verify, url)
    problems = dict(problem.split(": ", 1) for problem in caught.value.problems)
    assert problems["common/model-00001-of-00001.safetensors"] == "is missing"
    assert problems[key.removeprefix("converted/")].startswith("is damaged: its checksum")
    assert "the manifest does not name it" in problems["other.safetensors"]


def test_a_directory_in_a_store_is_resharded_and_exported(models: Path, store: Store, tmp_path: Path) -> None:
    url = store.upload(models / "out", "converted")
    shardconv.reshard(models / "out", tmp_path / "local", tp=4, check=False)
    apart(resharded, url, f"s3://{BUCKET}/four")
    assert written(store, "four") == files_of(tmp_path / "local")
    shardconv.export(models / "out", tmp_path / "dcp", "dcp")
    apart(shardconv.export, url, tmp_path / "from-store", "dcp")
    assert files_of(tmp_path / "from-store") == files_of(tmp_path / "dcp")


def test_a_directory_in_a_store_is_compared_with_its_source(
    models: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor that differs is named as in a directory; the source is in the store, too."""
    monkeypatch.setattr(streamed_files, "PART_BYTES", 5000)  # some tensors are in several parts
    url, source = store.upload(models / "out", "converted"), store.upload(models / "plain", "plain")
    verified = apart(shardconv.verify, url, source, True)
    assert (verified.num_tensors, verified.remarks) == (21, ())
    assert manifest.loads(store.objects["converted/manifest.json"].decode()).numerics == verified.numerics
    with pytest.raises(DamagedError) as caught:
        apart(shardconv.verify, url, models / "plain-zeros")
    with pytest.raises(DamagedError) as expected:
        shardconv.verify(models / "out", models / "plain-zeros")
    assert caught.value.problems == expected.value.problems
    assert len(caught.value.problems) == 21


def test_a_directory_in_a_store_is_solved_again(models: Path, store: Store, tmp_path: Path) -> None:
    """Only plan and manifest are written, each if nobody else has changed it."""
    shutil.copytree(models / "out", tmp_path / "out")
    url = store.upload(models / "out", "converted")
    changes = partial(shardconv.replan, sequence_parallel=True, check=False)
    changes(tmp_path / "out")
    store.write_fault = lambda operation, key: changed_meanwhile(store, key)
    with pytest.raises(SourceError, match="was changed by another process meanwhile; try again"):
        apart(changes, url)
    store.write_fault = lambda operation, key: ""
    store.upload(models / "out", "converted")
    store.written.clear()
    apart(changes, url)
    assert written(store, "converted") == files_of(tmp_path / "out") != files_of(models / "out")
    assert store.written == [("put", "converted/plan.json"), ("put", "converted/manifest.json")]


def changed_meanwhile(store: Store, key: str) -> str:
    """Change the manifest when the plan is written."""
    if key.endswith("plan.json"):
        store.objects["converted/manifest.json"] += b" "
    return ""


def test_an_adapter_is_planned_for_a_directory_in_a_store(models: Path, store: Store, tmp_path: Path) -> None:
    url = store.upload(models / "out", "converted")
    adapted(models / "out", tmp_path / "local")
    apart(adapted, url, tmp_path / "from-store")
    assert files_of(tmp_path / "from-store") == files_of(tmp_path / "local")
    with pytest.raises(OptionError, match="s3://models/lora is in an object store; name a directory"):
        adapted(url, "s3://models/lora")


def adapted(out: Path | str, adapter: Path | str) -> None:
    shardconv.adapt(out, peft.LoraConfig(r=4, target_modules=["q_proj"]), adapter, check=False)


def test_a_directory_in_a_store_is_pushed(
    models: Path, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are sent in parts that are read by ranges; a second push finds them in place."""
    url = store.upload(models / "out", "converted")
    monkeypatch.setattr(branch, "BUFFER_BYTES", 20_000)
    with HubServer(part_bytes=50_000) as hub:
        hub.use(monkeypatch, tmp_path / "home", "hf_writer")
        assert apart(shardconv.push, url, "user/model").path == "tp-2"
        there = hub.files("user/model")
        assert {p.removeprefix("tp-2/"): d for p, d in there.items() if p.startswith("tp-2/")} == files_of(
            models / "out"
        )
        assert not apart(shardconv.push, url, "user/model").sent
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_directory_in_a_store_is_a_source_for_vllm(models: Path, store: Store) -> None:
    """Its tensors have the names and bytes of the checkpoint."""
    names = apart(tensors_for_vllm, store.upload(models / "out", "converted"))
    assert names == tensors_for_vllm(models / "out") != tensors_for_vllm(models / "zeros")


def tensors_for_vllm(place: Path | str) -> dict[str, bytes]:
    source = vllm_files.engine_source(place, Hub(), trust_remote_code=False, stream=True)
    assert (source.directory / "config.json").is_file()
    tensors = read_tensors(list(source.tensors.values()))
    return {name: tensor.numpy().tobytes() for name, tensor in zip(source.tensors, tensors, strict=True)}


def test_a_directory_in_a_store_is_merged(models: Path, store: Store, tmp_path: Path) -> None:
    """Into a store, the config is written last; the same command again finds it complete."""
    url, exported = store.upload(models / "out", "converted"), f"s3://{BUCKET}/hf"
    shardconv.export(models / "out", tmp_path / "hf", "hf")
    assert not apart(shardconv.export, url, exported, "hf").was_complete
    assert written(store, "hf") == files_of(tmp_path / "hf")
    assert [key for _, key in store.written if "/.partial/" not in key][-1] == "hf/config.json"
    assert apart(shardconv.export, url, exported, "hf").was_complete
    store.upload(models / "zeros", "converted")
    with pytest.raises(OutputExistsError, match="s3://models/hf is not empty: it is complete"):
        apart(shardconv.export, url, exported, "hf")
    for format, options in (("dcp", {}), ("vllm", {"tp": 2})):
        with pytest.raises(OptionError, match=f"to which --format {format} does not write; name a dir"):
            shardconv.export(models / "out", f"s3://{BUCKET}/other", format, **options)


def test_the_plan_of_a_directory_in_a_store_is_exported(models: Path, store: Store) -> None:
    command = ["export", store.upload(models / "out", "converted"), "--format", "plan"]
    assert apart(commanded, command) == (0, (models / "out" / "plan.json").read_text())


def resharded(url: str, out: str) -> None:
    shardconv.reshard(url, out, tp=4, check=False)


@pytest.mark.slow
def test_it_goes_on_after_twenty_kills(store: Store, tmp_path: Path) -> None:
    """Of the command, at random moments of writing; the directory is the same as without them."""
    model = save_large(tmp_path / "model")
    shardconv.convert(model, tmp_path / "out", tp=2, check=False)
    url, moments = store.upload(model, "large"), random.Random(0)
    command = ["shardconv", "convert", url, f"s3://{BUCKET}/killed", "--tp", "2", "--no-check"]
    command += ["--max-file-size", "10MB"]
    shardconv.convert(
        model, tmp_path / "small", tp=2, check=False, writing=shardconv.Writing(max_file_size="10MB")
    )
    kills = 0
    while "killed/manifest.json" not in store.objects:
        before, process = len(store.written), Forked(cli.main, argv=command)
        while process.poll() is None and len(store.written) == before:
            time.sleep(0.005)
        if kills < 20:
            time.sleep(moments.uniform(0, 0.4))
            process.send_signal(signal.SIGKILL)
            kills += 1
        _, errors = process.communicate(120)
        assert process.returncode in (0, -signal.SIGKILL), errors
    assert kills == 20
    files = {path: data for path, data in written(store, "killed").items() if ".partial/" not in path}
    expected = files_of(tmp_path / "small")
    # The source is named by its URL there.
    assert files.keys() == expected.keys()
    assert {p: d for p, d in files.items() if p != "manifest.json"} == {
        p: d for p, d in expected.items() if p != "manifest.json"
    }


def test_faults_of_the_store_cost_time_only(models: Path, store: Store) -> None:
    """Answers that are cut, errors of the server, throttling: every third request of an object."""
    url = store.upload(models / "out", "converted")
    faults = random.Random(0)
    store.fault = lambda key: faults.choice(["", "", "", "", "cut", "503", "429"])
    for logits in run_processes(2, logits_of, url):
        torch.testing.assert_close(logits, unsharded(models), rtol=0, atol=1e-10)


def test_a_file_that_is_replaced_meanwhile_is_an_error(models: Path, store: Store) -> None:
    """Its size is the same; bytes of the two are never mixed."""
    url = store.upload(models / "out", "converted")
    key = next(key for key in store.objects if "rank-00000" in key and key.endswith(".safetensors"))

    original = store.objects[key]

    def fault(requested: str) -> str:
        if requested == key and sum(each.key == key for each in store.requests) >= 5:
            store.objects[key] = original[:-1] + bytes([original[-1] ^ 1])
        return ""

    store.fault = fault
    errors = run_errors(2, logits_of, url)
    assert isinstance(errors[0], SourceError)
    assert str(errors[0]).endswith("was replaced while it was read; try again when nobody writes there")
    assert str(errors[1]).startswith(f"rank 0: s3://{BUCKET}/{key} was replaced")


def in_process(url: str) -> tuple[type[Exception], str]:
    try:
        object_stores.find_stored(url, 2)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("no error")


@pytest.mark.parametrize(
    ("url", "fault", "kind", "message"),
    [
        ("s3://nobody/model", "", MissingModelError, "there is no such bucket"),
        (f"s3://{BUCKET}/nothing", "", MissingModelError, "holds no files; check the bucket and the path"),
        (f"s3://{BUCKET}/model", "403", AccessError, "the store refuses access (status 403"),
        (f"s3://{BUCKET}/model", "301", AccessError, "is in another region; set AWS_REGION"),
        (f"s3://{BUCKET}/model", "500", SourceError, "cannot be read after 6 tries (status 500"),
    ],
)
def test_errors_are_one_line_without_secrets(
    url: str, fault: str, kind: type[Exception], message: str, store: Store
) -> None:
    store.objects["model/manifest.json"] = store.objects["model/plan.json"] = b"{}"
    store.fault = lambda key: fault
    error, text = apart(in_process, url)
    assert issubclass(error, kind)
    assert message in text
    assert text.startswith(url)
    assert "\n" not in text
    assert "secret" not in text


def copied(url: str) -> dict[str, bytes]:
    directory = object_stores.object_directory(url)
    copy = directory.local_copy(directory.objects)
    return {
        path.relative_to(copy).as_posix(): path.read_bytes() for path in copy.rglob("*") if path.is_file()
    }


def test_names_of_objects(store: Store) -> None:
    """Folders that a console has made, names that have to be quoted, and a model whose name begins alike."""
    files = {"assets/a b+c%41 ü.json": b"{}", "config.json": b"1"}
    folders = {f"model/{name}": b"" for name in ("", "assets/", "tp-2/")}
    store.objects |= folders | {f"model/{name}": data for name, data in files.items()} | {"model-2/x": b"2"}
    assert apart(copied, f"s3://{BUCKET}/model/") == files | {"tp-2": b""}
    store.objects["model//x"] = b"3"
    assert "has an object with an empty part in its name" in apart(in_process, f"s3://{BUCKET}/model")[1]


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch, store: Store) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    error, text = apart(in_process, f"s3://{BUCKET}/model")
    assert issubclass(error, NetworkError)
    assert "the store cannot be reached (no connection)" in text


def test_urls() -> None:
    assert is_url("s3://bucket/model")
    assert not is_url("user/model")
    assert not is_url("./s3:/x") or os.sep != "/"
    with pytest.raises(OptionError, match="no store has URLs that begin with ftp://"):
        is_url("ftp://host/model")
    assert is_url("abfs://container@account.dfs.core.windows.net/model")
    for secret in ("s3://key:hidden@bucket/model", "az://container/model?sig=hidden"):
        with pytest.raises(OptionError, match="holds a password or a query") as caught:
            is_url(secret)
        assert "hidden" not in str(caught.value)
    with pytest.raises(OptionError, match="lost a slash, as in a Path"):
        is_url(Path("s3://bucket/model"))
