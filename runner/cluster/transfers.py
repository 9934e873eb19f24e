"""Weights that a trainer sends to a whole fleet at once: the one update in which workers wait for one another."""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from runner.cluster.asking import ask
from runner.cluster.driver import Driver
from runner.cluster.hand import Hand
from runner.cluster.party import GRACE_SECONDS, Party
from runner.cluster.words import WorkerLost
from runner.concurrency.cancellation import to_its_end
from runner.engines.proofs import WeightProof
from runner.engines.state import PauseMode, WeightUpdate
from runner.engines.transfers import Announced, TransferStep, send_parts
from runner.engines.vllm.trainer_endpoint import TrainerEndpoint, forms_of_source, worker_error
from runner.engines.weights import LocalTransfer, WeightTransfer, forms_of_transfer
from runner.errors import BadInput, BadWeights, DeltarunnerError, EngineError

__all__ = ["FleetTransfers"]


@dataclass(frozen=True, slots=True)
class _Meeting:
    whom: Any
    """The init info of a trainer elsewhere, or the transfer of one that is here."""
    ranks: Mapping[Hand, int]
    """The workers that met it, and with how many ranks each."""
    ranked: bool
    """Whether they are of one group, which is broken where one of them is lost."""

    def is_of(self, hands: Collection[Hand]) -> bool:
        """Whether weights that are sent reach these and nobody else."""
        return set(hands) == set(self.ranks) or (not self.ranked and set(hands) <= set(self.ranks))


