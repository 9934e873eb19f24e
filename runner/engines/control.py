"""What a trainer may ask of an engine and when: pause, new weights, sleep; one at a time, and nothing by half."""

from __future__ import annotations

import enum
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, Protocol

import anyio

from runner.concurrency.cancellation import to_its_end
from runner.concurrency.clocks import Standstill
from runner.engines.adapters import Adapters, base_and_adapter
from runner.errors import BadControl, BadOption

__all__ = ["EngineControl", "EngineDriver", "EngineState", "PauseMode", "WeightUpdate"]

UNDO_SECONDS = 10.0
SLEEP_TAGS = ("weights", "kv_cache")


class PauseMode(enum.StrEnum):
    """What becomes of the turns that are being sampled when an engine pauses."""

    WAIT = "wait"  # they are sampled to their end first
    KEEP = "keep"  # they stand still, and go on from where they were
    ABORT = "abort"  # they are cut; a run samples them anew, from the same prompts

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
    PAUSED = "paused"
    UPDATING = "updating"  # its weights are being exchanged
    ASLEEP = "asleep"  # its memory was given up, or part of it


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What an update did.

    Attributes:
        version: of the weights that are there now.
        check_seconds: comparing the new weights with the model, before the engine was touched.
        pause_seconds: until it stood still.
        load_seconds: loading, stamping the version and forgetting the cache.
    """

    version: str
    check_seconds: float
    pause_seconds: float
    load_seconds: float


class EngineDriver(ABC):
    """How one kind of engine does it; each is called with the engine in the right state, one at a time."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None:
        """Stand still; what was being sampled is ended or kept, by `mode`."""

    @abstractmethod
    async def resume(self) -> None:
        """Go on; also after a `pause` that failed or was cancelled half way."""

    @abstractmethod
    async def check_weights(self, source: Any) -> Any:
        """What `load_weights` needs of them, compared with the model while the engine goes on untouched.

        Raises:
            BadWeights: they do not fit; names the tensor.
        """

    @abstractmethod
    async def load_weights(self, checked: Any, version: str) -> None:
        """Exchange the weights, stamp `version` on what is sampled from now on, forget every cached prompt.

        Raises:
            EngineDead: it failed half way; the engine can answer nothing any more.
        """

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
        """Take the memory of these parts back."""

    @abstractmethod
    async def profile(self, *, on: bool) -> None:
        """Start or stop the profiler."""

    async def devices(self) -> list[str]:
        """Where the model is, a name for each worker."""
        return []


class Gate(Protocol):
    """Where requests wait for a place in the engine."""

    def hold(self) -> None: ...
    def release(self) -> None: ...


