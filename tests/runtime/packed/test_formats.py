"""The registry of packed formats: each says everything about itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from shardconv_runtime.errors import PlanError, SourceError
from shardconv_runtime.packed.formats import FORMATS, QUANT_METHODS, format_of, format_of_checkpoint
from shardconv_runtime.packed.packed_format import PackedFormat


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.method)
def test_every_format_says_what_is_asked_of_it(each: PackedFormat) -> None:
    assert each.packages
    assert each.why
    assert type(each).dequantized is not PackedFormat.dequantized
    assert not each.quant_methods or type(each).find is not PackedFormat.find
    assert format_of(each.method) is each


def test_no_two_formats_are_of_one_name() -> None:
    methods = [each.method for each in FORMATS]
    quant_methods = [name for each in FORMATS for name in each.quant_methods]
    assert len(set(methods)) == len(methods)
    assert len(set(quant_methods)) == len(quant_methods)


def test_the_page_has_every_format() -> None:
    """The message about other formats lists those of the registry."""
    page = (Path(__file__).parents[3] / "docs" / "converting.md").read_text(encoding="utf-8")
    table = page.partition("## Quantized checkpoints")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|[^|]+\|([^|]+)\|", table, re.MULTILINE)
    methods = set(re.findall(r"`([\w-]+)`", " ".join(cells))) - {"quant_method"}
    assert methods == QUANT_METHODS.keys()
    with pytest.raises(SourceError) as caught:
        format_of_checkpoint({"quant_method": "hqq"}, "here")
    assert str(caught.value).endswith(", ".join(sorted(methods)))


def test_packages() -> None:
    assert format_of("gptq").command == "pip install gptqmodel optimum"


def test_a_plan_of_a_format_that_is_not_known() -> None:
    with pytest.raises(PlanError, match=r"weights are packed by 'newer'; awq, .* are known"):
        format_of("newer")


@pytest.mark.parametrize("method", ["eetq", "hqq", "", None])
def test_other_methods_are_refused_by_name(method: str | None) -> None:
    with pytest.raises(SourceError, match=rf"quantized \({method or 'an unnamed method'}\), .* convert"):
        format_of_checkpoint({"quant_method": method}, "here")


def test_bitsandbytes_without_a_name() -> None:
    format_of_checkpoint({"load_in_4bit": True}, "here")
