"""Load a model, generate with it, train it and save it, with all of its types known."""

from __future__ import annotations

import argparse
from pathlib import Path

import shardconv_runtime
import torch
from shardconv_runtime import Communication, Compiling, Hub, LoadedModel, Training
from torch import Tensor


def generate(model: LoadedModel, ids: Tensor) -> Tensor:
    """Return the ids with new tokens."""
    return model.generate(ids, max_new_tokens=8, do_sample=False)


def train(model: LoadedModel, batches: list[Tensor]) -> list[float]:
    """Return the losses of some steps."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    for ids in batches:
        loss: Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        shardconv_runtime.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Run both on the model that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    ids = torch.arange(16).reshape(2, 8)
    communication = Communication(timeout_s=60)
    hub = Hub(local_files_only=True)
    reader = shardconv_runtime.load(
        arguments.model, dtype="bf16", compile=Compiling(), communication=communication, hub=hub
    )
    print(generate(reader, ids).shape, reader.config.vocab_size)
    learner = shardconv_runtime.load(arguments.model, dtype="auto", training=Training(), hub=hub)
    print(train(learner, [ids, ids]))
    shardconv_runtime.save(learner, arguments.target)


if __name__ == "__main__":
    main()
