"""Files beside the code agree with each other on the version, Python versions, hooks and workflows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from pre_commit.clientlib import load_config  # type: ignore[import-untyped]  # pre-commit has no types
from pre_commit.languages import pygrep  # type: ignore[import-untyped]  # pre-commit has no types

from tests.repository import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
WORKFLOWS = ROOT / ".github" / "workflows"

# The changelog is left out because its headings are versions, and the template because it is a project with a version
# of its own.
TEXTS = (
    *("*.md", "*.cff", "*.yml", "Makefile", "docs/**/*.md", ".ci/*", ".github/**/*.yml"),
    *("runner/**/*.py", "envs/**/*.py", "examples/**/*.py"),
)

MAX_ENTRY_CHARS = 200


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(text: str, folder: str) -> set[str]:
    """The programs of a virtual environment that a text starts, with a subcommand or a module."""
    return set(re.findall(rf"{re.escape(folder)}/([\w-]+(?: -m [\w.]+| \w+)?)", text))


def test_version_is_in_pyproject_alone() -> None:
    version = re.compile(rf"(?<![\w.]){re.escape(PROJECT['version'])}(?![\w.])")
    files = {path for pattern in TEXTS for path in ROOT.glob(pattern) if path.name != "CHANGELOG.md"}
    assert {ROOT / "CITATION.cff", ROOT / "docs" / "scale.md", ROOT / "runner" / "version.py"} <= files
    assert [str(path.relative_to(ROOT)) for path in files if version.search(path.read_text(encoding="utf-8"))] == []


def test_classifiers_and_tests_have_the_pythons_that_are_supported() -> None:
    supported = {minor for minor in range(30) if f"3.{minor}" in SpecifierSet(PROJECT["requires-python"])}
    named = {int(minor) for line in PROJECT["classifiers"] for minor in re.findall(r":: 3\.(\d+)$", line)}
    (matrix,) = re.findall(r"python: \[(.*)\]", (WORKFLOWS / "test.yml").read_text(encoding="utf-8"))
    assert named == supported == {int(minor) for minor in re.findall(r'"3\.(\d+)"', matrix)}


def test_hooks_are_the_commands_of_make_check() -> None:
    recipe = text_of("Makefile").partition("\ncheck: ")[2].partition("\n\n")[0]
    hooks = "\n".join(re.findall(r"entry: (.*)", text_of(".pre-commit-config.yaml")))
    assert commands(hooks, ".venv/bin") == commands(recipe, "$(BIN)")


@pytest.mark.parametrize(
    ("message", "accepted"),
    [
        ("engines: mask the key\n\nServers may repeat it.\n", True),
        ("runs, cli: resume by name\n", True),
        ("tokens/bridging: keep the space", True),
        ("engines: mask the key\n# Please enter the commit message for your changes.\n", True),
        ('Revert "engines: mask the key"\n', True),
        ("fixup! engines: mask the key\n", True),
        ("squash! engines: mask the key\n", True),
        ("amend! engines: mask the key\n\nengines: mask the key\n", True),
        ("Mask the key in errors\n", False),
        ("Engines: mask the key\n", False),
        ("engines:mask the key\n", False),
        ("engines: no\n", False),
        (f"engines: {'x' * 63}\n", True),
        (f"engines: {'x' * 64}\n", False),
        ("engines: mask the key\nServers may repeat it.\n", False),
        ("Mask the key\n\nengines: mask the key\n", False),
    ],
)
def test_hook_accepts_only_subjects_with_a_package(message: str, accepted: bool, tmp_path: Path) -> None:
    (local,) = load_config(ROOT / ".pre-commit-config.yaml")["repos"]
    (hook,) = (hook for hook in local["hooks"] if hook["stages"] == ["commit-msg"])
    file = tmp_path / "message"
    file.write_text(message)
    assert (pygrep.main([*hook["args"], hook["entry"], str(file)]) == 0) is accepted


def test_release_publishes_after_the_tests_of_all_pythons() -> None:
    release = (WORKFLOWS / "release.yml").read_text(encoding="utf-8")
    publish = release.partition("\n  publish:\n")[2]
    assert "needs: [test, test-all, build]" in publish
    for name in ("test", "test-all"):
        assert f"\n  {name}:\n    uses: ./.github/workflows/{name}.yml\n" in release
        assert "\n  workflow_call:\n" in (WORKFLOWS / f"{name}.yml").read_text(encoding="utf-8")


def test_make_test_all_has_every_supported_python() -> None:
    workflow = (WORKFLOWS / "test-all.yml").read_text(encoding="utf-8")
    named = {f"3.{minor}" for line in PROJECT["classifiers"] for minor in re.findall(r":: 3\.(\d+)$", line)}
    setup, _, rest = workflow.partition("      - run: make test-all ")
    assert rest
    assert set(re.findall(r"^ +(3\.\d+)$", setup, re.MULTILINE)) == named
    assert "\n  schedule:\n" in setup
    assert "\n  workflow_dispatch:\n" in setup


@pytest.mark.parametrize("name", ["test.yml", "test-all.yml"])
def test_workflow_installs_containers_before_its_tests(name: str) -> None:
    workflow = (WORKFLOWS / name).read_text(encoding="utf-8")
    steps = re.findall(r"- run: (sudo \.ci/containers|make test(?:-all)?) ?", workflow)
    assert steps == ["sudo .ci/containers", f"make {name.removesuffix('.yml')}"]


@pytest.mark.parametrize("name", ["docs.yml", "test.yml", "test-all.yml"])
def test_workflow_restores_the_environment_of_the_same_versions(name: str) -> None:
    workflow = (WORKFLOWS / name).read_text(encoding="utf-8")
    cache = workflow.partition("      - uses: actions/cache@")[2].partition("      - ")[0]
    assert "          path: .venv\n" in cache
    assert "-${{ steps.python.outputs.python-version }}-" in cache, "the whole version: .venv links to this Python"
    assert "hashFiles('pyproject.toml', 'constraints.txt', '.ci/setup')" in cache


def test_release_is_built_without_a_cache() -> None:
    assert "actions/cache" not in (WORKFLOWS / "release.yml").read_text(encoding="utf-8")


def test_changelog_entries_are_single_short_lines() -> None:
    lines = [line for line in text_of("CHANGELOG.md").splitlines()[3:] if line]
    assert [line for line in lines if len(line) >= MAX_ENTRY_CHARS or not line.startswith(("- ", "#"))] == []
