"""Exchange of weights through vLLM's weight transfer engines, with a trainer in this process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import anyio
import anyio.to_thread

from runner.engines.transfers import RelayedTransfer, TransferStep, send_parts
from runner.engines.vllm.parallel import call_all_workers
from runner.engines.vllm.tied_weights import compare_tied, equal_in_source
from runner.engines.vllm.trainer_endpoint import TrainerEndpoint, forms_of_source, worker_error
from runner.engines.vllm.transformers_names import CheckpointSource, compare_with_checkpoint
from runner.engines.weights import Checkpoint, LocalTransfer, TensorForm, WeightTransfer, compare, forms_of_transfer
from runner.errors import BadWeights, EngineError

__all__ = ["Transfer", "VllmTransfers", "fitting_source"]

Transfer = WeightTransfer | LocalTransfer | RelayedTransfer
"""Weights that arrive through one of vLLM's weight transfer engines."""

_NOT_STARTED = (
    'needs an engine with a transfer backend: VllmEngine(weight_transfer_config={"backend": "nccl"}), or "ipc".'
)


_UUID_PREFIX = "GPU-"


def trainer_gpu() -> str | None:
    """Return the UUID of this process's current GPU without the prefix "GPU-"; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid).removeprefix(_UUID_PREFIX)


def fitting_source(transfer: LocalTransfer, model: Checkpoint, config: Any) -> tuple[Any, dict[str, TensorForm]]:
    """Return a trainer's source with the tensor names of the checkpoint, and its tensor forms. Blocks the thread.

    Args:
        transfer: the transfer.
        model: the checkpoint with which the engine started.
        config: transformers' configuration of the model.

    Raises:
        BadWeights: the weights do not fit.
    """
    name, source = type(transfer).__name__, transfer.source
    forms = given = forms_of_source(source)
    if not forms.keys() <= model.forms.keys():
        source = CheckpointSource(config, source, model)
        forms = forms_of_source(source)
    compare(forms, model, given_as=name)
    compare_tied(given, model, config, partial(equal_in_source, transfer.source), given_as=name)
    return source, forms


class VllmTransfers:
    """Connection between one `AsyncLLM` and its trainer; the `Receiver` of a transfer."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._joined: Mapping[str, Any] | None = None  # init info of the external trainer that was joined
        self._trainer: TrainerEndpoint | None = None  # the trainer's end, if the trainer is in this process

    async def check(self, transfer: Transfer, model: Checkpoint) -> None:
        """Check the announced tensors, and connect both ends if needed.

        Raises:
            BadWeights: the weights do not fit, the engine has no transfer backend, or the two ends are not connected.
        """
        name = transfer.announced.given_as if isinstance(transfer, RelayedTransfer) else type(transfer).__name__
        if getattr(self._llm.vllm_config, "weight_transfer_config", None) is None:
            raise BadWeights(f"a {name} {_NOT_STARTED}")
        if isinstance(transfer, RelayedTransfer):
            self._compare(transfer.announced.forms, model, name)
            if transfer.init is not None:  # None if both ends are connected, or will be later
                await self._meet(name, transfer.announced.seconds, partial(self._join, transfer.init))
        elif isinstance(transfer, LocalTransfer):
            await self._check_local(name, transfer, model)
        else:
            self._compare(forms_of_transfer(transfer), model, f"{name}(update=...)")
            if transfer.init is not None and transfer.init != self._joined:
                await self._meet(name, transfer.seconds, partial(self._join, transfer.init))
            elif self._joined is None:
                raise BadWeights(f"{name}: the engine and the trainer are not connected yet: give init=.")

    def _compare(self, forms: Mapping[str, TensorForm], model: Checkpoint, name: str) -> None:
        remedy = (
            "announce and send what transformers.core_model_loading.revert_weight_conversion(model, "
            "model.state_dict()) returns"
        )
        config = self._llm.vllm_config.model_config.hf_config
        compare_with_checkpoint(forms, model, config, given_as=name, remedy=remedy)

    async def _check_local(self, name: str, transfer: LocalTransfer, model: Checkpoint) -> None:
        config = self._llm.vllm_config.model_config.hf_config
        source, _ = await anyio.to_thread.run_sync(fitting_source, transfer, model, config)
        if self._trainer is None or not self._trainer.is_for(transfer):
            if getattr(transfer.info, "backend", None) == "nccl":
                await self._check_devices(name)
            await self._meet(name, transfer.seconds, partial(self._join_here, transfer, source))

    async def receive(self, transfer: Transfer) -> None:
        """Exchange the weights while vLLM is paused.

        Raises:
            EngineError: the weights did not arrive in time, or a relayed transfer was closed early.
            Exception: any error of vLLM.
        """
        if isinstance(transfer, RelayedTransfer):
            await transfer.receive(self)  # the relay detects the loss of its trainer
            return
        # The time limit is needed, since the caller's shield prevents a cancellation.
        with anyio.move_on_after(transfer.seconds) as scope:
            if isinstance(transfer, LocalTransfer):
                assert self._trainer is not None, "call check() before receive()"
                await self._trainer.send()
            else:
                await send_parts(transfer, self)
        if scope.cancelled_caught:
            raise EngineError(f"the trainer did not send all weights within {transfer.seconds:g} s")

    async def _check_devices(self, name: str) -> None:
        """Check that trainer and workers have different GPUs. On a shared H200, NCCL delivered wrong values.

        Raises:
            BadWeights: a worker has the trainer's GPU.
        """
        own = await anyio.to_thread.run_sync(trainer_gpu)
        if own is None:
            return
        try:
            devices = await call_all_workers(self._llm, "device_name")
        except Exception:  # vLLM may raise any exception; another worker extension does not have the method
            return
        if own in {device.removeprefix(_UUID_PREFIX) for device in devices}:
            raise BadWeights(
                f"{name}: trainer and engine are both on {_UUID_PREFIX}{own}, and NCCL is for one process per GPU: use "
                'VllmEngine(weight_transfer_config={"backend": "ipc"}) with IPCTrainerInitInfo, or another GPU.'
            )

    async def _meet(self, name: str, seconds: float, join: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._joined = None
        if self._trainer is not None:  # the old trainer endpoint may still hold the port that the new endpoint needs
            trainer, self._trainer = self._trainer, None
            await trainer.close()
        try:
            with anyio.fail_after(seconds):
                await join()
        except TimeoutError as error:
            raise BadWeights(
                f"{name}: engine and trainer did not connect within {seconds:g} s: check that both use the same address"
            ) from error
        except Exception as error:  # vLLM may raise any exception; no weight has changed
            raise BadWeights(f"{name}: engine and trainer did not connect: {worker_error(error)}") from error

    async def _join(self, init: Mapping[str, Any]) -> None:
        await self.meet(init)
        self._joined = dict(init)

    async def _join_here(self, transfer: LocalTransfer, source: Any) -> None:
        trainer = TrainerEndpoint(transfer, self, source)
        await trainer.meet(transfer.info)
        self._trainer = trainer

    # --- methods of `Receiver`

    async def meet(self, init: Mapping[str, Any]) -> None:
        """Connect the workers to a trainer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init)))

    async def step(self, step: TransferStep, part: Any = None) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if step is TransferStep.START:
            await self._llm.start_weight_update()
        elif step is TransferStep.LOAD:
            await self._llm.update_weights(WeightTransferUpdateRequest(update_info=part))
        else:
            await self._llm.finish_weight_update()