@dataclass(eq=False)
class EngineControl:
    """The one way to change an engine that runs.

    Attributes:
        driver: does it.
        gate: nobody enters the engine while it does not run.
        versions: every weight version so far, the newest last.
        adapters: LoRA adapters on the weights; None for an engine that takes none.
        standstill: stops the clocks of whoever waits for the engine while it stands still.
        state: what it is doing.
        asleep: which parts of its memory are given up.
        listeners: told after each update of the weights, and each adapter that was added.
        cuts: how often turns that were being sampled were cut.
    """

    driver: EngineDriver
    gate: Gate
    versions: list[str]
    adapters: Adapters | None = None
    standstill: Standstill = field(default_factory=Standstill)
    state: EngineState = EngineState.RUNNING
    asleep: frozenset[str] = frozenset()
    listeners: set[Callable[[], None]] = field(default_factory=set)
    cuts: int = 0
    _ages: dict[str, int] = field(default_factory=dict)
    _lock: anyio.Lock = field(default_factory=anyio.Lock)
    _paused_by_caller: bool = False
    _weights_discarded: bool = False

    def __post_init__(self) -> None:
        self._ages = {version: number for number, version in enumerate(self.versions)}

    @property
    def version(self) -> str:
        """Of the weights that sample now."""
        return self.versions[-1]

    def lag(self, version: str) -> int:
        """How many updates ago the weights had this version; 0 for one that the engine never had.

        For ids that an adapter sampled, its later additions count too.
        """
        newest = len(self.versions) - 1
        behind = newest - self._ages.get(base_and_adapter(version)[0], newest)
        return behind + (self.adapters.lag(version) if self.adapters is not None else 0)

    async def pause(self, mode: PauseMode | str) -> None:
        """Stand still until `resume`.

        Raises:
            BadControl: it does not run.
        """
        mode = PauseMode.of(mode)
        async with self._lock:
            self._require_running("pause()")
            await self._halt(mode)
            self._paused_by_caller = True

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            BadControl: it is not paused, it sleeps, or its weights were discarded.
        """
        async with self._lock:
            if self.state is not EngineState.PAUSED:
                raise BadControl(f"resume(): the engine is {self.state.value}, not paused.{self._way_out()}")
            self._require_weights("resume()")
            self._paused_by_caller = False
            await to_its_end(self._go_on)

    async def update_weights(self, source: Any, *, version: str | None, mode: PauseMode | str) -> WeightUpdate:
        """Exchange the weights; a paused engine stays paused, a running one stands still meanwhile.

        Raises:
            BadWeights: they do not fit; nothing was touched.
            BadControl: the weights' memory is asleep.
            BadOption: the version was there before.
            EngineDead: it failed half way.
        """
        mode = PauseMode.of(mode)
        async with self._lock:
            if "weights" in self.asleep:
                raise BadControl("update_weights(): the memory of the weights is asleep: wake(['weights']) first.")
            version = self._new_version(version)
            began = time.monotonic()
            checked = await self.driver.check_weights(source)
            compared = time.monotonic()
            if self.state is EngineState.RUNNING:
                await self._halt(mode)
            halted = time.monotonic()
            # To its end: weights that were exchanged by half could neither be used nor be put back.
            await to_its_end(partial(self._load, checked, version))
            done = time.monotonic()
        return WeightUpdate(version, compared - began, halted - compared, done - halted)

    async def add_adapter(self, name: str, source: Any, config: Mapping[str, Any] | None) -> str:
        """Add a LoRA adapter, or a new version of it; gives what names it in weight versions.

        Raises:
            BadControl: the engine takes none, or the weights' memory is asleep.
            BadOption: the name cannot be, or the engine was started without adapters.
            BadWeights: it does not fit; nothing was touched.
        """
        async with self._lock:
            label = await self._adapters_for("add_adapter()").add(name, source, config=config)
        self._tell()
        return label

    async def remove_adapter(self, name: str) -> None:
        """Take a LoRA adapter away; turns that are being sampled with it go on.

        Raises:
            BadControl: the engine takes none, or the weights' memory is asleep.
            BadOption: there is none of that name.
        """
        async with self._lock:
            await self._adapters_for("remove_adapter()").remove(name)

    async def sleep(self, level: int, *, unless_asleep: bool = False) -> None:
        """Give memory up until `wake`; turns that are being sampled are cut, as by `pause("abort")`.

        Args:
            level: 1 keeps the weights, 2 discards them.
            unless_asleep: do nothing where it sleeps already.

        Raises:
            BadControl: it sleeps already, or cannot sleep.
            BadOption: there is no such level.
        """
        if level not in (1, 2):
            raise BadOption(f"sleep(level={level!r}): give 1, which keeps the weights, or 2, which discards them.")
        async with self._lock:
            if self.state is EngineState.ASLEEP:
                if unless_asleep:
                    return
                raise BadControl("sleep(): the engine is asleep already.")
            if level == 2 and self.adapters is not None and self.adapters.folders:
                raise BadControl("sleep(2) would discard the adapters: remove_adapter(...) each, add it when awake.")
            self.driver.check_sleep(level)
            if self.state is EngineState.RUNNING:
                await self._halt(PauseMode.ABORT)
            # Whoever cancels this is told once it is done: memory given up by half could not be taken back.
            await to_its_end(partial(self._fall_asleep, level))

    async def _fall_asleep(self, level: int) -> None:
        self.cuts += 1  # also of turns that an earlier pause kept
        await self.driver.sleep(level)
        self.asleep = frozenset(SLEEP_TAGS)
        self._weights_discarded = self._weights_discarded or level == 2
        self.state = EngineState.ASLEEP

    async def wake(self, tags: Sequence[str] | None, *, if_asleep: bool = False) -> None:
        """Take memory back: all of it, or the parts that are named; with the last one the engine goes on.

        It stays paused where it was paused before it slept, and after `sleep(2)` until `update_weights`.

        Args:
            tags: the parts; None for all.
            if_asleep: do nothing where it does not sleep.

        Raises:
            BadControl: it does not sleep.
            BadOption: there is no such part.
        """
        wanted = frozenset(SLEEP_TAGS if tags is None else tags)
        if not wanted <= set(SLEEP_TAGS) or isinstance(tags, str):
            raise BadOption(f"wake(tags={tags!r}): give a list of {' and '.join(SLEEP_TAGS)}, or nothing for both.")
        async with self._lock:
            if self.state is not EngineState.ASLEEP:
                if if_asleep:
                    return
                raise BadControl(f"wake(): the engine is {self.state.value}, not asleep.")
            await to_its_end(partial(self._wake_up, wanted))

    async def _wake_up(self, wanted: frozenset[str]) -> None:
        await self.driver.wake(sorted(wanted & self.asleep))
        self.asleep -= wanted
        if not self.asleep:
            self.state = EngineState.PAUSED
            await self._go_on_unless_paused()

    async def reset_prefix_cache(self, *, unless_asleep: bool = False) -> None:
        """Forget every cached prompt; turns that are being sampled go on, and compute theirs again.

        Args:
            unless_asleep: do nothing where it sleeps.

        Raises:
            BadControl: it sleeps, and has no cache.
        """
        async with self._lock:
            if self.state is EngineState.ASLEEP:
                if unless_asleep:
                    return
                raise BadControl("reset_prefix_cache(): the engine is asleep and has no cache.")
            await self.driver.reset_prefix_cache()

    async def profile(self, *, on: bool) -> None:
        """Start or stop the profiler."""
        async with self._lock:
            await self.driver.profile(on=on)

    # --- in the lock

    async def _halt(self, mode: PauseMode) -> None:
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
        with anyio.move_on_after(UNDO_SECONDS):
            await self._go_on()

    async def _go_on(self) -> None:
        await self.driver.resume()
        self.state = EngineState.RUNNING
        self.standstill.end()
        self.gate.release()

    async def _go_on_unless_paused(self) -> None:
        if not self._paused_by_caller and not self._weights_discarded and not self.asleep:
            await self._go_on()

    async def _load(self, checked: Any, version: str) -> None:
        before, self.state = self.state, EngineState.UPDATING
        try:
            await self.driver.load_weights(checked, version)
            self._ages[version] = len(self.versions)
            self.versions.append(version)
            self._weights_discarded = False
        finally:
            self.state = before
        await self._go_on_unless_paused()
        self._tell()

    def _adapters_for(self, what: str) -> Adapters:
        if self.adapters is None:
            raise BadControl(f"{what}: this engine has no adapters.")
        if "weights" in self.asleep:
            raise BadControl(f"{what}: the memory of the weights is asleep: wake(['weights']) first.")
        return self.adapters

    def _tell(self) -> None:
        for listener in list(self.listeners):
            listener()

    def _require_running(self, what: str) -> None:
        if self.state is not EngineState.RUNNING:
            raise BadControl(f"{what}: the engine is {self.state.value} already.{self._way_out()}")

    def _require_weights(self, what: str) -> None:
        if self._weights_discarded:
            raise BadControl(f"{what}: sleep(2) discarded the weights: update_weights(...) first.")

    def _way_out(self) -> str:
        ways = {EngineState.PAUSED: " resume() ends that.", EngineState.ASLEEP: " wake() ends that."}
        return ways.get(self.state, "")

    def _new_version(self, version: str | None) -> str:
        if version is None:
            return next(name for name in map(str, count(len(self.versions))) if name not in self._ages)
        if not isinstance(version, str) or not version:
            raise BadOption(f"update_weights(version={version!r}): give a name, or nothing to count up.")
        if base_and_adapter(version)[1]:
            raise BadOption(f"update_weights(version={version!r}): what follows the + would stand for an adapter.")
        if version in self._ages:
            raise BadOption(f"update_weights(version={version!r}): these weights were there before; give a new name.")
        return version
