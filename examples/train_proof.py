"""Proof of train_grpo.py: train the demo model with three seeds, and print a table of the results.

Run it with: make train-proof
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from examples.progress import PHASES, TrainingRecord

GOAL, MINUTES = 0.95, 5.0


def proved(record: TrainingRecord) -> bool:
    """True if the share of right greedy answers to held-out questions reaches `GOAL` within `MINUTES`."""
    return record.held_out["greedy"][1] >= GOAL and record.seconds <= 60 * MINUTES


def table(records: Mapping[int, TrainingRecord]) -> str:
    """Return a table of the seeds in Markdown. `time` is the time of training, in seconds."""
    names = list(next(iter(records.values())).held_out)
    head = ["seed", *names, "steps", "time", *PHASES, "0.95 in 5 minutes"]
    return "\n".join(map(_line, [head, ["---"] * len(head), *(_cells(*each) for each in records.items())]))


def _cells(seed: int, record: TrainingRecord) -> list[str]:
    results = [f"{before:.3f} → {after:.3f}" for before, after in record.held_out.values()]
    seconds = [f"{record.seconds:.0f}", *(f"{record.phases[phase]:.0f}" for phase in PHASES)]
    return [str(seed), *results, str(len(record.steps)), *seconds, "yes" if proved(record) else "no"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def trained(seed: int, folder: Path, options: list[str]) -> TrainingRecord:
    """Train with this seed in a separate process."""
    command = [sys.executable, "-m", "examples.train_grpo", "--seed", str(seed), "--out", str(folder), *options]
    subprocess.run(command, check=True)
    return TrainingRecord.load(folder)


def main(seeds: int = 3, minutes: float = MINUTES, overlap: bool = False, out: Path = Path("runs/train-proof")) -> None:
    """Train with each seed, and print the table; exit code 1 if a seed did not learn enough."""
    options = ["--minutes", str(minutes), *(["--overlap"] if overlap else [])]
    records = {seed: trained(seed, out / f"seed-{seed}", options) for seed in range(seeds)}
    text = table(records)
    (out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    raise typer.Exit(not all(map(proved, records.values())))


if __name__ == "__main__":
    typer.run(main)
