"""The common cases in which other systems corrupted tokens, with real templates and vocabularies.

The name of each test is a promise. The comment at its beginning names the project and issue of the case.
"""

from __future__ import annotations

import pytest

from runner import Conversation, FinishReason, History, Outcome, Sampling
from runner.messages import Message
from runner.testing import Reply
from runner.tokens.bridging.bridge import Unbridgeable
from runner.tokens.junction import Anchor, Close, Result, Seam
from tests.playing import play, talked, twice
from tests.tokens.episodes import CHATML, GLM, SUM, Adds, bridges, speaking
from tests.tokens.families import ADD, FAMILIES, MORE, QUESTION, TOOLS_MOVE, called, model, result, says

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5)]


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio only, since the event loop changes no id."""
    return "asyncio"


# --- the newline after the stop


@pytest.mark.parametrize("name", CHATML)
def test_newline_after_the_stop_is_written_exactly_once(name: str) -> None:
    # verl #6921, TRL #5317
    made = model(name)
    asks = "<think>\n" if name in ("qwen3-thinking", "qwen3.6") else ""
    follows = f"<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n{asks}"
    text, bridge = made.after(made.sampled("42", "<|im_end|>"), [QUESTION, says("42")], MORE)
    assert text == "\n" + follows
    assert (bridge.junction.anchor, bridge.junction.close) == (Anchor.STOP, Close.SAMPLED)
    assert bridge.ids[:2] == [*made.tokenizer.encode("\n"), made.id("<|im_start|>")]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "qwen3-thinking", "qwen3-coder", "qwen3.6"])
def test_the_newline_is_not_written_again_where_the_model_sampled_it(name: str) -> None:
    # verl #6921, TRL #5317
    made = model(name)
    text, bridge = made.after(made.sampled("42<|im_end|>\n", "<|endoftext|>"), [QUESTION, says("42")], MORE)
    assert text.startswith("<|im_start|>user\nAnd twice that?<|im_end|>\n")
    assert bridge.junction.close is Close.SAMPLED
    text, _ = made.after(made.sampled("42<|im_end|>\n", None), [QUESTION, says("42")], MORE, cut=True)
    assert text.startswith("<|im_start|>user\nAnd twice that?<|im_end|>\n")


@pytest.mark.parametrize("name", CHATML)
def test_newline_after_the_stop_is_not_part_of_the_turn(name: str) -> None:
    # verl #6921: the newline was added to the model's turn, and the next prompt lacked it.
    made = model(name)
    prompt = list(made.bridger().first_prompt([QUESTION], [ADD]))
    sampled = made.sampled("42", "<|im_end|>")
    _, bridge = made.after(sampled, [QUESTION, says("42")], MORE)
    following = [*prompt, *sampled, *bridge.ids]
    assert following.count(made.id("<|im_end|>")) == following.count(made.id("<|im_start|>")) - 1
    newline = made.tokenizer.encode("\n")
    ends = [index for index, token_id in enumerate(following) if token_id == made.id("<|im_end|>")]
    assert all(following[index + 1 : index + 3] == [*newline, made.id("<|im_start|>")] for index in ends)


# --- GLM: the stop opens the next message


@pytest.mark.parametrize("name", GLM)
def test_a_stop_that_is_the_next_opener_is_written_once(name: str) -> None:
    # Miles #784, TRL #5988
    made = model(name)
    user, observation = made.id("<|user|>"), made.id("<|observation|>")
    text, bridge = made.after(made.sampled("\n<think></think>\n42", "<|user|>"), [QUESTION, says("42")], MORE)
    assert (text, bridge.ids.count(user)) == ("\nAnd twice that?<|assistant|>", 0)
    said = "\n<think></think>\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>17</arg_value>\n</tool_call>"
    history = [QUESTION, says("", called({"a": 17}))]
    text, bridge = made.after(made.sampled(said, "<|observation|>"), history, result("42"))
    assert text == "\n<tool_response>\n42\n</tool_response><|assistant|>"
    assert bridge.ids.count(observation) == 0


@pytest.mark.parametrize("name", GLM)
@pytest.mark.parametrize(("stop", "new"), [("<|user|>", result("42")), ("<|observation|>", MORE)])
def test_a_stop_that_opens_the_wrong_role_is_refused_by_name(name: str, stop: str, new: Message) -> None:
    # FIXUP: GLM stopped with <|user|>, but a tool result follows.
    made = model(name)
    turn = says("", SUM) if new["role"] == "tool" else says("42")
    with pytest.raises(Unbridgeable) as caught:
        made.after(made.sampled("\n<think></think>\n42", stop), [QUESTION, turn], new)
    assert caught.value.property == "stop_opens_wrong_role"


@pytest.mark.anyio
async def test_stop_that_opens_the_wrong_role_forks_with_its_cause() -> None:
    made = model("glm-4.5")
    engine = speaking("glm-4.5", [Reply("\n<think></think>\n42", stop=made.id("<|observation|>")), "\nYes"])
    trajectory = await talked(twice, engine)
    first, second = trajectory.turns
    assert [segment.cause for segment in trajectory.segments] == ["start", "stop_opens_wrong_role"]
    assert second.junction is not None
    assert second.junction.result is Result.FORKED
    rendered = made.render(trajectory.messages[:3])
    assert list(second.prompt_ids) == made.tokenizer.encode(rendered)
    assert sum(trajectory.segments[0].log.mask()) == len(first.token_ids)
    assert sum(trajectory.segments[1].log.mask()) == len(second.token_ids)


# --- a run of tool results


HERMES = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n3\n</tool_response><|im_end|>"
BLOCKS = {
    "qwen2.5": HERMES,
    "qwen3": HERMES,
    "qwen3.6": HERMES,
    "qwen3-coder": "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n3\n</tool_response>\n",
    "minimax": "\n]~b]tool\n<response>42</response>\n<response>3</response>[e~[\n",
    "glm-4.5": "\n<tool_response>\n42\n</tool_response>\n<tool_response>\n3\n</tool_response><|assistant|>",
    "devstral": "[TOOL_RESULTS]42[/TOOL_RESULTS][TOOL_RESULTS]3[/TOOL_RESULTS]",
    "kimi": "<|im_system|>add<|im_middle|>## Return of call00000\n42<|im_end|><|im_system|>add<|im_middle|>"
    "## Return of call00001\n3<|im_end|>",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_two_tool_results_share_one_block(name: str) -> None:
    # slime #2263
    made = model(name)
    stop = "<|observation|>" if name == "glm-4.5" else FAMILIES[name].stops[0]
    history = [QUESTION, says("", SUM, called({"a": 1, "b": 2}, call_id="call00001"))]
    text, _ = made.after(made.sampled("...", stop), history, result("42"), result("3", "call00001"))
    assert text.startswith(BLOCKS[name])


@pytest.mark.anyio
async def test_two_tool_results_of_an_episode_share_one_block() -> None:
    # slime #2263
    call = '<tool_call>\n{"name": "add", "arguments": {"a": %d, "b": %d}}\n</tool_call>'
    engine = speaking("qwen3", [call % (17, 25) + "\n" + call % (1, 2), "42 and 3"])
    trajectory = await play(Adds, engine)
    (text,) = bridges(trajectory, engine)
    assert text == BLOCKS["qwen3"] + "\n<|im_start|>assistant\n"


# --- templates that rewrite the past


def test_reasoning_stripped_by_qwen3_later_stays_as_sampled() -> None:
    # slime #2213
    made = model("qwen3")
    turns = [
        QUESTION,
        says("", SUM, reasoning="Carry the one."),
        result("42"),
        says("It is 42.", reasoning="Say it."),
    ]
    before = made.render(turns[:3], [ADD])
    whole = made.render([*turns, MORE], [ADD])
    assert "Carry the one." in before
    assert "Carry the one." not in whole
    said = "<think>\nSay it.\n</think>\n\nIt is 42."
    text, bridge = made.after(made.sampled(said, "<|im_end|>"), turns, MORE)
    assert text == "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"
    assert bridge.junction.anchor is Anchor.STOP


@pytest.mark.anyio
async def test_an_episode_keeps_the_reasoning_that_qwen3_would_strip() -> None:
    # slime #2213
    call = '<think>\nCarry.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'

    class Asks(Adds):
        async def rollout(self, conversation: Conversation) -> None:
            turn = await conversation.generate()
            conversation.add(*await conversation.call_tools(turn))
            await twice(conversation)

    engine = speaking("qwen3", [call, "<think>\nSay it.\n</think>\n\n42", "<think>\n\n</think>\n\n84"])
    trajectory = await play(Asks, engine)
    after_call, after_answer = bridges(trajectory, engine)
    assert after_call.startswith("\n<|im_start|>user\n<tool_response>\n42\n")
    assert after_answer == "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n"
    last = engine.tokenizer.decode(trajectory.turns[-1].prompt_ids)
    assert ("Carry." in last, "Say it." in last) == (True, True)
    assert trajectory.turns[0].reasoning == "Carry."


# --- an open <think> in the prompt


def test_newline_sampled_after_an_open_think_does_not_merge() -> None:
    # tinker #877
    made = model("qwen3-thinking")
    prompt = list(made.bridger().first_prompt([QUESTION], [ADD]))
    newline = made.tokenizer.encode("\n")
    assert prompt[-len(newline) :] == newline
    sampled = [*newline, *made.sampled("Carry.\n</think>\n\n42", "<|im_end|>")]
    joined = made.tokenizer.encode(made.tokenizer.decode([*prompt, *sampled]))
    assert joined != [*prompt, *sampled], "encoding again would not fuse them, so this test shows nothing"
    text, bridge = made.after(sampled, [QUESTION, says("42", reasoning="Carry.")], MORE)
    assert text == "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert bridge.junction.seam is Seam.SPECIAL


@pytest.mark.anyio
async def test_an_episode_keeps_both_newlines_around_an_open_think() -> None:
    # tinker #877
    made = model("qwen3-thinking")
    newline = made.tokenizer.encode("\n")
    ids = [*newline, *made.sampled("Carry.\n</think>\n\n42", "<|im_end|>")]
    engine = speaking("qwen3-thinking", [Reply(ids=ids), "Again.\n</think>\n\n84"])
    trajectory = await talked(twice, engine)
    assert bridges(trajectory, engine) == [
        "\n<|im_start|>user\nAnd twice that?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    ]
    start = trajectory.turns[0].start
    assert list(trajectory.turns[1].prompt_ids[start - 1 : start + 1]) == [*newline, *newline]
    assert trajectory.turns[0].reasoning == "Carry."


# --- a turn that is cut


THINKS = {
    "qwen3": "<think>\nCarry the one.\n</think>\n\n42",
    "qwen3-thinking": "Carry the one.\n</think>\n\n42",
    "qwen3.6": "Carry the one.\n</think>\n\n42",
    "minimax": "Carry the one.\n</think>\n\n42",
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", THINKS)
async def test_turn_cut_inside_its_reasoning_ends_the_episode(name: str) -> None:
    # renderers #139
    made = model(name)
    ids = made.tokenizer.encode(THINKS[name])
    opened, closes = int(name == "qwen3"), ids.index(made.id("</think>"))
    for length in range(1, len(ids)):

        async def talk(conversation: Conversation, length: int = length) -> None:
            await conversation.generate(sampling=Sampling(max_tokens=length))
            conversation.add("And twice that?")
            await conversation.generate()

        engine = speaking(name, [Reply(ids=ids), "</think>84"])
        trajectory = await talked(talk, engine)
        inside = opened <= length <= closes
        assert trajectory.turns[0].thinking is inside, length
        ended = (Outcome.TOKEN_LIMIT, "max_tokens") if inside else (Outcome.COMPLETED, "")
        assert (trajectory.outcome, trajectory.limit) == ended, length
        if not inside:
            (text,) = bridges(trajectory, engine)
            assert text.startswith("[e~[" if name == "minimax" else "<|im_end|>\n<|im_start|>user\n")


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["qwen3", "qwen3-thinking", "qwen3.6"])
async def test_turn_cut_inside_its_reasoning_can_be_closed_as_masked(name: str) -> None:
    # renderers #139
    made = model(name)
    cut = made.tokenizer.encode(THINKS[name].partition(" one")[0])
    engine = speaking(name, [Reply(ids=cut, finish="length"), "</think>84"])
    trajectory = await talked(twice, engine, history=History(close_reasoning=True))
    (text,) = bridges(trajectory, engine)
    assert text.startswith("\n</think>\n\n<|im_end|>\n<|im_start|>user\nAnd twice that?<|im_end|>\n")
    assert text.count("</think>") == 1
    first, second = trajectory.turns
    assert second.junction is not None
    assert (second.junction.close, second.junction.cause) == (Close.MASKED, "reasoning_closed")
    assert sum(second.log.mask()[first.end : second.start]) == 0


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - TOOLS_MOVE))
def test_a_turn_that_ended_by_length_gets_its_close_masked(name: str) -> None:
    made = model(name)
    sampled = made.tokenizer.encode("The sum is")
    text, bridge = made.after(sampled, [QUESTION, says("The sum is")], MORE, cut=True)
    whole = made.render([QUESTION, says("The sum is"), MORE], [ADD])
    assert text == whole.rpartition("The sum is")[2]
    assert (bridge.junction.anchor, bridge.junction.close) == (Anchor.NONE, Close.MASKED)
    assert bridge.junction.seam is Seam.SPECIAL


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "gpt-oss", "llama-3.2", "gemma-4"])
async def test_turn_that_ended_by_length_differs_from_a_continued_one(name: str) -> None:
    async def talk(conversation: Conversation) -> None:
        first = await conversation.generate(sampling=Sampling(max_tokens=2))
        assert (first.finish, first.stop) == (FinishReason.LENGTH, "max_tokens")
        await conversation.generate()
        conversation.add("And twice that?")
        await conversation.generate()

    engine = speaking(name, ["The sum is 42", " is 42", "84"])
    trajectory = await talked(talk, engine)
    nothing, text = bridges(trajectory, engine)
    assert nothing == ""
    assert "And twice that?" in text
    assert trajectory.messages[1]["content"] == "The sum is 42"
