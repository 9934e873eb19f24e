"""Consoles that know what to do when whoever reads their output leaves, as `head` does."""

from __future__ import annotations

from rich.console import Console

from runner.runs.reporter import discard

__all__ = ["PipedConsole", "ReaderOptionalConsole"]


class ReaderOptionalConsole(Console):
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
