"""Where the template comes from that parses answers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from response_shapes import SHAPES
from shardconv_runtime.errors import OptionError
from shardconv_runtime.openai_api.response_templates import (
    mark_texts,
    template_of_file,
    template_of_tokenizer,
)

SPEC = SHAPES["content without a mark"].template


@pytest.mark.parametrize("content", [SPEC, {"response_template": SPEC, "eos_token": "<done>"}])
def test_a_file_has_a_template_or_the_config_of_a_tokenizer(content: Any, tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text(json.dumps(content))
    template = template_of_file(str(tmp_path / "template.json"))
    assert (template.spec, template.source) == (SPEC, "option")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "is an object"),
        ("{}", "non-empty dict"),
        ('{"response_template": null}', "is an object"),
        (json.dumps({**SPEC, "version": 2}), "version"),
        (json.dumps({"fields": SPEC["fields"]}), "start_anchor"),
        (json.dumps({**SPEC, "fields": {"content": {"open_pattern": "("}}}), "regex"),
    ],
)
def test_files_without_a_template_are_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "template.json").write_text(content)
    with pytest.raises(OptionError, match=rf"--response-template .*template.json.*{reason}"):
        template_of_file(str(tmp_path / "template.json"))
    with pytest.raises(OptionError, match="cannot be read"):
        template_of_file(str(tmp_path / "missing.json"))


@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ({"close": "</a>"}, ("</a>",)),
        ({"close": ["<b>", "<c>"]}, ("<b>", "<c>")),
        ({"close_pattern": r"\s*<\|a\|>\s*"}, ("<|a|>",)),
        ({"close_pattern": r"</a>\n?"}, ("</a>",)),
        ({"close_pattern": r"<a>(?P<b>\w+)"}, ()),
        ({"close_pattern": "<a>|<b>"}, ()),
        ({"close_pattern": "ab?"}, ()),
        ({}, ()),
    ],
)
def test_texts_of_marks(field: Any, texts: tuple[str, ...]) -> None:
    assert mark_texts(field, "close") == texts


def test_the_template_of_a_tokenizer(caplog: pytest.LogCaptureFixture) -> None:
    """One that transformers cannot parse with is left out, with a warning: answers are text."""
    template = template_of_tokenizer(SimpleNamespace(response_template=SPEC))
    assert template is not None
    assert template.source == "tokenizer"
    assert template_of_tokenizer(SimpleNamespace()) is None
    with caplog.at_level(logging.WARNING):
        assert template_of_tokenizer(SimpleNamespace(response_template={**SPEC, "version": 2})) is None
    assert "answers are not parsed" in caplog.text
