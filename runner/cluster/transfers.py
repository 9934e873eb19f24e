"""Transfers of weights from a trainer to a whole fleet: the only update in which workers wait for each other."""

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

from runner.cluster.broadcast import GRACE_SECONDS, TransferGroup, ask
from runner.cluster.driver import Driver
from runner.cluster.protocol import WorkerLost
from runner.cluster.worker_handle import WorkerHandle
from runner.concurrency.cancellation import to_its_end
from runner.engines.proofs import WeightProof
from runner.engines.state import PauseMode, WeightUpdate
from runner.engines.transfers import Announced, TransferStep, send_parts
from runner.engines.vllm.trainer_endpoint import TrainerEndpoint, forms_of_source, worker_error
from runner.engines.vllm.weight_transfer import fitting_source
from runner.engines.weights import Checkpoint, LocalTransfer, WeightTransfer, forms_of_transfer
from runner.errors import BadInput, BadWeights, DeltarunnerError, EngineDead, EngineError

__all__ = ["FleetTransfers"]


@dataclass(frozen=True, slots=True)
class _Meeting:
    whom: Any
    """The init info of a trainer in another process, or the transfer of a trainer in this process."""
    ranks: Mapping[WorkerHandle, int]
    """The workers that are connected, and the number of ranks of each."""
    ranked: bool
    """True if the workers form one communication group, which breaks when one of them is lost."""

    def is_of(self, handles: Collection[WorkerHandle]) -> bool:
        """True if a transfer can reach exactly these workers: all connected ones, or some of them if not `ranked`."""
        return set(handles) == set(self.ranks) or (not self.ranked and set(handles) <= set(self.ranks))


