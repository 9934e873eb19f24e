"""The stages of `.ci/setup`: the installs of each stage, and the ones that it skips. Nothing is installed here."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.repository import ROOT

PYTHON = """#!/bin/sh
# Stands for the interpreter of an environment: writes down what is installed.
installed=${0%/bin/python}/installed
case "$*" in
    *"pip install"*) echo "$*" | sed 's/.*--editable //' >>"$installed" ;;
    *demo_model*) echo "demo model" >>"$installed" ;;
esac
"""
NEWEST = "build/constraints"

CONSTRAINT = " --constraint constraints.txt"


class Project:
    """A copy of the project's set-up, with an interpreter that installs nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / ".ci").mkdir()
        shutil.copy(ROOT / ".ci" / "setup", folder / ".ci")
        (folder / "pyproject.toml").write_text("one\n")
        (folder / "constraints.txt").write_text("numpy==2\n")
        for environment in (".venv", NEWEST):
            python = folder / environment / "bin" / "python"
            python.parent.mkdir(parents=True)
            python.write_text(PYTHON)
            python.chmod(0o755)
            (folder / environment / ".setup").mkdir()

    def setup(self, *arguments: str, environment: str = ".venv") -> list[str]:
        """Run the set-up, and return the lines of what it would install in an environment."""
        installed = self.folder / environment / "installed"
        installed.unlink(missing_ok=True)
        self.done = subprocess.run(
            [self.folder / ".ci" / "setup", *arguments], capture_output=True, text=True, check=False, timeout=600
        )
        lines = installed.read_text().splitlines() if installed.exists() else []
        self.constrained = any(CONSTRAINT in line for line in lines)
        return [line.removesuffix(CONSTRAINT) for line in lines]


def commands_of(*target: str) -> str:
    """The commands of a target of the Makefile, which are not run."""
    environment = {**os.environ, "MAKEFLAGS": ""}
    return subprocess.run(
        ["make", "-n", *target], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize(
    ("stage", "extras"),
    [("run", ".[{}]"), ("train", ".[{},training]"), ("all", ".[{},dev]"), ("", ".[{},dev]")],
    ids=["run", "train", "all", "by default"],
)
@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_each_stage_installs_its_extras_and_the_demo_model_once(
    engine: str, stage: str, extras: str, project: Project
) -> None:
    arguments = [engine, *([stage] if stage else [])]
    assert project.setup(*arguments) == [extras.format(engine), "demo model"]
    assert project.done.returncode == 0, project.done.stderr
    assert project.setup(*arguments) == []


def test_a_larger_stage_after_a_smaller_one_adds_what_is_missing(project: Project) -> None:
    assert project.setup("cpu", "run") == [".[cpu]", "demo model"]
    assert project.setup("cpu", "train") == [".[cpu,training]"]
    assert project.setup("cpu", "all") == [".[cpu,dev]"]
    for stage in ("run", "train", "all"):
        assert project.setup("cpu", stage) == []


def test_a_smaller_stage_after_a_larger_one_installs_nothing(project: Project) -> None:
    project.setup("cpu", "all")
    assert project.setup("cpu", "train") == project.setup("cpu", "run") == []


@pytest.mark.parametrize(("engine", "constrained"), [("cpu", True), ("gpu", False)])
def test_setup_for_cpus_installs_the_versions_of_constraints(engine: str, constrained: bool, project: Project) -> None:
    project.setup(engine, "run")
    assert project.constrained is constrained


def test_newest_versions_are_installed_in_an_environment_of_their_own(project: Project) -> None:
    assert project.setup("cpu", "newest", environment=NEWEST) == [".[cpu,dev]"]
    assert not project.constrained
    assert not (project.folder / ".venv" / "installed").exists()


@pytest.mark.parametrize("file", ["pyproject.toml", "constraints.txt"])
def test_changed_dependencies_are_installed_by_the_requested_stage(file: str, project: Project) -> None:
    project.setup("cpu", "all")
    (project.folder / file).write_text("another\n")
    assert project.setup("cpu", "run") == [".[cpu]"]
    assert project.setup("cpu", "run") == []
    assert project.setup("cpu", "all") == [".[cpu,dev]"]


def test_an_installation_that_fails_leaves_no_stamp(project: Project) -> None:
    python = project.folder / ".venv" / "bin" / "python"
    python.write_text(PYTHON.replace("case", 'case "$*" in *"pip install"*) exit 1 ;; esac\ncase'))
    project.setup("cpu", "run")
    assert project.done.returncode != 0
    python.write_text(PYTHON)
    assert project.setup("cpu", "run") == [".[cpu]", "demo model"]


@pytest.mark.skipif(shutil.which("flock") is None, reason="the system has no flock command")
def test_second_setup_of_a_checkout_waits_for_the_first(project: Project) -> None:
    first = os.open(project.folder, os.O_RDONLY)
    fcntl.flock(first, fcntl.LOCK_EX)
    command = [str(project.folder / ".ci" / "setup"), "cpu", "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        assert "another set-up of this checkout runs; waiting for it" in second.stdout.readline()
        assert not (project.folder / ".venv" / "installed").exists()
        os.close(first)
        assert second.wait(600) == 0
    assert (project.folder / ".venv" / "installed").exists()


@pytest.mark.parametrize("stage", ["run", "train", "all"])
def test_engines_for_two_devices_are_refused_by_any_stage(stage: str, project: Project) -> None:
    project.setup("gpu", stage)
    assert project.setup("cpu", "run") == []
    assert "vLLM for another device (gpu)" in project.done.stderr
    assert project.done.returncode != 0


def test_environment_of_a_removed_python_is_made_again(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.setup("cpu", "run")
    python = project.folder / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to(project.folder / "removed" / "python3.11")
    (project.folder / "interpreter").write_text(PYTHON)
    other = project.folder / "other-python"
    # As `python -m venv`, it does not replace a broken link.
    other.write_text(
        '#!/bin/sh\n[ "$1 $2" != "-m venv" ] || { [ ! -L "$3/bin/python" ] && cp interpreter "$3/bin/python"; }\n'
    )
    for program in (other, project.folder / "interpreter"):
        program.chmod(0o755)
    monkeypatch.setenv("PYTHON", str(other))
    assert project.setup("cpu", "run") == [".[cpu]", "demo model"], project.done.stderr


def test_an_unknown_stage_is_refused_by_name(project: Project) -> None:
    assert project.setup("cpu", "some") == []
    assert "there is no stage 'some': run, train, all or newest" in project.done.stderr


def test_make_asks_for_the_stage_that_each_target_needs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    needs = dict(re.findall(r"^([\w-]+): (setup[\w-]*)", makefile, flags=re.MULTILINE))
    assert needs["run"] == "setup-run"
    assert needs["train"] == needs["train-proof"] == "setup-train"
    assert {needs[name] for name in ("check", "test-quick", "test-clients", "bench", "docs")} == {"setup"}
    assert ".ci/setup gpu run" in commands_of("run", "ENGINE=gpu")


def test_make_constraints_writes_the_newest_versions() -> None:
    commands = commands_of("constraints")
    assert ".ci/setup cpu newest" in commands
    assert f"{NEWEST}/bin/python -m pip freeze" in commands
    assert ".venv/" not in commands
