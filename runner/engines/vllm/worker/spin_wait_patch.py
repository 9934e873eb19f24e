"""Patch of vLLM's processes on a CPU: a process that waits for a message sleeps instead of polling.

For a second after each message vLLM polls its shared memory for the next one. With a GPU this saves some microseconds
per step. On a CPU it takes a core from the model and the environments: the engine core polls while the model computes.
"""

from __future__ import annotations

import logging
from typing import Any

from runner.engines.vllm.worker import parent_watch

__all__ = ["ENTRY_POINT", "patch_spin_wait", "patch_waiting_processes"]

ENTRY_POINT = "deltarunner_spin_wait"
"""Name of the entry point through which vLLM calls `patch_waiting_processes`."""

_MAX_WAIT_MS = 5  # maximum delay of a step after a lost message


def patch_waiting_processes() -> None:
    """Patch this process if our engine started it and it runs on a CPU; called by vLLM through an entry point."""
    if not parent_watch.started_by_engine():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        patch_spin_wait()
    except (ImportError, AttributeError) as error:  # another version of vLLM keeps its own way to wait
        logging.getLogger("vllm").warning("deltarunner cannot let this vLLM's processes sleep: %s", error)


def patch_spin_wait() -> None:
    """Patch this process to wait at a socket, as vLLM itself does after a second without messages."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait
    if hasattr(wait, "sleeps"):
        return

    def wait_at_the_socket(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = float("-inf")
        # A message that was sent before this process listened is lost, so the process has to check regularly.
        wait(condition, _MAX_WAIT_MS if timeout_ms is None else min(timeout_ms, _MAX_WAIT_MS))

    vars(wait_at_the_socket)["sleeps"] = True
    SpinCondition.wait = wait_at_the_socket
