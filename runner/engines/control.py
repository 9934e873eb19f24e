"""What state an engine is in for its trainer, and the moves between states: one at a time, and nothing by half.

The calls that a trainer makes are in `controllable`; how one kind of engine makes a move says its `EngineDriver`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import anyio

from runner.concurrency.cancellation import to_its_end
from runner.concurrency.clocks import Standstill
from runner.engines.adapters import Adapters, base_and_adapter
from runner.engines.gate import AdmissionGate
from runner.errors import BadControl, BadOption

__all__ = ["SLEEP_TAGS", "EngineControl", "EngineDriver", "EngineState", "PauseMode", "WeightUpdate"]

UNDO_SECONDS = 10.0
SLEEP_TAGS = ("weights", "kv_cache")
"""The parts of an engine's memory that can be woken one by one."""


class PauseMode(enum.StrEnum):
    """What becomes of the turns that are being sampled when an engine pauses."""

    WAIT = "wait"
    """The turns are sampled to their end first."""
    KEEP = "keep"
    """The turns stand still, and go on from where they were."""
    ABORT = "abort"
    """The turns are cut; a run samples them anew, from the same prompts."""

    @classmethod
    def of(cls, mode: PauseMode | str) -> PauseMode:
        """The mode of that name.

        Raises:
            BadOption: there is none.
        """
        if mode not in list(cls):
            raise BadOption(f"mode={mode!r}: give one of {', '.join(cls)}.")
        return cls(mode)


