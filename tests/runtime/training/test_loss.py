"""The loss of sharded logits has the value and the gradient of that of the full logits."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from distributed import comm_counts, run_processes
from shardconv_runtime.comm.collectives import Communicator, ProcessCommunicator
from shardconv_runtime.errors import RefusedCallError, ShardconvError
from shardconv_runtime.format.dims import Dim, Leaf, parse, size
from shardconv_runtime.format.slices import Mesh, group_of, ranges
from shardconv_runtime.training.loss import LossInputError, VocabParallelCrossEntropy
from shardconv_runtime.training.loss_parallel import causal_lm_loss, masked_lm_loss, parallel_loss
from small_models import small_config
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.loss import loss_utils
from warm_compiler import warm_up

from shardconv.simulation.rank_threads import run_ranks

LAYOUTS = [
    ((1,), "11@0"),
    ((2,), "12@0"),
    ((2,), "11@0"),
    ((3,), "11@0"),
    ((4,), "13@0"),
    ((8,), "37@0"),
    ((4,), "3@0"),  # the last rank holds nothing
    ((2, 2), "13@0.1"),
    ((2, 2), "13@1.0"),
    ((2, 2), "13@1"),  # replicated over the first axis
    ((2,), "5@0*3"),
    ((3,), "3*4@0"),  # several ranges
    ((3,), "7@0 + 5@0 + 2@0"),
    ((2, 2), "2@0*4@1*2 + 3@0.1"),
    ((2,), "4 + 7@0"),  # both ranks hold the first four
    ((2, 2), "5@0 + 3@1*2 + 4 + 6@0.1"),  # each pair of ranks shares others
    ((2, 2), "9"),
]


def assert_close(got: Tensor, want: Tensor, rtol: float = 0.0, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got, want, rtol=rtol, atol=atol, equal_nan=True)


def columns(layout: Dim, comm: Communicator) -> list[int]:
    return [i for start, stop in ranges(layout, comm.mesh, comm.rank) for i in range(start, stop)]


def some_logits(*shape: int, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * scale).to(
        dtype
    )


def some_labels(vocab_size: int, *shape: int, ignored: float = 0.25) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(vocab_size, shape, generator=generator)
    return labels.masked_fill(torch.rand(shape, generator=generator) < ignored, -100)


def with_gradient(
    loss: Callable[[Tensor], Tensor], logits: Tensor, upstream: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The loss of these logits, and their gradient if that of the loss is ``upstream`` everywhere."""
    leaf = logits.clone().requires_grad_()
    value = loss(leaf)
    value.backward(torch.full_like(value, upstream))
    assert leaf.grad is not None
    return value.detach(), leaf.grad


def full_cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    value = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)
    return value.reshape(labels.shape) if options.get("reduction") == "none" else value


def check(
    mesh: Mesh,
    layout: Dim,
    logits: Tensor,
    labels: Tensor,
    upstream: float = 1.0,
    chunk_elements: int | None = None,
    tolerance: float = 1e-12,
    **options: Any,
) -> Tensor:
    """Compare every rank with the full logits; return the loss."""
    full, gradient = with_gradient(lambda x: full_cross_entropy(x, labels, **options), logits, upstream)

    def rank(comm: Communicator) -> tuple[Tensor, Tensor, list[int]]:
        held = columns(layout, comm)
        loss = VocabParallelCrossEntropy(comm, layout, chunk_elements=chunk_elements)
        return *with_gradient(lambda x: loss(x, labels, **options), logits[..., held], upstream), held

    results = run_ranks(mesh, rank)
    for value, local, held in results:
        assert_close(value, full, tolerance, tolerance)
        assert_close(local, gradient[..., held], tolerance, tolerance)
        assert value.shape == full.shape
        assert torch.equal(value.nan_to_num(), results[0][0].nan_to_num())  # the same bits
    return full


# --- the loss of the full logits


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize(("mesh", "text"), LAYOUTS)
def test_any_layout_gives_the_loss_of_the_full_logits(mesh: Mesh, text: str, label_smoothing: float) -> None:
    layout = parse(text)
    labels = some_labels(size(layout), 3, 5)
    assert (labels == -100).any()
    check(mesh, layout, some_logits(3, 5, size(layout)), labels, label_smoothing=label_smoothing)


