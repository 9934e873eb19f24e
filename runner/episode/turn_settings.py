"""Settings of a turn: its place, sampling, tool choice and event receivers."""

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
from runner.turn_events import IdsSampled, TurnAdmitted, TurnEvent, TurnProgress

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
    """The place of a turn: conversation, cursor, number and session."""

    conversation: ConversationState
    cursor: Cursor
    """The point of the conversation at which the turn is taken; it moves after the turn."""
    number: int
    session: Session
    """The engine's memory of the previous turns."""

    @property
    def name(self) -> str:
        """Name of the turn's request, for people and logs."""
        return f"{self.conversation.episode.key.id}/{self.conversation.thread}/{self.number}"

    @property
    def seed(self) -> int:
        """The seed of the turn's random numbers."""
        return derive_seed(self.conversation.episode.seed, self.conversation.thread, self.number)


@dataclass(frozen=True, slots=True)
class TurnSinks:
    """The receiver of a turn's progress while it is sampled, and the source of its id for clients."""

    handle: Callable[[int], str] | None = None
    """Function that returns a turn's id for clients, from the turn's number; None if turns have no ids."""
    receive: Callable[[TurnProgress], None] | None = None
    """Function that receives the progress of the turn; None without a receiver."""
    sends_events: bool = True
    """True to parse the turn while it is sampled, and to send the events of its text, reasoning and calls."""
    sends_ids: bool = False
    """True to send the admission of the request and the sampled ids too."""
    raise_unbridgeable: bool = False
    """True to raise `Unbridgeable` if no exact prompt exists; False to end the episode."""

    @classmethod
    def of_events(cls, send: Callable[[TurnEvent], None]) -> TurnSinks:
        """Return sinks that send only the events of text, reasoning and calls."""

        def receive(progress: TurnProgress) -> None:
            if not isinstance(progress, TurnAdmitted | IdsSampled):
                send(progress)

        return cls(receive=receive)

    def handle_of(self, number: int) -> str:
        """Return the id, for a client, of the turn with this number; "" if turns have no ids."""
        return "" if self.handle is None else self.handle(number)


NO_SINKS = TurnSinks()
"""Sinks of a turn without a receiver; shared, since most turns have none."""


def sampling_of(conversation: ConversationState, given: Sampling | None) -> Sampling:
    """Return the sampling of the next turn, with every field set.

    Fields of `given` take precedence over the conversation's sampling.
    """
    own = conversation.sampling()
    return own if given is None else given.over(own)


def end_by(conversation: ConversationState, error: EngineError) -> NoReturn:
    """End the episode of a conversation whose engine failed, by raising EpisodeOver."""
    # The engine would refuse another attempt too, since the same seeds create the same request.
    rejected = isinstance(error, RequestRejected)
    ending = Ending(Outcome.ENGINE_ERROR, agent=conversation.name, error=str(error), permanent=rejected)
    conversation.episode.limits.end_episode(ending)


def tool_choice_of(conversation: ConversationState, tools: Sequence[Tool], given: ToolChoice | None) -> ToolChoice:
    """Return the tool choice of the next turn: "auto", "none", "required" or the name of the tool to call."""
    if not tools:
        return "none"
    if given is not None:
        return given
    # For agents other than `main`, "required" and names of tools that the agent lacks become "auto".
    choice = conversation.episode.environment.tool_choice
    known = ("auto", "none", *(tool.name for tool in tools))
    return choice if conversation.name == MAIN or choice in known else "auto"


def enforced_constraint(settings: Sampling) -> Constraint | None:
    """Return the constraint on a turn's text that its sampling requests; None without one.

    Raises:
        BadOption: no text fits the schema.
    """
    return given_constraint(settings) if settings.schema is None else answer_constraint(settings.schema)


def given_constraint(settings: Sampling) -> Constraint | None:
    """Return the constraint that the sampling requests, for a server that enforces it itself; None without one."""
    if settings.schema is not None:
        return Constraint(ConstraintKind.JSON, json.dumps(settings.schema))
    if settings.regex is not None:
        return Constraint(ConstraintKind.REGEX, settings.regex)
    if settings.choice is not None:
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(settings.choice)))
    return None


def record_not_enforced(conversation: ConversationState, settings: Sampling) -> None:
    """Add a fault, once per run, with the parts of a schema that are not enforced."""
    schema = settings.schema
    if schema is None:
        return
    missing = not_enforced(schema)
    if missing and conversation.episode.shared.is_new(f"schema {missing}"):
        conversation.episode.faults.append(f"Sampling(schema=...): not enforced: {', '.join(missing)}")


def unconstrained(settings: Sampling) -> Sampling:
    """Return the sampling without its constraint. A turn records the two separately."""
    if settings.schema is None and settings.regex is None and settings.choice is None:
        return settings
    return replace(settings, schema=None, regex=None, choice=None)
