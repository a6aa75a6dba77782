"""What converted directories of an attacker could try to have done at load time, each thing by itself."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
from converted import llama_plan, random_llama, write_directory
from hostile import Directory, header_of, to_bytes, with_header
from shardconv_runtime import CheckpointError, PlanError, ShardconvError
from shardconv_runtime.comm.collectives import ProcessCommunicator
from shardconv_runtime.files import manifest
from shardconv_runtime.format.dims import parse
from shardconv_runtime.parallel.attribute_overrides import raise_flags
from shardconv_runtime.parallel.row_ids import RowIds

import shardconv

RAN = "SHARDCONV_TEST_CODE_RAN"


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    """A small model for one rank."""
    model = random_llama()
    return Directory(
        write_directory(tmp_path / "intact", model, llama_plan(model.config, (1,))), tmp_path / "out"
    )


def load(directory: Directory) -> Any:
    return shardconv_runtime.load(directory.path, device="cpu")


def test_what_is_not_changed_is_loaded(directory: Directory) -> None:
    model = load(directory)
    assert model(torch.tensor([[1, 2, 3]])).logits.shape[:2] == (1, 3)


@pytest.mark.parametrize(
    "name", ["planted:Model", "os:system", "torch.nn:Linear", "builtins:eval", "sys:exit"]
)
def test_a_plan_names_no_other_class(
    directory: Directory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory.path / "planted.py").write_text(f"import os\nos.environ[{RAN!r}] = '1'\n")
    monkeypatch.chdir(directory.path)
    monkeypatch.syspath_prepend("")
    plan = directory.document("plan.json")
    plan["model"]["class_name"] = name
    directory.put("plan.json", to_bytes(plan))
    with pytest.raises(PlanError):
        load(directory)
    assert RAN not in os.environ


@pytest.mark.parametrize(
    "attribute", ["__class__", "_modules", "config.__class__", "forward.__globals__", "_x.a"]
)
def test_overrides_are_of_public_attributes(directory: Directory, attribute: str) -> None:
    plan = directory.document("plan.json")
    override = {"attribute": attribute, "value": 1, "local": [1]}
    plan["modules"] = [{"names": [""], "category": "boundary", "overrides": [override]}]
    directory.put("plan.json", to_bytes(plan))
    with pytest.raises(PlanError, match="not the path of an attribute"):
        load(directory)


def test_overrides_only_shrink(directory: Directory) -> None:
    """Some ints of a config make lists of their size."""
    plan = directory.document("plan.json")
    override = {"attribute": "config.num_labels", "value": 2, "local": [10**12]}
    plan["modules"] = [{"names": [""], "category": "boundary", "overrides": [override]}]
    directory.put("plan.json", to_bytes(plan))
    with pytest.raises(PlanError, match="larger than the global one"):
        load(directory)


@pytest.mark.parametrize("flag", ["training", "__class__", "forward", "config", "nothing", "a.b"])
def test_flags_are_bools_that_were_false(flag: str) -> None:
    module = torch.nn.Linear(1, 1)
    module.config = {}  # type: ignore[assignment]
    with pytest.raises(PlanError, match="was False"):
        raise_flags(module, (flag,))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"auto_map": {"AutoConfig": "planted.Config"}, "model_type": "planted"}, "not a valid config"),
        ({"auto_map": {"AutoConfig": "org/other--planted.Config"}}, "code of another repository"),
        ({"attn_implementation": "org/kernel"}, "repository of kernels"),
        ({"_attn_implementation": "org/kernel:f"}, "repository of kernels"),
        ({"attn_implementation": {"": "sdpa", "text_config": "org/kernel@main"}}, "repository of kernels"),
        ({"vision": {"experts_implementation": "org/kernel"}}, "repository of kernels"),
        ({"configuration_files": ["config.4.0.0.json"]}, "another file"),
        ({"backbone": "hf-hub:org/model"}, "something to download"),
        ({"model_args": {"checkpoint_path": "x.bin"}}, "load weights"),
        ({"backbone_config": {"use_pretrained_backbone": True}}, "load weights"),
        ({"hidden_size": "wide"}, "config.json"),
        ({"num_attention_heads": 0}, "config.json"),
    ],
)
def test_a_config_holds_values_alone(directory: Directory, changes: dict[str, Any], says: str) -> None:
    (directory.path / "planted.py").write_text(f"import os\nos.environ[{RAN!r}] = '1'\n")
    directory.put("config.json", to_bytes(directory.document("config.json") | changes))
    with pytest.raises(ShardconvError, match=says):
        load(directory)
    assert RAN not in os.environ


def test_the_models_own_code_is_imported_with_the_flag_only(directory: Directory) -> None:
    (directory.path / "planted.py").write_text(f"import os\nos.environ[{RAN!r}] = '1'\n")
    plan = directory.document("plan.json")
    plan["model"] |= {"trust_remote_code": True, "class_name": "planted:Model"}
    directory.put("plan.json", to_bytes(plan))
    with pytest.raises(PlanError, match="trust_remote_code=True"):
        load(directory)
    plan["model"]["class_name"] = "gpt2--planted:Model"
    directory.put("plan.json", to_bytes(plan))
    with pytest.raises(PlanError, match="code of another repository"):
        shardconv_runtime.load(directory.path, device="cpu", trust_remote_code=True)
    assert RAN not in os.environ


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"max_length": "x", "cache_implementation": 3}', "[" * 10**5]
)
def test_generation_configs(directory: Directory, content: str) -> None:
    (directory.path / "generation_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load(directory)
    directory.put("generation_config.json", content.encode())
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        load(directory)


class Evil:
    def __reduce__(self) -> Any:
        return os.putenv, (RAN, "1")


def test_no_pickle_is_opened(directory: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be listed: it is a file like any other."""
    found, data = directory.document("manifest.json"), pickle.dumps(Evil())
    for name in ("pytorch_model.bin", "training_args.bin"):
        (directory.path / name).write_bytes(data)
        found["files"].append({"path": name, "num_bytes": len(data), "checksum": "sha256:" + "0" * 64})
    found["files"].sort(key=lambda entry: entry["path"])
    directory.put_manifest(found)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    monkeypatch.setattr(torch, "load", None)
    load(directory)
    with pytest.raises(CheckpointError, match="2 problems"):
        shardconv.verify(directory.path)


