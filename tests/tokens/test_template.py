"""Chat templates: loading, rendering, and refusals by name."""

import json
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import runner
from runner.errors import BadTemplate
from runner.tokens.template import ChatTemplate, Renderer, TemplateRaised
from runner.tokens.tool_support import missing_tool_property, require_tools

INTEGER = {"type": "integer"}
USER = {"role": "user", "content": "What is 17 + 25?"}
SYSTEM = {"role": "system", "content": "Use the tools."}


def function(name: str, description: str = "", returns: Any = None, **properties: Any) -> dict[str, Any]:
    required = [key for key, value in properties.items() if "default" not in value]
    parameters = {"type": "object", "properties": properties, "required": required}
    schema: dict[str, Any] = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": schema | ({"return": returns} if returns else {})}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"id-{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def says(content: str, *calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": content} | ({"tool_calls": list(calls)} if calls else {})


def renderer(text: str, **variables: str) -> Renderer:
    return ChatTemplate(text, name="inline", variables=variables).renderer()


ADD = function("add", "Add two numbers", INTEGER, a=INTEGER, b=INTEGER)


@pytest.fixture(scope="session")
def pythonic() -> Renderer:
    return ChatTemplate.load("pythonic").renderer()


@pytest.fixture(scope="session")
def hermes() -> Renderer:
    return ChatTemplate.load("hermes").renderer()


def test_pythonic_puts_one_signature_a_line_after_the_system_prompt(pythonic: Renderer) -> None:
    text = pythonic.render([SYSTEM, USER], tools=[ADD, function("now", "The time,\n  in UTC")])
    assert text == (
        "<|im_start|>system\nUse the tools.\n"
        "add(a: int, b: int) -> int  # Add two numbers\n"
        "now()  # The time, in UTC<|im_end|>\n"
        "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_pythonic_makes_a_system_turn_for_tools_where_there_is_none(pythonic: Renderer) -> None:
    text = pythonic.render([USER], tools=[ADD], generation_prompt=False)
    assert text == (
        "<|im_start|>system\nadd(a: int, b: int) -> int  # Add two numbers<|im_end|>\n"
        "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"
    )


@pytest.mark.parametrize(
    ("schema", "annotation"),
    [
        ({"type": "number"}, "float"),
        ({"type": "string", "enum": ["up", "down"]}, "Literal['up', 'down']"),
        ({"const": 3}, "Literal[3]"),
        ({"type": "array"}, "list"),
        ({"type": "array", "items": {"type": "boolean"}}, "list[bool]"),
        ({"type": ["string", "null"]}, "str | None"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "int | None"),
        ({"type": "object", "properties": {"x": INTEGER}}, "{'x': int}"),
        ({"type": "object", "additionalProperties": INTEGER}, "dict[str, int]"),
        ({"type": "object"}, "dict"),
        ({}, "Any"),
        ({"type": "string", "default": "it's"}, 'str = "it\'s"'),
        ({"$ref": "#/$defs/Elsewhere"}, "Elsewhere"),
    ],
)
def test_pythonic_signature_types_come_from_the_json_schema(
    pythonic: Renderer, schema: dict[str, Any], annotation: str
) -> None:
    text = pythonic.render([USER], tools=[function("f", value=schema)])
    assert f"\nf(value: {annotation})<|im_end|>" in text


def test_pythonic_signature_follows_references_without_recursion(pythonic: Renderer) -> None:
    tool = function("f", node={"$ref": "#/$defs/Node"})
    node = {"type": "object", "properties": {"value": INTEGER, "next": {"$ref": "#/$defs/Node"}}}
    tool["function"]["parameters"]["$defs"] = {"Node": node}
    assert "f(node: {'value': int, 'next': {'value': int, 'next': " in pythonic.render([USER], tools=[tool])


def test_pythonic_shows_descriptions_of_parameters_and_optional_ones(pythonic: Renderer) -> None:
    tool = function("f", "Do it", a={**INTEGER, "description": "how\noften"}, b=INTEGER)
    tool["function"]["parameters"]["required"] = ["a"]
    assert "f(a: int, b: int = ...)  # Do it; a: how often<|im_end|>" in pythonic.render([USER], tools=[tool])


def test_pythonic_calls_are_python_literals(pythonic: Renderer) -> None:
    turn = says("", call("f", flag=False, nothing=None, text='it\'s\n"so"', deep={"k": [1e-7, True]}), call("g"))
    text = pythonic.render([USER, turn], generation_prompt=False)
    assert text.endswith(
        "<|im_start|>assistant\n"
        """[f(flag=False, nothing=None, text='it\\'s\\n"so"', deep={'k': [1e-07, True]}), g()]<|im_end|>\n"""
    )


def test_pythonic_puts_words_on_a_line_before_the_call(pythonic: Renderer) -> None:
    for words in ("I add.", "I add.\n"):
        text = pythonic.render([USER, says(words, call("add", a=1, b=2))], generation_prompt=False)
        assert text.endswith("<|im_start|>assistant\nI add.\n[add(a=1, b=2)]<|im_end|>\n")


def test_hermes_is_the_form_that_qwen_and_hermes_models_learnt(hermes: Renderer) -> None:
    turns = [
        SYSTEM,
        USER,
        says("I add.", call("add", a=17, b=25), call("add", a=1, b=2)),
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "3"},
    ]
    tool = function("add", "Add two numbers", a=INTEGER, b=INTEGER)
    assert hermes.render(turns, tools=[tool]) == (
        "<|im_start|>system\nUse the tools.\n\n# Tools\n\n"
        "You may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
        '{"type": "function", "function": {"name": "add", "description": "Add two numbers", "parameters": '
        '{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, '
        '"required": ["a", "b"]}}}\n</tools>\n\n'
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
        "<args-json-object>}\n</tool_call><|im_end|>\n"
        "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n"
        '<|im_start|>assistant\nI add.\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_bundled_templates_add_no_system_prompt_of_their_own(bundled: Renderer) -> None:
    assert bundled.render([USER]) == "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"


def test_bundled_templates_keep_content_verbatim(bundled: Renderer) -> None:
    content = " \n <b>&amp;</b> {{ x }} {% if %} é\u2028\n "
    assert bundled.render([{"role": "user", "content": content}], generation_prompt=False) == (
        f"<|im_start|>user\n{content}<|im_end|>\n"
    )


def test_bundled_templates_carry_tools(bundled: Renderer) -> None:
    assert missing_tool_property(bundled) is None


def test_bundled_templates_render_a_turn_alike_whatever_follows(bundled: Renderer) -> None:
    turns: list[dict[str, Any]] = [SYSTEM, USER, says("", call("add", a=1, b=2)), {"role": "tool", "content": "3"}]
    turns += [says("It is 3.\n"), USER]
    whole = bundled.render(turns, tools=[ADD])
    for end in (3, 5):
        assert whole.startswith(bundled.render(turns[:end], tools=[ADD], generation_prompt=False))


def test_templates_lie_inside_the_package_in_a_wheel(tmp_path: Path) -> None:
    package = Path(runner.__file__).parent
    shutil.copytree(package, tmp_path / "runner", ignore=shutil.ignore_patterns("__pycache__", "templates"))
    shutil.copytree(package.parent / "templates", tmp_path / "runner" / "templates")
    program = "import runner.tokens.template as t; print(t.__file__, t.ChatTemplate.load('hermes').name)"
    shown = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert shown.stdout.split() == [str(tmp_path / "runner" / "tokens" / "template.py"), "hermes"]


def test_a_file_is_loaded_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.jinja"
    path.write_text("{{ bos_token }}é")
    assert ChatTemplate.load(str(path)).with_variables({"bos_token": "<s>"}).renderer().render([USER]) == "<s>é"


def test_an_unknown_template_is_refused_with_the_bundled_names() -> None:
    with pytest.raises(
        BadTemplate, match=r"'pythonik' cannot be read .* \(hermes, mistral_nemo, pythonic\) or the path"
    ):
        ChatTemplate.load("pythonik")


def test_a_folder_or_binary_file_is_refused_as_a_template(tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match="cannot be read"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "x.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(BadTemplate, match="cannot be read"):
        ChatTemplate.load(tmp_path / "x.jinja")


def test_a_syntax_error_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.jinja"
    path.write_text("fine\n{% if %}")
    with pytest.raises(BadTemplate, match=r"broken\.jinja' is not valid jinja2, line 2"):
        ChatTemplate.load(path)


def test_fingerprint_names_text_and_variables() -> None:
    template = ChatTemplate("a", name="one")
    assert template.fingerprint == ChatTemplate("a", name="another").fingerprint
    assert template.fingerprint != ChatTemplate("b", name="one").fingerprint
    assert template.fingerprint != template.with_variables({"bos_token": "<s>"}).fingerprint


def test_template_reads_the_given_time() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y %H:%M') }}", name="dated")
    assert template.renderer(now=datetime(2025, 12, 31, 23, 59)).render([USER]) == "31 Dec 2025 23:59"


def test_options_reach_the_template_and_win_over_variables() -> None:
    template = ChatTemplate("{{ enable_thinking }} {{ bos_token }}", name="x", variables={"bos_token": "<s>"})
    options = {"enable_thinking": False, "bos_token": "B"}
    assert template.renderer(options=options).render([USER]) == "False B"


def test_empty_tools_are_none_to_a_template() -> None:
    assert renderer("{{ tools is none }}").render([USER], tools=[]) == "True"


def test_template_has_the_tags_and_filters_of_transformers() -> None:
    text = (
        "{%- for message in messages %}\n    {% generation %}{{ message | tojson }}{% endgeneration %}\n\n"
        "{% if loop.index == 1 %}{% break %}{% endif %}{% endfor %}{{ {'b': 'é<', 'a': 1} | tojson(indent=1) }}"
    )
    expected = '{"role": "user", "content": "é<&\'"}\n{\n "b": "é<",\n "a": 1\n}'
    assert renderer(text).render([{"role": "user", "content": "é<&'"}, USER]).strip() == expected


def test_missing_keys_are_undefined_and_dict_methods_stay_methods() -> None:
    message = {"role": "user", "content": "x", "items": "mine"}
    assert renderer("{{ messages[0].nothing is defined }}").render([message]) == "False"
    assert renderer("{% for k, v in messages[0].items() %}{{ k }} {% endfor %}").render([message]) == (
        "role content items "
    )


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages[5].content.x }}",
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__[1].x }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_raises_is_named(text: str) -> None:
    with pytest.raises(TemplateRaised, match="template 'inline'"):
        renderer(text).render([USER])


TEXT_ARGUMENTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for t in m.tool_calls or [] %}"
    "{{ t.function.name + '=' + t.function.arguments }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)


