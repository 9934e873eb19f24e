"""The environment: the one class that an author subclasses."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cached_property
from types import UnionType
from typing import Any, ClassVar, Generic, Self, cast, get_args

from typing_extensions import TypeVar

from runner.concurrency.user_code import describe_error
from runner.episode.conversation import Conversation
from runner.episode.episode import Episode
from runner.episode.model import ChatModel
from runner.errors import BadEnvironment, BadOption, BadTemplate, DeltarunnerError
from runner.messages import Prompt
from runner.options import Limits, Sampling, ToolChoice
from runner.scoring import Scorer, ScorerKind, collect_scorers
from runner.tasks import Task
from runner.tools.tool import Tool, collect_tools
from runner.trajectory import Turn

__all__ = ["Environment", "Reply"]

TaskT = TypeVar("TaskT", bound=Task, default=Task)

Reply = Prompt | None
"""What `step` answers; None ends the episode. An empty list is an error: there is nothing to answer."""

HOOKS = ("tasks", "lifespan", "setup", "prompt", "step", "rollout", "close")


class _NotYet(BadEnvironment, AttributeError):
    """What only an episode has was asked of an environment that plays none."""


class _OfEpisode:
    """Stands for an attribute until an episode sets it."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, environment: Environment[Any] | None, owner: type) -> Any:
        if environment is None:
            return self
        raise _NotYet(
            f"{owner.__name__}.{self._name} is there in an episode, from setup() on. The object that you construct "
            f"plays none: __init__(), tasks(), lifespan(), limits and sampling have to do without it."
        )


class Environment(Generic[TaskT]):
    """Subclass it with tools (`@tool`), a game (`step`) or a whole loop (`rollout`), and at least one `@reward`.

    The object you construct gives the tasks, the shared resources and the group rewards; it plays no episode. For each
    episode a fresh object is made by the same call with the same arguments, so state lives on `self`.

    Attributes:
        system_prompt: the system message of every episode. One that depends on the task is assigned in `setup()`, or
            is a property that reads `self.task`.
        tool_choice: whether the model may ("auto"), must ("required") or must not ("none") call a tool, or the name of
            the tool it must call. Read before every turn; may be assigned.
        limits: the environment's own limits; a run's win, field by field. May be assigned in `setup()`.
        sampling: the environment's own sampling; a run's wins, field by field. Read before every turn; may be assigned.
        task: the task being played.
        episode: what the runner knows of this play.
        shared: what `lifespan()` yielded.
        tools: the tools of `@tool`; may be extended in `setup()`.
    """

    system_prompt: str | None = None
    tool_choice: ToolChoice = "auto"
    limits: Limits = Limits()
    sampling: Sampling = Sampling()

    task: TaskT = cast("Any", _OfEpisode())
    episode: Episode = cast("Any", _OfEpisode())
    shared: Any = _OfEpisode()
    tools: list[Tool] = cast("Any", _OfEpisode())

    method_tools: ClassVar[tuple[Tool, ...]] = ()
    scorers: ClassVar[tuple[Scorer, ...]] = ()

    _construction: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.method_tools = tuple(collect_tools(cls).values())
        cls.scorers = collect_scorers(cls)
        for name in _PARAMETERS:
            _check_signature(cls, name)
        _check_setting(cls, "system_prompt", str | None, "a string or None")
        _check_setting(cls, "limits", Limits, "Limits(...)")
        _check_setting(cls, "sampling", Sampling, "Sampling(...)")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._construction = (args, kwargs)
        return self

    # Without it Python would swallow the misspelt arguments of a class that has no __init__ of its own.
    def __init__(self) -> None:
        pass

    def tasks(self) -> Iterable[TaskT] | AsyncIterable[TaskT]:
        """The problems, on the object you construct."""
        raise BadEnvironment(
            f"{type(self).__name__} has no tasks: define tasks(), or give them to the run (tasks=, --tasks FILE.jsonl)."
        )

    def lifespan(self) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any]:
        """Shared resources: once per run, around everything; what it yields is every episode's `shared`."""
        raise NotImplementedError

    def setup(self) -> Awaitable[None] | None:
        """Before the first message."""
        return None

    def prompt(self) -> Prompt | Awaitable[Prompt]:
        """The first messages, after the system prompt."""
        return self.task.prompt

    def step(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Answer a turn that calls no tool; None ends the episode."""
        return None

    async def rollout(self, conversation: Conversation) -> None:
        """The whole loop."""
        while True:
            turn = await conversation.generate()
            reply = await self.episode.answer(turn)  # one result per call, or what step(turn) returns
            if reply is None:
                return
            conversation.add(reply)
            if self.episode.ended or (turn.finish == "length" and not self.overrides("step")):
                return

    def close(self) -> Awaitable[None] | None:
        """After the scoring; called if and only if `setup()` returned."""
        return None

    def fresh(self) -> Self:
        """A new environment, made by the call that made this one."""
        args, kwargs = self._construction
        return type(self)(*args, **kwargs)

    def overrides(self, hook: str) -> bool:
        """The author wrote this hook; one that nobody wrote costs nothing."""
        return getattr(type(self), hook) is not getattr(Environment, hook)

    def bound_tools(self) -> list[Tool]:
        """The tools of `@tool`, bound to this object."""
        return [tool.bind(self) for tool in self.method_tools]

    @classmethod
    def task_class(cls) -> type[Task]:
        """The class in `Environment[Case]`; `Task` where none is given."""
        for base in cls.__mro__:
            for original in vars(base).get("__orig_bases__", ()):
                for argument in get_args(original):
                    if isinstance(argument, type) and issubclass(argument, Task):
                        return argument
        return Task

    def construction(self) -> dict[str, Any]:
        """The constructor's arguments by name, defaults included."""
        args, kwargs = self._construction
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])


