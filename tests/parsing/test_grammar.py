"""What the grammars of tool calls let through, by the real xgrammar."""

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal

import pytest
import xgrammar
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from runner.messages import ToolCall
from runner.parsing.base import ToolFormat
from runner.parsing.hermes import Hermes
from runner.parsing.pythonic import Pythonic
from runner.tools.tool import Tool
from tests import sweeps

FORMATS: list[ToolFormat] = [Pythonic(), Hermes()]


class Colour(enum.Enum):
    RED = "red"
    PALE_BLUE = 'pale "blue"'


class Tree(BaseModel):
    label: str
    children: list["Tree"] = []


@dataclass
class Point:
    x: float
    y: float = 0.0


def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


def paint(
    colour: Colour,
    mode: Literal["fast", 2, True, None] = "fast",
    at: Point | None = None,
    alpha: Annotated[float, Field(ge=0)] = 1.0,
) -> None:
    """Paint something."""


def plant(tree: Tree, times: Annotated[int, Field(ge=1, le=12)] = 1) -> None:
    """Plant a tree."""


def note(
    text: str = "",
    tags: list[str] | None = None,
    scores: dict[str, int] | None = None,
    pair: tuple[int, str] = (0, ""),
    done: bool = False,
    anything: Any = None,
    short: Annotated[str, Field(min_length=2, max_length=4)] = "ab",
    few: Annotated[list[int], Field(min_length=1, max_length=2)] = [1],  # noqa: B006
) -> None:
    """Note something."""


def stop() -> None:
    """Stop."""


TOOLS = [Tool(function) for function in (add, paint, plant, note, stop)]
ADD = TOOLS[:1]

CHARACTERS = [chr(code) for code in range(32, 127)] + ["\n", "\t", "é", "中", "🙂"]
END = len(CHARACTERS)
# What brings a text to its end, wherever it stands.
CLOSING = {END, *map(CHARACTERS.index, ")]}\"'")}


@lru_cache
def compiler() -> xgrammar.GrammarCompiler:
    vocabulary = [*CHARACTERS, "<end>"]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[END], vocab_size=len(vocabulary))
    )


@lru_cache
def compiled(grammar: str) -> xgrammar.CompiledGrammar:
    return compiler().compile_grammar(grammar)


def grammar_of(tool_format: ToolFormat, tools: Sequence[Tool], *, parallel: bool = True) -> str:
    constraint = tool_format.constraint(tools, "required", parallel=parallel)
    assert constraint is not None
    return constraint.value


def accepts(grammar: str, text: str) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled(grammar), terminate_without_stop_token=True)
    return bool(matcher.accept_string(text)) and bool(matcher.is_terminated() or matcher.accept_token(END))


