"""Progress of a training: a line per step, a growing curve on a terminal, and a PNG at the end."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
from rich.console import Console
from rich.live import Live
from rich.text import Text

from runner.engines.base import BaseEngine
from runner.errors import BadInput, StorageFailed
from runner.runs.live_stats import as_time
from runner.runs.reporter import START_INTERVAL_SECONDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "HEAD",
    "PHASES",
    "Stopwatch",
    "TrainingProgress",
    "TrainingRecord",
    "TrainingStep",
    "curve",
    "save_curve",
    "started_before",
]

PHASES = ("rollout", "batch", "train", "update")
"""Phases of a step, in order."""

HEAD = (
    f"{'step':>4} {'reward':>7} {'exact':>6} {'groups':>6} {'ids':>6} {'tree':>6} {'gap':>6} "
    + " ".join(f"{phase + ' s':>9}" for phase in PHASES)
    + f" {'seconds':>8}  weights"
)
"""The names of the columns of `TrainingStep.line`."""

_FILE = "training.json"
_CURVE_ROWS = 10
_CURVE_COLUMNS = 60


class Stopwatch:
    """Sums of the seconds of named phases: `with watch("train"): ...`."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - began


@asynccontextmanager
async def started_before(console: Console, engine: BaseEngine) -> AsyncIterator[None]:
    """Enter an engine, and print the phase of its start every ten seconds."""
    began = time.monotonic()

    async def report() -> None:
        while True:
            phase = f": {engine.start_phase}" if engine.start_phase else ""
            console.print(Text(f"{as_time(time.monotonic() - began):>5}  starting the engine{phase}"), soft_wrap=True)
            await anyio.sleep(START_INTERVAL_SECONDS)

    async with AsyncExitStack() as stack:
        async with anyio.create_task_group() as reporting:
            reporting.start_soon(report)
            await stack.enter_async_context(engine)
            reporting.cancel_scope.cancel()
        for note in engine.notes:
            console.print(Text(f"{as_time(time.monotonic() - began):>5}  {note}"), soft_wrap=True)
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """Figures of one step."""

    number: int
    """The number of the step, from 1."""
    reward: float
    """The mean reward of the episodes, as used in training."""
    exact: float
    """The share of right answers, without partial credit."""
    groups: int
    """The number of groups with different rewards. Only these groups are trained on."""
    ids: int
    """The number of sampled ids that were trained on."""
    saving: float | None
    """Number of ids of rows per computed node; None if the trainer computes no trees."""
    gap: float | None
    """Mean difference, in nats, between the trainer's log-probability of an id and the recorded one. It comes from
    rounding, and from ids that older weights sampled. None if the trainer does not compare them.
    """
    seconds: Mapping[str, float]
    """The seconds of each phase."""
    version: str
    """The version of the weights after the step."""

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def line(self, seconds: float) -> str:
        """The step under `HEAD`.

        Args:
            seconds: the time of training so far, including this step.
        """
        phases = " ".join(f"{self.seconds.get(phase, 0.0):>9.1f}" for phase in PHASES)
        saving = "-" if self.saving is None else f"{self.saving:.1f}x"
        gap = "-" if self.gap is None else f"{self.gap:.3f}"
        return (
            f"{self.number:>4} {self.reward:>7.3f} {self.exact:>6.3f} {self.groups:>6} {self.ids:>6} "
            f"{saving:>6} {gap:>6} {phases} {seconds:>8.0f}  {self.version}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """Record of a training run."""

    title: str
    """Model that was trained."""
    steps: tuple[TrainingStep, ...]
    """The steps in order."""
    held_out: Mapping[str, tuple[float, float]]
    """Results on held-out tasks before and after the training, by name."""

    @property
    def seconds(self) -> float:
        """The seconds of training, without the engine's start and without the episodes of held-out tasks."""
        return sum(step.total for step in self.steps)

    @property
    def phases(self) -> dict[str, float]:
        """The seconds of each phase, summed over all steps."""
        return {phase: sum(step.seconds.get(phase, 0.0) for step in self.steps) for phase in PHASES}

    def save(self, folder: Path) -> None:
        """Write `training.json`, and the curve as `training.png`.

        Raises:
            BadInput: there are no steps, or matplotlib is not installed.
            StorageFailed: the folder cannot be written.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / _FILE).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        except OSError as error:
            raise StorageFailed(f"{folder} cannot be written: {error}. Name another folder.") from error
        save_curve(folder / "training.png", self)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the record that `save` wrote."""
        stored = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        return cls(
            title=stored["title"],
            steps=tuple(TrainingStep(**step) for step in stored["steps"]),
            held_out={name: (before, after) for name, (before, after) in stored["held_out"].items()},
        )


@dataclass(slots=True)
class TrainingProgress:
    """Display of the steps so far: `with TrainingProgress(console) as progress: progress.add(step)`."""

    console: Console
    """The console for the steps; a curve is shown only on a terminal."""
    steps: list[TrainingStep] = field(default_factory=list)
    """The steps so far."""
    _live: Live | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def seconds(self) -> float:
        """The seconds of training, summed over all steps."""
        return sum(step.total for step in self.steps)

    def say(self, line: str) -> None:
        """Print a line above the curve."""
        self.console.print(Text(line), soft_wrap=True)

    def add(self, step: TrainingStep) -> None:
        """Show a step."""
        if not self.steps:
            self.say(HEAD)
        self.steps.append(step)
        self.say(step.line(self.seconds))
        if self._live is not None:
            self._live.update(Text(curve([each.exact for each in self.steps])), refresh=True)

    def save(self, folder: Path, *, title: str, held_out: Mapping[str, tuple[float, float]]) -> TrainingRecord:
        """Write the steps and results into a folder, as `TrainingRecord.save` does."""
        record = TrainingRecord(title=title, steps=tuple(self.steps), held_out=held_out)
        record.save(folder)
        return record


def curve(values: Sequence[float], *, rows: int = _CURVE_ROWS, columns: int = _CURVE_COLUMNS) -> str:
    """Return a curve of the last `columns` values, from 0 to 1, as lines of text. The newest value is on the right."""
    heights = [round(min(max(value, 0.0), 1.0) * rows) for value in values[-columns:]]
    lines = []
    for row in range(rows, -1, -1):
        label = f"{row / rows:.1f}" if row % max(rows // 2, 1) == 0 else ""
        marks = "".join("●" if height == row else "·" if height > row else " " for height in heights)
        lines.append(f"{label:>4} │{marks}".rstrip())
    return "\n".join([*lines, "     └" + "─" * max(len(heights), 1)])


def save_curve(path: Path, record: TrainingRecord) -> None:
    """Draw the rewards over the seconds of training, and the seconds of each phase, as a PNG.

    Raises:
        BadInput: matplotlib is not installed, or there are no steps.
        StorageFailed: the file cannot be written.
    """
    if not record.steps:
        raise BadInput("a curve of no steps cannot be drawn: train for at least one.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BadInput(f"a picture of the curve needs matplotlib ({error}): pip install matplotlib") from error
    figure = Figure(figsize=(8, 6), layout="constrained")
    rewards, phases = figure.subplots(2, 1, height_ratios=(2, 1))
    _draw_rewards(rewards, record)
    _draw_phases(phases, record)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise StorageFailed(f"The picture {path} cannot be written: {error}. Name another folder.") from error


def _draw_rewards(axes: Axes, record: TrainingRecord) -> None:
    times = list(itertools.accumulate(step.total for step in record.steps))
    axes.plot(times, [step.exact for step in record.steps], marker="o", markersize=3, label="exact, in training")
    axes.plot(times, [step.reward for step in record.steps], alpha=0.4, label="reward, with partial credit")
    for name, results in record.held_out.items():
        axes.plot([0, times[-1]], results, linestyle="none", marker="D", label=f"held out, {name}")
    axes.set(title=record.title, xlabel="seconds of training", ylabel="mean over episodes", ylim=(0, None))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)


def _draw_phases(axes: Axes, record: TrainingRecord) -> None:
    numbers = [step.number for step in record.steps]
    seconds = [[step.seconds.get(phase, 0.0) for step in record.steps] for phase in PHASES]
    axes.stackplot(numbers, *seconds, labels=PHASES)
    axes.set(xlabel="step", ylabel="seconds")
    axes.legend(loc="upper right", ncols=len(PHASES))
