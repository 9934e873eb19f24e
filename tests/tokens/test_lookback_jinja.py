"""Effects of Jinja's loops, macros, generators and filters on a proof that a template does not look back."""

from __future__ import annotations

from typing import Any

import pytest

from runner.messages import Message
from runner.tokens.bridging.locality import Locality
from runner.tokens.bridging.prompt_renderer import PromptRenderer
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.lookback.proof import Proofs
from runner.tokens.template import ChatTemplate
from runner.tokens.turn_shape import AnsweredTurn, Arrival, TurnShape
from tests.tokens.bridging import ADD, chatml

# a plain question is also rendered, and must not raise an error
LATE = "{{% if messages | length > 2 %}}{}{{% endif %}}"

EXPRESSIONS = {
    "else of a filtered loop": "{% for m in messages if m.role == 'tool' %}{% else %}(no tool){% endfor %}",
    "else of what is cut": "{% for m in messages[-2:] if m.role == 'z' %}{% else %}{{ messages | length }}{% endfor %}",
    "a filter that a pass changes": "{% set ns = namespace(open=true, last='') %}{% for m in messages if ns.open %}"
    "{% if m.role == 'tool' %}{% set ns.open = false %}{% endif %}{% set ns.last = m.role %}{% endfor %}{{ ns.last }}",
    "a filter that counts": "{% set ns = namespace(n=0) %}{% macro f(m) %}{% set ns.n = ns.n + 1 %}y{% endmacro %}"
    "{% for m in messages if f(m) %}{% endfor %}{{ ns.n }}",
    "joiner": "{% set j = joiner('X') %}{% for m in messages %}{{ j() }}{% endfor %}",
    "cycler": "{% set c = cycler('a', 'b', 'c') %}{% for m in messages %}{% set x = c.next() %}{% endfor %}"
    "{{ c.current }}",
    "kwargs": "{% macro f() %}{% for k, v in kwargs | items %}{{ v }}{% endfor %}{% endmacro %}"
    "{{ f(n=messages | length) }}",
    "self": "{% if self is defined %}{{ messages | length }}{% endif %}",
    "a method by subscript": "{{ (messages | length) ~ ({'x': messages[0]}['keys']() | list | length) }}",
    "a macro called raise_exception": "{% macro raise_exception(x) %}Z{% endmacro %}"
    "{{ raise_exception('a') if messages | length > 6 }}",
    "one of two macros": "{% set ns = namespace(n=0) %}{% macro inc() %}{% set ns.n = 1 %}{% endmacro %}"
    "{% macro noop() %}{% endmacro %}{% set f = inc if messages | length > 6 else noop %}{% set _ = f() %}{{ ns.n }}",
    "an alias of a namespace": "{% set ns = namespace(c=0) %}{% macro f(x) %}{% set n = ns %}{% set n.c = n.c + 1 %}"
    "{% if x %}{{ f(x[1:]) }}{% endif %}{% endmacro %}{% set _ = f(messages) %}{{ ns.c }}",
    "a chain that ends early": "{% set ns = namespace(n=0) %}{% macro f() %}{% set ns.n = 1 %}9{% endmacro %}"
    "{% set _ = (6 < messages | length != f()) %}{{ ns.n }}",
    "a generator is true": "{% set g = messages[-2:] | selectattr('role', 'eq', 'z') %}{{ messages | length if g }}",
    "a generator is read once": "{% set g = messages[-2:] | map(attribute='role') %}{{ g | list | length }}"
    "{{ messages | length if not (g | list) }}",
    "tojson by place": "{{ messages[-1].content | tojson(messages | length > 6) }}",
    "replace by count": "{{ messages[-1].content | replace('a', 'b', count=messages | length) }}",
    "trim by characters": "{{ messages[-1].content | trim(chars=(messages | length) | string) }}",
    "join by name": "{{ [messages[-1].content, 'x'] | join(d=(messages | length) | string) }}",
    "default by names": "{{ nothing | default(boolean=true, default_value=messages | length) }}",
    "default by a flag": "{{ '' | default('x', messages | length > 6) }}",
    "dictsort": "{% set d = {'b': messages | length, 'a': 1} %}{{ (d | dictsort | last)[1] }}",
    "the first piece": "{{ ((messages | length) | string ~ messages[-2].content ~ '|x').split('|')[0][0] }}",
    "the number of pieces": "{{ ((messages | map(attribute='role') | join('|')) ~ messages[-2].content ~ '|x')"
    ".split('|') | length }}",
    "an attribute of a list": "{% if messages.foo is defined %}x{% else %}{{ messages | length }}{% endif %}",
    "an attribute of a namespace": "{% set ns = namespace(flag=messages | length > 6) %}"
    "{{ 'Y' if [ns] | selectattr('flag') | list }}",
    "an attribute of a macro": "{% macro f() %}{% endmacro %}{{ 'A' if f.nope is defined else messages | length }}",
    "the only one of a cut list": "{% for m in messages[:-2] %}{{ 'X' if loop.first and loop.last }}{% endfor %}",
    "the only one, backwards": "{% for m in messages[:-2][::-1] %}{{ 'X' if loop.last and loop.first }}{% endfor %}",
    "no arguments": "{{ '' if (messages[-3].tool_calls or [{}])[0].function.arguments else messages | length }}",
    "lower and trim": "{{ messages[-1].content | trim if messages | length > 5 else messages[-1].content | lower }}",
    "a branch that never runs": "{% if messages | length > 900 %}{{ messages[-2].content | replace }}{% endif %}",
    "no arguments of a filter": "{{ messages | selectattr() | list if messages | length > 900 }}",
}


