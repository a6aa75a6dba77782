"""The model card of a repository that holds converted directories."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from shardconv_runtime.errors import SourceError
from shardconv_runtime.packed.formats import format_of

from ..reporting.report import WORST, errors_text, numerics_text, worst_first
from ..reporting.summary import human_bytes, human_count, num_packed, packed_methods, summarize, weights_text
from .published import Published

CARRIED = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")
"""Metadata that is copied from the base model's card."""

TAGS = ("shardconv", "tensor-parallel")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#!|~$:])")


def model_card(repo_id: str, variants: Sequence[Published], base_card: str | None = None) -> str:
    """Return a README.md for a repository.

    The metadata has no ``base_model_relation``: the Hub knows adapters, merges, quantized and finetuned
    models; the same weights in other files are none of these.
    """
    carried: dict[str, Any] = {}
    if base_card is not None:
        fields: dict[str, Any] = {}
        with suppress(Exception):  # of the YAML library, or the client's, about someone else's card
            base: Any = ModelCard(base_card, ignore_metadata_errors=True).data
            fields = base.to_dict()
        carried = {key: fields[key] for key in CARRIED if fields.get(key)}
    bases = sorted({v.manifest.source.name for v in variants if _HUB_ID.fullmatch(v.manifest.source.name)})
    data: Any = ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        library_name="shardconv",
        tags=list(TAGS),
        ignore_metadata_errors=True,
        **carried,
    )
    lines = [BEGIN, *_introduction(repo_id, variants), "", *_loading(repo_id, variants)]
    lines += ["", *_variants(variants), "", *_pictures(variants)]
    lines += [*_errors(variants)]
    lines += ["", *_making(variants), "", *_verifying(repo_id, variants), END]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Return text on one line, with Markdown and HTML escaped."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    marked = _SPECIAL.sub(r"\\\1", " ".join(plain.split()))
    return marked.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _introduction(repo_id: str, variants: Sequence[Published]) -> Iterator[str]:
    yield f"# {escaped(repo_id.rpartition('/')[2])}"
    yield ""
    sources = sorted({(v.manifest.source.name, v.manifest.source.revision or "") for v in variants})
    links = []
    for name, revision in sources:
        shown = escaped(name)
        if _HUB_ID.fullmatch(name):
            shown = f"[{shown}](https://huggingface.co/{name})"
        links.append(f"{shown} (revision {escaped(revision)})" if revision else shown)
    words = [str(_num_ranks(v)) for v in variants]
    sizes = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
    yield (
        f"The weights of {' and '.join(links)}, converted with shardconv for tensor parallelism on {sizes} "
        "ranks. Each rank reads only its own bytes."
    )


def _num_ranks(variant: Published) -> int:
    return variant.folder.tp * variant.folder.stages


def _loading(repo_id: str, variants: Sequence[Published]) -> Iterator[str]:
    yield "## Usage"
    yield ""
    yield "```python"
    yield f"# run.py; start it with: torchrun --nproc-per-node {_num_ranks(variants[0])} run.py"
    yield "import shardconv_runtime"
    yield ""
    quoted = json.dumps(repo_id).replace("`", "\\u0060")  # a backtick could end the block of code
    yield f"model = shardconv_runtime.load({quoted})"
    yield "```"
    yield ""
    yield "The number of processes selects the directory: `tp-N` is for N processes."
    if any(variant.folder.stages > 1 for variant in variants):
        yield (
            "`pp-P-tp-N` is for P x N processes: P pipeline stages of N processes each. If several "
            "directories are for the same number of processes, append a slash and the directory name to "
            "the repository id."
        )
    for method in sorted({method for variant in variants for method in packed_methods(variant.plan)}):
        needed = format_of(method)
        yield ""
        yield (
            f"The weights are packed ({escaped(method)}) on disk and in memory. Install the packages that "
            f"compute with them: `{needed.command}` ({needed.why}). `load(..., dequantize=True)` dequantizes "
            "the weights instead."
        )


def _variants(variants: Sequence[Published]) -> Iterator[str]:
    yield "## Contents"
    yield ""
    yield "| directory | ranks | bytes per rank | all files | parameters | dtype | replicated |"
    yield "|---|--:|--:|--:|--:|---|---|"
    for variant in variants:
        plan, summary = variant.plan, summarize(variant.plan)
        total = sum(entry.num_bytes for each in variant.manifests for entry in each.files)
        cells = (
            variant.path,
            str(_num_ranks(variant)),
            human_bytes(max(summary.rank_bytes)),
            human_bytes(total),
            human_count(plan.model.num_parameters),
            weights_text(plan),
            human_bytes(sum(group.num_bytes for group in summary.replicated)),
        )
        yield "| " + " | ".join(map(escaped, cells)) + " |"
    for variant in variants:
        if variant.plan.tp > 1 and variant.plan.training is None:
            yield ""
            yield f"`{_code(variant.path)}` is for inference only."


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _pictures(variants: Sequence[Published]) -> Iterator[str]:
    yield "## How it is sharded"
    for variant in variants:
        over = f"{variant.plan.tp} ranks" + (" of each stage" if variant.folder.stages > 1 else "")
        name = escaped(f"How the weights are sharded over {over}")
        yield ""
        yield f"![{name}](shardconv/{variant.path}.svg)"


