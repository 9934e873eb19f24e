"""Optional packages: missing, too old, broken, and ones that seed the process-wide random numbers."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

from runner import BadEnvironment
from runner.interop.packages import optional_package


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the source of a package that can be imported."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "foreign_games", raising=False)
    return tmp_path / "foreign_games.py"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (None, "the package foreign_games is not installed: pip install 'deltarunner"),
        ("import no_such_dependency", "foreign_games needs no_such_dependency, which is not installed"),
        ("raise RuntimeError('needs a display')", "fails at import .*needs a display"),
        ("import sys; sys.exit(3)", "fails at import"),
    ],
    ids=["missing", "dependency", "raises", "exits"],
)
def test_a_package_that_cannot_be_imported_is_one_line(package: Path, source: str | None, said: str) -> None:
    if source is not None:
        package.write_text(source)
    with pytest.raises(BadEnvironment, match=said) as caught:
        optional_package("foreign_games", extra="games")
    assert "\n" not in str(caught.value)


def test_an_old_package_is_refused_with_the_version_needed() -> None:
    with pytest.raises(BadEnvironment, match=r"pytest [\d.]+ is installed, and 99.1 or newer is needed: pip install"):
        optional_package("pytest", extra="testing", least="99.1")


def test_a_package_that_seeds_random_numbers_changes_none(package: Path) -> None:
    package.write_text("import random\nrandom.seed(1)\n")
    random.seed(2)
    expected = random.random()
    random.seed(2)
    optional_package("foreign_games", extra="games")
    assert random.random() == expected
