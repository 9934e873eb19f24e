"""What is looked at before an environment is played: that it can be, with the model that is there."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Final

from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment, NotInEpisode
from runner.episode.hooks import Hooks
from runner.episode.model import ChatModel
from runner.errors import BadEnvironment, BadOption, BadTemplate, DeltarunnerError
from runner.options import ToolChoice
from runner.parsing.call_grammar import not_enforced
from runner.parsing.limitations import CallLimitation
from runner.parsing.roundtrip import ambiguities, losses
from runner.scoring import ScorerKind
from runner.tokens.shown_arguments import unseen_of
from runner.tokens.tool_support import require_tools
from runner.tools.modern_schema import modern
from runner.tools.tool import Tool

__all__ = ["as_environment", "check_playable", "check_tools", "common_system_prompt"]


def as_environment(environment: Environment[Any] | type[Environment[Any]]) -> Environment[Any]:
    """An environment object; a class is constructed.

    Raises:
        BadEnvironment: it is none, or its class cannot be constructed without arguments.
    """
    if not isinstance(environment, type):
        if not isinstance(environment, Environment):
            raise BadEnvironment(f"{environment!r:.80} is no Environment: subclass runner.Environment.")
        return environment
    name = environment.__name__
    try:
        inspect.signature(environment.__init__).bind(None)
    except TypeError as error:
        raise BadEnvironment(f"{name} cannot be constructed without arguments ({error}): give {name}(...).") from error
    try:
        return environment()
    except DeltarunnerError:
        raise
    except (Exception, SystemExit) as error:
        raise BadEnvironment(f"{name}() raised {describe_error(error)}") from error


def check_playable(environment: Environment[Any]) -> None:
    """Refuse an environment without a reward: nobody could be trained on it."""
    if not any(scorer.kind != ScorerKind.METRIC for scorer in environment.scorers):
        name = type(environment).__name__
        raise BadEnvironment(
            f"{name} has no reward: mark a method with @reward (or @group_reward), such as\n\n"
            f"    @reward\n    def correct(self) -> bool:\n        return self.episode.text == self.task.answer"
        )


def check_tools(environment: Environment[Any], chat: ChatModel) -> list[str]:
    """Refuse tools that the model would not be shown, or whose calls could not be read; say what is read otherwise.

    It looks at the tools of the class. Those that `setup()` adds are known only in an episode.

    Returns:
        What of the tools' calls this template does not carry as it was meant, a line for people each.

    Raises:
        BadTemplate: the template does not carry tools, or writes calls in a form that cannot be read.
        BadOption: `tool_choice` names no tool, or cannot be enforced.
    """
    tools = environment.bound_tools()
    warnings = _check_calls_carried(tools, chat) if tools else []
    names = [tool.name for tool in tools]
    choice = environment.tool_choice
    known = ("auto", "none", *names, *(["required"] if names else []))
    # A setup() may bring tools of its own.
    sure = not environment.overrides("setup")
    if sure and choice not in known:
        raise BadOption(f"tool_choice={choice!r}: no such tool. Tools: {', '.join(names) or 'none'}.")
    if choice in known and (sure or not chat.parser.writes_as_read):
        # Now, where each episode would be refused by it.
        constraint = chat.parser.constraint(tools, choice)
        if constraint is not None:
            chat.engine.check_constraint(constraint)
            warnings += _unenforced(tools, chat, choice)
    return warnings


def _check_calls_carried(tools: Sequence[Tool], chat: ChatModel) -> list[str]:
    require_tools(chat.renderer)
    template = f"template {chat.renderer.template.name!r}"
    form = chat.parser.format
    if not chat.parser.reads_calls:
        raise BadTemplate(
            f"{template} writes tool calls in a form that cannot be read ({chat.learnt.missing}): {chat.learnt.why}. "
            "Give --template pythonic or hermes, or a file that writes them otherwise; or name what reads them: "
            "--tool-format vllm:NAME, a tool parser of vLLM's; or put a response_template that does into the model's "
            "tokenizer_config.json."
        )
    warnings = list(_unseen(tools, chat))
    if not chat.parser.writes_as_read or form.calls is None:  # how they are read says nothing of how they are written
        return warnings
    lost = list(losses(form, tools))
    if lost:
        # What is worst stands first.
        lost.sort(key=lambda loss: not loss.uncallable)
        told = f"of the tool {lost[0].tool!r}: {lost[0].what}{_others(lost)}"
        if lost[0].uncallable:
            raise BadTemplate(f"{template} cannot carry calls {told}")
        warnings.append(f"{template} does not carry every call {told}")
    warnings += _unchecked(tools)
    unclear = list(ambiguities(tools)) if CallLimitation.UNTYPED in chat.learnt.traits else []
    if unclear:
        warnings.append(
            f"{template} writes strings without quotes ({CallLimitation.UNTYPED}), and {unclear[0]} takes other values "
            "beside them: what reads as such a value is never a string. Give the argument one type, or make two of it."
            f"{_others(unclear)}"
        )
    strict = [tool.name for tool in tools if tool.strict]
    if strict and not form.calls.trigger:
        warnings.append(
            f"{template} has nothing that announces a call ({CallLimitation.BARE}), so strict=True of the tool "
            f"{strict[0]!r} holds only where tool_choice requires a call.{_others(strict)}"
        )
    return warnings


def _unseen(tools: Sequence[Tool], chat: ChatModel) -> Iterator[str]:
    """What prompts leave out of the tools' arguments, a line for each tool."""
    for tool in tools:
        unseen = unseen_of(chat.renderer.render_tool, tool.as_openai())
        if unseen:
            yield (
                f"template {chat.renderer.template.name!r} does not show the model {unseen[0]}, for {tool.name}(): say "
                f"it in the tool's docstring, or take another template.{_others(unseen)}"
            )


def _unchecked(tools: Sequence[Tool]) -> Iterator[str]:
    """Keywords of schemas that are not taken as they stand."""
    found = [(tool, note) for tool in tools for note in modern(tool.parameters).notes]
    if found:
        tool, note = found[0]
        yield (
            f"the schema of the tool {tool.name!r} is not checked whole: {note}."
            f"{_others([f'{each.name}: {said}' for each, said in found])}"
        )


def _unenforced(tools: Sequence[Tool], chat: ChatModel, choice: ToolChoice) -> Iterator[str]:
    """What the grammar of a call that is held to its schema does not say."""
    form = chat.parser.format.calls
    held = [tool for tool in tools if choice in ("required", tool.name)] or (
        tools if choice == "auto" and any(tool.strict for tool in tools) else []
    )
    found = [f"{tool.name}: {each}" for tool in held for each in not_enforced(form, tool)] if form else []
    if found:
        yield (
            f"not everything that the schemas say is enforced while a call is sampled, the rest is checked afterwards: "
            f"{found[0]}.{_others(found)}"
        )


def _others(found: Sequence[object]) -> str:
    """The same of all but the first, in a few words."""
    if len(found) < 2:
        return ""
    more = f" and {len(found) - 1 - MAX_OTHERS} others" if len(found) - 1 > MAX_OTHERS else ""
    return f" Likewise: {', '.join(map(str, found[1 : 1 + MAX_OTHERS]))}{more}."


MAX_OTHERS: Final = 5
"""So many tools or arguments are named beside the first."""


def common_system_prompt(environment: Hooks) -> str | None:
    """The system prompt that all episodes have; None where there is none, or where it depends on the episode."""
    try:
        return environment.system_prompt
    except NotInEpisode:
        return None
