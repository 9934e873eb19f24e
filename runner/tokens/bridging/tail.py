"""The tail: what a render has after the words of the last assistant turn. Text only; safe in any thread."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NoReturn, cast

from runner.messages import Message
from runner.tokens.bridging.markers import (
    Field,
    Span,
    common_length,
    forms,
    locate,
    locate_disguised,
    marked,
    sentinel,
    shown,
    without_switches,
    without_words,
)
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.shape import Shape
from runner.tokens.template import Renderer, TemplateRaised, ToolSchema

__all__ = ["Further", "Tail", "TailMaker", "located"]

DOUBLED, MEANT = 200, 8
"""Characters at the end of a prompt where an opener is looked for twice, and fewer than which are no opener."""


class TailMaker:
    """Renders conversations and asks of each render what every prompt must have.

    Attributes:
        renderer: the template, with its options and its clock fixed.
        generation_prompt: what asks the model to speak, as a plain question shows it; "" where that shows nothing.
    """

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.generation_prompt = _generation_prompt(renderer)

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

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """The whole render, which asks the model to speak.

        Raises:
            Unbridgeable: the template raises, does not ask, or hides what a user, a tool or the system says.
        """
        text = self.render(messages, tools)

        def render(new: Sequence[Message], asking: bool) -> str:
            return self.render(new, tools, generation_prompt=asking)

        for index, message in enumerate(messages):
            # What a model said may be shown without its reasoning.
            if message["role"] != "assistant" and _find(text, message["content"], 0) is None:
                _check_shown(text, lambda new: render(new, True), messages, index)
        if messages and not self.asks_as_usual(text, messages[-1]):
            self.check_asks(text, messages, render)
        return text

    def asks_as_usual(self, text: str, last: Message) -> bool:
        """The generation prompt that a plain question shows is at the end, once, behind the `last` message.

        Raises:
            Unbridgeable: it is there twice.
        """
        asked = self.generation_prompt
        if not asked or not text.endswith(asked):
            return False
        said = last["content"].rstrip().endswith(asked.strip())  # somebody wrote the like at the end of a message
        if asked.strip() and text.removesuffix(asked).endswith(asked) and not said:
            self._refuse_doubled(asked)
        return True

    def check_asks(
        self, text: str, messages: Sequence[Message], render: Callable[[Sequence[Message], bool], str]
    ) -> None:
        """See that a render ends where the model's words begin, for templates that do not say so as usual.

        Either the generation prompt stands behind the last content; or the template needs none, or writes another one
        in history: then the render goes on as one with an answer behind it does, further than one with a question.

        Args:
            text: the render.
            messages: in it.
            render: the text of messages, with or without the generation prompt.

        Raises:
            Unbridgeable: it does not.
        """
        end = _end_of_last(text, messages, lambda new: render(new, True))
        behind = text[end:]
        self._check_doubled(behind)
        silent = render(messages, False)
        shared = common_length(text, silent)
        if end <= shared < len(text):
            return
        answer = _behind(messages, _ANSWER, render)
        if behind.startswith(answer.rstrip()):
            return
        with suppress(Unbridgeable):
            question = _behind(messages, _QUESTION, render)
            if common_length(behind, answer) > common_length(answer, question):
                return
        raise Unbridgeable(
            Property.PROMPTS_ANSWER,
            f"template {self.renderer.template.name!r} ends with {text[-40:]!r}, with or without add_generation_prompt",
        )

    def _check_doubled(self, behind: str) -> None:
        last = behind[-DOUBLED:]
        for length in range(len(last) // 2, MEANT, -1):
            if last[-length:] == last[-2 * length : -length] and last[-length:].strip():
                self._refuse_doubled(last[-length:])

    def _refuse_doubled(self, opener: str) -> NoReturn:
        name = self.renderer.template.name
        raise Unbridgeable(Property.OPENED_ONCE, f"template {name!r} opens the assistant's turn twice: {opener!r}")


class Further(enum.StrEnum):
    """The renders that a tail may be asked for beside its own; each is the name of an attribute of `Tail`."""

    BORDER = "border"
    ALONE = "alone"
    ALONE_ASKING = "alone_asking"
    WITHOUT_CALLS = "without_calls"

    @property
    def asking(self) -> bool:
        """It ends with the generation prompt."""
        return self is not Further.ALONE

    def shape(self, shape: Shape) -> Shape:
        """Of the turn and the messages that are rendered, where the tail's own have this one."""
        if self is Further.WITHOUT_CALLS:
            return replace(shape, calls=0, reasoning=False, text=True)
        if self is Further.BORDER:
            return replace(shape, new=(replace(shape.new[0], empty=False), *shape.new[1:]))
        return replace(shape, new=())


