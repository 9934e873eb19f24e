"""The tail: what a render has after the words of the last assistant turn. Text only; safe in any thread.

A copy of the turn is rendered with a sentinel where its words end. What stands before the sentinel is never looked at.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

from runner.messages import Message
from runner.tokens.bridging.content_spans import ControlNames, Field, Rendering, Span, absent, find
from runner.tokens.bridging.prompts import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.template import ToolSchema
from runner.tokens.token_diff import first_mismatch
from runner.tokens.turn_shape import AnsweredTurn, TurnShape

__all__ = ["Further", "Tail"]


class Further(enum.StrEnum):
    """The renders that a tail may be asked for beside its own; each is the name of an attribute of `Tail`."""

    BORDER = "border"
    ALONE = "alone"
    ALONE_ASKING = "alone_asking"
    WITHOUT_CALLS = "without_calls"

    @property
    def asking(self) -> bool:
        """Whether it ends with the generation prompt."""
        return self is not Further.ALONE

    def shape(self, shape: TurnShape) -> TurnShape:
        """The shape of this further render, where the tail's own render has the given one."""
        if self is Further.WITHOUT_CALLS:
            return replace(shape, calls=0, reasoning=False, text=True)
        if self is Further.BORDER:
            return replace(shape, new=(replace(shape.new[0], empty=False), *shape.new[1:]))
        return replace(shape, new=())


class Tail:
    """What one render has after its last sentinel.

    A `stand_in` is rendered in place of the history. Where `proves` does not say that it gives some further render
    too, that one is made of the whole history.
    """

    text: str
    """The render from the sentinel to the end of the generation prompt."""
    new: Sequence[Message]
    """The messages after the turn."""
    after_call: bool
    """Whether the sentinel stood in a tool call, so that the tail begins inside it."""
    local: bool
    """Whether it was rendered with a stand-in for the history."""
    asked: set[Further]
    """The further renders that were asked for; the tails of one shape share the set."""
    real: str | None
    """A render with the words themselves, where those may change what follows them; else None."""
    repeated: str
    """What stands between the first sentinel and the last one, where the template writes the words more than once."""

    def __init__(
        self,
        renderer: PromptRenderer,
        answered: AnsweredTurn,
        *,
        stand_in: Sequence[Message] | None = None,
        proves: Callable[[Further], bool] | None = None,
        asked: set[Further] | None = None,
    ) -> None:
        rendered = answered.history if stand_in is None else stand_in
        self.new = answered.new
        self.asked = set() if asked is None else asked
        self.after_call = bool(answered.turn.get("tool_calls"))
        self.local = stand_in is not None
        self.real = None
        self.repeated = ""
        self._renderer = renderer
        self._answered = answered
        self._proves = proves
        # Only in what is rendered: a word that holds for the stand-in is found without reading the whole history.
        self._stem = absent([*rendered, *answered.new])
        self._located: tuple[Sequence[Field], list[Span] | None] | None = None
        self._history: Sequence[Message] = ()
        self.text = self._first_text(rendered)

    def _first_text(self, history: Sequence[Message]) -> str:
        """The tail, without the words of the model where the template raises on them.

        A model samples words that a parser should have taken out, and some templates raise where they meet those.
        """
        raised: Unbridgeable | None = None
        for marked_history in self._marked(history):
            self._history = marked_history
            try:
                return self._text(self.new)
            except Unbridgeable as refusal:
                if refusal.property is not Property.TEMPLATE_RENDERS:
                    raise
                raised = raised or refusal
        assert raised is not None
        raise raised

    def _marked(self, history: Sequence[Message]) -> Iterator[Sequence[Message]]:
        *before, turn = history
        tools = self._answered.tools
        yield [*before, _marked(turn, self._stem, tools)]
        yield [*before, _marked(turn, self._stem, tools, with_words=False)]
        if any(message["role"] == "assistant" for message in before):
            silent = [_without_words(message, self._stem) for message in before]
            yield [*silent, _marked(turn, self._stem, tools, with_words=False)]

    # --- what can be wrong with it

    def check(self) -> None:
        """See that the new messages are in the tail and that it ends by asking the model to speak."""
        if self._fault is not None:
            raise self._fault

    @cached_property
    def _fault(self) -> Unbridgeable | None:
        try:
            _ = self.seen
            self._renderer.check_asks(
                self.text, self.new, lambda new, asking: self._text(new, generation_prompt=asking)
            )
        except Unbridgeable as fault:
            return fault
        return None

    def holds_marker(self, text: str) -> bool:
        """Whether what was said before the turn's end stands in `text`."""
        return self._stem in text

    def stands_before(self, word: str) -> bool:
        """Whether a word stands before the sentinel in a render of its own."""
        text = self._renderer.render([*self._history, *self.new], self._answered.tools)
        return word in text.rpartition(_sentinel(self._stem))[0]

    # --- where the new contents stand

    @cached_property
    def seen(self) -> Span:
        """Where the first new content begins and the last one ends.

        The beginning may be too early: a content "m" is found in the template's own words.

        Raises:
            Unbridgeable: a content cannot be seen, in the order of the messages.
        """
        first, end = 0, 0
        for index, message in enumerate(self.new):
            begin, end = find(self.text, message["content"], end) or self._rendering.check_shown(index)
            first = begin if index == 0 else first
        return first, end

    def locate(self, wanted: Sequence[Field], names: ControlNames) -> list[Span] | None:
        """Where these fields of the new messages stand in `text`, or None where that cannot be told."""
        if self._located is None or self._located[0] != wanted:
            self._located = (wanted, self._rendering.locate(wanted, self._stem, names))
        return self._located[1]

    @property
    def _rendering(self) -> Rendering:
        return Rendering(self.text, self.new, self._text)

    # --- further renders

    def complete(self) -> None:
        """Make the renders that a check takes, and those that tails of this shape were asked for before.

        What is made off the event loop leaves none to be made on it.
        """
        _ = self._fault
        for further in tuple(self.asked):
            with suppress(Unbridgeable):
                getattr(self, further.value)

    @cached_property
    def border(self) -> int:
        """Where the first new content begins, by rendering a marker in its place.

        Where the content changes what the template writes before it, only what both renders begin with counts.
        """
        marker = self._stem + "content"
        first = cast("Message", {**self.new[0], "content": marker})
        close, found, _ = self._further(Further.BORDER, [first, *self.new[1:]]).partition(marker)
        return first_mismatch(self.text, close) if found else 0

    @cached_property
    def alone(self) -> str | None:
        """The tail without the new messages: the turn's close where nothing follows; None where that raises."""
        with suppress(Unbridgeable):
            return self._further(Further.ALONE, ())
        return None

    @cached_property
    def alone_asking(self) -> str | None:
        """The tail without the new messages, with the generation prompt; None where that raises."""
        with suppress(Unbridgeable):
            return self._further(Further.ALONE_ASKING, ())
        return None

    @cached_property
    def without_calls(self) -> str | None:
        """The tail that the turn would have if it had called nothing; None where that raises."""
        said: Message = {"role": "assistant", "content": "x"}
        history = [*self._history_for(Further.WITHOUT_CALLS)[:-1], said]
        with suppress(Unbridgeable):
            return Tail(self._renderer, replace(self._answered, history=history)).text
        return None

    @cached_property
    def end_of_reasoning(self) -> str | None:
        """What the template writes between the turn's reasoning and its text; None where it shows no reasoning."""
        end, said = self._stem + "thought", self._stem + "words"
        turn: Message = {"role": "assistant", "content": said, "reasoning_content": end}
        # The proofs know of one mark only, so this one is always asked of the whole.
        before = self._answered.history[:-1] if self.local else self._history[:-1]
        text = self._renderer.render([*before, turn], self._answered.tools, generation_prompt=False)
        _, found, rest = text.rpartition(end)
        between, shown, _ = rest.partition(said)
        return between if found and shown else None

    def _further(self, further: Further, new: Sequence[Message]) -> str:
        return self._behind(self._history_for(further), new, generation_prompt=further.asking)

    def _history_for(self, further: Further) -> Sequence[Message]:
        """What stands before the new messages: the stand-in only where it is known to give the same text."""
        self.asked.add(further)
        if not self.local or self._proves is None or self._proves(further):
            return self._history
        return [*self._answered.history[:-1], self._history[-1]]

    def _text(self, new: Sequence[Message], *, generation_prompt: bool = True) -> str:
        return self._behind(self._history, new, generation_prompt=generation_prompt)

    def _behind(self, history: Sequence[Message], new: Sequence[Message], *, generation_prompt: bool) -> str:
        text = self._renderer.render([*history, *new], self._answered.tools, generation_prompt=generation_prompt)
        # Behind the last one, since a template may write the words more than once.
        before, found, tail = text.rpartition(_sentinel(self._stem))
        self.repeated = self.repeated or before.partition(_sentinel(self._stem))[2]
        if not found:
            raise Unbridgeable(
                Property.SENTINEL_SHOWN,
                f"template {self._renderer.renderer.template.name!r} does not show the last assistant turn",
            )
        return tail