@pytest.mark.parametrize(
    "path",
    ["../outside.json", "/etc/passwd", "a/../../outside.json", "c:x", "con", "NUL.txt", "a/aux", "x.", "x ",
     "a\u007f", "Config.json", "MANIFEST.JSON", "Plan.json", "a" * 300, "a/" * 800 + "b", "a?b"],
)  # fmt: skip
def test_paths_that_are_refused(directory: Directory, path: str) -> None:
    found = directory.document("manifest.json")
    found["files"].append({"path": path, "num_bytes": 1, "checksum": "sha256:" + "0" * 64})
    found["files"].sort(key=lambda entry: entry["path"])
    directory.put_manifest(found)
    for call in (load, lambda d: shardconv.verify(d.path)):
        with pytest.raises(CheckpointError, match=r"path|differ in case"):
            call(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "plan.json", "manifest.json"])
def test_links_out_of_the_directory(directory: Directory, tmp_path: Path, name: str) -> None:
    (directory.path / name).rename(tmp_path / "outside")
    (directory.path / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match="link out of the directory"):
        load(directory)


def test_links_into_the_blobs_of_a_hub_cache(directory: Directory, tmp_path: Path) -> None:
    """Of a directory within a repository, too."""
    repository = tmp_path / "cache" / "models--org--model"
    inside = repository / "snapshots" / "abc" / "tp-1"
    inside.parent.mkdir(parents=True)
    (repository / "blobs").mkdir()
    directory.path.rename(inside)
    for index, path in enumerate(p for p in sorted(inside.rglob("*")) if p.is_file()):
        path.rename(repository / "blobs" / str(index))
        path.symlink_to(repository / "blobs" / str(index))
    shardconv_runtime.load(inside, device="cpu")
    (repository / "secret").write_text("{}")
    (inside / "config.json").unlink()
    (inside / "config.json").symlink_to(repository / "secret")
    with pytest.raises(CheckpointError, match="link out of the directory"):
        shardconv_runtime.load(inside, device="cpu")


def test_a_config_that_the_manifest_does_not_name_is_not_read(directory: Directory) -> None:
    found = directory.document("manifest.json")
    found["files"] = [entry for entry in found["files"] if entry["path"] != "config.json"]
    directory.put_manifest(found)
    with pytest.raises(CheckpointError, match=r"config\.json is missing from manifest\.json"):
        load(directory)


def test_the_plan_is_bound_to_the_manifest(directory: Directory) -> None:
    text = (directory.path / "plan.json").read_text()
    (directory.path / "plan.json").write_text(text + "\n")
    with pytest.raises(CheckpointError, match="not the plan that the files were written for"):
        load(directory)


def test_a_changed_config_is_refused(directory: Directory) -> None:
    text = (directory.path / "config.json").read_text()
    (directory.path / "config.json").write_text(text.replace("rms_norm_eps", "rms_norm_epz"))
    with pytest.raises(CheckpointError, match=r"config\.json is not the one that was converted"):
        load(directory)


def test_tensors_larger_than_their_file(directory: Directory) -> None:
    (name,) = [e["path"] for e in directory.document("manifest.json")["files"] if "common" in e["path"]]
    data = (directory.path / name).read_bytes()
    header = header_of(data)
    key = next(key for key in header if key != "__metadata__")
    for shape in ([2**62], [2**62] * 60, [1] * 1000):
        header[key]["shape"] = shape
        directory.put(name, with_header(data, json.dumps(header).encode()))
        with pytest.raises(CheckpointError, match=r"shape|data_offsets|not the"):
            load(directory)


def test_verify_lists_a_thousand_tensors(directory: Directory) -> None:
    (name,) = [e["path"] for e in directory.document("manifest.json")["files"] if "common" in e["path"]]
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    data = (directory.path / name).read_bytes()
    header = {f"more.{index}": empty for index in range(1500)} | header_of(data)
    directory.put(name, with_header(data, to_bytes(header)))
    with pytest.raises(CheckpointError, match="1000 problems"):
        shardconv.verify(directory.path)


def test_a_table_of_rows_has_a_bound() -> None:
    with pytest.raises(PlanError, match="more than"):
        RowIds(ProcessCommunicator(0, (2,), {}), parse("2*17592186044416@0"))


def test_a_file_of_another_size_is_not_read(directory: Directory) -> None:
    (directory.path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="should have"):
        manifest.check_sizes(directory.path, manifest.read(directory.path), 0)
