"""The packages know no architecture: no model type, model class or layer name is in their code.

Types and classes are looked for in the whole text, comments and docstrings included; names of layers and of
config attributes in code alone (identifiers and strings), since a docstring may show what a name looks like.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

ROOT = Path(__file__).parent.parent
PACKAGES = ("shardconv", "runtime/shardconv_runtime")

ORDINARY = {
    "bit": "an English noun: options that load weights of so many bits",
    "git": "a program: files that it has not fetched are told by name",
    "align": "an English verb: operators of two tapes are aligned",
    "clip": "an English verb: gradients are clipped",
    "dinat": "a part of the word 'coordinates'",
}
"""Model types that may be in the text all the same, each with the reason."""

SHORT = 5
"""A type of at least so many letters is looked for inside of words too."""

LAYERS = """
    q_proj k_proj v_proj o_proj qkv_proj gate_proj up_proj down_proj gate_up_proj out_proj in_proj lm_head
    c_attn c_proj c_fc c_mlp q_attn fc1 fc2 fc_in fc_out mlp ffn self_attn self_attention cross_attn
    encoder_attn query_key_value dense_h_to_4h dense_4h_to_h Wqkv W_pack w1 w2 w3 embed_tokens embed_in
    embed_out wte wpe word_embeddings token_type_embeddings ln_f ln_1 ln_2
    input_layernorm post_attention_layernorm final_layernorm q_norm k_norm shared_expert block_sparse_moe
    rotary_emb score_head x_proj dt_proj conv1d A_log mixer
""".split()  # noqa: SIM905

ATTRIBUTES = """
    num_attention_heads num_key_value_heads num_heads num_key_value_groups n_head n_heads n_embd n_inner
    hidden_size intermediate_size head_dim head_size d_model d_ff d_kv d_inner
    num_local_experts num_experts_per_tok model_type architectures
""".split()  # noqa: SIM905

CHECKPOINT = "runtime/shardconv_runtime/checkpoint"

READ = {
    (f"{CHECKPOINT}/config_reading.py", "model_type"): "config.json says there of what type it is",
    (f"{CHECKPOINT}/config_reading.py", "architectures"): "config.json names the model's class there",
    ("runtime/shardconv_runtime/saving/save.py", "architectures"): "written for transformers",
    ("runtime/shardconv_runtime/loading/in_memory.py", "architectures"): "written for transformers",
    (
        "runtime/shardconv_runtime/loading/loaded_adapters.py",
        "word_embeddings",
    ): "an attribute of all configs says whether a model ties them, and peft changes it when it merges",
    (
        "runtime/shardconv_runtime/inference/paged_model.py",
        "num_key_value_heads",
    ): "transformers' pages are sized by it, whatever the model",
    (
        "runtime/shardconv_runtime/inference/paged_model.py",
        "head_dim",
    ): "transformers' pages are sized by it, whatever the model",
    (
        "runtime/shardconv_runtime/integrations/trl.py",
        "lm_head",
    ): "a part of the name of TRL's own argument, fused_lm_head",
    ("shardconv/reporting/picture.py", "w3"): "a part of the name that all SVG has: www.w3.org/2000/svg",
    ("shardconv/inputs/image_forms.py", "hidden_size"): "patches have that width",
    ("shardconv/inputs/modalities.py", "hidden_size"): "states of an encoder have that width",
    ("shardconv/inputs/config_sizes.py", "model_type"): "a value that has one is a config",
}
"""Attributes of configs that a file reads all the same, each with the reason: none tells types apart."""


# The search ------------------------------------------------------------------------------------------


@cache
def words(text: str) -> tuple[str, ...]:
    """``LlamaMLP``, ``llama_mlp`` and ``llama-mlp`` are the same words; digits are words of their own."""
    return tuple(w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+", text))


def has_words(text: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    """Whether these words follow each other in the text."""
    return any(text[i : i + len(wanted)] == wanted for i in range(len(text) - len(wanted) + 1))


@cache
def model_types() -> dict[tuple[str, ...], str]:
    """The words of every model type."""
    return {words(name): name for name in CONFIG_MAPPING_NAMES if name not in ORDINARY}


@cache
def model_classes() -> frozenset[str]:
    """Every class that an auto class of transformers knows, and every config class."""
    found: set[str] = set(CONFIG_MAPPING_NAMES.values())
    for name in dir(modeling_auto):
        if name.endswith("MAPPING_NAMES"):
            for value in getattr(modeling_auto, name).values():
                found.update([value] if isinstance(value, str) else [v for v in value if v])
    return frozenset(found)


@cache
def types_by_first_word() -> dict[str, list[tuple[str, ...]]]:
    """Where a search for the words of a type begins."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for wanted in model_types():
        found.setdefault(wanted[0], []).append(wanted)
    return found


