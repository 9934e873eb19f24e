"""The driver of a fleet: starts workers, hears their pulses, seats episodes, and starts others where one is lost."""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

import anyio
from anyio.abc import TaskGroup

from runner.cluster.asking import ask
from runner.cluster.fleet import Fleet, Seat, SeatState, Ticket
from runner.cluster.hand import Hand, absence, answer_within, at_once
from runner.cluster.likeness import require_like_the_first, require_like_this_process
from runner.cluster.seating import Seating
from runner.cluster.words import Catch, EngineKnown, Joined, Launcher, Pulse, WorkerLost
from runner.engines.base import BaseEngine
from runner.errors import DeltarunnerError, EngineDead, unwrapped
from runner.runs.player import IdleReason

__all__ = ["Driver"]

PULSE_SECONDS: Final = 1.0
"""A worker is asked how it does this often."""

CALM_PULSE_SECONDS: Final = 5.0
"""The same of a fleet of more than `MANY` workers."""

MANY: Final = 200

SILENT_SECONDS: Final = 90.0
"""A worker that does not answer for so long is taken for dead."""

TOLD: Final = 100
"""So much of what happened to workers is kept."""

UNLOCKED_ROUNDS: Final = 3
"""So often a worker that joins catches up with the others while these go on."""

END_SECONDS: Final = 30.0
"""How long workers may take to end by themselves."""


@dataclass(eq=False, slots=True)
class _Run:
    packed: bytes
    clock: datetime
    is_draining: bool = False


