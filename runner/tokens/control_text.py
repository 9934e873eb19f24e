"""Recognition of control tokens by their form, for a template without its vocabulary."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that a process that probes a template does not load a vocabulary
    from runner.tokens.tokenizer import Tokenizer

__all__ = ["lacking", "special_tokens", "tag_tokens"]

_SPECIAL = re.compile(
    r"<\|[^<>|\s'\"{}]+\|>"  # <|im_end|>
    r"|<\|[\w/]+>|<[\w/]+\|>|<\|\"\|>"  # <|turn>, <turn|>, Gemma 4's quotation mark
    r"|<\uff5c[^<>'\"{}]+?\uff5c>"  # with wide bars, as DeepSeek writes them
    r"|\[\|\w+\|\]"  # EXAONE
    r"|\[/?(?:INST|SYSTEM_PROMPT|TOOL_[A-Z]+|AVAILABLE_TOOLS|ARGS|CALL_ID|THINK|MODEL_SETTINGS)\]"  # Mistral
    r"|\]~!?b\[|\]~b\]|\[e~\[|\[gMASK\]|<sop>"  # MiniMax, GLM
    r"|</?s>|<(?:bos|eos|pad|unk|BOS|EOS)>|<\w+:[0-9a-f]{8}>|<(?:start|end|begin)_of_\w+>|<SPECIAL_\d+>"
    r"|<extra_id_\d+>|</?(?:seed:|longcat_)\w+>"
)
_TAG = re.compile(
    r"</?(?:think|arg_key|arg_value|tool_call|tool_calls|tool_response|minimax:tool_call|TOOLCALL|TOOL_RESPONSE)>"
)


def special_tokens(text: str) -> tuple[str, ...]:
    """Return the parts of a text that look like special tokens of public vocabularies, in order, each once."""
    return tuple(dict.fromkeys(_SPECIAL.findall(text)))


def tag_tokens(text: str) -> tuple[str, ...]:
    """Return the tags in a text that are single ids in some vocabularies, but not special, such as `<tool_call>`."""
    return tuple(dict.fromkeys(_TAG.findall(text)))


def lacking(rendered: str, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the control tokens of a render that a vocabulary lacks. A model reads them as letters."""
    names = special_tokens(rendered)
    return tuple(name for name in names if tokenizer.control_ids.isdisjoint(tokenizer.encode(name)))
