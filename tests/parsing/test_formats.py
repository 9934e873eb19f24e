"""Formats: recognised by what a template renders, enforced by what the engine can enforce."""

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
from runner.parsing import ToolFormat, detect_format
from runner.parsing.hermes import Hermes
from runner.parsing.pythonic import Pythonic
from runner.tokens.template import ChatTemplate
from runner.tools.tool import Tool


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def say(text: str, flag: bool = False, rest: dict[str, Any] | None = None) -> str:
    """Say something."""
    return text


ADD, SAY = Tool(add), Tool(say)


@pytest.mark.parametrize("name", ["pythonic", "hermes"])
def test_our_templates_are_recognised(name: str) -> None:
    form = detect_format(ChatTemplate.load(name).renderer())
    assert form is not None
    assert form.name == name


PYTHONIC = "[{{ call.name }}({% for k, v in call.arguments.items() %}{{ k }}='{{ v }}'{% endfor %})]"
SOURCES = {
    "hermes": "<tool_call>{{ {'name': call.name, 'arguments': call.arguments} | tojson }}</tool_call>",
    "hermes, as text": '<tool_call>{"arguments": {{ call.arguments + "" }}, "name": "{{ call.name }}"}</tool_call>',
    "pythonic": PYTHONIC,
    "none, in tokens of its own": f"<calls>{PYTHONIC}</calls>",
    "none, other tags": "<tool_call><function={{ call.name }}>{{ call.arguments }}</tool_call>",
    "none, no calls": "{{ messages[0].content }}",
    "none, instructions only": "{{ tools | tojson }}<tool_call>\n{'name': <name>, 'arguments': <args>}\n</tool_call>",
    "none, undefined": "{{ call.nothing.at.all }}",
    "none, raises": "{{ messages[1].content + 1 }}",
}


@pytest.mark.parametrize(("expected", "source"), SOURCES.items())
def test_a_format_is_recognised_by_what_is_rendered_not_by_the_source(expected: str, source: str) -> None:
    calls = (
        "{% for tool_call in messages[1].tool_calls or [] %}{% set call = tool_call.function %}"
        + source
        + "{% endfor %}"
    )
    template = ChatTemplate("<turn>" + calls + "{{ messages[1].content }}<end>", name="tiny")
    form = detect_format(template.renderer())
    assert (form.name if form else "none") == expected.partition(",")[0]


CALLS = [
    ToolCall("call_0", "add", {"a": -1, "b": 2}),
    ToolCall("call_1", "say", {"text": 'it\'s "x"\n\\', "flag": True, "rest": {"k": [None, 1.5]}}),
]


@pytest.mark.parametrize("form", [Pythonic(), Hermes()], ids=lambda form: form.name)
def test_a_format_writes_calls_exactly_as_its_template_does(form: ToolFormat) -> None:
    message: Message = {"role": "assistant", "content": "", "tool_calls": [call.as_message() for call in CALLS]}
    rendered = ChatTemplate.load(form.name).renderer().render([{"role": "user", "content": "go"}, message])
    assert form.render(CALLS) in rendered
    assert form.parse(form.render(CALLS), tools=[ADD, SAY]).calls == CALLS


@pytest.mark.parametrize("form", [Pythonic(), Hermes()], ids=lambda form: form.name)
def test_the_demo_models_own_tokens_of_a_call_are_allowed(form: ToolFormat, demo_model_folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(demo_model_folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    vocabulary = [tokenizer.id_to_token(token) or "" for token in range(size)]
    end = tokenizer.token_to_id("<|im_end|>")
    information = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.BYTE_LEVEL, stop_token_ids=[end])
    constraint = form.constraint([ADD, SAY], "required")
    assert constraint is not None
    compiled = xgrammar.GrammarCompiler(information).compile_grammar(constraint.value)
    matcher = xgrammar.GrammarMatcher(compiled)
    for token in [*tokenizer.encode(form.render(CALLS)).ids, end]:
        assert matcher.accept_token(token)
    assert matcher.is_terminated()


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_nothing_is_enforced_unless_a_call_is_required(choice: str) -> None:
    assert Pythonic().constraint([ADD], choice) is None


def test_the_same_tools_get_the_same_constraint() -> None:
    first, second = (Pythonic().constraint([Tool(add)], "required") for _ in range(2))
    assert first == second
    assert first is not None
    assert first.kind is ConstraintKind.GRAMMAR


@pytest.mark.parametrize(("tools", "choice"), [([], "required"), ([ADD], "subtract")])
def test_requiring_a_tool_that_is_not_there_is_refused_by_name(tools: list[Tool], choice: str) -> None:
    with pytest.raises(BadOption, match=f"tool_choice='{choice}'"):
        Hermes().constraint(tools, choice)


def test_parsing_loads_no_engine() -> None:
    code = "import runner.parsing, runner.tools.tool, sys; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert not {"torch", "vllm", "transformers", "xgrammar", "jsonschema"} & set(modules.stdout.split())
