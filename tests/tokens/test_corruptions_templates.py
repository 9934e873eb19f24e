"""Peculiarities of single templates with which other systems corrupted tokens: gpt-oss, Gemma, DeepSeek, BOS.

The name of each test is a promise. The comment at its beginning names the project and issue of the case.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from runner import Conversation, Outcome, Run, tool
from runner.messages import Message
from runner.template_probe import probe
from runner.testing import Reply
from runner.tokens.bridging.bridge import Bridger, Property, Unbridgeable
from runner.tokens.bridging.history import AlignmentKind, same_tools
from runner.tokens.bridging.tail import Tail
from runner.tokens.junction import Anchor, Close, Result, Seam
from runner.tokens.probing.appends import Append, Exactness, verdicts
from runner.tokens.probing.profile import SystemPosition
from runner.tokens.template import ChatTemplate
from runner.tokens.turn_shape import AnsweredTurn
from tests.conformance.corpus import corpus
from tests.playing import Plain, play, talked, tasks, twice
from tests.tokens.client_messages import compare, messages
from tests.tokens.episodes import SHOWS_CALLS, SUM, bridges, speaking
from tests.tokens.families import (
    ADD,
    FAMILIES,
    MORE,
    QUESTION,
    QWEN_CALL,
    TOOLS_MOVE,
    call_stop,
    called,
    model,
    result,
    says,
)

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5)]


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio only, since the event loop changes no id."""
    return "asyncio"


# --- gpt-oss


@pytest.mark.parametrize(
    ("stop", "anchor", "close"),
    [
        ("<|return|>", Anchor.COMMON_PREFIX, Close.REPLACED),
        ("<|end|>", Anchor.STOP, Close.SAMPLED),
        (None, Anchor.NONE, Close.MASKED),
    ],
)
def test_gpt_oss_end_for_return_is_not_written_twice(stop: str | None, anchor: Anchor, close: Close) -> None:
    made = model("gpt-oss")
    said = "<|channel|>analysis<|message|>Carry.<|end|><|start|>assistant<|channel|>final<|message|>42"
    history = [QUESTION, says("42")]
    assert made.render([*history, MORE]).count("<|return|>") == 0
    assert made.render(history, generation_prompt=False).endswith("42<|return|>")
    sampled = made.sampled(said, stop)
    text, bridge = made.after(sampled, history, MORE, cut=stop is None)
    opener = "<|start|>user<|message|>And twice that?<|end|><|start|>assistant"
    assert text == (opener if stop else f"<|end|>{opener}")
    assert (bridge.junction.anchor, bridge.junction.close) == (anchor, close)


def test_gpt_oss_call_is_its_own_stop_and_the_result_names_the_tool() -> None:
    made = model("gpt-oss")
    said = "<|channel|>analysis<|message|>Add.<|end|><|start|>assistant"
    said += ' to=functions.add<|channel|>commentary json<|message|>{"a":17}'
    text, bridge = made.after(made.sampled(said, "<|call|>"), [QUESTION, says("", SUM, reasoning="Add.")], result("42"))
    assert text == ('<|start|>functions.add to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant')
    assert (bridge.junction.anchor, bridge.junction.close) == (Anchor.STOP, Close.SAMPLED)


@pytest.mark.anyio
async def test_gpt_oss_keeps_the_analysis_that_its_template_drops() -> None:
    said = "<|channel|>analysis<|message|>Carry.<|end|><|start|>assistant<|channel|>final<|message|>42"
    engine = speaking("gpt-oss", [said, "<|channel|>final<|message|>84"])
    trajectory = await talked(twice, engine)
    (text,) = bridges(trajectory, engine)
    assert text == "<|start|>user<|message|>And twice that?<|end|><|start|>assistant"
    prompt = engine.tokenizer.decode(trajectory.turns[1].prompt_ids)
    assert f"{said}<|return|>{text}" in prompt


@pytest.mark.anyio
async def test_gpt_oss_as_it_speaks_plays_ten_turns_in_one_segment() -> None:
    # Its template raises an error on channels in the content of an earlier turn, and the content is all sampled text.
    async def talk(conversation: Conversation) -> None:
        for _ in range(10):
            await conversation.generate()
            conversation.add("And twice that?")

    said = "<|channel|>analysis<|message|>Double.<|end|><|start|>assistant<|channel|>final<|message|>84"
    engine = speaking("gpt-oss", lambda turn: said)
    trajectory = await talked(talk, engine)
    assert bridges(trajectory, engine) == ["<|start|>user<|message|>And twice that?<|end|><|start|>assistant"] * 9
    assert {turn.junction.seam for turn in trajectory.turns if turn.junction is not None} == {Seam.SPECIAL}


