"""vLLM's tool parsers as readers of turns, id by id: correct calls, no call from a cut one, and no lost content."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from runner.engines.vllm import call_reader
from runner.engines.vllm.call_reader import VllmCallReader, require_format
from runner.errors import BadModel, BadOption
from runner.parsing.call_reader import CallsReading, ReadCall
from runner.parsing.call_writer import WrittenCall, id_for, write_calls
from runner.parsing.learning.format_check import equal_with_types
from runner.parsing.learning.learnt_format import learn_format
from runner.parsing.turn_format import CallFormat
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests import sweeps
from tests.conformance.corpus import control_tokens, corpus

pytestmark = pytest.mark.slow  # vLLM is imported, which takes seconds

FAMILIES = {
    "hermes": "Qwen-Qwen3-0.6B",
    "qwen3_coder": "Qwen-Qwen3-Coder-30B-A3B-Instruct",
    "glm45": "GLM-4.6",
    "minimax_m2": "MiniMaxAI-MiniMax-M2",
    "gemma4": "google-gemma-4-31B-it",
    "mistral": "mistralai-Mistral-7B-Instruct-v0.3",
    "kimi_k2": "moonshotai-Kimi-K2-Instruct",
    "deepseek_v32": "deepseek-ai-DeepSeek-V3.2",
    "llama3_json": "meta-llama-Llama-3.1-8B-Instruct",
    "granite4": "ibm-granite-granite-4.0",
    "lfm2": "LFM2.5-8B-A1B",
    "seed_oss": "ByteDance-Seed-OSS",
    "apertus": "Apertus-8B-Instruct",
}
SAID: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("look_up", {"query": 'two "w" <b>, it\'s\nnew', "limit": 30, "deep": True}),
    ("refresh", {}),
)
SCHEMAS: Mapping[str, Any] = {
    "look_up": {
        "type": "object",
        "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}, "deep": {"type": "boolean"}},
    },
    "refresh": {"type": "object", "properties": {}},
}


def written(form: CallFormat) -> str:
    calls = [WrittenCall(name, arguments, id_for(form, name, n)) for n, (name, arguments) in enumerate(SAID)]
    text = write_calls(form, calls if form.between is not None else calls[:1])
    return f"I look.{form.after_content}{text}" if form.after_content is not None else text


def read(reader: VllmCallReader, tokenizer: ByteTokenizer, text: str, begin: int = 0) -> CallsReading:
    return reader.read(text, tokenizer.encode(text), begin, SCHEMAS)


@pytest.mark.parametrize("name", sweeps.part(list(FAMILIES), 5))
def test_family_calls_are_read_and_truncations_make_no_call(name: str) -> None:
    renderer = next(entry for entry in corpus() if entry.name == FAMILIES[name]).renderer()
    tokenizer = ByteTokenizer(control_tokens(renderer.written()))
    form = learn_format(renderer).format.calls
    assert form is not None
    reader, text = VllmCallReader(f"vllm:{name}", tokenizer), written(form)
    whole = read(reader, tokenizer, text)
    said = list(SAID if form.between is not None else SAID[:1])
    assert [(call.name, call.arguments, call.error) for call in whole.calls] == [(*each, None) for each in said]
    assert whole.content == ("I look." if form.after_content is not None else "")
    for cut in range(len(text)):
        for call in read(reader, tokenizer, text[:cut]).calls:
            assert call.error or any(call.name == n and equal_with_types(call.arguments, a) for n, a in said), text[
                :cut
            ]


# --- a user's own parser


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    """Register a parser that reads `(name {...})` and fails at a question mark. Everything else is content."""
    require_format("vllm:hermes")  # imports vLLM's parsers
    from vllm.entrypoints.generate.base.protocol import DeltaFunctionCall, DeltaMessage, DeltaToolCall
    from vllm.tool_parsers import ToolParser, ToolParserManager

    class Own(ToolParser):  # type: ignore[misc]  # the types of vLLM are not checked
        seen: list[tuple[str, list[int]]] = []  # noqa: RUF012  # calls of the reader's last instance

        def __init__(self, tokenizer: Any, tools: Any = None) -> None:
            super().__init__(tokenizer, tools)
            Own.seen = []

        def extract_tool_calls_streaming(
            self,
            previous_text: str,
            current_text: str,
            delta_text: str,
            previous_token_ids: Sequence[int],
            current_token_ids: Sequence[int],
            delta_token_ids: Sequence[int],
            request: Any,
        ) -> Any:
            Own.seen.append((delta_text, list(delta_token_ids)))
            assert current_text == previous_text + delta_text
            assert list(current_token_ids) == [*previous_token_ids, *delta_token_ids]
            if "?" in delta_text:
                raise KeyError("no question")
            before, _, begun = current_text.rpartition("(")
            if current_text.count("(") <= current_text.count(")") and delta_text != ")":
                return DeltaMessage(content=delta_text)
            if delta_text != ")":
                return None
            name, _, arguments = begun[:-1].partition(" ")
            function = DeltaFunctionCall(name=name, arguments=arguments)
            return DeltaMessage(tool_calls=[DeltaToolCall(index=before.count("("), id="random", function=function)])

    ToolParserManager.register_module("deltarunner_own", module=Own)
    yield "vllm:deltarunner_own"
    del ToolParserManager.tool_parsers["deltarunner_own"]
    call_reader._parser_class.cache_clear()


TOKENIZER = ByteTokenizer(["<call>"])


def seen() -> list[tuple[str, list[int]]]:
    from vllm.tool_parsers import ToolParserManager

    deltas: list[tuple[str, list[int]]] = ToolParserManager.get_tool_parser("deltarunner_own").seen
    return deltas


def test_parser_gets_single_ids_from_reasoning_end_to_stop(own: str) -> None:
    reader, text = VllmCallReader(own, TOKENIZER), "Hm.</t>é is"
    reader.read(text, [*TOKENIZER.encode(text), 257], len("Hm.</t>"), SCHEMAS)
    first, second = "é".encode()
    assert seen() == [
        ("", [first]),
        ("é", [second]),
        *((letter, [ord(letter)]) for letter in " is"),
        ("", [257]),
    ]


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        ("I (refresh {}).", "I .", [ReadCall("refresh", {})]),
        ('(f {"a": 1})(g {"b": [2]})', "", [ReadCall("f", {"a": 1}), ReadCall("g", {"b": [2]})]),
        ("(f [1])", "", [ReadCall("f", error="its arguments must be a JSON object")]),
        ('(f {"a": 1)', "", [ReadCall("f", error="',' is missing at the end")]),
        ("(f {}{})", "", [ReadCall("f", error="'{}' follows its arguments")]),
        ("(f)", "", [ReadCall("f", error="its arguments are missing")]),
    ],
)
def test_the_calls_are_what_the_stream_gave(own: str, text: str, content: str, calls: list[ReadCall]) -> None:
    assert read(VllmCallReader(own, TOKENIZER), TOKENIZER, text) == CallsReading(content, calls)


def test_exception_of_a_parser_is_a_call_with_an_error(own: str) -> None:
    reading = read(VllmCallReader(own, TOKENIZER), TOKENIZER, "Yes. (f {})?! (g {})")
    assert reading.content == "Yes."
    assert reading.calls == [
        ReadCall("f", {}),
        ReadCall("", error="vllm:deltarunner_own raised KeyError: 'no question'"),
    ]


def test_held_back_call_is_a_call_with_an_error() -> None:
    tokenizer = ByteTokenizer(["<tool_call>", "</tool_call>"])
    reader = VllmCallReader("vllm:hermes", tokenizer)
    cut = read(reader, tokenizer, 'I look. <tool_call>\n{"na')
    assert cut.content == "I look."
    assert [call.error for call in cut.calls] == ["a call is begun with '<tool_call>', and vllm:hermes read none"]
    for text in ("It is <", "It is 3 <tool", "It is <b>bold</b>."):
        assert read(reader, tokenizer, text) == CallsReading(text, [])


# --- names


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hermess", "has no tool parser 'hermess'. Did you mean 'hermes'?"),
        ("minimax_m4", "has no tool parser 'minimax_m4'. Did you mean 'minimax_m3', 'minimax_m2'?"),
        ("granite5", "has no tool parser 'granite5'. Did you mean 'granite"),
        ("nonsense", "has no tool parser 'nonsense'. The nearest of its "),
    ],
)
def test_unknown_parser_name_lists_similar_names(name: str, says: str) -> None:
    with pytest.raises(BadOption, match=f"tool_format='vllm:{name}': vLLM .*{re.escape(says)}") as refused:
        require_format(f"vllm:{name}")
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mistral", "does not work with the model's vocabulary: .*could not locate the tool call token"),
        ("openai", "works only inside vLLM's own server"),
        ("hf", "works only inside vLLM's own server"),
    ],
)
def test_a_parser_that_cannot_read_here_is_refused_by_name(name: str, says: str) -> None:
    with pytest.raises(BadOption, match=f"tool_format='vllm:{name}': .*{says}"):
        VllmCallReader(f"vllm:{name}", ByteTokenizer())


def test_format_of_a_missing_vllm_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    call_reader._parser_class.cache_clear()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadModel, match=r"vLLM.* is not installed: pip install 'deltarunner\[cpu\]'"):
        require_format("vllm:hermes")
