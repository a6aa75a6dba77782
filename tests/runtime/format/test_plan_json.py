"""Plans on disk: exact bytes, round trips, and a named field for everything that is wrong."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from boundaries import boundary
from hypothesis import given, settings
from hypothesis import strategies as st
from places import GOLDEN_PLAN, ROOT
from shardconv_runtime.errors import PlanError, ShardconvError
from shardconv_runtime.files.manifest import Manifest
from shardconv_runtime.format import plan_json
from shardconv_runtime.format.dims import Dim, parse
from shardconv_runtime.format.plan import (
    AttributeOverride,
    CodeInfo,
    HookPlan,
    HookPort,
    LogitsInfo,
    ModelInfo,
    ModulePlan,
    NormInfo,
    ParameterPlan,
    Plan,
    TrainingPlan,
    global_shape,
    local_shape,
    module_plans,
    parameter_plans,
)

GOLDEN = GOLDEN_PLAN
DOCUMENT = ROOT / "docs" / "plan-format.md"

PLAN = Plan(
    tp=4,
    mesh=(2, 2),
    model=ModelInfo("package.modeling:ModelForCausalLM", "bfloat16", 123456),
    code=CodeInfo("2.13.0", "5.23.0", ("package.cache", "package.modeling"), "0" * 64),
    parameters=(
        ParameterPlan(("embed.weight",), (parse("50257@0.1"), parse("768")), "bfloat16"),
        ParameterPlan(
            ("layers.{0..3}.attn.qkv.weight",),
            (parse("8@0.1*64 + 2@0*64 + 2@0*64"), parse("768")),
            "bfloat16",
        ),
        ParameterPlan(("layers.{0..3}.attn.out.weight",), (parse("768"), parse("8@0.1*64")), "bfloat16"),
        ParameterPlan(("layers.{0..3}.attn.out.bias",), (parse("768"),), "bfloat16", partial=(0, 1)),
        ParameterPlan(("layers.{0..3}.attn.norm.weight",), (parse("9@0.1*64"),), "float32"),
        ParameterPlan(("norm.weight",), (parse("768"),), "bfloat16", reason="all of it is needed"),
    ),
    modules=(
        ModulePlan(
            ("",),
            "boundary",
            overrides=(AttributeOverride("config.vocab_size", 50257, (12565, 12564, 12564, 12564)),),
        ),
        ModulePlan(
            ("embed",),
            "vocab",
            inputs=(boundary("input.0", "local_rows", layout=parse("50257@0.1"), per_token=1),),
            outputs=(
                boundary("output", "zero_out_of_shard", per_token=768),
                boundary("output", "all_reduce", axes=(0, 1), per_token=768),
            ),
        ),
        ModulePlan(
            ("layers.{0..3}.attn",),
            "boundary",
            overrides=(AttributeOverride("num_heads", 8, (2,)), AttributeOverride("sizes.0", 512, (128,))),
        ),
        ModulePlan(("layers.{0..3}.attn.qkv",), "column"),
        ModulePlan(
            ("layers.{0..3}.attn.out",),
            "row",
            outputs=(boundary("output", "all_reduce", axes=(0, 1), per_token=768),),
        ),
        ModulePlan(
            ("layers.{0..3}.attn.norm",),
            "norm",
            norm=NormInfo("rms", 1e-6, 576, (0, 1), weight="weight", weight_offset=1.0),
        ),
        ModulePlan(
            ("lm_head",),
            "column",
            outputs=(boundary("output", "all_gather", dim=-1, layout=parse("50257@0.1"), per_token=50257),),
        ),
    ),
    tied=(("lm_head.weight", "embed.weight"),),
    logits=LogitsInfo("lm_head", "output"),
    hooks=(
        HookPlan(
            ("layers.{0..3}.attn",),
            (HookPort("input.x", (0,), partial_axes=(1,)),),
            (HookPort("output.0", sequence_axes=(0, 1)),),
        ),
    ),
    notes=("the cache is opaque", "größe"),
)


def golden() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(GOLDEN.read_text("utf-8"))
    return loaded


def test_golden_file_is_what_is_written(tmp_path: Path) -> None:
    assert plan_json.dumps(PLAN) == GOLDEN.read_text("utf-8")
    digest = plan_json.write(PLAN, tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_bytes() == GOLDEN.read_bytes()
    assert digest == plan_json.sha256(GOLDEN.read_text("utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_golden_file_is_read() -> None:
    assert plan_json.read(GOLDEN) == PLAN


def test_smallest_plan() -> None:
    plan = replace(PLAN, tp=1, mesh=(), parameters=(), modules=(), tied=(), logits=None, hooks=(), notes=())
    text = plan_json.dumps(plan)
    assert plan_json.loads(text) == plan
    assert list(json.loads(text)) == [
        "format",
        "version",
        "tp",
        "mesh",
        "model",
        "code",
        "parameters",
        "modules",
    ]


def test_a_parameter_without_elements() -> None:
    empty = ParameterPlan(("extra.weight",), (parse("0"), parse("50257@0.1")), "bfloat16")
    text = plan_json.dumps(replace(PLAN, parameters=(*PLAN.parameters, empty)))
    assert '"0"' in text
    read = plan_json.loads(text).parameters[-1]
    assert (global_shape(read), local_shape(read, PLAN.mesh, 1)) == ((0, 50257), (0, 12564))


def test_only_a_plan_without_training_says_why() -> None:
    reason = replace(PLAN, training=None, inference_only="its norm has no gradient")
    assert plan_json.loads(plan_json.dumps(reason)) == reason
    with pytest.raises(ShardconvError, match=r"^inference_only: must be empty, since the plan"):
        replace(reason, training=TrainingPlan())


def test_example_in_the_documentation_is_a_plan() -> None:
    blocks = re.findall(r"```json plan\n(.*?)```", DOCUMENT.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 1
    assert plan_json.dumps(plan_json.loads(blocks[0])) == blocks[0]


def test_lookups() -> None:
    parameters, modules = parameter_plans(PLAN), module_plans(PLAN)
    assert len(parameters) == 2 + 4 * 4
    assert list(parameters)[:3] == ["embed.weight", "layers.0.attn.qkv.weight", "layers.1.attn.qkv.weight"]
    assert modules["layers.2.attn"].overrides[0].local == (2,)
    assert modules[""].category == "boundary"
    fused = parameters["layers.3.attn.qkv.weight"]
    assert global_shape(fused) == (768, 768)
    assert [local_shape(fused, PLAN.mesh, rank) for rank in range(4)] == [(256, 768)] * 4
    uneven = parameters["layers.3.attn.norm.weight"]
    assert [local_shape(uneven, PLAN.mesh, rank) for rank in range(4)] == [(192,), (128,), (128,), (128,)]


def edit_golden(path: str, value: Any) -> str:
    """The golden plan with the value at ``path`` replaced (removed where the value is ...)."""
    document = golden()
    at: Any = document
    *way, last = [int(step) if step.isdigit() else step for step in path.split("/")]
    for step in way:
        at = at[step]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            "modules/2/overrides/0/local",
            "8",
            r'^modules\[2\]\.overrides\[0\]\.local: expected a list, got "8"',
        ),
        (
            "modules/2/overrides/0/local/0",
            "8",
            r'^modules\[2\]\.overrides\[0\]\.local\[0\]: expected an int, got "8"',
        ),
        ("modules/2/overrides/0/local/0", True, "expected an int, got true"),
        ("modules/2/overrides/0/local/0", 2.0, r"expected an int, got 2\.0"),
        ("modules/2/overrides/0/local/0", 0, "1 or more"),
        ("modules/2/overrides/0/local/0", -2, "1 or more"),
        ("modules/2/overrides/0/local/0", 2**63, "too large"),
        ("modules/2/overrides/0/local", [2, 2], r"local: expected 1 value or 4 \(one for each rank\), got 2"),
        ("modules/2/overrides/0/value", 0, "1 or more"),
        ("modules/2/overrides/0/attribute", "__class__", "not the path of an attribute"),
        ("modules/2/overrides/0/attribute", "config.__dict__.x", "not the path of an attribute"),
        ("modules/2/overrides/0/attribute", "a b", "not the path of an attribute"),
        ("modules/2/overrides/0/attribute", "a..b", "not the path of an attribute"),
        ("modules/2/overrides/0/attribute", "0.a", "not the path of an attribute"),
        ("modules/2/overrides/0/attribute", "", "not the path of an attribute"),
        ("modules/2/overrides/1/attribute", "num_heads", "'num_heads' is overridden twice"),
        ("format", "other", "another kind of file"),
        ("format", ..., "another kind of file"),
        ("version", 5, "reads version 6, the file has 5; convert the model again"),
        ("version", "1", "reads version 6"),
        ("version", True, "reads version 6"),
        ("version", ..., "reads version 6"),
        ("tp", ..., '^the key "tp" is missing'),
        ("tp", 0, "^tp: must be 1 or more"),
        ("tp", 8, r"^mesh: the product of \[2, 2\] must be tp = 8"),
        ("mesh", [-2, -2], "^mesh: the product"),
        ("mesh", [4.0], r"^mesh\[0\]: expected an int"),
        ("extra", 1, '^unknown key "extra"; known are tp'),
        ("modules/0/extra", 1, r'^modules\[0\]: unknown key "extra"'),
        ("modules/0", [], r"^modules\[0\]: expected an object, got a list"),
        ("modules", {}, "^modules: expected a list, got an object"),
        ("modules/0/names", ..., r'^modules\[0\]: the key "names" is missing'),
        ("modules/0/names", [], r"^modules\[0\]\.names: a module entry needs a name"),
        ("modules/0/category", "magic", r"^modules\[0\]\.category: expected one of column, row"),
        (
            "modules/0/flags",
            ["lenient"],
            r'^modules\[0\]\.flags: a module of the category "boundary"',
        ),
        (
            "modules/3/names/0",
            "layers.1.attn.out",
            r"^modules\[4\]\.names: .* claimed by modules\[3\] already",
        ),
        ("modules/1/inputs/0/op", "teleport", r"^modules\[1\]\.inputs\[0\]\.op: expected one of all_reduce"),
        ("modules/1/inputs/0/layout", ..., r'inputs\[0\]: the key "layout" is missing'),
        ("modules/1/inputs/0/layout", "50257", "must be sharded over a mesh axis"),
        ("modules/1/inputs/0/layout", "50257@2", "outside of the mesh"),
        ("modules/1/inputs/0/layout", "x", "not a dim: 'x'"),
        ("modules/1/inputs/0/layout", 50257, "expected a string, got 50257"),
        ("modules/1/inputs/0/dim", 0, r'inputs\[0\]: unknown key "dim"; known are port, layout, per_token'),
        ("modules/1/inputs", ..., "zero_out_of_shard needs a local_rows"),
        (
            "modules/1/inputs/0",
            {"port": "input.0", "op": "zero_out_of_shard"},
            "needs a local_rows before it",
        ),
        (
            "modules/1/outputs/0",
            {"port": "output", "op": "local_rows", "layout": "101@0"},
            "local_rows is for an input only",
        ),
        ("modules/1/outputs/1/axes", ..., r'outputs\[1\]: the key "axes" is missing'),
        ("modules/1/outputs/1/axes", [0, 0], "named twice"),
        ("modules/1/outputs/1/axes", [7], "outside of the mesh"),
        ("modules/1/outputs/1/axes", [], r"outputs\[1\]\.axes: all_reduce needs a mesh axis"),
        ("modules/1/outputs/1/grad_axes", [9], "outside of the mesh"),
        ("modules/1/outputs/1/op", ..., r'outputs\[1\]: the key "op" is missing'),
        ("modules/1/outputs/1", "all_reduce", "expected an object"),
        ("modules/1/outputs/0/axes", [0], r'outputs\[0\]: unknown key "axes"'),
        ("modules/1/outputs/0/per_token", -1, "per_token: must not be negative"),
        ("modules/6/outputs/0/dim", ..., r'outputs\[0\]: the key "dim" is missing'),
        ("modules/6/outputs/0/dim", 99, "not a tensor dim"),
        ("modules/1/inputs/0/port", "input", "not a port of an input"),
        ("modules/1/inputs/0/port", "output", "not a port of an input"),
        ("modules/1/outputs/0/port", "output.", "not a port of an output"),
        ("modules/1/outputs/0/port", "output.__class__", "not a port of an output"),
        ("modules/1/outputs/0/port", "outputs", "not a port of an output"),
        ("modules/5/norm", ..., r'^modules\[5\]: the key "norm" is missing'),
        ("modules/5/norm/kind", "batch", "expected one of rms, layer, l2"),
        ("modules/5/norm/eps", -1.0, "eps: must not be negative"),
        ("modules/5/norm/eps", "1e-6", "expected a number"),
        ("modules/5/norm/size", 0, "size: must be 1 or more"),
        ("modules/5/norm/groups", [0], "groups: needs a number of 1 or more"),
        ("modules/5/norm/gate", "gate", "gate: needs an input"),
        ("modules/5/norm/weight", "a/b", "not the name of a parameter"),
        ("modules/5/norm/compute_dtype", "float", "compute_dtype: expected one of"),
        ("parameters/0/dtype", "torch.float32", r"^parameters\[0\]\.dtype: expected one of"),
        (
            "parameters/0/dims",
            ["8@0", "8@0"],
            r"^parameters\[0\]\.dims: mesh axis 0 shards more than one dim",
        ),
        ("parameters/0/dims/1", "0@0", "1 or more"),
        ("parameters/0/dims/1", "0*2", "1 or more"),
        ("parameters/0/dims/1", "4@0*4@0", "axis 0 shards two factors"),
        ("parameters/0/dims/1", "(" * 100 + "1" + ")" * 100, "nested deeper"),
        ("parameters/0/dims", ["1"] * 17, "more than 16 dims"),
        ("parameters/0/partial", [0], "also shards a dim"),
        ("parameters/3/partial", [2], "outside of the mesh"),
        ("parameters/0/names", [""], "a parameter needs a name"),
        ("parameters/0/names", ["../etc/passwd"], r"^parameters\[0\]\.names: malformed"),
        ("parameters/0/names", ["a\\b"], "malformed name pattern"),
        ("parameters/0/names", ["a", "{0..99999999}.b"], "more than 524287"),
        ("parameters/0/names", ["norm.weight"], r"^parameters\[5\]\.names: 'norm.weight' is claimed by"),
        ("parameters/0/names", ["norm.weight", "norm.weight"], r"claimed by parameters\[0\] already"),
        ("tied/0", ["a"], r"^tied\[0\]: expected a list of 2, got 1"),
        ("tied/0/1", "nowhere", "tied to 'nowhere', which is not a parameter"),
        ("tied/0/0", "norm.weight", "is a parameter or an alias already"),
        ("logits/module", "nowhere", "no module entry"),
        ("logits/port", "output.logits", "has no all_gather at 'output.logits'"),
        ("logits/module", "embed", "'embed' has no all_gather at 'output'"),
        ("logits/port", "logits", "not a port of an output"),
        ("notes/0", "\ud800", "not valid Unicode"),
        ("model/class_name", "package.Model", 'expected "module:Class"'),
        ("model/class_name", "../x:Model", 'expected "module:Class"'),
        ("model/dtype", "half", "model.dtype: expected one of"),
        ("model/num_parameters", -1, "must not be negative"),
        ("model/trust_remote_code", "yes", "expected true or false"),
        ("code/fingerprint", "abc", "64 hex digits"),
        ("code/sources", ["b", "a"], "must be sorted"),
        ("code/sources", ["a/b"], "not the name of a module"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_json.loads(edit_golden(path, value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "expected a JSON object, got a list"),
        ("3", "expected a JSON object"),
        ('{"tp": NaN}', "NaN is not a JSON number"),
        ('{"tp": -Infinity}', "-Infinity is not a JSON number"),
        ('{"tp": 1, "tp": 2}', 'the key "tp" is twice in one object'),
        ("[" * 200_000, "nested too deeply"),
        ('{"tp":' * 200_000, "nested too deeply"),
        ('{"tp": ' + "9" * 5000 + "}", "not JSON"),
        ("\ufeff{}", "not JSON"),
    ],
)
def test_what_is_no_document(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_json.loads(text)


def test_floats_are_finite() -> None:
    text = GOLDEN.read_text("utf-8").replace("1e-06", "1e999")
    with pytest.raises(PlanError, match=r"norm\.eps: expected a number, got Infinity"):
        plan_json.loads(text)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with pytest.raises(PlanError, match=r"plan\.json: cannot be read \(No such file"):
        plan_json.read(path)
    path.write_bytes(b'{"format": "\xff"}')
    with pytest.raises(PlanError, match=r"plan\.json: not UTF-8 \(byte 12\)"):
        plan_json.read(path)
    path.write_text("{}")
    with pytest.raises(PlanError, match=r"plan\.json: format: expected"):
        plan_json.read(path)


def test_a_plan_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    broken = replace(PLAN, tied=(("head.weight", "nowhere"),))
    with pytest.raises(PlanError, match="which is not a parameter"):
        plan_json.write(broken, path)
    nan = replace(PLAN.modules[5], norm=NormInfo("rms", float("nan"), 576, (0, 1)))
    with pytest.raises(PlanError, match="a value that JSON cannot hold"):
        plan_json.write(replace(PLAN, modules=(nan,)), path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        plan_json.write(PLAN, path)
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("plan.json", "old")]


def _setters(at: Any) -> list[Callable[[Any], None]]:
    """A setter for each value inside of a JSON document."""
    setters: list[Callable[[Any], None]] = []
    keys = list(at) if isinstance(at, dict) else range(len(at)) if isinstance(at, list) else []
    for key in keys:
        setters.append(lambda value, key=key: at.__setitem__(key, value))
        setters.extend(_setters(at[key]))
    return setters


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=5))
    | st.sampled_from(["8@0", "4", "", "output", "all_gather", "row", "{0..9}", 2**70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_junk_anywhere_is_a_plan_error_or_a_plan(data: st.DataObject) -> None:
    document = copy.deepcopy(golden())
    data.draw(st.sampled_from(_setters(document)))(data.draw(junk))
    try:
        plan = plan_json.loads(json.dumps(document))
    except PlanError:
        return
    assert plan_json.loads(plan_json.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("field", "layout"),
    [("parameters/0/dims/0", "?*8@0"), ("modules/1/inputs/0/layout", "?*101@0")],
    ids=["parameter", "table"],
)
def test_open_factors_are_for_activations_alone(field: str, layout: str) -> None:
    with pytest.raises(PlanError, match=re.escape("?")):
        plan_json.loads(edit_golden(field, layout))


def values_in(kind: Any) -> set[type]:
    """The dataclasses of a document, without those of dims, which are written as text."""
    todo, classes = [kind], set[type]()
    while todo:
        each = todo.pop()
        if is_dataclass(each) and each not in classes and each not in get_args(Dim):
            classes.add(each)
            todo += get_type_hints(each).values()
        todo += get_args(each)
    return classes


def test_the_page_of_the_format_has_every_field() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    names = set(re.findall(r'[`"](\w+)[`"]', text))
    classes = values_in(Plan) | values_in(Manifest)
    assert {ParameterPlan, NormInfo, TrainingPlan} < classes
    lacking = [f"{each.__name__}.{f.name}" for each in classes for f in fields(each) if f.name not in names]
    assert not lacking
