"""Prompts: renders that ask the model to speak, once, and hide nothing of what was said to it."""

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

_DOUBLED = 200
"""The number of characters at the end of a prompt among which an opener that stands there twice is looked for."""

_MEANT = 8
"""An opener has more characters than this: shorter texts stand twice by chance."""

RenderAsking: TypeAlias = Callable[[Sequence[Message], bool], str]
"""The text of messages, with or without the generation prompt."""


class PromptRenderer:
    """Renders conversations of one template and sees that each prompt asks for an answer. Any thread may call."""

    renderer: Renderer
    """The template, with its options and its clock fixed."""
    generation_prompt: str
    """What asks the model to speak, as a plain question shows it; "" where that shows nothing."""

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
        whole = Rendering(text, messages, lambda new: self.render(new, tools))
        for index, message in enumerate(messages):
            # What a model said may be shown without its reasoning.
            if message["role"] != "assistant" and find(text, message["content"]) is None:
                whole.check_shown(index)
        if messages:
            self.check_asks(text, messages, lambda new, asking: self.render(new, tools, generation_prompt=asking))
        return text

    def check_asks(self, text: str, messages: Sequence[Message], render: RenderAsking) -> None:
        """See that a render ends where the model's words begin.

        Most templates say so as they do behind a plain question. Elsewhere either the generation prompt stands behind
        the last content; or the template needs none, or writes another one in history: then the render goes on as one
        with an answer behind it does, further than one with a question.

        Args:
            text: the render, or the part of it that `messages` are in.
            messages: the last ones of the render.
            render: the same part of other renders.
        """
        if self.asks_as_usual(text, messages[-1]):
            return
        end = Rendering(text, messages, lambda new: render(new, True)).end_of_last()
        behind = text[end:]
        self._check_doubled(behind)
        if end <= first_mismatch(text, render(messages, False)) < len(text):
            return
        # It does not: what stands there may still be what an answer in history begins with.
        answer = _behind(messages, ANSWER, render)
        if behind.startswith(answer.rstrip()):
            return
        with suppress(Unbridgeable):
            question = _behind(messages, QUESTION, render)
            if first_mismatch(behind, answer) > first_mismatch(answer, question):
                return
        raise Unbridgeable(
            Property.PROMPTS_ANSWER,
            f"template {self.renderer.template.name!r} ends with {text[-40:]!r}, with or without add_generation_prompt",
        )

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

    def _check_doubled(self, behind: str) -> None:
        last = behind[-_DOUBLED:]
        for length in range(len(last) // 2, _MEANT, -1):
            if last[-length:] == last[-2 * length : -length] and last[-length:].strip():
                self._refuse_doubled(last[-length:])

    def _refuse_doubled(self, opener: str) -> NoReturn:
        name = self.renderer.template.name
        raise Unbridgeable(Property.OPENED_ONCE, f"template {name!r} opens the assistant's turn twice: {opener!r}")


def _behind(messages: Sequence[Message], last: Message, render: RenderAsking) -> str:
    """What stands between the last content of `messages` and that of a message behind them."""
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