@pytest.mark.parametrize("upstream", [1.0, -2.5])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options(reduction: str, label_smoothing: float, upstream: float) -> None:
    check(
        (3,), Leaf(11, (0,)), some_logits(2, 6, 11), some_labels(11, 2, 6), upstream,
        reduction=reduction, label_smoothing=label_smoothing,
    )  # fmt: skip


@pytest.mark.parametrize("ignore_index", [0, 4, -1, 10**6])
def test_any_id_can_be_the_ignored_one(ignore_index: int) -> None:
    labels = some_labels(11, 2, 6, ignored=0).index_fill(1, torch.tensor([1, 3]), ignore_index)
    check((2,), Leaf(11, (0,)), some_logits(2, 6, 11), labels, ignore_index=ignore_index)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_without_a_token_that_has_a_loss(
    shape: tuple[int, ...], reduction: str, label_smoothing: float
) -> None:
    labels = torch.full(shape, -100)
    full = check(
        (2,), Leaf(7, (0,)), some_logits(*shape, 7), labels, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip
    assert full.isnan().all() if reduction == "mean" else not full.any()


@pytest.mark.parametrize("chunk_elements", [1, 12, 18, 24, 1000])
def test_tokens_need_not_be_a_multiple_of_the_chunk(chunk_elements: int) -> None:
    logits, labels = some_logits(7, 12), some_labels(12, 7)
    check((2,), Leaf(12, (0,)), logits, labels, chunk_elements=chunk_elements, label_smoothing=0.1)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_each_token_has_its_own_incoming_gradient(reduction: str) -> None:
    logits, labels, layout = some_logits(4, 11), some_labels(11, 4, ignored=0), Leaf(11, (0,))
    factors = torch.tensor([1.0, 0.0, -3.0, 0.5], dtype=torch.float64)

    def weigh(losses: Tensor) -> Tensor:
        return (losses * factors).sum() ** 2

    full = with_gradient(lambda x: weigh(F.cross_entropy(x, labels, reduction=reduction)), logits)

    def rank(comm: Communicator) -> None:
        held, loss = columns(layout, comm), VocabParallelCrossEntropy(comm, layout)
        value, local = with_gradient(lambda x: weigh(loss(x, labels, reduction=reduction)), logits[:, held])
        assert_close(value, full[0], rtol=1e-14, atol=0)
        assert_close(local, full[1][:, held], rtol=1e-12, atol=1e-11)

    run_ranks((2,), rank)


@pytest.mark.parametrize("num_items", [5, torch.tensor(5), torch.tensor(5.0, dtype=torch.float64)])
def test_the_number_of_items_divides_the_sum(num_items: Tensor | int) -> None:
    logits, labels, layout = some_logits(2, 6, 11), some_labels(11, 2, 6), Leaf(11, (0,))
    full = with_gradient(lambda x: full_cross_entropy(x, labels, reduction="sum") / 5, logits)

    def rank(comm: Communicator) -> None:
        held, loss = columns(layout, comm), VocabParallelCrossEntropy(comm, layout)
        value, local = with_gradient(lambda x: loss(x, labels, num_items=num_items), logits[..., held])
        assert_close(value, full[0])
        assert_close(local, full[1][..., held])

    run_ranks((2,), rank)


def test_a_single_token_and_strided_logits() -> None:
    check((2,), Leaf(11, (0,)), some_logits(1, 11), some_labels(11, 1, ignored=0))
    logits, layout = some_logits(11, 5, 2), Leaf(11, (0,))
    full = F.cross_entropy(logits.permute(1, 2, 0).reshape(10, 11), torch.arange(10))

    def rank(comm: Communicator) -> tuple[Tensor, Tensor]:
        loss = VocabParallelCrossEntropy(comm, layout)
        local = logits[columns(layout, comm)].permute(1, 2, 0)
        return loss(local, torch.arange(10).reshape(5, 2)), loss(local[0, 0], torch.tensor(0))

    for value, of_one in run_ranks((2,), rank):
        assert_close(value, full)
        assert_close(of_one, F.cross_entropy(logits[:, 0, 0], torch.tensor(0)))


def test_other_integers_are_labels_too() -> None:
    logits, labels = some_logits(4, 11, dtype=torch.float32), torch.tensor([0, 3, 10, 7])

    def rank(comm: Communicator) -> set[float]:
        loss = VocabParallelCrossEntropy(comm, Leaf(11, (0,)))
        local = logits[:, columns(Leaf(11, (0,)), comm)]
        return {loss(local, labels.to(d)).item() for d in (torch.int64, torch.int32, torch.uint8)}

    assert len(set.union(*run_ranks((2,), rank))) == 1


def test_small_integers_reach_no_further_than_they_can() -> None:
    logits, labels = some_logits(2, 300), torch.tensor([3, 100])

    def rank(comm: Communicator) -> Tensor:
        loss = VocabParallelCrossEntropy(comm, Leaf(300, (0,)))
        return loss(logits, labels.to(torch.int8))

    assert_close(run_ranks((1,), rank)[0], F.cross_entropy(logits, labels))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Callable[[], Any]) -> None:
    logits, labels, layout = some_logits(4, 11).requires_grad_(), some_labels(11, 4), Leaf(11, (0,))

    def rank(comm: Communicator) -> Tensor:
        return VocabParallelCrossEntropy(comm, layout)(logits[:, columns(layout, comm)], labels)

    with mode():
        for value in run_ranks((2,), rank):
            assert not value.requires_grad
            assert_close(value, F.cross_entropy(logits, labels))


