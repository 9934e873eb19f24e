"""What changes while a run plays: the episodes in flight, what came of them, and why the run ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import anyio

from runner.episode.limits import Ending
from runner.errors import DeltarunnerError, EngineDead
from runner.runs.player import Attempt
from runner.runs.summary import Summary
from runner.trajectory import Outcome

__all__ = ["RunState"]


@dataclass(slots=True, eq=False)
class RunState:
    """The state that the parts of a run share, and the ways to end the run."""

    summary: Summary
    """What came of the episodes so far."""

    file: Path | None = None
    """The path of the run file; None where there is none, or none is named yet."""

    plays: set[Attempt] = field(default_factory=set)
    """The episodes in flight."""

    failure: DeltarunnerError | None = None
    """Why the run ends before its work is done; the first reason stays."""

    draining: bool = False
    """Whether no further episode begins."""

    cut_with: Ending | None = None
    """How episodes ended that were in flight when they were all cut; None before."""

    over: bool = False
    """Whether every episode has ended and the last result is on its way to the reader."""

    feeding: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    """The scope in which episodes are begun. It ends without those that were begun: they have a scope of their own."""

    def drain(self) -> None:
        """Begin no further episode; those in flight are played to their end."""
        self.draining = True
        self.feeding.cancel()

    def cancel(self, ending: Ending | None = None) -> None:
        """Cut every episode in flight, with this ending or as partial."""
        self.drain()
        self.cut_with = self.cut_with or ending or Ending(Outcome.CANCELLED)
        for play in self.plays:
            play.cancel(ending)

    def begin(self, play: Attempt) -> None:
        """An attempt begins; it is cut at once where the run was while its task had not taken its first step."""
        self.plays.add(play)
        if self.cut_with is not None:
            play.cancel(self.cut_with)

    def fail(self, failure: DeltarunnerError, *, cancel: bool = False) -> None:
        """End the run for this reason; episodes in flight go on to their end, or with `cancel` are cut."""
        self.failure = self.failure or failure
        if cancel:
            self.cancel()
        else:
            self.drain()

    def engine_died(self, error: EngineDead) -> None:
        """End the run; what is in flight failed because of its engine, and not of itself."""
        self.fail(error)
        # Not as partial: they are failures of the engine, and say so in the file.
        self.cancel(Ending(Outcome.ENGINE_ERROR, error=str(error)))
