"""The class `Environment`, which authors subclass."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import cached_property
from types import UnionType
from typing import Any, ClassVar, Generic, Self, cast, get_args

from typing_extensions import TypeVar

from runner.engines.base import BaseEngine
from runner.episode.conversation import Conversation
from runner.episode.episode import Episode
from runner.errors import BadEnvironment
from runner.messages import Prompt
from runner.options import Limits, Sampling, ToolChoice
from runner.scoring import Scorer, collect_scorers
from runner.tasks import Task
from runner.tools.tool import Tool, collect_tools
from runner.trajectory import Turn

__all__ = ["Environment", "Reply", "check_episode_attributes"]

TaskT = TypeVar("TaskT", bound=Task, default=Task)

Reply = Prompt | None
"""The reply of `step`; None ends the episode. An empty list is an error."""

HOOKS = {"setup": 0, "prompt": 0, "step": 1, "rollout": 1, "close": 0, "tasks": 0, "lifespan": 0}
"""Methods that an author may define and the runner calls, with the number of arguments of each."""


class NotInEpisode(BadEnvironment, AttributeError):
    """An attribute that exists only in episodes was read from an environment object that does not play."""


class _EpisodeAttribute:
    """Placeholder for an attribute that exists only in episodes."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, environment: Environment[Any] | None, owner: type) -> Any:
        if environment is None:
            return self
        raise NotInEpisode(
            f"{owner.__name__}.{self._name} exists only in an episode, from setup() on. The object that you construct "
            f"does not play: __init__(), tasks(), lifespan(), limits and sampling cannot use it."
        )


