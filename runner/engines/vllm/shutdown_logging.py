"""Filter for vLLM's log during an expected shutdown, in which its processes may be killed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["suppress_shutdown_warnings"]


@contextmanager
def suppress_shutdown_warnings() -> Iterator[None]:
    """Suppress vLLM's shutdown warnings in this process while an engine is stopped."""
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
    """Return whether a record is not one of every shutdown: killed processes, or an engine core without an answer."""
    if record.levelno < logging.WARNING:
        return True
    error = record.exc_info[0] if record.exc_info else None
    died = error is not None and error.__name__ == "EngineDeadError"
    return not died and not record.getMessage().startswith("[shutdown]")
