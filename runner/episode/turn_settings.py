"""What a turn is asked with: where, how it is sampled, what tools it may call, who hears it; what its failure ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from runner.engines.base import Session
from runner.episode.key import MAIN
from runner.episode.limits import Ending
from runner.episode.state import ConversationState
from runner.episode.turn_tree import Cursor
from runner.errors import EngineError, RequestRejected
from runner.options import Constraint, ConstraintKind, Sampling, ToolChoice
from runner.parsing.schema_grammar import answer_constraint, not_enforced
from runner.seeds import derive_seed
from runner.tools.tool import Tool
from runner.trajectory import Outcome
from runner.turn_events import IdsSampled, TurnAdmitted, TurnEvent

__all__ = [
    "NO_SINKS",
    "TurnContext",
    "TurnSinks",
    "end_by",
    "enforced_constraint",
    "given_constraint",
    "record_not_enforced",
    "sampling_of",
    "tool_choice_of",
    "unconstrained",
]


@dataclass(slots=True)
class TurnContext:
    """Where a turn is taken."""

    state: ConversationState
    """The conversation."""
    cursor: Cursor
    """The point of the conversation at which the agent speaks; it moves behind the turn."""
    number: int
    """The turn's number."""
    session: Session
    """The engine's memory of the turns before."""

    @property
    def name(self) -> str:
        """The name of the turn's request, for people and logs."""
        return f"{self.state.episode.key.id}/{self.state.thread}/{self.number}"

    @property
    def seed(self) -> int:
        """The seed of the turn's random numbers."""
        return derive_seed(self.state.episode.seed, self.state.thread, self.number)


@dataclass(frozen=True, slots=True)
class TurnSinks:
    """Whoever hears of a turn while it is sampled, and what names the turn to them."""

    handle: Callable[[int], str] | None = None
    """Makes what names the turn of a number to a client."""
    on_event: Callable[[TurnEvent], None] | None = None
    """Is told what the turn says."""
    on_progress: Callable[[TurnAdmitted | IdsSampled], None] | None = None
    """Is told when the engine took the turn's request, and its ids as they are sampled."""
    raise_unbridgeable: bool = False
    """Whether a prompt that cannot be made is raised as `Unbridgeable` and ends nothing; else it ends the episode."""

    @property
    def listens(self) -> bool:
        """Whether anybody hears of the turn before it is over."""
        return self.on_event is not None or self.on_progress is not None

    def handle_of(self, number: int) -> str:
        """What names the turn of this number to a client; "" where nobody names turns."""
        return "" if self.handle is None else self.handle(number)


NO_SINKS = TurnSinks()
"""The audience of a turn that nobody hears before it is over: one for all of them, since most turns are such."""


def sampling_of(state: ConversationState, given: Sampling | None) -> Sampling:
    """The sampling of the next turn, every field set; what is given goes over the conversation's own."""
    own = state.sampling()
    return own if given is None else given.over(own)


def end_by(state: ConversationState, error: EngineError) -> NoReturn:
    """End the episode of a conversation whose engine failed."""
    # A request that the engine refuses is refused again: the same seeds make the same request.
    rejected = isinstance(error, RequestRejected)
    ending = Ending(Outcome.ENGINE_ERROR, agent=state.name, error=str(error), permanent=rejected)
    state.episode.limits.end_episode(ending)


def tool_choice_of(state: ConversationState, tools: Sequence[Tool], given: ToolChoice | None) -> ToolChoice:
    """Whether the next turn may, must or must not call a tool, or the tool that it must call."""
    if not tools:
        return "none"
    if given is not None:
        return given
    # The environment's is meant for `main`: another agent may not have the tool that it names.
    choice = state.episode.environment.tool_choice
    known = ("auto", "none", *(tool.name for tool in tools))
    return choice if state.name == MAIN or choice in known else "auto"


def enforced_constraint(settings: Sampling) -> Constraint | None:
    """What holds a turn to what its sampling says that the text must match; None for anything.

    Raises:
        BadOption: nothing fits the schema.
    """
    return given_constraint(settings) if settings.schema is None else answer_constraint(settings.schema)


def given_constraint(settings: Sampling) -> Constraint | None:
    """What the sampling says that a turn's text must match, as a server is asked for it; None for anything."""
    if settings.schema is not None:
        return Constraint(ConstraintKind.JSON, json.dumps(settings.schema))
    if settings.regex is not None:
        return Constraint(ConstraintKind.REGEX, settings.regex)
    if settings.choice is not None:
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(settings.choice)))
    return None


def record_not_enforced(state: ConversationState, settings: Sampling) -> None:
    """Note once a run what a schema says that nothing holds its turns to."""
    schema = settings.schema
    if schema is None:
        return
    told = not_enforced(schema)
    if told and state.episode.shared.is_new(f"schema {told}"):
        state.episode.faults.append(f"Sampling(schema=...): not enforced: {', '.join(told)}")


def unconstrained(settings: Sampling) -> Sampling:
    """The sampling without its constraint, which a turn records apart."""
    if settings.schema is None and settings.regex is None and settings.choice is None:
        return settings
    return replace(settings, schema=None, regex=None, choice=None)
