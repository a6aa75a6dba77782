"""Reports and pictures in a real browser: what is drawn is there, fits, and asks nobody for anything.

Set ``SHARDCONV_SCREENSHOTS`` to a directory to keep what was seen.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, require_browser
from shardconv_runtime.format.plan import Plan
from shown_plans import EVIL, evil_plan, wide_plan, zoo_plan

from shardconv.reporting.html_report import html_report
from shardconv.reporting.picture import picture
from shardconv.reporting.svg import WIDTH

PLANS: dict[str, Callable[[], Plan]] = {
    "decoder": lambda: zoo_plan("causal", "llama", 4),
    "experts": lambda: zoo_plan("causal", "mixtral", 4, "ep"),
    "latent": lambda: zoo_plan("causal", "deepseek_v3", 4),
    "hybrid": lambda: zoo_plan("causal", "falcon_h1", 2),
    "encoder-decoder": lambda: zoo_plan("seq2seq", "t5", 4),
    "wide": wide_plan,
    "evil": evil_plan,
}

MEASURE = """(() => {
  const svg = document.querySelector('svg.sc'), box = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
  const bad = [];
  for (const [text, r] of texts)
    if (r.left < box.left || r.right > box.right || r.top < box.top || r.bottom > box.bottom) bad.push(text);
  for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const [s, a] = texts[i], [t, b] = texts[j];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 1 && high > 4) bad.push(s + ' over ' + t);
  }
  return {bad, texts: texts.map(t => t[0]), width: box.width, height: box.height};
})()"""
"""Texts of the picture that leave it, or lie on each other."""

CONTRAST = """(() => {
  const light = c => {
    const [r, g, b] = c.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const fill = s => getComputedStyle(document.querySelector(s)).fill;
  const found = {};
  for (const [text, ground] of [['.sc .muted', '.sc .card'], ['.sc .muted', '.sc .lane'],
                                ['.sc g text[font-weight]', '.sc .lane']])
    found[text + ' on ' + ground] = ratio(fill(text), fill(ground));
  const style = getComputedStyle(document.body);
  if (document.body.tagName === 'BODY') found.body = ratio(style.color, style.backgroundColor);
  return found;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    with Browser(require_browser(), tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def written(path: Path, plan: Plan) -> Path:
    """The report of a plan as a file."""
    path.write_text(html_report(plan, picture(plan)), encoding="utf-8")
    return path


def seen(browser: Browser, name: str) -> None:
    """Keep what the browser shows, for a person to look at."""
    if directory := os.environ.get("SHARDCONV_SCREENSHOTS"):
        browser.screenshot(Path(directory) / f"{name}.png")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, "light") for name in ("wide", "encoder-decoder", "evil")),
        ("decoder", "dark"),
        *(
            pytest.param(name, "light", marks=pytest.mark.slow)
            for name in ("decoder", "experts", "latent", "hybrid")
        ),
        *(pytest.param(name, "dark", marks=pytest.mark.slow) for name in PLANS if name != "decoder"),
    ],
)
def test_pages_fit_and_ask_for_nothing(name: str, scheme: str, browser: Browser, tmp_path: Path) -> None:
    plan = PLANS[name]()
    page = written(tmp_path / "page.html", plan)
    for width in (1200, 800, 360):
        browser.open(page, width, scheme=scheme)
        seen(browser, f"page-{name}-{scheme}-{width}")
        assert browser.value("document.documentElement.scrollWidth") <= width
        assert browser.requests() == [page.as_uri()]
        assert browser.complaints() == []
    text = browser.value("document.body.innerText")
    assert "How it is sharded" in text
    assert plan.model.class_name.partition(":")[2] in text
    assert browser.value("document.querySelectorAll('script, link, img, iframe').length") == 0
    assert browser.value("document.querySelectorAll('table').length") >= 3


@pytest.mark.parametrize("name", PLANS)
def test_pictures_fit(name: str, browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    path.write_text(picture(PLANS[name]()), encoding="utf-8")
    for scheme in ("light", "dark"):
        browser.open(path, WIDTH, scheme=scheme)
        seen(browser, f"picture-{name}-{scheme}")
        assert browser.value("document.contentType") == "image/svg+xml"
        assert browser.value("document.querySelectorAll('parsererror').length") == 0
        found = browser.value(MEASURE)
        assert found["bad"] == []
        assert found["width"] == WIDTH
        assert browser.requests() == [path.as_uri()]
        assert browser.complaints() == []


def test_both_colour_schemes_can_be_read(browser: Browser, tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", PLANS["latent"]())
    grounds = {}
    for scheme in ("light", "dark"):
        browser.open(page, scheme=scheme)
        contrasts: dict[str, Any] = browser.value(CONTRAST)
        assert len(contrasts) == 4
        assert min(contrasts.values()) >= 4.5, contrasts
        fill = "getComputedStyle(document.querySelector('.page')).fill"
        script = f"[getComputedStyle(document.body).backgroundColor, {fill}]"
        grounds[scheme] = browser.value(script)
    assert grounds["light"] == ["rgb(255, 255, 255)"] * 2
    assert not set(grounds["light"]) & set(grounds["dark"])


def test_markup_in_names_is_text(browser: Browser, tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", evil_plan())
    browser.open(page)
    assert browser.value("document.querySelector('h1').textContent") == EVIL
    assert EVIL in browser.value(MEASURE)["texts"]
    assert not [event for event in browser.events if event["method"] == "Page.javascriptDialogOpening"]


def test_the_policy_of_the_page_is_obeyed(browser: Browser, tmp_path: Path) -> None:
    page = written(tmp_path / "page.html", PLANS["decoder"]())
    image = "<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>"
    (tmp_path / "other.svg").write_text(image)
    harmful = (
        "<script>document.title = 'ran'</script><style>h1 { display: none }</style><img src='other.svg'>"
    )
    page.write_text(page.read_text("utf-8").replace("</body>", f"{harmful}</body>"), encoding="utf-8")
    browser.open(page)
    assert browser.value("document.title") != "ran"
    assert browser.value("getComputedStyle(document.querySelector('h1')).display") == "block"
    assert browser.value("document.querySelector('img').naturalWidth") == 0
    assert len(browser.complaints()) >= 3


def test_printing(browser: Browser, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLANS["decoder"](), notes=("a note",))
    browser.open(written(tmp_path / "page.html", plan), scheme="dark")
    assert browser.pdf().startswith(b"%PDF-")
    browser.call("Emulation.setEmulatedMedia", media="print", features=[])
    assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.value("getComputedStyle(document.querySelector('nav')).display") == "none"
    browser.call("Emulation.setEmulatedMedia", media="")
