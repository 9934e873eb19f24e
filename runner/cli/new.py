"""`deltarunner new`: create a project with an environment, its tests and CI."""

from __future__ import annotations

import builtins
import json
import keyword
import os
import re
import shutil
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self
from urllib.parse import unquote, urlsplit

from rich.text import Text

import runner
from runner.cli.report import make_console, quoted
from runner.environment.loading import ENTRY_POINT_GROUP
from runner.errors import BadOption, StorageFailed

__all__ = ["Names", "new_command", "write_project"]

_WORD: Final = re.compile(r"(?:[A-Z]+(?![a-z])|[A-Z]?[a-z]+)[0-9]*|[0-9]+")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_LEFT_BY_TESTS: Final = frozenset({"__pycache__", ".pytest_cache", ".hypothesis"})


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a project."""

    project: str
    """Name for pip, such as `word-game`."""

    package: str
    """Name for imports and `deltarunner run`, such as `word_game`."""

    environment: str
    """Name of the class, such as `WordGame`."""

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the names for a given name. The names for `word-game`, `word_game` and `WordGame` are equal.

        Raises:
            BadOption: the name is not valid, or is taken.
        """
        if not _NAME.fullmatch(name):
            raise BadOption(
                f"new {name!r:.60}: a name begins with a letter and contains only letters a to z, digits, and single "
                f"hyphens or underscores between them, such as word-game."
            )
        words = [word.lower() for part in re.split("[-_]", name) for word in _WORD.findall(part)]
        names = cls("-".join(words), "_".join(words), "".join(word.capitalize() for word in words))
        taken = _taken(names)
        if taken:
            raise BadOption(f"new {name}: {taken}. Give another name, such as {names.project}-game.")
        return names

    def render(self, text: str) -> str:
        """Return a text of the template project, with its names (`new-environment`, ...) replaced by these names."""
        return (
            text.replace("new_environment", self.package)
            .replace("new-environment", self.project)
            .replace("NewEnvironment", self.environment)
        )


def _taken(names: Names) -> str:
    """The reason why a name is taken, as a clause; "" if all names are free."""
    if keyword.iskeyword(names.package) or keyword.iskeyword(names.environment):
        return f"{names.package} and {names.environment} cannot both be names in Python"
    if names.environment in runner.__all__ or hasattr(builtins, names.environment):
        return f"its class would be called {names.environment}, a name that environments use for something else"
    if names.package in {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)}:
        return "an environment of that name is installed (`deltarunner list`)"
    if names.package in sys.stdlib_module_names or names.package == "tests" or find_spec(names.package) is not None:
        return f"a module {names.package} exists already, and one of the two would hide the other on import"
    return ""


def new_command(name: str, folder: Path | None) -> int:
    """Write the project, print the next commands, and return the exit code 0.

    Raises:
        BadOption: the name or the folder cannot be used.
        StorageFailed: the folder cannot be written.
    """
    names = Names.of(name)
    folder = folder if folder is not None else Path(name)
    write_project(names, folder)
    console = make_console()
    rows = (
        ("project", f"{folder}: {names.environment} in {names.package}/, its tests, pyproject.toml, CI"),
        ("next", f"cd {quoted(folder)}"),
        ("", "pip install -e '.[tests]'"),
        ("", "pytest"),
        ("", f"deltarunner check {names.package}"),
    )
    for label, text in rows:
        console.print(Text.assemble((f"{label:9}", "dim"), text), soft_wrap=True)
    return 0


def write_project(names: Names, folder: Path) -> None:
    """Write the project to a new folder; after an error nothing is left.

    Raises:
        BadOption: the folder exists, or its parent is not an existing folder.
        StorageFailed: the folder cannot be written.
    """
    if os.path.lexists(folder):
        raise BadOption(f"{folder} exists and is not overwritten: give another --folder.")
    if not folder.absolute().parent.is_dir():
        raise BadOption(
            f"{folder.parent}, for {folder.name}, is not an existing folder: create it, or give another --folder."
        )
    # The folder has another name until it is complete.
    unfinished = folder.absolute().with_name(f".{folder.name}.{os.getpid()}")
    try:
        _write(names, unfinished)
        unfinished.rename(folder)
    except OSError as error:
        raise StorageFailed(f"{folder} cannot be written: {error.strerror or error}. Give another --folder.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def installed_from() -> str:
    """The address from which pip can install this deltarunner; "" if it is the package index or unknown."""
    checkout = Path(__file__).parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "runner" / "cli").is_dir():
        return checkout.as_uri()
    try:
        text = distribution("deltarunner").read_text("direct_url.json")
        found = json.loads(text) if text else {}
    except (PackageNotFoundError, ValueError):
        return ""
    url, version = str(found.get("url", "")), found.get("vcs_info")
    if version:
        return f"{version['vcs']}+{url}@{version['commit_id']}"
    path = unquote(urlsplit(url).path)
    return "" if url.startswith("file:") and not os.path.exists(path) else url


def _with_source(pyproject: str, source: str) -> str:
    """Return the pyproject.toml with requirements that install from `source`; unchanged if `source` is ""."""
    if not source:
        return pyproject
    note = "# The installation of deltarunner that created this project."
    if source.startswith("file:"):
        note += ' Other machines and CI do not have this path: give\n# a release, or a repository: "deltarunner @ git+https://...".'
    needed = pyproject.replace('dependencies = ["deltarunner"]', f'{note}\ndependencies = ["deltarunner @ {source}"]')
    needed = needed.replace('["deltarunner[testing]"]', f'["deltarunner[testing] @ {source}"]')
    return needed.replace(
        "[tool.hatch.build.targets.wheel]",
        "[tool.hatch.metadata]\nallow-direct-references = true\n\n[tool.hatch.build.targets.wheel]",
    )


def _write(names: Names, folder: Path) -> None:
    skeleton, source = _skeleton(), installed_from()
    for file in sorted(skeleton.rglob("*")):
        path = file.relative_to(skeleton)
        if file.is_file() and _LEFT_BY_TESTS.isdisjoint(path.parts):
            target = folder / names.render(str(path))
            target.parent.mkdir(parents=True, exist_ok=True)
            text = names.render(file.read_text(encoding="utf-8"))
            text = _with_source(text, source) if path.name == "pyproject.toml" else text
            target.write_text(text, encoding="utf-8")


def _skeleton() -> Path:
    """The folder of the template project: inside the package in a wheel, next to the package in a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "templates" / "environment"
    return inside if inside.is_dir() else package.parent / "templates" / "environment"
