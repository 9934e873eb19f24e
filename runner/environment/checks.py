"""Checks of an environment and its model, before the environment is played."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment, NotInEpisode, check_episode_attributes
from runner.episode.hooks import Hooks
from runner.episode.model import ChatModel
from runner.errors import BadEnvironment, BadOption, BadTemplate, DeltarunnerError
from runner.options import ToolChoice
from runner.parsing.call_grammar import not_enforced
from runner.parsing.limitations import CallLimitation
from runner.parsing.roundtrip import ambiguities, losses
from runner.scoring import ScorerKind
from runner.tokens.shown_arguments import unseen_of
from runner.tools.modern_schema import modern
from runner.tools.schema_faults import uncallable
from runner.tools.tool import Tool

__all__ = ["as_environment", "check_playable", "check_tools", "common_system_prompt"]


def as_environment(environment: Environment[Any] | type[Environment[Any]]) -> Environment[Any]:
    """Return the environment object; a class is constructed without arguments.

    Raises:
        BadEnvironment: the value is not an environment, its class needs arguments, or its constructor raised an error
            or set an attribute that each episode sets.
    """
    if not isinstance(environment, type) or not issubclass(environment, Environment):
        if not isinstance(environment, Environment):
            raise BadEnvironment(f"{environment!r:.80} is not an Environment: subclass runner.Environment.")
        check_episode_attributes(f"{type(environment).__name__}.__init__(): self", vars(environment))
        return environment
    name = environment.__name__
    try:
        inspect.signature(environment.__init__).bind(None)
    except TypeError as error:
        raise BadEnvironment(f"{name} cannot be constructed without arguments ({error}): give {name}(...).") from error
    try:
        return as_environment(environment())
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadEnvironment(
            f"{name}() raised {describe_error(error)}: correct its __init__, or give an object of the class."
        ) from error


def check_playable(environment: Environment[Any]) -> None:
    """Check that the environment has a reward, since without one nothing can be trained; a metric is not a reward.

    Raises:
        BadEnvironment: the environment has no reward.
    """
    if not any(scorer.kind != ScorerKind.METRIC for scorer in environment.scorers):
        name = type(environment).__name__
        raise BadEnvironment(
            f"{name} has no reward: mark a method with @reward (or @group_reward), such as\n\n"
            f"    @reward\n    def correct(self) -> bool:\n        return self.episode.text == self.task.answer"
        )


def check_tools(environment: Environment[Any], chat: ChatModel) -> list[str]:
    """Check that the template can print the tools, that their calls can be parsed, and that `tool_choice` is usable.

    Only tools of the class are checked. Tools that `setup()` adds, or that a client offers, are known only in an
    episode.

    Returns:
        Warnings about smaller losses, such as calls that the template does not keep exactly.

    Raises:
        BadTemplate: the template does not support tools, or writes calls that cannot be parsed.
        BadOption: `tool_choice` names no tool and no mode, or cannot be enforced.
    """
    tools = environment.bound_tools()
    warnings = _check_calls_carried(tools, chat) if tools else []
    names = [tool.name for tool in tools]
    choice = environment.tool_choice
    known = ("auto", "none", *names, *(["required"] if names else []))
    # setup() may add tools.
    sure = not environment.overrides("setup")
    if sure and choice not in known:
        raise BadOption(f"tool_choice={choice!r}: no such tool; give one of {', '.join(map(repr, known))}.")
    if choice in known and (sure or not chat.parser.writes_as_read):
        # Without this check, the same error would end each episode.
        constraint = chat.parser.constraint(tools, choice)
        if constraint is not None:
            chat.engine.check_constraint(constraint)
            warnings += _unenforced(tools, chat, choice)
    return warnings


def _check_calls_carried(tools: Sequence[Tool], chat: ChatModel) -> list[str]:
    chat.require_calls()
    template, form = f"template {chat.renderer.template.name!r}", chat.parser.format
    warnings = [*_unseen(tools, chat), *uncallable(tools)]
    if not chat.parser.writes_as_read or form.calls is None:  # the written format is unknown
        return warnings
    lost = list(losses(form, tools))
    if lost:
        # The worst losses come first.
        lost.sort(key=lambda loss: not loss.uncallable)
        loss = f"of the tool {lost[0].tool!r}: {lost[0].what}{_others(lost)}"
        if lost[0].uncallable:
            raise BadTemplate(f"{template} cannot write calls {loss}")
        warnings.append(f"{template} does not keep every call {loss}")
    warnings += _unchecked(tools)
    unclear = list(ambiguities(tools)) if CallLimitation.UNTYPED in chat.learnt.limitations else []
    if unclear:
        warnings.append(
            f"{template} writes strings without quotes ({CallLimitation.UNTYPED}), and {unclear[0]} also takes other "
            "values: a text that looks like such a value is not read as a string. Give it one type, or split it in two."
            f"{_others(unclear)}"
        )
    strict = [tool.name for tool in tools if tool.strict]
    if strict and not form.calls.trigger:
        warnings.append(
            f"{template} has no text that begins a call ({CallLimitation.BARE}), so strict=True of the tool "
            f"{strict[0]!r} works only if tool_choice requires a call.{_others(strict)}"
        )
    return warnings


def _unseen(tools: Sequence[Tool], chat: ChatModel) -> Iterator[str]:
    """Yield one warning for each tool with parts of arguments that prompts omit."""
    for tool in tools:
        unseen = unseen_of(chat.renderer.render_tool, tool.as_openai())
        if unseen:
            yield (
                f"template {chat.renderer.template.name!r} does not show the model {unseen[0]}, for {tool.name}(): "
                f"describe it in the tool's docstring, or use another template.{_others(unseen)}"
            )


def _unchecked(tools: Sequence[Tool]) -> Iterator[str]:
    """Yield one warning about the schema keywords that are not checked, if any."""
    found = [(tool, note) for tool in tools for note in modern(tool.parameters).notes]
    if found:
        tool, note = found[0]
        yield (
            f"the schema of the tool {tool.name!r} is not checked completely: {note}."
            f"{_others([f'{each.name}: {said}' for each, said in found])}"
        )


def _unenforced(tools: Sequence[Tool], chat: ChatModel, choice: ToolChoice) -> Iterator[str]:
    """Yield one warning about the parts of schemas that the grammar of a constrained call does not enforce, if any."""
    form = chat.parser.format.calls
    held = [tool for tool in tools if choice in ("required", tool.name)] or (
        tools if choice == "auto" and any(tool.strict for tool in tools) else []
    )
    found = [f"{tool.name}: {each}" for tool in held for each in not_enforced(form, tool)] if form else []
    if found:
        yield (
            f"parts of the schemas are not enforced during sampling, only checked afterwards: "
            f"{found[0]}.{_others(found)}"
        )


def _others(found: Sequence[object]) -> str:
    """Return a sentence about the items after the first, which names at most `MAX_OTHERS`; "" if there are none."""
    if len(found) < 2:
        return ""
    more = f" and {len(found) - 1 - MAX_OTHERS} others" if len(found) - 1 > MAX_OTHERS else ""
    return f" Likewise: {', '.join(map(str, found[1 : 1 + MAX_OTHERS]))}{more}."


MAX_OTHERS: Final = 5
"""Maximum number of tools or arguments that a message names after the first."""


def common_system_prompt(environment: Hooks) -> str | None:
    """Return the system prompt that all episodes share; None without one, or if it depends on the episode."""
    try:
        return environment.system_prompt
    except NotInEpisode:
        return None
