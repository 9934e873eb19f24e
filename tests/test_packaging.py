"""Distributions that `pip install deltarunner` and its extras install. They are read here; nothing is downloaded."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEAVY = ("torch", "triton", "nvidia", "cuda", "vllm", "xgrammar", "transformers")


def requirements(name: str, extras: frozenset[str]) -> list[str]:
    """Return the requirements of a distribution. For this project they come from the tree, installed or not."""
    if name != canonicalize_name(PROJECT["name"]):
        return distribution(name).requires or []
    optional = PROJECT["optional-dependencies"]
    return [*PROJECT["dependencies"], *(one for extra in extras for one in optional[extra])]


def closure(requirement: str) -> set[str]:
    """The names of all distributions that a requirement installs. A missing optional distribution is an error."""
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        one = waiting.pop()
        place = canonicalize_name(one.name), frozenset(one.extras)
        if place in found:
            continue
        found.add(place)
        name, extras = place
        for text in requirements(name, extras):
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras or {""}):
                waiting.append(needed)
    return {name for name, _ in found} - {canonicalize_name(PROJECT["name"])}


def megabytes(name: str) -> float:
    installed: Distribution = distribution(name)
    paths = [Path(str(file.locate())) for file in installed.files or ()]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


@pytest.mark.parametrize("extra", ["", "[testing]"], ids=["alone", "testing"])
def test_no_model_library_is_installed_and_size_is_below_400_mb(extra: str) -> None:
    names = closure(f"deltarunner{extra}")
    assert {"numpy", "pyarrow", "tokenizers"} <= names
    assert [name for name in sorted(names) if name.startswith(HEAVY)] == []
    assert sum(map(megabytes, names)) < 400


def test_the_closure_follows_extras_of_this_project_and_of_others() -> None:
    assert {"xgrammar", "torch"} <= closure("deltarunner[grammars]")
    assert closure("deltarunner[grammars]") < closure("deltarunner[training]")
    assert closure("deltarunner[testing]") | closure("deltarunner[training]") < closure("deltarunner[dev]")


def test_a_distribution_that_is_not_here_is_named() -> None:
    with pytest.raises(PackageNotFoundError, match="no-such-thing"):
        closure("no-such-thing")


IMPORTS = """
import importlib, importlib.abc, json, sys

refused = set(json.loads(sys.argv[1]))

class Refuses(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuses())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def test_public_packages_import_with_the_least_that_is_installed() -> None:
    least = closure("deltarunner")
    refused = [
        module
        for module, names in packages_distributions().items()
        if "deltarunner" not in names and least.isdisjoint(map(canonicalize_name, names))
    ]
    assert {"torch", "vllm", "psutil"} <= set(refused)
    public = ["runner", "runner.training", "runner.training.sample_rows", "runner.generation", "runner.interop"]
    public += ["runner.trainers.trl", "runner.trainers.openenv", "runner.cli.app", "runner.cli.verify_trace"]
    command = [sys.executable, "-c", IMPORTS, json.dumps(refused), *public]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