def walk(grammar: str, rng: random.Random, length: int) -> str:
    """A random text of the grammar: any allowed character, past `length` one that closes something."""
    matcher = xgrammar.GrammarMatcher(compiled(grammar))
    mask = xgrammar.allocate_token_bitmask(1, END + 1)
    text: list[str] = []
    while True:
        matcher.fill_next_token_bitmask(mask)
        words = [int(word) & 0xFFFFFFFF for word in mask[0]]
        allowed = [token for token in range(END + 1) if words[token // 32] >> token % 32 & 1]
        assert allowed, f"a dead end after {''.join(text)!r}"
        closing = [token for token in allowed if token in CLOSING]
        token = rng.choice(closing if closing and len(text) > length else allowed)
        assert matcher.accept_token(token)
        if token == END:
            return "".join(text)
        text.append(CHARACTERS[token])
        assert len(text) < 5000, f"it does not end: {''.join(text[:200])!r}"


parametrize_format = pytest.mark.parametrize("tool_format", FORMATS, ids=lambda form: form.name)


@parametrize_format
@settings(max_examples=sweeps.times(60, 20))
@given(seed=st.integers(0, 2**32), length=st.integers(0, 200), index=st.integers(0, len(TOOLS) - 1))
def test_what_a_grammar_accepts_parses_to_arguments_that_validate(
    tool_format: ToolFormat, seed: int, length: int, index: int
) -> None:
    tools = TOOLS[index : index + 1]
    text = walk(grammar_of(tool_format, tools), random.Random(seed), length)
    parsed = tool_format.parse(text, tools=tools)
    assert parsed.content == ""
    assert parsed.calls
    for call in parsed.calls:
        assert call.error is None, text
        tools[0].arguments(call.arguments)


NUMBERS = st.integers(-(10**30), 10**30)
FLOATS = st.floats(-1e307, 1e307, allow_subnormal=False)
TEXTS = st.text(max_size=12)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


def in_order(values: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def fields(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with their keys in the order of the schema; the optional ones may be left out."""
    names = [*required, *optional]
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: in_order(values, names))


TREES: st.SearchStrategy[Any] = st.deferred(lambda: fields({"label": TEXTS}, {"children": st.lists(TREES, max_size=2)}))
ARGUMENTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "add": fields({"a": NUMBERS, "b": NUMBERS}, {}),
    "paint": fields(
        {"colour": st.sampled_from([colour.value for colour in Colour])},
        {
            "mode": st.sampled_from(["fast", 2, True, None]),
            "at": st.none() | fields({"x": FLOATS}, {"y": FLOATS}),
            "alpha": FLOATS.map(abs),
        },
    ),
    "plant": fields({"tree": TREES}, {"times": st.integers(1, 12)}),
    "note": fields(
        {},
        {
            "text": TEXTS,
            "tags": st.none() | st.lists(TEXTS, max_size=3),
            "scores": st.none() | st.dictionaries(TEXTS, NUMBERS, max_size=3),
            "pair": st.tuples(NUMBERS, TEXTS).map(list),
            "done": st.booleans(),
            "anything": ANYTHING,
            "short": st.text(min_size=2, max_size=4),
            "few": st.lists(NUMBERS, min_size=1, max_size=2),
        },
    ),
    "stop": st.just({}),
}


@st.composite
def calls(draw: st.DrawFn) -> ToolCall:
    name = draw(st.sampled_from(sorted(ARGUMENTS)))
    return ToolCall("call_0", name, draw(ARGUMENTS[name]))


@parametrize_format
@settings(max_examples=sweeps.times(150, 50))
@given(call=calls())
def test_every_valid_call_as_a_template_writes_it_is_accepted_and_read_back(
    tool_format: ToolFormat, call: ToolCall
) -> None:
    text = tool_format.render([call])
    assert accepts(grammar_of(tool_format, TOOLS), text), text
    assert tool_format.parse(text, tools=TOOLS).calls == [call]


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("[add(a=17, b=25)]", True),
        ("[add(a=-1, b=0)]", True),
        ("[add(a=1, b=2), add(a=3, b=4)]", True),
        ("[add(a=17,b=25)]", False),
        ("[add(a=17,  b=25)]", False),
        ("[ add(a=17, b=25)]", False),
        ("[add(a=017, b=25)]", False),
        ("[add(b=25, a=17)]", False),
        ("[add(a=17)]", False),
        ("[add(a=1.5, b=25)]", False),
        ('[add(a="17", b=25)]', False),
        ("[add(17, 25)]", False),
        ("[subtract(a=17, b=25)]", False),
        ("[add(a=17, b=25)] ", False),
        ("[]", False),
        ("", False),
    ],
)
def test_the_pythonic_grammar_allows_the_canonical_call_only(text: str, accepted: bool) -> None:
    assert accepts(grammar_of(Pythonic(), ADD), text) is accepted


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "add", "arguments": {"a":17, "b":25}}\n</tool_call>', False),
        ('<tool_call>{"name": "add", "arguments": {"a": 17, "b": 25}}</tool_call>', False),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 17}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": true}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2, "c": 3}}\n</tool_call>', False),
        ('{"name": "add", "arguments": {"a": 17, "b": 25}}', False),
    ],
)
def test_the_hermes_grammar_allows_the_canonical_call_only(text: str, accepted: bool) -> None:
    assert accepts(grammar_of(Hermes(), ADD), text) is accepted


@pytest.mark.parametrize(
    "bounds",
    [Field(ge=1, le=3), Field(gt=0, lt=4), Field(ge=1, lt=4), Field(gt=0, le=3)],
    ids=["ge le", "gt lt", "ge lt", "gt le"],
)
def test_an_integer_stays_within_the_bounds_of_its_schema(bounds: Any) -> None:
    def pick(number: int) -> None:
        """Pick a number."""

    pick.__annotations__["number"] = Annotated[int, bounds]
    grammar = grammar_of(Pythonic(), [Tool(pick)])
    assert [number for number in range(-1, 6) if accepts(grammar, f"[pick(number={number})]")] == [1, 2, 3]


@parametrize_format
def test_without_parallel_calls_a_turn_has_one(tool_format: ToolFormat) -> None:
    call = ToolCall("", "add", {"a": 1, "b": 2})
    one, two = tool_format.render([call]), tool_format.render([call, call])
    barrier = [Tool(add, parallel=False)]
    for grammar in (grammar_of(tool_format, ADD, parallel=False), grammar_of(tool_format, barrier)):
        assert accepts(grammar, one)
        assert not accepts(grammar, two)
    assert accepts(grammar_of(tool_format, ADD), two)


@parametrize_format
def test_a_named_tool_is_the_only_one(tool_format: ToolFormat) -> None:
    constraint = tool_format.constraint(TOOLS, "stop")
    assert constraint is not None
    assert accepts(constraint.value, tool_format.render([ToolCall("", "stop")]))
    assert not accepts(constraint.value, tool_format.render([ToolCall("", "add", {"a": 1, "b": 2})]))


def test_equal_reference_names_of_two_tools_are_not_mixed_up() -> None:
    def schema(kind: str) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "$defs": {"X": {"type": kind}},
        }

    tools = [
        Tool(print, name="one", description="One.", parameters=schema("integer"), raw=True),
        Tool(print, name="two", description="Two.", parameters=schema("boolean"), raw=True),
    ]
    grammar = grammar_of(Pythonic(), tools)
    assert accepts(grammar, "[one(x=1), two(x=True)]")
    assert not accepts(grammar, "[one(x=True)]")
    assert not accepts(grammar, "[two(x=1)]")


def test_names_and_values_that_need_escapes_are_written_exactly() -> None:
    parameters = {"type": "object", "properties": {'sa"y\\': {"enum": ['"', "\\", "\n", "'"]}}}
    tool = Tool(print, name="odd", description="Odd.", parameters=parameters, raw=True)
    hermes = Hermes()
    for value in ('"', "\\", "\n", "'"):
        assert accepts(grammar_of(hermes, [tool]), hermes.render([ToolCall("", "odd", {'sa"y\\': value})]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what vLLM imports warns
@parametrize_format
def test_vllm_takes_every_grammar(tool_format: ToolFormat) -> None:
    from vllm.sampling_params import SamplingParams, StructuredOutputsParams
    from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

    for tools in (TOOLS, ADD, TOOLS[-1:]):
        grammar = grammar_of(tool_format, tools)
        parameters = SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar))
        validate_xgrammar_grammar(parameters)
        assert parameters.structured_outputs is not None
        assert parameters.structured_outputs.grammar == grammar