def _making(variants: Sequence[Published]) -> Iterator[str]:
    yield "## Conversion"
    yield ""
    for variant in variants:
        manifest = variant.manifest
        tools = ", ".join(f"{name} {version}" for name, version in manifest.tools.items())
        revision = f" --revision {manifest.source.revision}" if manifest.source.revision else ""
        stages = f" --pp {variant.folder.stages}" if variant.folder.stages > 1 else ""
        how = f"shardconv convert {manifest.source.name}{revision} --tp {manifest.tp}{stages} {variant.path}/"
        yield f"- {escaped(variant.path)}: `{_code(how)}`, with {escaped(tools)}"


def _verifying(repo_id: str, variants: Sequence[Published]) -> Iterator[str]:
    variant = variants[0]
    source = variant.manifest.source
    against = f"{variant.path}/ --against {source.name}"
    revision = f" --revision {source.revision}" if source.revision else ""
    yield "## Verification"
    yield ""
    yield "Each directory has a manifest with the size and checksum of every file. The second command "
    yield "compares every byte with the base model."
    yield ""
    yield "```sh"
    yield f"hf download {_code(repo_id)} --include {_code(variant.path)}/* --local-dir ."
    yield _code(f"shardconv verify {against}{revision}")
    yield "```"
    measured = [variant for variant in variants if variant.manifest.numerics is not None]
    if measured:
        yield ""
        yield "`shardconv verify --numerics` compared all ranks with the unsharded model on these weights:"
        yield ""
    for variant in measured:
        yield f"- {escaped(variant.path)}: {escaped(numerics_text(variant.manifest.numerics))}"


def _errors(variants: Sequence[Published]) -> Iterator[str]:
    """Yield the errors of weights that were quantized when they were converted, worst first."""
    for variant in variants:
        if errors := variant.quantization_errors:
            yield ""
            text = errors_text(errors, num_packed(variant.plan))
            yield f"{escaped(variant.path)}: {escaped(text)}. The largest:"
            yield ""
            yield "| error | weight |"
            yield "|--:|---|"
            for name, error in worst_first(errors)[:WORST]:
                yield f"| {error:.2e} | {escaped(name)} |"


BEGIN, END = "<!-- shardconv: begin -->", "<!-- shardconv: end -->"
"""Comments in the README.md of a repository. A person writes the README, and each push replaces only the text
between these comments."""

_OWN = re.compile(f"{BEGIN}(?:(?!{BEGIN}).)*?{END}", re.DOTALL)


def merged(existing: str | None, card: str) -> str:
    """Replace the card in ``existing``, and keep everything else.

    Metadata in ``existing`` takes precedence; lists get the items of both.
    """
    made = ModelCard(card)
    metadata: dict[str, Any] = made.data.to_dict()  # type: ignore[no-untyped-call]
    # The text between the two comments, including them.
    inner = made.text
    if BEGIN in inner and END in inner:
        inner = inner.split(BEGIN, 1)[-1].rsplit(END, 1)[0]
    section = f"{BEGIN}\n{inner.strip()}\n{END}"
    if existing is None:
        return _with_metadata(metadata, f"\n{section}\n")
    try:
        old_card = ModelCard(existing, ignore_metadata_errors=True)
    except Exception as error:  # of the YAML library, or the client's
        raise SourceError(
            "the README.md on the Hub begins with metadata that cannot be read; correct it there, between "
            "the lines ---"
        ) from error
    before: dict[str, Any] = old_card.data.to_dict()  # type: ignore[no-untyped-call]
    after = dict(before)
    for key, value in metadata.items():
        old = after.get(key)
        if old is None:
            after[key] = value
        elif isinstance(old, list) and isinstance(value, list):
            after[key] = [*old, *(item for item in value if item not in old)]
    text = old_card.text
    if generated := _OWN.search(text):
        body = text[: generated.start()] + section + text[generated.end() :]
    else:
        body = f"{text.rstrip()}\n\n{section}\n" if text.strip() else f"\n{section}\n"
    if after == before:
        return existing[: len(existing) - len(old_card.text)] + body
    return _with_metadata(after, body)


def _with_metadata(metadata: dict[str, Any], body: str) -> str:
    card = ModelCard(body)
    card.data = card.card_data_class(ignore_metadata_errors=True, **metadata)
    return str(card)