class FleetTransfers:
    """The connection between a fleet and its trainer; the `Receiver` of the transfer.

    A transfer has four parts: all workers compare the announced tensors, connect to the trainer, pause, and receive.
    Only the last part changes weights. If a worker is lost in that part, the others may wait in a call that never
    returns. They are dismissed after `GRACE_SECONDS`, so that the fleet does not hang forever.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._met: _Meeting | None = None
        self._trainer: TrainerEndpoint | None = None
        # the workers' checkpoint and the configuration of their model
        self._checkpoint: tuple[Checkpoint, Any] | None = None
        self._source: Any = None
        self._transfer_group = TransferGroup(())
        self._compared: tuple[str, frozenset[WorkerHandle]] = "", frozenset()
        self._ranks: dict[WorkerHandle, int] = {}
        self._has_sent_from_here = False
        self._numbers = itertools.count(1)

    async def check(self, transfer: WeightTransfer | LocalTransfer, version: str) -> None:
        """Compare the weights on all workers, and connect the workers to the trainer if they are not connected.

        Raises:
            BadWeights: the weights do not fit, or the connection fails; nothing was changed.
            EngineError: a worker was lost, and a trainer in another process waits for it.
        """
        driver = self._driver
        prepared = False
        while not prepared:
            await driver.until(lambda: bool(driver.members))
            handles = driver.members
            if isinstance(transfer, WeightTransfer):
                await self._require_fitting(transfer, handles)
            prepared = await self._prepare(transfer, version, handles)
            if not prepared and isinstance(transfer, WeightTransfer):
                raise self._broken_off()

    def forget(self) -> None:
        """Forget the last comparison, since other weights are to be compared."""
        self._compared = "", frozenset()

    async def apply(
        self,
        transfer: WeightTransfer | LocalTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[WorkerHandle], None],
        proof: WeightProof | None = None,
    ) -> list[WeightUpdate]:
        """Pause the workers, load the weights on them, and resume them.

        Args:
            transfer: the checked transfer.
            version: the version that the weights will have.
            mode: the treatment of turns that are being sampled.
            took: called with each worker as soon as it has the weights.
            proof: the proof that each worker's engine must pass with the weights; None without one.

        Returns:
            The updates of the workers that received the weights.

        Raises:
            BadWeights: the weights do not fit, or the connection fails, and no worker was changed.
            EngineError: nothing was sent, the trainer failed, fewer workers received the weights than are needed, or
                the other workers cannot receive them any more; the message has the reason, such as the lost workers.
            EngineDead: too few workers are left, or the proof failed on all workers.
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
        took: Callable[[WorkerHandle], None],
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
                    raise EngineError(
                        f"{self._shares(version)}, and the other workers cannot get these weights: {error}"
                    ) from error
            if any(handle in driver.handles for handle in self._lacking(version)):
                continue  # a worker was lost before any weight was sent, and the others continued unchanged
            if self._having(version) >= driver.fleet.least:
                return updates
            await driver.until(lambda: bool(self._lacking(version)))

    async def _apply_from_elsewhere(
        self,
        transfer: WeightTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[WorkerHandle], None],
        proof: WeightProof | None,
    ) -> list[WeightUpdate]:
        driver = self._driver
        met = self._met_elsewhere()
        members = [handle for handle in driver.members if handle in met.ranks]
        if not members or not met.is_of(members):
            self._transfer_group = TransferGroup(members)
            self._transfer_group.lost = {handle: handle.why for handle in met.ranks if handle not in members}
            raise self._broken_off()
        if not await self._prepare(transfer, version, members):
            raise self._broken_off()
        updates = await self._exchange(transfer, version, mode, took, proof)
        if updates is None:
            raise self._broken_off()
        for handle in self._lacking(version) if updates else ():
            if handle in driver.handles:
                handle.dismiss("it started after the others had connected to their trainer, so it has older weights")
        if self._transfer_group.lost and self._having(version) < driver.fleet.least:
            raise EngineError(
                f"only {self._having(version)} of {len(driver.members)} workers have the weights {version!r}, and "
                f"{driver.fleet.least} are needed: {self._who_was_lost()}"
            )
        return updates

    def _lacking(self, version: str) -> list[WorkerHandle]:
        return [handle for handle in self._driver.members if handle.version != version]

    def _having(self, version: str) -> int:
        return sum(handle.version == version for handle in self._driver.handles)

    # --- connections

    async def _require_fitting(self, transfer: WeightTransfer, handles: Sequence[WorkerHandle]) -> None:
        """Raise BadWeights for a connection that cannot work, before any worker compares weights."""
        given = transfer.init
        if given is None:
            met = self._met_elsewhere()
            if not met.is_of(handles):
                absent = [f"{handle.name} is not connected" for handle in handles if handle not in met.ranks]
                absent += [f"{handle.name} was connected and is gone" for handle in met.ranks if handle not in handles]
                raise BadWeights(
                    f"WeightTransfer(init=...) is not given, and the workers are not the connected ones: "
                    f"{', '.join(absent)}. Connect again, with init=."
                )
            return
        offset = given.get("rank_offset")
        if offset is None or self._is_met(transfer, handles):
            return
        if not isinstance(offset, int):
            raise BadWeights(
                f"WeightTransfer(init=...): rank_offset={offset!r} is not a whole number: give the number of ranks "
                "before the workers' own."
            )
        await self._count_ranks(handles)
        size, there = given.get("world_size"), offset + sum(self._ranks.values())
        if size is not None and size != there:
            raise BadWeights(
                f"WeightTransfer(init=...): world_size={size!r}, and there are {there} ranks: {offset} before the "
                f"workers' own (rank_offset), and {there - offset} of {len(self._ranks)} workers. Before you connect, "
                "count the workers' ranks by `len(await engines.devices())`."
            )

    def _met_elsewhere(self) -> _Meeting:
        if self._met is None or not isinstance(self._met.whom, Mapping):
            raise BadWeights("WeightTransfer(init=...) has to be given: the engines are not connected to this trainer.")
        return self._met

    async def _count_ranks(self, handles: Sequence[WorkerHandle]) -> None:
        devices = await ask(handles, "control", "devices", patience=self._driver.stall_seconds)
        # A worker without a model also takes part, with one rank.
        self._ranks = {handle: len(devices[handle]) or 1 for handle in handles if handle in devices}

    async def _prepare(
        self, transfer: WeightTransfer | LocalTransfer, version: str, handles: Sequence[WorkerHandle]
    ) -> bool:
        """Compare the weights on workers and connect them to the trainer as one transfer group, unless this was done.

        Returns:
            True if the workers are ready; False if all workers were lost, or a worker that the others need was lost.

        Raises:
            BadWeights: the weights do not fit, or the connection fails.
        """
        if self._compared == (version, frozenset(handles)) and self._is_met(transfer, handles):
            return True
        self.forget()
        self._transfer_group = transfer_group = TransferGroup(handles)
        announced = await self._driver.launcher.put(await self._announced(transfer, handles))
        try:
            answers = await transfer_group.ask("check_weights", lambda _: (announced, version), compares=True)
        except BadInput:
            self._forget_checked()
            raise
        if not answers or (transfer_group.lost and isinstance(transfer, WeightTransfer) and self._is_ranked(transfer)):
            return False
        if not self._is_met(transfer, transfer_group.handles):
            try:
                await self._meet(transfer)
            finally:
                if self._met is None:
                    self._forget_checked()
        if self._met is None:
            return False
        self._compared = version, frozenset(transfer_group.handles)
        return True

    def _forget_checked(self) -> None:
        for handle in self._transfer_group.handles:
            handle.process.send("forget_checked")

    async def _announced(self, transfer: WeightTransfer | LocalTransfer, handles: Sequence[WorkerHandle]) -> Announced:
        if isinstance(transfer, LocalTransfer):
            if self._checkpoint is None:
                calls = ask(handles[:1], "checkpoint", patience=self._driver.stall_seconds)
                self._checkpoint = next(iter((await calls).values()), None)
            if self._checkpoint is None:  # the engines have no model
                self._source = transfer.source
                forms = await anyio.to_thread.run_sync(forms_of_source, self._source)
            else:
                self._source, forms = await anyio.to_thread.run_sync(fitting_source, transfer, *self._checkpoint)
            return Announced("LocalTransfer", forms, transfer.seconds)
        return Announced("WeightTransfer(update=...)", forms_of_transfer(transfer), transfer.seconds)

    def _is_met(self, transfer: WeightTransfer | LocalTransfer, handles: Collection[WorkerHandle]) -> bool:
        met = self._met
        if met is None or not met.is_of(handles):
            return False
        if isinstance(transfer, LocalTransfer):
            return self._trainer is not None and self._trainer.is_for(transfer)
        return isinstance(met.whom, Mapping) and transfer.init in (None, met.whom)

    async def _meet(self, transfer: WeightTransfer | LocalTransfer) -> None:
        """Connect the transfer group to the trainer. If a worker that the others need is lost, none is connected.

        Raises:
            BadWeights: the connection fails for another reason than a lost worker.
        """
        transfer_group, name, ranked = self._transfer_group, type(transfer).__name__, self._is_ranked(transfer)
        await self._part()
        if ranked:
            await self._count_ranks(transfer_group.handles)
        there = len(transfer_group.handles)
        failure: Exception | None = None
        with transfer_group.limited(transfer.seconds) as scope:
            try:
                await self._join(transfer)
            except Exception as error:  # any error of vLLM; no weight was changed
                failure = error
        if len(transfer_group.handles) < there:
            await transfer_group.until_answered()
            transfer_group.dismiss(transfer_group.pending, self._hangs())
        elif scope.cancelled_caught:
            failure = TimeoutError(f"not within {transfer.seconds:g} s: check that both use the same address")
        if not transfer_group.handles or (ranked and len(transfer_group.handles) < there):
            await self._part()
        elif failure is not None:
            await self._part()
            if isinstance(failure, BadWeights):
                raise failure
            raise BadWeights(f"{name}: engines and trainer did not connect: {worker_error(failure)}") from failure
        else:
            ranks = {handle: self._ranks.get(handle, 1) for handle in transfer_group.handles}
            whom = transfer if isinstance(transfer, LocalTransfer) else dict(transfer.init or {})
            self._met = _Meeting(whom, ranks, ranked)

    def _is_ranked(self, transfer: WeightTransfer | LocalTransfer) -> bool:
        """True if the workers form one communication group, so that none can be missing."""
        if isinstance(transfer, LocalTransfer):
            return True
        if transfer.init is None:
            return self._met is not None and self._met.ranked
        return "rank_offset" in transfer.init

    async def _join(self, transfer: WeightTransfer | LocalTransfer) -> None:
        if isinstance(transfer, WeightTransfer):
            assert transfer.init is not None, "otherwise they are connected"
            await self.meet(transfer.init)
            return
        info = _for_ranks(transfer.info, sum(self._ranks.values()))
        if self._has_sent_from_here:
            info = await anyio.to_thread.run_sync(_on_a_free_port, info)
        self._has_sent_from_here = True
        self._trainer = TrainerEndpoint(transfer, self, self._source)
        await self._trainer.meet(info)

    async def _part(self) -> None:
        """Disconnect from the trainer: the workers cannot be reached together any more."""
        self._met = None
        if self._trainer is not None:
            trainer, self._trainer = self._trainer, None
            await trainer.close()

    # --- methods of `Receiver`

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Connect every worker to the trainer, each with its own ranks."""
        inits: dict[WorkerHandle, Mapping[str, Any]] = {}
        offset = init.get("rank_offset")
        for handle in self._transfer_group.handles:
            inits[handle] = init if offset is None else {**init, "rank_offset": offset}
            offset = None if offset is None else offset + self._ranks.get(handle, 1)
        await self._transfer_group.ask("meet", lambda handle: (inits[handle],))

    async def step(self, step: TransferStep, part: Any = None) -> None:
        """Run one step of the weight transfer on every worker, and wait until all have run it.

        Raises:
            ConnectionError: no worker is left.
        """
        transfer_group = self._transfer_group
        await transfer_group.ask("take_step", lambda _: (step, part))
        if not transfer_group.handles:
            raise ConnectionError("no worker is left")
        transfer_group.finished = step is TransferStep.FINISH

    # --- sending

    async def _exchange(
        self,
        transfer: WeightTransfer | LocalTransfer,
        version: str,
        mode: PauseMode,
        took: Callable[[WorkerHandle], None],
        proof: WeightProof | None,
    ) -> list[WeightUpdate] | None:
        """Pause the transfer group, send it the weights, and return the updates; None if nothing was sent."""
        assert self._met is not None, "the transfer is prepared"
        transfer_group = self._transfer_group = TransferGroup(self._transfer_group.handles)
        number, sends = next(self._numbers), False
        try:
            pauses = await transfer_group.ask("hold", lambda _: (number, mode))
            # Nothing is sent if a worker of a communication group was lost, since the others would hang without it.
            sends = bool(transfer_group.handles) and not (transfer_group.lost and self._met.ranked)
        finally:
            if not sends:
                with anyio.CancelScope(shield=True):
                    await ask(transfer_group.handles, "release", number, patience=GRACE_SECONDS)
        if not sends:
            return None
        self.forget()
        # A transfer is not cancelled half-way, since partly sent weights could neither be used nor be restored.
        updates = await to_its_end(partial(self._send, transfer, version, took, proof))
        return [replace(update, pause_seconds=pauses.get(handle, 0.0)) for handle, update in updates.items()]

    async def _send(
        self,
        transfer: WeightTransfer | LocalTransfer,
        version: str,
        took: Callable[[WorkerHandle], None],
        proof: WeightProof | None,
    ) -> dict[WorkerHandle, WeightUpdate]:
        transfer_group = self._transfer_group
        handles, dead = tuple(transfer_group.handles), list[EngineDead]()
        updates: dict[WorkerHandle, WeightUpdate] = {}

        async def receive(handle: WorkerHandle) -> None:
            try:
                updates[handle] = await handle.process.send("receive_weights", version, proof)
            except (WorkerLost, DeltarunnerError) as error:
                if isinstance(error, EngineDead):
                    dead.append(error)
                transfer_group.lose(handle, error)
            else:
                took(handle)

        async with anyio.create_task_group() as group:
            for handle in handles:
                group.start_soon(receive, handle)
            failure = await self._sent(transfer)
            was_lost = bool(transfer_group.lost)
            if failure:
                transfer_group.dismiss([handle for handle in transfer_group.handles if handle not in updates], failure)
        if transfer_group.lost:
            await self._part()
        if failure and not was_lost:
            raise EngineError(f"{self._shares(version)}: {failure}. The other workers are replaced.")
        if proof is not None and dead and len(dead) == len(handles):
            raise dead[0]
        return updates

    async def _sent(self, transfer: WeightTransfer | LocalTransfer) -> str:
        """Send the weights to the waiting transfer group. Return "", or the reason why this failed."""
        transfer_group = self._transfer_group
        try:
            with transfer_group.limited(transfer.seconds) as scope:
                if isinstance(transfer, LocalTransfer):
                    assert self._trainer is not None, "they are connected"
                    await self._trainer.send()
                else:
                    await send_parts(transfer, self)
        except Exception as error:  # any error of a trainer's code and of vLLM
            return f"the trainer failed: {worker_error(error)}"
        if scope.cancelled_caught:
            return self._hangs() if transfer_group.lost else f"the trainer sent nothing for {transfer.seconds:g} s"
        return "" if transfer_group.finished else "the trainer ended before it had sent all weights"

    # --- messages

    def _hangs(self) -> str:
        first = next(iter(self._transfer_group.lost))
        return f"it may wait forever for {first.name}, which was lost {GRACE_SECONDS:g} s ago in the same transfer"

    def _shares(self, version: str) -> str:
        there = len(self._driver.members)
        return f"the weights {version!r} are on {self._having(version)} of {there} workers"

    def _who_was_lost(self) -> str:
        lost = "; ".join(f"{handle.name} was lost ({why})" for handle, why in self._transfer_group.lost.items())
        return (
            f"{lost}. Call update_weights again, with a trainer that connects to the workers again: "
            "`len(await engines.devices())` returns how many ranks they have."
        )

    def _broken_off(self) -> EngineError:
        self._met = None
        for handle in self._transfer_group.handles:
            handle.process.send("forget_checked")
        return EngineError(f"nothing was sent, so the weights are the old ones: {self._who_was_lost()}")


def _for_ranks(info: Any, ranks: int) -> Any:
    """Return a trainer's init info for this many ranks of workers and the trainer's own rank."""
    if is_dataclass(info) and not isinstance(info, type) and hasattr(info, "world_size"):
        return replace(info, world_size=1 + ranks)
    return info


def _on_a_free_port(info: Any) -> Any:
    """Return a trainer's init info, with a free port if its port is taken. Blocks the thread.

    Threads of an earlier connection may hang, and keep the port.
    """
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
