"""A hook of mkdocs: pages of the site that docs/ does not have, and links that only work in the repository.

The overview is the README; the reference of the Python API comes from the code. The
pages of coverage get their long tables from the rows of the sweeps (``tests/zoo/pages.py``).
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from zoo.pages import in_site  # noqa: E402  (it is in the folder above)

OF_THE_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
FIRST = ("load", "convert", "plan")
"""Functions that begin the reference of their package."""


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    for name, page in OF_THE_ROOT.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text())
        files.append(File.generated(config, page, content=text))
    files.append(File.generated(config, "api.md", content=python_api()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Add tables; lead links to files of the root to their pages; make links to code plain text."""
    markdown = in_site(page.file.src_uri, markdown)
    for name, target in OF_THE_ROOT.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(name)}", f"]({target}", markdown)
    markdown = re.sub(r"\[([^]]+)\]\((?:\.\./\S+|LICENSE)\)", r"\1", markdown)
    return re.sub(r"^```(\w+) .+$", r"```\1", markdown, flags=re.MULTILINE)  # marks for tests


def python_api() -> str:
    """The public names of both packages, in directives of mkdocstrings."""
    sections = ["# Python API"]
    for package, folder in (("shardconv_runtime", "runtime/shardconv_runtime"), ("shardconv", "shardconv")):
        tree = ast.parse((ROOT / folder / "__init__.py").read_text())
        public: list[str] = []
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                modules |= {alias.name: f"{package}.{node.module}" for alias in node.names}
            elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                public = ast.literal_eval(node.value)
        sections.append(f"## {package}")
        sections += [
            f"::: {modules[name]}.{name}\n    options:\n      heading_level: 3"
            for name in sorted(public, key=lambda name: (name.endswith("Error"), name not in FIRST))
            if not name.startswith("__")
        ]
    return "\n\n".join(sections) + "\n"
