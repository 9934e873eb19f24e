"""The wheel and the source archive install into fresh environments, on each Python that is supported."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from shutil import which

import pytest

from tests.repository import ROOT

pytestmark = pytest.mark.whole

PLAYED = """
from runner import ScriptedEngine, run
from weather import Weather

print(run(Weather(), ScriptedEngine("It may be anything."), quiet=True).outcomes)
"""


def said_by(*command: str | Path, cwd: Path = ROOT) -> str:
    """The output of a command; a failure shows it."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def archives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Wheel and source archive of this tree, by their kind."""
    folder = tmp_path_factory.mktemp("dist")
    said_by(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder)
    return {"wheel": next(folder.glob("*.whl")), "sdist": next(folder.glob("*.tar.gz"))}


def interpreters(version: str) -> Iterator[str]:
    """Interpreters of that version on this machine that start."""
    found = [which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for path in filter(None, found):
        if subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            yield path


def interpreter_of(version: str) -> str:
    """An interpreter of that version. A machine without one fails the test, since a skip would look like a success."""
    found = next(interpreters(version), None)
    if found is None:
        pytest.fail(
            f"Python {version} is not on this machine: put python{version} on PATH, or `pyenv install {version}`"
        )
    return found


def test_missing_python_fails_and_names_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(pytest.fail.Exception, match=r"put python3\.12 on PATH, or `pyenv install 3\.12`"):
        interpreter_of("3.12")


def test_metadata_of_both_archives_is_complete(archives: dict[str, Path]) -> None:
    said = said_by(sys.executable, "-m", "twine", "check", "--strict", *archives.values())
    assert len(re.findall("PASSED", said)) == 2


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_first_example_of_the_readme_plays_from_an_archive(
    version: str, kind: str, archives: dict[str, Path], tmp_path: Path
) -> None:
    said_by(interpreter_of(version), "-m", "venv", tmp_path / "venv")
    binaries = tmp_path / "venv" / "bin"
    install = f"deltarunner[testing] @ {archives[kind].as_uri()}"
    said_by(binaries / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", install)
    said_by(binaries / "python", "-m", "pip", "check")

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    first = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)[0]
    (tmp_path / "weather.py").write_text(first, encoding="utf-8")
    (tmp_path / "played.py").write_text(PLAYED, encoding="utf-8")
    said_by(binaries / "deltarunner", "check", "weather.py:Weather", cwd=tmp_path)
    assert "completed" in said_by(binaries / "python", "played.py", cwd=tmp_path)