def pasts() -> list[list[Message]]:
    call: Any = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {}}}
    calls: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
    answered: Message = {"role": "tool", "content": "3", "tool_call_id": "call00000", "name": "add"}
    talk: list[Message] = [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More aaaa."}]
    return [*(talk * count for count in (0, 1, 2, 4, 8)), [calls, answered], [*talk, calls, answered, *talk]]


@pytest.mark.parametrize("said", ["and?", "53 aaaaaaaaaa é 53"])
@pytest.mark.parametrize("late", [False, True], ids=["always", "late"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_tail_without_the_past_is_that_with_it(name: str, late: bool, said: str) -> None:
    expression = LATE.format(EXPRESSIONS[name]) if late else EXPRESSIONS[name]
    text = chatml().replace("{% if add_generation_prompt %}", f"{expression}{{% if add_generation_prompt %}}")
    locality = Locality(PromptRenderer(ChatTemplate(text, name=name).renderer()))
    question: Message = {"role": "user", "content": "q"}
    new: list[Message] = [{"role": "user", "content": said}]
    for past in pasts():
        history: list[Message] = [question, *past, {"role": "assistant", "content": "The end"}]
        try:
            tail = locality.tail(AnsweredTurn(history, new, [ADD], 2))
            whole = locality.whole_tail(AnsweredTurn(history, new, [ADD]))
        except Unbridgeable:
            continue
        assert tail.text == whole.text


WORDS = {
    "the first piece": ("{{ m.content }}{{ (m.content + '|x').split('|')[0] | length }}", True),
    "the pieces": ("{{ m.content }}{{ (m.content + '|x').split('|') | length }}", True),
    "across the end": ("{{ (m.content + '>>') | replace('->>', '!') }}", True),
    "within the words": ("{{ m.content | replace('--', '+') }}", False),
}


@pytest.mark.parametrize("name", WORDS)
def test_words_that_change_what_follows_them_are_not_taken_for_others(name: str) -> None:
    body, matter = WORDS[name]
    renderer = ChatTemplate(chatml(body=body), name=name).renderer()
    shape = TurnShape(False, calls=0, reasoning=False, text=True, new=(Arrival("user", False, False),), tools=b"")
    assert Proofs(renderer).words_matter(shape, []) is matter


def test_a_refusal_under_two_conditions_is_one() -> None:
    inner = "{% if 'q' in messages[0].content %}{{ raise_exception('n') }}{% endif %}"
    text = chatml() + f"{{% if messages | length > 6 %}}{inner}{{% endif %}}"
    shape = TurnShape(False, calls=0, reasoning=False, text=True, new=(Arrival("user", False, False),), tools=b"")
    assert Proofs(ChatTemplate(text, name="two").renderer()).past(shape, []) == "refuses"
