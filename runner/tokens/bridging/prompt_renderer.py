"""Renderer of prompts, which checks each prompt.

A prompt must show all messages of users, tools and the system, and have one generation prompt, at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn, TypeAlias

from runner.messages import Message
from runner.tokens.bridging.content_spans import Rendering, find
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.probe_messages import ANSWER, QUESTION
from runner.tokens.template import Renderer, TemplateRaised, ToolSchema
from runner.tokens.token_diff import first_mismatch

__all__ = ["PromptRenderer"]

_DOUBLED_OPENER_CHARS = 200
"""Number of characters at the end of a prompt that are searched for a doubled opener."""

_MIN_OPENER_CHARS = 8
"""A doubled opener must have more characters than this, since shorter texts may occur twice by chance."""

RenderAsking: TypeAlias = Callable[[Sequence[Message], bool], str]
"""Function that renders messages; the second argument is True to add the generation prompt."""


class PromptRenderer:
    """Renderer of one template's conversations, which checks that each prompt ends with its generation prompt.

    Any thread may use it.
    """

    renderer: Renderer
    """The template with fixed options and clock."""
    generation_prompt: str
    """The generation prompt, found after a user message; "" if none is found."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.generation_prompt = _generation_prompt(renderer)

    def render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generation_prompt: bool = True
    ) -> str:
        """Return the text of `messages`.

        Raises:
            Unbridgeable: the template raises.
        """
        try:
            return self.renderer.render(messages, tools=tools, generation_prompt=generation_prompt)
        except TemplateRaised as error:
            raise Unbridgeable(Property.TEMPLATE_RENDERS, str(error)) from error

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """Return the whole render, which ends with the generation prompt.

        Raises:
            Unbridgeable: the template raises, does not write exactly one generation prompt at the end, or hides a
                message of a user, a tool or the system.
        """
        text = self.render(messages, tools)
        whole = Rendering(text, messages, lambda new: self.render(new, tools))
        for index, message in enumerate(messages):
            # A model's message may be shown without its reasoning.
            if message["role"] == "assistant":
                continue
            if find(text, message["content"]) is None:
                whole.check_shown(index)
            whole.check_visible(index, self.renderer.template.text)
        if messages:
            self.check_asks(text, messages, lambda new, asking: self.render(new, tools, generation_prompt=asking))
        return text

    def check_asks(self, text: str, messages: Sequence[Message], render: RenderAsking) -> None:
        """Check that a render ends where the model's words begin.

        The renders of most templates end with the generation prompt that follows a user message. Otherwise, another
        generation prompt may follow the last content. If neither is found, the text after the last content must begin
        like an answer in the history, and not like a user message.

        Args:
            text: the render, or the part of it that contains `messages`.
            messages: the last messages of the render.
            render: renders the same part for other messages.

        Raises:
            Unbridgeable: the render does not end where the model's words begin, or begins the answer twice.
        """
        if self.asks_as_usual(text, messages[-1]):
            return
        end = Rendering(text, messages, lambda new: render(new, True)).end_of_last()
        after = text[end:]
        self._check_doubled(after)
        if end <= first_mismatch(text, render(messages, False)) < len(text):
            return
        # No generation prompt follows. The text may still begin an answer in the form of the history.
        answer = _text_after(messages, ANSWER, render)
        if after.startswith(answer.rstrip()):
            return
        with suppress(Unbridgeable):
            question = _text_after(messages, QUESTION, render)
            if first_mismatch(after, answer) > first_mismatch(answer, question):
                return
        raise Unbridgeable(
            Property.PROMPTS_ANSWER,
            f"template {self.renderer.template.name!r} writes no generation prompt: a prompt ends with "
            f"{text[-40:]!r}, with or without add_generation_prompt",
        )

    def asks_as_usual(self, text: str, last: Message) -> bool:
        """Return True if `text`, a render or its end, ends with `generation_prompt`; False if there is none.

        `last` is the last message. If its content also ends with the generation prompt, the repetition is not an error.

        Raises:
            Unbridgeable: the text ends with the generation prompt twice.
        """
        asked = self.generation_prompt
        if not asked or not text.endswith(asked):
            return False
        said = last["content"].rstrip().endswith(asked.strip())  # the last message may end with the same text
        if asked.strip() and text.removesuffix(asked).endswith(asked) and not said:
            self._refuse_doubled(asked)
        return True

    def _check_doubled(self, after: str) -> None:
        last = after[-_DOUBLED_OPENER_CHARS:]
        for length in range(len(last) // 2, _MIN_OPENER_CHARS, -1):
            if last[-length:] == last[-2 * length : -length] and last[-length:].strip():
                self._refuse_doubled(last[-length:])

    def _refuse_doubled(self, opener: str) -> NoReturn:
        name = self.renderer.template.name
        raise Unbridgeable(Property.OPENED_ONCE, f"template {name!r} opens the assistant's turn twice: {opener!r}")


def _text_after(messages: Sequence[Message], last: Message, render: RenderAsking) -> str:
    """Return the text between the last content of `messages` and the content of a further message."""
    text = render([*messages, last], False)
    before = text[: max(0, text.rfind(last["content"]))]
    rendering = Rendering(before, messages, lambda new: render([*new, last], False).rpartition(last["content"])[0])
    return before[rendering.end_of_last() :]


def _generation_prompt(renderer: Renderer) -> str:
    try:
        silent = renderer.render([QUESTION], generation_prompt=False)
        asking = renderer.render([QUESTION])
    except TemplateRaised:
        return ""
    return asking.removeprefix(silent) if asking.startswith(silent) else ""
