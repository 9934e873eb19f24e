"""Messages between a driver and its workers, and the interfaces of their transport."""

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
    "AttemptResult",
    "EngineKnown",
    "FleetSnapshot",
    "Heartbeat",
    "Launcher",
    "OtherKnown",
    "PlayingNow",
    "RunSpec",
    "StoredObject",
    "WorkerInfo",
    "WorkerLost",
    "WorkerProcess",
]


class StoredObject(ABC):
    """A reference to a large value that every worker can read."""

    @abstractmethod
    def read(self) -> Any:
        """Return the value, on a worker."""


class WorkerLost(Exception):
    """A worker is gone or unreachable; the message has the reason, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """A worker's description of itself, once its engine runs."""

    node: str
    """The machine, by name or address."""
    pid: int
    places: int
    """Number of requests that the worker's engine runs at once."""
    context: int
    weight_version: str
    adapters: tuple[str, ...]
    """Names of the adapters that the engine has from the start."""
    controlled: bool
    """True if the weights of the engine can be updated."""
    same: Mapping[str, str]
    """Values that must be equal on all workers, such as versions of packages, the fingerprint of the template, and the
    dtype.
    """
    description: Mapping[str, Any]
    """The engine's description for the header of a run file."""
    notes: Sequence[str] = ()
    """Lines for people about how the engine was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKnown:
    """The properties of an engine that a driver needs to start a run; sent by one worker, since they are large."""

    tokenizer: Tokenizer
    template: ChatTemplate
    stop_ids: tuple[int, ...]
    vocabulary: int
    """Number of ids that can be sampled, padding rows included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherKnown:
    """The properties of an engine of `engines=`. Each worker enters its own copy of this engine."""

    ids: EngineKnown | None
    """The properties of an engine of token ids; None for an engine that takes messages."""
    places: int
    context: int
    description: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """The state of the fleet's engines, which a new worker must reach."""

    version: str = ""
    """The version of the weights; "" for the weights with which the engine starts."""
    weights: Any = None
    """A reference to the weights, from `Launcher.put`."""
    proof: WeightProof | None = None
    """The proof of the weights; None if none was given."""
    first_proofs: tuple[WeightProof, ...] = ()
    """The proofs of the weights that the engines start with. The tolerances of later proofs are derived from them."""
    readable: bool = True
    """True if the weights can be read. The weights of a transfer cannot be read again, since no copy is kept."""
    adapters: tuple[tuple[str, int, Any, Mapping[str, Any] | None], ...] = ()
    """Name, number, reference and configuration (or None) of each adapter."""
    asleep: int = 0
    """The sleep level of the fleet; 0 if it is awake."""
    awake: tuple[str, ...] = ()
    """The parts of a sleeping fleet's memory that are awake again."""
    paused: bool = False

    def has_weights_of(self, newer: FleetSnapshot) -> bool:
        """Return True if a worker in this state has the weights, `first_proofs` and adapters of a newer state.

        Weights that cannot be read any more are not required.
        """
        same_weights = self.version == newer.version or not newer.readable
        return same_weights and (self.adapters, self.first_proofs) == (newer.adapters, newer.first_proofs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """A run as a worker receives it."""

    environment: type[Environment[Any]]
    """The class of the environment; each worker constructs its own object."""
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    options: RunOptions
    """The options of the run, without those that only the driver uses, such as tasks and file."""


@dataclass(frozen=True, slots=True)
class AttemptResult:
    trajectories: list[Trajectory]
    """The trajectory of each agent, with an empty task, since the driver has the task."""
    faults: list[str]
    permanent: bool
    """True if another attempt would end in the same way."""


@dataclass(frozen=True, slots=True)
class PlayingNow:
    """An episode in flight, in a heartbeat."""

    number: int
    """The driver's number of the attempt."""
    turns: int
    activity: str
    """The current activity of the episode, such as "setup" or "prompt", for people."""
    since: float
    """Start of `activity`, in the time of the worker's event loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A worker's state, which the driver requests every few seconds."""

    now: float
    """The time of the worker's event loop."""
    stats: EngineStats
    lag: float
    """99th percentile of the delays of the worker's event loop, in seconds."""
    playing: int
    oldest: list[PlayingNow] = field(default_factory=list)
    """The episodes whose activity has lasted longest, the longest first."""


class WorkerProcess(Protocol):
    """The driver's connection to a worker."""

    def send(self, call: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the `Worker` without waiting. The returned answer can be awaited several times.

        Raises (from the answer):
            WorkerLost: the worker is gone.
            DeltarunnerError: raised by the method.
        """

    def kill(self) -> None:
        """Kill the worker and all its processes at once. May be called twice."""


class Launcher(Protocol):
    """An object that starts workers and sends large values to them."""

    async def open(self) -> None:
        """Connect to the machines.

        Raises:
            BadOption: the machines cannot be reached, or are too few.
        """

    async def close(self) -> None:
        """Disconnect, and leave nothing on the machines."""

    def start(self, engine: BaseEngine, number: int) -> WorkerProcess:
        """Start a worker with an engine that was not entered. The worker may wait for a machine.

        Raises:
            BadOption: the engine cannot be sent.
        """

    def pack(self, value: Any, what: str, fix: str) -> Any:
        """Pickle a value for `send`.

        Raises:
            BadOption: the value cannot be pickled; the message begins with `what` and ends with `fix`.
        """

    async def put(self, value: Any) -> Any:
        """Store a large value for all workers, and return a reference."""

    def forget(self, worker: int) -> None:
        """Release the shared resources of a worker that is gone."""

    def forget_run(self, run: int) -> None:
        """Release the shared resources of a run that is over."""
