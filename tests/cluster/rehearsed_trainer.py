"""A trainer with vLLM's interface that sends nothing, and hangs or fails where a test sets this."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

__all__ = ["Info", "Parts", "part"]


def part(*names: str) -> dict[str, Any]:
    """Return the update info for tensors with these names."""
    return {"names": list(names), "dtype_names": ["bfloat16"] * len(names), "shapes": [[1]] * len(names)}


@dataclass
class Parts:
    """Source of weights that are sent in parts of one tensor each."""

    names: tuple[str, ...] = ("a", "b", "c")
    sent: list[str] = field(default_factory=list)
    """The parts that were acknowledged, in order."""
    met: list[int] = field(default_factory=list)
    """The world size of each connection."""
    hangs: bool = False
    """True if the first transfer hangs after all parts were requested, like a broadcast whose receiver died."""
    fails: bool = False
    ends_early: bool = False

    def metadata(self) -> list[Any]:
        return [SimpleNamespace(name=name, dtype="torch.bfloat16", shape=(1,)) for name in self.names]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(())


@dataclass
class Info(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Init info like NCCL's."""

    backend: ClassVar[str] = "rehearsed"
    world_size: int = 0
    rank: int = 0


@dataclass
class UnrankedInfo(TrainerInitInfo):  # type: ignore[misc]  # vLLM is not typed
    """Init info like IPC's."""

    backend: ClassVar[str] = "rehearsed"
    rank: int = 0


class RehearsedTrainer(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM is not typed
    """Trainer that calls the methods of vLLM's trainers, in their order."""

    init_info_cls = Info

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> Self:
        trainer = cls(client=client, source=source)
        size = getattr(init_info, "world_size", None)
        client.init_weight_transfer_engine({"rank_offset": 1, "world_size": size} if size else {"packed": False})
        source.met.append(size)
        return trainer

    def send_weights(self) -> None:
        source, client = self.source, self.client
        client.start_weight_update()
        for name in source.names:
            client.update_weights(part(name))
            source.sent.append(name)
            if source.fails:
                raise MemoryError("the trainer has no room")
        if source.ends_early:
            return
        if source.hangs:
            source.hangs = False
            threading.Event().wait(3)
            raise ConnectionError("no receiver waits any more")
        client.finish_weight_update()


WeightTransferTrainerFactory.register_engine(Info.backend, RehearsedTrainer)