# --- precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_computed_with_in_float32(dtype: torch.dtype) -> None:
    logits, labels, layout = some_logits(6, 51, dtype=dtype), some_labels(51, 6), Leaf(51, (0,))
    full, gradient = with_gradient(lambda x: F.cross_entropy(x.float(), labels), logits)

    def rank(comm: Communicator) -> None:
        held, loss = columns(layout, comm), VocabParallelCrossEntropy(comm, layout)
        value, local = with_gradient(lambda x: loss(x, labels), logits[:, held])
        assert (value.dtype, local.dtype) == (torch.float32, dtype)
        assert_close(value, full, rtol=1e-6, atol=0)
        assert_close(local, gradient[:, held], rtol=torch.finfo(dtype).eps, atol=1e-7)

    run_ranks((2,), rank)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_large_logits(dtype: torch.dtype, label_smoothing: float) -> None:
    logits = (
        some_logits(8, 12, scale=1.0, dtype=dtype) + torch.tensor([1e4, -1e4], dtype=dtype).repeat(4)[:, None]
    )
    logits[0, :6] += 1e4  # ranks that are far apart
    full = check(
        (2,), Leaf(12, (0,)), logits, some_labels(12, 8, ignored=0), label_smoothing=label_smoothing,
        reduction="none", tolerance=20 * torch.finfo(dtype).eps,
    )  # fmt: skip
    assert full.isfinite().all()


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("where", [slice(0, 3), slice(0, 6), slice(6, 12), slice(0, 12)])
def test_logits_that_are_not_finite(value: float, where: slice, label_smoothing: float) -> None:
    logits = some_logits(3, 12)
    logits[1, where] = value
    for label in (0, 11):
        labels = torch.tensor([3, label, 8])
        check((2,), Leaf(12, (0,)), logits, labels, label_smoothing=label_smoothing, reduction="none")


def test_the_loss_cannot_be_differentiated_twice() -> None:
    def rank(comm: Communicator) -> None:
        logits = some_logits(2, 4).requires_grad_()
        loss = VocabParallelCrossEntropy(comm, Leaf(4, (0,)))(logits, torch.tensor([0, 1]))
        with pytest.raises(RefusedCallError, match="can be differentiated once: leave create_graph=True out"):
            torch.autograd.grad(loss, logits, create_graph=True)

    run_ranks((1,), rank)


# --- memory


