"""What the end of an engine leaves behind, since its processes are killed where they take too long to leave."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

__all__ = ["expected_end", "release", "shared_memory_of"]

_SHARED_MEMORY = "/dev/shm/psm_"  # as Python names its own


@contextmanager
def expected_end() -> Iterator[None]:
    """Keep from vLLM's log in this process what it warns of while an engine ends that was told to."""
    with ExitStack() as stack:
        for handler in _handlers(logging.getLogger("vllm")):
            handler.addFilter(_unexpected)
            stack.callback(handler.removeFilter, _unexpected)
        yield


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _unexpected(record: logging.LogRecord) -> bool:
    """Whether a record tells more than what every ending brings: processes killed, a silent engine core."""
    if record.levelno < logging.WARNING:
        return True
    error = record.exc_info[0] if record.exc_info else None
    died = error is not None and error.__name__ == "EngineDeadError"
    return not died and not record.getMessage().startswith("[shutdown]")


def shared_memory_of(pid: int) -> set[str]:
    """The names of the shared memory that a process uses; none where it is gone."""
    with suppress(OSError):
        mapped = (line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        return {path.rpartition("/")[2] for path in mapped if path.startswith(_SHARED_MEMORY)}
    return set()


def release(names: Iterable[str]) -> None:
    """Free shared memory whose owner was killed; Python would do it at our own end, and warn."""
    for name in names:
        with suppress(FileNotFoundError):
            memory = SharedMemory(name)
            memory.close()
            memory.unlink()
