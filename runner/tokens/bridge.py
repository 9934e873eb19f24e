"""The bridge: exactly the ids that a template puts between one sampled turn and the next, sampled ids left alone.

The last assistant message is copied with a sentinel in it and rendered with the new messages behind. What follows the
sentinel is the tail: the turn's close, the new messages, the generation prompt. Nothing before it is compared or
encoded, so it does not matter what the template makes of the model's words. The stop id that was sampled is looked
for in the tail, and the bridge is what follows it.
"""

from __future__ import annotations

import enum
import itertools
import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from runner.messages import Message
from runner.tokens.junction import Anchor, Close, Junction, Result, Seam
from runner.tokens.template import Renderer, TemplateRaised, ToolSchema
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Bridge", "Bridger", "Property", "Unbridgeable"]


class Property(enum.StrEnum):
    """What a template, a vocabulary or a turn must have for an exact bridge; `Unbridgeable` names the missing one."""

    TEMPLATE_RENDERS = "template_raises"  # the template raised on these messages
    SENTINEL_SHOWN = "no_sentinel"  # the last assistant turn does not show what was said or called
    TURN_STAYS_BEHIND = "marker_in_tail"  # the model's words would be repeated after the turn
    CONTENT_SHOWN = "content_missing"  # a new message cannot be seen in the render
    STOP_IN_TAIL = "stop_not_in_tail"  # the sampled stop does not stand where the template closes a turn
    CLOSE_KNOWN = "close_not_found"  # a cut turn with calls: none of the stop ids closes it
    TEXT_KEPT = "text_not_kept"  # encoding and decoding the tail gives another text
    PROMPTS_ANSWER = "generation_prompt_missing"  # the render does not end by asking the model to speak
    TURNS_SAMPLED = "assistant_in_new"  # an assistant message that nobody sampled was appended


class Unbridgeable(Exception):
    """There is no exact bridge.

    Attributes:
        property: the name of what is missing.
        explanation: the same for people.
    """

    def __init__(self, property: Property, explanation: str) -> None:
        super().__init__(f"{property}: {explanation}")
        self.property = property
        self.explanation = explanation


@dataclass(frozen=True, slots=True)
class Bridge:
    """What goes between the sampled ids and the next ones.

    Attributes:
        ids: appended to prompt and sampled ids, with loss mask 0.
        junction: how it was found.
    """

    ids: list[int]
    junction: Junction


@dataclass(frozen=True, slots=True)
class _Start:
    """Where in the tail the bridge begins, as an index into its ids, and why there."""

    index: int
    anchor: Anchor
    close: Close
    cause: str = ""


