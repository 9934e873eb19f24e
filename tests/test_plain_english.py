"""The check of names and prose finds a fault of each rule, and passes on this code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import old_names, plain_english


def faults(text: str, folder: Path) -> list[tuple[int, str]]:
    path = folder / "module.py"
    path.write_text(text, encoding="utf-8")
    return [(fault.rule, fault.text) for fault in plain_english.faults_of(path)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('"""What a module does."""', 0),
        ('class A:\n    x: int\n    """Whether it is."""', 0),
        ('"""Reads the ids."""', 0),
        ('class A:\n    """Adjusts a price."""', 0),
        ("# What samples.", 0),
        ("x = 1  # whether it samples", 0),
        ("# It goes on.", 1),
        ("# text after the begin of a call", 1),
        ('x = "this is no number"', 1),
        ('x = f"{n} goes on"', 1),
        ('x = f"{n:>{width}} goes " "on"', 1),
        ("x = f\"{n or 'nobody'}\"", 1),
        ("LIMIT_OF_ALL = 3 * 2", 2),
        ("class A:\n    LONGEST_OPEN = 16", 2),
        ("def _tell(): ...", 3),
        ("def send(behind): ...", 3),
        ("news = 1", 3),
        ("class GoesOn: ...", 3),
        ("class _Desk: ...", 3),
        ("self.last_words = ''", 3),
    ],
)
def test_fault_of_each_rule_is_found(text: str, rule: int, folder: Path) -> None:
    assert [found for found, _ in faults(text, folder)] == [rule]


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the number of ids."""',
        '"""Turns a second on one core."""',
        '"""Process a page."""',
        "# the start of one, where the other begins",
        "# There is no engine, and the result is None.",
        "# The episode ends, and the reason is the limit\n# that was reached.",
        "# Which one? The first.",
        'x = f"{told} and {self.behind}"',
        "tell(told)",
        "MAX_IDS = 3\nWAIT_SECONDS = 1.5",
        "DEBUG = True",
        "class Kind(enum.IntEnum):\n    CALL = 2",
    ],
)
def test_plain_text_and_names_pass(text: str, folder: Path) -> None:
    assert faults(text, folder) == []


def test_long_name_of_a_test_is_found(folder: Path) -> None:
    longest = "test_" + "a" * plain_english.MAX_TEST_NAME_CHARS
    (folder / "test_names.py").write_text(f"def {longest}(): ...\n\nasync def {longest}b(): ...\n", encoding="utf-8")
    assert plain_english.long_test_names(folder) == [f"test_names.py: {longest}b"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("test_file_that_is_no_model", True),
        ("test_error_is_told", True),
        ("test_reader_goes_on_after_a_stop", True),
        ("test_somebodys_loop", True),
        ("test_what_is_wrong", True),
        ("test_it_plays", True),
        ("test_error_says_what_is_wrong", True),
        ("test_engine_knows_its_ranks", True),
        ("test_kernel_is_mended", True),
        ("test_workers_get_it_too", True),
        ("test_error_is_reported_so", True),
        ("test_rows_are_read_alike", True),
        ("test_file_is_no_longer_open", False),
        ("test_rows_are_no_more_than_asked", False),
        ("test_here_is_no_model", False),
        ("test_untold_rows_of_what_was_asked", False),
        ("test_item_is_played", False),
        ("test_known_amendment_is_so_far_alike_in_both", False),
    ],
)
def test_name_without_a_subject_or_with_an_unclear_word_is_found(name: str, found: bool, folder: Path) -> None:
    (folder / "test_names.py").write_text(f"class TestIt:\n    async def {name}(self): ...\n", encoding="utf-8")
    assert plain_english.unclear_test_names(folder) == [f"test_names.py: {name}"] * found


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "# A page\n\nIt goes on.\n", 3),
        ("page.md", "The line `x\nsays`\nsays why.\n", 3),
        ("setup", "# The log says why.\n", 1),
        ("page.jinja", "{% if episode is none %}\n<p>The line says how.</p>\n{% endif %}", 2),
    ],
)
def test_avoided_word_of_a_page_is_found(name: str, text: str, line: int, folder: Path) -> None:
    page = folder / name
    page.write_text(text, encoding="utf-8")
    assert [(fault.rule, fault.where) for fault in plain_english.faults_of(page)] == [(1, f"{name}:{line}")]


def test_comment_of_a_page_without_a_subject_is_found(folder: Path) -> None:
    page = folder / "project.toml"
    page.write_text("# Versions, and\n# what needs them.\na = 1  # What needs it.\n", encoding="utf-8")
    assert [(fault.rule, fault.where) for fault in plain_english.faults_of(page)] == [(0, "project.toml:3")]


