"""An engine of several data-parallel ranks or workers: its sizes, the CPU cores of each worker, and asking all of them.

A data-parallel rank is a vLLM core of its own, with a scheduler, a cache and places; its workers share out one copy of
the model among them, by tensor or pipeline parallelism.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from runner.checked import whole
from runner.errors import BadOption

__all__ = [
    "BINDING",
    "UNIPROC",
    "ParallelSizes",
    "call_all_workers",
    "check_machine",
    "cores_by_worker",
    "is_local",
    "ranks_of",
    "single_process_variables",
]

BINDING: Final = "VLLM_CPU_OMP_THREADS_BIND"
"""The variable by which vLLM's CPU workers are told their cores, those of one worker parted from the next by a bar."""

UNIPROC: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The executor of one worker inside the engine core's own process. By its short name, "uni", vLLM refuses it on a CPU,
since nothing would bind the worker's threads to their cores: `single_process_variables` has the variables for that."""

_ARGUMENTS: Final = {
    "data": "data_parallel_size",
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "prefill": "prefill_context_parallel_size",
}
_UNBOUND: Final = ("auto", "nobind")
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")

# By any of these some of the ranks or workers may be on other machines, which nobody here can count.
_ELSEWHERE: Final = ("nnodes", "data_parallel_size_local", "data_parallel_rank", "data_parallel_address")


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Over how many ranks and workers an engine is spread."""

    data: int = 1
    """Data-parallel ranks, each with a copy of the model."""
    tensor: int = 1
    """Workers that share out each layer of a copy."""
    pipeline: int = 1
    """Stages of layers that a copy is cut into."""
    prefill: int = 1
    """Workers that share out each prompt (vLLM's prefill context parallelism)."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ParallelSizes:
        """The sizes among the engine arguments that were given.

        Raises:
            BadOption: one of them is no whole number of at least 1.
        """
        return cls(
            **{
                each: whole(f"VllmEngine({name}={given[name]!r})", given[name], least=1)
                for each, name in _ARGUMENTS.items()
                if name in given
            }
        )

    @property
    def workers(self) -> int:
        """Workers of all ranks, each on a GPU or on CPU cores of its own."""
        return self.data * self.tensor * self.pipeline * self.prefill

    def described(self) -> dict[str, int]:
        """What a run's header keeps of them."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}

    def as_given(self) -> str:
        """Those above 1, as engine arguments."""
        return ", ".join(f"{name}={size}" for each, name in _ARGUMENTS.items() if (size := getattr(self, each)) > 1)


def check_machine(given: Mapping[str, Any], *, cpu: bool, devices: int) -> None:
    """Refuse sizes that this machine has no room for, before anything is started.

    Args:
        given: the engine arguments.
        cpu: whether vLLM computes on CPU cores.
        devices: how many of those there are, or how many GPUs.

    Raises:
        BadOption: there are more workers than that, other cores are given than there are workers, or vLLM is known to
            die of it.
    """
    sizes = ParallelSizes.of(given)
    if cpu and sizes.pipeline > 1:
        raise BadOption(
            f"VllmEngine(pipeline_parallel_size={sizes.pipeline}): on a CPU vLLM dies of its first request then. Give "
            f"tensor_parallel_size={sizes.pipeline}, which shares a large model out too, or data_parallel_size="
            f"{sizes.pipeline}, which plays more episodes at once."
        )
    if sizes.workers > devices and is_local(given):
        device = "CPU core" if cpu else "GPU"
        raise BadOption(
            f"VllmEngine({sizes.as_given()}): these are {sizes.workers} workers, each on a {device} of its own, and "
            f"this process may use {devices}. Give smaller sizes."
        )
    bound = os.environ.get(BINDING, "")
    if cpu and is_local(given) and bound and bound not in _UNBOUND and len(bound.split("|")) != sizes.workers:
        raise BadOption(
            f"the variable {BINDING}={bound!r} has CPU cores for {len(bound.split('|'))} workers, and the engine has "
            f"{sizes.workers}: part theirs by a bar, as '0-3|4-7', or unset it."
        )


def is_local(given: Mapping[str, Any]) -> bool:
    """Whether all ranks and workers are processes of this machine."""
    backends = (given.get("data_parallel_backend"), given.get("distributed_executor_backend"))
    return "ray" not in backends and all(given.get(name) is None for name in _ELSEWHERE)


def single_process_variables(given: Mapping[str, Any]) -> dict[str, str]:
    """The variables that bind the threads of a CPU engine whose only worker is inside the engine core.

    One process less imports vLLM, and no message has to be passed between the two. Empty where there are several
    workers, where an executor was given, and where the variable `BINDING` leaves the cores to vLLM.
    """
    if ParallelSizes.of(given).workers > 1 or not is_local(given) or given.get("distributed_executor_backend"):
        return {}
    bound = os.environ.get(BINDING) or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    preloaded = os.environ.get("LD_PRELOAD", "")
    if not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", bound) or "omp" in preloaded:  # another OpenMP has other names
        return {}
    cores: list[int] = []
    for part in bound.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    places = ",".join(map(str, cores))
    return {"OMP_NUM_THREADS": str(len(cores)), "OMP_PLACES": f"{{{places}}}", "OMP_PROC_BIND": "true"}


def cores_by_worker(workers: int, cores: Iterable[int]) -> str:
    """All cores, shared out evenly, as vLLM reads them from the variable `BINDING`.

    Threads of one core stay together: a worker on the second thread of another one's core would wait for it.
    """
    ordered = sorted(cores, key=_on_chip)
    each, more = divmod(len(ordered), workers)
    ends = [each * number + min(number, more) for number in range(workers + 1)]
    shares = [sorted(ordered[begin:end]) for begin, end in pairwise(ends)]
    return "|".join(",".join(map(str, share)) for share in shares)


def _on_chip(core: int) -> tuple[int, ...]:
    try:
        names = (_TOPOLOGY / f"cpu{core}" / "topology" / name for name in ("physical_package_id", "core_id"))
        return (*(int(path.read_text()) for path in names), core)
    except (OSError, ValueError):  # a machine that does not tell
        return (0, core, core)


def ranks_of(llm: Any) -> int:
    """How many data-parallel ranks an `AsyncLLM` sends requests to."""
    return len(getattr(getattr(llm, "engine_core", None), "engine_ranks_managed", None) or (0,))


async def call_all_workers(llm: Any, method: str, **arguments: Any) -> list[Any]:
    """What every worker of every rank answers, in their order.

    vLLM asks all of them by `collective_rpc` too, and gives no more than what the first rank's workers say.
    """
    ask_ranks = getattr(getattr(llm, "engine_core", None), "call_utility_all_async", None)
    if ask_ranks is None:  # an older vLLM
        answers: list[Any] = await llm.collective_rpc(method, kwargs=arguments)
        return answers
    return [answer for rank in await ask_ranks("collective_rpc", method, None, (), arguments) for answer in rank]
