"""A model whose inputs nobody could guess: it is converted with an example of a call."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import shardconv_runtime
import torch
import transformers
from checkpoints import randomise
from click.testing import CliRunner
from distributed import run_processes
from safetensors.torch import save_file
from shardconv_runtime.errors import ShardconvError, SolveError, SourceError
from torch import Tensor
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import shardconv
from shardconv.cli.entry import cli
from shardconv.inputs.example_inputs import NOT_IN_EXAMPLES

CODE = {
    "configuration_pilot.py": """
        from transformers import PreTrainedConfig

        class PilotConfig(PreTrainedConfig):
            model_type = "pilot"

            def __init__(self, channels=7, breadth=48, heads=6, commands=5, layers=2, **kwargs):
                self.channels, self.breadth, self.heads = channels, breadth, heads
                self.commands, self.layers = commands, layers
                super().__init__(**kwargs)
        """,
    "modeling_pilot.py": """
        import torch
        from torch import nn
        from torch.nn import functional as F
        from transformers import PreTrainedModel
        from transformers.modeling_outputs import BaseModelOutput
        from .configuration_pilot import PilotConfig

        class Look(nn.Module):
            def __init__(self, config):
                super().__init__()
                self.heads = config.heads
                self.norm = nn.LayerNorm(config.breadth)
                self.mix = nn.Linear(config.breadth, 3 * config.breadth)
                self.out = nn.Linear(config.breadth, config.breadth)
                self.up = nn.Linear(config.breadth, 4 * config.breadth)
                self.down = nn.Linear(4 * config.breadth, config.breadth)

            def forward(self, x, reach):
                batch, steps, _ = x.shape
                q, k, v = self.mix(self.norm(x)).view(batch, steps, 3, self.heads, -1).unbind(2)
                near = torch.where(reach[:, None], 0.0, -1e4).to(x.dtype)
                y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=near)
                x = x + self.out(y.transpose(1, 2).reshape(batch, steps, -1))
                return x + self.down(F.gelu(self.up(x)))

        class PilotModel(PreTrainedModel):
            config_class = PilotConfig

            def __init__(self, config):
                super().__init__(config)
                self.sense = nn.Linear(config.channels, config.breadth)
                self.gait = nn.Embedding(11, config.breadth)
                self.layers = nn.ModuleList(Look(config) for _ in range(config.layers))
                self.act = nn.Linear(config.breadth, config.commands)
                self.post_init()

            def forward(self, readings, gait_of_step, reach=None, mode="fine", return_dict=True):
                if readings.shape[-1] != self.config.channels:
                    raise ValueError("readings of another robot")
                if mode not in ("fine", "rough"):
                    raise ValueError("no such mode")
                if reach is None:
                    reach = torch.ones(readings.shape[:2] + readings.shape[1:2], dtype=torch.bool)
                x = self.sense(readings) + self.gait(gait_of_step)
                for layer in self.layers:
                    x = layer(x, reach)
                out = self.act(x)
                return BaseModelOutput(out if mode == "fine" else out.round())
        """,
}

EXAMPLE = """
    import torch

    def example_inputs(config):
        reach = torch.ones(3, 13, 13).tril().bool()
        return {
            "readings": torch.randn(3, 13, config.channels),
            "gait_of_step": torch.arange(39).reshape(3, 13) % 11,
            "reach": reach,
        }
    """


def given(steps: int, batch: int = 2) -> dict[str, Tensor]:
    """A call of another size than the example's."""
    generator = torch.Generator().manual_seed(steps)
    return {
        "readings": torch.randn(batch, steps, 7, generator=generator),
        "gait_of_step": torch.randint(11, (batch, steps), generator=generator),
        "reach": torch.rand(batch, steps, steps, generator=generator) < 0.7,
    }