class Driver:
    """Keeps a fleet of workers at work, while its block lasts.

    Args:
        launcher: starts workers.
        engine: what each worker is to have; entered by nobody.
        fleet: the books.
        stall_seconds: how long the fleet may have fewer workers than the least before it counts as dead, and a worker
            may hang in a call that another one has answered before it is dismissed.
    """

    def __init__(self, launcher: Launcher, engine: BaseEngine, fleet: Fleet, *, stall_seconds: float) -> None:
        self.launcher = launcher
        self.fleet = fleet
        self.catch = Catch()
        """What brings a worker that joins to where the others are; changed under `settled`."""
        self.settled = anyio.Lock()
        """Held by whoever changes what all workers have in common, or brings one in."""
        self.first: Joined | None = None
        """What the first worker said of itself; the others have to be like it."""
        self.lost_count = 0
        """How many workers were lost so far."""
        self.sampled_by_the_gone = 0
        """Ids that workers sampled that are gone."""
        self.told: deque[str] = deque(maxlen=TOLD)
        """What happened to workers last, for people."""
        self.stall_seconds = stall_seconds
        """How long the fleet may lack workers, and how much later than others one of them may answer."""
        self._engine = engine
        self._numbers = itertools.count()
        self._attempts = itertools.count()
        self._run_numbers = itertools.count()
        self._hands: dict[Seat, Hand] = {}
        self._runs: dict[int, _Run] = {}
        self._seating = Seating(fleet)
        self._width_listeners: dict[object, Callable[[], None]] = {}
        self._told_listeners: dict[object, Callable[[str], None]] = {}
        self._changed = anyio.Event()
        self._short_since: float | None = None
        self._failure: DeltarunnerError | None = None
        self._group: TaskGroup
        self._begun = False
        self._not_placed = ""
        self._ending = False

    # --- its life

    @asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        """The fleet is there within this block, with as many workers as it has to have.

        Raises:
            BadInput, EngineError: a worker does not start, or is unlike the others.
        """
        await self.launcher.open()
        try:
            async with anyio.create_task_group() as self._group:
                try:
                    self._group.start_soon(self._fill_seats, name="deltarunner fleet")
                    await self._until_enough()
                    yield
                finally:
                    self._ending = True
                    with anyio.CancelScope(shield=True):
                        await self._end_workers()
                    self._group.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise unwrapped(group) from None  # nobody outside asked for a task group
        finally:
            with anyio.CancelScope(shield=True):
                await self.launcher.close()

    async def _until_enough(self) -> None:
        began = anyio.current_time()
        while not self.fleet.enough:
            if self._failure is not None:
                raise self._failure
            # How long an engine takes to start is its own affair; a worker that no machine has room for is not there.
            if anyio.current_time() - began > self.stall_seconds and self._there < self.fleet.least:
                raise EngineDead(
                    f"for {self.stall_seconds:g} s there was room for {self._there} of at least {self.fleet.least} "
                    f"workers: the cluster has too few free cores or GPUs. {self._not_placed}".rstrip()
                )
            with anyio.move_on_after(PULSE_SECONDS):
                await self._next_change()
        self._begun = True

    @property
    def _there(self) -> int:
        """How many workers have a machine, whether their engines run or not."""
        return sum(hand.placed for hand in self._hands.values())

    async def _next_change(self) -> None:
        await self._changed.wait()

    def _change(self) -> None:
        """Tell whoever waits for something that something is different."""
        self._changed.set()
        self._changed = anyio.Event()
        now = anyio.current_time()
        since = now if self._short_since is None else self._short_since
        self._short_since = None if self.fleet.enough else since
        for listener in list(self._width_listeners.values()):
            listener()
        self._seating.give_out()

    async def _fill_seats(self) -> None:
        while True:
            for seat in self.fleet.to_start(anyio.current_time()):
                self._group.start_soon(self._tend, seat, name=f"deltarunner seat {seat.number}")
            until = self.fleet.next_start()
            wait = math.inf if until is math.inf else max(0.0, until - anyio.current_time())
            with anyio.move_on_after(wait):
                await self._next_change()

    async def _tend(self, seat: Seat) -> None:
        """One worker in a seat, from its start until it is gone."""
        number = next(self._numbers)
        try:
            process = self.launcher.start(self._engine, number)
        except DeltarunnerError as error:
            self._fail_start(error)
            return
        hand = self._hands[seat] = Hand(number, seat, process)
        why = await self._until_gone(hand)
        hand.why = hand.why or str(why)
        process.kill()
        del self._hands[seat]
        if hand.pulse is not None:
            self.sampled_by_the_gone += hand.pulse.stats.sampled_tokens
        if not self._ending:
            self._note_loss(hand, why)
        hand.gone.set()
        self._change()

    async def _until_gone(self, hand: Hand) -> Exception:
        errors: list[Exception] = []

        async def until_lost(step: Callable[[Hand], Awaitable[None]]) -> None:
            try:
                await step(hand)
            except (WorkerLost, DeltarunnerError) as error:
                errors.append(error)
                steps.cancel_scope.cancel()

        async def bring_in(hand: Hand) -> None:
            await hand.process.send("hello")
            hand.placed, self._not_placed = True, ""
            steps.start_soon(until_lost, self._hear_its_start)
            await self._meet(hand)
            # Listened to from here on: it is waited for by whoever wants something of all workers.
            steps.start_soon(until_lost, self._listen)
            await self._admit(hand)

        async with anyio.create_task_group() as steps:
            steps.start_soon(until_lost, _live)
            steps.start_soon(until_lost, bring_in)
        return WorkerLost(hand.why) if hand.why else errors[0]

    def _note_loss(self, hand: Hand, error: Exception) -> None:
        if not hand.placed and isinstance(error, WorkerLost):
            self._note_not_placed(hand, str(error))
            return
        lost = self.fleet.lost(hand.seat, anyio.current_time())
        self.lost_count += 1
        self.launcher.forget(hand.number)
        playing = f"; the {len(lost)} episodes that it played are played again" if lost else ""
        self._tell(f"{hand.name} is lost: {error}{playing}")
        if hand.seat.state is SeatState.RESTING:
            self._tell(f"{len(hand.seat.deaths)} workers were lost in one seat within an hour: it stays empty")
        if isinstance(error, DeltarunnerError):
            self._fail_start(error)
        elif self.fleet.hopeless:
            self._fail_start(EngineDead(f"workers die as they start: {error}"))

    def _note_not_placed(self, hand: Hand, why: str) -> None:
        self.fleet.not_placed(hand.seat, anyio.current_time())
        # Once a reason: it is tried again every moment, as long as the machines are elsewhere.
        if why != self._not_placed:
            self._not_placed = why
            self._tell(f"{hand.name} was not started: {why}")

    def _tell(self, event: str) -> None:
        self.told.append(event)
        for listener in list(self._told_listeners.values()):
            listener(event)

    def _fail_start(self, error: DeltarunnerError) -> None:
        """What keeps one worker from starting will keep the others too; once the fleet has begun it is that one's."""
        if not self._begun:
            self._failure = self._failure or error
            self._change()

    async def _end_workers(self) -> None:
        """Let all workers end by themselves, and kill those that take too long."""
        with anyio.move_on_after(END_SECONDS):
            for hand in self._hands.values():
                if hand.joined is None:
                    hand.process.kill()
                else:
                    hand.process.send("end")
            while self._hands:
                await self._next_change()
        for hand in self._hands.values():
            hand.process.kill()

    # --- a worker comes in

    async def _meet(self, hand: Hand) -> None:
        joined: Joined = await hand.process.send("join")
        if self.first is None:
            require_like_this_process(joined, hand.number)
            self.first = joined
        require_like_the_first(joined, self.first, hand.number)
        hand.joined, hand.version, hand.heard = joined, joined.weight_version, anyio.current_time()

    async def _admit(self, hand: Hand) -> None:
        opened: set[int] = set()
        caught = Catch()
        for rounds in itertools.count():
            # Outside the lock, since it takes as long as an engine loads: many join at once, and no update waits.
            # One that others overtake again and again is brought in under it in the end.
            if rounds < UNLOCKED_ROUNDS and not caught.has_what(self.catch):
                caught = await self._catch_up(hand, self.catch)
            if await self._admitted(hand, opened, caught, waits=rounds < UNLOCKED_ROUNDS):
                break
            # Outside it as well: what an author does in `lifespan()` may take its time, or never end.
            for number, run in list(self._runs.items()):
                if number not in opened:
                    opened.add(number)
                    await self._open_on(hand, number, run)
        self._change()

    async def _catch_up(self, hand: Hand, catch: Catch) -> Catch:
        with anyio.move_on_after(self.stall_seconds) as limit:
            await hand.process.send("catch_up", catch)
        if limit.cancelled_caught:
            raise WorkerLost(f"it did not catch up with the others in {self.stall_seconds:g} s")
        return catch

    async def _admitted(self, hand: Hand, opened: set[int], caught: Catch, *, waits: bool) -> bool:
        """Let a worker play that is where the others are; not where these have gone on meanwhile, or begun a run.

        Args:
            hand: the worker.
            opened: the runs that it has set up.
            caught: what it has been brought to.
            waits: whether it may be brought further before.
        """
        async with self.settled:
            if not opened >= self._runs.keys():
                return False
            if not caught.has_what(self.catch):
                if waits:
                    return False
                await self._catch_up(hand, self.catch)
            if self.catch.paused or self.catch.asleep:
                await hand.process.send("stand", self.catch)
            for number in opened - self._runs.keys():
                hand.process.send("close_run", number)
            for number, run in self._runs.items():
                if run.is_draining:
                    hand.process.send("drain", number)
            if self.catch.readable:
                self.has_weights(hand, self.catch.version or hand.version)
            else:
                self.fleet.waits(hand.seat)
                self._tell(f"{hand.name} waits for the next weights: a transfer brought those of the others")
        return True

    def has_weights(self, hand: Hand, version: str) -> None:
        """A worker has the weights of this version, and plays from now on where it did not."""
        if hand.gone.is_set():
            return  # it died between its answer and the hearing of it, and another one may have its seat
        hand.version = version
        if hand.seat.state is not SeatState.READY:
            assert hand.joined is not None, "it has an engine"
            # As wide as a run of one process: while some wait for tools, others are sampled.
            self.fleet.joined(hand.seat, 2 * hand.joined.places)
            self._change()

    async def _hear_its_start(self, hand: Hand) -> None:
        # Its engine may take its time, and hold up its loop meanwhile; a process that stands still starts nothing.
        limit = max(self.stall_seconds, SILENT_SECONDS)
        while hand.joined is None:
            await answer_within(limit, hand.process.send("hello"), " while it started")
            await anyio.sleep(CALM_PULSE_SECONDS)

    async def _listen(self, hand: Hand) -> None:
        while True:
            pulse: Pulse = await answer_within(SILENT_SECONDS, hand.process.send("pulse"))
            hand.hear(pulse)
            await anyio.sleep(PULSE_SECONDS if len(self._hands) <= MANY else CALM_PULSE_SECONDS)

    # --- all workers

    @property
    def hands(self) -> list[Hand]:
        """The workers that play, in the order in which they were started."""
        return [hand for hand in self.members if hand.seat.state is SeatState.READY]

    @property
    def members(self) -> list[Hand]:
        """The same, and those that play once they have the next weights."""
        states = SeatState.READY, SeatState.WAITING
        return [hand for seat, hand in self._hands.items() if seat.state in states and not hand.why]

    @property
    def absent(self) -> Counter[IdleReason | None]:
        """Why the workers of the other seats do not play, in counts."""
        return Counter(absence(seat, self._hands.get(seat)) for seat in self.fleet.seats)

    async def known(self) -> EngineKnown:
        """What is known of the engine, from the first worker that answers.

        Raises:
            EngineDead: none does.
        """
        for hand in self.hands:
            try:
                known: EngineKnown = await hand.process.send("engine_known")
            except WorkerLost:
                continue
            return known
        raise EngineDead("every worker was lost while the fleet began")

    async def ask_all(self, call: str, *arguments: Any) -> dict[Hand, Any]:
        """`ask` all workers."""
        return await ask(self.members, call, *arguments, patience=self.stall_seconds)

    def require_alive(self) -> None:
        """Return if there are enough workers, or may be soon.

        Raises:
            EngineDead: there are not; says why.
        """
        fleet = self.fleet
        waiting = f" {len(fleet.behind)} wait for the next weights." if fleet.behind else ""
        # Two of them: a worker that is not started says little without the loss before it.
        last = waiting + (f" What happened last: {'; '.join(list(self.told)[-2:])}" if self.told else "")
        if fleet.hopeless:
            raise EngineDead(f"{len(fleet.ready)} workers are left of at least {fleet.least}.{last}")
        too_long = self._short_since is not None and anyio.current_time() - self._short_since > self.stall_seconds
        starting = sum(hand.is_starting for hand in self._hands.values())
        # As at the beginning an engine's start is waited for; the first one that fails after that time ends it.
        if too_long and not (starting and len(fleet.ready) + len(fleet.behind) + starting >= fleet.least):
            raise EngineDead(
                f"for {self.stall_seconds:g} s there were fewer than {fleet.least} workers, {len(fleet.ready)} now."
                f"{last}"
            )

    async def until(self, enough: Callable[[], bool]) -> None:
        """Wait until something is so of the fleet.

        Raises:
            EngineDead: the fleet died over it.
        """
        while not enough():
            self.require_alive()
            with anyio.move_on_after(PULSE_SECONDS):
                await self._next_change()

    # --- runs

    def run_number(self) -> int:
        """A number for a run, which no other one of the fleet has."""
        return next(self._run_numbers)

    async def open_run(self, number: int, packed: bytes, clock: datetime) -> None:
        """Have every worker set a run up, also those that join later.

        Raises:
            BadInput: a worker cannot play it.
        """
        run = _Run(packed, clock)
        async with self.settled:
            try:
                await at_once(self.members, lambda hand: self._open_on(hand, number, run))
            except DeltarunnerError:
                await self.ask_all("close_run", number)
                raise
            self._runs[number] = run

    async def _open_on(self, hand: Hand, number: int, run: _Run) -> None:
        hand.process.send("keep_run", number, run.packed, run.clock)
        with suppress(WorkerLost):  # whoever tends it knows
            await hand.process.send("run_opened", number)

    async def close_run(self, number: int) -> list[str]:
        """Have every worker leave a run; gives what went wrong there on the way out, for people."""
        async with self.settled:
            del self._runs[number]
            self.launcher.forget_run(number)
            return [fault for faults in (await self.ask_all("close_run", number)).values() for fault in faults]

    def drain(self, number: int) -> None:
        """Tell every worker that no further episode of a run begins."""
        self._runs[number].is_draining = True
        for hand in self.members:
            hand.process.send("drain", number)

    @asynccontextmanager
    async def listening(self, listener: Callable[[], None], told: Callable[[str], None]) -> AsyncIterator[None]:
        """Call the first listener whenever workers came or went, and the other with what is to be said of that."""
        token = object()
        self._width_listeners[token], self._told_listeners[token] = listener, told
        try:
            yield
        finally:
            del self._width_listeners[token], self._told_listeners[token]

    # --- episodes

    def attempt_number(self) -> int:
        """A number for an attempt, which no other one of the fleet has."""
        return next(self._attempts)

    async def seat(self, ticket: Ticket) -> Hand:
        """Wait until a worker can play this, and give that."""
        return self._hands[await self._seating.seat(ticket)]

    def done(self, ticket: Ticket) -> None:
        """An episode is over, or is not to be played any more."""
        self._seating.done(ticket)


async def _live(hand: Hand) -> None:
    await hand.process.send("live")
    raise WorkerLost("it ended")
