"""Messages of a run about its tools before anything is sampled: calls that its template cannot represent."""

from __future__ import annotations

from typing import Any

import pytest

from runner import BadOption, BadTemplate, Environment, Outcome, Run, ScriptedEngine, Task, Tool, reward, tool
from runner.cli.report import summary_table
from runner.parsing.format_cache import cached_format
from runner.parsing.limitations import CallLimitation
from runner.testing import Reply
from runner.tokens.template import ChatTemplate
from tests.histories import OPENER
from tests.parsing.families import family

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_functions(2)]

POOR = ChatTemplate(
    """{% for t in tools or [] %}{{ t | tojson }}
{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>{% for k, v in
c.function.arguments.items() %}<parameter={{ k }}>{% if v is mapping or (v is iterable and v is not string)
%}{{ raise_exception('no lists and no objects') }}{% endif %}{{ v if v is string else v | tojson
}}</parameter>{% endfor %}</function></tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    name="poor",
)
"""A template that refuses lists and objects."""


class Asking(Environment):
    """Environment with three questions."""

    def tasks(self) -> list[Task]:
        return [Task(str(number), prompt="Well?") for number in range(3)]

    @reward
    def done(self) -> bool:
        return True


class Putting(Asking):
    @tool
    def put(self, key: str, value: int | str, more: list[int] | str = "", note: str | None = None) -> None:
        """Put it."""

    @tool
    def add(self, a: int, b: float = 1.0) -> float:
        """Add."""
        return a + b


def taking(*names: str, required: tuple[str, ...] = (), kind: Any = "string", **settings: Any) -> type[Asking]:
    """Return an environment whose tool has arguments with these names."""
    schema = {"type": "object", "properties": {key: {"type": kind} for key in names}, "required": list(required)}

    class Taking(Asking):
        def bound_tools(self) -> list[Tool]:
            given = {"name": "look_up", "description": "Look up.", "parameters": schema, **settings}
            return [Tool(lambda **arguments: str(arguments), **given)]

    return Taking


def of_family(name: str) -> ScriptedEngine:
    said = family(name)
    return said.scripted([Reply("Done.", stop=said.stop_ids[0])] * 3)


async def warnings_of(environment: Any, engine: ScriptedEngine) -> list[str]:
    """Return the messages about tools from a run of three episodes."""
    async with Run(environment, engine) as run:
        begun = list(run.summary.faults)
        assert [trajectory.error async for trajectory in run] == [""] * 3
    assert list(run.summary.faults) == begun  # episodes do not repeat the message
    words = ("of the tool", "strings", "schemas")
    return [fault for fault in begun if any(word in fault for word in words)]


async def refused(environment: Any, engine: ScriptedEngine, kind: type[Exception] = BadTemplate) -> str:
    with pytest.raises(kind) as raised:
        async with Run(environment, engine):
            pass
    return str(raised.value)


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM 4.6", "MiniMax M2", "Seed-OSS"])
async def test_ambiguous_arguments_are_named_once_per_run(
    name: str,
) -> None:
    (warning,) = await warnings_of(Putting, of_family(name))
    assert warning == (
        f"template {family(name).template.name!r} writes strings without quotes (untyped), and put(value: string | "
        "integer) also takes other values: a text that looks like such a value is not read as a string. Give it one "
        "type, or split it in two. Likewise: put(more: string | array)."
    )


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", ["Qwen3", "Kimi K2", "Gemma 4", "LFM 2.5", "DeepSeek V3.2", "gpt-oss"])
async def test_template_that_marks_strings_causes_no_warning(name: str) -> None:
    assert await warnings_of(Putting, of_family(name)) == []


async def test_arguments_of_one_type_cause_no_warning() -> None:
    class Plain(Asking):
        @tool
        def add(self, a: int, b: str, c: str | None = None) -> None:
            """Add."""

    assert await warnings_of(Plain, of_family("Qwen3-Coder")) == []


async def test_warning_is_shown_in_the_summary_of_the_run() -> None:
    from rich.console import Console

    async with Run(Putting, of_family("Qwen3-Coder")) as run:
        async for _ in run:
            pass
    console = Console(width=1000)
    with console.capture() as captured:
        console.print(summary_table(run.summary.as_dict()))
    assert "put(value: string | integer) also takes other values" in captured.get()


async def test_argument_names_of_any_characters_are_taken() -> None:
    for model in ("Qwen3-Coder", "Qwen3"):
        odd = taking("query", "first name", "page[size]", required=("page[size]",))
        assert await warnings_of(odd, of_family(model)) == []


async def test_uncallable_tool_is_refused_before_sampling() -> None:
    message = await refused(taking("query", "", required=("",)), of_family("Qwen3-Coder"))
    assert message.startswith("template 'Qwen-Qwen3-Coder-30B-A3B-Instruct' cannot write calls of the tool 'look_up'")
    assert "its argument '' cannot be read back (" in message
    assert "Rename the argument, or" in message


async def test_an_argument_that_may_be_left_out_is_warned_of() -> None:
    (warning,) = await warnings_of(taking("query", ""), of_family("Qwen3-Coder"))
    assert "does not keep every call of the tool 'look_up': its argument '' cannot be read back" in warning


async def test_unwritable_type_is_named_with_tool_and_fix() -> None:
    assert CallLimitation.SOME_TYPES_UNWRITABLE in cached_format(POOR.renderer()).limitations
    poor = ScriptedEngine("Done.", template=POOR)
    message = await refused(taking("names", required=("names",), kind="array"), poor)
    assert "cannot write calls of the tool 'look_up': its argument 'names' cannot be read back" in message
    assert "a value of type array cannot be written). Give it another type, or give the run another template" in message
    (warning,) = await warnings_of(taking("names", kind="array"), poor)
    assert "does not keep every call of the tool 'look_up': its argument 'names'" in warning
    assert await warnings_of(taking("names", required=("names",)), poor) == []


async def test_strict_tools_are_warned_of_where_nothing_announces_a_call() -> None:
    (warning,) = await warnings_of(taking("query", strict=True), of_family("Llama 3.1"))
    assert "has no text that begins a call (bare), so strict=True of the tool 'look_up' works only if" in warning
    assert await warnings_of(taking("query", strict=True), of_family("Qwen3")) == []


async def test_unenforceable_tool_choice_is_refused_before_sampling() -> None:
    class Requiring(taking("names")):  # type: ignore[misc]  # the class is created here
        tool_choice = "required"

        def bound_tools(self) -> list[Tool]:
            return [Tool(lambda **given: "", name="f", description="Do.", parameters=NOTHING_FITS)]

    message = await refused(Requiring, of_family("Qwen3-Coder"), BadOption)
    assert message.startswith("tool_choice='required': ")


EMPTY_RANGE = {"type": "integer", "minimum": 3, "maximum": 1}
NOTHING_FITS = {"type": "object", "properties": {"a": EMPTY_RANGE}, "required": ["a"]}


async def test_tools_that_setup_adds_are_not_checked_before_the_run() -> None:
    class Adding(Asking):
        def setup(self) -> None:
            self.tools += taking("first name", required=("first name",))().bound_tools()

    assert await warnings_of(Adding, of_family("Qwen3-Coder")) == []


CHATTING = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}<|im_end|>\n{% endfor %}" + OPENER
LISTING = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}" + CHATTING


@pytest.mark.parametrize(
    ("text", "why"),
    [(CHATTING, "does not show the tools to the model"), (LISTING, "drops the calls of an assistant turn")],
    ids=["tools not shown", "calls dropped"],
)
async def test_tools_of_setup_are_refused_as_those_of_a_class(text: str, why: str) -> None:
    class Adding(Asking):
        def setup(self) -> None:
            if self.task.id != "2":
                self.tools += taking("key")().bound_tools()

    engine = ScriptedEngine("Done.", template=ChatTemplate(text, name="chatting"))
    async with Run(Adding, engine, breaker=1) as run:
        played = {trajectory.task.id: trajectory async for trajectory in run}
    assert {key: each.outcome for key, each in played.items()} == {
        "0": Outcome.ENV_ERROR,
        "1": Outcome.ENV_ERROR,
        "2": Outcome.COMPLETED,
    }
    assert why in played["0"].error
    assert "'chatting'" in played["0"].error
    assert played["0"].turns == []
    assert why in await refused(taking("key"), ScriptedEngine("Done.", template=ChatTemplate(text, name="chatting")))


# --- schemas


def holding(schema: Any, **settings: Any) -> type[Asking]:
    """Return an environment with one tool of this schema."""

    class Holding(Asking):
        tool_choice = settings.pop("tool_choice", "auto")

        def bound_tools(self) -> list[Tool]:
            given = {"type": "object", "properties": {"tags": schema}, "required": ["tags"]}
            return [Tool(lambda given: "", name="tag", description="Tag.", parameters=given, raw=True, **settings)]

    return Holding


UNIQUE = {"type": "array", "items": {"type": "string", "maxLength": 3}, "uniqueItems": True}
NOT_ENFORCED = "parts of the schemas are not enforced during sampling, only checked afterwards"


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("settings", [{"tool_choice": "required"}, {"tool_choice": "tag"}, {"strict": True}], ids=str)
@pytest.mark.parametrize("model", ["Qwen3", "GLM 4.6", "Gemma 4", "gpt-oss"])
async def test_unenforced_keyword_is_named_for_enforced_calls(model: str, settings: dict[str, Any]) -> None:
    said = await warnings_of(holding(UNIQUE, **settings), of_family(model))
    (warning,) = [each for each in said if "of the schemas are" in each]
    assert warning.startswith(f"{NOT_ENFORCED}: tag: uniqueItems of tags.")
    assert ("maxLength of tags[]" in warning) is (model == "Gemma 4")


async def test_checked_keyword_of_free_calls_causes_no_warning() -> None:
    assert await warnings_of(holding(UNIQUE), of_family("Qwen3")) == []


async def test_keyword_that_is_not_checked_is_named_for_free_calls_too() -> None:
    (warning,) = await warnings_of(holding({"type": "string", "pattern": r"[\p{L}]"}), of_family("Qwen3"))
    assert warning.startswith(
        "the schema of the tool 'tag' is not checked completely: pattern of tags (Python has no \\p{L}"
    )


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_tool_that_nothing_fits_is_named_and_plays_on(choice: str) -> None:
    class Two(holding({"not": {}}, tool_choice=choice)):  # type: ignore[misc]  # a function created the class
        def bound_tools(self) -> list[Tool]:
            return [*super().bound_tools(), *Putting().bound_tools()[1:]]

    (warning,) = await warnings_of(Two, of_family("Qwen3"))
    assert warning == (
        "no call of the tool 'tag' passes its check: no object fits its schema, since no value fits its argument "
        "'tags'. Correct its schema. The tool is left out of required and strict calls."
    )