@pytest.mark.anyio
async def test_gpt_oss_channels_of_one_episode_affect_no_other_episode() -> None:
    class Talks(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            for _ in range(4):
                await conversation.generate()
                conversation.add("And twice that?")

    plain, channels = "<|channel|>final<|message|>84", "<|channel|>analysis<|message|>Double.<|end|>"
    for replies in (plain, channels):
        engine = speaking(
            "gpt-oss", lambda call, said=replies: channels if call.request.name.startswith("t0#") else said
        )
        async with Run(Talks, engine, tasks=tasks(20)) as run:
            trajectories = [trajectory async for trajectory in run]
        assert {trajectory.outcome for trajectory in trajectories} == {Outcome.COMPLETED}
        made = [turn.junction for trajectory in trajectories for turn in trajectory.turns[1:]]
        assert {(each.result, each.seam) for each in made if each is not None} == {(Result.APPENDED, Seam.SPECIAL)}
        assert not run.summary.faults


def test_gpt_oss_is_checked_as_it_speaks() -> None:
    made = model("gpt-oss")
    contents: list[str] = []
    bridger = made.bridger()
    tail = bridger.tail

    def listened(answered: AnsweredTurn) -> Tail:
        contents.extend(message["content"] for message in answered.history if message["role"] == "assistant")
        return tail(answered)

    bridger.tail = listened  # type: ignore[method-assign]  # records the calls for the verdicts
    found = {verdict.kind: verdict for verdict in verdicts(bridger, probe(made.template))}
    assert found[Append.USER].result is Exactness.EXACT
    assert any("<|channel|>final<|message|>" in content for content in contents)


# --- a system message that moves


@pytest.mark.parametrize(
    "name",
    [
        "mistralai-Mistral-7B-Instruct-v0.3",
        "mistralai-Mistral-Nemo-Instruct-2407",
        "Neelectric-Ministral-8B-Instruct-2410_SFT_mathv00.01",
    ],
)
def test_a_system_message_that_moves_is_refused_by_name(name: str) -> None:
    made = model("mistral-7b")
    text = next(entry.text for entry in corpus() if entry.name == name)
    renderer = ChatTemplate(text, name=name, variables=made.template.variables).renderer()
    bridger = Bridger(made.tokenizer, renderer, made.stop_ids)
    system: Message = {"role": "system", "content": "Be brief."}
    history = [system, QUESTION, says("42")]
    with pytest.raises(Unbridgeable) as caught:
        bridger.bridge(history, [MORE], sampled=made.sampled("42", "</s>"), stop=made.id("</s>"))
    assert caught.value.property is Property.SYSTEM_STAYS
    bridge = bridger.bridge(history[1:], [MORE], sampled=made.sampled("42", "</s>"), stop=made.id("</s>"))
    assert bridge.junction.anchor is Anchor.STOP  # without a stop nothing moves
    assert probe(renderer.template).system is SystemPosition.MOVES


@pytest.mark.anyio
async def test_run_follows_a_moving_system_message_and_reports_it() -> None:
    class Brief(Plain):
        system_prompt = "Be brief."

        async def rollout(self, conversation: Conversation) -> None:
            for _ in range(3):
                await conversation.generate()
                conversation.add("And twice that?")

    engine = speaking("mistral-7b", lambda turn: "42")
    async with Run(Brief, engine) as run:
        assert any("system_moves" in fault for fault in run.summary.faults)
        (trajectory,) = [trajectory async for trajectory in run]
    for segment in trajectory.segments:
        assert engine.tokenizer.decode(segment.log.ids).count("Be brief.") == 1
    assert [segment.cause for segment in trajectory.segments] == ["start", "system_moves", "system_moves"]


# --- Gemma 4


def test_gemma_stops_with_the_result_opener_that_names_the_tool() -> None:
    made = model("gemma-4")
    said = "<|tool_call>call:add{a:17,b:25}<tool_call|>"
    text, bridge = made.after(made.sampled(said, "<|tool_response>"), [QUESTION, says("", SUM)], result("42"))
    assert text == 'response:add{value:<|"|>42<|"|>}<tool_response|>'
    assert bridge.junction.anchor is Anchor.STOP
    other = says("", called({"a": 17}, name="subtract"))
    tools = [ADD, {**ADD, "function": {**ADD["function"], "name": "subtract"}}]
    text, _ = made.after(
        made.sampled(said, "<|tool_response>"), [QUESTION, other], result("42", name="subtract"), tools=tools
    )
    assert text.startswith("response:subtract{")


def test_gemma_cut_after_its_call_gets_the_result_opener_masked() -> None:
    made = model("gemma-4")
    sampled = made.sampled("<|tool_call>call:add{a:17,b:25}<tool_call|>", None)
    text, bridge = made.after(sampled, [QUESTION, says("", SUM)], result("42"), cut=True)
    assert text == '<|tool_response>response:add{value:<|"|>42<|"|>}<tool_response|>'
    assert bridge.junction.close is Close.MASKED


def test_gemma_turn_without_a_result_opener_is_refused_by_name() -> None:
    made = model("gemma-4")
    sampled = made.sampled("<|tool_call>call:add{a:17,b:25}<tool_call|>", "<turn|>")
    with pytest.raises(Unbridgeable) as caught:
        made.after(sampled, [QUESTION, says("", called({"a": 17, "b": 25}))], result("42"))
    assert caught.value.property == "stop_not_in_tail"


def test_gemma_result_opener_before_a_user_is_refused_by_name() -> None:
    made = model("gemma-4")
    with pytest.raises(Unbridgeable) as caught:
        made.after(made.sampled("42", "<|tool_response>"), [QUESTION, says("42")], MORE)
    assert caught.value.property == "stop_opens_wrong_role"


# --- DeepSeek


def test_deepseek_folds_tool_and_user_turns_as_its_template_does() -> None:
    # Miles #1599
    made = model("deepseek-v3.1")
    stop = FAMILIES["deepseek-v3.1"].stops[0]
    sampled = made.sampled("...", stop)
    pair = [QUESTION, says("", SUM, called({"a": 1}, call_id="call00001"))]
    one, _ = made.after(sampled, [QUESTION, says("", SUM)], result("42"))
    two, _ = made.after(sampled, pair, result("42"), result("3", "call00001"))
    user, _ = made.after(sampled, pair, result("42"), result("3", "call00001"), MORE)
    begin, end = made.render([*pair, result("42")], [ADD]).rpartition("42")[::2]
    opener = begin.rpartition(stop)[2]
    assert one == f"{opener}42{end}"
    assert two == f"{opener}42{end}{opener}3{end}"
    assert user.startswith(two)
    assert user.removeprefix(two).startswith("<\uff5cUser\uff5c>And twice that?<\uff5cAssistant\uff5c>")


def test_deepseek_turn_after_a_tool_result_is_closed_once() -> None:
    # Miles #1599: after a result the template does not open the assistant again, and the next bridge must not close it
    # twice.
    made = model("deepseek-v3.1")
    stop = FAMILIES["deepseek-v3.1"].stops[0]
    history = [QUESTION, says("", SUM), result("42"), says("It is 42.")]
    text, bridge = made.after(made.sampled("It is 42.", stop), history, MORE)
    assert text == "<\uff5cUser\uff5c>And twice that?<\uff5cAssistant\uff5c><think></think>"
    assert bridge.junction.anchor is Anchor.STOP


# --- blocks and prompts that templates insert


def test_no_empty_think_block_is_put_into_a_turn_that_had_none() -> None:
    # SkyRL #438: when the template renders the last turn again, it inserts a block.
    made = model("qwen3")
    history = [QUESTION, says("", SUM)]
    assert "<think>" not in made.render([QUESTION], [ADD])
    assert "<think>\n\n</think>" in made.render([QUESTION, says("42")], [ADD], generation_prompt=False)
    text, _ = made.after(made.sampled(QWEN_CALL, "<|im_end|>"), history, result("42"))
    assert text == "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    text, _ = made.after(made.sampled("42", "<|im_end|>"), [QUESTION, says("42")], MORE)
    assert "think" not in text


def test_empty_think_block_of_the_prompt_occurs_once_per_turn() -> None:
    # SkyRL #438, with enable_thinking=False: the block belongs to the prompt, with mask 0.
    made = model("qwen3", enable_thinking=False)
    block = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    prompt = made.bridger().first_prompt([QUESTION], [ADD])
    assert made.tokenizer.decode(prompt).endswith(block)
    sampled = made.sampled("42", "<|im_end|>")
    text, bridge = made.after(sampled, [QUESTION, says("42")], MORE)
    assert text == f"\n<|im_start|>user\nAnd twice that?<|im_end|>\n{block}"
    following = made.tokenizer.decode([*prompt, *sampled, *bridge.ids])
    assert (following.count("<think>"), following.count("</think>")) == (2, 2)


@pytest.mark.parametrize(
    ("name", "words"), [("qwen2.5", "You are Qwen"), ("mistral-small", "You are Mistral"), ("smollm2", "named SmolLM")]
)
def test_default_system_prompt_is_in_the_first_prompt_only(name: str, words: str) -> None:
    # verl #6501
    made, stop = model(name), FAMILIES[name].stops[0]
    first = made.tokenizer.decode(made.bridger().first_prompt([QUESTION]))
    assert first.count(words) == 1
    text, _ = made.after(made.sampled("42", stop), [QUESTION, says("42")], MORE, tools=())
    assert words not in text
    text, _ = made.after(made.sampled("42", None), [QUESTION, says("42")], MORE, tools=(), cut=True)
    assert words not in text


@pytest.mark.anyio
async def test_an_episode_has_the_default_system_prompt_once() -> None:
    # verl #6501
    engine = speaking("qwen2.5", ["42", "84"])
    trajectory = await talked(twice, engine)
    bridges(trajectory, engine)
    assert engine.tokenizer.decode(trajectory.turns[1].prompt_ids).count("You are Qwen") == 1


BOS = {
    "llama-3.1": "<|begin_of_text|>",
    "llama-3.2": "<|begin_of_text|>",
    "deepseek-v3": FAMILIES["deepseek-v3"].variables["bos_token"],
    "deepseek-v3.1": FAMILIES["deepseek-v3"].variables["bos_token"],
    "mistral-small": "<s>",
    "devstral": "<s>",
    "gemma-4": "<bos>",
}


@pytest.mark.parametrize("name", BOS)
def test_the_first_prompt_has_one_bos_and_no_bridge_has_any(name: str) -> None:
    # TRL #3853
    made = model(name)
    bos = made.id(BOS[name])
    prompt = made.bridger().first_prompt([QUESTION], [ADD] if name != "mistral-small" else ())
    assert (prompt[0], prompt.count(bos)) == (bos, 1)
    for sampled, cut in ((made.sampled("42", FAMILIES[name].stops[0]), False), (made.sampled("42", None), True)):
        _, bridge = made.after(sampled, [QUESTION, says("42")], MORE, tools=(), cut=cut)
        assert bos not in bridge.ids


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["llama-3.2", "deepseek-v3.1", "devstral"])
async def test_an_episode_has_one_bos(name: str) -> None:
    # TRL #3853
    engine = speaking(name, ["42", "84"])
    trajectory = await talked(twice, engine)
    assert bridges(trajectory, engine)
    assert trajectory.segments[0].log.ids.count(model(name).id(BOS[name])) == 1


