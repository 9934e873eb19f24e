"""Environments by name, and settings as text."""

import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest

from envs.calculator import Calculator
from runner import BadEnvironment, BadOption, Environment
from runner.environment.loading import bundled_environments, construct, find_environment, short_name
from tests.repository import ROOT

MINIMAL = """
from runner import Environment, reward

class {name}(Environment):
    @reward
    def right(self):
        return True
"""


class Colour(Enum):
    RED = "red"


class Settable(Environment):
    def __init__(  # type: ignore[no-untyped-def]  # an author without hints
        self,
        count: int = 1,
        share: float = 0.5,
        strict: bool = False,
        name: str = "",
        mode: Literal["a", "b"] = "a",
        sizes: list[int] | None = None,
        colour: Colour = Colour.RED,
        guessed=3,  # noqa: ANN001
        **others: Any,
    ) -> None:
        pass


class Demanding(Environment):
    def __init__(self, index: str, size: int = 3) -> None:
        if size < 0:
            raise ValueError("size is negative")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder. Modules that a test imports from it are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - before:
        del sys.modules[name]
    sys.modules.update(before)


def test_a_bundled_name_is_found_and_described() -> None:
    assert find_environment("calculator") is Calculator
    described = {bundled.name: bundled for bundled in bundled_environments()}
    assert described["calculator"].usable
    assert described["calculator"].description.startswith("Answer questions")
    assert described["calculator"].settings.startswith("Calculator(questions=1000, ")


@pytest.mark.parametrize("name", ["envs.calculator:Calculator", "envs/calculator.py:Calculator", "envs/calculator.py"])
def test_a_module_and_a_file_give_the_same_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert find_environment(name) is Calculator
    assert short_name(name).lower() == "calculator"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("envs.calculator", "calculator"),
        ("package.module", "module"),
        ("folder.with.dots/game.v2.py", "game.v2"),
        ("harbor:data/tasks", "tasks"),
        ("calculator", "calculator"),
    ],
)
def test_short_name_is_the_last_part_of_a_name(name: str, short: str) -> None:
    assert short_name(name) == short


def test_a_file_may_import_its_neighbours(folder: Path) -> None:
    # A unique name, since another test's module may still be loaded.
    (folder / "neighbour_of_lone.py").write_text("WORD = 'near'")
    (folder / "lone_environment_file.py").write_text("import neighbour_of_lone\n" + MINIMAL.format(name="Mine"))
    assert find_environment("lone_environment_file.py:Mine").__module__ == "lone_environment_file"


def test_a_file_may_be_called_as_a_module_that_is_loaded(folder: Path) -> None:
    (folder / "json.py").write_text(MINIMAL.format(name="Mine"))
    assert find_environment("json.py:Mine").__name__ == "Mine"


def test_an_authors_own_envs_folder_hides_no_bundled_environment(folder: Path) -> None:
    (folder / "envs").mkdir()
    (folder / "envs" / "__init__.py").write_text("")
    for name in [name for name in sys.modules if name.partition(".")[0] == "envs"]:
        del sys.modules[name]
    assert find_environment("calculator").__name__ == "Calculator"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("calculater", "Did you mean 'calculator'"),
        ("nowhere", "Bundled: .*calculator, .*guess_number, .*program, reasoning"),
        ("nowhere.py:Mine", "'nowhere.py' is not an existing file"),
        ("no_such_module:Mine", "the module 'no_such_module' is neither installed"),
        ("envs.calculator:Mine", "Mine does not exist; envs.calculator has Calculator"),
        ("runner.tasks:Task", "is not a subclass of runner.Environment"),
        ("two.py", "two has One, Two"),
        ("broken.py:Mine", "ZeroDivisionError: division by zero .*broken.py:1"),
        ("importing.py:Mine", "No module named 'not_installed'"),
        ("wrong.py:Mine", "step: wrong signature"),
    ],
)
def test_environment_that_does_not_load_is_refused_with_its_cause(folder: Path, name: str, message: str) -> None:
    (folder / "two.py").write_text(MINIMAL.format(name="One") + MINIMAL.format(name="Two"))
    (folder / "broken.py").write_text("1 / 0")
    (folder / "importing.py").write_text("import not_installed")
    (folder / "wrong.py").write_text(MINIMAL.format(name="Mine") + "    def step(self): return None\n")
    with pytest.raises(BadEnvironment, match=message):
        find_environment(name)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("count=20", 20),
        ("share=1e-3", 0.001),
        ("strict=true", True),
        ("name=20", "20"),
        ("mode=b", "b"),
        ("sizes=[1, 2]", [1, 2]),
        ("sizes=null", None),
        ("colour=red", Colour.RED),
        ("guessed=4", 4),
        ("unknown=7", 7),
        ("unknown=seven", "seven"),
    ],
)
def test_a_setting_is_read_by_the_type_of_its_parameter(setting: str, value: object) -> None:
    name, _, text = setting.partition("=")
    arguments = construct(Settable, {name: text}).construction()
    assert arguments.get(name, arguments["others"].get(name)) == value


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"index": "x", "size": "many"}, "--set size=many: Demanding takes int"),
        ({"index": "x", "sise": "3"}, "Did you mean 'size'"),
        ({}, "needs index: give --set index=VALUE"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(settings: dict[str, str], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        construct(Demanding, settings)


def test_a_constructor_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(
        BadEnvironment, match=r"Demanding\(index='x', size=-1\): ValueError: size is negative .*test_loading"
    ):
        construct(Demanding, {"index": "x", "size": "-1"})