class FleetTransfers:
    """The connection between a fleet and its trainer; the `Receiver` of what that sends.

    A transfer has four parts: all compare what is announced; all meet the trainer; all stand still; all receive. Until
    the last one begins nothing was touched anywhere. One who is lost in it may keep the others in a call that never
    returns: these are dismissed after `GRACE_SECONDS`, so that no part of the fleet stands still for ever.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._met: _Meeting | None = None
        self._trainer: TrainerEndpoint | None = None
        self._party = Party(())
        self._compared: tuple[str, frozenset[Hand]] = "", frozenset()
        self._ranks: dict[Hand, int] = {}
        self._has_sent_from_here = False
        self._numbers = itertools.count(1)

    async def check(self, transfer: WeightTransfer | LocalTransfer, version: str) -> None:
        """Have all workers compare the weights, and meet their trainer where they have not.

        Raises:
            BadWeights: they do not fit, or the ends do not meet; nothing was touched.
            EngineError: a worker was lost over it, and the trainer elsewhere waits for it.
        """
        driver = self._driver
        prepared = False
        while not prepared:
            await driver.until(lambda: bool(driver.members))
            hands = driver.members
            if isinstance(transfer, WeightTransfer):
                await self._require_fitting(transfer, hands)
            prepared = await self._prepare(transfer, version, hands)
            if not prepared and isinstance(transfer, WeightTransfer):
                raise self._broken_off()

    def forget(self) -> None:
        """Other weights are compared: what was is to be compared again."""
        self._compared = "", frozenset()

    async def apply(
        self,
        transfer: WeightTransfer | LocalTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[Hand], None],
        proof: WeightProof | None = None,
    ) -> list[WeightUpdate]:
        """Have the workers stand still, receive the weights and go on.

        Args:
            transfer: what was checked.
            version: the version that they will have.
            mode: what becomes of the turns that are being sampled.
            took: called with each worker that has the weights, once it has.
            proof: what each worker's engine has to pass with them.

        Returns:
            What each of them says of it.

        Raises:
            EngineError: fewer workers have them than there have to be; says how many do, and who was lost.
            EngineDead: too few workers are left.
        """
        if isinstance(transfer, LocalTransfer):
            return await self._apply_from_here(transfer, version, mode, took, proof)
        async with self._driver.settled:
            return await self._apply_from_elsewhere(transfer, version, mode, took, proof)

    async def _apply_from_here(
        self,
        transfer: LocalTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[Hand], None],
        proof: WeightProof | None,
    ) -> list[WeightUpdate]:
        driver = self._driver
        updates: list[WeightUpdate] = []
        while True:
            driver.require_alive()
            async with driver.settled:
                try:
                    if (lacking := self._lacking(version)) and await self._prepare(transfer, version, lacking):
                        updates += await self._exchange(transfer, version, mode, took, proof) or ()
                except BadWeights as error:
                    if not updates:
                        raise
                    raise EngineError(f"{self._shares(version)}, and the others cannot get them: {error}") from error
            if any(hand in driver.hands for hand in self._lacking(version)):
                continue  # one was lost before anything was sent, and the others went on as they were
            if self._having(version) >= driver.fleet.least:
                return updates
            await driver.until(lambda: bool(self._lacking(version)))

    async def _apply_from_elsewhere(
        self,
        transfer: WeightTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[Hand], None],
        proof: WeightProof | None,
    ) -> list[WeightUpdate]:
        driver = self._driver
        met = self._met_elsewhere()
        members = [hand for hand in driver.members if hand in met.ranks]
        if not members or not met.is_of(members):
            self._party = Party(members)
            self._party.lost = {hand: hand.why for hand in met.ranks if hand not in members}
            raise self._broken_off()
        if not await self._prepare(transfer, version, members):
            raise self._broken_off()
        updates = await self._exchange(transfer, version, mode, took, proof)
        if updates is None:
            raise self._broken_off()
        for hand in self._lacking(version) if updates else ():
            if hand in driver.hands:
                hand.dismiss("it came when the others had met their trainer, and has older weights")
        if self._party.lost and self._having(version) < driver.fleet.least:
            raise EngineError(f"{self._shares(version)}, of at least {driver.fleet.least}: {self._who_was_lost()}")
        return updates

    def _lacking(self, version: str) -> list[Hand]:
        return [hand for hand in self._driver.members if hand.version != version]

    def _having(self, version: str) -> int:
        return sum(hand.version == version for hand in self._driver.hands)

    # --- who meets whom

    async def _require_fitting(self, transfer: WeightTransfer, hands: Sequence[Hand]) -> None:
        """Refuse a meeting that could not be, before any worker compares anything."""
        given = transfer.init
        if given is None:
            met = self._met_elsewhere()
            if not met.is_of(hands):
                told = [f"{hand.name} has not met it" for hand in hands if hand not in met.ranks]
                told += [f"{hand.name}, which has, is gone" for hand in met.ranks if hand not in hands]
                raise BadWeights(
                    f"WeightTransfer(init=...) is not given, and the workers are not those that met the trainer: "
                    f"{', '.join(told)}. Meet anew, with init=."
                )
            return
        offset = given.get("rank_offset")
        if offset is None or self._is_met(transfer, hands):
            return
        if not isinstance(offset, int):
            raise BadWeights(f"WeightTransfer(init=...): rank_offset={offset!r} is no whole number.")
        await self._count_ranks(hands)
        size, there = given.get("world_size"), offset + sum(self._ranks.values())
        if size is not None and size != there:
            raise BadWeights(
                f"WeightTransfer(init=...): world_size={size!r}, and there are {there} ranks: {offset} before the "
                f"workers' own (rank_offset), and {there - offset} of {len(self._ranks)} workers. Count them by "
                "`len(await engines.devices())` before the ends meet."
            )

    def _met_elsewhere(self) -> _Meeting:
        if self._met is None or not isinstance(self._met.whom, Mapping):
            raise BadWeights(
                "WeightTransfer(init=...) has to be given: engines and trainer have not met, or another one since."
            )
        return self._met

    async def _count_ranks(self, hands: Sequence[Hand]) -> None:
        devices = await ask(hands, "control", "devices", patience=self._driver.stall_seconds)
        # One that has no model takes part all the same.
        self._ranks = {hand: len(devices[hand]) or 1 for hand in hands if hand in devices}

    async def _prepare(self, transfer: WeightTransfer | LocalTransfer, version: str, hands: Sequence[Hand]) -> bool:
        """Have workers compare the weights and meet the trainer, as far as they have not; they are the party then.

        Returns:
            Whether they have; not where one was lost without whom the others can do nothing, or all were.

        Raises:
            BadWeights: the weights do not fit, or the ends do not meet.
        """
        if self._compared == (version, frozenset(hands)) and self._is_met(transfer, hands):
            return True
        self.forget()
        self._party = party = Party(hands)
        announced = await self._driver.launcher.put(await self._announced(transfer))
        try:
            answers = await party.ask("check_weights", lambda _: (announced, version), compares=True)
        except BadInput:
            self._forget_checked()
            raise
        if not answers or (party.lost and isinstance(transfer, WeightTransfer) and self._is_ranked(transfer)):
            return False
        if not self._is_met(transfer, party.hands):
            try:
                await self._meet(transfer)
            finally:
                if self._met is None:
                    self._forget_checked()
        if self._met is None:
            return False
        self._compared = version, frozenset(party.hands)
        return True

    def _forget_checked(self) -> None:
        for hand in self._party.hands:
            hand.process.send("forget_checked")

    async def _announced(self, transfer: WeightTransfer | LocalTransfer) -> Announced:
        if isinstance(transfer, LocalTransfer):
            forms = await anyio.to_thread.run_sync(forms_of_source, transfer.source)
            return Announced("LocalTransfer", forms, transfer.seconds)
        return Announced("WeightTransfer(update=...)", forms_of_transfer(transfer), transfer.seconds)

    def _is_met(self, transfer: WeightTransfer | LocalTransfer, hands: Collection[Hand]) -> bool:
        met = self._met
        if met is None or not met.is_of(hands):
            return False
        if isinstance(transfer, LocalTransfer):
            return self._trainer is not None and self._trainer.is_for(transfer)
        return isinstance(met.whom, Mapping) and transfer.init in (None, met.whom)

    async def _meet(self, transfer: WeightTransfer | LocalTransfer) -> None:
        """Have the party meet the trainer; where one is lost over it, nobody has met.

        Raises:
            BadWeights: the ends do not meet, and no worker is to blame.
        """
        party, name, ranked = self._party, type(transfer).__name__, self._is_ranked(transfer)
        await self._part()
        if ranked:
            await self._count_ranks(party.hands)
        there = len(party.hands)
        failure: Exception | None = None
        with party.limited(transfer.seconds) as scope:
            try:
                await self._join(transfer)
            except Exception as error:  # the border to vLLM; no weight was touched
                failure = error
        if len(party.hands) < there:
            await party.until_answered()
            party.dismiss(party.asked, self._hangs())
        elif scope.cancelled_caught:
            failure = TimeoutError(f"not within {transfer.seconds:g} s")
        if not party.hands or (ranked and len(party.hands) < there):
            await self._part()
        elif failure is not None:
            await self._part()
            if isinstance(failure, BadWeights):
                raise failure
            raise BadWeights(f"{name}: engines and trainer do not meet: {worker_error(failure)}") from failure
        else:
            ranks = {hand: self._ranks.get(hand, 1) for hand in party.hands}
            whom = transfer if isinstance(transfer, LocalTransfer) else dict(transfer.init or {})
            self._met = _Meeting(whom, ranks, ranked)

    def _is_ranked(self, transfer: WeightTransfer | LocalTransfer) -> bool:
        """Whether those who meet are of one group, and none of them can do without another."""
        if isinstance(transfer, LocalTransfer):
            return True
        if transfer.init is None:
            return self._met is not None and self._met.ranked
        return "rank_offset" in transfer.init

    async def _join(self, transfer: WeightTransfer | LocalTransfer) -> None:
        if isinstance(transfer, WeightTransfer):
            assert transfer.init is not None, "else they have met"
            await self.meet(transfer.init)
            return
        info = _for_ranks(transfer.info, sum(self._ranks.values()))
        if self._has_sent_from_here:
            info = await anyio.to_thread.run_sync(_on_a_free_port, info)
        self._has_sent_from_here = True
        self._trainer = TrainerEndpoint(transfer, self)
        await self._trainer.meet(info)

    async def _part(self) -> None:
        """Leave whom the workers have met: they cannot be reached together any more."""
        self._met = None
        if self._trainer is not None:
            trainer, self._trainer = self._trainer, None
            await trainer.close()

    # --- what a `Receiver` does

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Have every worker join the trainer, each by ranks of its own."""
        inits: dict[Hand, Mapping[str, Any]] = {}
        offset = init.get("rank_offset")
        for hand in self._party.hands:
            inits[hand] = init if offset is None else {**init, "rank_offset": offset}
            offset = None if offset is None else offset + self._ranks.get(hand, 1)
        await self._party.ask("meet", lambda hand: (inits[hand],))

    async def step(self, step: TransferStep, part: Any = None) -> None:
        """Have every worker take a step; returns when all of them did."""
        party = self._party
        await party.ask("take_step", lambda _: (step, part))
        if not party.hands:
            raise ConnectionError("no worker is left")
        party.finished = step is TransferStep.FINISH

    # --- what is sent

    async def _exchange(
        self,
        transfer: WeightTransfer | LocalTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[Hand], None],
        proof: WeightProof | None,
    ) -> list[WeightUpdate] | None:
        """Have the party stand still and receive the weights; None where it went on before any was sent."""
        assert self._met is not None, "they are prepared"
        party = self._party = Party(self._party.hands)
        number, sends = next(self._numbers), False
        try:
            pauses = await party.ask("stand_still", lambda _: (number, mode))
            # Nothing was sent yet: without those that are lost the others could only hang.
            sends = bool(party.hands) and not (party.lost and self._met.ranked)
        finally:
            if not sends:
                with anyio.CancelScope(shield=True):
                    await ask(party.hands, "go_on", number, patience=GRACE_SECONDS)
        if not sends:
            return None
        self.forget()
        # To its end: weights that were sent by half could neither be used nor be put back.
        updates = await to_its_end(partial(self._send, transfer, version, took, proof))
        return [replace(update, pause_seconds=pauses.get(hand, 0.0)) for hand, update in updates.items()]

    async def _send(
        self,
        transfer: WeightTransfer | LocalTransfer,
        version: str,
        took: Callable[[Hand], None],
        proof: WeightProof | None,
    ) -> dict[Hand, WeightUpdate]:
        party = self._party
        updates: dict[Hand, WeightUpdate] = {}

        async def receive(hand: Hand) -> None:
            try:
                updates[hand] = await hand.process.send("receive_weights", version, proof)
            except (WorkerLost, DeltarunnerError) as error:
                party.lose(hand, error)
            else:
                took(hand)

        async with anyio.create_task_group() as group:
            for hand in party.hands:
                group.start_soon(receive, hand)
            failure = await self._sent(transfer)
            was_lost = bool(party.lost)
            if failure:
                party.dismiss([hand for hand in party.hands if hand not in updates], failure)
        if party.lost:
            await self._part()
        if failure and not was_lost:
            raise EngineError(f"{self._shares(version)}: {failure}. The others are replaced.")
        return updates

    async def _sent(self, transfer: WeightTransfer | LocalTransfer) -> str:
        """Send the weights to the party, which waits for them; gives why that failed."""
        party = self._party
        try:
            with party.limited(transfer.seconds) as scope:
                if isinstance(transfer, LocalTransfer):
                    assert self._trainer is not None, "they met"
                    await self._trainer.send()
                else:
                    await send_parts(transfer, self)
        except Exception as error:  # a trainer's code, and the border to vLLM
            return f"the trainer failed: {worker_error(error)}"
        if scope.cancelled_caught:
            return self._hangs() if party.lost else f"the trainer sent nothing for {transfer.seconds:g} s"
        return "" if party.finished else "the trainer ended before it had sent all"

    # --- what is said

    def _hangs(self) -> str:
        first = next(iter(self._party.lost))
        return f"it may wait for {first.name} for ever, which was lost {GRACE_SECONDS:g} s ago in the same transfer"

    def _shares(self, version: str) -> str:
        there = len(self._driver.members)
        return f"the weights {version!r} are on {self._having(version)} of {there} workers"

    def _who_was_lost(self) -> str:
        lost = "; ".join(f"{hand.name} was lost ({why})" for hand, why in self._party.lost.items())
        return (
            f"{lost}. Call update_weights again, with a trainer that meets the workers anew: "
            "`len(await engines.devices())` says how many ranks they have."
        )

    def _broken_off(self) -> EngineError:
        self._met = None
        for hand in self._party.hands:
            hand.process.send("forget_checked")
        return EngineError(f"nothing was sent, and the weights are the old ones: {self._who_was_lost()}")


def _for_ranks(info: Any, ranks: int) -> Any:
    """A trainer's init info for so many ranks of workers and its own."""
    if is_dataclass(info) and not isinstance(info, type) and hasattr(info, "world_size"):
        return replace(info, world_size=1 + ranks)
    return info


def _on_a_free_port(info: Any) -> Any:
    """The same, on another port where its own is taken: by an earlier meeting, whose threads may hang. Blocks."""
    port = getattr(info, "master_port", None)
    if port is None:
        return info
    address = info.master_address
    with suppress(OSError), socket.socket() as at_any_port:
        at_any_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            at_any_port.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            at_any_port.bind((address, 0))
            return replace(info, master_port=at_any_port.getsockname()[1])
    return info