class Tail:
    """What one render has after its last sentinel.

    Attributes:
        new: the messages that were appended.
        text: from the sentinel to the end of the generation prompt.
        after_call: the sentinel stood in a tool call, so the tail begins inside it.
        local: it was rendered with a stand-in for the history.
        asked: the further renders that were asked for; shared by the tails of one kind.

    Args:
        maker: renders.
        stem: begins sentinel and markers; no message holds it.
        history: ends with the turn.
        new: the messages after it.
        tools: as shown to the model.
        whole: the whole history, where `history` is a stand-in for it.
        proves: whether the stand-in gives some further render too; else that is made of the whole.
        asked: see the attribute.

    Raises:
        Unbridgeable: the template raises, or does not show the last turn.
    """

    def __init__(
        self,
        maker: TailMaker,
        stem: str,
        history: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSchema],
        *,
        whole: Sequence[Message] | None = None,
        proves: Callable[[Further], bool] | None = None,
        asked: set[Further] | None = None,
    ) -> None:
        self.new = new
        self.asked = set() if asked is None else asked
        self.after_call = bool(history[-1].get("tool_calls"))
        self.local = whole is not None
        self._maker = maker
        self._stem = stem
        self._tools = tools
        self._whole = whole
        self._proves = proves
        self._located: tuple[Sequence[Field], list[Span] | None] | None = None
        self._history: Sequence[Message] = ()
        self.text = self._first_text(history)

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
        yield [*before, marked(turn, self._stem, self._tools)]
        yield [*before, marked(turn, self._stem, self._tools, with_words=False)]
        if any(message["role"] == "assistant" for message in before):
            silent = [without_words(message, self._stem) for message in before]
            yield [*silent, marked(turn, self._stem, self._tools, with_words=False)]

    def check(self) -> None:
        """See that the new messages are in the tail and that it ends by asking the model to speak.

        Raises:
            Unbridgeable: it does not.
        """
        if self._fault is not None:
            raise self._fault

    @cached_property
    def _fault(self) -> Unbridgeable | None:
        try:
            _ = self.seen
            if not self._maker.asks_as_usual(self.text, self.new[-1]):
                self._maker.check_asks(self.text, self.new, self._follow)
        except Unbridgeable as fault:
            return fault
        return None

    def _follow(self, new: Sequence[Message], asking: bool) -> str:
        return self._text(new, generation_prompt=asking)

    def holds_marker(self, text: str) -> bool:
        """What was said before the turn's end stands in `text`."""
        return self._stem in text

    def complete(self) -> None:
        """Make the renders that a check takes, and those that tails of this kind were asked for before.

        What is made off the event loop leaves none to be made on it.
        """
        _ = self._fault
        for further in tuple(self.asked):
            with suppress(Unbridgeable):
                getattr(self, further.value)

    @cached_property
    def seen(self) -> Span:
        """Where the first new content begins and the last one ends.

        The beginning may be too early: a content "m" is found in the template's own words.

        Raises:
            Unbridgeable: a content cannot be seen, in the order of the messages.
        """
        first, end = 0, 0
        for index, message in enumerate(self.new):
            found = _find(self.text, message["content"], end)
            begin, end = found or _check_shown(self.text, self._text, self.new, index)
            first = begin if index == 0 else first
        return first, end

    @cached_property
    def border(self) -> int:
        """Where the first new content begins, by rendering a marker in its place.

        Where the content changes what the template writes before it, only what both renders begin with counts.
        """
        marker = self._stem + "content"
        first = cast("Message", {**self.new[0], "content": marker})
        close, found, _ = self._further(Further.BORDER, [first, *self.new[1:]]).partition(marker)
        return common_length(self.text, close) if found else 0

    @cached_property
    def alone(self) -> str | None:
        """The tail without the new messages: the turn's close where nothing follows; None where that raises."""
        try:
            return self._further(Further.ALONE, ())
        except Unbridgeable:
            return None

    @cached_property
    def alone_asking(self) -> str | None:
        """The tail without the new messages, with the generation prompt; None where that raises."""
        try:
            return self._further(Further.ALONE_ASKING, ())
        except Unbridgeable:
            return None

    def _further(self, further: Further, new: Sequence[Message]) -> str:
        return self._behind(self._history_for(further), new, generation_prompt=further.asking)

    def _history_for(self, further: Further) -> Sequence[Message]:
        """What stands before the new messages: the stand-in only where it is known to give the same text."""
        self.asked.add(further)
        if self._whole is None or self._proves is None or self._proves(further):
            return self._history
        return [*self._whole[:-1], self._history[-1]]

    def locate(self, wanted: Sequence[Field], names: Callable[[str], Iterable[str]]) -> list[Span] | None:
        """Where these fields of the new messages stand in `text`, or None where that cannot be told.

        Args:
            wanted: fields that hold control text.
            names: the control tokens that stand in a text.
        """
        if self._located is None or self._located[0] != wanted:
            self._located = (wanted, located(self.text, self._text, self.new, wanted, self._stem, names))
        return self._located[1]

    @cached_property
    def without_calls(self) -> str | None:
        """The tail that the turn would have if it had called nothing; None where that raises."""
        said: Message = {"role": "assistant", "content": "x"}
        history = [*self._history_for(Further.WITHOUT_CALLS)[:-1], said]
        try:
            return Tail(self._maker, self._stem, history, self.new, self._tools).text
        except Unbridgeable:
            return None

    def stands_before(self, word: str) -> bool:
        """The word stands before the sentinel in a render of its own."""
        text = self._maker.render([*self._history, *self.new], self._tools)
        return word in text.rpartition(sentinel(self._stem))[0]

    @cached_property
    def end_of_reasoning(self) -> str | None:
        """What the template writes between the turn's reasoning and its text; None where it shows no reasoning."""
        end, words = self._stem + "thought", self._stem + "words"
        turn = cast("Message", {"role": "assistant", "content": words, "reasoning_content": end})
        # The proofs know of one mark only, so this one is always asked of the whole.
        before = (self._whole or self._history)[:-1]
        text = self._maker.render([*before, turn], self._tools, generation_prompt=False)
        _, found, rest = text.rpartition(end)
        between, shown, _ = rest.partition(words)
        return between if found and shown else None

    def _text(self, new: Sequence[Message], *, generation_prompt: bool = True) -> str:
        return self._behind(self._history, new, generation_prompt=generation_prompt)

    def _behind(self, history: Sequence[Message], new: Sequence[Message], *, generation_prompt: bool) -> str:
        text = self._maker.render([*history, *new], self._tools, generation_prompt=generation_prompt)
        _, found, tail = text.rpartition(sentinel(self._stem))
        if not found:
            raise Unbridgeable(
                Property.SENTINEL_SHOWN,
                f"template {self._maker.renderer.template.name!r} does not show the last assistant turn",
            )
        return tail


