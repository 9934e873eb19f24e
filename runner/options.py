"""Options of a run and of a turn: small frozen dataclasses whose fields are unset by default."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, Self, TypeAlias

from runner import checked
from runner.errors import BadOption
from runner.sampling_fields import SAMPLING_FIELDS

__all__ = [
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
"""Value of a field that was not set. It differs from None, which lifts a limit."""

ToolChoice: TypeAlias = Literal["auto", "required", "none"] | str
""""auto", "required" or "none": the model may, must or must not call a tool. Another string names the required tool."""


VLLM_FORMAT: Final = "vllm:"
"""Prefix of tool formats that one of vLLM's tool parsers reads; the name of the parser follows."""


def check_tool_format(given: Any) -> None:
    """Refuse a value that is not a tool format. Names of parsers are not checked, since only vLLM has the list.

    Raises:
        BadOption: the value is not None, and not "vllm:" with a name.
    """
    if given is None or (isinstance(given, str) and given.startswith(VLLM_FORMAT) and given != VLLM_FORMAT):
        return
    raise BadOption(
        f"tool_format={given!r:.60}: give {VLLM_FORMAT}NAME with one of vLLM's tool parsers, "
        f"such as {VLLM_FORMAT}hermes, or None for the format learnt from the chat template."
    )


class ConstraintKind(enum.StrEnum):
    """Languages in which an engine accepts constraints."""

    JSON = "json"
    """A JSON schema."""
    REGEX = "regex"
    """A regular expression."""
    GRAMMAR = "grammar"
    """A grammar in xgrammar's EBNF, or in Lark."""
    CHOICE = "choice"
    """A JSON array of strings; the turn equals one of them."""
    STRUCTURAL_TAG = "structural_tag"
    """A structural tag of xgrammar: text is free until a tag opens a part with a schema."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the text of one turn, enforced by the engine's constrained decoding."""

    kind: ConstraintKind
    """Language of `value`."""
    value: str
    """The constraint in that language."""


