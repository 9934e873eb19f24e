"""Refusals of the bridge: each names its cause, and similar harmless cases are not refused."""

from typing import Any

import pytest

from runner.messages import Message
from runner.tokens.bridging.bridge import Bridger, Unbridgeable
from runner.tokens.bridging.refusal import Property
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.junction import Anchor, Close
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import VocabularyTokenizer
from tests.tokens.bridging import MORE, QUESTION, answer, bridger, chatml, result, says

REFUSALS = {
    "no_sentinel": chatml(body="{{ m.content if m.role != 'assistant' }}"),
    "content_missing": chatml(body="{{ m.content if m.role != 'tool' }}"),
    "marker_in_tail": chatml(
        body="{{ m.content if m.role != 'assistant' }}{% for t in m.tool_calls or [] %}"
        "{{ t.function.arguments | tojson }}{% endfor %}"
        "{% if m.role == 'tool' %}{{ messages[loop.index0 - 1].content }}{% endif %}"
    ),
    "generation_prompt_missing": chatml().partition("{% if add_gen")[0],
    "template_raises": chatml(body="{{ raise_exception('no tools') if m.role == 'tool' else m.content }}{% for t in "
        "m.tool_calls or [] %}{{ t.function.arguments | tojson }}{% endfor %}"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_template_without_an_exact_bridge_is_refused_by_name(name: str) -> None:
    made = bridger(REFUSALS[name])
    turn = says("I add.", {"a": 1, "b": 2}) if name in ("marker_in_tail", "template_raises") else says("I add.")
    with pytest.raises(Unbridgeable) as caught:
        answer(made, "I add.", "<|im_end|>", turn, result("the result"))
    assert caught.value.property == name
    assert caught.value.explanation in str(caught.value)


def test_first_prompt_without_a_request_is_refused_by_name() -> None:
    with pytest.raises(Unbridgeable, match="generation_prompt_missing"):
        bridger(REFUSALS["generation_prompt_missing"]).first_prompt([QUESTION])
    with pytest.raises(Unbridgeable, match=r"template_raises: .*no tools"):
        bridger(REFUSALS["template_raises"]).first_prompt([QUESTION, result("3")])


def _showing_if(test: str) -> str:
    """Return ChatML in which a message is left out unless this condition holds."""
    return chatml().replace("messages %}", f"messages %}}{{% if {test} %}}", 1).replace(
        "{% endfor %}{% if add", "{% endif %}{% endfor %}{% if add"
    )  # fmt: skip


@pytest.mark.parametrize("said", ["", " \n", "im", "user"])
@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("m.role == 'assistant' or loop.length > 5", "hides"),
        ("m.role != 'tool'", "hides"),
        (
            "m.content | trim or m.role == 'assistant' or loop.length > 5",
            r"hides message \d+ \(role tool\) until more messages follow",
        ),
        ("m.content | trim", None),
        ("m.content | trim or loop.length < 3", None),
    ],
)
def test_message_found_anywhere_is_refused_if_it_is_hidden(test: str, why: str | None, said: str) -> None:
    made, past = bridger(_showing_if(test)), [QUESTION, says("x")]
    if why and not (said.strip() and "trim" in test):
        with pytest.raises(Unbridgeable, match=f"content_missing: the template {why}"):
            made.first_prompt([*past, result(said)])
        with pytest.raises(Unbridgeable, match=f"content_missing: the template {why}"):
            answer(made, "x", "<|im_end|>", says("x"), result(said))
    else:
        assert len(made.first_prompt([*past, result(said)]))
        assert answer(made, "x", "<|im_end|>", says("x"), result(said))


def test_template_that_announces_an_empty_content_is_bridged() -> None:
    body = "{{ '[empty]' if not m.content }}{{ m.content }}"
    text, _ = answer(bridger(chatml(body=body)), "x", "<|im_end|>", says("x"), result(""))
    assert text == "\n<|im_start|>tool\n[empty]<|im_end|>\n<|im_start|>assistant\n"
    header = chatml().replace("+ m.role", "+ ('no ' if not m.content else '') + m.role")
    text, _ = answer(bridger(header), "x", "<|im_end|>", says("x"), result(""))
    assert text == "\n<|im_start|>no tool\n<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("said", ["Yes", "Yes<|im_end|>", "Yes<|im_end|>\n"])
@pytest.mark.parametrize("stop", ["<|im_end|>", "<|endoftext|>", None])
@pytest.mark.parametrize("written", ["", ".", " .\n"], ids=repr)
def test_close_that_the_next_message_changes_is_never_doubled(written: str, stop: str | None, said: str) -> None:
    made = bridger(chatml(body="{{ m.content }}" + written + "{{ '\n\n' if messages[-1].content | length < 2 }}"))
    for content in (".", "\n", "", "m", "3 words more"):
        new: Message = {"role": "user", "content": content}
        follows = made.renderer.render([QUESTION, says("Yes"), new]).partition("Yes")[2]
        try:
            text, _ = answer(made, said, stop, says("Yes"), new)
        except Unbridgeable as refusal:
            assert refusal.property in (Property.STOP_IN_TAIL, Property.CLOSE_KNOWN)  # noqa: PT017 - or none is raised
        else:
            rest = follows if said == "Yes" and stop is None else follows.partition("<|im_end|>")[2]
            assert rest.endswith(text)
            assert rest.removesuffix(text) in ("", "\n")


