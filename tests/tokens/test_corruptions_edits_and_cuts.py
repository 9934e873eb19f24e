"""Rarer cases at the edges of turns and histories: edits, retries, budgets, cuts, two stops, hidden turns.

The name of each test is a promise. The comment at its beginning names the project and issue of the case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runner import Conversation, FinishReason, Limits, Outcome, Sampling
from runner.messages import Message
from runner.testing import Reply
from runner.tokens.bridging.bridge import Unbridgeable
from runner.tokens.bridging.history import AlignmentKind, compare
from runner.tokens.junction import Close, Result, Seam
from tests.playing import play, talked, twice
from tests.tokens.episodes import SUM, Adds, bridges, speaking
from tests.tokens.families import ADD, FAMILIES, MORE, QUESTION, QWEN_CALL, TOOLS_MOVE, called, model, result, says

pytestmark = pytest.mark.sample_cases(3)


@pytest.fixture
def anyio_backend() -> str:
    """Asyncio only, since the event loop changes no id."""
    return "asyncio"


EDITS = {
    "edited": lambda m: [m[0], {**m[1], "content": "43"}, *m[2:]],
    "inserted": lambda m: [*m, says("I said this."), MORE],
    "inserted in the middle": lambda m: [m[0], says("Hm."), MORE, *m[1:]],
    "question edited": lambda m: [{**m[0], "content": "What is 2 + 2?"}, *m[1:]],
    "shrunk": lambda m: [m[2]],
    "shrunk from the end": lambda m: m[:1],
}


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "llama-3.1", "devstral"])
@pytest.mark.parametrize("kind", EDITS)
async def test_history_changed_by_a_harness_is_rendered_again(name: str, kind: str) -> None:
    edit: Any = EDITS[kind]
    asked: list[Message] = []

    async def talk(conversation: Conversation) -> None:
        await twice(conversation)
        edited = edit(conversation.messages)
        conversation.replace(edited if edited[-1]["role"] == "user" else [*edited, MORE])
        asked.extend(conversation.messages)
        await conversation.generate()

    engine = speaking(name, ["42", "84", "168"])
    trajectory = await talked(talk, engine)
    made = model(name)
    # An earlier request is repeated without the later turns: it has the same ids as a render.
    cause = "again" if kind == "shrunk from the end" else "environment"
    assert [segment.cause for segment in trajectory.segments] == ["start", cause]
    last = trajectory.turns[2]
    assert list(last.prompt_ids) == made.tokenizer.encode(made.render(asked))
    assert [sum(segment.log.mask()) for segment in trajectory.segments] == [
        sum(len(turn.token_ids) for turn in trajectory.turns[:2]),
        len(last.token_ids),
    ]
    kinds = {"edited": AlignmentKind.EDITED, "inserted": AlignmentKind.INSERTED}
    if kind in kinds:
        before: Sequence[Message] = trajectory.segments[0].messages
        assert compare(before, edit(list(before))).kind is kinds[kind]


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "kimi"])
async def test_an_assistant_message_among_the_new_ones_forks_by_name(name: str) -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("And twice that?", says("I said 84."), "And that?")
        await conversation.generate()

    engine = speaking(name, ["42", "168"])
    trajectory = await talked(talk, engine)
    made, (first, second) = model(name), trajectory.turns
    assert [segment.cause for segment in trajectory.segments] == ["start", "assistant_in_new"]
    assert second.junction is not None
    assert second.junction.result is Result.FORKED
    assert list(second.prompt_ids) == made.tokenizer.encode(made.render(trajectory.messages[:-1]))
    assert sum(second.log.mask()) == len(second.token_ids)
    assert first.log is not second.log


def test_shrunk_history_and_a_retry_have_different_kinds() -> None:
    stored = [QUESTION, says("42"), MORE, says("84")]
    assert compare(stored, stored[:3]).kind is AlignmentKind.RETRY
    assert compare(stored, stored[:2]).kind is AlignmentKind.SHRUNK
    assert compare(stored, stored[:1]).kind is AlignmentKind.SHRUNK
    assert compare(stored, [stored[0], stored[3]]).kind is AlignmentKind.EDITED


@pytest.mark.anyio
async def test_repeated_turn_starts_from_the_same_prompt_ids() -> None:
    made = model("qwen3")
    newline = made.tokenizer.encode("\n")

    async def talk(conversation: Conversation) -> None:
        await twice(conversation)
        conversation.replace(conversation.messages[:3])
        await conversation.generate()

    ids = [*newline, *newline, *made.tokenizer.encode("42")]
    assert made.tokenizer.encode(made.tokenizer.decode(ids)) != ids
    engine = speaking("qwen3", [Reply(ids=ids), "84", "eighty-four"])
    trajectory = await talked(talk, engine)
    _, second, third = trajectory.turns
    assert [segment.cause for segment in trajectory.segments] == ["start", "retry"]
    assert third.prompt_ids == second.prompt_ids
    assert sum(trajectory.segments[0].log.mask()) == len(trajectory.turns[0].token_ids)


# --- stop strings


@pytest.mark.anyio
@pytest.mark.parametrize("chunks", [1, 3, "whole"])
@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "deepseek-v3.1", "llama-3.2"])
async def test_a_stop_string_cuts_the_text_and_not_the_ids(name: str, chunks: Any) -> None:
    made = model(name)

    async def talk(conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(stop=("</answer>",)))
        conversation.add("And twice that?")
        await conversation.generate()

    ids = made.tokenizer.encode("<answer>42</answer> and so on and on")
    engine = speaking(name, [Reply(ids=ids, chunks=chunks), "84"])
    trajectory = await talked(talk, engine)
    (text,) = bridges(trajectory, engine)
    first, second = trajectory.turns
    assert (first.reasoning or first.text, first.stop, first.finish) == ("<answer>42", "</answer>", FinishReason.STOP)
    kept = list(first.token_ids)
    assert kept == ids[: len(kept)]
    said, before = made.tokenizer.decode(kept), made.tokenizer.decode(kept[:-1])
    assert "</answer>" in said
    assert "</answer>" not in before
    assert first.dropped > 0
    assert second.junction is not None
    assert (second.junction.dropped, second.junction.close) == (first.dropped, Close.MASKED)
    whole = made.render([QUESTION, says("42"), MORE])
    assert text == whole.rpartition("42")[2]


# --- cases that the random conversations found


@pytest.mark.parametrize("rest", ["\n", "\n\n", " \n", "\n<"])
@pytest.mark.parametrize("name", ["qwen2.5", "qwen3"])
def test_turn_cut_after_a_call_and_space_gets_no_second_call_end(name: str, rest: str) -> None:
    made = model(name)
    said = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
    history = [QUESTION, says("", called({"a": 17, "b": 25}))]
    text, _ = made.after(made.sampled(said + rest, None), history, result("42"), cut=True)
    assert text.startswith("<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n")


@pytest.mark.parametrize("lost", ["\x1d", "\x1d\x1d x", "\x1d words"])
def test_unwritable_white_space_of_a_vocabulary_is_refused_by_name(lost: str) -> None:
    made = model("smollm2")
    assert "\x1d" not in made.tokenizer.decode(made.tokenizer.encode(lost))
    with pytest.raises(Unbridgeable) as caught:
        made.after(made.sampled("42", "<|im_end|>"), [QUESTION, says("42")], {"role": "user", "content": lost})
    assert caught.value.property == "text_not_kept"


# --- budgets


@pytest.mark.anyio
@pytest.mark.parametrize("limit", ["max_tokens", "tokens", "context"])
async def test_a_budget_that_ends_exactly_at_a_turns_end_leaves_it_whole(limit: str) -> None:
    made = model("qwen3")
    whole = made.sampled("The sum is 42.", "<|im_end|>")
    prompt = len(made.bridger().first_prompt([{"role": "user", "content": "Question 0?"}]))

    async def ask(spare: int) -> Any:
        size = len(whole) + spare

        async def talk(conversation: Conversation) -> None:
            await conversation.generate(sampling=Sampling(max_tokens=size if limit == "max_tokens" else 500))

        engine = speaking("qwen3", "The sum is 42.")
        limits = {
            "tokens": Limits(tokens=size), "context": Limits(context=prompt + size), "max_tokens": Limits(),
        }[limit]  # fmt: skip
        trajectory = await talked(talk, engine, limits=limits)
        return trajectory, trajectory.turns[0]

    for spare in (0, 1):
        trajectory, turn = await ask(spare)
        assert (turn.finish, turn.stop, list(turn.token_ids)) == (FinishReason.STOP, made.id("<|im_end|>"), whole)
        assert trajectory.outcome is Outcome.COMPLETED
    trajectory, turn = await ask(-1)
    assert list(turn.token_ids) == whole[:-1]
    assert (turn.finish, turn.stop) == (FinishReason.CONTEXT if limit == "context" else FinishReason.LENGTH, limit)
    assert trajectory.outcome is (Outcome.CONTEXT_LIMIT if limit == "context" else Outcome.TOKEN_LIMIT)


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "gemma-4", "deepseek-v3.1"])
async def test_a_turn_cut_right_before_its_stop_gets_one_close(name: str) -> None:
    made = model(name)
    ids = made.tokenizer.encode("The sum is 42.")

    async def talk(conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(max_tokens=len(ids)))
        conversation.add("And twice that?")
        await conversation.generate()

    engine = speaking(name, ["The sum is 42.", "84"])
    trajectory = await talked(talk, engine)
    (text,) = bridges(trajectory, engine)
    first, second = trajectory.turns
    assert (first.finish, list(first.token_ids)) == (FinishReason.LENGTH, ids)
    assert text == made.render([QUESTION, says("The sum is 42."), MORE]).rpartition("42.")[2]
    assert second.junction is not None
    assert second.junction.close is Close.MASKED


@pytest.mark.anyio
async def test_episode_whose_tokens_end_with_a_turn_samples_no_further_id() -> None:
    made = model("qwen3")
    engine = speaking("qwen3", [QWEN_CALL, "42"])
    size = len(made.sampled(QWEN_CALL, "<|im_end|>"))
    trajectory = await play(Adds, engine, limits=Limits(tokens=size))
    assert (len(trajectory.turns), trajectory.outcome, trajectory.limit) == (1, Outcome.TOKEN_LIMIT, "tokens")
    assert trajectory.turns[0].finish is FinishReason.STOP
    assert sum(trajectory.segments[0].log.mask()) == size


# --- two stops


TWO = [
    *(("qwen2.5", "<|im_end|>", "<|endoftext|>"), ("qwen3", "<|im_end|>", "<|endoftext|>")),
    *(("llama-3.1", "<|eot_id|>", "<|end_of_text|>"), ("llama-3.2", "<|eot_id|>", "<|eom_id|>")),
    *(("gpt-oss", "<|end|>", "<|return|>"), ("glm-4.5", "<|user|>", "<|endoftext|>")),
]


@pytest.mark.parametrize(("name", "close", "stop"), TWO)
def test_close_and_another_stop_are_kept_without_a_second_close(name: str, close: str, stop: str) -> None:
    made = model(name)
    sampled = made.sampled(f"42{close}", stop)
    text, bridge = made.after(sampled, [QUESTION, says("42")], MORE)
    whole = made.render([QUESTION, says("42"), MORE], [ADD])
    assert text == whole.rpartition(f"42{close}")[2]
    assert (bridge.junction.close, bridge.junction.cause) == (Close.SAMPLED, "closed_before_stop")


@pytest.mark.parametrize("name", ["qwen3", "llama-3.2", "deepseek-v3.1", "devstral", "kimi"])
def test_the_same_stop_twice_is_kept_twice_and_followed_once(name: str) -> None:
    made, stop = model(name), FAMILIES[name].stops[0]
    once, _ = made.after(made.sampled("42", stop), [QUESTION, says("42")], MORE)
    text, bridge = made.after(made.sampled(f"42{stop}", stop), [QUESTION, says("42")], MORE)
    assert text == once
    assert bridge.junction.seam is Seam.SPECIAL


# --- templates that no bridge can serve


@pytest.mark.parametrize("name", sorted(TOOLS_MOVE))
def test_tools_that_move_past_the_turn_are_refused_by_name(name: str) -> None:
    # Mistral-Nemo prints the tools before the last user turn.
    made = model(name)
    history = [QUESTION, says("42")]
    before, after = made.render([QUESTION], [ADD]), made.render([*history, MORE], [ADD])
    assert before.index("[AVAILABLE_TOOLS]") < after.index("[AVAILABLE_TOOLS]")
    for sampled in (made.sampled("42", "</s>"), made.sampled("42", None)):
        cut = len(sampled) == len(made.sampled("42", None))
        with pytest.raises(Unbridgeable) as caught:
            made.after(sampled, history, MORE, cut=cut)
        assert caught.value.property == "tools_move"


def test_a_turn_that_a_template_hides_is_refused_by_name() -> None:
    for name in ("glm-4", "smollm2", "smollm3"):
        made = model(name)
        sampled = made.sampled("...", FAMILIES[name].stops[0])
        with pytest.raises(Unbridgeable) as caught:
            made.after(sampled, [QUESTION, says("", SUM)], result("42"))
        assert caught.value.property == "no_sentinel"


def test_template_gets_null_content_and_text_arguments_if_it_needs() -> None:
    made = model("deepseek-v3")
    wide, bar = "\uff5c", "\u2581"
    shown = made.render([QUESTION, says("", SUM)], generation_prompt=False)
    assert '{"a":17,"b":25}' in shown.replace(" ", "")
    sampled = made.sampled("...", FAMILIES["deepseek-v3"].stops[0])
    text, bridge = made.after(sampled, [QUESTION, says("", SUM)], result("42"))
    assert text.startswith(f"<{wide}tool{bar}outputs{bar}begin{wide}>")
    assert bridge.junction.seam == "special"