class Bridger:
    """Makes the prompts of one template and one vocabulary. It keeps no conversation.

    Attributes:
        tokenizer: the vocabulary.
        renderer: the template, with its options and its clock fixed.
        stop_ids: ids that end a turn of the model.
        stems: words for sentinels and markers, none of them twice.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer, stop_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.stop_ids = frozenset(stop_ids)
        self.stems = _stems()
        self._generation_prompt = self._probed_generation_prompt()

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[int]:
        """Ids of the whole render; a BOS is the template's own, none is added.

        Raises:
            Unbridgeable: the template raises, or does not ask for an answer.
        """
        text = self.render(messages, tools)
        self.check_asks(text, lambda: self.render(messages, tools, generation_prompt=False))
        return self.tokenizer.encode(text)

    def bridge(
        self,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        sampled: Sequence[int],
        stop: int | None,
    ) -> Bridge:
        """The ids that put `new` behind a sampled turn and ask for the next one.

        Args:
            history: ends with the assistant message of the turn.
            new: the appended messages, at least one.
            tools: in OpenAI's form, the same as for the turn.
            sampled: the turn's ids, its stop included.
            stop: the id that ended the turn, or None for a turn that was cut.

        Raises:
            Unbridgeable: these steps give no exact bridge; names the property that is missing.
        """
        if not new or not history or history[-1]["role"] != "assistant":
            raise ValueError("a bridge leads from an assistant message to at least one new message")
        if stop is not None and (not sampled or sampled[-1] != stop):
            raise ValueError(f"the turn's last id is not the stop id {stop}")
        if any(message["role"] == "assistant" for message in new):
            raise Unbridgeable(
                Property.TURNS_SAMPLED, "an assistant message among the new ones has no sampled ids; replace() it"
            )
        tail = _Tail(self, history, new, tools)
        tail.check()
        start = self._after_stop(tail, sampled, stop) if stop is not None else self._after_cut(tail, sampled)
        ids = tail.ids[start.index :]
        if not ids:
            raise Unbridgeable(Property.PROMPTS_ANSWER, "nothing follows the stop that was sampled")
        seam = self._seam(sampled, ids)
        return Bridge(ids, Junction(Result.APPENDED, start.anchor, start.close, seam, len(ids), cause=start.cause))

    def _after_stop(self, tail: _Tail, sampled: Sequence[int], stop: int) -> _Start:
        index = tail.find_in_close({stop})
        if index is not None:
            return _Start(index + 1, Anchor.STOP, Close.SAMPLED)
        closed = tail.end_of_sampled_close(sampled[:-1])
        if closed is not None:
            return _Start(closed, Anchor.STOP, Close.SAMPLED, cause="closed_before_stop")
        raise Unbridgeable(
            Property.STOP_IN_TAIL,
            f"the turn ended with {self.tokenizer.decode([stop])!r}, and the template closes it with "
            f"{tail.text[:40]!r}",
        )

    def _after_cut(self, tail: _Tail, sampled: Sequence[int]) -> _Start:
        closed = tail.end_of_sampled_close(sampled)
        if closed is not None:
            return _Start(closed, Anchor.NONE, Close.SAMPLED)
        if not tail.after_call:
            return _Start(0, Anchor.NONE, Close.MASKED)
        # The tail begins inside a call, whose end the model has written; only the turn's close is still missing.
        index = tail.find_in_close(self.stop_ids)
        if index is None:
            raise Unbridgeable(
                Property.CLOSE_KNOWN,
                f"the turn was cut after a call, and no stop id of the model is in the template's {tail.text[:40]!r}",
            )
        return _Start(index, Anchor.NONE, Close.MASKED)

    def _seam(self, sampled: Sequence[int], bridge: Sequence[int]) -> Seam:
        special = self.tokenizer.special_ids
        if bridge[0] in special or (sampled and sampled[-1] in special):
            return Seam.SPECIAL
        if not sampled:  # the neighbour is the generation prompt, which is not at hand
            return Seam.UNVERIFIED
        said, follows = self.tokenizer.decode(sampled), self.tokenizer.decode(bridge)
        whole = self.tokenizer.encode(said + follows)
        return Seam.VERIFIED if whole == [*self.tokenizer.encode(said), *bridge] else Seam.UNVERIFIED

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generation_prompt: bool = True
    ) -> str:
        """The text of `messages`.

        Raises:
            Unbridgeable: the template raises.
        """
        try:
            return self.renderer.render(messages, tools=tools, generation_prompt=generation_prompt)
        except TemplateRaised as error:
            raise Unbridgeable(Property.TEMPLATE_RENDERS, str(error)) from error

    def _probed_generation_prompt(self) -> str:
        question: list[Message] = [{"role": "user", "content": "A question."}]
        try:
            silent = self.renderer.render(question, generation_prompt=False)
            asking = self.renderer.render(question)
        except TemplateRaised:
            return ""
        return asking.removeprefix(silent) if asking.startswith(silent) else ""

    def check_asks(self, text: str, without: Callable[[], str]) -> None:
        """See that the generation prompt is at the end of `text`; `without` gives the text without one.

        Raises:
            Unbridgeable: it is not.
        """
        if self._generation_prompt and text.endswith(self._generation_prompt):
            return
        silent = without()
        if len(text) <= len(silent) or not text.startswith(silent):
            raise Unbridgeable(
                Property.PROMPTS_ANSWER,
                f"template {self.renderer.template.name!r} ends with {text[-40:]!r}, with or without "
                "add_generation_prompt",
            )


class _Tail:
    """What one render has after its last sentinel.

    Attributes:
        text: from the sentinel to the end of the generation prompt.
        ids: its ids.
        first_content: where the first new content begins at the earliest, as an index into `text`.
        after_call: the sentinel stood in a tool call, so the tail begins inside it.
    """

    def __init__(
        self, bridger: Bridger, history: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> None:
        self._bridger = bridger
        self._tokenizer = bridger.tokenizer
        self._stem = _absent(bridger.stems, itertools.chain(history, new))
        self._history = [*history[:-1], _marked(history[-1], self._stem, tools)]
        self._new = new
        self._tools = tools
        self.after_call = bool(history[-1].get("tool_calls"))
        self.text = self._text(new)
        self.ids = self._tokenizer.encode(self.text)
        self.first_content = 0

    def check(self) -> None:
        """Everything that can be seen to be wrong with the tail.

        Raises:
            Unbridgeable: by name.
        """
        if self._stem in self.text:
            raise Unbridgeable(Property.TURN_STAYS_BEHIND, "the template repeats what was said after the turn's end")
        self.first_content = _first_content(self.text, self._new)
        self._bridger.check_asks(self.text, lambda: self._text(self._new, generation_prompt=False))
        decoded = self._tokenizer.decode(self.ids)
        if decoded != self.text and self._tokenizer.normalize(decoded) != self._tokenizer.normalize(self.text):
            at = _common_length(self.text, decoded)
            raise Unbridgeable(
                Property.TEXT_KEPT,
                f"the vocabulary has no ids for {self.text[at : at + 20]!r}, which becomes {decoded[at : at + 20]!r}",
            )

    def find_in_close(self, wanted: Iterable[int]) -> int | None:
        """The first place of a wanted id in what the template writes before any new content."""
        index = min((self.ids.index(token_id) for token_id in wanted if token_id in self.ids), default=None)
        return index if index is not None and self._before_content(index + 1) else None

    def end_of_sampled_close(self, sampled: Sequence[int]) -> int | None:
        """Where the tail goes on after a close that the model wrote itself at the end of `sampled`, or None.

        The close is looked for from the tail's first control token on: before it stands the rest of a call.
        """
        special = self._tokenizer.special_ids
        first = next((index for index, token_id in enumerate(self.ids) if token_id in special), None)
        if first is None:
            return None
        last = list(sampled[-len(self.ids) :])
        # The close is short, and begins at one of the few control tokens near the end of what was sampled.
        for begin in (index for index, token_id in enumerate(last) if token_id == self.ids[first]):
            end = first + len(last) - begin
            if last[begin:] == self.ids[first:end] and self._before_content(end):
                return end
        return None

    def _before_content(self, end: int) -> bool:
        """The first `end` ids of the tail are the template's own: no new content is among them."""
        length = len(self._tokenizer.decode(self.ids[:end]))
        # `first_content` may be too early: a content "m" is found inside <|im_end|>. Then the place is looked up.
        return length <= self.first_content or length <= self._content_border

    @cached_property
    def _content_border(self) -> int:
        """Where the first new content begins, by rendering a marker in its place.

        Where the content changes what the template writes before it, only what both renders begin with counts.
        """
        marker = self._stem + "content"
        first = cast("Message", {**self._new[0], "content": marker})
        close, found, _ = self._text([first, *self._new[1:]]).partition(marker)
        return _common_length(self.text, close) if found else 0

    def _text(self, new: Sequence[Message], *, generation_prompt: bool = True) -> str:
        messages = [*self._history, *new]
        text = self._bridger.render(messages, self._tools, generation_prompt=generation_prompt)
        _, found, tail = text.rpartition(self._stem + _SENTINEL)
        if not found:
            raise Unbridgeable(
                Property.SENTINEL_SHOWN,
                f"template {self._bridger.renderer.template.name!r} does not show the last assistant turn",
            )
        return tail