class EngineState(enum.StrEnum):
    """What an engine is doing for its trainer."""

    RUNNING = "running"
    """The engine samples."""
    PAUSED = "paused"
    """The engine stands still until `resume`."""
    UPDATING = "updating"
    """The engine's weights are being exchanged."""
    ASLEEP = "asleep"
    """The engine's memory was given up, or part of it."""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What an update of the weights did, and how long each part of it took."""

    version: str
    """The version of the new weights, which sample from now on."""
    check_seconds: float
    """How long comparing the new weights with the model took; the engine went on meanwhile."""
    pause_seconds: float
    """How long it took until the engine stood still."""
    load_seconds: float
    """How long it took to load the weights, to stamp the version and to forget the cached prompts."""


class EngineDriver(ABC):
    """How one kind of engine makes the moves; each is called with the engine in the right state, one at a time.

    Raises:
        EngineDead: new weights, a sleep or a wake failed half way; the engine can answer nothing any more.
    """

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stand still; what was being sampled is ended or kept, by `mode`."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on; also after a `pause` that failed or was cancelled half way."""

    @abstractmethod
    async def check_weights(self, source: Any) -> Any:
        """Compare new weights with the model while the engine goes on; gives what `load_weights` needs of them.

        Raises:
            BadWeights: they do not fit; names the tensor.
        """

    @abstractmethod
    async def load_weights(self, checked: Any, version: str) -> None:
        """Exchange the weights, stamp `version` on what is sampled from now on, forget every cached prompt."""

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Forget every cached prompt, those of running requests included."""

    def check_sleep(self, level: int) -> None:  # noqa: B027  # one that can always sleep has nothing to say
        """Look whether `sleep` is possible, before anything is touched.

        Raises:
            BadControl: it is not; says why.
        """

    @abstractmethod
    async def sleep(self, level: int) -> None:
        """Give memory up: 1 keeps the weights elsewhere, 2 discards them."""

    @abstractmethod
    async def wake(self, tags: Collection[str]) -> None:
        """Take the memory of these parts back, and stand still."""

    @abstractmethod
    async def profile(self, *, on: bool) -> None:
        """Start or stop the profiler.

        Raises:
            BadControl: the engine has none, or was started without; says how to start it.
        """

    async def devices(self) -> list[str]:
        """Where the model is, a name for each worker."""
        return []


@dataclass(eq=False)
class EngineControl:
    """The state of one engine and the moves between its states. Who makes a move holds `lock`."""

    driver: EngineDriver
    """How this kind of engine makes the moves."""
    gate: AdmissionGate
    """The gate of the engine, which lets nobody in while the engine does not run."""
    versions: list[str]
    """Every weight version so far, the newest last."""
    adapters: Adapters | None = None
    """The LoRA adapters on the weights; None for an engine that takes none."""
    standstill: Standstill = field(default_factory=Standstill)
    """Stops the clocks of whoever waits for the engine while it stands still."""
    state: EngineState = EngineState.RUNNING
    """What the engine is doing."""
    asleep: frozenset[str] = frozenset()
    """The parts of the engine's memory that are given up."""
    listeners: set[Callable[[], None]] = field(default_factory=set)
    """Called after each update of the weights and each adapter that was added."""
    cuts: int = 0
    """How often turns that were being sampled were cut."""
    lock: anyio.Lock = field(default_factory=anyio.Lock)
    """Held by who changes the engine: a second one waits for the first."""
    paused_by_caller: bool = False
    """Whether the trainer paused the engine, which then goes on only when the trainer resumes it."""
    weights_discarded: bool = False
    """Whether a sleep discarded the weights, and none were given since."""
    _ages: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ages = {version: number for number, version in enumerate(self.versions)}

    @property
    def version(self) -> str:
        """The version of the weights that sample now."""
        return self.versions[-1]

    def lag(self, version: str) -> int:
        """How many updates ago the weights had this version; 0 for one that the engine never had.

        For ids that an adapter sampled, its later additions count too.
        """
        newest = len(self.versions) - 1
        behind = newest - self._ages.get(base_and_adapter(version)[0], newest)
        return behind + (self.adapters.lag(version) if self.adapters is not None else 0)

    def tell(self) -> None:
        """Call the listeners."""
        for listener in list(self.listeners):
            listener()

    # --- the moves

    async def halt(self, mode: PauseMode) -> None:
        """From running to paused; undone where it fails or is cancelled."""
        # The gate first, so that nobody enters who would then be cut or be waited for.
        self.gate.hold()
        self.cuts += mode is PauseMode.ABORT
        try:
            if mode is not PauseMode.WAIT:  # else what is being sampled goes on, and so do its clocks
                self.standstill.begin()
            await self.driver.pause(mode)
        except BaseException:
            self.state = EngineState.PAUSED  # until it goes on: `resume` may be asked again where this fails
            await to_its_end(self._undo)
            raise
        self.standstill.begin()
        self.state = EngineState.PAUSED

    async def _undo(self) -> None:
        # Bounded, since an engine that did not pause may not answer to this either.
        with anyio.move_on_after(UNDO_SECONDS):
            await self._go_on()

    async def resume(self) -> None:
        """From paused to running."""
        self.paused_by_caller = False
        await to_its_end(self._go_on)

    async def _go_on(self) -> None:
        await self.driver.resume()
        self.state = EngineState.RUNNING
        self.standstill.end()
        self.gate.release()

    async def _go_on_unless_paused(self) -> None:
        if not self.paused_by_caller and not self.weights_discarded and not self.asleep:
            await self._go_on()

    async def load(self, checked: Any, version: str) -> None:
        """Exchange the weights of an engine that stands still; it goes on unless its trainer paused it."""
        before, self.state = self.state, EngineState.UPDATING
        try:
            await self.driver.load_weights(checked, version)
            self._ages[version] = len(self.versions)
            self.versions.append(version)
            self.weights_discarded = False
        finally:
            self.state = before
        await self._go_on_unless_paused()
        self.tell()

    async def fall_asleep(self, level: int) -> None:
        """From paused to asleep."""
        self.cuts += 1  # also of turns that an earlier pause kept
        await self.driver.sleep(level)
        self.asleep = frozenset(SLEEP_TAGS)
        self.weights_discarded = self.weights_discarded or level == 2
        self.state = EngineState.ASLEEP

    async def wake_up(self, parts: frozenset[str]) -> None:
        """Take these parts of the memory back; with the last one the engine goes on unless its trainer paused it."""
        await self.driver.wake(sorted(parts & self.asleep))
        self.asleep -= parts
        if not self.asleep:
            self.state = EngineState.PAUSED
            await self._go_on_unless_paused()

    # --- what cannot be now, each refused by the name of the call

    def require_running(self, call: str) -> None:
        if self.state is not EngineState.RUNNING:
            raise BadControl(f"{call}: the engine is {self.state.value} already.{self._way_out()}")

    def require_paused(self, call: str) -> None:
        if self.state is not EngineState.PAUSED:
            raise BadControl(f"{call}: the engine is {self.state.value}, not paused.{self._way_out()}")
        if self.weights_discarded:
            raise BadControl(f"{call}: sleep(2) discarded the weights: update_weights(...) first.")

    def require_weights_awake(self, call: str) -> None:
        if "weights" in self.asleep:
            raise BadControl(f"{call}: the memory of the weights is asleep: wake(['weights']) first.")

    def require_adapters(self, call: str) -> Adapters:
        """The adapters, where the engine takes any and can now."""
        if self.adapters is None:
            raise BadControl(f"{call}: this engine has no adapters.")
        self.require_weights_awake(call)
        return self.adapters

    def _way_out(self) -> str:
        ways = {EngineState.PAUSED: " resume() ends that.", EngineState.ASLEEP: " wake() ends that."}
        return ways.get(self.state, "")

    def new_version(self, version: str | None) -> str:
        """The name of the next weights: the one that is given, or the next number.

        Raises:
            BadOption: it is no name, or was there before.
        """
        if version is None:
            return next(name for name in map(str, count(len(self.versions))) if name not in self._ages)
        if not isinstance(version, str) or not version:
            raise BadOption(f"update_weights(version={version!r}): give a name, or nothing to count up.")
        if base_and_adapter(version)[1]:
            raise BadOption(f"update_weights(version={version!r}): what follows the + would stand for an adapter.")
        if version in self._ages:
            raise BadOption(f"update_weights(version={version!r}): these weights were there before; give a new name.")
        return version
