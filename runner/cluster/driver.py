"""The driver of a fleet: it starts workers, reads their heartbeats, assigns episodes, and replaces lost workers."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from runner.cluster.broadcast import ask, gather_answers
from runner.cluster.engine_process import require_like_the_first, require_like_this_process
from runner.cluster.fleet import Assignment, Fleet, SlotQueue, WorkerSlot, WorkerSlotState
from runner.cluster.protocol import EngineKnown, FleetSnapshot, Heartbeat, Launcher, WorkerInfo, WorkerLost
from runner.cluster.worker_handle import WorkerHandle, answer_within, idle_reason, live
from runner.engines.base import BaseEngine
from runner.errors import DeltarunnerError, EngineDead, unwrapped
from runner.logs import logger_for
from runner.runs.player import IdleReason

__all__ = ["Driver"]

log = logger_for("cluster")

HEARTBEAT_SECONDS: Final = 1.0
"""Seconds between two heartbeats of a worker."""

CALM_HEARTBEAT_SECONDS: Final = 5.0
"""Seconds between two heartbeats of a worker in a fleet of more than `MANY_WORKERS_COUNT` workers."""

MANY_WORKERS_COUNT: Final = 200

SILENT_SECONDS: Final = 90.0
"""Seconds without an answer after which a worker counts as dead."""

MAX_EVENTS: Final = 100
"""Maximum number of fleet events that are kept; the oldest are dropped."""

MAX_UNLOCKED_ROUNDS: Final = 3
"""Maximum number of attempts of a new worker to catch up without the lock `settled`. A later attempt holds the lock."""

END_SECONDS: Final = 30.0
"""Seconds that workers may take to end by themselves."""


@dataclass(eq=False, slots=True)
class _OpenedRun:
    packed: bytes
    clock: datetime
    is_draining: bool = False


class Driver:
    """The driver of a fleet, which starts, calls and replaces workers within the block of `at_work`.

    Args:
        launcher: starts workers.
        engine: the engine of each worker, not entered.
        fleet: the slots of the workers, and the assignments of episodes to slots.
        stall_seconds: seconds after which a fleet with too few workers counts as dead. A worker is dismissed if it
            does not answer a call within this time after another worker has answered.
    """

    def __init__(self, launcher: Launcher, engine: BaseEngine, fleet: Fleet, *, stall_seconds: float) -> None:
        self.launcher = launcher
        self.fleet = fleet
        self.snapshot = FleetSnapshot()
        """The state that a new worker must reach; changed under `settled`."""
        self.settled = anyio.Lock()
        """Lock for changes of the state that all workers share, and for adding a worker."""
        self.first: WorkerInfo | None = None
        """The description of the first worker; the description of each further worker must match it."""
        self.lost_count = 0
        self.sampled_by_the_gone = 0
        """Number of ids that were sampled by workers that have ended."""
        self.events: deque[str] = deque(maxlen=MAX_EVENTS)
        """The latest events of the fleet, for people."""
        self.stall_seconds = stall_seconds
        """The argument `stall_seconds`; see `Driver`."""
        self._engine = engine
        self._numbers = itertools.count()
        self._attempts = itertools.count()
        self._run_numbers = itertools.count()
        self._handles: dict[WorkerSlot, WorkerHandle] = {}
        self._runs: dict[int, _OpenedRun] = {}
        self._slot_queue = SlotQueue(fleet)
        self._width_listeners: dict[object, Callable[[], None]] = {}
        self._event_listeners: dict[object, Callable[[str], None]] = {}
        self._changed = anyio.Event()
        self._short_since: float | None = None
        self._failure: DeltarunnerError | None = None
        self._group: TaskGroup
        self._begun = False
        self._not_placed = ""
        self._ending = False

    # --- start and end

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """Start the fleet, run the block once there are enough workers, and end the fleet after the block.

        Raises:
            BadInput, EngineError: machines are missing, or a worker does not start, or does not match the others.
        """
        await self.launcher.open()
        try:
            async with anyio.create_task_group() as self._group:
                try:
                    self._group.start_soon(self._fill_slots, name="deltarunner fleet")
                    await self._until_enough()
                    yield
                finally:
                    self._ending = True
                    with anyio.CancelScope(shield=True):
                        await self._end_workers()
                    self._group.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrapped(group) from None  # the task group is internal
        finally:
            with anyio.CancelScope(shield=True):
                await self.launcher.close()

    async def _until_enough(self) -> None:
        began = anyio.current_time()
        while not self.fleet.enough:
            if self._failure is not None:
                raise self._failure
            # The start of an engine has no time limit. A worker without a machine does not count as started.
            if anyio.current_time() - began > self.stall_seconds and self._placed_count < self.fleet.least:
                raise EngineDead(
                    f"for {self.stall_seconds:g} s there was room for {self._placed_count} of at least "
                    f"{self.fleet.least} workers: the cluster has too few free cores or GPUs. "
                    f"Add machines, or give fewer workers. {self._not_placed}".rstrip()
                )
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await self._next_change()
        self._begun = True

    @property
    def _placed_count(self) -> int:
        """Number of workers with a machine, including workers whose engines do not run yet."""
        return sum(handle.placed for handle in self._handles.values())

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _change(self) -> None:
        """Notify the tasks and listeners that wait for a change, and assign waiting episodes to free slots."""
        self._changed.set()
        self._changed = anyio.Event()
        now = anyio.current_time()
        since = now if self._short_since is None else self._short_since
        self._short_since = None if self.fleet.enough else since
        for listener in list(self._width_listeners.values()):
            listener()
        self._slot_queue.give_out()

    async def _fill_slots(self) -> None:
        while True:
            for slot in self.fleet.to_start(anyio.current_time()):
                self._group.start_soon(self._tend, slot, name=f"deltarunner slot {slot.number}")
            until = self.fleet.next_start()
            wait = math.inf if until is math.inf else max(0.0, until - anyio.current_time())
            with anyio.move_on_after(wait):
                await self._next_change()

    async def _tend(self, slot: WorkerSlot) -> None:
        """Run one worker in a slot, from its start until it is gone."""
        number = next(self._numbers)
        try:
            process = self.launcher.start(self._engine, number)
        except DeltarunnerError as error:
            self._fail_start(error)
            return
        handle = self._handles[slot] = WorkerHandle(number, slot, process)
        why = await self._until_gone(handle)
        handle.why = handle.why or str(why)
        process.kill()
        del self._handles[slot]
        if handle.heartbeat is not None:
            self.sampled_by_the_gone += handle.heartbeat.stats.sampled_tokens
        if not self._ending:
            self._note_loss(handle, why)
        handle.gone.set()
        self._change()

    async def _until_gone(self, handle: WorkerHandle) -> Exception:
        errors: list[Exception] = []

        async def until_lost(step: Callable[[WorkerHandle], Awaitable[None]]) -> None:
            try:
                await step(handle)
            except (WorkerLost, DeltarunnerError) as error:
                errors.append(error)
                steps.cancel_scope.cancel()

        async def bring_in(handle: WorkerHandle) -> None:
            await handle.process.send("hello")
            handle.placed, self._not_placed = True, ""
            log.info("%s starts; lost predecessors: %d", handle.name, len(handle.slot.deaths))
            steps.start_soon(until_lost, self._watch_start)
            await self._meet(handle)
            # Heartbeats are read before `_admit`, because `_admit` includes this worker in calls to all workers.
            steps.start_soon(until_lost, self._read_heartbeats)
            await self._admit(handle)

        async with anyio.create_task_group() as steps:
            steps.start_soon(until_lost, live)
            steps.start_soon(until_lost, bring_in)
        return WorkerLost(handle.why) if handle.why else errors[0]

    def _note_loss(self, handle: WorkerHandle, error: Exception) -> None:
        if not handle.placed and isinstance(error, WorkerLost):
            self._note_not_placed(handle, str(error))
            return
        lost = self.fleet.mark_lost(handle.slot, anyio.current_time())
        self.lost_count += 1
        self.launcher.forget(handle.number)
        playing = f"; the {len(lost)} episodes that it played are played again" if lost else ""
        self._note_event(f"{handle.name} is lost: {error}{playing}")
        if handle.slot.state is WorkerSlotState.RESTING:
            self._note_event(f"{len(handle.slot.deaths)} workers of one slot were lost: the next starts within an hour")
        if isinstance(error, DeltarunnerError):
            self._fail_start(error)
        elif self.fleet.hopeless:
            self._fail_start(EngineDead(f"workers die as they start: {error}"))

    def _note_not_placed(self, handle: WorkerHandle, why: str) -> None:
        self.fleet.mark_unplaced(handle.slot, anyio.current_time())
        # Each reason is reported once, since starts are tried again and again while machines are missing.
        if why != self._not_placed:
            self._not_placed = why
            self._note_event(f"{handle.name} was not started: {why}")

    def _note_event(self, event: str) -> None:
        log.warning("%s", event)
        self.events.append(event)
        for listener in list(self._event_listeners.values()):
            listener(event)

    def _fail_start(self, error: DeltarunnerError) -> None:
        """Handle a failed start.

        Before the fleet has begun, the failure ends the fleet; afterwards it ends only this worker.
        """
        if not self._begun:
            self._failure = self._failure or error
            self._change()

    async def _end_workers(self) -> None:
        """Kill workers that are starting, ask the others to end, and kill those that take too long."""
        with anyio.move_on_after(END_SECONDS):
            for handle in self._handles.values():
                if handle.info is None:
                    handle.process.kill()
                else:
                    handle.process.send("end")
            while self._handles:
                await self._next_change()
        for handle in self._handles.values():
            handle.process.kill()

    # --- a new worker

    async def _meet(self, handle: WorkerHandle) -> None:
        info: WorkerInfo = await handle.process.send("join")
        if self.first is None:
            require_like_this_process(info, handle.number)
            self.first = info
        require_like_the_first(info, self.first, handle.number)
        handle.info, handle.version, handle.heartbeat_at = info, info.weight_version, anyio.current_time()

    async def _admit(self, handle: WorkerHandle) -> None:
        opened: set[int] = set()
        caught = FleetSnapshot()
        for rounds in itertools.count():
            # Loading weights takes long. The first rounds run without the lock, so that many workers can start at once
            # and updates do not wait. A worker that is still outdated after these rounds catches up under the lock.
            if rounds < MAX_UNLOCKED_ROUNDS and not caught.has_weights_of(self.snapshot):
                caught = await self._catch_up(handle, self.snapshot)
            if await self._admitted(handle, opened, caught, waits=rounds < MAX_UNLOCKED_ROUNDS):
                break
            # The lock is not held here either, because an author's `lifespan()` may take long, or never end.
            for number, run in list(self._runs.items()):
                if number not in opened:
                    opened.add(number)
                    await self._open_on(handle, number, run)
        self._change()

    async def _catch_up(self, handle: WorkerHandle, snapshot: FleetSnapshot) -> FleetSnapshot:
        with anyio.move_on_after(self.stall_seconds) as limit:
            await handle.process.send("catch_up", snapshot)
        if limit.cancelled_caught:
            raise WorkerLost(f"it did not catch up with the others in {self.stall_seconds:g} s")
        return snapshot

    async def _admitted(self, handle: WorkerHandle, opened: set[int], caught: FleetSnapshot, *, waits: bool) -> bool:
        """Admit a worker to the fleet, and return True; or return False if it must first open runs or catch up.

        Args:
            handle: the worker.
            opened: the numbers of the runs that the worker has set up.
            caught: the state that the worker has.
            waits: True to return False for an outdated worker; False to bring it up to date here, under the lock.
        """
        async with self.settled:
            if not opened >= self._runs.keys():
                return False
            if not caught.has_weights_of(self.snapshot):
                if waits:
                    return False
                await self._catch_up(handle, self.snapshot)
            if self.snapshot.paused or self.snapshot.asleep:
                await handle.process.send("apply_snapshot", self.snapshot)
            for number in opened - self._runs.keys():
                handle.process.send("close_run", number)
            for number, run in self._runs.items():
                if run.is_draining:
                    handle.process.send("drain", number)
            if self.snapshot.readable:
                self.has_weights(handle, self.snapshot.version or handle.version)
            else:
                self.fleet.mark_waiting(handle.slot)
                self._note_event(f"{handle.name} waits for the next weights, since transferred weights are not stored")
        return True

    def has_weights(self, handle: WorkerHandle, version: str) -> None:
        """Record that a worker has the weights of this version. If it did not play before, it plays from now on."""
        if handle.gone.is_set():
            return  # the worker died after it had answered, and its slot may have a new worker
        handle.version = version
        if handle.slot.state is not WorkerSlotState.READY:
            assert handle.info is not None, "a worker that answered has described itself"
            # A worker plays twice as many episodes as its engine runs requests: some wait for tools, others sample.
            self.fleet.mark_ready(handle.slot, 2 * handle.info.places)
            log.info("%s plays, with weights %r", handle.name, version)
            self._change()

    async def _watch_start(self, handle: WorkerHandle) -> None:
        # An engine may start slowly and block its event loop for a while. After this limit, a process without an answer
        # counts as hanging.
        limit = max(self.stall_seconds, SILENT_SECONDS)
        while handle.info is None:
            await answer_within(limit, handle.process.send("hello"), " while it started")
            await anyio.sleep(CALM_HEARTBEAT_SECONDS)

    async def _read_heartbeats(self, handle: WorkerHandle) -> None:
        while True:
            heartbeat: Heartbeat = await answer_within(SILENT_SECONDS, handle.process.send("heartbeat"))
            handle.note_heartbeat(heartbeat)
            await anyio.sleep(HEARTBEAT_SECONDS if len(self._handles) <= MANY_WORKERS_COUNT else CALM_HEARTBEAT_SECONDS)

    # --- all workers

    @property
    def handles(self) -> list[WorkerHandle]:
        """The workers that play, in the order of their start."""
        return [handle for handle in self.members if handle.slot.state is WorkerSlotState.READY]

    @property
    def members(self) -> list[WorkerHandle]:
        """The workers that play, and the workers that will play after the next update of the weights."""
        states = WorkerSlotState.READY, WorkerSlotState.WAITING
        return [handle for slot, handle in self._handles.items() if slot.state in states and not handle.why]

    @property
    def absent(self) -> Counter[IdleReason | None]:
        """Number of slots by the reason why no worker plays there; None is the key of slots where a worker plays."""
        return Counter(idle_reason(slot, self._handles.get(slot)) for slot in self.fleet.slots)

    async def known(self) -> EngineKnown:
        """Return the properties of the workers' engine, as one worker reports them."""
        known: EngineKnown = await self.ask_one("engine_known")
        return known

    def change_snapshot(self, **changes: Any) -> None:
        """Change fields of `snapshot`, the state that a new worker must reach. The caller must hold `settled`."""
        self.snapshot = replace(self.snapshot, **changes)

    async def ask_all(self, call: str, *arguments: Any) -> dict[WorkerHandle, Any]:
        return await ask(self.members, call, *arguments, patience=self.stall_seconds)

    async def ask_one(self, call: str, *arguments: Any) -> Any:
        """Call a method on the worker with the lowest load; if that worker is lost, on another one.

        Raises:
            EngineDead: no worker plays, or all were lost; the message has the reason of the last loss.
            DeltarunnerError: the worker raised this error.
        """
        tried, why = set[WorkerHandle](), ""
        while handles := [handle for handle in self.handles if handle not in tried]:
            idlest = min(handles, key=lambda handle: handle.slot.load)
            tried.add(idlest)
            try:
                return await idlest.process.send(call, *arguments)
            except WorkerLost as lost:
                why = f": {idlest.name}: {lost}"
        self.require_alive()
        raise EngineDead(f"{call}: no worker plays now{why}. Try again later.")

    def require_alive(self) -> None:
        """Return if there are enough workers, or may soon be enough.

        Raises:
            EngineDead: there are not enough workers; the message has the reason.
        """
        fleet = self.fleet
        waiting = f" {len(fleet.waiting_for_weights)} wait for the next weights." if fleet.waiting_for_weights else ""
        # Two events are shown, because the failure to start a worker is unclear without the loss before it.
        last = waiting + (f" Latest events: {'; '.join(list(self.events)[-2:])}" if self.events else "")
        if fleet.hopeless:
            raise EngineDead(fleet.ended_by or f"{len(fleet.ready)} workers are left of at least {fleet.least}.{last}")
        too_long = self._short_since is not None and anyio.current_time() - self._short_since > self.stall_seconds
        starting = sum(handle.is_starting for handle in self._handles.values())
        # After `stall_seconds` the fleet still waits for engines that are starting, but the next failure ends it.
        if too_long and not (starting and len(fleet.ready) + len(fleet.waiting_for_weights) + starting >= fleet.least):
            raise EngineDead(
                f"for {self.stall_seconds:g} s there were fewer than {fleet.least} workers, {len(fleet.ready)} now."
                f"{last}"
            )

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until `enough()` is true.

        Raises:
            EngineDead: the fleet died before that.
        """
        while not enough():
            self.require_alive()
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await self._next_change()

    # --- runs

    def run_number(self) -> int:
        """Return a new number for a run, unique in this fleet."""
        return next(self._run_numbers)

    async def open_run(self, number: int, packed: bytes, clock: datetime) -> None:
        """Set up a run on every worker, including workers that start later. `packed` is a pickled `RunSpec`.

        Raises:
            BadInput, EngineError: a worker cannot set up the run.
        """
        run = _OpenedRun(packed, clock)
        async with self.settled:
            _, errors = await gather_answers(self.members, lambda handle: self._open_on(handle, number, run))
            if errors:
                await self.ask_all("close_run", number)
                raise next(iter(errors.values()))
            self._runs[number] = run

    async def _open_on(self, handle: WorkerHandle, number: int, run: _OpenedRun) -> None:
        handle.process.send("keep_run", number, run.packed, run.clock)
        with suppress(WorkerLost):  # the task that runs this worker handles the loss
            await handle.process.send("run_opened", number)

    async def close_run(self, number: int) -> list[str]:
        """End a run on every worker, and return the faults that occurred while it ended, for people."""
        async with self.settled:
            del self._runs[number]
            self.launcher.forget_run(number)
            return [fault for faults in (await self.ask_all("close_run", number)).values() for fault in faults]

    def drain(self, number: int) -> None:
        """Notify every worker that no further episode of a run begins."""
        self._runs[number].is_draining = True
        for handle in self.members:
            handle.process.send("drain", number)

    @asynccontextmanager
    async def listening(self, listener: Callable[[], None], on_event: Callable[[str], None]) -> AsyncIterator[None]:
        """Within this block, call `listener` when workers come or go, and `on_event` with each event of the fleet."""
        token = object()
        self._width_listeners[token], self._event_listeners[token] = listener, on_event
        try:
            yield
        finally:
            del self._width_listeners[token], self._event_listeners[token]

    # --- episodes

    def attempt_number(self) -> int:
        """Return a new number for an attempt, unique in this fleet."""
        return next(self._attempts)

    async def slot(self, assignment: Assignment) -> WorkerHandle:
        """Wait until an episode has a slot, and return the worker of the slot."""
        return self._handles[await self._slot_queue.slot(assignment)]

    def release_slot(self, assignment: Assignment) -> None:
        """Release the slot of an episode that is over or no longer wanted."""
        self._slot_queue.remove(assignment)
