"""What a driver and its workers tell one another, and what each of them asks of whatever carries it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from runner.engines.base import BaseEngine, EngineStats
from runner.engines.proofs import WeightProof
from runner.environment.environment import Environment
from runner.runs.options import RunOptions
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import Tokenizer
from runner.trajectory import Trajectory

__all__ = [
    "Catch",
    "EngineKnown",
    "Joined",
    "Launcher",
    "OtherKnown",
    "Played",
    "PlayingNow",
    "Pulse",
    "RunSent",
    "Stored",
    "WorkerLost",
    "WorkerProcess",
]


class Stored(ABC):
    """Stands for a large value that was put where every worker can read it."""

    @abstractmethod
    def read(self) -> Any:
        """The value, on a worker."""


class WorkerLost(Exception):
    """A worker is gone, or nobody can reach it; the message says why, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What a worker says of itself once its engine runs."""

    node: str
    """The machine, by name or address."""
    pid: int
    places: int
    """Requests that its engine runs at once."""
    context: int
    weight_version: str
    adapters: tuple[str, ...]
    """The adapters that its engine has from the beginning."""
    controlled: bool
    """Whether the weights of its engine can be exchanged."""
    same: Mapping[str, str]
    """What has to be the same on all workers: versions of packages, fingerprints of vocabulary and template, dtype."""
    description: Mapping[str, Any]
    """What a run's header keeps of the engine."""
    notes: Sequence[str] = ()
    """Lines for people about how the engine was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKnown:
    """What the driver has to know of the engine to start a run; asked of one worker, since vocabularies are large."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: tuple[int, ...]
    vocabulary: int
    """Ids that can be sampled, padding rows included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKnown:
    """The same of an engine that a run's workers enter for some agent."""

    ids: EngineKnown | None
    """None for one that takes messages."""
    places: int
    context: int
    description: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catch:
    """What brings a worker that joins to where the others are."""

    version: str = ""
    """The version of the weights; "" for those that its engine starts with."""
    weights: Any = None
    """Where they are: what `Launcher.put` gave."""
    proof: WeightProof | None = None
    """The proof that came with them; None for none."""
    readable: bool = True
    """Whether they are anywhere: what a transfer has brought nobody keeps."""
    adapters: tuple[tuple[str, int, Any, Mapping[str, Any] | None], ...] = ()
    """Each adapter with its number, where it is, and its configuration."""
    asleep: int = 0
    """How deep the fleet sleeps; 0 where it does not."""
    awake: tuple[str, ...] = ()
    """The parts of a sleeping fleet's memory that were taken back already."""
    paused: bool = False

    def has_what(self, newer: Catch) -> bool:
        """Whether a worker that was brought here has the weights and adapters of a newer state."""
        same_weights = self.version == newer.version or not newer.readable
        return same_weights and self.adapters == newer.adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSent:
    """A run, as a worker gets it."""

    environment: type[Environment[Any]]
    """The class; each worker constructs an object of its own."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    """What it was constructed with."""
    options: RunOptions
    """Without tasks and file, which are the driver's."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of an attempt at an episode."""

    trajectories: list[Trajectory]
    """Those of its agents. Their tasks are left out: whoever asked has them."""
    faults: list[str]
    permanent: bool
    """Whether it would end the same if it were played again."""


@dataclass(frozen=True, slots=True)
class PlayingNow:
    """An episode in flight, as of one pulse."""

    number: int
    """The driver's number for the attempt."""
    turns: int
    activity: str
    """What it waits for."""
    since: float
    """When it began to wait for that, in the time of its worker's event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulse:
    """What a worker says of itself every second."""

    now: float
    """The time of its event loop."""
    stats: EngineStats
    lag: float
    """How late its event loop is, 99th percentile, in seconds."""
    playing: int
    oldest: list[PlayingNow] = field(default_factory=list)
    """The episodes that have waited longest for one thing, the longest first."""


class WorkerProcess(Protocol):
    """A worker as its driver reaches it."""

    def send(self, call: str, *arguments: Any) -> Awaitable[Any]:
        """Have a method of the `Worker` called, without waiting; the answer may be awaited, also again.

        Raises (from the answer):
            WorkerLost: the worker is gone.
            DeltarunnerError: what the method raised.
        """

    def kill(self) -> None:
        """End the worker and all that it started, without asking; twice is allowed."""


class Launcher(Protocol):
    """Starts workers somewhere, and carries what is large to them."""

    async def open(self) -> None:
        """Reach the machines.

        Raises:
            BadOption: they cannot be reached, or are too few.
        """

    async def close(self) -> None:
        """Leave the machines, and nothing on them."""

    def start(self, engine: BaseEngine, number: int) -> WorkerProcess:
        """A new worker around an engine that nobody entered; it may wait for a machine.

        Raises:
            BadOption: the engine cannot be sent.
        """

    def pack(self, value: Any, what: str, fix: str) -> Any:
        """A value in the form in which `send` takes it.

        Raises:
            BadOption: it cannot be pickled; the message begins with `what` and ends with `fix`.
        """

    async def put(self, value: Any) -> Any:
        """A large value, to be read by every worker; gives what stands for it."""

    def forget(self, worker: int) -> None:
        """A worker is gone: give back what it held of what all workers share."""

    def forget_run(self, run: int) -> None:
        """A run is over: give back what it held of what all workers share."""