class Environment(Generic[TaskT]):
    """An environment: tools (`@tool`), a game (`step`) or a whole loop (`rollout`), and at least one `@reward`.

    The object that you construct provides tasks, shared resources and group rewards; it does not play. For each episode
    a new object is constructed with the same arguments, so keep state on `self`.
    """

    system_prompt: str | None = None
    """The system message of every episode. If it depends on the task, assign it in `setup()`, or use a property that
    reads `self.task`."""
    tool_choice: ToolChoice = "auto"
    """Use of tools: "auto" allows calls, "required" forces one, "none" forbids them, and the name of a tool forces a
    call of it. The runner reads it before every turn, so it may be reassigned at any time.
    """
    limits: Limits = Limits()
    """Limits of the environment. The limits of a run override them field by field. `setup()` may assign limits."""
    sampling: Sampling = Sampling()
    """Sampling of the environment. The sampling of a run overrides it field by field. The runner reads it before every
    turn, so it may be reassigned at any time.
    """
    engines: Mapping[str, BaseEngine] = {}
    """Separate engines of untrained agents, such as a judge, by the agent's name. The engines of a run override them.
    `__init__()` may assign engines.
    """

    task: TaskT = cast("Any", _EpisodeAttribute())
    """The task; set from `setup()` on."""
    episode: Episode = cast("Any", _EpisodeAttribute())
    """The episode; set from `setup()` on."""
    shared: Any = _EpisodeAttribute()
    """The value that `lifespan()` yielded; set from `setup()` on."""
    tools: list[Tool] = cast("Any", _EpisodeAttribute())
    """The tools of `@tool`; `setup()` may add others."""

    package: ClassVar[tuple[str, str] | None] = None
    """The module of an optional package that the environment needs, and the extra of deltarunner that installs it."""
    named_setting: ClassVar[str] = ""
    """Name of the setting that may follow the environment's name and a colon, as in `harbor:FOLDER`; "" for none."""
    method_tools: ClassVar[tuple[Tool, ...]] = ()
    """Methods marked with `@tool`."""
    scorers: tuple[Scorer, ...] = ()
    """Methods marked with `@reward`, `@metric` and `@group_reward`, in the order of their definition."""

    _construction: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.method_tools = tuple(collect_tools(cls).values())
        cls.scorers = collect_scorers(cls)
        marked = {tool.attribute for tool in cls.method_tools} | {scorer.name for scorer in cls.scorers}
        check_episode_attributes(cls.__name__, {name: value for name, value in vars(cls).items() if name not in marked})
        for name in HOOKS:
            _check_signature(cls, name)
        _check_setting(cls, "system_prompt", str | None, "a string or None")
        _check_setting(cls, "limits", Limits, "Limits(...)")
        _check_setting(cls, "sampling", Sampling, "Sampling(...)")

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        self._construction = (args, kwargs)
        return self

    # Without this method, Python would ignore misspelt arguments of a class that has no __init__.
    def __init__(self) -> None:
        pass

    def tasks(self) -> Iterable[TaskT] | AsyncIterable[TaskT]:
        """Return the tasks. The runner calls this method on the object that you construct."""
        raise BadEnvironment(
            f"{type(self).__name__} has no tasks: define tasks(), or give them to the run (tasks=, --tasks FILE.jsonl)."
        )

    def lifespan(
        self,
    ) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any] | Iterator[Any] | AsyncIterator[Any]:
        """Resources of all episodes, as a context manager around the run; the yielded value is `self.shared`.

        A generator, sync or async, does not need `@contextmanager`.
        """
        raise NotImplementedError

    def setup(self) -> Awaitable[None] | None:
        """Prepare the episode before its first message: draw the initial state, open resources, add tools."""
        return None

    def prompt(self) -> Prompt | Awaitable[Prompt]:
        """The first messages, after the system prompt; by default the task's prompt."""
        return self.task.prompt

    def step(self, turn: Turn) -> Reply | Awaitable[Reply]:
        """Reply to a turn without tool calls; None, the default, ends the episode."""
        return None

    async def rollout(self, conversation: Conversation) -> None:
        """Play the whole episode, turn by turn. The episode ends when this method returns."""
        while True:
            turn = await conversation.generate()
            reply = await self.episode.answer(turn)  # one result per call, or what step(turn) returns
            if reply is None:
                return
            conversation.add(reply)
            if self.episode.ended or (turn.finish == "length" and not self.overrides("step")):
                return

    def close(self) -> Awaitable[None] | None:
        """Close what `setup()` opened, after the scoring; called if and only if `setup()` returned."""
        return None

    def fresh(self) -> Self:
        """A new environment, constructed with the same arguments."""
        args, kwargs = self._construction
        return type(self)(*args, **kwargs)

    @property
    def made_with(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the constructor, as they were given."""
        return self._construction

    def parts(self) -> Mapping[str, Environment[Any]]:
        """The environments that play, by the prefix of their task ids.

        An environment that is not a mixture is its only part, with the prefix "".
        """
        return {"": self}

    def overrides(self, hook: str) -> bool:
        """True if the author defined this hook. Other hooks are not called."""
        return getattr(type(self), hook) is not getattr(Environment, hook)

    def bound_tools(self) -> list[Tool]:
        """The tools of `@tool`, bound to this object."""
        return [tool.bind(self) for tool in self.method_tools]

    @classmethod
    def task_class(cls) -> type[Task]:
        """The task class, such as `Case` for `Environment[Case]`; `Task` by default."""
        for base in cls.__mro__:
            for original in vars(base).get("__orig_bases__", ()):
                for argument in get_args(original):
                    if isinstance(argument, type) and issubclass(argument, Task):
                        return argument
        return Task

    def construction(self) -> dict[str, Any]:
        """The constructor's arguments by name, with defaults."""
        args, kwargs = self._construction
        bound = inspect.signature(type(self).__init__).bind(self, *args, **kwargs)
        bound.apply_defaults()
        return dict(list(bound.arguments.items())[1:])


def check_episode_attributes(name: str, given: Mapping[str, object]) -> None:
    """Check that `given` has no attribute that each episode sets, since an assigned value would be lost.

    Raises:
        BadEnvironment: such an attribute is among `given`.
    """
    for attribute in ("task", "episode", "shared", "tools"):
        if attribute in given:
            fix = "mark methods with @tool, or add tools in setup(): self.tools += [Tool(function)]"
            raise BadEnvironment(
                f"{name}.{attribute} = {given[attribute]!r:.60}: each episode sets {attribute}, so this would be "
                f"lost; {fix if attribute == 'tools' else 'give it another name'}."
            )


def _check_setting(cls: type[Environment[Any]], name: str, kind: type | UnionType, wanted: str) -> None:
    value = getattr(cls, name)
    if not isinstance(value, kind | property | cached_property):
        raise BadEnvironment(f"{cls.__name__}.{name} = {value!r:.60}: give {wanted}.")


def _check_signature(cls: type[Environment[Any]], hook: str) -> None:
    function = cast("Callable[..., Any]", getattr(cls, hook))
    if function is getattr(Environment, hook):
        return
    if not callable(function):
        raise BadEnvironment(f"{cls.__name__}.{hook} = {function!r:.60}: define {hook} as a method.")
    try:
        inspect.signature(function).bind(None, *[None] * HOOKS[hook])
    except TypeError as error:
        count = HOOKS[hook] or "no"
        define = "async def" if hook == "rollout" else "def"
        names = ", ".join(inspect.signature(getattr(Environment, hook)).parameters)
        raise BadEnvironment(
            f"{cls.__name__}.{hook}: wrong signature ({error}): the runner passes {count} argument besides self. "
            f"Write `{define} {hook}({names})`."
        ) from error
    _check_generator(cls, hook, function)
    if hook == "rollout" and not inspect.iscoroutinefunction(function):
        raise BadEnvironment(f"{cls.__name__}.rollout must be async: write `async def rollout(self, conversation)`.")


def _check_generator(cls: type[Environment[Any]], hook: str, function: Callable[..., Any]) -> None:
    """Raise BadEnvironment if a hook except `tasks` and `lifespan` yields, or if an async `lifespan` never yields."""
    where = f"{cls.__name__}.{hook}"
    yields = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    if hook == "lifespan":
        if inspect.iscoroutinefunction(function):
            raise BadEnvironment(f"{where} never yields: `yield` what episodes share, and close it after that.")
    elif yields and hook != "tasks":
        raise BadEnvironment(f"{where} yields, so its body would never run: return instead.")
