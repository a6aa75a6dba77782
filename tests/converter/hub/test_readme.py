"""The README.md of a repository: a push replaces its own part, and nothing else."""

from __future__ import annotations

import pytest
from huggingface_hub import ModelCard
from shardconv_runtime.errors import SourceError

from shardconv.hub.card import BEGIN, END, merged

CARD = f"---\ntags:\n- made\nlicense: mit\n---\n\n{BEGIN}\n# New\n{END}\n"


def data(text: str) -> dict[str, object]:
    found: dict[str, object] = ModelCard(text).data.to_dict()  # type: ignore[no-untyped-call]
    return found


def test_the_first_one_is_the_card() -> None:
    found = merged(None, CARD)
    assert data(found) == {"tags": ["made"], "license": "mit"}
    assert found.endswith(f"---\n\n{BEGIN}\n# New\n{END}\n")
    assert merged(found, CARD) == found


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_persons_words_stay_to_the_byte(end: str) -> None:
    old = f"{BEGIN}\n# Old\n{END}"
    text = "---\nlicense: mit\ntags: [made]  # by hand\n---\n# Mine\n\n".replace("\n", end)
    after = f"{end}{end}  And more.   {end}"
    assert merged(text + old + after, CARD) == f"{text}{BEGIN}\n# New\n{END}{after}"


@pytest.mark.parametrize("existing", ["", "\n", "# Mine", f"{END} {BEGIN}", f"no end {BEGIN}"])
def test_without_a_part_of_ours_it_comes_last(existing: str) -> None:
    found = merged(existing, CARD)
    assert found.endswith(f"{BEGIN}\n# New\n{END}\n")
    assert existing.strip() in found
    assert merged(found, CARD) == found
    assert data(found) == {"tags": ["made"], "license": "mit"}


def test_keys_keep_their_values_and_lists_grow() -> None:
    found = data(merged("---\nlicense: gpl\ntags:\n- mine\nother: 1\n---\n", CARD))
    assert found == {"license": "gpl", "tags": ["mine", "made"], "other": 1}


@pytest.mark.parametrize("metadata", ["a: [", "- a list"])
def test_metadata_that_cannot_be_read_are_refused(metadata: str) -> None:
    with pytest.raises(SourceError, match="correct it there"):
        merged(f"---\n{metadata}\n---\ntext", CARD)
