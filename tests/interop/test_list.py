"""`deltarunner list`: the environments, and the environments that each extra adds."""

from __future__ import annotations

import importlib.util
import tomllib
from typing import Any

import pytest
from typer.testing import CliRunner

from runner.cli import list as list_module
from runner.cli.app import app
from runner.environment import loading
from tests.repository import ROOT


def listed() -> str:
    return " ".join(CliRunner().invoke(app, ["list"]).output.split())


def test_list_names_what_an_extra_would_add(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *rest: Any) -> Any:
        return None if name in ("math_verify", "reasoning_gym") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.setattr(list_module, "find_spec", without)
    monkeypatch.setenv("COLUMNS", "200")
    said = listed()
    assert "pip install 'deltarunner[math]' equality of mathematical expressions: --score math" in said
    reasoning = next(each for each in loading.bundled_environments() if each.name == "reasoning")
    assert reasoning.missing == "pip install 'deltarunner[reasoning]'"
    assert "needs pip install 'deltarunner[reasoning]'" in said
    assert "deltarunner[mcp]" not in said


def test_table_of_the_readme_names_every_environment() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("## Included environments")[2].partition("\n## ")[0]
    named = {line.split("`")[1].split()[0].partition(":")[0] for line in table.splitlines() if line.startswith("| `")}
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    bundled = set(declared["deltarunner.environments"])
    assert named == bundled - {"program"}, "an agent program is the user's own"


def test_every_listed_extra_is_declared() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(list_module.EXTRAS) <= set(extras)
