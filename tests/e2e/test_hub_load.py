"""Models that ranks load from the Hub: converted ones, and ordinary ones that are cut by a plan."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from distributed import run_errors, run_processes
from forked import Forked
from hub_server import HubServer
from huggingface_hub import constants
from quantized_checkpoints import dense_config, save_quantized
from shardconv_runtime import Planning, Training
from shardconv_runtime.files import hub_downloads, manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.loading.planned_here import CACHE_VARIABLE
from shardconv_runtime.storage import remote_files
from small_models import save_random, small_config
from training_runs import cpu_mesh

import shardconv
from shardconv import cli
from shardconv.arguments import Writing

CONVERTED, ORIGINAL = "user/model-tp", "user/original"
TP = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of several files, large beside its headers."""
    path = tmp_path_factory.mktemp("model")
    config = small_config(
        hidden_size=256, intermediate_size=512, num_attention_heads=8, num_key_value_heads=4, vocab_size=1000
    )
    save_random(config, transformers.LlamaForCausalLM, path)
    unsharded = transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float64)
    (path / "model.safetensors").unlink()
    unsharded.save_pretrained(path, max_shard_size="4MB")
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def out(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, converted for four ranks, several files for each."""
    path = tmp_path_factory.mktemp("converted") / "tp-4"
    shardconv.convert(model, path, TP, writing=Writing(max_file_size="1MB"), check=False)
    return path


@pytest.fixture(scope="module")
def want(model: Path) -> torch.Tensor:
    unsharded = transformers.LlamaForCausalLM.from_pretrained(model)
    with torch.inference_mode():
        found: torch.Tensor = unsharded(ids()).logits
    return found


@pytest.fixture
def hub(model: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    for module in (remote_files, hub_downloads):
        monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    with HubServer() as server:
        server.use(monkeypatch, tmp_path / "home")
        server.add_repo(CONVERTED, out.parent)
        server.add_repo(ORIGINAL, model)
        yield server


def ids() -> torch.Tensor:
    return torch.arange(24).reshape(2, 12) * 37 % 1000


def logits(path: str, options: dict[str, Any]) -> torch.Tensor:
    model = shardconv_runtime.load(path, **options)
    with torch.inference_mode():
        found: torch.Tensor = model(ids()).logits
    return found


def short_logits(path: str, options: dict[str, Any]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = shardconv_runtime.load(path, **options)(ids() % 50).logits
    return found


def offline(path: str) -> list[torch.Tensor]:
    """Both ways to ask for what is in the cache alone."""
    found = [logits(path, {"local_files_only": True})]
    constants.HF_HUB_OFFLINE = True
    return [*found, logits(path, {})]


def require_right(want: torch.Tensor, path: str, num_ranks: int = TP, **options: Any) -> None:
    for found in run_processes(num_ranks, logits, path, options):
        require_close(found, want)


def require_close(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9 * float(want.abs().max()))


def sizes(out: Path) -> dict[str, int]:
    return {f"tp-4/{p.relative_to(out)}": p.stat().st_size for p in out.rglob("*") if p.is_file()}


def messages(path: str, **options: Any) -> list[str]:
    errors = run_errors(TP, logits, path, options)
    assert all(isinstance(error, shardconv_runtime.ShardconvError) for error in errors), errors
    return [str(error) for error in errors]


def test_packed_weights_that_cannot_be_computed_with_are_not_downloaded(
    hub: HubServer, tmp_path: Path
) -> None:
    """The config is, which says how they are packed; dequantized, the model is the plain one."""

    save_quantized(dense_config(), transformers.Qwen3ForCausalLM, tmp_path / "model")
    shardconv.convert(tmp_path / "model", tmp_path / "packed" / "tp-4", TP, check=False)
    hub.add_repo("user/packed", tmp_path / "packed")
    for text in messages("user/packed"):
        assert "dequantize=True" in text
    assert not [path for path in hub.served() if path.endswith(".safetensors")]
    shardconv.convert(tmp_path / "model-plain", tmp_path / "plain", TP, check=False)
    options = {"dequantize": True, "dtype": "float32"}
    expected = run_processes(TP, short_logits, str(tmp_path / "plain"), {"dtype": "float32"})
    for found in run_processes(TP, short_logits, "user/packed", options):
        torch.testing.assert_close(found, expected[0])


# Converted ----------------------------------------------------------------------------------------------


def test_each_rank_takes_its_own_files_and_each_file_comes_once(
    hub: HubServer, out: Path, want: torch.Tensor
) -> None:
    require_right(want, CONVERTED)
    assert hub.served() == sizes(out)
    hub.forget()
    require_right(want, CONVERTED)
    assert not hub.served()
    hub.forget()
    for tensors in run_processes(TP, offline, CONVERTED):
        for found in tensors:
            require_close(found, want)
    assert not [request for request in hub.requests if CONVERTED in request.path]


def test_one_rank_downloads_nothing_of_the_others(hub: HubServer, out: Path) -> None:
    repository, found = hub_downloads.find(CONVERTED, hub_downloads.Hub(), TP)
    repository.fetch(found.files_of(2))
    served = {path.split("/")[1] for path in hub.served() if path.count("/") > 1}
    assert served == {"common", manifest.rank_directory(2, TP)}
    assert sum(hub.served().values()) == sum(e.num_bytes for e in found.files_of(2)) + sum(
        (out / name).stat().st_size for name in ("plan.json", "manifest.json")
    )


def test_a_bad_network_costs_time_only(hub: HubServer, want: torch.Tensor) -> None:
    hub.faults.error_every = 5
    hub.faults.truncate_every = 6
    hub.faults.truncate_after_bytes = 1000
    require_right(want, CONVERTED)


def test_a_killed_download_goes_on(hub: HubServer, out: Path, want: torch.Tensor, tmp_path: Path) -> None:
    hub.faults.delay_s = 0.02
    hub.faults.chunk_bytes = 16384
    env = {**os.environ, **hub.environment(tmp_path / "home")}
    script = (
        "import shardconv_runtime.files.hub_downloads as f\n"
        f"r, m = f.find({CONVERTED!r}, f.Hub(), {TP})\n"
        "r.fetch(m.files_of(1))\n"
    )
    process = Forked(exec, script, {}, env=env)
    blobs = tmp_path / "home" / "hub" / ("models--" + CONVERTED.replace("/", "--")) / "blobs"
    deadline = time.monotonic() + 60
    while not any(p.suffix != ".incomplete" and p.stat().st_size > 500_000 for p in blobs.glob("*")):
        assert process.poll() is None, "it was over before a large file had come"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(60)
    complete = {p.name: p.stat().st_size for p in blobs.glob("*") if p.suffix != ".incomplete"}
    hub.faults.delay_s = 0.0
    time.sleep(1)  # what was on its way to the dead process is recorded
    hub.forget()
    require_right(want, CONVERTED)
    assert sum(hub.served().values()) == sum(sizes(out).values()) - sum(complete.values())


def test_what_cannot_be_had_is_named_on_all_ranks(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_downloads, "TRIES", 2)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    hub.faults.only = "rank-00002"
    hub.faults.error_every = 1
    hub.faults.error_status = 404
    for message in messages(CONVERTED):
        assert f"{CONVERTED}: tp-4/rank-00002-of-00004/model-00001-of-" in message
        assert "more files cannot be downloaded" in message


def test_other_numbers_of_ranks_are_named(hub: HubServer) -> None:
    (error, _) = run_errors(2, logits, CONVERTED, {})
    assert f"{CONVERTED} holds no converted model for 2 ranks, but for 4; start as many" in str(error)


def test_an_ordinary_model_of_the_hub_is_planned(
    hub: HubServer, want: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank asks for its own bytes; the second start asks for no plan, and works offline but for them."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    require_right(want, ORIGINAL)
    (plan,) = (tmp_path / "cache" / "plans").iterdir()
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    written = plan.stat().st_mtime_ns
    require_right(want, ORIGINAL, plan=Planning())
    assert plan.stat().st_mtime_ns == written


def test_a_private_repository_needs_a_token(hub: HubServer, out: Path, want: torch.Tensor) -> None:
    hub.add_repo("user/secret", out.parent, private=True)
    found = messages("user/secret")
    assert all("it does not exist, or is private" in m and m.endswith("or pass token=") for m in found), found
    require_right(want, "user/secret", token="hf_reader")


def test_a_revision_is_pinned(hub: HubServer, out: Path, want: torch.Tensor, tmp_path: Path) -> None:
    commit = hub.head(CONVERTED).oid
    changed = tmp_path / "changed" / "tp-4"
    shutil.copytree(out, changed)
    text = (changed / "plan.json").read_text()
    (changed / "plan.json").write_text(text.replace('"tp": 4', '"tp": 4 '))
    hub.add_repo(CONVERTED, changed.parent)
    assert all("plan.json is not the plan that the files were written for" in m for m in messages(CONVERTED))
    require_right(want, CONVERTED, revision=commit)
    assert all("has no revision nowhere" in m for m in messages(CONVERTED, revision="nowhere"))


def test_a_pushed_directory_is_loaded(hub: HubServer, out: Path, want: torch.Tensor) -> None:
    shardconv.push(out, "user/pushed", token="hf_writer")
    require_right(want, "user/pushed")


def test_a_directory_of_several_is_loaded(out: Path, want: torch.Tensor) -> None:
    require_right(want, str(out.parent))


# Ordinary -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plan(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the config alone."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan_json.write(shardconv.plan(model, TP), path)
    return path


def test_an_ordinary_model_is_cut_by_a_plan(model: Path, plan: Path, want: torch.Tensor) -> None:
    require_right(want, str(model), plan=plan)


def test_of_one_on_the_hub_only_the_ranks_bytes_are_read(
    hub: HubServer, model: Path, out: Path, plan: Path, want: torch.Tensor, tmp_path: Path
) -> None:
    hub.add_repo("user/plans", {"llama/tp-4.json": plan.read_bytes()})
    require_right(want, ORIGINAL, plan="user/plans/llama/tp-4.json")
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in model.glob("*.safetensors"))
    found = manifest.read(out)
    own = sum(e.num_bytes for rank in range(TP) for e in found.files_of(rank) if "model-" in e.path)
    read = sum(count for name, count in hub.served().items() if name.endswith(".safetensors"))
    assert 0.9 * own < read <= 1.02 * (own + TP * headers)
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_a_plan_of_another_model_is_refused(hub: HubServer, model: Path, plan: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_random(transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2), transformers.GPT2LMHeadModel, other)
    assert all("the plan is for a transformers.models.llama" in m for m in messages(str(other), plan=plan))
    smaller = tmp_path / "smaller"
    save_random(small_config(), transformers.LlamaForCausalLM, smaller)
    found = messages(str(smaller), plan=plan)
    assert all("the plan is for shape" in message or "in the plan" in message for message in found), found
    assert all("no such file" in m or "cannot be read" in m for m in messages(str(model), plan="no.json"))


def test_a_model_loaded_by_a_plan_is_saved_as_a_converted_one(
    model: Path, out: Path, plan: Path, tmp_path: Path
) -> None:
    run_processes(TP, save, str(model), plan, tmp_path / "saved")
    found = (tmp_path / "saved").rglob("*.safetensors")
    assert {p.name: p.read_bytes() for p in found if p.parent.name == "common"} == {
        p.name: p.read_bytes() for p in (out / "common").iterdir()
    }
    assert (tmp_path / "saved/tokenizer_config.json").is_file()


def save(path: str, plan: Path, target: Path) -> None:
    model = shardconv_runtime.load(path, plan=plan)
    shardconv_runtime.save(model, target, max_file_size=1_000_000)


def logits_of_parts(path: str, options: dict[str, Any]) -> torch.Tensor:
    mesh = cpu_mesh(2, 2)
    model = shardconv_runtime.load(path, mesh=mesh, training=True, data_parallel=True, **options)
    with torch.inference_mode():
        found: torch.Tensor = model(ids()).logits
    return found


def test_data_parallel_processes_read_their_parts(
    hub: HubServer, model: Path, want: torch.Tensor, tmp_path: Path
) -> None:
    """Of an ordinary model by a plan: together no more than its bytes. Of a converted one: each file once."""
    plan_json.write(shardconv.plan(model, 2), tmp_path / "plan.json")
    for found in run_processes(4, logits_of_parts, ORIGINAL, {"plan": tmp_path / "plan.json"}):
        require_close(found, want)
    files = list(model.glob("*.safetensors"))
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in files)
    num_bytes = sum(p.stat().st_size for p in files)
    read = sum(count for name, count in hub.served().items() if name.endswith(".safetensors"))
    assert 0.9 * num_bytes < read <= 1.02 * (num_bytes + 4 * headers)
    shardconv.convert(model, tmp_path / "out", 2, check=False)
    hub.add_repo("user/halves", tmp_path / "out")
    hub.forget()
    for found in run_processes(4, logits_of_parts, "user/halves", {}):
        require_close(found, want)
    shards = {p.name for p in (tmp_path / "out").rglob("*.safetensors")}
    served = {name: n for name, n in hub.served().items() if Path(name).name in shards}
    assert served == {name: (tmp_path / "out" / name).stat().st_size for name in served}


def test_stages_are_loaded_from_a_repository(
    hub: HubServer, model: Path, want: torch.Tensor, tmp_path: Path
) -> None:
    """As ``hf upload`` puts them there; each file comes once, and from the cache without a network."""
    out = tmp_path / "staged"
    shardconv.convert(model, out, 2, pp=2, check=False)
    hub.add_repo("user/model-pp", out)
    require_right(want, "user/model-pp")
    shards = {str(p.relative_to(out)): p.stat().st_size for p in out.rglob("*.safetensors")}
    assert {name: size for name, size in hub.served().items() if name.endswith(".safetensors")} == shards
    hub.forget()
    for tensors in run_processes(TP, offline, "user/model-pp"):
        for found in tensors:
            require_close(found, want)
    assert not hub.served()
    (text, *_) = run_errors(2, logits, "user/model-pp", {})
    assert "converted for tp=2 and 2 stages" in str(text)


def test_several_stages_of_a_process_are_loaded_from_a_repository(hub: HubServer, tmp_path: Path) -> None:
    """Each of two processes takes two of four directories, without and with a folder around them."""
    source = tmp_path / "four"
    save_random(small_config(num_hidden_layers=4), transformers.LlamaForCausalLM, source)
    out = tmp_path / "out" / "pp-4-tp-1"
    shardconv.convert(source, out, 1, pp=4)
    hub.add_repo("user/four", out)
    hub.add_repo("user/folder", out.parent)
    with torch.inference_mode():
        want = transformers.LlamaForCausalLM.from_pretrained(source)(ids() % 50).logits
    options = {"training": Training(stages_per_process=2)}
    for path in ("user/four", "user/folder"):
        hub.forget()
        for found in run_processes(2, short_logits, path, options):
            require_close(found, want)
        names = [name for name in hub.served() if name.endswith(".safetensors")]
        assert len(names) == len(set(names)) == len(list(out.rglob("*.safetensors")))


def test_stages_are_pushed_beside_others(
    hub: HubServer,
    model: Path,
    out: Path,
    want: torch.Tensor,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four processes take ``tp-4/`` before ``pp-2-tp-2/``, unless that is named."""
    repo, staged = "user/several", tmp_path / "out"
    shardconv.convert(model, staged, 2, pp=2, check=False)
    pushed = shardconv.push(staged, repo, token="hf_writer")
    files = {p.relative_to(staged).as_posix() for p in staged.rglob("*") if p.is_file()}
    assert {f"pp-2-tp-2/{name}" for name in files} <= set(pushed.sent)
    assert not shardconv.push(staged, repo, token="hf_writer").sent
    require_right(want, repo)
    card = hub.files(repo)["README.md"].decode()
    assert "| pp-2-tp-2 | 4 |" in card
    assert "--tp 2 --pp 2 pp-2-tp-2/" in card
    shardconv.push(out, repo, token="hf_writer")
    for path, folder in ((repo, "tp-4"), (f"{repo}/pp-2-tp-2", "pp-2-tp-2")):
        hub.forget()
        require_right(want, path)
        assert {name.partition("/")[0] for name in hub.served() if "/" in name} <= {folder}
    assert cli.run(["inspect", f"{repo}/pp-2-tp-2"]) == 0
    shown = capsys.readouterr().out
    assert "STAGES  2, with 2 ranks each" in shown
    assert "stage-00001-of-00002" in shown
    assert cli.run(["inspect", repo]) == 2
    assert "several converted models, pp-2-tp-2, tp-4; choose with" in capsys.readouterr().err


def test_other_stages_replace_the_pushed_ones(hub: HubServer, model: Path, tmp_path: Path) -> None:
    """No commit has a manifest that lists other files."""
    shardconv.convert(model, tmp_path / "out", 1, pp=2, check=False)
    shardconv.push(tmp_path / "out", "user/pp", token="hf_writer")
    other = transformers.LlamaForCausalLM.from_pretrained(model)
    other.model.layers[0].mlp.up_proj.weight.data.zero_()
    other.save_pretrained(tmp_path / "other")
    shardconv.convert(tmp_path / "other", tmp_path / "again", 1, pp=2, check=False)
    shardconv.push(tmp_path / "again", "user/pp", token="hf_writer")
    removed = 0
    for commit in hub.repo("user/pp").history():
        for part in ("pp-2-tp-1/stage-00000-of-00002", "pp-2-tp-1/stage-00001-of-00002"):
            file = commit.files.get(f"{part}/manifest.json")
            removed += file is None
            entries = () if file is None else manifest.loads(hub.store.blobs.read(file.sha256).decode()).files
            for entry in entries:
                assert commit.files[f"{part}/{entry.path}"].num_bytes == entry.num_bytes
    assert removed
