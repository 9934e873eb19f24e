"""Trials of the bridge with each kind of message that may follow a sampled turn, and a worked example."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, cast

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridge, Bridger
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.control_text import lacking, special_tokens, tag_tokens
from runner.tokens.junction import Seam
from runner.tokens.probing.profile import TemplateProfile
from runner.tokens.template import Renderer, ToolSchema
from runner.tokens.tokenizer import Tokenizer, load_tokenizer
from runner.tokens.turn_shape import AnsweredTurn

__all__ = ["Append", "AppendVerdict", "Exactness", "ExamplePassage", "appends_answer", "example", "verdicts"]


class Append(enum.StrEnum):
    """The kinds of append: the model's last action, and the next message."""

    USER = "user after an answer"
    RESULT = "tool result after one call"
    RESULTS = "tool results after parallel calls"
    TEXT_AND_CALL = "tool result after text and a call"
    RESULT_AND_USER = "tool result and a user"
    USER_AFTER_REASONING = "user after reasoning"
    CUT = "user after a cut turn"
    UNDER_SYSTEM = "user under a system message"
    SYSTEM = "system message between turns"

    @property
    def needed(self) -> bool:
        """True for all kinds except those with a system message, which are optional."""
        return self not in (Append.UNDER_SYSTEM, Append.SYSTEM)

    @property
    def calls(self) -> bool:
        return self in (Append.RESULT, Append.RESULTS, Append.TEXT_AND_CALL, Append.RESULT_AND_USER)


class Exactness(enum.StrEnum):
    """The quality of a bridge."""

    # the text is proven to be the template's, and the ids at its start never merge with the turn's last ids
    EXACT = "exact"
    # the text is correct, but the ids at its start might have merged with the turn's last ids if the whole text had
    # been encoded
    SOFT = "soft"
    UNSUPPORTED = "unsupported"  # there is no bridge, so the run's policy is applied


@dataclass(frozen=True, slots=True)
class AppendVerdict:
    """The result of the bridge for one kind of append."""

    kind: Append
    result: Exactness
    """The quality of the bridge: the worst over several histories."""
    refusal: Property | None = None
    """The property that is missing for a bridge; None if there is a bridge."""
    explanation: str = ""
    """The description of the missing property, for people; "" if no property is missing."""
    anchor: str = ""
    """The value of the bridge's `Anchor`; "" if there is no bridge."""
    close: str = ""
    """The origin of the turn's closing tokens (`Close`); "" if there is no bridge."""
    local: bool = False
    """True if the work for a bridge does not depend on the length of the history."""
    rewrites: bool = False
    """True if the render of the whole conversation fails, or has other ids than prompt, sampled turn and bridge.

    Then the policy `fork` starts a new segment, and the policy `append` keeps the ids that such a render would
    change.
    """

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        refusal = values["refusal"] and Property(values["refusal"])
        kind, result = Append(values["kind"]), Exactness(values["result"])
        return cls(**{**values, "kind": kind, "result": result, "refusal": refusal})


@dataclass(frozen=True, slots=True)
class ExamplePassage:
    """Consecutive ids of the worked example with one source."""

    source: str
    """"prompt", "sampled" or "bridge"."""
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    """The text of each id."""

    @property
    def mask(self) -> int:
        """The loss mask of the ids."""
        return int(self.source == "sampled")


# These messages have plain words, unlike the words in probe_messages, since check-template prints them token by token.
TOOLS: Sequence[ToolSchema] = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up.",
            "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        },
    },
]


def _call(*words: str, first: int = 1, text: str = "") -> Message:
    calls = [
        {"id": f"call{first + index:05}", "type": "function", "function": {"name": "look_up", "arguments": {"word": w}}}
        for index, w in enumerate(words)
    ]
    return cast("Message", {"role": "assistant", "content": text, "tool_calls": calls})