def test_arguments_become_text_for_a_template_that_wants_text() -> None:
    inline = renderer(TEXT_ARGUMENTS)
    assert inline.text_arguments
    turn = says("", call("add", a=1, b=[True, "é"]))
    assert inline.render([USER, turn]).endswith('[assistant]add={"a":1,"b":[true,"é"]}')
    assert turn["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": [True, "é"]}
    assert missing_tool_property(inline) is None


@pytest.mark.parametrize(
    ("removed", "missing"),
    [
        ("{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", "tool_definitions"),
        ("{{ t.function.name + '=' + t.function.arguments }}", "tool_calls"),
        ("{{ m.content }}", "tool_results"),
    ],
)
def test_a_template_without_tools_is_refused_by_property_with_the_fix(removed: str, missing: str) -> None:
    inline = renderer(TEXT_ARGUMENTS.replace(removed, ""))
    with pytest.raises(BadTemplate, match=rf"\({missing}\): .*--template pythonic, --template hermes"):
        require_tools(inline)


def test_the_demo_models_own_template_carries_no_tools(demo_model_folder: Path) -> None:
    own = ChatTemplate.load(demo_model_folder / "chat_template.jinja").renderer()
    assert missing_tool_property(own) == "tool_definitions"


ONE_CALL = "{% for m in messages %}{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"


