"""Parsers of the bundled templates: they write, read and enforce calls as the templates do."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import xgrammar

from runner.errors import BadOption
from runner.messages import Message, ToolCall
from runner.options import ConstraintKind
from runner.parsing.call_reader import ReadCall
from runner.parsing.parser import CallNumbers
from runner.tokens.template import ChatTemplate
from runner.tools.modern_schema import modern
from runner.tools.tool import Tool
from tests.parsing.parsers import bundled


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def say(text: str, flag: bool = False, rest: dict[str, Any] | None = None) -> str:
    """Say something."""
    return text


ADD, SAY = Tool(add), Tool(say)


CALLS = [
    ToolCall("call_0", "add", {"a": -1, "b": 2}),
    ToolCall("call_1", "say", {"text": 'it\'s "x"\n\\', "flag": True, "rest": {"k": [None, 1.5]}}),
]


@pytest.mark.parametrize("name", ["pythonic", "hermes"])
def test_format_writes_calls_exactly_like_its_template(name: str) -> None:
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call.as_message() for call in CALLS]}
    rendered = ChatTemplate.load(name).renderer().render([{"role": "user", "content": "go"}, message])
    assert bundled(name).render(CALLS) in rendered
    assert bundled(name).parse(bundled(name).render(CALLS), tools=[ADD, SAY]).calls == CALLS


@pytest.mark.parametrize("name", ["pythonic", "hermes"])
def test_call_tokens_of_the_demo_model_are_allowed(name: str, demo_model_folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model_folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    vocabulary = [tokenizer.id_to_token(token) or "" for token in range(size)]
    end = tokenizer.token_to_id("<|im_end|>")
    information = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[end])
    constraint = bundled(name).constraint([ADD, SAY], "required")
    assert constraint is not None
    compiled = xgrammar.GrammarCompiler(information).compile_grammar(constraint.value)
    matcher = xgrammar.GrammarMatcher(compiled)
    for token in [*tokenizer.encode(bundled(name).render(CALLS)).ids, end]:
        assert matcher.accept_token(token)
    assert matcher.is_terminated()


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_only_required_calls_and_strict_tools_are_enforced(choice: str) -> None:
    assert bundled("pythonic").constraint([ADD], choice) is None


def test_the_same_tools_get_the_same_constraint() -> None:
    first, second = (bundled("pythonic").constraint([Tool(add)], "required") for _ in range(2))
    assert first == second
    assert first is not None
    assert first.kind is ConstraintKind.GRAMMAR


@pytest.mark.parametrize(("tools", "choice"), [([], "required"), ([ADD], "subtract")])
def test_requiring_an_unknown_tool_is_refused_with_its_name(tools: list[Tool], choice: str) -> None:
    with pytest.raises(BadOption, match=f"tool_choice='{choice}'"):
        bundled("hermes").constraint(tools, choice)


def test_parsing_loads_no_engine() -> None:
    code = "import runner.parsing, runner.tools.tool, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert not {"torch", "vllm", "transformers", "xgrammar", "jsonschema"} & set(modules.stdout.split())


def test_strict_tool_enforces_voluntary_calls() -> None:
    strict = bundled("hermes").constraint([Tool(add, strict=True), SAY], "auto")
    assert strict is not None
    assert strict.kind is ConstraintKind.STRUCTURAL_TAG
    assert "say" in strict.value


@pytest.mark.parametrize("ids", [["call_2", None], ["call_3", "call_3"], [None, "call_2", None], ["x", "x", "x"]])
def test_calls_of_a_turn_have_different_ids(ids: list[str | None]) -> None:
    form = dataclasses.replace(bundled("hermes").format)
    number = CallNumbers(form, before=2)
    calls = [number(ReadCall("add", {"a": index}, call_id)) for index, call_id in enumerate(ids)]
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("name", ["", "  "])
def test_call_without_a_name_is_unreadable(name: str) -> None:
    (call,) = bundled("hermes").parse(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>', [ADD]).calls
    assert (call.name, call.error) == ("", "the name of a tool is missing")


@pytest.mark.parametrize("other", ["True", "true", "'x'"])
def test_escaped_surrogate_pair_is_one_character(other: str) -> None:
    text = f'<tool_call>{{"name": "say", "arguments": {{"text": "\\ud83d\\ude00", "flag": {other}}}}}</tool_call>'
    (call,) = bundled("hermes").parse(text, [SAY]).calls
    assert (call.error, call.arguments["text"]) == (None, "\N{GRINNING FACE}")


def test_half_a_surrogate_pair_is_an_error_with_the_tool() -> None:
    text = '<tool_call>{"name": "say", "arguments": {"text": "\\ud83d"}}</tool_call>'
    (call,) = bundled("hermes").parse(text, [SAY]).calls
    assert (call.name, call.error) == ("say", "a string in it contains half of a surrogate pair")


def test_unresolved_reference_allows_any_argument() -> None:
    def odd(a: Any) -> None:
        raise NotImplementedError

    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/NO"}}, "required": ["a"]}
    tool = Tool(odd, description="Do something.", parameters=parameters)
    assert bundled("hermes").constraint([tool], "required") is not None
    assert [note.why for note in modern(parameters).notes] == ["'#/$defs/NO' has no target in its schema"]


def test_unsatisfiable_argument_of_a_required_call_is_refused() -> None:
    def odd(a: Any) -> None:
        raise NotImplementedError

    parameters = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 1, "maximum": 0}},
        "required": ["a"],
    }
    tool = Tool(odd, description="Do something.", parameters=parameters)
    with pytest.raises(BadOption, match="no arguments fit the tool odd: no object fits its schema"):
        bundled("hermes").constraint([tool], "required")
