"""Which tool format a chat template writes, found by rendering a call and looking at the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from jinja2 import TemplateError

from runner.errors import BadTemplate
from runner.messages import Message
from runner.parsing.base import ToolFormat
from runner.parsing.hermes import Hermes
from runner.parsing.pythonic import Pythonic
from runner.tokens.probe_messages import AGAIN_ASKED, KEY, QUESTION, TOOL, TOOLS, VALUE, calling, result

__all__ = ["Render", "detect_format"]

Render: TypeAlias = Callable[[list[Message], list[dict[str, Any]]], str]
"""A chat template as a function of messages and OpenAI tools, without a generation prompt."""

_PYTHONIC = re.compile(rf"\[{TOOL}\({KEY}=(['\"]){VALUE}\1\)\]")
_HERMES = re.compile(rf"<tool_call>\s*(\{{[^<>]*{VALUE}[^<>]*\}})\s*</tool_call>")


def detect_format(render: Render) -> ToolFormat | None:
    """The format in which a chat template writes calls, or None if we know it not.

    It is asked for one message with a call, and its output is looked at, not its source.
    """
    for arguments in ({KEY: VALUE}, json.dumps({KEY: VALUE})):  # some templates take arguments as text only
        # The result stands behind the call, since some templates drop calls that nothing answers.
        text = _rendered(render, calling(arguments), result())
        calls = _PYTHONIC.search(text)
        if calls is not None and _stand_alone(render, text, calls):
            return Pythonic()
        if any(_is_hermes_call(match[1]) for match in _HERMES.finditer(text)):
            return Hermes()
    return None


def _rendered(render: Render, *messages: Message) -> str:
    try:
        return render([QUESTION, *messages], [*TOOLS])
    # A template is a program of its own: these are what one raises on a message that it does not know.
    except (BadTemplate, TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return ""


def _stand_alone(render: Render, text: str, calls: re.Match[str]) -> bool:
    """The calls stand where content would; LFM2 puts tokens of its own around them, which is another format."""
    content = _rendered(render, {"role": "assistant", "content": VALUE}, AGAIN_ASKED)
    before, _, after = content.partition(VALUE)
    left, right = text[: calls.start()], text[calls.end() :]
    return left.rstrip() == before.rstrip() and right.lstrip()[:4] == after.lstrip()[:4]


def _is_hermes_call(text: str) -> bool:
    try:
        call = json.loads(text)
    except ValueError:
        return False
    return call.get("name") == TOOL and "arguments" in call
