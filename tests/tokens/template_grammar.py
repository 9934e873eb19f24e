"""Chat templates and conversations, generated from a grammar of the constructs in public templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from runner.messages import Message

__all__ = ["Written", "conversations", "templates", "written"]

TEXTS = ("", " ", "\n", " \n", "a", " a", "a ", "a\n", "\n\na", "A.", "b", "ab", "</think>", "<think>a", "0", "None")
"""Contents: nothing, white space, words with white space at either end, and texts that templates search for."""

LITERALS = ("A", "\n", " ", ".", "\\n\\n", "</think>", "<think>\\n", "x: ", "")
STRIPPED = ("", "'\\n'", "' '", "'.'", "'a'")
OWN = ("A", ".", "\n", " ", "a", "")


def _literal(draw: st.DrawFn) -> str:
    return "{{ '" + draw(st.sampled_from(LITERALS)) + "' }}"


# --- expressions


@st.composite
def text_of(draw: st.DrawFn, message: str = "m") -> str:
    """Generate an expression for the content of a message, mostly the unchanged content."""
    content = draw(st.sampled_from([f"{message}.content", f"{message}['content']"]))
    arguments = draw(st.sampled_from(STRIPPED))
    literal = draw(st.sampled_from(LITERALS))
    return draw(
        st.sampled_from(
            [
                content,
                content,
                content,
                f"{content} | trim",
                f"{content}.{draw(st.sampled_from(['strip', 'rstrip', 'lstrip']))}({arguments})",
                f"({content} or '')",
                f"{content} | default('', true)",
                f"{content} | default('{literal}', true)",
                f"({content} + '{literal}').strip({arguments})",
                f"('{literal}' ~ {content}) | trim",
                f"({content} ~ '{literal}').lstrip({arguments})",
                f"{content}.split('</think>')[-1].lstrip('\\n')",
                f"{content}.split('</think>')[0]",
                f"{content} | replace('{literal or 'a'}', 'B')",
                f"{content} | string",
                f"{content} | tojson",
                f"{content} | upper",
                f"{content}[:-1]",
                f"{content}[1:]",
                f"'%s.' % {content}",
                f"shown({content})",
                f"({content} if {content} else '{literal}')",
                f"[{content}, '{literal}'] | join",
            ]
        )
    )


@st.composite
def said(draw: st.DrawFn, message: str) -> str:
    """Generate a condition on the content of a message."""
    content = f"{message}.content"
    literal = draw(st.sampled_from(OWN)).replace("\n", "\\n")
    return draw(
        st.sampled_from(
            [
                content,
                f"not {content}",
                f"{content} | trim",
                f"{content} == '{literal}'",
                f"{content} != '{literal}'",
                f"{content} | length > {draw(st.integers(0, 2))}",
                f"{content}.strip() | length == 0",
                f"{content}.endswith('{literal}')",
                f"{content}.startswith('{literal}')",
                f"{content}.rstrip().endswith('.')",
                f"'{literal or 'a'}' in {content}",
                f"{content} in ['', ' ', 'a']",
                f"{content} is none",
                f"{content} is string",
                f"{content} is defined and {content}",
                f"{content}[-1:] == '\\n'",
                f"{content}[0] == ' '",
                f"{content} > 'A'",
                f"{content}.isspace()",
                f"{content} is eq '{literal}'",
                f"{content} | default('', true) | length < 2",
                f"{content} | default('A', true) == 'A'",
                f"({content} or 'A') == 'A'",
                f"{content} | replace('a', '') == ''",
                f"({content} ~ '\\n').strip() == ''",
                f"{content}.split('</think>') | length > 1",
                f"{content} | first == 'a'",
                f"{content} | lower == 'a.'",
                f"{content} | tojson | length > 3",
                f"{content} | select | list | length > 1",
            ]
        )
    )


@st.composite
def kind(draw: st.DrawFn, message: str) -> str:
    """Generate a condition on the other fields of a message."""
    role = draw(st.sampled_from(["user", "assistant", "tool", "system"]))
    return draw(
        st.sampled_from(
            [
                f"{message}.role == '{role}'",
                f"{message}['role'] != '{role}'",
                f"{message}.tool_calls",
                f"{message}.tool_calls is defined",
                f"{message}.tool_calls is defined and {message}.tool_calls | length > 1",
                f"{message}.get('tool_calls')",
                f"'tool_calls' in {message}",
                f"{message}.tool_calls and {message}.tool_calls[0].function.arguments",
                f"{message}.tool_calls and {message}.tool_calls[-1].function.arguments | length == 0",
                f"{message}.tool_calls and {message}.tool_calls[0].function.arguments.a is defined",
                f"{message}.reasoning_content is defined",
                f"{message}.reasoning_content",
                f"{message}.reasoning_content | default('') | trim",
                f"{message}.name is defined",
                f"{message}.role == 'assistant' and {draw(said(message))}",
                f"{message}.role == 'assistant' and not {message}.content",
            ]
        )
    )


@st.composite
def of_all(draw: st.DrawFn) -> str:
    """Generate a condition on the whole conversation."""
    count = draw(st.integers(1, 6))
    index = draw(st.sampled_from(["0", "-1", "-2", "-3"]))
    return draw(
        st.one_of(
            st.sampled_from(
                [
                    f"messages | length > {count}",
                    f"messages | length % 2 == {count % 2}",
                    "messages[0].role == 'system'",
                    "ns.flag",
                    "not ns.flag",
                    f"ns.count > {count}",
                    "ns.text",
                    "ns.text | trim",
                    "tools",
                    "messages | selectattr('role', 'equalto', 'tool') | list",
                    "(messages | map(attribute='role') | list)[-2] == 'user'",
                    "messages[::-1][1].content",
                    "messages[1:] | length > 2",
                ]
            ),
            said(f"messages[{index}]"),
            kind(f"messages[{index}]"),
        )
    )


@st.composite
def of_loop(draw: st.DrawFn) -> str:
    """Generate a condition on the position of a loop over the messages."""
    beside = draw(st.sampled_from(["previtem", "nextitem"]))
    return draw(
        st.one_of(
            st.sampled_from(
                [
                    "loop.first",
                    "loop.last",
                    "not loop.last",
                    f"loop.index0 > {draw(st.integers(0, 3))}",
                    "loop.index % 2",
                    "loop.revindex == 2",
                    "loop.revindex0 < 2",
                    f"loop.{beside} is defined",
                    "loop.index0 == ns.count",
                    "loop.index0 > ns.last",
                    "loop.length > 3",
                    "(m.role == 'user') != (loop.index0 % 2 == 0)",
                    f"loop.{beside} and loop.{beside}.role == 'tool'",
                    f"loop.{beside} is defined and loop.{beside}.role == m.role",
                    f"loop.{beside} and not loop.{beside}.content",
                ]
            ),
            of_all(),
        )
    )


@st.composite
def condition(draw: st.DrawFn) -> str:
    """Generate a condition within the loop over the messages."""
    one = draw(st.one_of(said("m"), said("m"), kind("m"), kind("m"), of_loop()))
    if draw(st.integers(0, 3)):
        return one
    sign = draw(st.sampled_from(["and", "or", "and not"]))
    return f"({one}) {sign} ({draw(st.one_of(said('m'), kind('m'), of_loop()))})"


# --- statements


@st.composite
def value(draw: st.DrawFn) -> str:
    """Generate the kept part of a message."""
    return draw(
        st.one_of(
            condition().map(lambda test: f"({test})"),
            text_of(),
            st.sampled_from(["m.role", "loop.index0", "m.content | length", "ns.count + 1", "true", "''"]),
        )
    )


@st.composite
def statement(draw: st.DrawFn, depth: int = 2, *, asking: bool = False) -> str:
    """Generate a statement for a message or, with `asking`, for the text before the generation prompt."""
    tests = of_all() if asking else condition()
    choice = draw(st.integers(0, 9))
    inner = statement(depth=depth - 1, asking=asking) if depth else st.builds(lambda: "{{ 'A' }}")
    if choice <= 1 or (choice >= 5 and not depth):
        return _literal(draw)
    if choice == 2:
        return "{{ '" + draw(st.sampled_from(LITERALS)) + "' if " + draw(tests) + " }}"
    if choice == 3:
        name = draw(st.sampled_from(["flag", "count", "text", "last"]))
        kept = draw(tests) if asking else draw(value())
        if name in ("count", "last"):
            kept = (
                draw(st.sampled_from(["ns.count + 1", "1"]))
                if asking
                else draw(st.sampled_from(["loop.index0", "ns.count + 1", "m.content | length"]))
            )
        return f"{{% set ns.{name} = {kept} %}}"
    if choice == 4:
        index = draw(st.sampled_from(["-1", "-2", "0"]))
        return "{{ " + draw(text_of(f"messages[{index}]" if asking else "m")) + " }}"
    if choice <= 6:
        other = f"{{% else %}}{draw(inner)}" if draw(st.booleans()) else ""
        return f"{{% if {draw(tests)} %}}{draw(inner)}{other}{{% endif %}}"
    if choice == 7:
        ending = draw(st.sampled_from(["", " | trim", ".strip()"]))
        return f"{{% set kept %}}{draw(inner)}{{% endset %}}{{{{ kept{ending} }}}}"
    if choice == 8 and not asking:
        return (
            "{% for call in m.tool_calls or [] %}{{ call.function.name }}"
            f"{{{{ call.function.arguments | tojson }}}}{draw(inner)}{{% endfor %}}"
        )
    changed = draw(st.sampled_from(["trim", "lower", "replace('A', 'B')"]))
    return f"{{% filter {changed} %}}{draw(inner)}{{% endfilter %}}"


def _refusal(test: str) -> str:
    return "{% if " + test + " %}{{ raise_exception('no') }}{% endif %}"


UNANSWERED = "messages[-1].tool_calls"
"""Condition on a conversation that ends with calls. Templates of Mistral and Nemotron Nano 2 refuse such a
conversation.
"""

CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}",
    "{% if m.tool_calls %}{% for call in m.tool_calls %}\n{{ call.function | tojson }}{% endfor %}{% endif %}",
    "{% if m.tool_calls is defined %}{% for call in m.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}"
    "{% if not loop.last %},{% endif %}{% endfor %}){% endfor %}{% endif %}",
)
THOUGHTS = (
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n{% endif %}",
    "{% if m.reasoning_content is defined %}<think>{{ m.reasoning_content | trim }}</think>{% endif %}",
    "{% if loop.last %}{{ m.reasoning_content }}{% endif %}",
)
LOOPS = ("messages", "messages", "messages", "messages[1:]", "msgs")

OPENINGS = (*["<|im_start|>"] * 4, "", "### ", "<|endoftext|>")
"""Marks before the role of a message."""
CLOSES = (
    *("<|im_end|>\n", "<|im_end|>", "\n<|im_end|>\n") * 2,
    "{% if m.role == 'assistant' %}<|im_end|>{% endif %}\n",
    "{% if not loop.last %}<|im_end|>{% endif %}\n",
    "{% if m.role == 'user' %}<|endoftext|>{% else %}<|im_end|>{% endif %}",
)
"""Ends of a message."""


@st.composite
def templates(draw: st.DrawFn) -> str:
    """Generate a chat template."""

    def sometimes(what: st.SearchStrategy[str]) -> str:
        return draw(what) if draw(st.integers(0, 2)) == 0 else ""

    looped = draw(st.sampled_from(LOOPS))
    head = "{% set ns = namespace(flag=false, count=0, text='', last=-1) %}"
    head += (
        "{% macro shown(text) %}"
        + draw(st.sampled_from(["{{ text }}", "{{ text | trim }}", "{% if text %}{{ text }}{% else %}-{% endif %}"]))
        + "{% endmacro %}"
    )
    if looped == "msgs":
        head += draw(
            st.sampled_from(
                [
                    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% set msgs = messages[1:] %}"
                    "{% else %}{% set msgs = messages %}{% endif %}",
                    "{% set msgs = messages | rejectattr('role', 'equalto', 'system') | list %}",
                    "{% set msgs = messages %}",
                ]
            )
        )
    if draw(st.integers(0, 3)) == 0:
        test = draw(kind("m"))
        head += "{% for m in messages[::-1] %}{% if " + test + " and not ns.flag %}"
        head += "{% set ns.flag = true %}{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    if draw(st.integers(0, 4)) == 0:
        head += "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    if draw(st.integers(0, 3)) == 0:
        head += _refusal(draw(st.one_of(st.just(UNANSWERED), of_all())))
    content = draw(text_of())
    body = sometimes(st.sampled_from(THOUGHTS)) + "{{ " + content + " }}"
    if draw(st.integers(0, 3)) == 0:
        body = "{% if " + draw(condition()) + " %}" + body + "{% else %}" + draw(statement(depth=1)) + "{% endif %}"
    if draw(st.integers(0, 4)):
        body += draw(st.sampled_from(CALLS))
    opens, close = draw(st.sampled_from(OPENINGS)), draw(st.sampled_from(CLOSES))
    parts = [sometimes(statement()) + body + sometimes(statement()), close]
    if draw(st.integers(0, 9)) == 0:  # words after the close
        parts.reverse()
    turn = opens + "{{ m.role }}\n" + "".join(parts) + sometimes(statement())
    if draw(st.integers(0, 5)) == 0:
        turn = "{% if " + draw(condition()) + " %}" + turn + "{% endif %}"
    if draw(st.integers(0, 7)) == 0:
        turn = "{% set whole %}" + turn + "{% endset %}{{ whole | trim }}"
    if draw(st.integers(0, 7)) == 0:
        turn = "{% if " + draw(condition()) + " %}{% continue %}{% endif %}" + turn
    if draw(st.integers(0, 7)) == 0:
        turn = _refusal(draw(condition())) + turn
    asks = sometimes(statement(asking=True))
    prompt = opens + "assistant\n" + sometimes(statement(asking=True))
    return (
        f"{head}{{% for m in {looped} %}}{turn}{{% endfor %}}{asks}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


# --- conversations


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Generate a conversation with answered turns, in which any message may be empty or white space."""
    texts = st.sampled_from(TEXTS)
    messages: list[Any] = []
    if draw(st.integers(0, 2)) == 0:
        messages.append({"role": "system", "content": draw(texts)})
    messages.append({"role": "user", "content": draw(texts)})
    for number in range(draw(st.integers(1, 4))):
        turn: dict[str, Any] = {"role": "assistant", "content": draw(texts)}
        if draw(st.integers(0, 3)) == 0:
            turn["reasoning_content"] = draw(st.sampled_from([text for text in TEXTS if text]))
        calls = draw(st.sampled_from([0, 0, 1, 1, 2]))
        if calls:
            turn["tool_calls"] = [_call(f"call{number}{index:04}", draw(_ARGUMENTS)) for index in range(calls)]
        messages.append(turn)
        for call in turn.get("tool_calls", ()):
            result = {"role": "tool", "content": draw(texts), "tool_call_id": call["id"]}
            messages.append(result | ({"name": "add"} if draw(st.booleans()) else {}))
        if not calls or draw(st.integers(0, 3)) == 0:
            messages.append({"role": "user", "content": draw(texts)})
    return messages


def _call(call_id: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


_ARGUMENTS: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{}, {"a": 1}, {"a": "x"}, {"a": ""}, {"a": " "}, {"a": 1, "b": "y"}, {"b": [1]}]
)


ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens that some vocabularies have as one id each."""


@dataclass(frozen=True)
class Written:
    """A template, and conversations that it renders."""

    template: str
    conversations: list[list[Message]]
    added: tuple[str, ...] = ()
    """Tokens of the vocabulary besides ChatML's control tokens."""


@st.composite
def written(draw: st.DrawFn) -> Written:
    return Written(
        draw(templates()),
        draw(st.lists(conversations(), min_size=1, max_size=3)),
        draw(st.sampled_from([(), (), ADDED[:2], ADDED])),
    )