def located(
    text: str,
    render: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    wanted: Sequence[Field],
    stem: str,
    names: Callable[[str], Iterable[str]],
) -> list[Span] | None:
    """Where the control text of these fields stands in a render, or None where that cannot be told; see `locate`."""
    with suppress(Unbridgeable):
        spans = locate(text, render, messages, wanted, stem)
        if spans is not None:
            return spans
    with suppress(Unbridgeable):
        return locate_disguised(text, render, messages, wanted, names)
    return None


_ANSWER: Message = {"role": "assistant", "content": "zqanswerz"}
_QUESTION: Message = {"role": "user", "content": "zqquestionz"}
_WORD = "zqshownz"


def _check_shown(
    text: str, render: Callable[[Sequence[Message]], str], messages: Sequence[Message], index: int
) -> Span:
    """About where a message stands that held nothing but a switch, which the template has taken out of it.

    Raises:
        Unbridgeable: it is hidden.
    """
    role, content = messages[index]["role"], messages[index]["content"]
    only_switch = without_switches(content) is not None
    found = shown(text, render, messages, index, _WORD) if only_switch else None
    if found is None:
        raise Unbridgeable(
            Property.CONTENT_SHOWN, f"the template hides message {index} of the {role} role: {content!r:.80}"
        )
    return found


def _end_of_last(text: str, messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> int:
    ends = (text.rfind(form) + len(form) for form in forms(messages[-1]["content"]) if form in text)
    end = next(ends, None)
    return _check_shown(text, render, messages, len(messages) - 1)[1] if end is None else end


def _behind(messages: Sequence[Message], last: Message, render: Callable[[Sequence[Message], bool], str]) -> str:
    """What stands between the last content of `messages` and that of a message behind them."""
    text = render([*messages, last], False)
    before = text[: max(0, text.rfind(last["content"]))]
    end = _end_of_last(before, messages, lambda new: render([*new, last], False).rpartition(last["content"])[0])
    return before[end:]


def _find(text: str, content: str, start: int) -> Span | None:
    for form in forms(content):
        begin = text.find(form, start)
        if begin >= 0:
            return begin, begin + len(form)
    return None


def _generation_prompt(renderer: Renderer) -> str:
    question: list[Message] = [{"role": "user", "content": "A question."}]
    try:
        silent = renderer.render(question, generation_prompt=False)
        asking = renderer.render(question)
    except TemplateRaised:
        return ""
    return asking.removeprefix(silent) if asking.startswith(silent) else ""
