"""The page about trainers: its code runs."""

from __future__ import annotations

import re

from tests.repository import ROOT

PAGE = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
TITLES: list[str] = re.findall(r"^##+ (.*)", PAGE, flags=re.MULTILINE)
THEIRS = re.compile(r"(?:from|import) (trl|verl|verifiers|skyrl|slime|openrlhf|torchtitan)")
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def test_code_of_the_page_runs_where_no_trainer_is_needed() -> None:
    names: dict[str, object] = {}
    ran = [block for block in BLOCKS if not THEIRS.search(block)]
    for block in ran:
        exec(block, names)
    assert len(ran) == 4  # players, rows, and two kinds of observers
    for block in BLOCKS:
        compile(block, "trainers.md", "exec")


def test_script_beside_the_environment_is_short() -> None:
    (whole,) = [each for each in BLOCKS if "rollout_func(player" in each]
    assert len([line for line in whole.splitlines() if line.strip()]) <= 15  # including its imports
    (asynchronous,) = [each for each in BLOCKS if "RolloutWorker(player" in each]
    code = [line for line in asynchronous.splitlines() if line.strip() and not re.match(r"from|import", line)]
    assert len(code) <= 15


def test_lines_of_the_table_are_those_of_the_sections() -> None:
    counted = 0
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        anchor = re.sub(r"[^\w-]", "", section.splitlines()[0].lower().replace(" ", "-"))
        row = re.search(rf"^\| \[[^\]]*\]\(#{anchor}\) \|[^|]*\|[^|]*\| (\d+) \|", PAGE, flags=re.MULTILINE)
        if blocks := re.findall(r"^```python\n(.*?)^```", section, flags=re.DOTALL | re.MULTILINE) if row else []:
            (block,) = blocks
            code = [line for line in block.splitlines() if line.strip() and not re.match(r"(from|import)\b", line)]
            assert row is not None
            assert (anchor, int(row[1])) == (anchor, len(code))
            counted += 1
    assert counted == 8


def test_each_section_fits_on_one_screen() -> None:
    for section in re.split(r"^##+ ", PAGE, flags=re.MULTILINE)[1:]:
        assert len(section.splitlines()) <= 62, section.splitlines()[0]


def test_every_trainer_of_the_table_has_its_section() -> None:
    table = PAGE[PAGE.index("## Which trainer") : PAGE.index("**run**: the")]
    places = {
        "".join(char for char in title.lower().replace(" ", "-") if char.isalnum() or char == "-") for title in TITLES
    }
    linked = re.findall(r"\]\(#([\w-]+)\)", table)
    assert len(linked) == 11
    assert set(linked) <= places
