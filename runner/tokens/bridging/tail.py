"""The tail: the text of a render after the words of the last assistant turn. Any thread may use it.

A copy of the turn is rendered with a sentinel at the end of its words. The text before the sentinel never becomes part
of a bridge.
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
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.template import ToolSchema
from runner.tokens.token_diff import first_mismatch
from runner.tokens.turn_shape import AnsweredTurn, TurnShape

__all__ = ["Further", "Tail"]

MIN_TURN_BEGIN_CHARS = 4
"""The text that identifies the beginning of turns is not shortened to fewer characters than this."""


class Further(enum.StrEnum):
    """Further renders that a tail may need. Each is the name of an attribute of `Tail`."""

    BORDER = "border"
    ALONE = "alone"
    ALONE_ASKING = "alone_asking"
    WITHOUT_CALLS = "without_calls"

    @property
    def asking(self) -> bool:
        """True if this render ends with the generation prompt."""
        return self is not Further.ALONE

    def shape(self, shape: TurnShape) -> TurnShape:
        """Return the shape of this further render, given the shape of the tail's own render."""
        if self is Further.WITHOUT_CALLS:
            return shape._replace(calls=0, reasoning=False, text=True)
        if self is Further.BORDER:
            return shape._replace(new=(shape.new[0]._replace(empty=False), *shape.new[1:]))
        return shape._replace(new=())


