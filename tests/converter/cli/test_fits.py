"""What fits on a device, and the fewest ranks on which a model does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from click.testing import CliRunner, Result
from shardconv_runtime.checkpoint.resolve import ModelSpec
from shardconv_runtime.errors import ShardconvError, SolveError
from shardconv_runtime.format.measured import CacheTerm, LiveBytes, MemoryPlan
from shardconv_runtime.format.plan import Plan
from small_models import hand_plan, small_config

from shardconv import cli
from shardconv.arguments import SolveOptions
from shardconv.fitting import MAX_TP, require_fit, smallest_tp, table
from shardconv.passes import solve_plan
from shardconv.reporting.plan_lines import (
    Workload,
    cached_tokens,
    needs,
    parts,
    sequences,
    tightest,
    weight_bytes,
)
from shardconv.reporting.report import report
from shardconv.reporting.summary import human_bytes

pytestmark = pytest.mark.usefixtures("measured")

MEMORY = MemoryPlan(prefill=(LiveBytes((0, 300, 0)),), cache=(CacheTerm(100),), buffer_bytes=16)


def plan_of(tp: int) -> Plan:
    """A plan whose cache shrinks with the number of ranks."""
    memory = replace(MEMORY, cache=(CacheTerm(128 // tp),))
    return replace(hand_plan(small_config(), tp), memory=memory)


def test_what_fits_beside_the_weights() -> None:
    plan = replace(plan_of(2), memory=MEMORY)
    weights = weight_bytes(plan)
    load = Workload(weights + 100_000, reserve_bytes=10_000, context=50, batch=2)
    assert cached_tokens(plan, MEMORY, load) == 900
    assert sequences(plan, MEMORY, load) == (90_000 - 50 * 300) // 5_000
    assert needs(plan, MEMORY, 2, 50).total == weights + 2 * 50 * (100 + 300)
    text = report(plan, load=load)
    for expected in (
        "cache          100 B per token",
        "prefill        614.4 kB for a prompt of 2,048 tokens",
        "cache          900 tokens of one sequence fit in addition to the weights",
        "context        2 sequences of 50 tokens fit; 50.0 kB left",
        "10.0 kB of cache, 30.0 kB of activations",
        "batch          15 sequences of 50 tokens fit, if prompts are processed one at a time",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 100


def test_windows_and_states() -> None:
    """A cache that stops growing holds any number of tokens."""
    memory = MemoryPlan(prefill=(), cache=(CacheTerm(10, window=8),), sequence_bytes=20)
    plan = replace(plan_of(1), memory=memory)
    load = Workload(weight_bytes(plan) + 100, 0)
    assert cached_tokens(plan, memory, load) == 2**40
    assert "more than 1,099,511,627,776 tokens of one sequence" in report(plan, load=load)
    assert cached_tokens(plan, memory, replace(load, device_bytes=load.device_bytes - 50)) == 3


def test_weights_that_do_not_fit() -> None:
    plan = plan_of(2)
    text = report(plan, load=Workload(weight_bytes(plan), 1000))
    assert "weights        do not fit; 1.0 kB too large" in text


def test_the_fewest_ranks() -> None:
    solved: list[int] = []

    def solve(tp: int) -> Plan:
        solved.append(tp)
        return plan_of(tp)

    load = Workload(weight_bytes(plan_of(2)) + 70 * 100, 0, context=10)
    choice = smallest_tp(solve, load)
    assert choice.chosen.tp == 2
    assert [candidate.tp for candidate in choice.candidates] == [1, 2, 4]
    assert sorted(solved) == [1, 2, 4]
    head, *rows = table(choice)
    assert [row[0] for row in rows] == ["1", "*2", "4"]
    assert all(len(row) == len(head) for row in rows)


def test_candidates_without_a_plan_are_passed_over() -> None:
    def solve(tp: int) -> Plan:
        if tp == 2:
            raise SolveError("two will not do")
        return plan_of(tp)

    choice = smallest_tp(solve, Workload(weight_bytes(plan_of(1)), 0, context=1))
    assert choice.chosen.tp == 4
    assert [candidate.problem for candidate in choice.candidates] == ["two will not do", "", ""]


def test_nothing_fits() -> None:
    with pytest.raises(ShardconvError, match=f"no tp up to {MAX_TP} fits: at tp {MAX_TP} a rank needs"):
        smallest_tp(plan_of, Workload(2000, 1000))
    with pytest.raises(ShardconvError, match=f"no tp can be chosen: at tp {MAX_TP} its cache and act"):
        smallest_tp(lambda tp: hand_plan(small_config(), tp), Workload(10**9, 0))


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.cli, ["plan", *arguments], prog_name="shardconv")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "auto"], "--tp auto needs --device-memory"),
        (["--tp", "2", "--context", "8"], "--context needs --device-memory"),
        (["--tp", "2", "--device-memory", "80GB", "--batch", "2"], "--batch needs --context"),
        (["--tp", "2", "--device-memory", "80XB"], "'80XB' is not a size; write it as 5GB or 500MB"),
        (["--tp", "2", "--device-memory", "1GB"], "leaves nothing of --device-memory 1,000,000,000 bytes"),
        (["--tp", "some", "--device-memory", "80GB"], "'some' is not a valid integer"),
        (["--tp", "4", "--on", "2xH100"], "2xH100 has 2 devices for 4 ranks; name more hosts"),
        (["--tp", "2", "--hardware", __file__], "--hardware is for --on"),
        (["--tp", "2", "--on", "2xH100", "--quantize", "fp8"], "--on predicts no times of packed weights"),
        (["--tp", "auto", "--on", "2xH100", "--stages", "0-1"], "leave it out with --tp auto --on"),
        (["--tp", "2", "--on", "2xCPU", "--hardware", __file__], "is no file of devices: not JSON"),
        (["--tp", "0"], "tp must be a whole number from 1 to 4,096, got 0"),
    ],
)
def test_options_that_cannot_be(options: list[str], message: str) -> None:
    result = run("a-model", *options)
    assert result.exit_code != 0
    assert message in result.output + str(result.exception)


def test_auto_names_the_smallest(tmp_path: Path) -> None:
    config = small_config(architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    size = weight_bytes(hand_plan(config, 2)) + 3000
    result = run(
        str(tmp_path), "--tp", "auto", "--device-memory", str(size), "--reserve", "1B", "--context", "4"
    )
    assert result.exit_code == 0, result.output
    found = re.search(r"CHOICE  tp (\d+) is the smallest power of two that fits", result.output)
    assert found is not None
    assert f" tp {found[1]}, mesh" in result.output
    assert int(found[1]) > 1
    assert "tokens fits; " in result.output


def test_a_model_that_does_not_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The report comes first; lengths beyond the positions of the model are remarked."""
    config = small_config(architectures=["LlamaForCausalLM"], num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    size = weight_bytes(hand_plan(config, 2))
    context = config.max_position_embeddings + 1
    arguments = ["plan", str(tmp_path), "--tp", "2", "--reserve", "1B", "--context", str(context), "--json"]
    code = cli.run([*arguments, "--device-memory", str(size + 100)])
    out, err = capsys.readouterr()
    assert code == 5
    assert json.loads(out)["workload"]["fits"] is False
    error, remark = err.splitlines()[-1], err.splitlines()[-2]
    assert error.startswith(
        f"error: the model does not fit at tp 2: a rank needs {human_bytes(size)} of weights, "
    )
    assert remark.startswith(f"remark: --context {context:,} is more than the {context - 1:,} positions")
    assert cli.run([*arguments, "--device-memory", "1GB"]) == 0


def test_weights_that_do_not_fit_are_refused_if_no_more_is_known() -> None:
    plan = hand_plan(small_config(), 2)
    assert plan.memory is None
    require_fit(plan, Workload(weight_bytes(plan), 0))
    with pytest.raises(ShardconvError, match=r"does not fit at tp 2: a rank needs .* of weights, but has"):
        require_fit(plan, Workload(weight_bytes(plan) - 1, 0))


def test_what_fits_on_stages() -> None:
    """The stage with the least free memory is shown; stages that need the same are shown once."""
    model = ModelSpec(
        "small", small_config(num_hidden_layers=6), transformers.LlamaForCausalLM, dtype="float32"
    )
    plan = solve_plan(model, SolveOptions(1, pp=3, check=False, measure=True))
    assert plan.stages is not None
    first, middle, last = (part.memory for part in parts(plan))
    assert first is not None
    assert middle is not None
    assert last is not None
    assert first.cache == middle.cache == last.cache
    sizes = [weight_bytes(part) for part in parts(plan)]
    load = Workload(max(sizes) + 100_000, 0, context=10)
    text = report(plan, load=load)
    assert text.count("MEMORY  per rank of stage") == 3
    worst = parts(plan).index(tightest(plan, load))
    assert f"stage          {worst} has the least free memory" in text
    assert "do not fit" in report(plan, load=Workload(min(sizes), 0))
    choice = smallest_tp(lambda tp: plan, load)
    assert choice.chosen.tp == 1
    assert choice.chosen.needs is not None
    assert choice.chosen.needs.weights == sizes[worst]