@pytest.mark.parametrize(
    "name", ["report/templates/parts.jinja", "mkdocs.yml", ".pre-commit-config.yaml", "CITATION.cff"]
)
def test_pages_outside_of_the_docs_are_checked(name: str) -> None:
    assert any(path.as_posix().endswith(f"/{name}") for path in plain_english.files())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# A page\n\nWhat samples.\n", [(0, "page.md:3")]),
        ("Runs end.\n\nWhether they do.\n", [(0, "page.md:3")]),
        ("# A page\n\nRuns end\nWhat samples.\n", []),
        ("# A page\n\nWhat samples?\n", []),
        ("Runs end:\n- What samples.\n1. Tasks\n", [(0, "page.md:2")]),
        ("```\nx\n\nWhat samples.\n```\n", []),
    ],
)
def test_paragraph_without_a_subject_is_found(text: str, found: list[tuple[int, str]], folder: Path) -> None:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    assert [(fault.rule, fault.where) for fault in plain_english.faults_of(page)] == found


@pytest.mark.parametrize(
    ("place", "text", "found"),
    [
        ("runner", '"""The engine knows it."""', [1]),
        ("runner", "# The header says so.", [1]),
        ("runner", 'x = "the engine says"', [1]),
        ("runner", 'x = "I do not know."', []),
        ("runner", '"""Calls `says` again."""', []),
        ("tests", "# The header says so.", []),
        ("tests", "def tell(): ...", []),
    ],
)
def test_personified_code_is_found_in_the_package(place: str, text: str, found: list[int], folder: Path) -> None:
    (folder / place).mkdir()
    assert [rule for rule, _ in faults(text, folder / place)] == found


@pytest.mark.parametrize("module", ["hosting", "news"])
def test_old_name_of_a_module_is_found(module: str) -> None:
    name = f"runner/{module}.py"
    assert [where for where, _ in old_names.unclear_names(ast.parse(""), name)] == [name]


def test_allowed_names_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    places = dict(old_names.ALLOWED_NAMES)
    monkeypatch.setattr(old_names, "ALLOWED_NAMES", {})
    for place in places:
        name, _, identifier = place.partition(": ")
        tree = ast.parse((plain_english.ROOT / name).read_text(encoding="utf-8"))
        texts = [text for _, text in old_names.unclear_names(tree, name)]
        assert any(text.startswith(f"{identifier or Path(name).stem} (") for text in texts), place


def test_classes_that_differ_only_in_an_underscore_are_found(folder: Path) -> None:
    (folder / "public.py").write_text("class Run: ...\nclass Driver: ...\n", encoding="utf-8")
    (folder / "private.py").write_text(
        "'''\nclass Driver: ...\n'''\ndef f():\n    class _Run(Driver): ...\n", encoding="utf-8"
    )
    assert plain_english.repeated_classes(folder) == ["Run"]


@pytest.mark.parametrize(
    ("budget", "printed"),
    [
        ({}, "envs: headless texts, avoided words, constants, names: (0, 1, 0, 0), budget (0, 0, 0, 0)"),
        ({"envs": (0, 1, 0, 0)}, ""),
        ({"envs": (1, 2, 0, 0)}, "envs: lower the budget in tests/plain_english.py from (1, 2, 0, 0) to (0, 1, 0, 0)"),
    ],
    ids=["above", "equal", "below"],
)
def test_count_that_differs_from_the_budget_fails(
    budget: dict[str, tuple[int, ...]],
    printed: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "envs").mkdir()
    (folder / "envs" / "game.py").write_text("# It goes on.\n", encoding="utf-8")
    monkeypatch.setattr(plain_english, "BUDGET", budget)
    monkeypatch.setattr("sys.argv", ["plain_english"])
    assert plain_english.main() == bool(printed)
    assert capsys.readouterr().out.startswith(printed)


@pytest.mark.parametrize(
    ("arguments", "count", "printed", "last"),
    [
        ([], 20, 20, "module.py:20: What it does."),
        ([], 22, 20, "and 2 more; -v shows them"),
        (["-v"], 22, 22, "module.py:22: What it does."),
    ],
    ids=["as many", "too many", "verbose"],
)
def test_places_past_the_limit_need_verbose(
    arguments: list[str],
    count: int,
    printed: int,
    last: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "envs").mkdir()
    (folder / "envs" / "module.py").write_text('"""What it does."""\n' * count, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["plain_english", *arguments, "envs"])
    assert plain_english.main() == 1
    places = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert sum("module.py" in line for line in places) == printed
    assert last in places[-1]


@pytest.mark.whole  # `make test` has run it before
def test_this_code_is_within_its_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["plain_english"])
    assert plain_english.main() == 0, capsys.readouterr().out


def test_unknown_package_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["plain_english", "runner/cluster"])
    with pytest.raises(SystemExit) as left:
        plain_english.main()
    assert left.value.code == 2
    assert "no part of the repository: runner/cluster" in capsys.readouterr().err
