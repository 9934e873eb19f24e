"""The options of a run and of a turn: small frozen objects, each field unset until somebody gives it."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self, TypeAlias

from runner import checked
from runner.errors import BadOption

__all__ = [
    "MAX_LOGPROBS",
    "UNSET",
    "VLLM_FORMAT",
    "Concurrency",
    "Constraint",
    "ConstraintKind",
    "History",
    "HistoryPolicy",
    "Limits",
    "Sampling",
    "ToolChoice",
    "check_tool_format",
]


class _Unset(enum.Enum):
    UNSET = "unset"

    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False


UNSET: Final[Any] = _Unset.UNSET
"""A field that nobody gave. It is not None: None lifts a limit."""

MAX_LOGPROBS: Final = 20
"""The most ids of a position whose log-probabilities can be asked for: as many as vLLM gives unless told otherwise."""

ToolChoice: TypeAlias = Literal["auto", "required", "none"] | str
"""Whether the model may, must or must not call a tool; any other string names the tool it must call."""


VLLM_FORMAT: Final = "vllm:"
"""What the name of a tool format begins with that a tool parser of vLLM's reads."""


def check_tool_format(given: Any) -> None:
    """Refuse what names no tool format; whether vLLM has a parser of that name only vLLM can say."""
    if given is None or (isinstance(given, str) and given.startswith(VLLM_FORMAT) and given != VLLM_FORMAT):
        return
    raise BadOption(
        f"tool_format={given!r:.60}: give {VLLM_FORMAT}NAME with a tool parser of vLLM's, such as {VLLM_FORMAT}hermes, "
        "or None for what is learnt from the chat template."
    )


class ConstraintKind(enum.StrEnum):
    """The languages in which an engine can be told what may be sampled."""

    JSON = "json"
    """A JSON schema."""
    REGEX = "regex"
    """A regular expression."""
    GRAMMAR = "grammar"
    """A grammar in xgrammar's EBNF, or in Lark."""
    CHOICE = "choice"
    """A JSON array of strings, of which the turn is one."""
    STRUCTURAL_TAG = "structural_tag"
    """A structural tag of xgrammar: text is free until a tag opens a part that has a schema."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """What may be sampled in one turn; enforced by the engine's constrained decoding."""

    kind: ConstraintKind
    """The language in which `value` is written."""
    value: str
    """The text in that language."""