_SENTINEL = "end"


def _stems() -> Iterator[str]:
    """Words of letters and digits that no text holds by chance, and none of which begins another."""
    secret = secrets.token_hex(6)
    return (f"zq{secret}n{number}z" for number in itertools.count())


def _absent(stems: Iterator[str], messages: Iterable[Message]) -> str:
    contents = [message["content"] for message in messages]
    return next(stem for stem in stems if not any(stem in content for content in contents))


def _marked(message: Message, stem: str, tools: Sequence[ToolSchema]) -> Message:
    """A copy of an assistant message with the sentinel where its words end, and markers in what else it says."""
    marked: dict[str, Any] = dict(message)
    if message.get("reasoning_content"):
        marked["reasoning_content"] = stem + "reasoning"
    calls = message.get("tool_calls")
    if not calls:
        marked["content"] = stem + _SENTINEL
        return cast("Message", marked)
    if message["content"]:
        marked["content"] = stem + "text"
    function = calls[-1]["function"]
    arguments = {_parameter(function, tools): stem + _SENTINEL}
    # Name and id stay, since templates write them after the call too.
    marked["tool_calls"] = [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]
    return cast("Message", marked)


def _parameter(function: Mapping[str, Any], tools: Sequence[ToolSchema]) -> str:
    """A parameter that the called tool has, else any name."""
    arguments = function["arguments"]
    if arguments and isinstance(arguments, Mapping):
        return str(next(iter(arguments)))
    for tool in tools:
        if tool["function"]["name"] == function["name"]:
            parameters = tool["function"].get("parameters") or {}
            return str(next(iter(parameters.get("properties") or ()), "value"))
    return "value"


def _first_content(text: str, new: Sequence[Message]) -> int:
    """Where the first new content begins at the earliest.

    Raises:
        Unbridgeable: a content cannot be seen, in the order of the messages.
    """
    first, end = 0, 0
    for index, message in enumerate(new):
        found = next((span for span in _spans(text, message["content"], end)), None)
        if found is None:
            raise Unbridgeable(
                Property.CONTENT_SHOWN,
                f"the content of a {message['role']} message is not in the render: {message['content']!r:.80}",
            )
        begin, end = found
        first = begin if index == 0 else first
    return first


def _spans(text: str, content: str, start: int) -> Iterator[tuple[int, int]]:
    """Where `content` stands in `text`: as it is, without the space around it, or inside JSON."""
    for form in _forms(content):
        begin = text.find(form, start)
        if begin >= 0:
            yield begin, begin + len(form)


def _forms(content: str) -> Iterator[str]:
    yield content
    yield content.strip()
    yield json.dumps(content, ensure_ascii=False)[1:-1]
    yield json.dumps(content)[1:-1]


def _common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    differences = (index for index, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(differences, min(len(one), len(other)))
