"""Each parallel module against the unsharded module that it replaces, in float64."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from boundaries import boundary
from distributed import comm_counts, run_processes
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.errors import PlanError
from shardconv_runtime.format.dims import Dim, Leaf, parse
from shardconv_runtime.format.plan import (
    CodeInfo,
    ModelInfo,
    ModulePlan,
    NormInfo,
    ParameterPlan,
    Plan,
)
from shardconv_runtime.format.slices import Mesh, ranges
from shardconv_runtime.parallel.boundary import attach, forward_signature, replace_at
from shardconv_runtime.parallel.build import parallelize
from shardconv_runtime.parallel.layers import ColumnParallelLinear, RowParallelLinear
from shardconv_runtime.parallel.row_ids import RowIds
from shardconv_runtime.parallel.sharded_norms import ShardedNorm, sharded_class
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast
from warm_compiler import warm_up

from shardconv.simulation.rank_threads import run_ranks

MESHES: list[Mesh] = [(2,), (3,), (4,), (2, 2)]


def all_axes(mesh: Mesh) -> tuple[int, ...]:
    return tuple(range(len(mesh)))


def local(x: Tensor, dims: tuple[Dim, ...], mesh: Mesh, rank: int) -> Tensor:
    for dim, layout in enumerate(dims):
        held = [i for start, stop in ranges(layout, mesh, rank) for i in range(start, stop)]
        x = x.index_select(dim, torch.tensor(held, dtype=torch.int64))
    return x


def plan_of(mesh: Mesh, parameters: dict[str, ParameterPlan], modules: dict[str, ModulePlan]) -> Plan:
    return Plan(
        tp=torch.Size(mesh).numel(),
        mesh=mesh,
        model=ModelInfo("tests:Model", "float64", 0),
        code=CodeInfo("", "", (), "0" * 64),
        parameters=tuple(parameters.values()),
        modules=tuple(modules.values()),
    )


def shard(model: nn.Module, plan: Plan, comm: Communicator) -> nn.Module:
    """This rank's part of a model with real parameters."""
    values = {name: p.detach() for name, p in model.state_dict().items()}
    part = parallelize(copy.deepcopy(model), plan, comm)
    for entry in plan.parameters:
        for name in entry.names:
            value = local(values[name], entry.dims, plan.mesh, comm.rank)
            if entry.partial and comm.rank:
                value = torch.zeros_like(value)
            owner, _, attribute = name.rpartition(".")
            part.get_submodule(owner)._parameters[attribute] = nn.Parameter(value, requires_grad=False)
    return part


def replicated(*sizes: int) -> tuple[Dim, ...]:
    return tuple(Leaf(s) for s in sizes)


def parameter(name: str, *dims: Dim, partial: tuple[int, ...] = ()) -> ParameterPlan:
    return ParameterPlan((name,), dims, "float64", partial)


