"""The options of a run: names, meanings, defaults and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, TypedDict

from runner import checked
from runner.endpoint.server import parse_listen
from runner.engines.base import BaseEngine
from runner.environment.environment import Environment
from runner.environment.task_feed import Tasks
from runner.errors import BadOption
from runner.options import Concurrency, History, Limits, Sampling, check_tool_format
from runner.runs.observers import RunObserver
from runner.store.header import Header
from runner.store.json_values import decode_json, encode_json
from runner.store.secrets import hide_secrets

__all__ = ["RunKeywords", "RunOptions", "check_engine", "check_full"]

RESERVED_NAMES: Final = ("messages", "tools", "add_generation_prompt")
"""The names that the runner itself passes to a chat template."""


class RunKeywords(TypedDict, total=False):
    """The options of a run by name, for editors and type checkers; `RunOptions` documents them.

    Type checkers cannot derive a TypedDict from a dataclass, so this class repeats the fields, and a test compares
    them. `tasks` is omitted, since the testing kit has its own `tasks`; each function has it as a parameter.
    """

    group_size: int
    indices: Sequence[int] | None
    engines: Mapping[str, BaseEngine] | None
    sampling: Sampling | None
    limits: Limits | None
    concurrency: Concurrency | None
    seed: int
    template_options: Mapping[str, Any] | None
    tool_format: str | None
    file: str | Path | Callable[[Header], Path] | None
    weights: Mapping[str, float] | None
    retries: int
    breaker: float
    max_version_lag: int | None
    retry_failed: bool
    listen: str
    history: History | str | None
    observers: Sequence[RunObserver]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The options of a run, checked, with None replaced by the default.

    They are passed by name to `Run`, `run()` and `Player`, and to `play()` and `play_many()` of `runner.testing`.

    Raises:
        BadOption: an option has a wrong value; the message names the option and the fix.
    """

    tasks: Tasks | None = None
    """The tasks to play instead of the environment's own: an iterable, an async iterable, a source that receives
    results, or the path of a JSONL file."""

    group_size: int = 1
    """The number of episodes of each task."""

    indices: Sequence[int] | None = None
    """The indices of the episodes of each group that are played; None plays whole groups."""

    engines: Mapping[str, BaseEngine] = field(default_factory=dict)
    """Separate engines of some agents, by the agent's name; their turns are not trained on."""

    sampling: Sampling = Sampling()
    """The sampling of trained agents. A field that is set overrides the environment's."""

    limits: Limits = Limits()
    """The limits of an episode. A field that is set overrides the environment's."""

    concurrency: Concurrency = Concurrency()
    """The number of concurrent episodes, threads and tools. It never changes a result."""

    seed: int = 0
    """The seed from which all random numbers of the run follow."""

    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of names that the chat template reads, such as `enable_thinking`."""

    tool_format: str | None = None
    """The parser of the tool calls of agents without a separate engine: "vllm:NAME" is a tool parser of vLLM. It
    overrides the format learnt from the chat template; None uses the learnt format."""

    file: Path | Callable[[Header], Path] | None = None
    """The run file's path, or a function that names it by the run's header. A run of the same configuration in the file
    is resumed. None stores no file.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of rewards by name. They override the weights in the environment's class."""

    retries: int = 2
    """Maximum number of repeated attempts of an episode after engine failures. A refused request is not an engine
    failure."""

    breaker: float = 0.5
    """The run stops when more than this share of the recent episodes failed; 1 never stops it."""

    max_version_lag: int | None = None
    """Maximum number of weight updates since the oldest sampled id of an episode, checked at each update and at the end
    of the episode. An older episode is dropped, counted and played again; None sets no limit.
    """

    retry_failed: bool = False
    """True to repeat the episodes that failed in earlier runs of the file (`env_error`, `token_error`)."""

    listen: str = "127.0.0.1:0"
    """The address on which episodes are served to agent programs, as HOST:PORT; port 0 is any free port. The server
    starts with the first served episode. With another address than the default, anyone who can reach it and has a key
    can use the model."""

    history: History = History()
    """The history policy: append, fork or refuse, or a `History` with further options."""

    observers: Sequence[RunObserver] = ()
    """Observers that receive the events of the run, each in a thread of its own."""

    def __post_init__(self) -> None:
        # These checks do not use pydantic, since each message names the option as written, and the fix.
        _check_engines(self.engines)
        checked.whole(f"group_size={self.group_size!r:.60}", self.group_size, least=1)
        checked.whole(f"retries={self.retries!r:.60}", self.retries, least=0)
        checked.whole(f"seed={self.seed!r:.60}", self.seed)
        self._check_indices()
        self._check_breaker()
        for name, kind in (("sampling", Sampling), ("limits", Limits), ("concurrency", Concurrency)):
            self._check_kind(name, kind)
        _check_template_options(self.template_options)
        check_tool_format(self.tool_format)
        parse_listen(self.listen)
        self._check_file()
        for observer in self.observers:
            if not isinstance(observer, RunObserver):
                raise BadOption(f"observers=[{observer!r:.60}]: give objects of classes that derive from RunObserver.")
        if self.max_version_lag is not None:
            checked.whole(
                f"max_version_lag={self.max_version_lag!r:.60}",
                self.max_version_lag,
                least=0,
                otherwise=", or None for any age",
            )
        self._settle()

    def by_name(self) -> dict[str, Any]:
        """The options as keyword arguments of a run."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def summary(self) -> str:
        """The options that are not the defaults, on one line, without secrets."""
        defaults = RunOptions()
        shown = []
        for each in fields(self):
            # The values are compared as text, since tasks may be an array, whose comparison is another array.
            value, default = _shown(getattr(self, each.name)), _shown(getattr(defaults, each.name))
            if value != default:
                shown.append(f"{each.name}={value}")
        return ", ".join(shown) or "default options"

    def _settle(self) -> None:
        """Replace None by defaults, the name of a history policy by a `History`, and a path in text by a `Path`."""
        settled = {
            "engines": dict(self.engines or {}),
            "sampling": self.sampling or Sampling(),
            "limits": self.limits or Limits(),
            "concurrency": self.concurrency or Concurrency(),
            "template_options": dict(self.template_options or {}),
            "weights": self.weights or {},
            "history": History.of(self.history),
            "file": Path(self.file) if isinstance(self.file, str) else self.file,
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen, so attributes cannot be assigned

    def limits_of(self, environment: Environment[Any]) -> Limits:
        """The limits of an episode with every field set: from these options, the environment, or the defaults."""
        return self.limits.over(environment.limits).over(Limits.defaults())

    def _check_indices(self) -> None:
        if self.indices is None:
            return
        for index in self.indices:
            checked.whole(f"indices={index!r:.60}", index, least=0)
            if index >= self.group_size:
                raise BadOption(
                    f"indices={self.indices!r:.60}: a group has the episodes 0 to {self.group_size - 1}: leave out the "
                    "others, or set a larger group_size."
                )

    def _check_breaker(self) -> None:
        share: Any = self.breaker
        if not checked.is_number(share) or not 0 < share <= 1:
            raise BadOption(f"breaker={share!r:.60}: give a share above 0 and at most 1 (1 never stops the run).")

    def _check_kind(self, name: str, kind: type) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind | None):
            raise BadOption(f"{name}={value!r:.60}: give {kind.__name__}(...).")

    def _check_file(self) -> None:
        file: Any = self.file
        if file == "" or (not isinstance(file, str | Path | None) and not callable(file)):
            raise BadOption(f"file={file!r:.60}: give a path such as 'runs/one.db', or None for a run without a file.")
        if not isinstance(self.retry_failed, bool):
            raise BadOption(f"retry_failed={self.retry_failed!r:.60}: give True or False.")
        if self.retry_failed and file is None:
            raise BadOption("retry_failed=True: the failed episodes are in a run file; give file=.")


def _shown(value: Any) -> str:
    """Format a value on one line.

    Tasks, engines and functions are shown by type, since they may be large or hold secrets.
    """
    if isinstance(value, Sampling | Limits):
        return f"{value.given()!r:.300}"
    if isinstance(value, Mapping):
        named = {name: _shown(each) if isinstance(each, BaseEngine) else each for name, each in value.items()}
        return f"{hide_secrets(decode_json(encode_json(named)))!r:.300}"
    plain = isinstance(value, str | int | float | Path | Concurrency | History)
    return f"{value!r:.300}" if plain else f"<{type(value).__name__}>"


def check_full(full: int, options: RunOptions) -> None:
    """Check `full`, the number of tasks with spread (rewards that differ) that a reader needs.

    Raises:
        BadOption: `full` is not a positive integer, or groups have a single episode.
    """
    checked.whole(f"groups(full={full!r:.60})", full, least=1)
    if options.group_size < 2:
        raise BadOption("groups(full=): a group of one episode has no spread; set group_size=2 or more.")


def check_engine(where: str, engine: Any) -> None:
    """Check that a value is an engine object.

    Raises:
        BadOption: the value is a class, or is not an engine.
    """
    if isinstance(engine, type) and issubclass(engine, BaseEngine):
        raise BadOption(f"{where}={engine.__name__} is the class: give an engine object, {engine.__name__}(...).")
    if not isinstance(engine, BaseEngine):
        raise BadOption(f"{where}={engine!r:.60} is not an engine: give an engine object, such as VllmEngine('MODEL').")


def _check_engines(engines: Any) -> None:
    if not isinstance(engines, Mapping | None):
        raise BadOption(
            f"engines={engines!r:.60}: give a dict of agent names and engines, such as {{'judge': engine}}."
        )
    for name, engine in (engines or {}).items():
        if not isinstance(name, str):
            raise BadOption(f"engines={{{name!r:.60}: ...}}: give the name of an agent, as a string.")
        check_engine(f"engines[{name!r}]", engine)


def _check_template_options(options: Any) -> None:
    if not isinstance(options, Mapping | None):
        raise BadOption(f"template_options={options!r:.60}: give a dict, such as {{'enable_thinking': False}}.")
    for name in options or {}:
        if not isinstance(name, str) or name in RESERVED_NAMES:
            raise BadOption(
                f"template_options={{{name!r}: ...}}: give names that only the template reads, such as "
                f"enable_thinking; {', '.join(RESERVED_NAMES)} are set by the run."
            )
