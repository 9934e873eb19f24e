"""Tools: their description for a model, validation of arguments, and error texts."""

import dataclasses
import datetime
import enum
import inspect
import json
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from runner import wording
from runner.errors import BadEnvironment, ToolError, WrongArguments
from runner.options import UNSET
from runner.tools.results import result_text
from runner.tools.tool import Tool, collect_tools, tool


class Calculator:
    @tool
    def multiply(self, a: int, b: int = 2) -> int:
        """Multiply two integers.

        The result is exact.

        Args:
            a: the first factor
            b: the second factor
        """
        return a * b

    @tool(name="look-up", seconds=5, parallel=False)
    async def look_up(self, key: str) -> str:
        """Look something up."""
        return key

    def no_tool(self) -> None: ...


def test_a_tool_stays_an_ordinary_method() -> None:
    assert Calculator().multiply(6, 7) == 42
    assert list(inspect.signature(Calculator.multiply).parameters) == ["self", "a", "b"]
    assert Calculator.multiply.__name__ == "multiply"


def test_model_gets_signature_and_docstring() -> None:
    (multiply, _) = collect_tools(Calculator).values()
    assert multiply.bind(Calculator()).as_openai() == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two integers.\n\nThe result is exact.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first factor"},
                    "b": {"type": "integer", "description": "the second factor", "default": 2},
                },
                "required": ["a"],
            },
            "return": {"type": "integer"},
        },
    }


def test_settings_of_the_decorator_are_kept() -> None:
    specs = collect_tools(Calculator)
    assert list(specs) == ["multiply", "look-up"]
    plain, look_up = specs["multiply"], specs["look-up"]
    assert (plain.seconds, plain.parallel, plain.is_async) == (UNSET, True, False)
    assert (look_up.seconds, look_up.parallel, look_up.is_async) == (5, False, True)


def test_a_bound_tool_calls_its_own_object() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count = 0

        @tool
        def up(self) -> int:
            """Count up."""
            self.count += 1
            return self.count

    spec = collect_tools(Counter)["up"]
    first, second = Counter(), Counter()
    assert [spec.bind(first).call(), spec.bind(first).call(), spec.bind(second).call()] == [1, 2, 1]


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    """A thing to buy."""

    title: str
    count: int = 1
    parts: list["Item"] = []


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0


class Options(TypedDict, total=False):
    deep: bool


def everything(
    text: str,
    ratio: float,
    colour: Colour,
    mode: Literal["a", 1],
    item: Item,
    point: Point,
    options: Options,
    pair: tuple[int, str],
    table: dict[str, list[int]],
    size: Annotated[int, Field(ge=1, description="how large")],
    label: Annotated[str, "what it says"],
    maybe: Optional[int],  # noqa: UP045
    either: int | list[str] = 1,
    title: str | None = None,
    schema: Any = None,
    _private: bool = False,
) -> None:
    """Take everything."""


EVERYTHING: dict[str, Any] = {
    "text": "t",
    "ratio": 3,
    "colour": "blue",
    "mode": 1,
    "item": {"title": "x", "parts": [{"title": "y", "count": 2}]},
    "point": {"x": 1},
    "options": {"deep": True},
    "pair": [1, "b"],
    "table": {"k": [1, 2]},
    "size": 3,
    "label": "l",
    "maybe": None,
}


def test_arguments_become_values_of_their_types() -> None:
    arguments = Tool(everything).arguments({**EVERYTHING, "either": ["x"], "schema": {"a": [1]}, "_private": True})
    assert arguments == {
        "text": "t",
        "ratio": 3.0,
        "colour": Colour.BLUE,
        "mode": 1,
        "item": Item(title="x", parts=[Item(title="y", count=2)]),
        "point": Point(1.0),
        "options": {"deep": True},
        "pair": (1, "b"),
        "table": {"k": [1, 2]},
        "size": 3,
        "label": "l",
        "maybe": None,
        "either": ["x"],
        "schema": {"a": [1]},
        "_private": True,
    }
    assert type(arguments["ratio"]) is float


def test_omitted_arguments_stay_omitted() -> None:
    assert set(Tool(everything).arguments(EVERYTHING)) == set(EVERYTHING)


