"""`deltarunner new`: the new project passes its own tests in an empty environment, and it writes all files or none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from runner import BadOption, StorageFailed
from runner.cli import new
from runner.cli.app import app
from runner.cli.new import Names, write_project
from tests.repository import ROOT

pytestmark = pytest.mark.sample_functions(2)

SKELETON = ROOT / "templates" / "environment"


def deltarunner(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def files(folder: Path) -> set[str]:
    """The files of a folder, without compiled Python files."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


# --- in an environment of its own


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with deltarunner's wheel. All other packages, including pip, are those of this interpreter."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (packages,) = (folder / "venv").glob("lib/python*/site-packages")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(borrowed)]
    (packages / "borrowed.pth").write_text("\n".join(lines))
    python = folder / "venv" / "bin" / "python"
    pip(python, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT)
    pip(python, "install", "--no-deps", next(folder.glob("deltarunner-*.whl")))
    return python


def pip(python: Path, command: str, *arguments: object) -> None:
    said(python, "-m", "pip", "--disable-pip-version-check", command, "--no-index", "--quiet", *arguments)


def said(*command: object, folder: Path | None = None) -> str:
    """The output of a command, run without environment variables of ours."""
    ours = ("PYTEST_", "PYTHON", "VIRTUAL_ENV", "COV_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [str(word) for word in command], cwd=folder, env=clean, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.whole
def test_new_project_installs_and_passes_its_tests(python: Path, tmp_path: Path) -> None:
    command = python.with_name("deltarunner")
    assert "cd word-game" in said(command, "new", "word-game", folder=tmp_path)
    project = tmp_path / "word-game"
    # With its dependencies: pip may not look elsewhere, so it fails if one is not installed.
    pip(python, "install", "--no-build-isolation", "--editable", f"{project}[tests]")
    tests = said(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", folder=project)
    written = (project / "tests" / "test_word_game.py").read_text()
    passed = re.search(r"^(\d+) passed in", tests, flags=re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= written.count("\ndef test_")
    assert "word_game" in said(command, "list")
    assert said(command, "check", "word_game").endswith("ok\n")


@pytest.mark.whole
def test_wheel_has_project_template_and_no_chat_template(python: Path) -> None:
    found = said(python, "-c", "import runner; print(runner.__file__)", folder=python.parent).strip()
    templates = Path(found).parent / "templates"
    assert ROOT not in templates.parents
    assert files(templates / "environment") == files(SKELETON)
    from runner.tokens import template

    assert set(template._bundled()) == {path.stem for path in templates.glob("*.jinja")}


# --- written files


@pytest.mark.slow
def test_written_project_passes_its_own_tests_without_installation(tmp_path: Path) -> None:
    project = tmp_path / "word-game"
    write_project(Names.of("word-game"), project)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio"],
        cwd=project,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": f"{ROOT}:{project}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"^\d+ passed in", done.stdout, flags=re.MULTILINE)


def test_every_file_carries_the_name_and_none_the_skeletons(tmp_path: Path) -> None:
    write_project(Names.of("word-game"), tmp_path / "out")
    assert files(tmp_path / "out") == {
        ".github/workflows/tests.yml",
        ".gitignore",
        "README.md",
        "pyproject.toml",
        "tests/test_word_game.py",
        "word_game/__init__.py",
    }
    texts = [(tmp_path / "out" / name).read_text() for name in files(tmp_path / "out")]
    assert not [text for text in texts if re.search("new.?environment", text, flags=re.IGNORECASE)]
    project = tomllib.loads((tmp_path / "out" / "pyproject.toml").read_text())["project"]
    assert project["name"] == "word-game"
    assert project["entry-points"]["deltarunner.environments"] == {"word_game": "word_game:WordGame"}


def test_a_project_requires_deltarunner_from_where_it_was_installed(tmp_path: Path) -> None:
    write_project(Names.of("word-game"), tmp_path / "out")
    text = (tmp_path / "out" / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert project["dependencies"] == [f"deltarunner @ {ROOT.as_uri()}"]
    assert project["optional-dependencies"] == {"tests": [f"deltarunner[testing] @ {ROOT.as_uri()}"]}
    assert tomllib.loads(text)["tool"]["hatch"]["metadata"] == {"allow-direct-references": True}
    assert "Other machines and CI do not have this path" in text


@pytest.mark.parametrize(
    ("content", "source"),
    [
        (None, ""),
        ('{"url": "file:///nowhere/deltarunner.whl", "archive_info": {}}', ""),
        ('{"url": "file:///tmp", "dir_info": {}}', "file:///tmp"),
        (
            '{"url": "https://example.org/r.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            "git+https://example.org/r.git@abc",
        ),
        ('{"url": "https://example.org/d.whl", "archive_info": {}}', "https://example.org/d.whl"),
        ("no JSON", ""),
    ],
)
def test_installed_deltarunner_has_the_source_of_its_installation(
    content: str | None, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return content

    monkeypatch.setattr(new, "__file__", str(tmp_path / "runner" / "cli" / "new.py"))
    monkeypatch.setattr(new, "distribution", lambda name: Installed())
    assert new.installed_from() == source
    written = new._with_source((SKELETON / "pyproject.toml").read_text(), source)
    required = tomllib.loads(written)["project"]["dependencies"]
    assert required == ([f"deltarunner @ {source}"] if source else ["deltarunner"])


def test_bytecode_cache_of_the_skeleton_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skeleton = tmp_path / "skeleton"
    (skeleton / "__pycache__").mkdir(parents=True)
    (skeleton / "__pycache__" / "one.pyc").write_bytes(b"\xff")
    (skeleton / "README.md").write_text("NewEnvironment")
    monkeypatch.setattr(new, "_skeleton", lambda: skeleton)
    write_project(Names.of("chess"), tmp_path / "out")
    assert files(tmp_path / "out") == {"README.md"}
    assert (tmp_path / "out" / "README.md").read_text() == "Chess"


@pytest.mark.parametrize(
    "name", ["word-game", "word_game", "WordGame", "wordGame", "WORD-GAME", "Word-game"], ids=lambda name: str(name)
)
def test_names_do_not_depend_on_the_spelling_of_the_given_one(name: str) -> None:
    assert Names.of(name) == Names("word-game", "word_game", "WordGame")


def test_digits_belong_to_the_word_before_them() -> None:
    assert Names.of("chess960v2") == Names("chess960-v2", "chess960_v2", "Chess960V2")


# --- refusals


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a name begins with a letter"),
        ("2048", "a name begins with a letter"),
        ("word game", "a name begins with a letter"),
        ("word--game", "a name begins with a letter"),
        ("../word", "a name begins with a letter"),
        ("größe", "a name begins with a letter"),
        ("word-game\n", "a name begins with a letter"),
        ("class", "class and Class cannot both be names in Python"),
        ("none", "none and None cannot both be names in Python"),
        ("task", "its class would be called Task"),
        ("environment", "its class would be called Environment"),
        ("exception", "its class would be called Exception"),
        ("calculator", "an environment of that name is installed"),
        ("random", "a module random exists already"),
        ("runner", "a module runner exists already"),
        ("pytest", "a module pytest exists already"),
        ("tests", "a module tests exists already"),
    ],
)
def test_invalid_name_is_refused_with_the_reason(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=re.escape(message)) as refused:
        Names.of(name)
    assert len(str(refused.value).splitlines()) == 1
    assert deltarunner("new", name, "--folder", tmp_path / "out").exit_code == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("there", ["a file", "an empty folder", "a folder", "a link to nowhere"])
def test_existing_target_is_refused_and_not_overwritten(there: str, tmp_path: Path) -> None:
    target = tmp_path / "word-game"
    if there == "a file":
        target.write_text("mine")
    elif there == "a link to nowhere":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
    if there == "a folder":
        (target / "mine.txt").write_text("mine")
    before = files(tmp_path)
    with pytest.raises(BadOption, match="exists and is not overwritten: give another --folder"):
        write_project(Names.of("word-game"), target)
    assert files(tmp_path) == before
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_in_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"nowhere, for word-game, is not an existing folder: create it"):
        write_project(Names.of("word-game"), tmp_path / "nowhere" / "word-game")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "raised"),
    [(OSError(28, "No space left on device"), StorageFailed), (KeyboardInterrupt(), KeyboardInterrupt)],
)
def test_write_that_fails_at_any_file_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: type[BaseException]
) -> None:
    whole = len(files(SKELETON))
    write = Path.write_text
    for allowed in range(4):
        left = iter([None] * allowed)

        def until_full(path: Path, *arguments: str, left: object = left, **options: str) -> int:
            if next(left, 0) == 0:  # type: ignore[call-overload]  # an iterator over the remaining values
                raise error
            return write(path, *arguments, **options)

        monkeypatch.setattr(Path, "write_text", until_full)
        with pytest.raises(raised):
            write_project(Names.of("word-game"), tmp_path / "word-game")
        monkeypatch.undo()
        assert not list(tmp_path.iterdir())
    assert whole > 4


def test_folder_created_during_the_write_is_left_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "word-game"
    write = new._write

    def slowly(names: Names, folder: Path) -> None:
        write(names, folder)
        target.mkdir()
        (target / "mine.txt").write_text("mine")

    monkeypatch.setattr(new, "_write", slowly)
    with pytest.raises(StorageFailed, match=r"word-game cannot be written: .* not empty\. Give another"):
        write_project(Names.of("word-game"), target)
    assert files(tmp_path) == {"word-game/mine.txt"}


def test_a_relative_folder_may_be_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "games").mkdir()
    monkeypatch.chdir(tmp_path)
    result = deltarunner("new", "WordGame", "--folder", "games/my words")
    assert result.exit_code == 0, result.output
    assert "cd 'games/my words'" in result.output
    assert (tmp_path / "games" / "my words" / "word_game" / "__init__.py").is_file()


def test_nothing_of_the_skeleton_names_this_machine() -> None:
    texts = "".join((SKELETON / name).read_text() for name in files(SKELETON))
    assert str(ROOT) not in texts
    assert sys.prefix not in texts
