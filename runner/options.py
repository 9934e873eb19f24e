"""The options of a run and of a turn: small frozen objects, each field unset until somebody gives it."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias

from runner import checked
from runner.errors import BadOption

__all__ = [
    "UNSET",
    "Concurrency",
    "Constraint",
    "ConstraintKind",
    "History",
    "HistoryPolicy",
    "Limits",
    "Sampling",
    "ToolChoice",
]


class _Unset(enum.Enum):
    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final[Any] = _Unset.UNSET
"""A field that nobody gave. It is not None: None lifts a limit."""

ToolChoice: TypeAlias = Literal["auto", "required", "none"] | str
"""Whether the model may, must or must not call a tool; any other string names the tool it must call."""


class ConstraintKind(enum.StrEnum):
    """The languages in which an engine can be told what may be sampled."""

    JSON = "json"
    REGEX = "regex"
    GRAMMAR = "grammar"
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What may be sampled in one turn; enforced by the engine's constrained decoding.

    `value` is text in the language `kind` names: a JSON schema, a regular expression, an EBNF grammar, a JSON
    array of strings, or an xgrammar structural tag.
    """

    kind: ConstraintKind
    value: str


class _Layered:
    """Options whose set fields win, one by one, over those of a layer below."""

    __slots__ = ()

    def over(self, base: Self) -> Self:
        """These options, with every unset field taken from `base`."""
        unset = {
            field.name: getattr(base, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
            if getattr(self, field.name) is UNSET
        }
        return dataclasses.replace(self, **unset) if unset else self  # type: ignore[type-var]  # likewise

    def given(self) -> dict[str, Any]:
        """The fields that somebody gave, by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]  # as above
        return {name: value for name, value in values.items() if value is not UNSET}

    def _check(self, name: str, check: Callable[..., float], *, lifted: bool = False, **bounds: float) -> None:
        """Check a field that was given with `checked.whole` or `checked.number`; `lifted`: None lifts the limit."""
        value = getattr(self, name)
        if value is UNSET or (lifted and value is None):
            return
        otherwise = ", or None for no limit" if lifted else ""
        check(f"{type(self).__name__}({name}={value!r})", value, otherwise=otherwise, **bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(_Layered):
    """How one turn is sampled. Precedence: `generate()`, `conversation()`, the `Run`, the environment's class.

    Attributes:
        max_tokens: the most ids one turn may have; default 1024.
        temperature: 0 is greedy; default 1.
        top_p: nucleus sampling; default 1, which is off.
        top_k: keep the k likeliest ids; default 0, which is off.
        min_p: drop ids below this fraction of the likeliest one's probability; default 0, which is off.
        stop: strings that end a turn; found by our own decoder, the text is cut before them, the ids are kept.
        stop_ids: further token ids that end a turn, besides those of the model.
        schema: a JSON schema that the turn's text must match.
        regex: a regular expression that the turn's text must match.
        choice: the turn's text is one of these.
        adapter: the name of a LoRA adapter of the engine.

    The model's own generation_config never supplies sampling values.
    """

    max_tokens: int = UNSET
    temperature: float = UNSET
    top_p: float = UNSET
    top_k: int = UNSET
    min_p: float = UNSET
    stop: tuple[str, ...] = UNSET
    stop_ids: tuple[int, ...] = UNSET
    schema: dict[str, Any] | None = UNSET
    regex: str | None = UNSET
    choice: tuple[str, ...] | None = UNSET
    adapter: str | None = UNSET

    def __post_init__(self) -> None:
        self._check("max_tokens", checked.whole, least=1)
        self._check("temperature", checked.number, least=0)
        self._check("top_p", checked.number, above=0, most=1)
        self._check("top_k", checked.whole, least=0)
        self._check("min_p", checked.number, least=0, most=1)
        self._check_regex()
        stop: Any = self.stop
        if isinstance(stop, str) or (stop is not UNSET and not all(stop)):
            raise BadOption(f"Sampling(stop={self.stop!r}): give a tuple of strings, none of them empty.")
        constraints = [name for name in ("schema", "regex", "choice") if getattr(self, name) not in (UNSET, None)]
        if len(constraints) > 1:
            raise BadOption(f"Sampling({', '.join(constraints)}): a turn can obey one constraint; give one of them.")

    def _check_regex(self) -> None:
        if self.regex is UNSET or self.regex is None:
            return
        try:
            re.compile(self.regex)
        except (re.error, TypeError) as error:
            raise BadOption(f"Sampling(regex={self.regex!r:.80}): no regular expression ({error}).") from None

    @classmethod
    def defaults(cls) -> Self:
        """Every field set: what is used where nobody gives a value."""
        return cls(
            max_tokens=1024,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            stop=(),
            stop_ids=(),
            schema=None,
            regex=None,
            choice=None,
            adapter=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(_Layered):
    """What an episode may use. Reaching one is an outcome, not an error; None lifts it.

    The limits of hooks count the author's code: they stand still while an agent is sampled in it.

    Attributes:
        turns: turns of the trained conversations together; default None.
        tokens: ids sampled by the trained conversations together; default None.
        context: ids that one conversation may hold; default None, which is the engine's own limit.
        seconds: the play of an episode, what its agents sample included, without waiting for a place; default 600.
        setup_seconds: `setup()` and `prompt()`; default 300.
        step_seconds: one `step()`; default 120.
        tool_seconds: one tool call, unless the tool says otherwise; default 120.
        reward_seconds: all rewards and metrics of an episode; default 300.
        close_seconds: `close()`; the exit stack, and each exit of it that runs in a thread; default 30.
        stall_seconds: an engine that admitted a request and sends nothing for this long has failed; default 120.
    """

    turns: int | None = UNSET
    tokens: int | None = UNSET
    context: int | None = UNSET
    seconds: float | None = UNSET
    setup_seconds: float | None = UNSET
    step_seconds: float | None = UNSET
    tool_seconds: float | None = UNSET
    reward_seconds: float | None = UNSET
    close_seconds: float | None = UNSET
    stall_seconds: float | None = UNSET

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "context"):
            self._check(name, checked.whole, least=1, lifted=True)
        for field in dataclasses.fields(self):
            if field.name.endswith("seconds"):
                self._check(field.name, checked.number, above=0, lifted=True)

    @classmethod
    def defaults(cls) -> Self:
        """Every field set: what is used where nobody gives a value."""
        return cls(
            turns=None,
            tokens=None,
            context=None,
            seconds=600,
            setup_seconds=300,
            step_seconds=120,
            tool_seconds=120,
            reward_seconds=300,
            close_seconds=30,
            stall_seconds=120,
        )

    def lifted(self) -> Limits:
        """The same limits with every clock off, for a debugger."""
        clocks = {f.name: None for f in dataclasses.fields(self) if f.name.endswith("seconds")}
        return dataclasses.replace(self, **clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """How wide a run is; it never changes a result.

    Attributes:
        episodes: episodes alive at once; default None, which is twice the engine's places.
        threads: worker threads of the run for synchronous code; default 64.
    """

    episodes: int | None = None
    threads: int = 64

    def __post_init__(self) -> None:
        for name, value in (("episodes", self.episodes), ("threads", self.threads)):
            if name != "episodes" or value is not None:
                checked.whole(f"Concurrency({name}={value!r})", value, least=1)


class HistoryPolicy(enum.StrEnum):
    """What is done where a template does not simply append to what was sampled."""

    APPEND = "append"  # keep what was sampled; where no exact bridge is proven, fork
    FORK = "fork"  # follow the template: where its render of the past differs, a new segment
    REFUSE = "refuse"  # end the episode with `token_error` where no exact bridge is proven


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """How the past of a conversation is kept. A policy's name stands for History(policy=name).

    Attributes:
        policy: append, fork or refuse; default append.
        content_safe: control text in what users and tools say is ordinary text, never control ids; default True.
        close_reasoning: an answer to a turn that was cut inside its reasoning closes that first, as masked context;
            default False, which ends the episode.
    """

    policy: HistoryPolicy = HistoryPolicy.APPEND
    content_safe: bool = True
    close_reasoning: bool = False

    def __post_init__(self) -> None:
        names = ", ".join(HistoryPolicy)
        if self.policy not in list(HistoryPolicy):
            raise BadOption(f"History(policy={self.policy!r}): give one of {names}.")
        object.__setattr__(self, "policy", HistoryPolicy(self.policy))
        for name in ("content_safe", "close_reasoning"):
            if not isinstance(getattr(self, name), bool):
                raise BadOption(f"History({name}={getattr(self, name)!r}): give True or False.")

    @classmethod
    def of(cls, given: History | str | None) -> History:
        """The options that `given` stands for.

        Raises:
            BadOption: it is neither a policy's name nor a History.
        """
        if given is None or isinstance(given, str):
            return cls(policy=HistoryPolicy.APPEND if given is None else given)  # type: ignore[arg-type]  # checked there
        if isinstance(given, History):
            return given
        raise BadOption(f"history={given!r:.60}: give append, fork, refuse or a History(...).")
