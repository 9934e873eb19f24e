"""What the end of an engine says in vLLM's log, since its processes are killed where they take too long to leave."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["suppress_shutdown_warnings"]


@contextmanager
def suppress_shutdown_warnings() -> Iterator[None]:
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
