"""Converting again and again: the same bytes, and nothing of a conversion stays in the process."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import CONFIGS, save_causal
from quick_calls import real_unfreeze
from torch import nn

import shardconv

pytestmark = pytest.mark.usefixtures("solved_anew")

TYPES = ("llama", "phi3", "mixtral")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each type."""
    root = tmp_path_factory.mktemp("sources")
    return {model_type: save_causal(model_type, root / model_type) for model_type in TYPES}


@pytest.fixture(params=TYPES)
def source(request: pytest.FixtureRequest, sources: dict[str, Path]) -> Path:
    """One checkpoint after the other."""
    return sources[request.param]


ONE_TYPE = pytest.mark.parametrize(
    "source",
    ["mixtral", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "phi3"))],
    indirect=True,
)


def files_of(path: Path) -> dict[str, bytes]:
    """Contents of every file below ``path``."""
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("types", [("mixtral",), pytest.param(TYPES, marks=pytest.mark.slow)])
def test_the_same_bytes_in_one_process_and_in_another(
    sources: dict[str, Path], types: tuple[str, ...], tmp_path: Path
) -> None:
    """Whatever order sets have there."""
    sources = {name: sources[name] for name in types}
    for attempt in ("first", "second"):
        convert_all(sources, tmp_path / attempt)
    want = files_of(tmp_path / "first")
    assert {"mixtral/plan.json", "mixtral/manifest.json"} < want.keys()
    assert files_of(tmp_path / "second") == want
    convert_elsewhere(sources, tmp_path / "elsewhere", "1")
    assert files_of(tmp_path / "elsewhere") == want


def convert_all(sources: dict[str, Path], out: Path) -> None:
    """Convert each type to a directory below ``out``."""
    out.mkdir()
    for name, path in sources.items():
        shardconv.convert(path, out / name, tp=2)


def convert_elsewhere(sources: dict[str, Path], out: Path, hash_seed: str) -> None:
    """The same in another process, with this order of sets."""
    texts = {name: str(path) for name, path in sources.items()}
    code = (
        f"import shardconv; from pathlib import Path; out = Path({str(out)!r}); out.mkdir()\n"
        f"for name, path in {texts!r}.items(): shardconv.convert(path, out / name, tp=2)"
    )
    env = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=env)


@ONE_TYPE
def test_the_check_changes_nothing_but_what_it_proves(source: Path, tmp_path: Path) -> None:
    """And neither does the way to the config: a directory and a config object give the same plan."""
    checked = shardconv.convert(source, tmp_path / "checked", tp=2)
    unchecked = shardconv.convert(source, tmp_path / "unchecked", tp=2, check=False)
    assert replace(checked, proven_arguments=()) == unchecked
    written, others = files_of(tmp_path / "checked"), files_of(tmp_path / "unchecked")
    differing = {path for path in written.keys() | others.keys() if written.get(path) != others.get(path)}
    assert {Path(path).name for path in differing} <= {"plan.json", "manifest.json"}
    assert shardconv.plan(source, tp=2) == unchecked
    assert shardconv.plan(transformers.AutoConfig.from_pretrained(source), tp=2) == unchecked


@dataclass
class Built:
    """The models of transformers that were built, as long as they live."""

    models: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    count: int = 0

    def alive(self) -> list[nn.Module]:
        """Those that something still refers to."""
        gc.collect()
        return list(self.models)


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Built:
    """Fills up during the test."""
    found = Built()
    original = transformers.PreTrainedModel.__init__

    def remember(self: Any, *args: Any, **kwargs: Any) -> None:
        found.models.add(self)
        found.count += 1
        original(self, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "__init__", remember)
    return found


@ONE_TYPE
def test_no_model_survives(source: Path, tmp_path: Path, built: Built) -> None:
    shardconv.convert(source, tmp_path / "out", tp=2)
    assert not built.alive()
    shardconv.plan(source, tp=4)
    assert not built.alive()
    shardconv.convert(source, tmp_path / "one", tp=1)
    before = built.count
    assert before >= 5, "one to trace, one to read the weights"
    for _ in range(2):
        model = shardconv_runtime.load(tmp_path / "one")
        assert model in built.models
        del model
        assert not built.alive()
    assert built.count > before


