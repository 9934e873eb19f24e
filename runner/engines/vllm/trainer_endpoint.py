"""The trainer's end of vLLM's weight transfer, for a trainer in this process.

It runs in threads; the receiver runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio
import anyio.to_thread
from anyio import from_thread
from anyio.lowlevel import EventLoopToken, current_token

from runner.engines.transfers import Receiver, TransferStep
from runner.engines.weights import LocalTransfer, TensorForm
from runner.errors import BadWeights

__all__ = ["TrainerEndpoint", "forms_of_source", "worker_error"]

SHUTDOWN_SECONDS = 10.0
"""Seconds that the trainer's end may take to disconnect; a connection that hangs is abandoned."""


class TrainerEndpoint:
    """Sender of the weights of one source to one receiver.

    Args:
        transfer: source of the weights, and vLLM's init info for a backend.
        receiver: the engine's end.
        source: source to use instead of the transfer's, for example with other tensor names; None for the transfer's.
    """

    def __init__(self, transfer: LocalTransfer, receiver: Receiver, source: Any = None) -> None:
        self._transfer = transfer
        self._source = transfer.source if source is None else source
        self._receiver = receiver
        self._client: _WeightSyncClient | None = None
        self._trainer: Any = None

    def is_for(self, transfer: LocalTransfer) -> bool:
        """Return whether this endpoint can also send the weights of another transfer."""
        return self._transfer.info == transfer.info and self._transfer.source is transfer.source

    async def meet(self, info: Any) -> None:
        """Connect to the receiver.

        Args:
            info: vLLM's init info for the trainer.

        Raises:
            Exception: any error of vLLM.
        """
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

        client = self._client = _WeightSyncClient(self._receiver, current_token())

        def join() -> Any:
            return WeightTransferTrainerFactory.trainer_init(info, client=client, source=self._source)

        met = False
        try:
            self._trainer = await anyio.to_thread.run_sync(join, abandon_on_cancel=True)
            met = True
        finally:
            client.closed = not met

    async def send(self) -> None:
        """Send the current weights. The receiver has to be paused.

        Raises:
            Exception: any error of vLLM.
        """
        await anyio.to_thread.run_sync(self._trainer.send_weights, abandon_on_cancel=True)

    async def close(self) -> None:
        """Disconnect from the receiver; abandoned threads cannot call the receiver any more."""
        if self._client is not None:
            self._client.closed = True
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            with anyio.move_on_after(SHUTDOWN_SECONDS, shield=True):
                await anyio.to_thread.run_sync(_shut_down, trainer, abandon_on_cancel=True)


def _shut_down(trainer: Any) -> None:
    with suppress(Exception):  # the connection is not used any more
        trainer.shutdown()


class _WeightSyncClient:
    """Client by which the trainer's threads call the receiver; it implements vLLM's protocol `VLLMWeightSyncClient`."""

    def __init__(self, receiver: Receiver, loop: EventLoopToken) -> None:
        self.closed = False
        self._receiver = receiver
        self._loop = loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call(self._receiver.meet, init_info)

    def start_weight_update(self) -> None:
        self._call(self._receiver.step, TransferStep.START)

    def update_weights(self, update_info: Any) -> None:
        self._call(self._receiver.step, TransferStep.LOAD, update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        # The version is recorded by the caller of the update.
        self._call(self._receiver.step, TransferStep.FINISH)

    def _call(self, call: Callable[..., Coroutine[Any, Any, None]], *given: Any) -> None:
        if self.closed:
            raise ConnectionError("the transfer was closed")
        # vLLM's NCCL trainer calls this client from its own threads, which have no event loop.
        from_thread.run(call, *given, token=self._loop)


def worker_error(error: BaseException) -> str:
    """Return the message of an error in vLLM's worker, without vLLM's additions."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    _, found, rest = text.partition("Worker failed with error '")
    if found:
        text = rest.rpartition("', please check")[0]
    # A single worker runs inside the engine core, whose errors have this prefix.
    return text.removeprefix("Exception: Call to collective_rpc method failed: ")[:1000]


def forms_of_source(source: Any) -> dict[str, TensorForm]:
    """Return the tensor forms that a trainer's source announces. Blocks the thread.

    Raises:
        BadWeights: the source does not announce its tensors.
    """
    try:
        metadata = source.metadata()
        return {one.name: TensorForm(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in metadata}
    except Exception as error:  # a trainer's code may raise any exception; no weight has changed yet
        raise BadWeights(
            f"LocalTransfer(source=...) is {type(source).__name__}, which does not list its tensors "
            f"({worker_error(error)}): give vLLM's ModuleSource(model)."
        ) from error
