"""Model cards: what they say, what they take over, and that nothing in them is markup but their own."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace
from typing import Any

from huggingface_hub import ModelCard
from shardconv_runtime.files.manifest import FileEntry, Manifest, Source
from shardconv_runtime.files.tp_folders import Folder
from shardconv_runtime.format.measured import Numerics
from shardconv_runtime.format.plan import Plan
from shown_plans import EVIL, evil_plan
from small_models import hand_plan, small_config

from shardconv.hub.card import BEGIN, END, escaped, merged, model_card
from shardconv.hub.published import Published

BASE = """---
license: other
license_name: a-license
license_link: https://example.com/license
language:
- en
- de
pipeline_tag: text-generation
datasets:
- a/b
widget:
- text: hello
extra_gated_prompt: no
---
# The base
"""


def published(plan: Plan, name: str = "org/base", revision: str | None = "abc123") -> Published:
    """A converted directory without files on disk."""
    files = (
        FileEntry("config.json", 700, "sha256:" + "2" * 64),
        FileEntry("x.safetensors", 1300, "crc32-of-pieces:" + "0" * 8),
    )
    tools = {"shardconv": "0.1.0", "torch": "2.13.0"}
    manifest = Manifest(plan.tp, "0" * 64, Source(name, revision), tools, files)
    return Published(Folder(plan.tp), (manifest,), plan)


def metadata(card: str) -> dict[str, Any]:
    """What the card says to the Hub."""
    data: Any = ModelCard(card).data
    return dict(data.to_dict())


def both() -> list[Published]:
    """Two sizes of one model."""
    return [published(hand_plan(small_config(), tp)) for tp in (2, 4)]


def test_the_result_of_numerics() -> None:
    """Of the directories that have one; names in it are text."""
    assert "--numerics" not in model_card("me/base-tp", both())
    measured = Numerics(2e-15, 1e-9, "float64", {"input_ids": (3, 24), EVIL: (1,)})
    first, second = both()
    manifest = dataclasses.replace(second.manifest, numerics=measured)
    card = model_card("me/base-tp", [first, dataclasses.replace(second, manifests=(manifest,))])
    head = "`shardconv verify --numerics` compared all ranks with the unsharded model on these weights:"
    assert f"{head}\n\n- tp-4: the simulated" in card
    assert "by at most 2.0e-15 of its largest output \\(float64, tolerance 1e-09" in card
    assert EVIL not in card


def test_errors_of_quantized_weights_are_listed_worst_first() -> None:
    variant = published(hand_plan(small_config(), 2))
    errors = {"a.weight": 0.02, "b.weight": 0.04}
    variant = replace(variant, manifests=(replace(variant.manifest, quantization_errors=errors),))
    card = model_card("user/tp", [variant])
    assert "tp-2: relative errors of 2 quantized weights (Frobenius norm)" in card.replace("\\", "")
    lines = card.splitlines()
    assert lines[lines.index("|--:|---|") + 1 :][:2] == ["| 4.00e-02 | b.weight |", "| 2.00e-02 | a.weight |"]


def test_the_text_of_a_card() -> None:
    card = model_card("me/base-tp", both())
    for expected in (
        "# base-tp\n",
        "[org/base](https://huggingface.co/org/base) (revision abc123)",
        "on 2 or 4 ranks",
        "torchrun --nproc-per-node 2 run.py",
        'model = shardconv_runtime.load("me/base-tp")',
        "![How the weights are sharded over 4 ranks](shardconv/tp-4.svg)",
        "`shardconv convert org/base --revision abc123 --tp 4 tp-4/`, with shardconv 0.1.0, torch 2.13.0",
        "shardconv verify tp-2/ --against org/base --revision abc123",
        "`tp-2` is for inference only.",
    ):
        assert expected in card
    rows = [line for line in card.splitlines() if line.startswith("| tp")]
    assert [row.split("|")[2].strip() for row in rows] == ["2", "4"]
    assert "2.0 kB" in rows[0]
    assert card.count(BEGIN) == card.count(END) == 1
    assert model_card("me/base-tp", both()) == card


def test_metadata_of_the_base_model_is_carried_over_and_none_is_made_up() -> None:
    with_base = metadata(model_card("me/m", both(), BASE))
    assert with_base == {
        "base_model": "org/base",
        "library_name": "shardconv",
        "tags": ["shardconv", "tensor-parallel"],
        "license": "other",
        "license_name": "a-license",
        "license_link": "https://example.com/license",
        "language": ["en", "de"],
        "pipeline_tag": "text-generation",
        "datasets": ["a/b"],
    }
    without = metadata(model_card("me/m", both()))
    assert set(without) == {"base_model", "library_name", "tags"}


def test_a_base_card_that_cannot_be_read_is_left_out() -> None:
    for text in ("---\n: [broken\n---\n", "---\n- a\n- list\n---\n", "no metadata", ""):
        assert "license" not in metadata(model_card("me/m", both(), text))


def test_a_local_directory_is_not_named_as_the_base_model() -> None:
    card = model_card("me/m", [published(hand_plan(small_config(), 2), "my_model", None)])
    assert "base_model" not in metadata(card)
    assert "my\\_model" in card


def test_nothing_in_a_plan_or_a_manifest_is_markup() -> None:
    variant = published(evil_plan(), EVIL, EVIL)
    tools = {EVIL: EVIL}
    variant = dataclasses.replace(variant, manifests=(dataclasses.replace(variant.manifest, tools=tools),))
    card = model_card("me/m", [variant])
    outside = re.sub(r"```.*?```|`[^`\n]*`", "", card.split(BEGIN)[1].split(END)[0], flags=re.DOTALL)
    assert "<" not in outside
    assert not re.search(r"(?<!\\)\[x", outside)
    assert not re.search(r"(?<!\\)`", outside)


def test_escaped_text_is_one_line_and_has_no_markup() -> None:
    assert escaped("a|b\nc *d* <e> [f](g) `h` \\ & _i_") == (
        "a\\|b c \\*d\\* &lt;e&gt; \\[f\\]\\(g\\) \\`h\\` \\\\ &amp; \\_i\\_"
    )


def test_what_a_person_wrote_stays() -> None:
    theirs = "---\nlicense: mit\ntags:\n- mine\n---\n\n# My words\n\nBefore.\n"
    first = merged(theirs, model_card("me/m", both()[:1]))
    again = merged(first + "\nAfter.\n", model_card("me/m", both()))
    assert again.index("Before.") < again.index(BEGIN) < again.index(END) < again.index("After.")
    assert "tp-4" in again
    data = metadata(again)
    assert data["license"] == "mit"
    assert set(data["tags"]) == {"mine", "shardconv", "tensor-parallel"}
    assert merged(again, model_card("me/m", both())) == again
