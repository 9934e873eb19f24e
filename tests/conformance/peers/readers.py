"""The compared readers: our reader, and the parsers that vLLM registers, each called as vLLM's server calls it."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import vllm
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import Parser
from vllm.parser.parser_manager import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from runner.parsing.call_reader import CallReader
from runner.parsing.events import TurnReading
from runner.parsing.harmony import read_harmony
from runner.parsing.spelled_tokens import SpelledTokens
from runner.parsing.turn_format import TurnFormat
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.conformance.corpus import every_control_token, is_special
from tests.conformance.peers.cases import NOT_TRIED, Trial
from tests.conformance.peers.judging import Call, CallsReader, Read

__all__ = [
    "about",
    "our_calls",
    "reasoning_parsers",
    "tool_parsers",
    "vllm_calls",
    "vllm_split",
]

for package in ("tool_parsers", "parser", "reasoning"):  # else a call that cannot be read prints a traceback on stderr
    logging.getLogger(f"vllm.{package}").setLevel(logging.CRITICAL)


LETTERS = ByteTokenizer()


def our_calls(form: TurnFormat, tokens: Collection[str]) -> CallsReader:
    """Our reader for one format, in a vocabulary with these control tokens."""
    assert form.calls is not None
    reader, trigger = CallReader(form.calls), form.calls.trigger
    is_token = trigger in tokens

    def read(trial: Trial) -> Read:
        # As in an episode: if the mark is one token, the ids show its place.
        spelling = SpelledTokens(
            trial.text, LETTERS.encode(trial.text), {trigger: -1} if trial.spelt and is_token else {}, LETTERS
        )
        ours = reader.read(spelling.text, trial.schemas)
        content = spelling.restored(ours.content)
        reading = read_harmony(trial.text) if form.harmony else TurnReading("", content, ours.calls)
        calls = [Call(call.name, call.arguments, call.id, call.error is not None) for call in reading.calls]
        return Read(reading.content, calls)

    return read


@functools.cache
def tool_parsers() -> list[str]:
    """Return the parsers of calls."""
    return _names(ToolParserManager.list_registered(), ToolParserManager.get_tool_parser)


@functools.cache
def reasoning_parsers() -> list[str]:
    """Return the parsers of thoughts."""
    return _names(ReasoningParserManager.list_registered(), ReasoningParserManager.get_reasoning_parser)


def _names(registered: Collection[str], class_of: Callable[[str], type]) -> list[str]:
    """Registered parsers that can be tried. Several names of one parser are one entry, such as `hermes, qwen3_json`."""
    parsers: dict[type, list[str]] = {}
    for name in registered:
        if name not in NOT_TRIED:
            parsers.setdefault(class_of(name), []).append(name)
    return [", ".join(names) for names in parsers.values()]


def about(marks: Collection[str]) -> dict[str, Any]:
    """Return vLLM's version, its registered parsers, and the parsers that fit no thought with these marks."""
    tokens = tuple(dict.fromkeys([*every_control_token(), *marks]))
    unfit = [name for name in reasoning_parsers() if vllm_split(name, tokens, thinking=True) is None]
    registered = {*ToolParserManager.list_registered(), *ReasoningParserManager.list_registered()}
    return {
        "vllm": vllm.__version__,
        "registered": sorted(registered),
        "tool_parsers": tool_parsers(),
        "reasoning_parsers": reasoning_parsers(),
        "unfit": unfit,
    }


def vllm_calls(tokens: tuple[str, ...]) -> Iterator[tuple[str, CallsReader]]:
    """Yield each parser of vLLM's, with a vocabulary of bytes and these control tokens."""
    for names in tool_parsers():
        made, tokenizer = _parser(tokens, tool_parser_name=names.split(", ")[0], enable_auto_tools=True)
        yield names, functools.partial(_calls, made, tokenizer)


def _calls(made: type[Parser], tokenizer: PreTrainedTokenizerFast, trial: Trial) -> Read:
    request = _request(json.dumps(trial.schemas))
    parser = made(tokenizer, request.tools, chat_template_kwargs={}, model_config=None)
    # A single character is never a control token.
    pieces = list(trial.text) if trial.spelt else [trial.text]
    ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    _, content, calls = parser.parse(trial.text, request, enable_auto_tools=True, model_output_token_ids=ids)
    return Read(content or "", [Call(call.name, _object(call.arguments), call.id) for call in calls or []])


def vllm_split(names: str, tokens: tuple[str, ...], *, thinking: bool) -> Callable[[str, str], tuple[str, str]] | None:
    """Return a function of a vLLM parser that splits a turn into thought and rest; `thinking` is a template option.

    Return None if the parser needs a token that no template of the corpus has.
    """
    try:
        made, tokenizer = _parser(tokens, reasoning_parser_name=names.split(", ")[0])
    except TypeError:
        return None
    options = {"thinking": True, "enable_thinking": True} if thinking else {}

    def split(prompt: str, text: str) -> tuple[str, str]:
        parser = made(tokenizer, None, chat_template_kwargs=options, model_config=None)
        parser.set_prompt_token_ids(tokenizer.encode(prompt, add_special_tokens=False))
        ids = tokenizer.encode(text, add_special_tokens=False)
        thought, content, _ = parser.parse(text, _request("{}"), model_output_token_ids=ids)
        return thought or "", content or ""

    return split


def _parser(tokens: tuple[str, ...], **names: Any) -> tuple[type[Parser], PreTrainedTokenizerFast]:
    """Return a parser with a template's vocabulary, or with all templates' tokens if that vocabulary lacks a token."""
    try:
        made = ParserManager.get_parser(tokenizer=_tokenizer(tokens), **names)
    except TypeError:  # the server's error for a tokenizer that a parser cannot use
        if tokens == every_control_token():
            raise
        return _parser(every_control_token(), **names)
    assert made is not None
    return made, _tokenizer(tokens)


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


@functools.lru_cache(maxsize=512)
def _request(schemas: str) -> ChatCompletionRequest:
    tools = [
        {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}
        for name, parameters in json.loads(schemas).items()
    ]
    messages = [{"role": "user", "content": "Look it up."}]
    # A request that chooses among tools must have tools.
    choice = {"tools": tools, "tool_choice": "auto"} if tools else {}
    return ChatCompletionRequest(messages=messages, model="model", **choice)


@functools.lru_cache(maxsize=8)
def _tokenizer(tokens: tuple[str, ...]) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({sign: number for number, sign in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=is_special(token)) for token in tokens])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