def test_no_model_survives_a_failure(tmp_path: Path, built: Built) -> None:
    """Not even through the traceback, once that is gone."""
    path = save_causal("llama", tmp_path / "llama")
    count = built.count
    with pytest.raises(KeyboardInterrupt):
        shardconv.convert(path, tmp_path / "out", tp=2, progress=Interrupts())
    assert built.count > count
    assert not built.alive()
    assert not (tmp_path / "out").exists()


class Interrupts:
    """Progress that stops a conversion when it proves the plan."""

    def stage(self, text: str) -> None:
        if "simulat" in text:
            raise KeyboardInterrupt

    def bar(self, *args: object) -> Any:
        raise AssertionError("nothing may be written")


def test_memory_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Python objects: after the first time, what one plan leaves behind is nothing."""
    monkeypatch.setattr(gc, "unfreeze", real_unfreeze)
    config = transformers.CONFIG_MAPPING["llama"](**CONFIGS["llama"] | {"num_hidden_layers": 1})
    counts = []
    for _ in range(3):
        shardconv.plan(config, tp=2, check=True)
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[-1] - counts[1] < 100


def state() -> dict[str, Any]:
    """What a library must leave as it was."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": np.random.get_state()[1].tolist(),  # type: ignore[index, union-attr]
        "python": random.getstate(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "collector": gc.isenabled(),
        "environment": dict(os.environ),
        "verbosity": transformers.logging.get_verbosity(),
        "directory": Path.cwd(),
    }


def patchable() -> dict[str, object]:
    """Everything in the namespaces that a tracer could be tempted to patch."""
    import transformers.integrations.moe
    import transformers.masking_utils
    import transformers.models.llama.modeling_llama as llama

    places: dict[str, Any] = {
        "torch": torch,
        "functional": torch.nn.functional,
        "Tensor": torch.Tensor,
        "Module": nn.Module,
        "Linear": nn.Linear,
        "init": nn.init,
        "PreTrainedModel": transformers.PreTrainedModel,
        "config": transformers.PreTrainedConfig,
        "masking": transformers.masking_utils,
        "experts": transformers.integrations.moe,
        "llama": llama,
        **{f"llama.{name}": cls for name, cls in vars(llama).items() if isinstance(cls, type)},
    }
    return {
        f"{place}.{name}": value for place, owner in places.items() for name, value in vars(owner).items()
    }


def run_all(source: Path, out: Path) -> None:
    shardconv.plan(transformers.AutoConfig.from_pretrained(source), tp=2, check=True)
    shardconv.convert(source, out, tp=1)
    shardconv_runtime.load(out)


def fail(source: Path, out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        shardconv.convert(source, out, tp=2, progress=Interrupts())


@pytest.mark.parametrize("action", [run_all, fail])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_the_process_is_left_as_it_was(
    tmp_path: Path, action: Callable[[Path, Path], None], dtype: torch.dtype
) -> None:
    source = save_causal("llama", tmp_path / "llama")
    run_all(source, tmp_path / "first")  # imports are cached after this
    torch.set_default_dtype(dtype)
    try:
        before, names = state(), patchable()
        action(source, tmp_path / "again")
        after = state()
        assert after == before
        changed = [name for name, value in patchable().items() if names.get(name) is not value]
        assert not changed
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_config_object_is_not_changed() -> None:
    config = transformers.CONFIG_MAPPING["mixtral"](**CONFIGS["mixtral"])
    before = config.to_dict()
    shardconv.plan(config, tp=2, check=True)
    assert config.to_dict() == before


def test_models_work_as_before(tmp_path: Path) -> None:
    """A model of the same class that lives through a conversion gives the same logits, with gradients."""
    path = save_causal("llama", tmp_path / "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = torch.tensor([[5, 9, 200]])
    before = model(ids).logits
    shardconv.convert(path, tmp_path / "out", tp=2)
    assert torch.equal(before, model(ids).logits)
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
