"""Weights through vLLM's weight transfer engines: from a trainer elsewhere, or both ends from this process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import anyio
import anyio.to_thread
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, current_token

from runner.engines.weights import (
    Checkpoint,
    LocalTransfer,
    TensorForm,
    WeightTransfer,
    compare,
    forms_of_transfer,
)
from runner.errors import BadWeights, EngineError

__all__ = ["VllmTransfers", "worker_said"]

_NOT_STARTED = (
    'needs an engine that was started for one: VllmEngine(weight_transfer_config={"backend": "nccl"}), or "ipc".'
)


class VllmTransfers:
    """The connection between one `AsyncLLM` and its trainer."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._joined: object = None  # init info, or trainer info and source, of who has met
        self._trainer: Any = None  # vLLM's trainer end, where it is in this process

    async def check(self, transfer: WeightTransfer | LocalTransfer, model: Checkpoint) -> None:
        """Compare what is announced, and let both ends meet where they have not yet.

        Raises:
            BadWeights: the weights do not fit, or nobody is at the other end.
        """
        name = type(transfer).__name__
        if getattr(self._llm.vllm_config, "weight_transfer_config", None) is None:
            raise BadWeights(f"a {name} {_NOT_STARTED}")
        if isinstance(transfer, LocalTransfer):
            compare(await anyio.to_thread.run_sync(_forms_of_source, transfer.source), model, given_as=name)
            if self._joined != (transfer.info, id(transfer.source)):
                await self._meet(name, transfer.seconds, self._join_here, transfer)
            return
        compare(forms_of_transfer(transfer), model, given_as=f"{name}(update=...)")
        if transfer.init is not None and transfer.init != self._joined:
            await self._meet(name, transfer.seconds, self._join, transfer.init)
        elif not isinstance(self._joined, Mapping):
            raise BadWeights(f"{name}(init=...) is not given, and engine and trainer have not met before.")

    async def receive(self, transfer: WeightTransfer | LocalTransfer) -> None:
        """Exchange the weights; vLLM is paused.

        Raises:
            EngineError: the trainer went away.
            Exception: whatever vLLM raises.
        """
        # The caller's shield would hold whoever waits for a trainer that is gone.
        with anyio.move_on_after(transfer.seconds) as scope:
            if isinstance(transfer, LocalTransfer):
                await anyio.to_thread.run_sync(self._trainer.send_weights, abandon_on_cancel=True)
            else:
                await self._receive(transfer)
        if scope.cancelled_caught:
            raise EngineError(f"the trainer sent nothing for {transfer.seconds:g} s")

    async def _receive(self, transfer: WeightTransfer) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        for part in transfer.parts:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=dict(part)))
        await self._llm.finish_weight_update()

    async def _meet(
        self, name: str, seconds: float, join: Callable[[Any], Coroutine[Any, Any, None]], whom: Any
    ) -> None:
        self._joined = None
        try:
            with anyio.fail_after(seconds):
                await join(whom)
        except TimeoutError as error:
            raise BadWeights(f"{name}: engine and trainer do not meet: not within {seconds:g} s") from error
        except Exception as error:  # the border to vLLM; no weight was touched
            raise BadWeights(f"{name}: engine and trainer do not meet: {worker_said(error)}") from error

    async def _join(self, init: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init)))
        self._joined = dict(init)

    async def _join_here(self, transfer: LocalTransfer) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client = _Client(self._llm, current_token())

        def join() -> Any:
            return WeightTransferTrainerFactory.trainer_init(transfer.info, client=client, source=transfer.source)

        self._trainer = await anyio.to_thread.run_sync(join, abandon_on_cancel=True)
        self._joined = (transfer.info, id(transfer.source))


class _Client:
    """What vLLM's trainer end asks of vLLM's engine, from whichever thread; vLLM's `VLLMWeightSyncClient`."""

    def __init__(self, llm: Any, loop: EventLoopToken) -> None:
        self._llm = llm
        self._loop = loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._call(self._llm.init_weight_transfer_engine, WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._call(self._llm.start_weight_update)

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._call(self._llm.update_weights, WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call(self._llm.finish_weight_update)  # versions are stamped by whoever asked for the update

    def _call(self, call: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        # vLLM's NCCL trainer calls from threads of its own, which know no event loop.
        from_thread.run(call, *given, token=self._loop)


def worker_said(error: BaseException) -> str:
    """What vLLM's worker said, where it was a worker that failed."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    _, found, rest = text.partition("Worker failed with error '")
    return (rest.rpartition("', please check")[0] if found else text)[:1000]


def _forms_of_source(source: Any) -> dict[str, TensorForm]:
    try:
        metadata = source.metadata()
        return {one.name: TensorForm(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in metadata}
    except Exception as error:  # a trainer's code, before anything was touched
        raise BadWeights(
            f"LocalTransfer(source=...) is {type(source).__name__}, which cannot say what it sends "
            f"({worker_said(error)}): give vLLM's ModuleSource(model)."
        ) from error
