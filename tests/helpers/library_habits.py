"""What people do with a model and other libraries, as programs do it: run by a launcher, or alone.

    torchrun --nproc-per-node 2 library_habits.py MODELS OUTCOMES
    python library_habits.py MODELS OUTCOMES

Each habit is done with the shards in ``MODELS`` under a launcher, and with the ordinary model without one.
Its numbers and texts, or its error, are written to ``OUTCOMES``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shardconv_runtime
import torch
import torch.distributed as dist
import transformers
from shardconv_runtime import Communication, ShardconvError

IS_SHARDED = "RANK" in os.environ
RANK = int(os.environ.get("RANK", "0"))
NUM_RANKS = 2
LINES = [f"{i} times {k} is {i * k}" for i in range(2, 8) for k in range(3, 7)]

MODELS = Path()
"""Set by ``main``."""

HABITS: dict[str, Callable[[], list[Any]]] = {}
REFUSED: dict[str, str] = {}
"""Habits that cannot be right on parts, and what their errors say."""


def habit(do: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    HABITS[do.__name__] = do
    return do


def refused(message: str) -> Callable[[Callable[[], list[Any]]], Callable[[], list[Any]]]:
    def register(do: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
        REFUSED[do.__name__] = message
        return habit(do)

    return register


def load(name: str = "causal", training: bool = False) -> Any:
    if IS_SHARDED:
        directory = MODELS / f"{name}-2"
        return shardconv_runtime.load(
            directory, device="cpu", training=training, communication=Communication(timeout_s=60)
        )
    kind = transformers.AutoModelForCausalLM if name == "causal" else transformers.AutoModel
    return kind.from_pretrained(MODELS / name, dtype="auto").eval()


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODELS / "causal")


# Data ----------------------------------------------------------------------------------------------------


def tokens() -> Any:
    """A dataset of lines as ids."""
    from datasets import Dataset

    of_text = tokenizer()
    lines = Dataset.from_dict({"text": LINES})
    return lines.map(lambda row: {"input_ids": of_text(row["text"])["input_ids"]}, remove_columns=["text"])


def padded(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": (ids != 0).long()}


def loader(data: Any = None, **options: Any) -> Any:
    given = tokens() if data is None else data
    return torch.utils.data.DataLoader(given, batch_size=4, collate_fn=padded, **options)


def trained(batches: Any) -> list[float]:
    """Losses."""
    model = load(training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@habit
def a_loader_with_workers() -> list[Any]:
    torch.manual_seed(5)
    return trained(loader(shuffle=True, num_workers=2))


@refused("give all of them the same")
def a_loader_without_a_seed() -> list[Any]:
    torch.manual_seed(RANK)  # as it is where nobody sets one
    return trained(loader(shuffle=True, num_workers=2))


@refused("a sampler shares data out over replicas, not over the ranks of one")
def a_dataset_split_by_rank() -> list[Any]:
    from datasets.distributed import split_dataset_by_node

    return trained(loader(split_dataset_by_node(tokens(), rank=RANK, world_size=NUM_RANKS)))


@habit
def a_model_in_map() -> list[Any]:
    from datasets import Dataset

    model, of_text = load(), tokenizer()

    def sums(rows: dict[str, list[str]]) -> dict[str, list[float]]:
        given = of_text(rows["text"], return_tensors="pt", padding=True)
        with torch.no_grad():
            return {"sum": model(**given).logits.sum((1, 2)).tolist()}

    found: list[Any] = Dataset.from_dict({"text": LINES}).map(sums, batched=True, batch_size=4)["sum"][:]
    return found


# Lightning Fabric ------------------------------------------------------------------------------------------


def with_fabric(model_parallel: bool = False, **options: Any) -> list[Any]:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    if model_parallel:
        options["strategy"] = ModelParallelStrategy(parallelize_fn=lambda model, mesh: model)
    fabric = Fabric(accelerator="cpu", **options)
    fabric.launch()
    model = load(training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if model_parallel:
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(optimizer)
    else:
        model, optimizer = fabric.setup(model, optimizer)
    found = []
    for batch in loader():
        loss = model(**batch).loss
        fabric.backward(loss)
        if not model_parallel:
            found.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1)))
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@habit
def fabric_of_one_device() -> list[Any]:
    return with_fabric(devices=1)


@habit
def fabric_in_mixed_precision() -> list[Any]:
    return with_fabric(devices=1, precision="bf16-mixed")


@habit
def fabric_with_model_parallelism() -> list[Any]:
    return with_fabric(model_parallel=True, devices=NUM_RANKS if IS_SHARDED else 1)


@refused("DistributedDataParallel would make the parts of ranks 0, 1 equal")
def fabric_of_two_devices() -> list[Any]:
    return with_fabric(devices=NUM_RANKS)


# accelerate ------------------------------------------------------------------------------------------------


def accelerator(**options: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    return Accelerator(cpu=True, **options)


@habit
def accelerate_with_an_optimizer_and_a_schedule() -> list[Any]:
    """``split_batches``: a schedule takes one step, and not one for each process."""
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(split_batches=True)
    accelerate = accelerator(gradient_accumulation_steps=2, dataloader_config=config)
    model = load(training=True)
    optimizer = accelerate.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    steps = torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (step + 1))
    schedule = accelerate.prepare(steps)
    found = []
    for batch in loader():
        with accelerate.accumulate(model):
            loss = model(**batch).loss
            accelerate.backward(loss)
            if accelerate.sync_gradients:
                found.append(float(accelerate.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        found += [loss.item(), *schedule.get_last_lr()]
    return found


@habit
def accelerate_for_evaluation() -> list[Any]:
    accelerate = accelerator()
    model = accelerate.prepare_model(load(), evaluation_mode=True)
    with torch.no_grad():
        return [model(**batch).loss.item() for batch in loader()]


@refused("DistributedDataParallel would make the parts of ranks 0, 1 equal")
def accelerate_with_the_model() -> list[Any]:
    accelerate = accelerator()
    model = load(training=True)
    accelerate.prepare(model, torch.optim.AdamW(model.parameters()))
    return []


@refused("a sampler shares data out over replicas, not over the ranks of one")
def accelerate_with_the_loader() -> list[Any]:
    return trained(accelerator().prepare(loader()))


@refused("save_pretrained(save_function=...) is not supported")
def accelerate_saves_by_its_function() -> list[Any]:
    accelerate = accelerator()
    unwrapped = accelerate.unwrap_model(load())
    place = MODELS / "saved"
    unwrapped.save_pretrained(
        place, is_main_process=accelerate.is_main_process, save_function=accelerate.save
    )
    return []


# sentence-transformers -------------------------------------------------------------------------------------


def sentences() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    encoder = Transformer(str(MODELS / "encoder"))
    encoder.auto_model = load("encoder")
    modules = [encoder, Pooling(encoder.get_embedding_dimension())]
    return SentenceTransformer(modules=modules, device="cpu")


@habit
def embeddings_of_sentences() -> list[Any]:
    model = sentences()
    found = model.encode(LINES, batch_size=5, convert_to_tensor=True, show_progress_bar=False)
    return [*found[:, :4].flatten().tolist(), *model.similarity(found, found)[0].tolist()]


@refused("cannot be pickled")
def embeddings_by_a_pool() -> list[Any]:
    model = sentences()
    pool = model.start_multi_process_pool(["cpu", "cpu"])
    try:
        return [float(model.encode(LINES, pool=pool).sum())]
    finally:
        model.stop_multi_process_pool(pool)


@refused("DistributedDataParallel would make the parts of ranks 0, 1 equal")
def embeddings_are_trained() -> list[Any]:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
        losses,
    )

    model = sentences()
    args = SentenceTransformerTrainingArguments(
        str(MODELS / "trained"), max_steps=1, report_to="none", use_cpu=True, save_strategy="no"
    )
    pairs = Dataset.from_dict({"anchor": LINES, "positive": LINES[::-1]})
    loss = losses.MultipleNegativesRankingLoss(model)
    SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss).train()
    return []


# Answers that follow a grammar -----------------------------------------------------------------------------


def grammar(**options: Any) -> list[Any]:
    import xgrammar

    of_bytes = [bytes([i - 3]) if 3 <= i < 259 else b"<%d>" % i for i in range(260)]
    raw = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo(of_bytes, vocab_type=raw, vocab_size=260, stop_token_ids=[1])
    schema = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema), any_whitespace=False)
    of_text = tokenizer()
    given = of_text(["say", "answer"], return_tensors="pt", padding=True, padding_side="left")
    processor = xgrammar.contrib.hf.LogitsProcessor(compiled)
    found = load().generate(
        **given, max_new_tokens=24, pad_token_id=0, logits_processor=[processor], **options
    )
    texts: list[Any] = of_text.batch_decode(found[:, given["input_ids"].shape[1] :], skip_special_tokens=True)
    assert all(json.loads(text)["a"] in ("yes", "no") for text in texts), texts
    return texts


@habit
def xgrammar_in_generate() -> list[Any]:
    return grammar(do_sample=False)


@habit
def xgrammar_in_sampling() -> list[Any]:
    torch.manual_seed(0)
    return grammar(do_sample=True)


@habit
def outlines_in_generate() -> list[Any]:
    import outlines
    from tokenizers import Tokenizer, decoders, models

    letters = {"<pad>": 0, "</s>": 1, "<unk>": 2, **{chr(i): i - 29 for i in range(32, 127)}}
    of_letters = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="<unk>"))
    of_letters.decoder = decoders.Fuse()
    of_text = transformers.PreTrainedTokenizerFast(
        tokenizer_object=of_letters, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )
    model = outlines.from_transformers(load(), of_text)
    torch.manual_seed(0)
    pattern = outlines.regex("[0-9]{3}-[a-c]{4}")
    return [model("give", pattern, max_new_tokens=12, do_sample=sample) for sample in (False, True)]


@refused("generate_batch takes no logits_processor; use generate (for grammars, or response_format")
def a_grammar_in_generate_batch() -> list[Any]:
    model = load()
    model.generate_batch([[3, 4, 5]], max_new_tokens=2, logits_processor=[])
    return []


# Running them -----------------------------------------------------------------------------------------------


def outcome(name: str) -> list[Any] | str:
    try:
        return HABITS[name]()
    except ShardconvError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    global MODELS
    MODELS = Path(sys.argv[1])
    wanted = sys.argv[3:] or (
        list(HABITS) if IS_SHARDED else [name for name in HABITS if name not in REFUSED]
    )
    found = {name: outcome(name) for name in wanted}
    place = Path(sys.argv[2])
    (place / (str(RANK) if IS_SHARDED else "alone")).write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