def check(
    model: nn.Module,
    mesh: Mesh,
    parameters: list[ParameterPlan],
    modules: list[ModulePlan],
    *inputs: Any,
    local_input: Callable[[Tensor, int], Tensor] | None = None,
    local_output: Callable[[Tensor, int], Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """Every rank's output equals the unsharded one (or its part of it), as do those of a deep copy."""
    plan = plan_of(mesh, {p.names[0]: p for p in parameters}, {m.names[0]: m for m in modules})

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        part = shard(model, plan, comm)
        args = [local_input(x, comm.rank) if local_input else x for x in inputs]
        return part(*args, **kwargs), copy.deepcopy(part)(*args, **kwargs)

    with torch.no_grad():
        expected = model(*inputs, **kwargs)
        for index, outputs in enumerate(run_ranks(mesh, rank)):
            want = local_output(expected, index) if local_output else expected
            for output in outputs:
                torch.testing.assert_close(output, want, rtol=1e-12, atol=1e-12)


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


def held(module: nn.Module) -> Holder:
    torch.manual_seed(0)
    module = module.double()
    with torch.no_grad():
        for p in module.parameters():
            p.normal_()
    return Holder(module)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


# --- linear layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_column_parallel(mesh: Mesh, gather: bool, bias: bool) -> None:
    layout = Leaf(10, all_axes(mesh))
    parameters = [parameter("inner.weight", layout, Leaf(6))] + [parameter("inner.bias", layout)] * bias
    outputs = (boundary("output", "all_gather", dim=-1, layout=layout),) if gather else ()
    check(
        held(nn.Linear(6, 10, bias)),
        mesh,
        parameters,
        [ModulePlan(("inner",), "column", outputs=outputs)],
        randn(2, 3, 6),
        local_output=None if gather else lambda y, rank: local(y, (*replicated(2, 3), layout), mesh, rank),
    )


@pytest.mark.parametrize("bias", ["none", "replicated", "partial"])
@pytest.mark.parametrize("input_is_parallel", [True, False])
@pytest.mark.parametrize("mesh", MESHES)
def test_row_parallel(mesh: Mesh, input_is_parallel: bool, bias: str) -> None:
    axes = all_axes(mesh)
    layout = Leaf(9, axes)
    cut = boundary("input.input", "slice", dim=-1, layout=layout)
    parameters = [parameter("inner.weight", Leaf(5), layout)]
    if bias != "none":
        parameters.append(parameter("inner.bias", Leaf(5), partial=axes if bias == "partial" else ()))
    check(
        held(nn.Linear(9, 5, bias != "none")),
        mesh,
        parameters,
        [
            ModulePlan(
                ("inner",),
                "row",
                inputs=() if input_is_parallel else (cut,),
                outputs=(boundary("output", "all_reduce", axes=axes),),
            )
        ],
        randn(2, 3, 9),
        local_input=(lambda x, rank: local(x, (*replicated(2, 3), layout), mesh, rank))
        if input_is_parallel
        else None,
    )


def test_a_linear_layer_may_be_sharded_on_both_dims() -> None:
    mesh, out, inner = (2, 2), parse("6@1"), parse("2@0*2")
    steps = (
        boundary("output", "all_reduce", axes=(0,)),
        boundary("output", "all_gather", dim=-1, layout=out),
    )
    check(
        held(nn.Linear(4, 6)),
        mesh,
        [parameter("inner.weight", out, inner), parameter("inner.bias", out)],
        [
            ModulePlan(
                ("inner",),
                "row",
                inputs=(boundary("input.input", "slice", dim=-1, layout=inner),),
                outputs=steps,
            )
        ],
        randn(3, 4),
    )


def test_a_bias_that_nothing_reduces_is_refused() -> None:
    plan = plan_of(
        (2,),
        {"w": parameter("inner.weight", Leaf(4), Leaf(4, (0,))), "b": parameter("inner.bias", Leaf(4))},
        {"m": ModulePlan(("inner",), "row")},
    )
    with pytest.raises(PlanError, match="inner: each rank would add the bias"):
        run_ranks((2,), lambda comm: parallelize(Holder(nn.Linear(4, 4)), plan, comm))


def test_layers_keep_names_and_say_local_sizes() -> None:
    column = ColumnParallelLinear(4, 3)
    assert (column.in_features, column.out_features) == (4, 3)
    assert list(column.state_dict()) == list(RowParallelLinear(4, 3).state_dict()) == ["weight", "bias"]
    assert isinstance(column, nn.Linear)


# --- embeddings


@pytest.mark.parametrize("padding_idx", [None, 0, 12])
@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ((2,), "13@0"),
        ((3,), "13@0"),
        ((4,), "13@0"),
        ((2, 2), "13@0.1"),
        ((2,), "7@0 + 6@0"),
        ((15,), "13@0"),
    ],
)
@pytest.mark.parametrize("exact", [True, False])
def test_vocab_parallel_embedding(mesh: Mesh, text: str, padding_idx: int | None, exact: bool) -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 3.0

    if not exact and mesh == (15,):
        pytest.skip("a rank without rows needs the runtime's own layer")
    layout = parse(text)
    kind = nn.Embedding if exact else Scaled
    check(
        held(kind(13, 4, padding_idx)),
        mesh,
        [parameter("inner.weight", layout, Leaf(4))],
        [
            ModulePlan(
                ("inner",),
                "vocab",
                inputs=(boundary("input.input", "local_rows", layout=layout),),
                outputs=(
                    boundary("output", "zero_out_of_shard"),
                    boundary("output", "all_reduce", axes=all_axes(mesh)),
                ),
            )
        ],
        torch.tensor([[0, 1, 12, 6], [7, 5, 11, 0]]),
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_row_ids(dtype: torch.dtype) -> None:
    layout = parse("3@0 + 4@0")

    def rank(comm: Communicator) -> tuple[list[int], list[bool], int | None]:
        rows = RowIds(comm, layout)
        ids, out_of_shard = rows(torch.arange(7, dtype=dtype))
        assert ids.dtype == dtype
        return ids.tolist(), out_of_shard.tolist(), rows.local(6)

    first, second = run_ranks((2,), rank)
    assert first == ([0, 1, 0, 2, 3, 0, 0], [False, False, True, False, False, True, True], None)
    assert second == ([0, 0, 0, 0, 0, 1, 2], [True, True, False, True, True, False, False], 2)


def test_an_embedding_sharded_by_columns_needs_no_ids() -> None:
    layout = Leaf(6, (0,))
    check(
        held(nn.Embedding(5, 6)),
        (2,),
        [parameter("inner.weight", Leaf(5), layout)],
        [
            ModulePlan(
                ("inner",), "boundary", outputs=(boundary("output", "all_gather", dim=-1, layout=layout),)
            )
        ],
        torch.arange(5),
    )


# --- boundaries of unknown modules


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None = None


Named = namedtuple("Named", ["x", "y"])


class Unknown(nn.Module):
    """Takes and returns tensors in all sorts of containers; expects the local part of ``h``."""

    def forward(
        self,
        h: Tensor,
        tables: Any = None,
        *,
        mask: Tensor | None = None,
        kind: str = "tuple",
        **more: Tensor,
    ) -> Any:
        out = h * 2
        if tables is not None:
            out = out + tables[0]
        if mask is not None:
            out = out * mask
        if "extra" in more:
            out = out + more["extra"]
        return {
            "tensor": out,
            "tuple": (out, None),
            "list": [h, out],
            "dict": {"a": h, "b": (out,)},
            "named": Named(h, out),
            "data": Pair(h, out),
            "model": CausalLMOutputWithPast(logits=out, past_key_values=None),
        }[kind]


PORTS = {
    "tensor": ("output", lambda o: o),
    "tuple": ("output.0", lambda o: o[0]),
    "list": ("output.1", lambda o: o[1]),
    "dict": ("output.b.0", lambda o: o["b"][0]),
    "named": ("output.y", lambda o: o.y),
    "data": ("output.second", lambda o: o.second),
    "model": ("output.logits", lambda o: o.logits),
}


def attached(kind: str, comm: Communicator) -> Unknown:
    layout = Leaf(5, (0,))
    ports = ("input.h", "input.tables.0", "input.mask", "input.extra")
    entry = ModulePlan(
        ("",),
        "boundary",
        inputs=tuple(boundary(port, "slice", dim=-1, layout=layout) for port in ports),
        outputs=(boundary(PORTS[kind][0], "all_gather", dim=-1, layout=layout),),
    )
    module = Unknown()
    attach(module, entry, comm, forward_signature(module))
    return module


@pytest.mark.parametrize("style", ["position", "keyword", "optional"])
@pytest.mark.parametrize("kind", list(PORTS))
def test_slots_reach_into_containers(kind: str, style: str) -> None:
    h, table, mask, extra = randn(4, 2, 5)
    args: tuple[Any, ...] = {"position": (h, [table, h]), "keyword": (), "optional": (h,)}[style]
    kwargs: dict[str, Any] = {
        "position": {"mask": mask},
        "keyword": {"tables": (table, h), "h": h, "extra": extra},
        "optional": {"mask": None},
    }[style]
    pick = PORTS[kind][1]
    expected = Unknown()(*args, **kwargs, kind=kind)

    def rank(comm: Communicator) -> Any:
        module = attached(kind, comm)
        assert torch.equal(Unknown()(h, kind="tensor"), h * 2), "other instances are as they were"
        return module(*args, **kwargs, kind=kind)

    for output in run_ranks((2,), rank):
        assert type(output) is type(expected)
        assert torch.equal(pick(output), pick(expected))
    if args and len(args) > 1:
        assert args[1][0] is table, "the caller's list is as it was"


def test_a_slot_that_is_not_there_is_an_error() -> None:
    with pytest.raises(PlanError, match=r"port output.logits: a tuple has no 'logits'"):
        replace_at((torch.zeros(1),), ("logits",), lambda x: x, "output.logits")
    with pytest.raises(PlanError, match="expected a tensor, got a str"):
        replace_at("text", (), lambda x: x, "output")
    assert replace_at((None,), ("0",), lambda x: x, "output.0") == (None,)
    entry = ModulePlan(("",), "boundary", inputs=(boundary("input.missing", "all_reduce", axes=(0,)),))
    module = nn.Linear(2, 2)
    with pytest.raises(PlanError, match=r"port input.missing: forward\(input.* has no parameter 'missing'"):
        run_ranks((2,), lambda comm: attach(module, entry, comm, forward_signature(module)))


def test_digits_are_positions() -> None:
    class Star(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[1]

    def rank(comm: Communicator) -> Tensor:
        module = Star()
        entry = ModulePlan(("",), "boundary", inputs=(boundary("input.1", "all_reduce", axes=(0,)),))
        attach(module, entry, comm, forward_signature(module))
        return module(torch.ones(1), torch.ones(1))

    assert [int(y) for y in run_ranks((3,), rank)] == [3, 3, 3]


# --- norms


class RMSNorm(nn.Module):
    """The usual RMS norm; its statistic in ``wide``."""

    def __init__(
        self, width: int, wide: torch.dtype | None = None, offset: float = 0.0, early: bool = False
    ) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.wide, self.offset, self.early = wide, offset, early

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(self.wide or hidden_states.dtype)
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        if self.early:
            return (y * (self.scale.to(y.dtype) + self.offset)).to(hidden_states.dtype)
        return y.to(hidden_states.dtype) * (self.scale + self.offset)


def rms_info(axes: tuple[int, ...], width: int, **changes: Any) -> NormInfo:
    return NormInfo("rms", 1e-6, width, axes, weight="scale", **{"compute_dtype": "input", **changes})


@pytest.mark.parametrize(("offset", "early"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("mesh", MESHES)
def test_rms_norm(mesh: Mesh, offset: float, early: bool) -> None:
    layout = Leaf(11, all_axes(mesh))
    info = rms_info(all_axes(mesh), 11, weight_offset=offset, weight_before_cast=early)
    take = lambda x, rank: local(x, (*replicated(2, 3), layout), mesh, rank)  # noqa: E731
    check(
        held(RMSNorm(11, offset=offset, early=early)),
        mesh,
        [parameter("inner.scale", layout)],
        [ModulePlan(("inner",), "norm", norm=info)],
        randn(2, 3, 11) * 3 + 1,
        local_input=take,
        local_output=take,
    )


@pytest.mark.parametrize("mean", [0.0, 1e5])
@pytest.mark.parametrize("mesh", MESHES)
def test_layer_norm_is_exact_even_where_the_mean_is_large(mesh: Mesh, mean: float) -> None:
    layout = Leaf(11, all_axes(mesh))
    info = NormInfo("layer", 1e-5, 11, all_axes(mesh), "weight", "bias", compute_dtype="input")
    x = randn(2, 3, 11) + mean
    centered = x - x.mean(-1, keepdim=True)
    take = lambda x, rank: local(x, (*replicated(2, 3), layout), mesh, rank)  # noqa: E731
    model = held(nn.LayerNorm(11))
    if mean:
        expected = model(centered).detach()
        plan = plan_of(
            mesh,
            {n: parameter(f"inner.{n}", layout) for n in ("weight", "bias")},
            {"m": ModulePlan(("inner",), "norm", norm=info)},
        )
        for rank, y in enumerate(run_ranks(mesh, lambda comm: shard(model, plan, comm)(take(x, comm.rank)))):
            torch.testing.assert_close(y, take(expected, rank), rtol=1e-9, atol=1e-9)
        return
    check(
        model,
        mesh,
        [parameter("inner.weight", layout), parameter("inner.bias", layout)],
        [ModulePlan(("inner",), "norm", norm=info)],
        x,
        local_input=take,
        local_output=take,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("early", [True, False])
def test_a_norm_keeps_the_dtypes_of_the_original(dtype: torch.dtype, early: bool) -> None:
    original = RMSNorm(8, torch.float32, early=early).to(dtype)
    x = randn(5, 8).to(dtype)

    def rank(comm: Communicator) -> Tensor:
        info = rms_info((0,), 8, compute_dtype="float32", weight_before_cast=early)
        norm = ShardedNorm(info, original, comm)
        norm.scale = nn.Parameter(original.scale[comm.rank * 4 : comm.rank * 4 + 4].detach())
        return norm(hidden_states=x[:, comm.rank * 4 : comm.rank * 4 + 4])

    with torch.no_grad():
        expected = original(x)
        y = torch.cat(run_ranks((2,), rank), -1)
    assert y.dtype == expected.dtype
    # float64 goes through float32 as it does in the original
    torch.testing.assert_close(y, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-6)


def test_low_precision_layer_norm_computes_in_float32_like_torch() -> None:
    original = nn.LayerNorm(8).to(torch.bfloat16)
    x = (randn(5, 8) + 30).to(torch.bfloat16)
    info = NormInfo("layer", 1e-5, 8, (), "weight", "bias", compute_dtype="input")
    norm = ShardedNorm(info, original, ProcessCommunicator(0, (1,), {}))
    # One step of bfloat16 apart at most; what is computed in bfloat16 is ten apart.
    torch.testing.assert_close(norm(x), original(x), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    "use",
    [
        lambda eps, x: x + eps,
        lambda eps, x: eps * 2,
        lambda eps, x: float(eps),
        lambda eps, x: eps == 1e-5,
        lambda eps, x: bool(eps),
        lambda eps, x: torch.add(x, eps),
        lambda eps, x: torch.nn.functional.layer_norm(x, (8,), eps=eps),
    ],
)
def test_code_that_computes_a_sharded_norm_by_itself_is_refused(use: Any) -> None:
    """It may hand what it reads to code that does nothing, as the fallback of a fused kernel."""
    norm = ShardedNorm(rms_info((0,), 8), RMSNorm(8), ProcessCommunicator(0, (1,), {}))
    for each in (norm.offset, copy.deepcopy(norm).offset):
        with pytest.raises(PlanError, match=r"offset of a norm .* was used from outside: code"):
            use(each, torch.ones(2, 8))
    with pytest.raises(AttributeError):
        norm.other  # noqa: B018


def test_a_sharded_norm_is_of_the_class_of_the_norm_that_it_replaces() -> None:
    """For example for optimizers that leave the weights of norms out of weight decay."""
    original = nn.LayerNorm(8)
    nn.init.normal_(original.weight)
    info = NormInfo("layer", 1e-5, 8, (), "weight", "bias", compute_dtype="input")
    norm = sharded_class(nn.LayerNorm)(info, original, ProcessCommunicator(0, (1,), {}))
    x = randn(3, 8).float()
    for each in (norm, copy.deepcopy(norm)):
        assert isinstance(each, nn.LayerNorm)
        torch.testing.assert_close(each(x), original(x))
    assert type(norm) is sharded_class(nn.LayerNorm)


def test_a_new_value_for_an_attribute_of_a_sharded_norm_is_refused() -> None:
    norm = ShardedNorm(rms_info((0,), 8), RMSNorm(8), ProcessCommunicator(0, (1,), {}))
    for each in (norm, copy.deepcopy(norm)):
        with pytest.raises(PlanError, match=r"offset of a norm .* was set to 2.0"):
            each.offset = 2.0
        each.label = "of a user"
        assert each.label == "of a user"


def test_a_norm_without_its_weight_is_refused() -> None:
    with pytest.raises(PlanError, match="has no parameter 'scale'"):
        ShardedNorm(rms_info((), 4), nn.LayerNorm(4), ProcessCommunicator(0, (1,), {}))


# --- gradients, compilation


def test_a_backward_is_refused_instead_of_wrong() -> None:
    def rank(comm: Communicator) -> None:
        layer = ColumnParallelLinear(4, 2)
        with torch.no_grad():
            layer(torch.zeros(1, 4, requires_grad=True))
        layer(torch.zeros(1, 4, requires_grad=True))

    with pytest.raises(PlanError, match="loaded for inference"):
        run_ranks((2,), rank)


class Block(nn.Module):
    """Embedding, column, norm over the sharded dim, row, and an unknown module with a gather."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6, padding_idx=3)
        self.up = nn.Linear(6, 8)
        self.norm = RMSNorm(8)
        self.down = nn.Linear(8, 6)
        self.last = Unknown()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.norm(self.up(x)))
        out: Tensor = self.last(h=x, tables=(x,), kind="model").logits
        return out


def block_plan() -> Plan:
    vocab, inner, wide = Leaf(12, (0,)), Leaf(8, (0,)), Leaf(6, (0,))
    reduce = boundary("output", "all_reduce", axes=(0,))
    parameters = [
        parameter("embed.weight", vocab, Leaf(6)),
        parameter("up.weight", inner, Leaf(6)),
        parameter("up.bias", inner),
        parameter("norm.scale", inner),
        parameter("down.weight", Leaf(6), inner),
        parameter("down.bias", Leaf(6)),
    ]
    modules = [
        ModulePlan(
            ("embed",),
            "vocab",
            inputs=(boundary("input.input", "local_rows", layout=vocab),),
            outputs=(boundary("output", "zero_out_of_shard"), reduce),
        ),
        ModulePlan(("up",), "column"),
        ModulePlan(("norm",), "norm", norm=rms_info((0,), 8)),
        ModulePlan(("down",), "row", outputs=(reduce,)),
        ModulePlan(
            ("last",),
            "boundary",
            inputs=tuple(boundary(s, "slice", dim=-1, layout=wide) for s in ("input.h", "input.tables.0")),
            outputs=(boundary("output.logits", "all_gather", dim=-1, layout=wide),),
        ),
    ]
    return plan_of((2,), {p.names[0]: p for p in parameters}, {m.names[0]: m for m in modules})


def compiled_block() -> tuple[bool, bool, dict[str, int]]:
    from torch.distributed.tensor.debug import CommDebugMode

    torch.manual_seed(0)
    model, ids = Block().double(), torch.tensor([[0, 3, 11, 5]])
    comm = ProcessCommunicator(torch.distributed.get_rank(), (2,), {(0,): torch.distributed.group.WORLD})
    part = shard(model, block_plan(), comm)
    with torch.no_grad():
        expected = model(ids)
        with CommDebugMode() as counter:
            eager = part(ids)
        compiled = torch.compile(part, fullgraph=True, backend="aot_eager")(ids)
    counts = comm_counts(counter)
    return torch.allclose(eager, expected, rtol=1e-12), torch.allclose(compiled, expected, rtol=1e-12), counts


def test_parallel_modules_compile_into_one_graph_over_gloo() -> None:
    warm_up()
    counts = {"all_reduce": 3, "all_gather_into_tensor": 1}
    assert run_processes(2, compiled_block, start_group=True) == [(True, True, counts)] * 2