@pytest.fixture(scope="module")
def pilot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the model, its own code, and random weights; ``call.py`` beside it."""
    root = tmp_path_factory.mktemp("pilot")
    path = root / "pilot"
    path.mkdir()
    for name, code in CODE.items():
        (path / name).write_text(textwrap.dedent(code))
    (root / "call.py").write_text(textwrap.dedent(EXAMPLE))
    auto = {"AutoConfig": "configuration_pilot.PilotConfig", "AutoModel": "modeling_pilot.PilotModel"}
    config = {"model_type": "pilot", "architectures": ["PilotModel"], "auto_map": auto, "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    model = unsharded(path, load=False)
    randomise(model)
    save_file({n: t.contiguous() for n, t in model.state_dict().items()}, path / "model.safetensors")
    return path


def unsharded(path: Path, *, load: bool = True) -> Any:
    cls = get_class_from_dynamic_module("modeling_pilot.PilotModel", str(path))
    if load:
        return cls.from_pretrained(path)
    return cls(get_class_from_dynamic_module("configuration_pilot.PilotConfig", str(path))())


@pytest.fixture(scope="module")
def out(pilot: Path) -> Path:
    """The same, converted for three ranks."""
    out = pilot.parent / "out"
    shardconv.convert(pilot, out, 3, trust_remote_code=True, example_inputs=pilot.parent / "call.py")
    return out


def _outputs(out: str) -> list[Tensor]:
    model = shardconv_runtime.load(out, trust_remote_code=True)
    with torch.no_grad():
        return [model(**given(n)).last_hidden_state for n in (5, 17)]


class TestConverted:
    def test_calls_of_other_sizes_are_those_of_one_process(self, pilot: Path, out: Path) -> None:
        model = unsharded(pilot)
        with torch.no_grad():
            wanted = [model(**given(n)).last_hidden_state for n in (5, 17)]
        for found in run_processes(3, _outputs, str(out)):
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=2e-5 * want.abs().max().item())

    def test_heads_and_hidden_units_are_sharded(self, out: Path) -> None:
        plan = json.loads((out / "plan.json").read_text())
        categories = {name: e["category"] for e in plan["modules"] for name in e["names"]}
        assert categories["layers.{0,1}.mix"] == "column"
        assert categories["layers.{0,1}.down"] == "row"

    def test_what_is_made_of_it_later_uses_the_example(self, out: Path, tmp_path: Path) -> None:
        assert (out / "example-inputs.tensors").is_file()
        shardconv.replan(out, trust_remote_code=True)
        plan = shardconv.reshard(out, tmp_path / "two", 2, trust_remote_code=True)
        assert plan.tp == 2
        assert shardconv.verify(tmp_path / "two", numerics=True, trust_remote_code=True)
        merged = tmp_path / "merged"
        shardconv.merge(out, merged, trust_remote_code=True)
        assert shardconv.plan(merged, 6, trust_remote_code=True).tp == 6


class TestGiven:
    def test_a_safetensors_file(self, pilot: Path, tmp_path: Path) -> None:
        path = tmp_path / "call.safetensors"
        save_file(given(13, 3), path, {"arguments": json.dumps({"mode": "fine"})})
        plan = shardconv.plan(pilot, 2, trust_remote_code=True, example_inputs=path, check=True)
        assert plan.tp == 2

    def test_a_function_and_a_dict(self, pilot: Path) -> None:
        options: dict[str, Any] = {"trust_remote_code": True}
        one = shardconv.plan(pilot, 2, **options, example_inputs=lambda config: given(13, 3))
        assert one == shardconv.plan(pilot, 2, **options, example_inputs=given(13, 3))

    def test_images_that_the_example_leaves_out_are_refused_later(self) -> None:
        """Each of these inputs would be tried if inputs were made up."""
        config = transformers.AutoConfig.for_model("llava", **LLAVA)
        ids = torch.randint(5, 90, (3, 13))
        plan = shardconv.plan(config, 2, example_inputs={"input_ids": ids}, check=True)
        assert plan.left_out == ("pixel_values",)
        assert "traced without pixel_values (it is not in the example inputs)" in plan.notes[0]
        assert shardconv.plan(config, 2).left_out == ()

    def test_the_command(self, pilot: Path) -> None:
        arguments = ["plan", str(pilot), "--tp", "2", "--trust-remote-code", "--example-inputs"]
        call = pilot.parent / "call.py"
        found = CliRunner().invoke(cli, [*arguments, str(call)], prog_name="shardconv")
        assert found.exit_code == 0
        assert "heads 6 → 3" in found.output
        found = CliRunner().invoke(cli, [*arguments, "nowhere.py"], prog_name="shardconv")
        assert found.exit_code == 2
        assert "nowhere.py" in found.output

    @pytest.mark.parametrize("argument", sorted(NOT_IN_EXAMPLES))
    def test_arguments_that_no_example_has(self, argument: str) -> None:
        config = transformers.AutoConfig.for_model("t5", **T5)
        call = {"input_ids": torch.ones(2, 7, dtype=torch.int64), argument: torch.ones(2, 7)}
        with pytest.raises(SourceError, match=f"has {argument}: leave it out; "):
            shardconv.plan(config, 2, example_inputs=call)

    def test_ids_beyond_the_vocabulary(self) -> None:
        config = transformers.AutoConfig.for_model(**LLAVA["text_config"])
        with pytest.raises(
            SourceError, match="input_ids 97 lies beyond the vocabulary of 97 rows; correct the"
        ):
            shardconv.plan(config, 2, example_inputs=lambda: {"input_ids": IDS_BEYOND}, check=True)

    def test_without_an_example(self, pilot: Path) -> None:
        with pytest.raises(SolveError, match="example_inputs="):
            shardconv.plan(pilot, 2, trust_remote_code=True)


LLAVA: dict[str, Any] = {
    "text_config": {
        "model_type": "llama",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 97,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "image_size": 28,
        "patch_size": 14,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    },
    "image_token_id": 3,
}
T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 1,
    "num_heads": 4,
    "vocab_size": 97,
    "decoder_start_token_id": 0,
}
IDS_BEYOND = torch.arange(85, 98).expand(2, -1)
GOOD = given(13, 3)


@pytest.mark.parametrize(
    ("example", "problem"),
    [
        (
            {**GOOD, "speed": torch.ones(3)},
            "PilotModel takes no argument 'speed'; it takes readings, gait_of",
        ),
        ({"readings": GOOD["readings"]}, "PilotModel also needs gait_of_step"),
        ({"mode": "fine"}, "has no tensor among its arguments: mode"),
        ({}, "has no tensor among its arguments: none"),
        (["readings"], "no such file|should give a dict"),
        ({**GOOD, "mode": object()}, "mode is a object"),
        ({**GOOD, "mode": "calm"}, "a call with the example inputs fails: .*no such mode"),
        ({**GOOD, "readings": GOOD["readings"][..., :3]}, "readings of another robot"),
        ({**GOOD, "readings": GOOD["readings"] / 0}, "readings has values that are not finite"),
        ({**GOOD, "readings": GOOD["readings"].to("meta")}, "readings should be a dense tensor with values"),
        ({**GOOD, "labels": GOOD["gait_of_step"]}, "takes no argument 'labels'"),
        ({**GOOD, "readings": GOOD["readings"].numpy()}, "readings is a ndarray"),
        (lambda config: 1 / 0, "fails .ZeroDivisionError"),
        (lambda config: [1], "should give a dict"),
        ("call.txt", "no such file"),
    ],
)
def test_a_bad_example_is_refused(pilot: Path, tmp_path: Path, example: Any, problem: str) -> None:
    if isinstance(example, list):
        example = lambda config: ["readings"]  # noqa: E731
    with pytest.raises(ShardconvError, match=problem):
        shardconv.convert(pilot, tmp_path / "out", 2, trust_remote_code=True, example_inputs=example)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("call.py", "x = 1", "defines no function example_inputs"),
        ("call.py", "import nothing_of_the_sort", "cannot be run .ModuleNotFoundError"),
        ("call.json", "{}", "safetensors file, or from a Python file"),
    ],
)
def test_a_bad_file_is_refused(pilot: Path, tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SourceError, match=problem):
        shardconv.plan(pilot, 2, trust_remote_code=True, example_inputs=tmp_path / name)