# --- forms of the same message


@pytest.mark.parametrize("name", SHOWS_CALLS)
def test_arguments_as_text_and_as_an_object_have_one_bridge(name: str) -> None:
    made = model(name)
    sampled = made.sampled("...", call_stop(name))
    as_object = [QUESTION, says("", called({"a": 17, "b": "café"}))]
    as_text = [QUESTION, says("", called(json.dumps({"a": 17, "b": "café"})))]
    text, one = made.after(sampled, as_object, result("42"))
    assert "42" in text
    other = made.bridger().bridge(as_text, [result("42")], [ADD], sampled=sampled, stop=sampled[-1])
    assert other.ids == one.ids
    assert messages(as_text) == as_object
    assert compare(as_object, [*as_text, result("42")]).kind is AlignmentKind.APPEND


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - TOOLS_MOVE))
def test_a_content_of_parts_and_a_string_have_one_bridge(name: str) -> None:
    made = model(name)
    stop = "<|user|>" if name.startswith("glm") else FAMILIES[name].stops[0]
    parts: dict[str, Any] = {"role": "user", "content": [{"type": "text", "text": MORE["content"]}]}
    assert messages([parts]) == [MORE]
    history = [QUESTION, says("42")]
    alignment = compare(history, [*history, parts])
    assert alignment.kind is AlignmentKind.APPEND
    text, _ = made.after(made.sampled("42", stop), history, *alignment.appended)
    same, _ = made.after(made.sampled("42", stop), history, MORE)
    assert text == same
    assert "And twice that?" in text


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_no_tools_and_an_empty_list_of_them_have_one_prompt(name: str) -> None:
    made = model(name)
    of_none = made.bridger().first_prompt([QUESTION])
    of_list = made.bridger().first_prompt([QUESTION], [])
    of_tuple = made.bridger().first_prompt([QUESTION], ())
    assert list(of_none) == list(of_list) == list(of_tuple)
    variables = {**made.template.variables, "strftime_now": made.renderer.now.strftime}
    text = made.renderer._compiled.render(variables, messages=[QUESTION], tools=None, add_generation_prompt=True)
    assert made.tokenizer.encode(text) == list(of_list)
    assert same_tools(None, [])


