"""Shutdown of an engine: nothing remains, and an expected end logs no warning."""

import logging
from collections.abc import Iterator

import pytest

from runner.engines.vllm.start import suppress_shutdown_warnings


class EngineDeadError(Exception):
    """Stand-in for vLLM's error."""


@pytest.fixture
def messages() -> Iterator[list[str]]:
    """Return the messages in vLLM's log."""
    shown: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            shown.append(record.getMessage())

    logger, listener = logging.getLogger("vllm"), Listener()
    logger.addHandler(listener)
    yield shown
    logger.removeHandler(listener)


def log_all() -> None:
    logger = logging.getLogger("vllm.v1.anything")
    logger.warning("[shutdown] Process manager: force killing remaining processes count=%d", 1)
    try:
        raise EngineDeadError
    except EngineDeadError:
        logger.exception("AsyncLLM output_handler failed.")
    logger.error("the disk is full")


def test_expected_shutdown_logs_only_unexpected_warnings(messages: list[str]) -> None:
    with suppress_shutdown_warnings():
        log_all()
    assert messages == ["the disk is full"]
    messages.clear()
    log_all()
    assert len(messages) == 3, "an engine that ends by itself is logged"
