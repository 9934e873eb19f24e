"""Redirection of the output of libraries and child processes from the terminal to a log file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from runner.errors import StorageFailed

__all__ = ["TerminalStreams", "quiet_output"]


@dataclass(frozen=True, slots=True)
class TerminalStreams:
    """Streams that still write to where stdout and stderr wrote before the redirection."""

    stdout: TextIO
    stderr: TextIO


@contextmanager
def quiet_output(path: Path) -> Iterator[TerminalStreams]:
    """Append everything written to descriptors 1 and 2 to the file `path`; yield the terminal's streams.

    The descriptors are redirected, not `sys.stdout`, because engines write from C++ and from child processes, which
    inherit descriptors. The descriptors are restored at the end.

    Raises:
        StorageFailed: the file cannot be written.
    """
    with ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("ab"))
        except OSError as error:
            raise StorageFailed(f"The log {path} cannot be written: {error}. Give another file or folder.") from error
        yield TerminalStreams(
            stdout=stack.enter_context(_redirected(1, sys.stdout, log.fileno())),
            stderr=stack.enter_context(_redirected(2, sys.stderr, log.fileno())),
        )


@contextmanager
def _redirected(descriptor: int, stream: TextIO, target: int) -> Iterator[TextIO]:
    stream.flush()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    with os.fdopen(os.dup(descriptor), "w", buffering=1, encoding=encoding, errors="replace") as terminal:
        os.dup2(target, descriptor)
        try:
            yield terminal
        finally:
            stream.flush()  # flushed here, since the buffered output belongs to the log, not to the restored descriptor
            terminal.flush()
            os.dup2(terminal.fileno(), descriptor)
