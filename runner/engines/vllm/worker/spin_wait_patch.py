"""Runs inside vLLM's processes on a CPU: whoever waits for another process sleeps, and leaves the model its CPU core.

For a second behind each message vLLM asks its shared memory again and again whether the next one is there. That saves
some microseconds a step where a GPU computes. Where CPU cores compute, it takes one from them and from the
environments: the engine core waits in this way for as long as the model takes.
"""

from __future__ import annotations

import logging
from typing import Any

from runner.engines.vllm.worker import parent_watch

__all__ = ["ENTRY_POINT", "patch_spin_wait", "patch_waiting_processes"]

ENTRY_POINT = "deltarunner_waiting"
"""The name under which vLLM knows `patch_waiting_processes`."""

_MAX_WAIT_MS = 5  # the most that a step can be late by a note that was lost


def patch_waiting_processes() -> None:
    """Mend the waiting of this process, if it is one of an engine of ours, on a CPU."""
    if not parent_watch.started_by_engine():
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    try:
        patch_spin_wait()
    except (ImportError, AttributeError) as error:  # another vLLM, which may wait as it likes
        logging.getLogger("vllm").warning("deltarunner cannot let this vLLM's processes sleep: %s", error)


def patch_spin_wait() -> None:
    """From now on this process waits for messages at a socket, as vLLM does by itself behind a second of silence."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    wait = SpinCondition.wait
    if hasattr(wait, "sleeps"):
        return

    def wait_at_the_socket(condition: Any, timeout_ms: int | None = None) -> None:
        condition.busy_loop_s = float("-inf")
        # A note that was sent before this process listened is lost, so that it has to look by itself now and then.
        wait(condition, _MAX_WAIT_MS if timeout_ms is None else min(timeout_ms, _MAX_WAIT_MS))

    vars(wait_at_the_socket)["sleeps"] = True
    SpinCondition.wait = wait_at_the_socket
