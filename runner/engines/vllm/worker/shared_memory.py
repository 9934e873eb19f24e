"""Shared memory of an engine's processes: its names stay in the system where they are killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

__all__ = ["release", "shared_memory_of"]

_SHARED_MEMORY = ("/dev/shm/psm_", "/dev/shm/vllm_")  # as Python names its own, and vLLM that of its CPU workers


def shared_memory_of(pid: int) -> set[str]:
    """The names of the shared memory that a process and those below it use; none where it is gone."""
    names = set[str]()
    with suppress(OSError):
        mapped = (line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line)
        names = {path.rpartition("/")[2] for path in mapped if path.startswith(_SHARED_MEMORY)}
    for child in _children_of(pid):
        names |= shared_memory_of(child)
    return names


def _children_of(pid: int) -> Iterator[int]:
    with suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            yield from map(int, (thread / "children").read_text().split())


def release(names: Iterable[str]) -> None:
    """Free shared memory whose owner was killed; Python would do it at our own end, and warn."""
    for name in names:
        with suppress(FileNotFoundError):
            memory = SharedMemory(name)
            memory.close()
            memory.unlink()