class _LayeredOptions:
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
class Sampling(_LayeredOptions):
    """How one turn is sampled. Precedence: `generate()`, `conversation()`, the `Run`, the environment's class.

    The model's own generation_config never supplies sampling values.
    """

    max_tokens: int = UNSET
    """The most ids that one turn may have; 1024 by default."""
    min_tokens: int = UNSET
    """The number of ids that a turn has before anything can stop it, at most `max_tokens`; 0, which is off, by default.

    Until then no stop id can be sampled, and a stop string that is complete does not count.
    """
    temperature: float = UNSET
    """The temperature that logits are divided by; 0 is greedy, and 1 the default."""
    top_p: float = UNSET
    """The probability mass that nucleus sampling keeps; 1, which is off, by default."""
    top_k: int = UNSET
    """The number of likeliest ids that are kept; 0, which is off, by default."""
    min_p: float = UNSET
    """The fraction of the likeliest id's probability below which an id is dropped; 0, which is off, by default."""
    repetition_penalty: float = UNSET
    """What the positive logit of each id of the prompt and the turn is divided by, and a negative one multiplied with.

    A number above 0; above 1 it discourages repetition, and 1, which is off, is the default. The prompt is all that the
    model sees: the system prompt, earlier turns and what the chat template writes.
    """
    presence_penalty: float = UNSET
    """What is taken off the logit of each id that the turn has already; -2 to 2, and 0, which is off, by default."""
    frequency_penalty: float = UNSET
    """What is taken off an id's logit for each time that the turn has it; -2 to 2, and 0, which is off, by default."""
    logit_bias: Mapping[int, float] | None = UNSET
    """What is added to the logits of some ids, by id; -100 to 100. None, the default, and {} add nothing."""
    bad_words: tuple[str, ...] = UNSET
    """Words that are not sampled; none by default.

    A word is kept out by the ids that the vocabulary encodes it with, alone and after a space. In other case, or by
    other ids that spell it, it can still be said.
    """
    stop: tuple[str, ...] = UNSET
    """Strings that end a turn. Our own decoder finds them; the text is cut before them, and the ids are kept."""
    stop_ids: tuple[int, ...] = UNSET
    """Token ids that end a turn, besides those of the model."""
    ignore_eos: bool = UNSET
    """Whether the stop ids of the model end no turn; False by default.

    A turn then has `max_tokens` ids, unless `stop` or `stop_ids` end it. It counts as cut: an EOS in it is said, as any
    other id.
    """
    logprobs: int | None = UNSET
    """The number of likeliest ids whose log-probabilities are kept for each sampled id, at most 20; 0 by default.

    They are in `Turn.top_ids` and `Turn.top_logprobs`. 0 and None keep none of them; the log-probability of the sampled
    id itself is kept in any case.
    """
    schema: dict[str, Any] | None = UNSET
    """A JSON schema that the turn's text must match."""
    regex: str | None = UNSET
    """A regular expression that the turn's text must match."""
    choice: tuple[str, ...] | None = UNSET
    """Texts of which the turn's text must be one."""
    adapter: str | None = UNSET
    """The name of a LoRA adapter of the engine that samples the turn; None for the model itself."""

    def __post_init__(self) -> None:
        self._check("max_tokens", checked.whole, least=1)
        self._check("temperature", checked.number, least=0)
        self._check("top_p", checked.number, above=0, most=1)
        self._check("top_k", checked.whole, least=0)
        self._check("min_p", checked.number, least=0, most=1)
        self._check("min_tokens", checked.whole, least=0)
        self._check("repetition_penalty", checked.number, above=0, finite=True)
        self._check("presence_penalty", checked.number, least=-2, most=2)
        self._check("frequency_penalty", checked.number, least=-2, most=2)
        self._check_lengths()
        self._check_logit_bias()
        self._check_bad_words()
        self._check_logprobs()
        self._check_regex()
        if self.ignore_eos is not UNSET and not isinstance(self.ignore_eos, bool):
            raise BadOption(f"Sampling(ignore_eos={self.ignore_eos!r}): give True or False.")
        # A string is a sequence of strings too, of which every character would end a turn.
        stop: Any = self.stop
        if isinstance(stop, str) or (stop is not UNSET and not all(stop)):
            raise BadOption(f"Sampling(stop={self.stop!r}): give a tuple of strings, none of them empty.")
        constraints = [name for name in ("schema", "regex", "choice") if getattr(self, name) not in (UNSET, None)]
        if len(constraints) > 1:
            raise BadOption(f"Sampling({', '.join(constraints)}): a turn can obey one constraint; give one of them.")

    def _check_lengths(self) -> None:
        least, most = self.min_tokens, self.max_tokens
        if least is not UNSET and most is not UNSET and least > most:
            raise BadOption(
                f"Sampling(min_tokens={least}, max_tokens={most}): a turn cannot have both; give min_tokens of at most "
                "max_tokens, which is 1024 where nobody gives it."
            )

    def _check_logit_bias(self) -> None:
        given: Any = self.logit_bias
        if given is UNSET or given is None:
            return
        if not isinstance(given, Mapping):
            raise BadOption(
                f"Sampling(logit_bias={given!r:.80}): give a dictionary of numbers by token id, such as {{262: -100}}."
            )
        for token_id, bias in given.items():
            entry = f"Sampling(logit_bias={{{token_id!r:.80}: {bias!r:.80}}})"
            if not checked.is_whole(token_id, least=0):
                raise BadOption(f"{entry}: {token_id!r:.80} is no token id; give a whole number of at least 0.")
            checked.number(entry, bias, least=-100, most=100)
        # A copy: what a turn records must not change with the author's dictionary.
        object.__setattr__(self, "logit_bias", dict(given))

    def _check_bad_words(self) -> None:
        words: Any = self.bad_words
        if words is UNSET:
            return
        if not isinstance(words, tuple | list) or not all(isinstance(word, str) and word.strip() for word in words):
            raise BadOption(
                f"Sampling(bad_words={words!r:.80}): give a tuple of strings, none of them empty or white space alone."
            )

    def _check_logprobs(self) -> None:
        if self.logprobs is None:  # which elsewhere means none at all: here the sampled id's is always kept
            object.__setattr__(self, "logprobs", 0)
        self._check("logprobs", checked.whole, least=0, most=MAX_LOGPROBS)

    def shortened(self, max_tokens: int) -> Self:
        """The same for a turn in which there is room for `max_tokens` ids only; every field is set."""
        return dataclasses.replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    def all_stop_ids(self, own: Iterable[int]) -> tuple[int, ...]:
        """The ids that end a turn of a model whose own stop ids are `own`; every field is set."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else own), *self.stop_ids)))

    def check_vocabulary(self, size: int) -> None:
        """Refuse ids that a vocabulary of `size` ids does not have.

        Raises:
            BadOption: names the id.
        """
        for token_id in self.logit_bias or ():
            if token_id >= size:
                raise BadOption(
                    f"Sampling(logit_bias={{{token_id}: ...}}): the model's ids are 0 to {size - 1}; take the id from "
                    "the tokenizer of the engine's model."
                )
        if self.logprobs and self.logprobs > size:
            raise BadOption(f"Sampling(logprobs={self.logprobs}): the model has {size} ids; give at most {size}.")

    def _check_regex(self) -> None:
        if self.regex is UNSET or self.regex is None:
            return
        # The engine's library reads it once more; a slip is to be found before anything is sampled.
        try:
            re.compile(self.regex)
        except (re.error, TypeError) as error:
            raise BadOption(f"Sampling(regex={self.regex!r:.80}): no regular expression ({error}).") from None

    @classmethod
    def defaults(cls) -> Self:
        """Every field set: what is used where nobody gives a value."""
        return cls(
            max_tokens=1024,
            min_tokens=0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            logit_bias=None,
            bad_words=(),
            stop=(),
            stop_ids=(),
            ignore_eos=False,
            logprobs=0,
            schema=None,
            regex=None,
            choice=None,
            adapter=None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(_LayeredOptions):
    """What an episode may use. Reaching one is an outcome, not an error; None lifts it.

    The limits of hooks count the author's code: they stand still while an agent is sampled in it.
    """

    turns: int | None = UNSET
    """The most turns of the trained conversations together; None by default."""
    tokens: int | None = UNSET
    """The most ids that are sampled in the trained conversations together; None by default."""
    context: int | None = UNSET
    """The most ids that one conversation may hold; None, which leaves the engine's own limit, by default."""
    seconds: float | None = UNSET
    """The time for the play of an episode; 600 s by default.

    What its agents sample counts; waiting for a place does not.
    """
    setup_seconds: float | None = UNSET
    """The time for `setup()` and `prompt()`; 300 s by default."""
    step_seconds: float | None = UNSET
    """The time for one `step()`; 120 s by default."""
    tool_seconds: float | None = UNSET
    """The time for one tool call, unless the tool has a limit of its own; 120 s by default."""
    reward_seconds: float | None = UNSET
    """The time for all rewards and metrics of an episode; 300 s by default."""
    close_seconds: float | None = UNSET
    """The time for `close()`, for the exit stack, and for each exit of it that runs in a thread; 30 s by default."""
    stall_seconds: float | None = UNSET
    """The time after which an engine that admitted a request and sends nothing has failed; 120 s by default."""

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
    """How wide a run is; it never changes a result."""

    episodes: int | None = None
    """The most episodes that are alive at once; None, by default, is twice the engine's places."""
    threads: int = 64
    """The worker threads that the run has for synchronous code; 64 by default."""

    def __post_init__(self) -> None:
        if self.episodes is not None:
            checked.whole(f"Concurrency(episodes={self.episodes!r})", self.episodes, least=1)
        checked.whole(f"Concurrency(threads={self.threads!r})", self.threads, least=1)


