"""The modules of `runner/` with their first lines: `python -m tests.module_list` prints them, mkdocs calls the hook."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
PLACE: Final = "<!-- the list of modules -->"


def first_lines() -> list[tuple[str, str, str]]:
    """Package, name and first docstring line of every module, in order."""
    modules = [path for path in sorted((ROOT / "runner").rglob("*.py")) if path.stem != "__init__"]
    return [(str(path.parent.relative_to(ROOT)), path.stem, _first_line(path)) for path in modules]


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring: its first line says what the module does")
    return text.splitlines()[0]


def as_markdown() -> str:
    """Return the list as one table for each package."""
    tables = []
    for package, modules in groupby(first_lines(), key=lambda module: module[0]):
        rows = "".join(f"| `{name}` | {line.replace('|', '&#124;')} |\n" for _, name, line in modules)
        tables.append(f"### {package}/\n\n| module | |\n|---|---|\n{rows}")
    return "\n".join(tables)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the list into the page that has a place for it. Called by mkdocs."""
    return markdown.replace(PLACE, as_markdown())


if __name__ == "__main__":
    for package, name, line in first_lines():
        print(f"{package}/{name}.py: {line}")