@pytest.mark.parametrize("text_arguments", [True, False])
@pytest.mark.parametrize("null_content", [True, False])
def test_a_call_is_given_in_the_form_in_which_the_template_shows_it(text_arguments: bool, null_content: bool) -> None:
    content = "m.content is none" if null_content else "m.content is string"
    arguments = "c.function.arguments if c.function.arguments is string else ''"
    if not text_arguments:
        arguments = "(c.function.arguments | tojson) if c.function.arguments is mapping else ''"
    shown = renderer(ONE_CALL.replace("CALL", "{{ (" + arguments + ") if " + content + " else '' }}"))
    assert (shown.text_arguments, shown.null_content) == (text_arguments, null_content)
    assert "17" in shown.render([USER, says("", call("add", a=17))])


def test_a_template_that_shows_no_call_is_given_it_as_it_is() -> None:
    hidden = renderer("{% for m in messages %}{{ m.content is none }}{% endfor %}")
    assert not hidden.text_arguments
    assert not hidden.null_content


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(value=_JSON)
def test_tojson_writes_what_the_standard_library_writes(value: Any) -> None:
    text = renderer("{{ messages[0].content }}{{ messages[0].value | tojson }}").render([USER | {"value": value}])
    assert text == USER["content"] + json.dumps(value, ensure_ascii=False)


def test_tojson_of_a_value_that_is_not_json_is_a_template_error() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in (endless, {1, 2}, object()):
        with pytest.raises(TemplateRaised):
            renderer("{{ messages[0].value | tojson }}").render([USER | {"value": value}])