def test_generated_schema_is_valid_and_accepts_valid_arguments() -> None:
    from jsonschema import Draft202012Validator

    parameters = Tool(everything).parameters
    Draft202012Validator.check_schema(parameters)
    assert not list(Draft202012Validator(parameters).iter_errors(EVERYTHING))
    properties = parameters["properties"]
    assert list(properties)[:3] == ["text", "ratio", "colour"]
    assert properties["colour"] == {"$ref": "#/$defs/Colour"}
    assert parameters["$defs"]["Colour"] == {"enum": ["red", "blue"], "type": "string"}
    assert parameters["$defs"]["Item"]["properties"]["title"] == {"type": "string"}
    assert properties["size"] == {"type": "integer", "minimum": 1, "description": "how large"}
    assert properties["label"] == {"type": "string", "description": "what it says"}
    assert properties["title"] == {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"text": 1}, "text must be a string, got 1"),
        ({"size": "3"}, 'size must be an integer, got "3"'),
        ({"size": 3.0}, "size must be an integer, got 3.0"),
        ({"size": True}, "size must be an integer, got true"),
        ({"size": 0}, "size must be at least 1, got 0"),
        ({"ratio": "x"}, 'ratio must be a number, got "x"'),
        ({"ratio": float("inf")}, "numbers must be finite"),
        ({"colour": "green"}, "colour must be 'red' or 'blue', got \"green\""),
        ({"mode": 2}, "mode must be 'a' or 1, got 2"),
        ({"item": {"count": 1}}, "item.title is missing"),
        ({"item": {"title": "x", "parts": [{"title": 1}]}}, "item.parts[0].title must be a string, got 1"),
        ({"item": 3}, "item must be an object, got 3"),
        ({"pair": [1]}, "pair[1] is missing"),
        ({"table": {"k": ["x"]}}, 'table.k[0] must be an integer, got "x"'),
        ({"either": {"a": 1}}, 'either must be an integer or a list, got {"a": 1}'),
        ({"either": [1]}, "either[0] must be a string, got 1"),
        ({"maybe": []}, "maybe must be an integer, got []"),
        ({"more": 1}, "there is no more"),
        ({"text": "x" * 9, "size": "y" * 999}, f'size must be an integer, got "{"y" * 56}...'),
    ],
)
def test_wrong_arguments_have_one_clause_each(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(WrongArguments) as caught:
        Tool(everything).arguments({**EVERYTHING, **change})
    assert problem in str(caught.value)


def test_all_problems_are_reported_at_once() -> None:
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    with pytest.raises(ToolError) as caught:
        Tool(add).arguments({"a": "1", "c": 3})
    assert str(caught.value) == 'Wrong arguments for add: b is missing; there is no c; a must be an integer, got "1".'


def nothing() -> None:
    """Do nothing."""


def test_tool_without_parameters_has_an_empty_schema() -> None:
    assert Tool(nothing).parameters == {"type": "object", "properties": {}}
    assert Tool(nothing).arguments({}) == {}
    assert "return" not in Tool(nothing).as_openai()["function"]


def test_errors_name_fields_with_half_a_surrogate_pair() -> None:
    with pytest.raises(WrongArguments):
        Tool(everything).arguments({**EVERYTHING, "text": "\ud800"})


def untyped(a, b: int) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    """Untyped."""


def starred(*values: int) -> None:
    """Starred."""


def double_starred(**values: int) -> None:
    """Starred twice."""


def positional(a: int, /) -> None:
    """Positional."""


def unsupported(a: int, b: Callable[[], int]) -> None:
    """Unsupported."""


def foreign(a: inspect.Signature) -> None:
    """Foreign."""


def undocumented(a: int) -> None: ...


def misdocumented(a: int) -> None:
    """Misdocumented.

    Args:
        b: not there
    """


async def yielding(a: int) -> AsyncIterator[int]:
    """Yield."""
    yield a


def unresolved(a: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Unresolved."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (untyped, "parameter 'a': it has no type: annotate it, for example a: int"),
        (starred, "parameter 'values': a model cannot fill *values"),
        (double_starred, "parameter 'values': a model cannot fill **values"),
        (positional, "parameter 'a': models name their arguments: remove the /"),
        (unsupported, "parameter 'b': a model cannot write a Callable"),
        (foreign, "parameter 'a': a model cannot write a Signature"),
        (undocumented, "is a tool without a docstring"),
        (misdocumented, "its docstring describes 'b', but its parameters are: a."),
        (yielding, "yields: a tool has one result"),
        (unresolved, "its annotations name 'Nowhere'"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_signature_names_method_parameter_and_fix(function: Callable[..., Any], message: str) -> None:
    environment = type("Shop", (), {"buy": staticmethod(tool(function))})
    with pytest.raises(BadEnvironment) as caught:
        collect_tools(environment)
    assert str(caught.value).startswith("Shop.buy")
    assert message in str(caught.value)


def test_static_and_class_methods_can_be_tools() -> None:
    class Both:
        @staticmethod
        @tool
        def one(a: int) -> int:
            """One."""
            return a

        @classmethod
        @tool
        def two(cls, a: int) -> int:
            """Two."""
            return a + 1

    one, two = (spec.bind(Both()) for spec in collect_tools(Both).values())
    assert (one.call(**one.arguments({"a": 1})), two.call(**two.arguments({"a": 1}))) == (1, 2)


def test_tools_are_inherited_overridden_and_removed() -> None:
    class Base:
        @tool
        def first(self) -> str:
            """First."""
            return "base"

        @tool
        def second(self) -> None:
            """Second."""

    class Derived(Base):
        second = None  # type: ignore[assignment]

        @tool
        def third(self) -> None:
            """Third."""

        @tool
        def first(self) -> str:
            """First, again."""
            return "derived"

    specs = collect_tools(Derived)
    assert list(specs) == ["first", "third"]
    assert specs["first"].description == "First, again."
    assert specs["first"].bind(Derived()).call() == "derived"


def test_an_override_without_the_decorator_is_refused() -> None:
    class Derived(Calculator):
        def multiply(self, a: int, b: int = 2) -> int:
            return 0

    with pytest.raises(BadEnvironment, match=r"Derived.multiply overrides a tool: decorate it"):
        collect_tools(Derived)


def test_two_tools_with_one_name_are_refused() -> None:
    class Twice:
        @tool
        def one(self) -> None:
            """One."""

        @tool(name="one")
        def two(self) -> None:
            """Two."""

    with pytest.raises(BadEnvironment, match="both named 'one': rename one"):
        collect_tools(Twice)


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a(", "a\0"])
def test_unwritable_tool_name_is_refused(name: str) -> None:
    with pytest.raises(BadEnvironment, match="is not a tool name"):
        Tool(nothing, name=name)


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": ["integer", "null"]}, "unit": {"enum": ["C", "F"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_explicit_schema_is_shown_and_checks_arguments() -> None:
    def call(**arguments: Any) -> dict[str, Any]:
        return arguments

    weather = Tool(call, name="weather", description="The weather.", parameters=PARAMETERS)
    assert weather.parameters == PARAMETERS
    assert weather.arguments({"city": "Oslo", "days": None}) == {"city": "Oslo", "days": None}
    with pytest.raises(WrongArguments) as caught:
        weather.arguments({"days": "3", "unit": "K", "place": 1})
    assert str(caught.value) == (
        'Wrong arguments for weather: days must be an integer or null, got "3"; unit must be "C" or "F", got "K"; '
        "city is missing; there is no place."
    )


def test_schema_is_shown_in_the_order_of_its_author() -> None:
    def call(**arguments: Any) -> None:
        raise NotImplementedError

    weather = Tool(call, name="weather", description="The weather.", parameters=PARAMETERS)
    assert list(weather.parameters) == list(PARAMETERS)


@pytest.mark.parametrize("parameters", [{"type": "array"}, {"type": "objekt"}, {}])
def test_schema_without_object_type_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(BadEnvironment, match='"type": "object"'):
        Tool(nothing, name="n", description="d", parameters=parameters)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ("", "(empty)"),
        (None, "null"),
        (" \n", " \n"),
        (42, "42"),
        (True, "true"),
        (1.5, "1.5"),
        ({"a": [1, None], "ü": "ö"}, '{"a": [1, null], "ü": "ö"}'),
        (Item(title="x"), '{"title": "x", "count": 1, "parts": []}'),
        ([Point(1.0)], '[{"x": 1.0, "y": 0}]'),
        (Colour.RED, '"red"'),
        ({3, 1, 2}, "[1, 2, 3]"),
        ({"b", "a"}, '["a", "b"]'),
        ((1, "x"), '[1, "x"]'),
        (datetime.date(2024, 2, 29), '"2024-02-29"'),
        (Decimal("1.10"), '"1.10"'),
        (Path("a/b"), '"a/b"'),
        ({Colour.RED: 1, datetime.date(2024, 2, 29): 2}, '{"red": 1, "2024-02-29": 2}'),
        (2**80, str(2**80)),
    ],
)
def test_results_become_text_for_the_model(value: object, text: str) -> None:
    assert result_text(value) == text


def test_a_numpy_result_is_its_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert result_text({"a": numpy.arange(3), "b": numpy.float64(0.5)}) == '{"a": [0, 1, 2], "b": 0.5}'


def test_result_without_a_json_form_raises() -> None:
    with pytest.raises(TypeError, match="a tool returned a object, which has no JSON form: return a string"):
        result_text(object())


def test_the_wordings_are_fixed() -> None:
    assert wording.WORDING_VERSION == 2
    assert wording.EMPTY_RESULT == "(empty)"
    assert wording.unknown_tool("div", ["add", "sub"]) == "There is no tool named div. The tools are: add, sub."
    assert wording.unknown_tool("div", []) == "There is no tool named div. There are no tools."
    assert wording.took_longer("add", 30.0) == "add took longer than 30 s."
    assert wording.tool_error("no such order") == "no such order"
    assert wording.tool_error("") == "The tool failed."
    assert wording.malformed_call("] is missing") == "That tool call could not be read: ] is missing."


def test_explicit_and_typed_tools_agree_on_wordings() -> None:
    def weather(city: str, days: int) -> None:
        """The weather."""

    typed = Tool(weather)
    explicit = Tool(weather, parameters=json.loads(json.dumps(typed.parameters)), description="The weather.")
    texts = []
    for either in (typed, explicit):
        with pytest.raises(WrongArguments) as caught:
            either.arguments({"city": 1})
        texts.append(sorted(str(caught.value).removesuffix(".").partition(": ")[2].split("; ")))
    assert texts[0] == texts[1]