class Tail:
    """The text of one render after its last sentinel.

    If there is a `stand_in`, it is rendered in place of the history. Further renders for which `proves` is false still
    use the whole history.

    Raises:
        Unbridgeable: the template raises, or does not show the turn.
    """

    text: str
    """The render from the sentinel to the end of the generation prompt."""
    new: Sequence[Message]
    """The messages after the turn."""
    after_call: bool
    """True if the sentinel was in a tool call, so that the tail begins inside the call."""
    local: bool
    """True if a stand-in was rendered in place of the history."""
    asked: set[Further]
    """The further renders that were needed. The tails of one shape share the set."""
    real: str | None
    """A render with the turn's own words, if they may change the text after them; otherwise None.

    It is also None if the template raises on the words.
    """
    repeated: str
    """The text between the first and the last sentinel; "" if the template writes the words only once."""

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
        # The word needs to be absent only from the rendered messages, so the whole history is not searched.
        self._stem = absent([*rendered, *answered.new])
        self._located: tuple[Sequence[Field], list[Span] | None] | None = None
        self._history: Sequence[Message] = ()
        self.text = self._first_text(rendered)

    def _first_text(self, history: Sequence[Message]) -> str:
        """Return the tail. If the template raises on the model's words, the words are left out of the render.

        A model may sample words that a parser should have removed, and some templates raise on such words.
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

    # --- checks

    def check(self) -> None:
        """Check that the tail contains the new messages and ends with the generation prompt.

        Raises:
            Unbridgeable: a message is missing, or the generation prompt is missing or occurs twice.
        """
        if self._fault is not None:
            raise self._fault

    @cached_property
    def _fault(self) -> Unbridgeable | None:
        try:
            _ = self.seen
            for index in range(len(self.new)):
                self._rendering.check_visible(index, self._renderer.renderer.template.text)
            self._renderer.check_asks(
                self.text, self.new, lambda new, asking: self._text(new, generation_prompt=asking)
            )
        except Unbridgeable as fault:
            return fault
        return None

    def holds_marker(self, text: str) -> bool:
        """Return True if `text` contains a marker. Such a text repeats words from before the turn's end."""
        return self._stem in text

    def stands_before(self, word: str) -> bool:
        """Return True if a word occurs before the sentinel in a render of the whole conversation.

        Raises:
            Unbridgeable: the template raises.
        """
        text = self._renderer.render([*self._history, *self.new], self._answered.tools)
        return word in text.rpartition(_sentinel(self._stem))[0]

    @property
    def shape(self) -> TurnShape:
        return self._answered.shape

    @property
    def words(self) -> str:
        """The model's reasoning and text."""
        turn = self._answered.turn
        return f"{turn.get('reasoning_content') or ''}{turn['content']}"

    @cached_property
    def own_text(self) -> str:
        """The text of the turn before the sentinel, with the model's words.

        If the beginning of the turn is not known, text before the turn is included.
        """
        renderer, tools = self._renderer, self._answered.tools
        text = renderer.render([*self._history, *self.new], tools).rpartition(_sentinel(self._stem))[0]
        for asking in (True, False):
            with suppress(Unbridgeable):
                prompt = renderer.render(self._history[:-1], tools, generation_prompt=asking)
                if text.startswith(prompt):
                    return text.removeprefix(prompt)
        # The new messages may change the earlier text, so the text is searched for the beginning of the turn. This is
        # the generation prompt, or only its first part: some generation prompts open reasoning, and the turns of a
        # history may lack this opening.
        with suppress(Unbridgeable):
            begin = self.text.removeprefix(self._text(self.new, generation_prompt=False))
            turns = sum(message["role"] == "assistant" for message in self._history)
            while len(begin) > MIN_TURN_BEGIN_CHARS and text.count(begin) < turns:
                begin = begin[:-1]
            if begin and text.count(begin) == turns and begin not in self.words:
                return text.rpartition(begin)[2]
        return text

    # --- positions of the new contents

    @cached_property
    def seen(self) -> Span:
        """The start of the first new content in `text`, and the end of the last new content.

        The start may be too early, since a content such as "m" also occurs in the template's own words.

        Raises:
            Unbridgeable: a content is missing, or does not follow the contents of the messages before it.
        """
        first, end = 0, 0
        for index, message in enumerate(self.new):
            begin, end = find(self.text, message["content"], end) or self._rendering.check_shown(index)
            first = begin if index == 0 else first
        return first, end

    def locate(self, wanted: Sequence[Field], names: ControlNames) -> list[Span] | None:
        """Return the positions of these fields of the new messages in `text`, or None if they cannot be found."""
        if self._located is None or self._located[0] != wanted:
            self._located = (wanted, self._rendering.locate(wanted, self._stem, names))
        return self._located[1]

    @property
    def _rendering(self) -> Rendering:
        return Rendering(self.text, self.new, self._text)

    # --- further renders

    def complete(self) -> None:
        """Make the further renders that a check needs, and those that earlier tails of this shape needed.

        A worker thread calls this, so that the event loop need not render.
        """
        _ = self._fault
        for further in tuple(self.asked):
            with suppress(Unbridgeable):
                getattr(self, further.value)

    @cached_property
    def border(self) -> int:
        """The start of the first new content in `text`, found by a render with a marker in its place.

        If the content changes the template's text before it, the border is the end of the common prefix of both
        renders. If the template does not write the marker, the border is 0.
        """
        return first_mismatch(self.text, self._before_marker or "")

    @property
    def border_is_exact(self) -> bool:
        """True if the first new content is exactly at the border, and does not change the template's text before it."""
        return self._before_marker is not None and self.text.startswith(self._before_marker)

    @cached_property
    def _before_marker(self) -> str | None:
        marker = self._stem + "content"
        first = cast("Message", {**self.new[0], "content": marker})
        close, found, _ = self._further(Further.BORDER, [first, *self.new[1:]]).partition(marker)
        return close if found else None

    @cached_property
    def alone(self) -> str | None:
        """The tail without the new messages, with the turn's close at the end; None if it cannot be rendered."""
        with suppress(Unbridgeable):
            return self._further(Further.ALONE, ())
        return None

    @cached_property
    def alone_asking(self) -> str | None:
        """The tail without the new messages, with the generation prompt; None if it cannot be rendered."""
        with suppress(Unbridgeable):
            return self._further(Further.ALONE_ASKING, ())
        return None

    @cached_property
    def without_calls(self) -> str | None:
        """The tail after a turn of plain text in place of the turn with calls; None if it cannot be rendered."""
        said: Message = {"role": "assistant", "content": "x"}
        history = [*self._history_for(Further.WITHOUT_CALLS)[:-1], said]
        with suppress(Unbridgeable):
            return Tail(self._renderer, replace(self._answered, history=history)).text
        return None

    @cached_property
    def end_of_reasoning(self) -> str | None:
        """The template's text between the turn's reasoning and its text; None if reasoning is not shown."""
        end, said = self._stem + "thought", self._stem + "words"
        turn: Message = {"role": "assistant", "content": said, "reasoning_content": end}
        # The proofs cover only renders with one marker, so this render always uses the whole history.
        before = self._answered.history[:-1] if self.local else self._history[:-1]
        text = self._renderer.render([*before, turn], self._answered.tools, generation_prompt=False)
        _, found, rest = text.rpartition(end)
        between, shown, _ = rest.partition(said)
        return between if found and shown else None

    def _further(self, further: Further, new: Sequence[Message]) -> str:
        return self._text_after(self._history_for(further), new, generation_prompt=further.asking)

    def _history_for(self, further: Further) -> Sequence[Message]:
        """Return the messages before the new messages.

        They are the stand-in, or the whole history if there is no stand-in or `proves` is false for this render.
        """
        self.asked.add(further)
        if not self.local or self._proves is None or self._proves(further):
            return self._history
        return [*self._answered.history[:-1], self._history[-1]]

    def _text(self, new: Sequence[Message], *, generation_prompt: bool = True) -> str:
        return self._text_after(self._history, new, generation_prompt=generation_prompt)

    def _text_after(self, history: Sequence[Message], new: Sequence[Message], *, generation_prompt: bool) -> str:
        text = self._renderer.render([*history, *new], self._answered.tools, generation_prompt=generation_prompt)
        # The text after the last sentinel counts, since a template may write the words more than once.
        before, found, tail = text.rpartition(_sentinel(self._stem))
        self.repeated = self.repeated or before.partition(_sentinel(self._stem))[2]
        if not found:
            raise Unbridgeable(
                Property.SENTINEL_SHOWN,
                f"template {self._renderer.renderer.template.name!r} does not show the last assistant turn",
            )
        return tail


