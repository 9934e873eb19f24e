"""Weights through vLLM's weight transfer engines: from a trainer elsewhere, or both ends from this process."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from runner.engines.transfers import RelayedTransfer, TransferStep, send_parts
from runner.engines.vllm.trainer_endpoint import TrainerEndpoint, forms_of_source, worker_error
from runner.engines.vllm.transformers_names import CheckpointSource
from runner.engines.weights import Checkpoint, LocalTransfer, WeightTransfer, compare, forms_of_transfer
from runner.errors import BadWeights, EngineError

__all__ = ["Transfer", "VllmTransfers"]

Transfer = WeightTransfer | LocalTransfer | RelayedTransfer
"""What brings weights through a transfer engine."""

_NOT_STARTED = (
    'needs an engine that was started for one: VllmEngine(weight_transfer_config={"backend": "nccl"}), or "ipc".'
)


class VllmTransfers:
    """The connection between one `AsyncLLM` and its trainer; the `Receiver` of what is sent."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._joined: Mapping[str, Any] | None = None  # the init info of a trainer elsewhere that was met
        self._trainer: TrainerEndpoint | None = None  # vLLM's trainer end, where it is in this process

    async def check(self, transfer: Transfer, model: Checkpoint) -> None:
        """Compare what is announced, and let both ends meet where they have not yet.

        Raises:
            BadWeights: the weights do not fit, or nobody is at the other end.
        """
        name = transfer.announced.given_as if isinstance(transfer, RelayedTransfer) else type(transfer).__name__
        if getattr(self._llm.vllm_config, "weight_transfer_config", None) is None:
            raise BadWeights(f"a {name} {_NOT_STARTED}")
        if isinstance(transfer, RelayedTransfer):
            compare(transfer.announced.forms, model, given_as=name)
            if transfer.init is not None:  # else who brings it knows that they have met
                await self._meet(name, transfer.announced.seconds, partial(self._join, transfer.init))
        elif isinstance(transfer, LocalTransfer):
            source = transfer.source
            forms = await anyio.to_thread.run_sync(forms_of_source, source)
            if not forms.keys() <= model.forms.keys():
                source = CheckpointSource(self._llm.vllm_config.model_config.hf_config, source)
                forms = await anyio.to_thread.run_sync(forms_of_source, source)
            compare(forms, model, given_as=name)
            if self._trainer is None or not self._trainer.is_for(transfer):
                await self._meet(name, transfer.seconds, partial(self._join_here, transfer, source))
        else:
            compare(forms_of_transfer(transfer), model, given_as=f"{name}(update=...)")
            if transfer.init is not None and transfer.init != self._joined:
                await self._meet(name, transfer.seconds, partial(self._join, transfer.init))
            elif self._joined is None:
                raise BadWeights(f"{name}(init=...) is not given, and engine and trainer have not met before.")

    async def receive(self, transfer: Transfer) -> None:
        """Exchange the weights; vLLM is paused.

        Raises:
            EngineError: the trainer went away.
            Exception: whatever vLLM raises.
        """
        if isinstance(transfer, RelayedTransfer):
            await transfer.receive(self)  # who brings it knows when its trainer is gone
            return
        # The caller's shield would hold whoever waits for a trainer that is gone.
        with anyio.move_on_after(transfer.seconds) as scope:
            if isinstance(transfer, LocalTransfer):
                assert self._trainer is not None, "they met"
                await self._trainer.send()
            else:
                await send_parts(transfer, self)
        if scope.cancelled_caught:
            raise EngineError(f"the trainer sent nothing for {transfer.seconds:g} s")

    async def _meet(self, name: str, seconds: float, join: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._joined = None
        if self._trainer is not None:  # it may hold the port at which the next one waits
            trainer, self._trainer = self._trainer, None
            await trainer.close()
        try:
            with anyio.fail_after(seconds):
                await join()
        except TimeoutError as error:
            raise BadWeights(f"{name}: engine and trainer do not meet: not within {seconds:g} s") from error
        except Exception as error:  # the border to vLLM; no weight was touched
            raise BadWeights(f"{name}: engine and trainer do not meet: {worker_error(error)}") from error

    async def _join(self, init: Mapping[str, Any]) -> None:
        await self.meet(init)
        self._joined = dict(init)

    async def _join_here(self, transfer: LocalTransfer, source: Any) -> None:
        trainer = TrainerEndpoint(transfer, self, source)
        await trainer.meet(transfer.info)
        self._trainer = trainer

    # --- what a `Receiver` does

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Join a trainer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init)))

    async def step(self, step: TransferStep, part: Any = None) -> None:
        """Take a step of a transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if step is TransferStep.START:
            await self._llm.start_weight_update()
        elif step is TransferStep.LOAD:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=part))
        else:
            await self._llm.finish_weight_update()
