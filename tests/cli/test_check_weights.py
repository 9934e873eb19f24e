"""The exit code of `deltarunner check-weights`, by the rows of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runner import ProofFigures, ProofTolerance
from runner.cli import app, check_weights
from runner.training import CheckedTensor, TensorVerdict, Way, WeightReport

RIGHT, WRONG, UNSEEN, REFUSED = TensorVerdict
NOTHING_PROVEN = "No row is right, so nothing is proven"


def report_of(*verdicts: TensorVerdict, failure: str = "") -> WeightReport:
    baseline = ProofFigures(95, 1e-6, 4e-6, ProofTolerance(5e-4, 0.05))
    rows = [CheckedTensor(f"tensor {number}", Way.SAME, verdict) for number, verdict in enumerate(verdicts)]
    return WeightReport("tiny", "float32", baseline, rows, failure)


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (report_of(RIGHT, UNSEEN, REFUSED), 0),
        (report_of(RIGHT, WRONG), 7),
        (report_of(WRONG, REFUSED), 7),
        (report_of(REFUSED, REFUSED), 7),
        (report_of(UNSEEN), 7),
        (report_of(), 7),
        (report_of(RIGHT, failure="the engine does not start again"), 7),
    ],
    ids=lambda value: (
        " ".join(row.verdict for row in value.rows) + value.failure if value.__class__ is WeightReport else ""
    ),
)
def test_exit_code_is_7_unless_a_row_is_right_and_none_wrong(
    report: WeightReport, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def reported(*_: Any, **__: Any) -> WeightReport:
        return report

    monkeypatch.setattr(check_weights, "check_weights_async", reported)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        app.app(["check-weights", "tiny", "--json"])
    assert left.value.code == code
    said = capfd.readouterr()
    assert len(json.loads(said.out)["rows"]) == len(report.rows)
    assert (NOTHING_PROVEN in said.err) == {RIGHT, WRONG}.isdisjoint(row.verdict for row in report.rows)
