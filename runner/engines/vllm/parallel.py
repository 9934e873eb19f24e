"""Sizes of a parallel engine, the CPU cores of its workers, and calls of all workers.

A data-parallel rank is a separate vLLM engine core, with a scheduler, a cache and places. Its workers split one copy
of the model, by tensor or pipeline parallelism.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
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
"""Environment variable with the cores of vLLM's CPU workers, separated by bars."""

UNIPROC: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Executor that runs a single worker inside the engine core's process. On a CPU, vLLM replaces its short name "uni" by
"mp", since this executor does not bind the worker's threads to cores. The variables of `single_process_variables` bind
them."""

_ARGUMENTS: Final = {
    "data": "data_parallel_size",
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
    "prefill": "prefill_context_parallel_size",
}
_UNBOUND: Final = ("auto", "nobind")
_TOPOLOGY: Final = Path("/sys/devices/system/cpu")

# With any of these, ranks or workers may be on other machines, and this process does not have a list of their devices.
_ELSEWHERE: Final = ("nnodes", "data_parallel_size_local", "data_parallel_rank", "data_parallel_address")


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """Numbers of ranks and workers of an engine."""

    data: int = 1
    """Number of data-parallel ranks, each with a copy of the model."""
    tensor: int = 1
    """Number of workers that split each layer of a copy (tensor parallelism)."""
    pipeline: int = 1
    """Number of pipeline stages of a copy."""
    prefill: int = 1
    """Number of workers that split each prompt (vLLM's prefill context parallelism)."""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ParallelSizes:
        """Read the sizes from the engine arguments.

        Raises:
            BadOption: a size is not a whole number of at least 1.
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
        """Number of workers of all ranks together. Each worker has its own GPU or CPU cores."""
        return self.data * self.tensor * self.pipeline * self.prefill

    def described(self) -> dict[str, int]:
        """Return the sizes except `prefill`, as an entry of the header of a run file."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}

    def as_given(self) -> str:
        """Return the sizes above 1 as text, in the form of engine arguments."""
        return ", ".join(f"{name}={size}" for each, name in _ARGUMENTS.items() if (size := getattr(self, each)) > 1)


def check_machine(given: Mapping[str, Any], *, cpu: bool, devices: int) -> None:
    """Check that this machine has enough devices, before anything is started.

    Args:
        given: the engine arguments.
        cpu: True if vLLM computes on CPU cores.
        devices: number of CPU cores or GPUs.

    Raises:
        BadOption: a size is invalid, there are more workers than devices, the variable `BINDING` has core lists for
            another number of workers, or vLLM is known to fail with these sizes.
    """
    sizes = ParallelSizes.of(given)
    if cpu and sizes.pipeline > 1:
        raise BadOption(
            f"VllmEngine(pipeline_parallel_size={sizes.pipeline}): on a CPU, vLLM then dies at its first request. Give "
            f"tensor_parallel_size={sizes.pipeline}, which splits a large model too, or data_parallel_size="
            f"{sizes.pipeline}, which runs more episodes at once."
        )
    if sizes.workers > devices and is_local(given):
        device = "CPU core" if cpu else "GPU"
        raise BadOption(
            f"VllmEngine({sizes.as_given()}): these sizes need {sizes.workers} workers, each with its own {device}, "
            f"but this process may use only {devices}. Give smaller sizes."
        )
    bound = os.environ.get(BINDING, "")
    if cpu and is_local(given) and bound and bound not in _UNBOUND and len(bound.split("|")) != sizes.workers:
        raise BadOption(
            f"the variable {BINDING}={bound!r} has CPU cores for {len(bound.split('|'))} workers, and the engine has "
            f"{sizes.workers}: separate the cores of workers by bars, as '0-3|4-7', or unset the variable."
        )


def is_local(given: Mapping[str, Any]) -> bool:
    """Return whether all ranks and workers are processes of this machine."""
    backends = (given.get("data_parallel_backend"), given.get("distributed_executor_backend"))
    return "ray" not in backends and all(given.get(name) is None for name in _ELSEWHERE)


def single_process_variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Return environment variables for a CPU engine with its worker inside the engine core.

    The variables bind the worker's threads to cores. A worker inside the engine core saves a process that imports vLLM,
    and the messages to this process. The result is empty if such a worker is not possible: with several workers, with
    Ray, if ranks may be on other machines, with a given executor, with another OpenMP library than GNU's, or if the
    variable `BINDING` is set, but not to a list of cores for one worker.
    """
    if ParallelSizes.of(given).workers > 1 or not is_local(given) or given.get("distributed_executor_backend"):
        return {}
    bound = os.environ.get(BINDING) or ",".join(map(str, sorted(os.sched_getaffinity(0))))
    # These are the variables of GNU's OpenMP library; other libraries have other variables.
    other_openmp = re.search(r"libi?omp", os.environ.get("LD_PRELOAD", ""))
    if other_openmp or not re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", bound):
        return {}
    cores: list[int] = []
    for part in bound.split(","):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    places = ",".join(map(str, cores))
    return {"OMP_NUM_THREADS": str(len(cores)), "OMP_PLACES": f"{{{places}}}", "OMP_PROC_BIND": "true"}


def cores_by_worker(workers: int, cores: Iterable[int]) -> str:
    """Return an even split of all cores between workers, as a value of the variable `BINDING`.

    The hardware threads of a physical core go to one worker where the split allows it, since two workers on one
    physical core would wait for each other.
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
    except (OSError, ValueError):  # the machine does not report its topology
        return (0, core, core)


def ranks_of(llm: Any) -> int:
    """Return the number of data-parallel ranks of an `AsyncLLM`."""
    return len(getattr(getattr(llm, "engine_core", None), "engine_ranks_managed", None) or (0,))


def stale_tensors(changed: Sequence[Mapping[str, bool]]) -> dict[int, list[str]]:
    """Return the names of tensors that an update did not change in one worker, although it changed them in another one.

    The keys are the indices of the workers with such tensors. If nothing changed in a worker, but any tensor changed
    in another one, all names of the unchanged worker are included.

    Args:
        changed: for each worker, whether each of its tensors changed, by name.
    """
    exchanged = {name for tensors in changed for name, differs in tensors.items() if differs}
    kept = {
        number: [
            name
            for name, differs in tensors.items()
            if not differs and (name in exchanged or not any(tensors.values()))
        ]
        for number, tensors in enumerate(changed)
    }
    return {number: names for number, names in kept.items() if names and exchanged}


async def call_all_workers(llm: Any, method: str, **arguments: Any) -> list[Any]:
    """Call a method of every worker of every rank, and return the results in the order of ranks and workers.

    vLLM's `collective_rpc` also calls all workers, but returns only the results of the first rank's workers.
    """
    ask_ranks = getattr(getattr(llm, "engine_core", None), "call_utility_all_async", None)
    if ask_ranks is None:  # an older vLLM
        answers: list[Any] = await llm.collective_rpc(method, kwargs=arguments)
        return answers
    return [answer for rank in await ask_ranks("collective_rpc", method, None, (), arguments) for answer in rank]