def test_a_template_exists_that_takes_an_empty_list_for_tools() -> None:
    # Without this, the test above would show nothing.
    made = model("llama-3.1")
    variables = {**made.template.variables, "strftime_now": made.renderer.now.strftime}
    text = made.renderer._compiled.render(variables, messages=[QUESTION], tools=[], add_generation_prompt=True)
    assert text != made.render([QUESTION])


# --- calls


@pytest.mark.anyio
@pytest.mark.parametrize("finish", ["length", "stop"])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
async def test_unterminated_call_block_stays_as_sampled_and_is_not_a_call(name: str, finish: Any) -> None:
    class Tools(Plain):
        @tool
        def add(self, a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        async def rollout(self, conversation: Conversation) -> None:
            await twice(conversation)

    made = model(name)
    ids = made.tokenizer.encode(QWEN_CALL)
    begun, closed = ids.index(made.id("<tool_call>")) + 1, ids.index(made.id("</tool_call>"))
    # A call that lacks only its close is a call.
    cut = [n for n in range(begun, closed) if not made.tokenizer.decode(ids[:n]).rstrip().endswith("}}")]
    assert len(cut) > 5
    for length in cut:
        engine = speaking(name, [Reply(ids=ids[:length], finish=finish), "84"])
        trajectory = await play(Tools, engine)
        (text,) = bridges(trajectory, engine)
        follows = "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"
        assert text == (follows if finish == "stop" else f"<|im_end|>{follows}"), length
        assert "tool_calls" not in trajectory.messages[1]
        assert [call.error is None for call in trajectory.turns[0].tool_calls] in ([], [False])
        stop = [made.id("<|im_end|>")] if finish == "stop" else []
        assert list(trajectory.turns[0].token_ids) == ids[:length] + stop


@pytest.mark.parametrize("call_id", ["functions.add:0", "functions.add:17", "call_abc", "x" * 40])
@pytest.mark.parametrize("name", ["kimi", "mistral-7b", "devstral"])
def test_ids_of_calls_stay_what_they_are(name: str, call_id: str) -> None:
    # Kimi's ids count the calls of the episode, and the result repeats them.
    if name != "kimi":
        call_id = call_id[-9:].replace(".", "a").replace(":", "b").replace("_", "c").rjust(9, "0")
    made = model(name)
    history: list[Message] = [
        *(QUESTION, says("", called({"a": 1}, call_id="functions.add:3" if name == "kimi" else "000000003"))),
        *(
            result("1", "functions.add:3" if name == "kimi" else "000000003"),
            says("", called({"a": 17}, call_id=call_id)),
        ),
    ]
    bridger = made.bridger()
    sampled = made.sampled("...", FAMILIES[name].stops[0])
    tail = bridger.tail(AnsweredTurn(history, [result("42", call_id)], [ADD], 1))
    assert made.render([*history, result("42", call_id)], [ADD]).endswith(tail.text[5:])
    if name == "mistral-7b":
        assert call_id in tail.text
        return
    text, _ = made.after(sampled, history, result("42", call_id))
    assert (f"## Return of {call_id}\n42" in text) is (name == "kimi")


# --- histories that a harness changes
