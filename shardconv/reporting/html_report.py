"""Renders a plan and its files as one self-contained HTML page: no network, no scripts.

The markup is in ``templates/``, where Jinja escapes every value. The Content-Security-Policy of the
page allows its own style sheets by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from importlib.resources import files

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from shardconv_runtime.format.manifest import Manifest
from shardconv_runtime.format.plan import Plan

from . import html_values
from .human_numbers import human_bytes, percent
from .plan_lines import fused_lines, memory_facts, memory_parts
from .report import TOKENS, numerics_text, tensor_cells, unplanned
from .summary import Summary, all_notes, folders, summarize, summed_gradients

MARK = '<meta name="generator" content="shardconv report">'
"""Near the beginning of every report; a file with it may be replaced."""


def html_report(
    plan: Plan, picture: str, *, manifest: Manifest | None = None, num_tokens: int = TOKENS
) -> str:
    """Render the page.

    Args:
        plan: any plan.
        picture: SVG of the plan; it is embedded unchanged.
        manifest: of the converted directory, if there is one.
        num_tokens: length of the forward pass whose bytes are shown.

    Returns:
        An HTML document; deterministic.
    """
    summary = summarize(plan)
    # Every value is escaped, and a name that is not defined is an error.
    environment = Environment(
        loader=PackageLoader("shardconv", "reporting/templates"),
        autoescape=True,
        finalize=_shown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "human_bytes": human_bytes,
        "numerics_text": numerics_text,
        "percent_of": percent,
    }
    environment.globals |= {"values": html_values, "memory_facts": memory_facts, "memory_parts": memory_parts}
    environment.globals |= {"folders": folders, "summed_gradients": summed_gradients}
    environment.globals |= {"fused_lines": fused_lines, "tensor_cells": tensor_cells, "unplanned": unplanned}
    css = files(__package__).joinpath("templates", "report.css").read_text(encoding="utf-8")
    styles = [css, *re.findall(r"<style>(.*?)</style>", picture, flags=re.DOTALL)]
    hashes = sorted({base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles})
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return environment.get_template("report.html.jinja").render(
        plan=plan,
        summary=summary,
        manifest=manifest,
        num_tokens=num_tokens,
        svg=Markup(picture.strip()),
        css=Markup(css),
        policy=f"default-src 'none'; style-src {allowed}; base-uri 'none'; form-action 'none'",
        mark=Markup(MARK),
        sections=list(_sections(plan, summary, manifest)),
    )


def _shown(value: object) -> object:
    """Return text without control characters, and markup, which is ours, as it is."""
    if isinstance(value, Markup):
        return value
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(value))


def _sections(plan: Plan, summary: Summary, manifest: Manifest | None) -> Iterator[tuple[str, str]]:
    """Yield (macro in ``sections.html.jinja``, heading) of the sections that have something to show."""
    yield "picture", "How it is sharded"
    if summary.kinds:
        yield "layers", "Layers"
    yield "memory", "Memory of each rank"
    if summary.collectives:
        yield "communication", "Communication"
    if plan.fused:
        yield "fused", "Fused products"
    if plan.tp > 1:
        yield "replicated", "Replicated"
        yield "training", "Training"
    if all_notes(plan):
        yield "notes", "Notes"
    yield "origin", "Where it comes from"
    if manifest is not None and manifest.files:
        yield "files", "Files"
