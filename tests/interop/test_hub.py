"""Data sets of the library `datasets`, and mathematics with math-verify, in the lane that installs both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner import BadEnvironment, BadTask, ScriptedEngine, Task, VerifierFailed
from runner.interop import Dataset
from runner.interop.scorers import scorer_of
from runner.testing import play_many_async

ROWS = [{"question": f"What is {n} + {n}?", "gold": 2 * n, "note": "x"} for n in range(20)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder that the library saved, with two splits."""
    import datasets

    parts = {name: datasets.Dataset.from_list(rows) for name, rows in (("train", ROWS), ("test", ROWS[:3]))}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "sums")
    return tmp_path / "sums"


def listed(tasks: Any, **options: Any) -> list[Task]:
    return list(Dataset(tasks, "question", "gold", "number", **options).tasks())


@pytest.mark.anyio
@pytest.mark.package("datasets")
async def test_a_saved_data_set_plays(saved: Path) -> None:
    environment = Dataset(f"hf:{saved}[test]", "question", "gold", "number")
    played = await play_many_async(environment, ScriptedEngine("2"))
    assert sorted((str(each.task.prompt), each.reward) for each in played) == [
        ("What is 0 + 0?", 0.0),
        ("What is 1 + 1?", 1.0),
        ("What is 2 + 2?", 0.0),
    ]


@pytest.mark.package("datasets")
def test_shuffled_rows_of_the_library_keep_their_numbers(saved: Path) -> None:
    plain, first, again = (listed(f"hf:{saved}[train]", shuffle=seed) for seed in (None, 1, 1))
    assert [each.id for each in first] == [each.id for each in again] != [each.id for each in plain]
    assert {each.id for each in first} == {each.id for each in plain}


@pytest.mark.package("datasets")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves its file open
def test_a_folder_of_files_is_a_data_set(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("question,gold\nWhat is 1 + 1?,2\n")
    assert [task.answer for task in listed(f"hf:{tmp_path / 'data'}")] == ["2"]


@pytest.mark.package("datasets")
def test_a_data_set_with_images_is_refused_by_its_row(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features({"question": datasets.Image(), "gold": datasets.Value("int64")})
    row = {"question": {"bytes": b"\x89PNG", "path": None}, "gold": 1}
    datasets.Dataset.from_list([row], features=features).save_to_disk(tmp_path / "images")
    with pytest.raises(BadTask, match="row 1 has an image or sound in 'question'"):
        listed(f"hf:{tmp_path / 'images'}")


@pytest.mark.package("datasets")
@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("hf:{0}", r"give the split after the name; the splits are \[train\], \[test\]"),
        ("hf:{0}[dev]", r"there is no split 'dev'; the splits are \[train\]"),
        ("hf:{0}/gone", "the data set cannot be loaded"),
    ],
    ids=["no split", "unknown split", "missing"],
)
def test_a_missing_data_set_or_split_is_named(
    saved: Path, form: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BadTask, match=said):
        listed(form.format(saved))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadEnvironment, match=r"datasets .*pip install 'deltarunner\[datasets\]'"):
        listed("hf:any")


@pytest.mark.anyio
@pytest.mark.package("math_verify")
@pytest.mark.parametrize(
    ("answer", "text", "expected"),
    [
        ("\\frac{1}{2}", "So it is $0.5$.", 1),
        ("$x^2 + 2x + 1$", "\\boxed{(x+1)^2}", 1),
        ("\\frac{1}{2}", "So it is $\\frac{1}{3}$.", 0),
        ("7", "no idea", 0),
    ],
)
async def test_math_compares_expressions(answer: str, text: str, expected: float) -> None:
    assert await scorer_of("math").score(text, Task("t", "?", answer)) == expected


@pytest.mark.anyio
@pytest.mark.package("math_verify")
async def test_math_that_never_ends_is_a_failure_and_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.interop.scorers.MATH_SECONDS", 2.0)
    scorer = scorer_of("math")
    with pytest.raises(VerifierFailed, match=r"score=math: the scorer was killed: it took over 2 s or too much memory"):
        await scorer.score("$9^{9^{9^{9}}} + x$", Task("t", "?", "$x + 9^{9^{9^{8}}}$"))
    assert await scorer.score("$0.5$", Task("t", "?", "$1/2$")) == 1


@pytest.mark.package("math_verify")
def test_a_math_answer_that_cannot_be_read_is_refused_by_row() -> None:
    rows = [{"question": "?", "answer": "1/2"}, {"question": "??", "answer": "$\\frac{1}{"}]
    said = re.escape("row 2: math-verify cannot read the answer '$\\\\frac{1}{' as a mathematical expression")
    with pytest.raises(BadTask, match=said):
        list(Dataset(rows, prompt="question", answer="answer", score="math").tasks())