def _result(text: str, number: int = 1) -> Message:
    return cast("Message", {"role": "tool", "content": text, "tool_call_id": f"call{number:05}", "name": "look_up"})


_QUESTION: Message = {"role": "user", "content": "What is a heron?"}
_ANSWER: Message = {"role": "assistant", "content": "A heron is a bird."}
_THOUGHT: Message = {**_ANSWER, "reasoning_content": "Herons wade."}
_NEXT: Message = {"role": "user", "content": "And an egret?"}
_SYSTEM: Message = {"role": "system", "content": "Answer in one word."}
_CALLED, _RETURNED = _call("heron"), _result("a wading bird")

_KINDS: Mapping[Append, tuple[Message, Sequence[Message]]] = {
    Append.USER: (_ANSWER, [_NEXT]),
    Append.RESULT: (_call("egret", first=3), [_result("a white bird", 3)]),
    Append.RESULTS: (_call("egret", "ibis", first=3), [_result("a white bird", 3), _result("a bird of Egypt", 4)]),
    Append.TEXT_AND_CALL: (_call("egret", first=3, text="I look it up."), [_result("a white bird", 3)]),
    Append.RESULT_AND_USER: (_call("egret", first=3), [_result("a white bird", 3), _NEXT]),
    Append.USER_AFTER_REASONING: (_THOUGHT, [_NEXT]),
    Append.CUT: ({"role": "assistant", "content": "A heron is"}, [_NEXT]),
    Append.UNDER_SYSTEM: (_ANSWER, [_NEXT]),
    Append.SYSTEM: (_ANSWER, [_SYSTEM, _NEXT]),
}
_SHORT: Sequence[Message] = (_QUESTION,)
_LONG: Sequence[Message] = (_QUESTION, _THOUGHT, _NEXT)
_ROUNDS: Sequence[Message] = (_QUESTION, _CALLED, _RETURNED, _THOUGHT, _NEXT)


def verdicts(
    bridger: Bridger, profile: TemplateProfile, *, tools: bool = True, kinds: Iterable[Append] = Append
) -> list[AppendVerdict]:
    """Return the verdicts on these kinds of append, after short and longer histories, with or without tools."""
    carried = tools and profile.carries_tools
    # A system message at the beginning is tested without tools.
    return [_AppendTrial(bridger, kind, tools=carried and kind is not Append.UNDER_SYSTEM).verdict() for kind in kinds]


class _AppendTrial:
    def __init__(self, bridger: Bridger, kind: Append, *, tools: bool) -> None:
        self._bridger = bridger
        self._speaker = _Speaker(bridger)
        self._kind = kind
        self._turn, self._new = _KINDS[kind]
        self._tools = TOOLS if tools else []
        system = [_SYSTEM] if kind is Append.UNDER_SYSTEM else []
        self._pasts = ([*system, *_SHORT], [*system, *(_ROUNDS if tools else _LONG)])

    def verdict(self) -> AppendVerdict:
        tried = [self._after(past, number) for number, past in enumerate(self._pasts)]
        worst = max(tried, key=lambda verdict: list(Exactness).index(verdict.result))
        return replace(worst, rewrites=any(verdict.rewrites for verdict in tried))

    def _after(self, past: Sequence[Message], number: int) -> AppendVerdict:
        history = [*past, self._turn]
        try:
            sampled, stop = self._speaker.said(history, self._tools, cut=self._kind is Append.CUT)
            history = self._speaker.as_recorded(history, self._tools, sampled)
            bridge = self._bridger.bridge(history, self._new, self._tools, sampled=sampled, stop=stop, turn=number)
        except Unbridgeable as refusal:
            return AppendVerdict(self._kind, Exactness.UNSUPPORTED, refusal.property, refusal.explanation)
        junction = bridge.junction
        return AppendVerdict(
            self._kind,
            Exactness.SOFT if junction.seam is Seam.UNVERIFIED else Exactness.EXACT,
            anchor=junction.anchor.value,
            close=junction.close.value,
            local=self._bridger.locality.is_local(AnsweredTurn(history, self._new, self._tools)),
            rewrites=self._rewrites(past, sampled, bridge),
        )

    def _rewrites(self, past: Sequence[Message], sampled: Sequence[int], bridge: Bridge) -> bool:
        """Return False if the ids of the whole conversation equal prompt, sampled ids and bridge; otherwise True.

        The result is also True if the template cannot render the whole conversation.
        """
        with suppress(Unbridgeable):
            prompt = self._bridger.first_prompt(past, self._tools)
            whole = self._bridger.first_prompt([*past, self._turn, *self._new], self._tools)
            return list(whole) != [*prompt, *sampled, *bridge.ids]
        return True


