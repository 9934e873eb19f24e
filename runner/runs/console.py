"""Consoles that know what to do when whoever reads their output leaves, as `head` does."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO

from rich.console import Console

__all__ = ["LastingConsole", "PipedConsole", "discard"]


def discard(stream: IO[str]) -> None:
    """Send to nowhere what is written to `stream` from here on, what it holds back included."""
    with suppress(OSError, ValueError):  # a stream without a descriptor has no reader who could leave
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LastingConsole(Console):
    """Goes on without its reader: what it shows is a view of work that does not depend on it."""

    def on_broken_pipe(self) -> None:
        """Show nothing any more."""
        self.quiet = True
        discard(self.file)


class PipedConsole(Console):
    """Raises `BrokenPipeError`: without a reader there is nothing left to do."""

    def on_broken_pipe(self) -> None:
        """Let the error out, which Rich would turn into an exit code of its own."""
        raise BrokenPipeError