class _LayeredOptions:
    """Options that can be layered: each set field overrides the layer below."""

    __slots__ = ()

    def over(self, base: Self) -> Self:
        """Return these options with every unset field taken from `base`."""
        unset = {
            field.name: getattr(base, field.name)
            for field in dataclasses.fields(self)  # type: ignore[arg-type]  # every subclass is a dataclass
            if getattr(self, field.name) is UNSET
        }
        return dataclasses.replace(self, **unset) if unset else self  # type: ignore[type-var]  # likewise

    def given(self) -> dict[str, Any]:
        """Return the set fields by name."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]  # as above
        return {name: value for name, value in values.items() if value is not UNSET}

    def _check(self, name: str, check: Callable[..., float], *, lifted: bool = False, **bounds: float) -> None:
        """Check a set field with a function of `checked`; with `lifted`, None is allowed and lifts the limit."""
        value = getattr(self, name)
        if value is UNSET or (lifted and value is None):
            return
        otherwise = ", or None for no limit" if lifted else ""
        check(f"{type(self).__name__}({name}={value!r})", value, otherwise=otherwise, **bounds)


_NAMES_IN_REQUESTS: Final = {
    **{row.sglang: name for name, row in SAMPLING_FIELDS.items() if row.sglang is not None},
    **{name: name for name, row in SAMPLING_FIELDS.items() if row.vllm and name != "logprobs"},
    "stop": "stop",
    "stop_token_ids": "stop_ids",
}

_NUMBERS: Final = {name: row for name, row in SAMPLING_FIELDS.items() if row.number is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling(_LayeredOptions):
    """Sampling of one turn.

    Precedence, from the highest: `generate()`, `conversation()`, the `Run`, the environment's class. Sampling values of
    the model's generation_config are ignored.
    """

    max_tokens: int = UNSET
    """Maximum number of ids of one turn; 1024 by default."""
    min_tokens: int = UNSET
    """Minimum number of ids of a turn, at most `max_tokens`; 0 by default, which is off.

    Before this number is reached, stop ids are not sampled, and stop strings do not end the turn.
    """
    temperature: float = UNSET
    """Temperature that logits are divided by; 0 is greedy. 1 by default."""
    top_p: float = UNSET
    """Probability mass that nucleus sampling keeps; 1 by default, which is off."""
    top_k: int = UNSET
    """Number of most likely ids that are kept; 0 by default, which is off."""
    min_p: float = UNSET
    """Fraction of the most likely id's probability below which an id is dropped; 0 by default, which is off."""
    repetition_penalty: float = UNSET
    """Divisor of the positive logits, and factor of the negative logits, of each id in the prompt and the turn.

    It must be above 0. Values above 1 discourage repetition; 1 by default, which is off. The prompt is everything that
    the model sees: the system prompt, earlier turns and text of the chat template.
    """
    presence_penalty: float = UNSET
    """Value subtracted from the logit of each id that the turn already contains; -2 to 2, 0 by default, which is off.
    """
    frequency_penalty: float = UNSET
    """Value subtracted from an id's logit for each time it occurs in the turn; -2 to 2, 0 by default, which is off."""
    logit_bias: Mapping[int, float] | None = UNSET
    """Values added to the logits of some ids, by id; -100 to 100. None, the default, and {} add nothing."""
    bad_words: tuple[str, ...] = UNSET
    """Words that are not sampled; none by default.

    The ids of a word in the vocabulary are blocked, both alone and after a space. The word can still be sampled in
    another letter case, or as other ids of the same text.
    """
    stop: tuple[str, ...] = UNSET
    """Strings that end a turn. The text ends before the string.

    Chat APIs find the strings themselves. With other engines deltarunner finds them: the ids of the string are kept,
    and ids sampled after it are dropped.
    """
    stop_ids: tuple[int, ...] = UNSET
    """Token ids that end a turn, in addition to the model's stop ids."""
    ignore_eos: bool = UNSET
    """True if the model's stop ids do not end a turn; False by default.

    A turn then has `max_tokens` ids, unless `stop` or `stop_ids` end it. It counts as truncated; an EOS in it is an
    ordinary id.
    """
    logprobs: int | None = UNSET
    """Number of most likely ids whose log-probabilities are kept for each sampled id, at most 20; 0 by default.

    They are in `Turn.top_ids` and `Turn.top_logprobs`. 0 and None keep none; the log-probability of the sampled id
    itself is always kept.
    """
    schema: dict[str, Any] | None = UNSET
    """JSON schema that the text of the turn must match."""
    regex: str | None = UNSET
    """Regular expression that the text of the turn must match."""
    choice: tuple[str, ...] | None = UNSET
    """Texts; the turn must equal one of them."""
    adapter: str | None = UNSET
    """Name of the engine's LoRA adapter that samples the turn; None for the model itself."""

    def __post_init__(self) -> None:
        # In other APIs None disables log-probabilities. Here, the sampled id's own log-probability is always kept.
        if self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        for name, row in _NUMBERS.items():
            value = getattr(self, name)
            if value is not UNSET:
                row.check(f"Sampling({name}={value!r})", value)
        self._check_lengths()
        self._check_logit_bias()
        self._check_bad_words()
        self._check_regex()
        if self.ignore_eos is not UNSET and not isinstance(self.ignore_eos, bool):
            raise BadOption(f"Sampling(ignore_eos={self.ignore_eos!r}): give True or False.")
        # A string is also a sequence of strings, and each of its characters would end a turn.
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
                "max_tokens, which is 1024 by default."
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
                raise BadOption(f"{entry}: {token_id!r:.80} is not a token id; give a whole number of at least 0.")
            checked.number(entry, bias, least=-100, most=100)
        # The copy protects the record of a turn from later changes of the caller's dictionary.
        object.__setattr__(self, "logit_bias", dict(given))

    def _check_bad_words(self) -> None:
        words: Any = self.bad_words
        if words is UNSET:
            return
        if not isinstance(words, tuple | list) or not all(isinstance(word, str) and word.strip() for word in words):
            raise BadOption(
                f"Sampling(bad_words={words!r:.80}): give a tuple of strings, none of them empty or only white space."
            )

    def shortened(self, max_tokens: int) -> Self:
        """Return the same sampling for a turn with room for only `max_tokens` ids; every field must be set."""
        return dataclasses.replace(self, max_tokens=max_tokens, min_tokens=min(self.min_tokens, max_tokens))

    def all_stop_ids(self, own: Iterable[int]) -> tuple[int, ...]:
        """Return the ids that end a turn of a model with the stop ids `own`; every field must be set."""
        return tuple(dict.fromkeys((*(() if self.ignore_eos else own), *self.stop_ids)))

    def check_vocabulary(self, size: int) -> None:
        """Check the fields whose bounds depend on the vocabulary.

        Args:
            size: number of ids of the vocabulary.

        Raises:
            BadOption: an id of `logit_bias` is not in the vocabulary, or `logprobs` exceeds its size.
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
        # The engine's library parses the expression again, but a mistake should be found before sampling.
        try:
            re.compile(self.regex)
        except (re.error, TypeError) as error:
            raise BadOption(f"Sampling(regex={self.regex!r:.80}): correct this regular expression ({error}).") from None

    @classmethod
    def defaults(cls) -> Self:
        """Return the default values, with every field set."""
        return cls(**{name: row.default for name, row in SAMPLING_FIELDS.items()})

    @classmethod
    def of_request(cls, request: Any) -> Self:
        """Return the sampling of a trainer's request.

        Args:
            request: a mapping, or an object with attributes, in the names of vLLM or SGLang. Fields that are None are
                ignored, as are fields about the client's own request, such as `n` and `logprobs`.

        Raises:
            BadOption: a value is out of its range.
        """
        read = request.get if isinstance(request, Mapping) else partial(getattr, request)
        found = [(name, read(theirs, None)) for theirs, name in _NAMES_IN_REQUESTS.items()]
        given: dict[str, Any] = {name: value for name, value in found if value is not None}
        if given.get("top_k") == -1:  # vLLM's value for "off"
            given["top_k"] = 0
        if isinstance(given.get("stop"), str):
            given["stop"] = (given["stop"],)
        given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        return cls(**given)

    def changes(self) -> dict[str, Any]:
        """Return the fields that change probabilities and that trainers do not apply, without fields that are off.

        Every field must be set.
        """
        values = {name: getattr(self, name) for name, row in SAMPLING_FIELDS.items() if row.changes}
        return {name: value for name, value in values.items() if not SAMPLING_FIELDS[name].is_off(value)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(_LayeredOptions):
    """Limits of an episode. Reaching a limit is an outcome, not an error; None lifts a limit.

    The time limits of hooks are paused while an agent is sampled in the hook.
    """

    turns: int | None = UNSET
    """Maximum number of turns of the trained conversations together; None by default."""
    tokens: int | None = UNSET
    """Maximum number of sampled ids of the trained conversations together; None by default."""
    context: int | None = UNSET
    """Maximum number of ids of one conversation; None by default, which leaves the engine's own limit."""
    seconds: float | None = UNSET
    """Seconds that an episode may play; 600 by default.

    The time of sampling its agents counts; the time of waiting for a place in the engine does not.
    """
    setup_seconds: float | None = UNSET
    """Seconds for `setup()` and `prompt()`; 300 by default."""
    step_seconds: float | None = UNSET
    """Seconds for one `step()`; 120 by default."""
    tool_seconds: float | None = UNSET
    """Seconds for one tool call, unless the tool has its own limit; 120 by default."""
    reward_seconds: float | None = UNSET
    """Seconds for all rewards and metrics of an episode; 300 by default."""
    close_seconds: float | None = UNSET
    """Seconds for `close()`, the exit stack, each of its exits in a thread, the end of `lifespan()`; 30 by default."""
    stall_seconds: float | None = UNSET
    """Seconds after which an engine that admitted a request and sends nothing counts as failed; 120 by default."""

    def __post_init__(self) -> None:
        for name in ("turns", "tokens", "context"):
            self._check(name, checked.whole, least=1, lifted=True)
        for field in dataclasses.fields(self):
            if field.name.endswith("seconds"):
                self._check(field.name, checked.number, above=0, lifted=True)

    @classmethod
    def defaults(cls) -> Self:
        """Return the default values, with every field set."""
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
        """Return the same limits without any time limit, for a debugger."""
        clocks = {f.name: None for f in dataclasses.fields(self) if f.name.endswith("seconds")}
        return dataclasses.replace(self, **clocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    """Concurrency of a run. It never changes results."""

    episodes: int | None = None
    """Maximum number of episodes in flight; None by default, which is twice the engine's places."""
    threads: int = 64
    """Worker threads of the run for synchronous code; 64 by default."""

    def __post_init__(self) -> None:
        if self.episodes is not None:
            checked.whole(f"Concurrency(episodes={self.episodes!r})", self.episodes, least=1)
        checked.whole(f"Concurrency(threads={self.threads!r})", self.threads, least=1)


class HistoryPolicy(enum.StrEnum):
    """Action if a template does not simply append to the sampled tokens."""

    APPEND = "append"
    """Keep the sampled tokens, and fork if no exact bridge is proven."""
    FORK = "fork"
    """Follow the template: if its render of earlier messages has other ids, begin a new segment."""
    REFUSE = "refuse"
    """End the episode with `token_error` if no exact bridge is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Handling of a conversation's past. The name of a policy is short for History(policy=name)."""

    policy: HistoryPolicy = HistoryPolicy.APPEND
    """Action if a template rewrites earlier messages: append, fork or refuse."""
    content_safe: bool = True
    """True if control text from users and tools is encoded as ordinary text, never as control ids."""
    close_reasoning: bool = False
    """True if the episode continues after a turn that was truncated inside its reasoning.

    The next prompt then closes the reasoning, as masked context. False ends the episode.
    """

    def __post_init__(self) -> None:
        names = ", ".join(HistoryPolicy)
        if self.policy not in list(HistoryPolicy):
            raise BadOption(f"History(policy={self.policy!r}): give one of {names}.")
        # The name of a policy equals its member; convert it to the member.
        object.__setattr__(self, "policy", HistoryPolicy(self.policy))
        for name in ("content_safe", "close_reasoning"):
            if not isinstance(getattr(self, name), bool):
                raise BadOption(f"History({name}={getattr(self, name)!r}): give True or False.")

    @classmethod
    def of(cls, given: History | str | None) -> History:
        """Convert a policy name or None to options; None is the default.

        Raises:
            BadOption: `given` is not the name of a policy or a History.
        """
        if given is None or isinstance(given, str):
            return cls(policy=HistoryPolicy.APPEND if given is None else given)  # type: ignore[arg-type]  # checked there
        if isinstance(given, History):
            return given
        raise BadOption(f"history={given!r:.60}: give append, fork, refuse or a History(...).")
