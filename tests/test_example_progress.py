"""Display of training: lines, a curve, an image, and reading the log back."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from examples.progress import HEAD, PHASES, Stopwatch, TrainingProgress, TrainingRecord, TrainingStep, curve
from runner.errors import BadInput, StorageFailed


def step(number: int, exact: float) -> TrainingStep:
    return TrainingStep(
        number=number,
        reward=exact + 0.2,
        exact=exact,
        groups=7,
        ids=1987,
        saving=6.01,
        gap=0.01,
        seconds={"rollout": 3.0, "batch": 0.5, "train": 5.0, "update": 0.5},
        version=str(number),
    )


def shown(*, terminal: bool) -> str:
    output = io.StringIO()
    with TrainingProgress(Console(file=output, width=120, force_terminal=terminal, color_system=None)) as progress:
        progress.add(step(1, 0.25))
        progress.add(step(2, 0.75))
    return output.getvalue()


def test_each_step_is_one_line_under_the_names_of_its_columns() -> None:
    lines = shown(terminal=False).splitlines()
    assert lines[0] == HEAD
    assert len(lines) == 3
    assert " ".join(lines[2].split()) == "2 0.950 0.750 7 1987 6.0x 0.010 3.0 0.5 5.0 0.5 18 2"
    assert len(lines[1]) < 120


def test_figures_that_a_trainer_does_not_have_are_not_shown() -> None:
    line = dataclasses.replace(step(1, 0.5), saving=None, gap=None).line(9.0)
    assert line.split()[5:8] == ["-", "-", "3.0"]
    assert len(line) == len(step(1, 0.5).line(9.0))


def test_a_curve_is_drawn_on_a_terminal_only() -> None:
    assert "●" in shown(terminal=True)
    assert "●" not in shown(terminal=False)


def test_the_curve_has_a_point_for_each_value_at_its_height() -> None:
    assert curve([0.0, 0.5, 1.0, 7.0], rows=4).splitlines() == [
        " 1.0 │  ●●",
        "     │  ··",
        " 0.5 │ ●··",
        "     │ ···",
        " 0.0 │●···",
        "     └────",
    ]


def test_the_curve_shows_the_last_values_where_there_are_many() -> None:
    assert curve([0.0] * 50 + [1.0] * 5, rows=1, columns=5).splitlines()[0] == " 1.0 │●●●●●"


def test_a_stopwatch_adds_up_each_phase_also_when_it_fails() -> None:
    watch = Stopwatch()
    with watch("train"):
        pass
    once = watch.seconds["train"]
    with pytest.raises(ZeroDivisionError), watch("train"):
        1 / 0  # noqa: B018  # any error
    assert watch.seconds["train"] > once > 0
    assert watch.seconds["rollout"] == 0
    assert tuple(watch.seconds) == PHASES


def test_a_record_comes_back_as_it_was_saved_with_a_picture_beside_it(tmp_path: Path) -> None:
    record = TrainingRecord(title="a title", steps=(step(1, 0.25), step(2, 0.75)), held_out={"greedy": (0.5, 0.9)})
    record.save(tmp_path / "new")
    assert TrainingRecord.load(tmp_path / "new") == record
    assert (tmp_path / "new" / "training.png").read_bytes().startswith(b"\x89PNG")
    assert record.seconds == 18
    assert record.phases == {"rollout": 6, "batch": 1, "train": 10, "update": 1}


def test_a_record_without_steps_has_no_curve(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no steps"):
        TrainingRecord(title="", steps=(), held_out={}).save(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(StorageFailed, match=r"file.*cannot be written"):
        TrainingRecord(title="", steps=(step(1, 1.0),), held_out={}).save(tmp_path / "file")