def test_turn_cut_after_a_call_is_closed_as_one_without_calls() -> None:
    made = Bridger(ByteTokenizer(), ChatTemplate.load("pythonic").renderer(), [])
    text, bridge = answer(made, "[add(a=1)] and", None, says("", {"a": 1}), result("3"))
    assert text == "<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    assert (bridge.junction.anchor, bridge.junction.close) == (Anchor.NONE, Close.MASKED)


def test_a_cut_call_without_a_known_close_is_refused_by_name() -> None:
    body = "{{ m.content }}{% for t in m.tool_calls or [] %}{{ t.function.arguments | tojson }}{% endfor %}"
    made = bridger(chatml(close="", body=body + "{{ '; done.' if m.tool_calls else '.' }}"), stops=[])
    with pytest.raises(Unbridgeable, match="close_not_found"):
        answer(made, "[add(a=1)]", None, says("", {"a": 1}), result("3"))


THINKS = chatml(
    body="{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
)


def test_turn_cut_inside_its_reasoning_is_refused_by_default() -> None:
    tokenizer = ByteTokenizer()
    sampled = tokenizer.encode("<think>\nCarry the")
    history, stops = [QUESTION, says("", reasoning="Carry the")], tokenizer.encode("<|im_end|>")
    renderer = ChatTemplate(THINKS, name="inline").renderer()
    with pytest.raises(Unbridgeable, match="reasoning_open"):
        Bridger(tokenizer, renderer, stops).bridge(history, [MORE], sampled=sampled, stop=None, thinking=True)
    made = Bridger(tokenizer, renderer, stops, close_reasoning=True)
    bridge = made.bridge(history, [MORE], sampled=sampled, stop=None, thinking=True)
    assert tokenizer.decode(bridge.ids) == (
        "\n</think>\n\n<|im_end|>\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (bridge.junction.close, bridge.junction.cause) == (Close.MASKED, "reasoning_closed")


def test_a_text_that_the_vocabulary_cannot_write_is_refused_by_name(vocabulary: VocabularyTokenizer) -> None:
    made = bridger(chatml(), vocabulary)
    with pytest.raises(Unbridgeable, match=r"text_not_kept: .*no ids for '\\x04b<"):
        answer(made, "x", "<|im_end|>", says("x"), result("a\x04b"))


def test_assistant_message_that_was_not_sampled_is_refused_by_name(made: Bridger) -> None:
    with pytest.raises(Unbridgeable, match="assistant_in_new"):
        answer(made, "x", "<|im_end|>", says("x"), MORE, says("and I said this"), MORE)


def test_a_bridge_needs_a_sampled_turn_and_something_new(made: Bridger) -> None:
    stop = made.tokenizer.eos_id
    with pytest.raises(ValueError, match="at least one new message"):
        made.bridge([QUESTION, says("x")], [], sampled=[stop or 0], stop=stop)
    with pytest.raises(ValueError, match="a history that ends with an assistant message"):
        made.bridge([QUESTION], [MORE], sampled=[stop or 0], stop=stop)
    with pytest.raises(ValueError, match="is not the stop id"):
        made.bridge([QUESTION, says("x")], [MORE], sampled=[1], stop=stop)


REMEMBERS = {
    "in capitals": "(you said {{ messages[-2].content | upper }})",
    "its length": "(you said {{ messages[-2].content | length }} letters)",
    "its beginning": "(you said {{ messages[-2].content[-3:] }})",
    "only of some": "{{ '(you thought)' if '<think>' in messages[-2].content }}",
}


@pytest.mark.parametrize("remark", ["in capitals", "its length", "its beginning"])
def test_template_that_comments_on_the_last_turn_is_refused_by_name(remark: str) -> None:
    made = bridger(chatml().replace("{% if add_generation_prompt", REMEMBERS[remark] + "{% if add_generation_prompt"))
    with pytest.raises(Unbridgeable, match="marker_in_tail"):
        answer(made, "42", "<|im_end|>", says("42"), MORE)


def test_template_that_searches_the_last_turn_finds_its_words() -> None:
    text = chatml().replace("{% if add_generation_prompt", REMEMBERS["only of some"] + "{% if add_generation_prompt")
    made = bridger(text)
    reasoned, _ = answer(made, "<think>", "<|im_end|>", says("<think>hm"), MORE)
    plain, _ = answer(made, "42", "<|im_end|>", says("42"), MORE)
    assert "(you thought)" in reasoned
    assert "(you thought)" not in plain


@pytest.mark.parametrize("opener", ["<|im_start|>assistant\n", "### Assistant:\n"])
def test_a_template_that_opens_the_answer_twice_is_refused_by_name(opener: str) -> None:
    body = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    made = bridger(body + opener + opener)
    with pytest.raises(Unbridgeable, match="assistant_opened_twice"):
        made.first_prompt([QUESTION])


@pytest.mark.parametrize("role", ["system", "user"])
def test_switch_removed_by_the_template_hides_nothing(role: str) -> None:
    made = bridger(chatml(body="{{ m.content | replace('/no_think', '') }}"))
    message: Any = {"role": role, "content": "You help. /no_think"}
    prompt = made.tokenizer.decode(made.first_prompt([message, QUESTION]))
    assert prompt.startswith(f"<|im_start|>{role}\nYou help. <|im_end|>\n")
    text, _ = answer(made, "42", "<|im_end|>", says("42"), {"role": "user", "content": "More. /no_think"})
    assert text == "\n<|im_start|>user\nMore. <|im_end|>\n<|im_start|>assistant\n"


def test_switch_in_an_earlier_message_is_searched_in_all_history() -> None:
    text = chatml() + (
        "{% for m in messages if '/no_think' in m.content %}{% if loop.first and add_generation_prompt %}"
        "{{ '<think></think>' }}{% endif %}{% endfor %}"
    )
    made = bridger(text)
    plain, _ = answer(made, "42", "<|im_end|>", says("42"), MORE)
    quick: Message = {"role": "user", "content": "What is 17 + 25? /no_think"}
    switched, _ = answer(made, "42", "<|im_end|>", says("42"), MORE, history=[quick])
    assert (plain.endswith("assistant\n"), switched.endswith("assistant\n<think></think>")) == (True, True)


@pytest.mark.parametrize("said", ["u", "0", "Some words"])
def test_a_message_that_the_template_hides_is_named_however_short(said: str) -> None:
    made = bridger(chatml(body="{{ m.content if m.role != 'tool' }}"))
    with pytest.raises(Unbridgeable, match="content_missing"):
        answer(made, "42", "<|im_end|>", says("42"), {"role": "tool", "content": said})


def test_a_first_message_that_the_template_hides_is_named() -> None:
    made = bridger(chatml(body="{{ m.content if m.role != 'system' }}"))
    with pytest.raises(Unbridgeable, match=r"content_missing: .*hides message 0 \(role system\): 'You help.'"):
        made.first_prompt([{"role": "system", "content": "You help."}, QUESTION])


def test_message_of_only_a_switch_is_not_hidden() -> None:
    made = bridger(chatml(body="{{ m.content | replace('/no_think', '') }}"))
    only: Message = {"role": "system", "content": "/no_think"}
    assert made.tokenizer.decode(made.first_prompt([only, QUESTION])).startswith("<|im_start|>system\n<|im_end|>\n")
    dropped = bridger(chatml(body="{{ m.content if m.role != 'system' }}"))
    with pytest.raises(Unbridgeable, match="content_missing"):
        dropped.first_prompt([only, QUESTION])


LATE = "<|im_end|>\n{{ m.content }}(said)\n"
ENDS_EARLY = {
    "reasoning before the stop, words after it": "{{ m.reasoning_content }}" + LATE,
    "a line break in the place of words": "\n" + LATE,
    "a heading before the stop": "answer:" + LATE,
    "nothing before the stop": LATE,
}


@pytest.mark.parametrize("name", ENDS_EARLY)
def test_words_of_a_turn_after_its_stop_are_refused_by_name(name: str) -> None:
    said = "{% if m.role == 'assistant' %}" + ENDS_EARLY[name] + "{% else %}{{ m.content }}<|im_end|>\n{% endif %}"
    body = "{% for m in messages %}<|im_start|>{{ m.role }}\n" + said + "{% endfor %}"
    made = bridger(body + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    turn: Message = {"role": "assistant", "content": "42", "reasoning_content": "6 * 7"}
    for _ in range(2):
        with pytest.raises(Unbridgeable, match="marker_in_tail: the template writes words of the turn after its end"):
            answer(made, "6 * 7", "<|im_end|>", turn, MORE)


@pytest.mark.parametrize("content", ["", "\n", " ", "\t"])
@pytest.mark.parametrize("shown", ["{{ m.content[1:] }}", "{{ m.content | trim }}", "{{ m.content }}"])
def test_blank_content_after_a_turn_writes_no_stop_twice(shown: str, content: str) -> None:
    text = chatml(body=shown + "\n")
    made = bridger(text)
    history: list[Message] = [QUESTION, {"role": "assistant", "content": "ab"}]
    new: Message = {"role": "user", "content": content}
    said = "b" if "[1:]" in shown else "ab"
    try:
        bridge, _ = answer(made, f"{said}\n", "<|im_end|>", history[-1], new)
    except Unbridgeable:
        return
    whole = ChatTemplate(text, name="inline").renderer().render([*history, new])
    assert whole.endswith(f"{said}\n<|im_end|>{bridge}")