# --- marks in the last turn


def _sentinel(stem: str) -> str:
    """Return the mark for the end of the last turn's words."""
    return stem + "end"


def _marked(message: Message, stem: str, tools: Sequence[ToolSchema], *, with_words: bool = True) -> Message:
    """Return a copy of an assistant message with the sentinel at its end, and markers after its earlier texts.

    The sentinel follows the content, or is the only argument of the last call. With `with_words`, the copy keeps its
    reasoning and its content, since some templates inspect them.
    """
    copy: dict[str, Any] = dict(message)
    if message.get("reasoning_content"):
        copy["reasoning_content"] = message["reasoning_content"] * with_words + stem + "reasoning"
    calls = message.get("tool_calls")
    if not calls:
        copy["content"] = message["content"] * with_words + _sentinel(stem)
        return cast("Message", copy)
    if message["content"]:
        # Gemma 4 prints the text of a call's message after the tool's result. A bridge with this marker is refused.
        copy["content"] = message["content"] * with_words + stem + "text"
    function = calls[-1]["function"]
    arguments = {_parameter(function, tools): _sentinel(stem)}
    # Name and id stay, since templates also write them after the call.
    copy["tool_calls"] = [*calls[:-1], {**calls[-1], "function": {**function, "arguments": arguments}}]
    return cast("Message", copy)


def _without_words(message: Message, stem: str) -> Message:
    """Return a copy of an assistant message with a marker for each text. Return other messages unchanged."""
    if message["role"] != "assistant":
        return message
    copy: dict[str, Any] = {**message, "content": stem + "text" if message["content"] else ""}
    if message.get("reasoning_content"):
        copy["reasoning_content"] = stem + "reasoning"
    return cast("Message", copy)


def _parameter(function: Mapping[str, Any], tools: Sequence[ToolSchema]) -> str:
    """Return the name of an argument of the call, or else of a parameter of the tool, or else "value"."""
    arguments = function["arguments"]
    if arguments and isinstance(arguments, Mapping):
        return str(next(iter(arguments)))
    for tool in tools:
        if tool["function"]["name"] == function["name"]:
            parameters = tool["function"].get("parameters") or {}
            return str(next(iter(parameters.get("properties") or ()), "value"))
    return "value"
