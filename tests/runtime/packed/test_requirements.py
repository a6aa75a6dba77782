"""Every format is in every table."""

from __future__ import annotations

import pytest
from shardconv_runtime.errors import SourceError
from shardconv_runtime.packed.schemes import CHECKS, FORMULAS, REQUIREMENTS, requirement, scheme_of


def test_every_format_has_a_requirement() -> None:
    assert set(REQUIREMENTS) == set(FORMULAS) >= set(CHECKS)
    assert requirement("gptq").command == "pip install gptqmodel optimum"


@pytest.mark.parametrize("method", ["eetq", "hqq", "", None])
def test_other_methods_are_refused_by_name(method: str | None) -> None:
    with pytest.raises(SourceError, match=rf"quantized \({method or 'an unnamed method'}\), .* convert"):
        scheme_of({"quant_method": method}, "here")


def test_bitsandbytes_without_a_name() -> None:
    scheme_of({"load_in_4bit": True}, "here")
