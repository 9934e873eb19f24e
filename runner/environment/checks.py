"""What is looked at before an environment is played: that it can be, with the model that is there."""

from __future__ import annotations

import inspect
from typing import Any

from runner.concurrency.user_code import describe_error
from runner.environment.environment import Environment, NotInEpisode
from runner.episode.hooks import Hooks
from runner.episode.model import ChatModel
from runner.errors import BadEnvironment, BadOption, BadTemplate, DeltarunnerError
from runner.scoring import ScorerKind
from runner.tokens.tool_support import require_tools

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


def check_tools(environment: Environment[Any], chat: ChatModel) -> None:
    """Refuse tools that the model would not be shown, or whose calls could not be read.

    Raises:
        BadTemplate: the template does not carry tools, or writes calls in a form that cannot be read.
        BadOption: `tool_choice` names no tool, or a call would have to be enforced whose form is not known.
    """
    tools = environment.bound_tools()
    if tools:
        require_tools(chat.renderer)
        if not chat.parser.reads_calls:
            raise BadTemplate(
                f"template {chat.renderer.template.name!r} writes tool calls in a form that cannot be read "
                f"({chat.learnt.missing}): {chat.learnt.why}. Give --template pythonic or hermes, or a file that "
                "writes them otherwise; or name what reads them: --tool-format vllm:NAME, a tool parser of vLLM's; or "
                "put a response_template that does into the model's tokenizer_config.json."
            )
    names = [tool.name for tool in tools]
    choice = environment.tool_choice
    known = ("auto", "none", *names, *(["required"] if names else []))
    # A setup() may bring tools of its own.
    if choice not in known and not environment.overrides("setup"):
        raise BadOption(f"tool_choice={choice!r}: no such tool. Tools: {', '.join(names) or 'none'}.")
    if tools and choice in known and not chat.parser.writes_as_read:
        chat.parser.constraint(tools, choice)  # refuses what would be refused at the first turn


def common_system_prompt(environment: Hooks) -> str | None:
    """The system prompt that all episodes have; None where there is none, or where it depends on the episode."""
    try:
        return environment.system_prompt
    except NotInEpisode:
        return None