# --- the turn with its marks


def _sentinel(stem: str) -> str:
    """Stands where the words of the last turn end."""
    return stem + "end"


def _marked(message: Message, stem: str, tools: Sequence[ToolSchema], *, with_words: bool = True) -> Message:
    """A copy of an assistant message with the sentinel where its words end, and markers behind what else it says.

    With `with_words` the words themselves stay, since templates look into them.
    """
    copy: dict[str, Any] = dict(message)
    if message.get("reasoning_content"):
        copy["reasoning_content"] = message["reasoning_content"] * with_words + stem + "reasoning"
    calls = message.get("tool_calls")
    if not calls:
        copy["content"] = message["content"] * with_words + _sentinel(stem)
        return cast("Message", copy)
    if message["content"]:
        # Gemma 4 prints the text beside a call behind the tool's result: a bridge with the marker in it is refused.
        copy["content"] = message["content"] * with_words + stem + "text"
    function = calls[-1]["function"]
    arguments = {_parameter(function, tools): _sentinel(stem)}
    # Name and id stay, since templates write them after the call too.
    copy["tool_calls"] = [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]
    return cast("Message", copy)


def _without_words(message: Message, stem: str) -> Message:
    """A copy of an assistant message that says only a marker where it said anything; others as they are."""
    if message["role"] != "assistant":
        return message
    copy: dict[str, Any] = {**message, "content": stem + "text" if message["content"] else ""}
    if message.get("reasoning_content"):
        copy["reasoning_content"] = stem + "reasoning"
    return cast("Message", copy)


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