class LargestFloat32(TorchDispatchMode):
    """The number of elements of the largest float32 tensor that an operator returned."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                self.elements = max(self.elements, x.numel())
        return out


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_no_float32_copy_of_the_logits_exists(label_smoothing: float) -> None:
    logits, labels, layout = some_logits(64, 200, dtype=torch.bfloat16), some_labels(200, 64), Leaf(200, (0,))
    chunk_elements = 1000

    def rank(comm: Communicator) -> tuple[int, set[torch.dtype]]:
        leaf = logits[:, columns(layout, comm)].clone().requires_grad_()
        loss = VocabParallelCrossEntropy(comm, layout, chunk_elements=chunk_elements)
        saved: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            saved.append(x)
            return x

        with LargestFloat32() as seen:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                value = loss(leaf, labels, label_smoothing=label_smoothing)
            value.backward()
        return seen.elements, {x.dtype for x in saved if x.numel() > 64}

    assert run_ranks((2,), rank) == [(chunk_elements, {torch.bfloat16})] * 2


def test_what_the_memory_test_sees() -> None:
    with LargestFloat32() as seen:
        F.cross_entropy(some_logits(64, 200, dtype=torch.bfloat16).float(), some_labels(200, 64))
    assert seen.elements == 64 * 200


# --- what is refused


@pytest.mark.parametrize("bad", [11, -1, 2**40])
def test_a_bad_label_is_an_error_on_every_rank_before_anything_is_communicated(bad: int) -> None:
    labels = some_labels(11, 2, 6)
    labels[1, 4] = bad

    def rank(comm: Communicator) -> str:
        loss = VocabParallelCrossEntropy(comm, Leaf(11, (0,)))
        with pytest.raises(ShardconvError) as caught:
            loss(some_logits(2, 6, loss.local_size), labels)
        return str(caught.value)  # a rank that had met the others would fail: this one has left

    for message in run_ranks((3,), rank):
        assert f"label {bad} at position (1, 4) of labels of shape (2, 6)" in message
        assert "vocabulary of 11 tokens" in message


@pytest.mark.parametrize("text", ["11@0", "7@0 + 4@0"])
@pytest.mark.parametrize("bad", [11, -7])
def test_a_bad_label_that_nobody_looks_for_makes_the_loss_infinite(text: str, bad: int) -> None:
    layout, labels = parse(text), torch.tensor([4, bad, 3])

    def rank(comm: Communicator) -> list[float]:
        held, loss = columns(layout, comm), VocabParallelCrossEntropy(comm, layout, check_labels=False)
        losses: list[float] = loss(some_logits(3, 11)[:, held], labels, reduction="none").tolist()
        return losses

    for losses in run_ranks((2,), rank):
        assert [math.isinf(x) for x in losses] == [False, True, False]


@pytest.mark.parametrize(
    ("logits", "labels", "options", "message"),
    [
        ((2, 11), (2,), {}, r"logits of shape \(2, 11\): their last dim should be .* of 11 columns, .* 11@0"),
        ((), (), {}, r"logits of shape \(\): their last dim"),
        ((2, 3, 0), (2, 2), {}, r"labels of shape \(2, 2\) .* logits of shape \(2, 3, .* should be \(2, 3\)"),
        ((2, 0), (2,), {"weight": torch.ones(11)}, "weights of classes are not implemented"),
        ((2, 0), (2,), {"reduction": "batchmean"}, "'mean', 'sum' or 'none', not 'batchmean'"),
        ((2, 0), (2,), {"label_smoothing": 1.5}, "from 0.0 to 1.0, not 1.5"),
        ((2, 0), (2,), {"reduction": "sum", "num_items": 3}, "reduction='sum' does not"),
    ],
)
def test_calls_that_do_not_fit(
    logits: tuple[int, ...], labels: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    def rank(comm: Communicator) -> None:
        loss = VocabParallelCrossEntropy(comm, Leaf(11, (0,)))
        shape = [n or loss.local_size for n in logits]
        with pytest.raises(LossInputError, match=message):
            loss(torch.zeros(shape), torch.zeros(labels, dtype=torch.int64), **options)

    run_ranks((2,), rank)


def test_dtypes_that_do_not_fit() -> None:
    def rank(comm: Communicator) -> None:
        loss = VocabParallelCrossEntropy(comm, Leaf(4, (0,)))
        for labels in (torch.zeros(2), torch.zeros(2, dtype=torch.bool)):
            with pytest.raises(LossInputError, match="labels must be token ids of an integer dtype"):
                loss(torch.zeros(2, 2), labels)
        with pytest.raises(LossInputError, match=r"floating point dtype, not torch\.int64"):
            loss(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))

    run_ranks((2,), rank)


# --- in the place of transformers' own

VOCAB = 11


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(causal_lm_loss, loss_utils.ForCausalLMLoss), (masked_lm_loss, loss_utils.ForMaskedLMLoss)],
)
@pytest.mark.parametrize(
    ("options", "flat"),
    [
        ({}, False),
        ({"num_items_in_batch": 7}, False),
        ({"num_items_in_batch": torch.tensor(7)}, False),
        ({"ignore_index": 3}, False),
        ({"reduction": "none", "label_smoothing": 0.5, "output_router_logits": True}, False),
        ({}, True),
    ],
)
def test_losses_of_transformers(ours: Any, theirs: Any, options: dict[str, Any], flat: bool) -> None:
    logits, layout = some_logits(2, 6, VOCAB, dtype=torch.bfloat16), Leaf(VOCAB, (0,))
    labels = some_labels(VOCAB, 2, 6, ignored=0 if "ignore_index" in options else 0.25)
    if flat:
        logits = logits.flatten(0, 1)[None]
    full, gradient = with_gradient(lambda x: theirs(x, labels, VOCAB, **options), logits)

    def rank(comm: Communicator) -> None:
        held, loss = columns(layout, comm), ours(VocabParallelCrossEntropy(comm, layout))
        value, local = with_gradient(
            lambda x: loss(logits=x, labels=labels, vocab_size=VOCAB, **options), logits[..., held]
        )
        assert value.dtype == full.dtype
        assert_close(value, full, rtol=1e-6, atol=0)
        assert_close(local, gradient[..., held], rtol=2**-7, atol=1e-6)

    run_ranks((3,), rank)
    same = [
        [(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()]
        for f in (ours(None), theirs)
    ]
    assert same[0] == same[1]


def test_labels_that_were_shifted_before() -> None:
    logits, shifted = some_logits(2, 6, VOCAB, dtype=torch.float32), some_labels(VOCAB, 2, 6)
    full = loss_utils.ForCausalLMLoss(logits, None, VOCAB, shift_labels=shifted)

    def rank(comm: Communicator) -> Tensor:
        layout = Leaf(VOCAB, (0,))
        loss = causal_lm_loss(VocabParallelCrossEntropy(comm, layout))
        local = logits[..., columns(layout, comm)]
        with pytest.raises(LossInputError, match="needs labels or shift_labels"):
            loss(local, None, VOCAB)
        return loss(local, None, VOCAB, shift_labels=shifted)

    for value in run_ranks((2,), rank):
        assert_close(value, full, rtol=1e-6, atol=0)


def test_the_first_label_of_a_row_predicts_nothing() -> None:
    labels = torch.tensor([[99, 1, 2], [-7, 3, 4]])

    def rank(comm: Communicator) -> Tensor:
        loss = causal_lm_loss(VocabParallelCrossEntropy(comm, Leaf(VOCAB, (0,))))
        return loss(some_logits(2, 3, VOCAB), labels, VOCAB)

    assert run_ranks((1,), rank)[0].isfinite()


def test_logits_of_several_vocabularies_are_refused() -> None:
    def rank(comm: Communicator) -> None:
        loss = masked_lm_loss(VocabParallelCrossEntropy(comm, Leaf(8, (0,))))
        with pytest.raises(
            LossInputError, match=r"labels of shape \(2, 3, 2\) do not fit logits of shape \(2, 3, 4\)"
        ):
            loss(some_logits(2, 3, 4), some_labels(4, 2, 3, 2), 4)

    run_ranks((2,), rank)


def test_some_models_pass_the_last_size_of_their_logits() -> None:
    logits, labels, layout = some_logits(2, 3, VOCAB), some_labels(VOCAB, 2, 3), Leaf(VOCAB, (0,))

    def rank(comm: Communicator) -> Tensor:
        local = logits[..., columns(layout, comm)]
        return causal_lm_loss(VocabParallelCrossEntropy(comm, layout))(local, labels, local.shape[-1])

    for value in run_ranks((2,), rank):
        assert_close(value, full_cross_entropy(logits[:, :-1], labels[:, 1:]))


def test_which_losses_have_a_parallel_form() -> None:
    def rank(comm: Communicator) -> dict[str, str]:
        loss = VocabParallelCrossEntropy(comm, Leaf(VOCAB, (0,)))
        kinds: list[str | None] = [*loss_utils.LOSS_MAPPING, None, "unheard of"]
        found = {str(kind): parallel_loss(kind, loss) for kind in kinds}
        return {kind: f.__qualname__.split(".")[0] for kind, f in found.items() if f is not None}

    (found,) = run_ranks((1,), rank)
    assert found.pop("ForMaskedLM") == "masked_lm_loss"
    assert set(found.values()) == {"causal_lm_loss"}
    assert {"ForCausalLM", "ForConditionalGeneration", "None", "unheard of"} <= set(found)
    assert not {"ForTokenClassification", "ForSequenceClassification", "ForCTC"} & set(found)


def test_a_model_calls_it_as_its_own() -> None:
    model = transformers.LlamaForCausalLM(small_config())
    ids = torch.randint(model.config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(0))

    def gradient() -> tuple[Tensor, Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids, num_items_in_batch=torch.tensor(12)).loss
        loss.backward()
        return loss.detach(), model.lm_head.weight.grad.clone()

    def rank(comm: Communicator) -> None:
        full = gradient()
        loss = VocabParallelCrossEntropy(comm, Leaf(model.config.vocab_size, (0,)))
        model.loss_function = parallel_loss(model.loss_type, loss)
        torch.testing.assert_close(gradient(), full, rtol=1e-5, atol=1e-8)

    run_ranks((1,), rank)


# --- processes, and compilers

OVER_PROCESSES = ("11@0", "7@0 + 3@0*2", "1@0")


def process_communicator() -> ProcessCommunicator:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    assert group_of((2,), (0,), rank) == (0, 1)
    return ProcessCommunicator(rank, (2,), {(0,): group})


def loss_in_a_process(text: str) -> tuple[Tensor, Tensor, Counter[str], Counter[str]]:
    comm, layout = process_communicator(), parse(text)
    loss = VocabParallelCrossEntropy(comm, layout, chunk_elements=20)
    logits = some_logits(4, 5, size(layout))[..., columns(layout, comm)].requires_grad_()
    with CommDebugMode() as forward:
        value = loss(logits, some_labels(size(layout), 4, 5), label_smoothing=0.1)
    with CommDebugMode() as backward:
        value.backward()
    assert logits.grad is not None
    return value.detach(), logits.grad, comm_counts(forward), comm_counts(backward)


@pytest.mark.parametrize("text", OVER_PROCESSES)
def test_one_collective_forward_and_none_backward(text: str) -> None:
    layout = parse(text)
    vocab_size = size(layout)
    labels = some_labels(vocab_size, 4, 5)
    full, gradient = with_gradient(
        lambda x: full_cross_entropy(x, labels, label_smoothing=0.1), some_logits(4, 5, vocab_size)
    )
    results = run_processes(2, loss_in_a_process, text, start_group=True)
    assert torch.equal(results[0][0], results[1][0])
    for rank, (value, local, forward, backward) in enumerate(results):
        held = [i for start, stop in ranges(layout, (2,), rank) for i in range(start, stop)]
        assert_close(value, full)
        assert_close(local, gradient[..., held])
        assert (forward, backward) == ({"all_gather_into_tensor": 1}, {})


def compiled_in_a_process(text: str) -> tuple[list[Tensor], list[Tensor]]:
    comm, layout = process_communicator(), parse(text)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    call = partial(two_losses, VocabParallelCrossEntropy(comm, layout))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for length in (5, 8):
        logits = some_logits(4, length, size(layout))[..., columns(layout, comm)]
        labels = some_labels(size(layout), 4, length)
        for results, function in zip(found, (compiled, call), strict=True):
            results.extend(with_gradient(partial(function, labels=labels), logits))
    return found


def two_losses(loss: VocabParallelCrossEntropy, logits: Tensor, labels: Tensor) -> Tensor:
    shifted = causal_lm_loss(loss)(logits, labels, loss.vocab_size, num_items_in_batch=torch.tensor(9))
    return shifted + loss(logits, labels, label_smoothing=0.1)


@pytest.mark.parametrize("text", ["7@0 + 3@0*2", pytest.param("1@0", marks=pytest.mark.slow)])
def test_the_loss_compiles_into_one_graph(text: str) -> None:
    warm_up()
    for compiled, plain in run_processes(2, compiled_in_a_process, text, start_group=True):
        assert len(compiled) == 4
        for got, want in zip(compiled, plain, strict=True):
            assert_close(got, want)
