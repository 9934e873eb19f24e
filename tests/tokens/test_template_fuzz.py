"""Every bridge is exact, with templates that test for empty and blank contents, and with generated templates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import Phase, given, settings

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.bridging.refusal import Unbridgeable
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.turn_shape import AnsweredTurn
from tests import sweeps
from tests.tokens.bridging import MORE, QUESTION, chatml, result, says
from tests.tokens.template_fuzz import ANY_SIZE, check_bridges, look_at_new_templates
from tests.tokens.template_grammar import Written, written

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5)]

WORDS = ("", " ", "\n", " \n ", "a", " a", "a ", "a\n", "\n\na.", "</think>")
CALLS = (
    "{% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}"
    "{% set ns.last = call.function.arguments %}{% endfor %}"
)
KEEPS = "{{ m.content }}" + CALLS


def _asking(test: str, keep: str = "", *, body: str = KEEPS) -> str:
    """Return a template that keeps a part of every message, and has another generation prompt if a test of it holds."""
    kept = f"{{% if m.role == 'assistant' %}}{{% set ns.e = {keep or 'm.content'} %}}{{% endif %}}"
    text = chatml(body=body + kept).replace("assistant\\n' }}", f"assistant\\n' }}}}{{{{ 'A' if {test} }}}}")
    return "{% set ns = namespace(e='', last='') %}" + text


def _after_turns(text: str) -> str:
    """Return a template that writes `text` after every turn."""
    return "{% set ns = namespace(last='') %}" + chatml(body=KEEPS).replace(
        "{% endfor %}{% if add", text + "{% endfor %}{% if add"
    )


ASKING = {
    "not": _asking("not ns.e"),
    "not, where it is kept": _asking("ns.e", "not m.content"),
    "equal to nothing": _asking("ns.e == ''"),
    "equal to a blank": _asking("ns.e == ' '"),
    "length": _asking("ns.e | length == 0"),
    "count of one": _asking("ns.e | count < 2"),
    "trimmed": _asking("not ns.e | trim"),
    "stripped": _asking("ns.e.strip() == ''"),
    "trimmed with more": _asking("(ns.e ~ '\\n') | trim == ''"),
    "default": _asking("ns.e | default('A', true) == 'A'"),
    "or": _asking("(ns.e or 'A') == 'A'"),
    "if": _asking("('B' if ns.e else 'A') == 'A'"),
    "in a list": _asking("ns.e in ['', ' ', none]"),
    "its last character": _asking("ns.e[-1:] == '\\n'"),
    "its first character": _asking("ns.e[0] is defined and ns.e[0] == ' '"),
    "its ending": _asking("ns.e.endswith('\\n')"),
    "its beginning": _asking("ns.e.startswith(' ')"),
    "white space": _asking("ns.e.isspace()"),
    "smaller": _asking("ns.e < 'A'"),
    "a test": _asking("ns.e is eq ''"),
    "none": _asking("ns.e is none or not ns.e"),
    "words": _asking("ns.e.split() | length == 0"),
    "pieces": _asking("ns.e.split('</think>') | length > 1"),
    "joined": _asking("[ns.e, ''] | join == ''"),
    "replaced": _asking("ns.e | replace('a', '') == ''"),
    "selected": _asking("[ns.e] | select | list | length == 0"),
    "in a macro": "{% macro mark(x) %}{{ 'A' if not x }}{% endmacro %}" + _asking("mark(ns.e)"),
    "of the message before": chatml(body=KEEPS.replace("{% set ns.last = call.function.arguments %}", "")).replace(
        "assistant\\n' }}", "assistant\\n' }}{{ 'A' if not messages[-2].content }}"
    ),
    "in a long past": chatml(body=KEEPS.replace("{% set ns.last = call.function.arguments %}", "")).replace(
        "assistant\\n' }}", "assistant\\n' }}{{ 'A' if not messages[-2].content and messages | length > 5 }}"
    ),
    "no arguments": _asking("not ns.last"),
    "number of arguments": _asking("ns.last | length == 1"),
    "an argument": _asking("ns.last.a is defined"),
    "the value of an argument": _asking("ns.last.a == ''"),
    "reasoning": _asking("ns.e | trim == ''", "(m.reasoning_content or '')"),
}
AFTER_TURNS = {
    "blank words": _after_turns("{{ 'A' if m.content | trim }}"),
    "no words": _after_turns("{{ 'A' if not m.content }}"),
    "words again": _after_turns("{{ m.content }}"),
    "trimmed words again": _after_turns("{{ m.content | trim }}"),
    "no arguments": _after_turns("{{ 'A' if m.tool_calls and not m.tool_calls[0].function.arguments }}"),
    "an argument of that type": _after_turns(
        "{{ 'A' if m.tool_calls and m.tool_calls[0].function.arguments.a is string }}"
    ),
}
PLAIN = KEEPS.replace("{% set ns.last = call.function.arguments %}", "")
CLOSING = {
    "strip": chatml(close="", body="{{ (m.content + '\\n\\n<|im_end|>\\n').strip() }}"),
    "lstrip": chatml(close="", body="{{ (m.content + '\\n\\n<|im_end|>\\n').lstrip() }}"),
    "trim": chatml(close="", body="{{ (m.content ~ ' .<|im_end|>') | trim }}"),
    "strip of a sign": chatml(close="", body="{{ (m.content + '..<|im_end|>\\n').strip('.') }}"),
    "filter block": chatml(close="", body="{% filter trim %}{{ m.content }}\n {{'<|im_end|>'}}{% endfilter %}"),
    "set block": chatml(close="", body="{% set x %}{{ m.content }}\n {{'<|im_end|>'}}{% endset %}{{ x.strip() }}"),
    "left out": chatml(close="", body="{% if m.content %}{{ m.content }}<|im_end|>\n{% endif %}"),
    "left out where blank": chatml(close="", body="{% if m.content | trim %}{{ m.content }}<|im_end|>\n{% endif %}"),
}


def _conversations(words: str) -> Iterator[list[Message]]:
    """Return conversations with these contents, short and long, with a thought and with calls of all kinds."""
    for past in ([], [says("a"), MORE, says(""), MORE]):
        for reasoning in ("", " ", "b"):
            yield [QUESTION, *past, says(words, reasoning=reasoning), MORE, says(words), {**MORE, "content": words}]
        for arguments in ({}, {"a": ""}, {"a": "x"}, {"a": 1, "b": "y"}):
            yield [QUESTION, *past, says(words, arguments), result("42"), says("", arguments), result(words)]
            yield [QUESTION, *past, says(words, arguments, {}), result(words), result("", 1)]


TEMPLATES = {
    f"{kind}: {name}": text
    for kind, texts in (("asking", ASKING), ("after", AFTER_TURNS), ("closing", CLOSING))
    for name, text in texts.items()
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_look_at_words_get_no_wrong_bridge(name: str) -> None:
    seen: Counter[str] = Counter()
    for words in WORDS:
        check_bridges(Written(TEMPLATES[name], list(_conversations(words))), seen)
    assert _exact(seen) > 20


AS_OFTEN = settings(
    max_examples=sweeps.times(1000, 100),
    deadline=None,
    suppress_health_check=ANY_SIZE,
)


@AS_OFTEN
@given(case=written())
def test_drawn_templates_and_conversations_get_no_wrong_bridge(case: Written) -> None:
    check_bridges(case)


FUZZED_MINUTES = 3.0
"""Processor time for more templates than a sweep has. Another `--sweep-seed` generates other templates."""


@pytest.mark.whole
def test_templates_of_three_minutes_get_no_wrong_bridge() -> None:
    seed = sweeps.random_of("templates").randrange(1 << 31)
    print(f"to repeat: python -m tests.tokens.template_fuzz {FUZZED_MINUTES} {seed}")
    seen = look_at_new_templates(FUZZED_MINUTES, seed)
    assert _exact(seen) > seen.total() / 6


APPEARS_AT_ONCE = (
    "{% for m in messages[1:] %}{% set whole %}{% if m.content == 'A' or loop.length > 3 %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{{ 'A' }}{% endif %}{% endset %}{{ whole | trim }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ 'A' if messages | length > 3 }}{% endif %}"
)
"""A template that writes no message until there are four, and then all of them."""


def test_messages_that_appear_later_all_at_once_get_no_wrong_bridge() -> None:
    conversation: list[Message] = [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a", "reasoning_content": " "},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": ""},
    ]
    check_bridges(Written(template=APPEARS_AT_ONCE, conversations=[conversation]))


AFTER_THE_STOP = (
    "{% for m in messages %}{% if loop.length > COUNT %}<|im_start|>{{ m.role }}\n.<|im_end|>\n{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that writes contents after the stop, and no message until there are more than COUNT."""