class _Speaker:
    """A model that writes exactly the text of the template, as ids."""

    def __init__(self, bridger: Bridger) -> None:
        self._bridger = bridger
        self._prompts = PromptRenderer(bridger.renderer)

    def said(
        self, history: Sequence[Message], tools: Sequence[ToolSchema], *, cut: bool = False
    ) -> tuple[list[int], int | None]:
        """Return the ids of the last message as a turn, and the stop that ends them; the stop is None if `cut`."""
        tokenizer = self._bridger.tokenizer
        turn = history[-1]
        if cut:
            return tokenizer.encode(turn["content"]), None
        prompt = self._prompts.prompt(history[:-1], tools)
        whole = self._prompts.render(history, tools, generation_prompt=False)
        ids = tokenizer.encode(whole[len(prompt) :] if whole.startswith(prompt) else _words(turn))
        stop = self._stop(ids, history, tools)
        if stop in ids:
            ids = ids[: len(ids) - ids[::-1].index(stop) - 1]
        else:
            ids = tokenizer.encode(tokenizer.decode(ids).rstrip())
        return [*ids, stop], stop

    def as_recorded(
        self, history: Sequence[Message], tools: Sequence[ToolSchema], sampled: Sequence[int]
    ) -> list[Message]:
        """Return the history with the last answer as a run would record it after `sampled`.

        If the sampled ids of an answer without calls contain control tokens, such as harmony's channels, a run records
        their whole text, without the stop. If this changes the last answer, earlier answers are recorded likewise.
        """
        recorded = [*history[:-1], self._recorded(history[-1], sampled)]
        for index, message in enumerate(history[:-1]):
            if message["role"] == "assistant" and recorded[-1] != history[-1]:
                said, _ = self.said(history[: index + 1], tools)
                recorded[index] = self._recorded(message, said)
        return recorded

    def _recorded(self, turn: Message, sampled: Sequence[int]) -> Message:
        words = sampled[:-1] if sampled and sampled[-1] in self._bridger.stop_ids else sampled
        if turn.get("tool_calls") or not self._bridger.tokenizer.special_ids.intersection(words):
            return turn
        return {"role": "assistant", "content": self._bridger.tokenizer.decode(words)}

    def _stop(self, ids: Sequence[int], history: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        """Return the last stop id in `ids`, or else the first one in the tail, the EOS id, or the lowest stop id."""
        stops = self._bridger.stop_ids
        found = [token_id for token_id in reversed(ids) if token_id in stops]
        if not found:
            with suppress(Unbridgeable):
                follows = [_result("a white bird", 3)] if history[-1].get("tool_calls") else [_NEXT]
                tail = self._bridger.locality.whole_tail(AnsweredTurn(history, follows, tools))
                found = [token_id for token_id in self._bridger.tokenizer.encode(tail.text) if token_id in stops]
        own = self._bridger.tokenizer.eos_id
        return found[0] if found else own if own is not None and own in stops else min(stops)


def _words(turn: Message) -> str:
    """Return the content of a turn, or else the names of its calls.

    This text replaces the render of the turn if a template writes turns of the history differently from prompts.
    """
    calls = turn.get("tool_calls") or ()
    return turn["content"] or " ".join(call["function"]["name"] for call in calls)


# --- the worked example


def example(bridger: Bridger, profile: TemplateProfile) -> list[ExamplePassage]:
    """Return the passages of a short conversation, with a call if the template shows tools, calls and results.

    The conversation ends at the first turn without a bridge.

    Raises:
        Unbridgeable: the template cannot render the first prompt.
    """
    if profile.carries_tools:
        turns: list[tuple[Message, Sequence[Message]]] = [(_CALLED, [_RETURNED]), (_ANSWER, [_NEXT])]
    else:
        turns = [(_ANSWER, [_NEXT])]
    return list(_played(bridger, turns, TOOLS if profile.carries_tools else []))


def _played(
    bridger: Bridger, turns: Sequence[tuple[Message, Sequence[Message]]], tools: Sequence[ToolSchema]
) -> Iterator[ExamplePassage]:
    speaker, history = _Speaker(bridger), [_QUESTION]
    yield _passage(bridger.tokenizer, "prompt", bridger.first_prompt(history, tools))
    with suppress(Unbridgeable):
        for number, (turn, new) in enumerate(turns):
            history.append(turn)
            sampled, stop = speaker.said(history, tools)
            yield _passage(bridger.tokenizer, "sampled", sampled)
            bridge = bridger.bridge(history, new, tools, sampled=sampled, stop=stop, turn=number)
            yield _passage(bridger.tokenizer, "bridge", bridge.ids)
            history.extend(new)


def _passage(tokenizer: Tokenizer, source: str, ids: Sequence[int]) -> ExamplePassage:
    return ExamplePassage(source, tuple(ids), tuple(tokenizer.decode([token_id]) for token_id in ids))


# --- for the process that probes


def appends_answer(renderer: Renderer, profile: TemplateProfile, vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the verdicts and the example as plain values.

    The `vocabulary` is {"folder", "stop_ids"} of a model, or {} for bytes and the template's own control tokens.
    """
    if vocabulary:
        tokenizer: Tokenizer = load_tokenizer(Path(vocabulary["folder"]))
        stops = [tokenizer.eos_id, *vocabulary["stop_ids"]]
    else:
        tokenizer = byte_tokenizer(renderer, profile)
        stops = [tokenizer.token_id(token) for token in _stop_tokens(renderer, profile)]
    stop_ids = tuple(dict.fromkeys(stop for stop in stops if stop is not None))
    bridger = Bridger(tokenizer, renderer, stop_ids)
    try:
        shown = example(bridger, profile)
    except Unbridgeable:
        shown = []
    return {
        "appends": [asdict(verdict) for verdict in verdicts(bridger, profile)],
        "example": [asdict(passage) for passage in shown],
        "stops": {tokenizer.decode([stop]): stop for stop in stop_ids},
        "bytes": not vocabulary,
        "lacking": lacking(renderer.rendered(), bridger.tokenizer),
    }


def byte_tokenizer(renderer: Renderer, profile: TemplateProfile) -> ByteTokenizer:
    """Return a vocabulary of bytes and the control tokens of the template's source and renders."""
    text = renderer.template.text + profile.generation_prompt + profile.close + profile.close_at_end
    special = dict.fromkeys((*special_tokens(text), *_stop_tokens(renderer, profile)))
    return ByteTokenizer(tuple(special), added_tokens=[tag for tag in tag_tokens(text) if tag not in special])


def _stop_tokens(renderer: Renderer, profile: TemplateProfile) -> list[str]:
    """Return the control tokens that a model of this template stops with, as far as the template shows them."""
    closes = (profile.close_at_end, profile.close_after_call, profile.close)
    tokens = [special_tokens(close)[-1:] for close in closes]
    found = [token for some in tokens for token in some] + list(profile.stop_opens_next)
    end_of_text = renderer.template.variables.get("eos_token", "<|endoftext|>")
    return list(dict.fromkeys([*found, end_of_text]))