class HistoryPolicy(enum.StrEnum):
    """What is done where a template does not simply append to what was sampled."""

    APPEND = "append"
    """Keep what was sampled, and fork where no exact bridge is proven."""
    FORK = "fork"
    """Follow the template: where its render of the past differs, a new segment begins."""
    REFUSE = "refuse"
    """End the episode with `token_error` where no exact bridge is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """How the past of a conversation is kept. A policy's name stands for History(policy=name)."""

    policy: HistoryPolicy = HistoryPolicy.APPEND
    """What is done where a template rewrites the past: append, fork or refuse."""
    content_safe: bool = True
    """Whether control text in what users and tools say is ordinary text, which never becomes control ids."""
    close_reasoning: bool = False
    """Whether the answer to a turn that was cut inside its reasoning closes that first, as masked context.

    False ends the episode there.
    """

    def __post_init__(self) -> None:
        names = ", ".join(HistoryPolicy)
        if self.policy not in list(HistoryPolicy):
            raise BadOption(f"History(policy={self.policy!r}): give one of {names}.")
        # A name passes as it stands, since a StrEnum's members equal theirs; from here on it is the member.
        object.__setattr__(self, "policy", HistoryPolicy(self.policy))
        for name in ("content_safe", "close_reasoning"):
            if not isinstance(getattr(self, name), bool):
                raise BadOption(f"History({name}={getattr(self, name)!r}): give True or False.")

    @classmethod
    def of(cls, given: History | str | None) -> History:
        """The options that `given` stands for; None stands for the defaults.

        Raises:
            BadOption: it is neither a policy's name nor a History.
        """
        if given is None or isinstance(given, str):
            return cls(policy=HistoryPolicy.APPEND if given is None else given)  # type: ignore[arg-type]  # checked there
        if isinstance(given, History):
            return given
        raise BadOption(f"history={given!r:.60}: give append, fork, refuse or a History(...).")