@pytest.mark.parametrize("count", range(7))
def test_words_after_the_stop_of_a_late_message_prevent_a_bridge(count: int) -> None:
    seen: Counter[str] = Counter()
    conversation = [QUESTION, *([says("words"), MORE] * 5)]
    check_bridges(Written(AFTER_THE_STOP.replace("COUNT", str(count)), [conversation]), seen)
    assert not _exact(seen)


@pytest.mark.whole
def test_many_of_the_drawn_conversations_get_a_bridge() -> None:
    # Otherwise the test above would hold for any template.
    seen: Counter[str] = Counter()

    @settings(
        max_examples=150, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=ANY_SIZE
    )
    @given(case=written())
    def look(case: Written) -> None:
        check_bridges(case, seen)

    look()
    assert _exact(seen) > seen.total() / 6


def _exact(seen: Counter[str]) -> int:
    return sum(count for what, count in seen.items() if what.startswith("exact"))


ONLY_ODD = (
    "{% if messages | length % 2 == 0 %}{{ raise_exception('not after a turn') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n.<|im_end|>\n{{ m.content.lstrip('a') }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that shows no turn alone, and writes the words of a message after its close."""


def test_the_close_of_the_next_message_is_not_taken_for_the_turns() -> None:
    check_bridges(Written(ONLY_ODD, [[QUESTION, says("words"), MORE]]))


WORDS_AFTER_THE_END = (
    "{% for m in messages[FIRST:] %}OPENS{{ m.role }}\n<|im_end|>\nCHANGES"
    "{% if SHOWN %}{{ WORDS }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}OPENSassistant\n{% endif %}"
)
"""A template whose words follow the stop. The next stop in the render belongs to the next message."""


SHOWN = (
    "true",
    "loop.index0 > 1",
    "m.role == 'assistant' or loop.index is even",
    "loop.index0 and (m.role == 'user') == (loop.index0 % 2 == 0)",
)
"""Conditions on which the template shows words. No system message may be first while its marks are learnt."""


@pytest.mark.parametrize(
    "changes", ["", "{% if loop.length > 3 %}A{% endif %}", "{{ loop.length }}", "{{ loop.revindex }}"]
)
def test_stop_of_the_next_message_is_not_taken_for_the_turns(changes: str) -> None:
    """This also holds if later messages change how a message is written, so that the beginning of a turn moves."""
    seen: Counter[str] = Counter()
    system: Message = {"role": "system", "content": "Be kind."}
    openings, contents = ("<|im_start|>", "", "### "), ("m.content", "m.content[1:]", "m.content[1:] ~ m.content")
    for shown, opens, first, words in product(SHOWN, openings, "01", contents):
        template = WORDS_AFTER_THE_END.replace("SHOWN", shown).replace("FIRST", first)
        template = template.replace("OPENS", opens).replace("WORDS", words).replace("CHANGES", changes)
        for past, said in product(([], [system]), ("words", "words <|im_end|>")):
            check_bridges(Written(template, [[*past, QUESTION, *([says(said), MORE] * 3)]]), seen)
    assert not _exact(seen)
    assert seen["marker_in_tail"] > 3


SHORT_ONES_ON_DEMAND = (
    "{% for m in messages %}{% if m.content | length > 2 or messages[-1].content == ' ' %}"
    "### {{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)


def test_words_of_an_earlier_turn_are_not_taken_for_those_of_a_turn() -> None:
    """The check itself uses the words of a turn that the prompt did not show, and that the next message shows again."""
    blank: Message = {"role": "user", "content": " \n"}
    seen = Counter[str]()
    conversation: list[Message] = [QUESTION, says("a\n"), blank, says(" "), {"role": "user", "content": " "}]
    check_bridges(Written(SHORT_ONES_ON_DEMAND, [conversation]), seen)
    assert seen.total() == seen["exact, with the past as it was sampled"] == 2


def test_own_text_of_a_tail_is_rendered_before_it_is_joined() -> None:
    """A join runs on the event loop, and these tails are renders of the whole history."""
    template = (
        WORDS_AFTER_THE_END.replace("SHOWN", SHOWN[-1])
        .replace("FIRST", "0")
        .replace("OPENS", "")
        .replace("CHANGES", "")
        .replace("WORDS", "m.content")
    )
    tokenizer = ByteTokenizer()
    bridger = Bridger(tokenizer, ChatTemplate(template, name="drawn").renderer(), tokenizer.encode("<|im_end|>"))
    answered = AnsweredTurn([QUESTION, says("words")], [MORE])
    first = bridger.tail(answered)
    assert not first.local
    assert "own_text" not in vars(first), "most templates need no further render"
    sampled = tokenizer.encode("words<|im_end|>")
    with pytest.raises(Unbridgeable, match="writes words of the turn after its end"):
        bridger.join(first, sampled=sampled, stop=sampled[-1])
    assert "own_text" in vars(bridger.tail(answered))