def common_system_prompt(environment: Environment[Any]) -> str | None:
    """The system prompt that all episodes have; None where there is none, or where it depends on the episode."""
    try:
        return environment.system_prompt
    except _NotYet:
        return None


def check_playable(environment: Environment[Any]) -> None:
    """An environment without a reward cannot be trained on.

    Raises:
        BadEnvironment: it has no `@reward` and no `@group_reward`.
    """
    if not any(scorer.kind != ScorerKind.METRIC for scorer in environment.scorers):
        name = type(environment).__name__
        raise BadEnvironment(
            f"{name} has no reward: mark a method with @reward (or @group_reward), such as\n\n"
            f"    @reward\n    def correct(self) -> bool:\n        return self.episode.text == self.task.answer"
        )


def check_tools(environment: Environment[Any], chat: ChatModel) -> None:
    """An environment's tools must be shown to the model, and what it calls must be read.

    Raises:
        BadTemplate: the template does not carry tools, or writes calls in a form that is not known.
        BadOption: `tool_choice` names no tool.
    """
    tools = environment.bound_tools()
    if tools:
        chat.require_tools()
        if chat.tool_format is None:
            raise BadTemplate(
                f"template {chat.renderer.template.name!r} writes tool calls in a form that is not known "
                f"(known: pythonic, hermes). Give --template pythonic or hermes, or a file that writes one."
            )
    names = [tool.name for tool in tools]
    choice = environment.tool_choice
    known = ("auto", "none", *names, *(["required"] if names else []))
    # A setup() may bring tools of its own.
    if choice not in known and not environment.overrides("setup"):
        raise BadOption(f"tool_choice={choice!r}: no such tool. Tools: {', '.join(names) or 'none'}.")


def as_environment(environment: Environment[Any] | type[Environment[Any]]) -> Environment[Any]:
    """An environment object; a class is constructed."""
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


_PARAMETERS = {"setup": 0, "prompt": 0, "step": 1, "rollout": 1, "close": 0, "tasks": 0, "lifespan": 0}


def _check_setting(cls: type[Environment[Any]], name: str, kind: type | UnionType, wanted: str) -> None:
    value = getattr(cls, name)
    if not isinstance(value, kind | property | cached_property):
        raise BadEnvironment(f"{cls.__name__}.{name} = {value!r:.60}: give {wanted}.")


def _check_signature(cls: type[Environment[Any]], hook: str) -> None:
    function = cast("Callable[..., Any]", getattr(cls, hook))
    if function is getattr(Environment, hook):
        return
    if not callable(function):
        raise BadEnvironment(f"{cls.__name__}.{hook} must be a method, it is {type(function).__name__}.")
    try:
        inspect.signature(function).bind(None, *[None] * _PARAMETERS[hook])
    except TypeError as error:
        raise BadEnvironment(f"{cls.__name__}.{hook}: wrong signature ({error}).") from error
    _check_color(cls, hook, function)
    if hook == "rollout" and not inspect.iscoroutinefunction(function):
        raise BadEnvironment(f"{cls.__name__}.rollout must be async: write `async def rollout(self, conversation)`.")


def _check_color(cls: type[Environment[Any]], hook: str, function: Callable[..., Any]) -> None:
    """Only `tasks` may be a generator, and `lifespan` a context manager made of one."""
    where = f"{cls.__name__}.{hook}"
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if hook == "lifespan":
        if yields or inspect.iscoroutinefunction(function):
            raise BadEnvironment(f"{where} is no context manager: put @contextlib.asynccontextmanager above it.")
    elif yields and hook != "tasks":
        raise BadEnvironment(f"{where} yields, so its body would never run: return instead.")
