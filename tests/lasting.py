"""Guard of a process that plays tests: no test ends the process, and its stderr names any other cause of its end."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

__all__ = ["begin"]

_end = os._exit


def begin() -> None:
    """Guard this process, before pytest captures its output."""
    process, stderr = os.getpid(), os.dup(2)

    def end(code: int) -> None:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        # The guard is for this process and for calls from `runner` only. A forked child may end so, and a worker whose
        # tests are over.
        if os.getpid() == process and caller.partition(".")[0] == "runner":
            raise AssertionError(f"{caller} would have ended the process of the tests with code {code}")
        _end(code)

    def report_signal(number: int, frame: FrameType | None) -> None:
        played = os.environ.get("PYTEST_CURRENT_TEST", "no test")
        os.write(stderr, f"\n{signal.Signals(number).name} ends process {process} in {played}\n".encode())
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    os._exit = end  # type: ignore[assignment]  # it does not return if it may end the process
    signal.signal(signal.SIGTERM, report_signal)
