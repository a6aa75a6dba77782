"""Make a small Llama checkpoint with random weights: demo_checkpoint.py DIRECTORY."""

from __future__ import annotations

import sys

import torch
import transformers


def main(directory: str) -> None:
    """Save the model; norms and biases are random too, since ones and zeros would hide mistakes."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=4,
        hidden_size=256,
        intermediate_size=688,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=1024,
        max_position_embeddings=256,
        attention_bias=True,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(directory)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {directory}")


if __name__ == "__main__":
    main(sys.argv[1])
