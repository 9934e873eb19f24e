"""Which tool format a chat template writes, found by rendering a call and looking at the text."""

from __future__ import annotations

import json
import re

from runner.messages import Message
from runner.parsing.base import ToolFormat
from runner.parsing.hermes import Hermes
from runner.parsing.pythonic import Pythonic
from runner.tokens.probe_messages import AGAIN_ASKED, KEY, QUESTION, TOOL, TOOLS, VALUE, calling, result
from runner.tokens.template import Renderer, TemplateRaised

__all__ = ["detect_format"]

_PYTHONIC = re.compile(rf"\[{TOOL}\({KEY}=(['\"]){VALUE}\1\)\]")
_HERMES = re.compile(rf"<tool_call>\s*(\{{[^<>]*{VALUE}[^<>]*\}})\s*</tool_call>")


def detect_format(renderer: Renderer) -> ToolFormat | None:
    """The format in which a chat template writes calls, or None if we know it not.

    It is asked for one message with a call, and its output is looked at, not its source.
    """
    for arguments in ({KEY: VALUE}, json.dumps({KEY: VALUE})):  # some templates take arguments as text only
        # The result stands behind the call, since some templates drop calls that nothing answers.
        text = _rendered(renderer, calling(arguments), result())
        calls = _PYTHONIC.search(text)
        if calls is not None and _stand_alone(renderer, text, calls):
            return Pythonic()
        if any(_is_hermes_call(match[1]) for match in _HERMES.finditer(text)):
            return Hermes()
    return None


def _rendered(renderer: Renderer, *messages: Message) -> str:
    try:
        return renderer.render([QUESTION, *messages], tools=TOOLS, generation_prompt=False)
    except TemplateRaised:
        return ""


def _stand_alone(renderer: Renderer, text: str, calls: re.Match[str]) -> bool:
    """The calls stand where content would; LFM2 puts tokens of its own around them, which is another format."""
    content = _rendered(renderer, {"role": "assistant", "content": VALUE}, AGAIN_ASKED)
    before, _, after = content.partition(VALUE)
    left, right = text[: calls.start()], text[calls.end() :]
    return left.rstrip() == before.rstrip() and right.lstrip()[:4] == after.lstrip()[:4]


def _is_hermes_call(text: str) -> bool:
    try:
        call = json.loads(text)
    except ValueError:
        return False
    return call.get("name") == TOOL and "arguments" in call
