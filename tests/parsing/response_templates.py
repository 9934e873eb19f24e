"""Response templates as in checkpoints: one for a public template whose calls cannot be learnt, and a plain one."""

from __future__ import annotations

from typing import Any, Final

from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from tests.conformance.corpus import VARIABLES, corpus

__all__ = ["HERMES", "UNLEARNABLE", "changed", "said", "unlearnable", "vocabulary"]

UNLEARNABLE: Final = "SvalTek-Q3-CharThink-9B-temp"
"""Template that escapes the mark which closes a parameter only in strings, lists and objects."""

_CALL: Final = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}

READS_IT: Final[dict[str, Any]] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "content": {},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>]+)>\n",
            "close_pattern": r"</function>\s*</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>]+)>\n(?P<value>.*?)\n(?:</parameter>|&lt;/parameter&gt;)"
                r"(?=\s*(?:<parameter=|$))",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "repeats": True,
            "transform": _CALL,
        },
    },
}
"""Response template that reads text of that template. The tool's schema decides the type of values that are not JSON.
"""

HERMES: Final[dict[str, Any]] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{content.name}", "arguments": "{content.arguments}"}},
        },
    },
}


def changed(**tool_calls: Any) -> dict[str, Any]:
    """Return the response template for the public template, with another field for its calls."""
    fields = READS_IT["fields"]
    return {**READS_IT, "fields": {**fields, "tool_calls": {**fields["tool_calls"], **tool_calls}}}


def unlearnable(response_template: dict[str, Any] | None = READS_IT) -> ChatTemplate:
    """Return the public template with a response template."""
    text = next(entry.text for entry in corpus() if entry.name == UNLEARNABLE)
    return ChatTemplate(text, UNLEARNABLE, VARIABLES, response_template)


def vocabulary() -> ByteTokenizer:
    return ByteTokenizer(["<think>", "</think>"])


def said(query: str, limit: int) -> str:
    """Return a call as the public template writes it. `query` is written like a string in JSON."""
    return (
        f"<tool_call>\n<function=look_up>\n<parameter=query>\n{query}\n&lt;/parameter&gt;\n"
        f"<parameter=limit>\n{limit}\n</parameter>\n</function>\n</tool_call>"
    )
