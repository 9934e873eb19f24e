"""Checks that a chat template can be used: it compiles, renders a user message, and opens the answer once."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import jinja2

from runner.errors import BadTemplate
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Property, Unbridgeable
from runner.tokens.probe_messages import QUESTION
from runner.tokens.probing.traits import options_of
from runner.tokens.template import ChatTemplate, Renderer, TemplateRaised

__all__ = ["TemplateFault", "UnusableTemplate", "usable_renderer"]


class TemplateFault(enum.StrEnum):
    """The reason why a template cannot be used."""

    NOT_JINJA = "does_not_compile"
    ENDLESS = "never_ends"  # the template was still rendering at the time limit
    TOO_BIG = "too_much_memory"
    VARIABLE_MISSING = "variable_missing"  # the template needs a name that is not set
    RAISES = "raises"  # the template raises on a user message
    QUESTION_MISSING = "question_not_shown"  # the render is empty, or does not contain the user message
    OPENED_TWICE = "assistant_opened_twice"
    FAILED = "failed"  # the template fails with an unexpected error


class UnusableTemplate(BadTemplate):
    """A template that cannot be used."""

    def __init__(self, fault: TemplateFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault
        """The reason why the template cannot be used."""


def usable_renderer(template: ChatTemplate, options: Mapping[str, Any], now: datetime) -> Renderer:
    """Return a template's renderer, after a check that the template can be used.

    Args:
        template: the template to check.
        options: values of names that the template reads, such as `enable_thinking`.
        now: the time that the template reads.

    Raises:
        UnusableTemplate: the template cannot be compiled, fails on a user message, does not show it, or opens the
            answer twice; `fault` has the reason.
    """
    try:
        renderer = template.renderer(options, now)
    except BadTemplate as error:
        raise UnusableTemplate(TemplateFault.NOT_JINJA, str(error)) from error
    try:
        text = renderer.render([QUESTION])
    except TemplateRaised as error:
        raise _raised(renderer, error) from error
    if QUESTION["content"] not in text:
        what = "nothing of a user message" if text.strip() else "nothing"
        raise UnusableTemplate(
            TemplateFault.QUESTION_MISSING,
            f"template {template.name!r} renders {what}: it is not a chat template, or it reads messages in another "
            "form than role and content as text. Give another template with --template.",
        )
    _check_opened_once(renderer, text)
    return renderer


def _raised(renderer: Renderer, error: TemplateRaised) -> UnusableTemplate:
    cause, name = error.__cause__, renderer.template.name
    if isinstance(cause, jinja2.UndefinedError):
        missing = next((each for each in options_of(renderer) if f"'{each}' is undefined" in str(cause)), None)
        if missing is not None:
            return UnusableTemplate(
                TemplateFault.VARIABLE_MISSING,
                f"template {name!r} needs {missing!r}, which is not set: --template-option {missing}=...",
            )
    return UnusableTemplate(
        TemplateFault.RAISES,
        f"template {name!r} fails on a conversation of one user message: {cause}. Correct the template, or give "
        "another one with --template.",
    )


def _check_opened_once(renderer: Renderer, text: str) -> None:
    prompts = PromptRenderer(renderer)
    asked = prompts.generation_prompt
    # A template may open the turn twice if add_generation_prompt is true. Then the generation prompt is two openings.
    half = asked[: len(asked) // 2]
    doubled = bool(half.strip()) and asked == half * 2
    try:
        prompts.asks_as_usual(text, QUESTION)
    except Unbridgeable as refusal:
        doubled = doubled or refusal.property is Property.OPENED_ONCE
    if doubled:
        raise UnusableTemplate(
            TemplateFault.OPENED_TWICE,
            f"template {renderer.template.name!r} opens the assistant's turn twice at the end of a prompt (its "
            f"generation prompt is {asked!r}): remove one of the two openings from the template",
        )
