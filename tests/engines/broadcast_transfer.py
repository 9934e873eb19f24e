"""A weight transfer engine that broadcasts as NCCL's does, without a GPU: through a store on the loopback.

Initialization waits for all ranks, and rank 0 sends each tensor to every other rank. Each step is in the same method as
in vLLM's NCCL engine. vLLM's workers import this engine with the worker extension below, which registers it.

Usage as a remote trainer: python -m tests.engines.broadcast_transfer PORT WORLD_SIZE FILE. It connects, sends the
tensors in the file, and ends when its stdin is closed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory, WeightTransferTrainerFactory

from runner.engines.vllm.worker.extension import WeightWorker

BACKEND = "broadcast"
HOST = "127.0.0.1"
MEET_SECONDS = 60


@dataclass
class Meeting(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Address at which all ranks connect, as in NCCL's init info."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int


@dataclass
class Tensors(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM is not typed
    """Tensors, in the order of the broadcast."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


def join(address: str, port: int, rank: int, world_size: int) -> Any:
    """Return a group, once all of its ranks are connected."""
    group = StatelessProcessGroup.create(address, port, rank, world_size, store_timeout=MEET_SECONDS)
    group.barrier(MEET_SECONDS)
    return group


def broadcast(group: Any, tensors: Iterable[torch.Tensor]) -> None:
    """Send tensors to all other ranks."""
    for tensor in tensors:
        group.broadcast(tensor.contiguous(), src=0)


class BroadcastEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """Receives tensors from rank 0."""

    init_info_cls = Meeting
    update_info_cls = Tensors

    def init_transfer_engine(self, init_info: Meeting) -> None:
        parallel = self.parallel_config
        rank = init_info.rank_offset + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.group = join(init_info.master_address, init_info.master_port, rank, init_info.world_size)

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # vLLM's own method waits for an accelerator, which a CPU does not have.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Tensors) -> None:
        for name in update_info.names:
            self.model.load_weights([(name, self.group.broadcast(None, src=0))])

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


@dataclass
class BroadcastTrainerInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Address at which a trainer connects, as in NCCL's trainer info."""

    backend: ClassVar[str] = BACKEND
    master_address: str
    master_port: int
    world_size: int = 0


class BroadcastTrainer(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """Rank 0. It calls the engines from a thread during connection and sending, as vLLM's NCCL trainer does."""

    init_info_cls = BroadcastTrainerInfo

    @classmethod
    def trainer_init(cls, init_info: BroadcastTrainerInfo, *, client: Any, source: Any = None) -> Self:
        trainer = cls(client=client, source=source)
        meeting = Meeting(init_info.master_address, init_info.master_port, 1, init_info.world_size)
        with ThreadPoolExecutor(max_workers=1) as threads:
            met = threads.submit(client.init_weight_transfer_engine, asdict(meeting))
            trainer.group = join(init_info.master_address, init_info.master_port, 0, init_info.world_size)
            met.result()
        return trainer

    def send_weights(self) -> None:
        metadata = self.source.metadata()
        sent = Tensors(
            [one.name for one in metadata],
            [str(one.dtype).removeprefix("torch.") for one in metadata],
            [list(one.shape) for one in metadata],
        )
        self.client.start_weight_update()
        with ThreadPoolExecutor(max_workers=1) as threads:
            loaded = threads.submit(self.client.update_weights, asdict(sent))
            broadcast(self.group, (tensor for _, tensor in self.source))
            loaded.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.group = None


class BroadcastWorker(WeightWorker):
    """A user's worker extension, which inherits from ours."""


WeightTransferEngineFactory.register_engine(BACKEND, BroadcastEngine)
WeightTransferTrainerFactory.register_engine(BACKEND, BroadcastTrainer)


def main() -> None:
    from safetensors.torch import load_file

    port, world_size, file = sys.argv[1:]
    group = join(HOST, int(port), 0, int(world_size))
    broadcast(group, load_file(file).values())
    sys.stdin.read()


if __name__ == "__main__":
    main()