@cache
def inside_of_words() -> re.Pattern[str]:
    """Long types, without what separates their words."""
    names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in model_types().values()]
    return re.compile("|".join(sorted(n for n in names if len(n) >= SHORT)))


@cache
def types_in_chunk(chunk: str) -> tuple[str, ...]:
    """The model types in a name; most names come up again and again."""
    split, types, by_first = words(chunk), model_types(), types_by_first_word()
    candidates = [wanted for word in split for wanted in by_first.get(word, ())]
    found = [types[wanted] for wanted in candidates if has_words(split, wanted)]
    return (*found, *inside_of_words().findall(re.sub(r"[^a-z0-9]", "", chunk.lower())))


def types_in(text: str) -> Iterator[tuple[int, str]]:
    """(line, type) of model types and classes anywhere in a source text."""
    classes = model_classes()
    for number, line in enumerate(text.splitlines(), 1):
        yield from ((number, name) for name in re.findall(r"\w+", line) if name in classes)
        for chunk in re.findall(r"[\w-]+", line):
            yield from ((number, name) for name in types_in_chunk(chunk))


def code_strings(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the identifiers and strings of a source, without docstrings and comments."""
    tree = ast.parse(text)
    prose = {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and id(node) not in prose:
                yield line, node.value
            continue
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value: Any = getattr(node, field, None)
            if isinstance(value, str):
                yield line, value


def layers_in(text: str, names: list[str]) -> Iterator[tuple[int, str]]:
    """(line, name) of such names in code."""
    for line, found in code_strings(text):
        for chunk in re.findall(r"[\w]+", found):
            yield from ((line, name) for name in layers_in_chunk(chunk, tuple(names)))


@cache
def layers_in_chunk(chunk: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the names that are in another one."""
    split = words(chunk)
    return tuple(name for name in names if has_words(split, words(name)))


def sources() -> list[Path]:
    """The Python files of both packages."""
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


# The packages ----------------------------------------------------------------------------------------


def test_no_architecture_is_named() -> None:
    for path in sources():  # not a test each: there are hundreds
        text, name = path.read_text(), str(path.relative_to(ROOT))
        assert not list(types_in(text)), name
        found = [(line, n) for line, n in layers_in(text, [*LAYERS, *ATTRIBUTES]) if (name, n) not in READ]
        assert not found, name


def test_what_is_searched() -> None:
    assert len(sources()) > 60
    assert len(CONFIG_MAPPING_NAMES) > 500
    assert {"llama", "gpt2", "t5", "bert"} <= set(CONFIG_MAPPING_NAMES)
    assert len(model_classes()) > 1500
    assert "LlamaForCausalLM" in model_classes()


def test_the_exceptions_are_needed() -> None:
    text = "\n".join(path.read_text() for path in sources()).lower()
    assert all(name in text for name in ORDINARY)
    assert set(ORDINARY) <= set(CONFIG_MAPPING_NAMES)
    for path, name in READ:
        assert name in [n for _, n in layers_in((ROOT / path).read_text(), [name])]


# The search itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        'if type(module).__name__ == "LlamaAttention": pass',
        'if config.model_type in ("qwen3_moe",): pass',
        'KIND = "gpt-neox"',
        "def is_mixtral(config): ...",
        "class OPTThing: ...",
        "isllama = True",
        "from transformers.models.t5 import modeling_t5",
        "# bloom does this in another way",
        '"""As in gemma2."""',
        "x = BertForMaskedLM",
        "Llama4Fix = 1",
    ],
)
def test_a_planted_architecture_is_found(line: str) -> None:
    assert list(types_in(f"import math\n\n{line}\n"))
    assert next(types_in(f"import math\n\n{line}\n"))[0] == 3


@pytest.mark.parametrize("name", LAYERS)
def test_a_planted_layer_is_found(name: str) -> None:
    for line in (f"y = x.{name}", f'y = "layers.0.{name}.weight"', f"def of_{name}(x): ..."):
        assert (2, name) in list(layers_in(f"import math\n{line}\n", LAYERS))
    assert not list(layers_in(f'"""An example: ``{name}``."""\nx = 1  # {name}\n', LAYERS))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_planted_attribute_is_found(name: str) -> None:
    for line in (f"y = config.{name}", f'y = getattr(config, "{name}")', f"f({name}=1)"):
        assert (1, name) in list(layers_in(line, ATTRIBUTES))
