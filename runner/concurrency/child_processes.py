"""Waiting for child processes without reaping them."""

from __future__ import annotations

import os
from functools import partial

import anyio

__all__ = ["child_ended"]


async def child_ended(pid: int) -> None:
    """Wait until a child has ended, without reaping it, so that its process id stays reserved."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # the system lacks `pidfd_open`
        look = partial(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        # Waits for programs that run for hours would occupy all threads of the default limiter, so this wait has its
        # own limiter.
        await anyio.to_thread.run_sync(look, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))
        return
    try:
        await anyio.wait_readable(descriptor)
    finally:
        os.close(descriptor)
