"""What a turn is asked with: how it is sampled, whether it may call tools; and how its engine's failure ends a play."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import NoReturn

from runner.episode.key import MAIN
from runner.episode.limits import Ending
from runner.episode.state import ConversationState
from runner.errors import EngineError, RequestRejected
from runner.options import Constraint, ConstraintKind, Sampling, ToolChoice
from runner.tools.tool import Tool
from runner.trajectory import Outcome

__all__ = ["end_by", "given_constraint", "sampling_of", "tool_choice_of", "unconstrained"]


def sampling_of(state: ConversationState, given: Sampling | None) -> Sampling:
    """The sampling of the next turn, every field set; what is given goes over the conversation's own."""
    own = state.sampling()
    return own if given is None else given.over(own)


def end_by(state: ConversationState, error: EngineError) -> NoReturn:
    """End the episode of a conversation whose engine failed."""
    # A request that the engine refuses is refused again: the same seeds make the same request.
    rejected = isinstance(error, RequestRejected)
    ending = Ending(Outcome.ENGINE_ERROR, agent=state.name, error=str(error), permanent=rejected)
    state.play.limits.end_episode(ending)


def tool_choice_of(state: ConversationState, tools: Sequence[Tool], given: ToolChoice | None) -> ToolChoice:
    """Whether the next turn may, must or must not call a tool, or the tool that it must call."""
    if not tools:
        return "none"
    if given is not None:
        return given
    # The environment's is meant for `main`: another agent may not have the tool that it names.
    choice = state.play.environment.tool_choice
    known = ("auto", "none", *(tool.name for tool in tools))
    return choice if state.name == MAIN or choice in known else "auto"


def given_constraint(settings: Sampling) -> Constraint | None:
    """What the sampling says that a turn's text must match; None for anything."""
    if settings.schema is not None:
        return Constraint(ConstraintKind.JSON, json.dumps(settings.schema))
    if settings.regex is not None:
        return Constraint(ConstraintKind.REGEX, settings.regex)
    if settings.choice is not None:
        return Constraint(ConstraintKind.CHOICE, json.dumps(list(settings.choice)))
    return None


def unconstrained(settings: Sampling) -> Sampling:
    """The sampling without its constraint, which a turn records apart."""
    if settings.schema is None and settings.regex is None and settings.choice is None:
        return settings
    return replace(settings, schema=None, regex=None, choice=None)
