"""The tree of a conversation's turns: any turn can be continued with its exact ids, and each id is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner import Conversation, FinishReason, Message, Outcome, Run, Sampling, Trajectory
from runner.testing import AwkwardTokenizer, Reply, assert_exact
from tests.playing import recording, talked, talking
from tests.verifying import verify

pytestmark = pytest.mark.anyio

Q: Message = {"role": "user", "content": "Why?"}


def trained(trajectory: Trajectory) -> int:
    return sum(sum(segment.log.mask()) for segment in trajectory.segments)


async def test_history_that_ends_at_any_turn_continues_its_ids() -> None:
    async def talk(conversation: Conversation) -> None:
        for question in ("b", "c", "d"):
            await conversation.generate()
            conversation.add(question)
        await conversation.generate()
        conversation.replace([*conversation.messages[:4], {"role": "user", "content": "another way"}])
        await conversation.generate()

    engine = recording(["one", "two", "three", "four", "five"], tokenizer=AwkwardTokenizer())
    trajectory = await talked(talk, engine)
    first, branch = trajectory.segments
    _, second, _, _, fifth = trajectory.turns
    assert (branch.cause, branch.shared) == ("branch", second.end)
    assert fifth.prompt_ids[: second.end] == first.log.ids[: second.end]
    assert [message["content"] for message in branch.messages] == [
        "Question 0?",
        "one",
        "b",
        "two",
        "another way",
        "five",
    ]
    assert trained(trajectory) == trajectory.sampled, "turns that a later one abandoned stay trained"


async def test_history_that_ends_at_a_prompt_samples_its_turn_again() -> None:
    async def talk(conversation: Conversation) -> None:
        for question in ("b", "c"):
            await conversation.generate()
            conversation.add(question)
        await conversation.generate()
        conversation.replace(conversation.messages[:3])
        await conversation.generate()

    trajectory = await talked(talk, recording(["one", "two", "three", "four"], tokenizer=AwkwardTokenizer()))
    assert [segment.cause for segment in trajectory.segments] == ["start", "again"]
    assert trajectory.turns[3].prompt_ids == trajectory.turns[1].prompt_ids
    assert trained(trajectory) == trajectory.sampled


async def test_abandoned_path_is_extended_when_its_history_returns() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("b")
        await conversation.generate()
        left = conversation.messages
        conversation.replace([*left[:2], {"role": "user", "content": "c"}])
        await conversation.generate()
        conversation.replace([*left, {"role": "user", "content": "d"}])
        await conversation.generate()

    trajectory = await talked(talk, recording(["one", "two", "three", "four"], tokenizer=AwkwardTokenizer()))
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 0], "the end of a segment is extended"
    assert (
        trajectory.turns[3].prompt_ids[: trajectory.turns[1].end]
        == trajectory.segments[0].log.ids[: trajectory.turns[1].end]
    )


async def test_cut_turn_may_be_branched_from_after_its_continuation() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(max_tokens=4))
        cut = conversation.messages
        await conversation.generate()
        conversation.add("b")
        await conversation.generate()
        conversation.replace([*cut, {"role": "user", "content": "c"}])
        turn = await conversation.generate()
        assert turn.finish is FinishReason.STOP

    trajectory = await talked(talk, recording(["Once more", " upon", "b!", "c!"]))
    assert [segment.cause for segment in trajectory.segments] == ["start", "branch"]
    assert [message["content"] for message in trajectory.messages] == ["Question 0?", "Once", "c", "c!"]


async def test_unseen_messages_of_an_earlier_turn_are_last() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("b")
        await conversation.generate()
        conversation.replace([*conversation.messages[:2], {"role": "user", "content": "c"}])

    trajectory = await talked(talk, recording(["one", "two"]))
    assert [message["content"] for message in trajectory.messages] == ["Question 0?", "one", "c"]
    assert trajectory.segments[-1].unseen == 1
    assert trajectory.outcome is Outcome.COMPLETED


async def test_stored_turn_tree_follows_from_messages_and_ids(tmp_path: Path) -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(max_tokens=4))
        cut = conversation.messages
        for question in ("b", "c", "d"):
            await conversation.generate()
            conversation.add(question)
        said = conversation.messages
        for history in ([*cut, Q], said[:5], said[:3], [*said[:4], Q]):
            conversation.replace(history)
            await conversation.generate()

    path = tmp_path / "run.db"
    says: Any = [Reply("Once", finish="length"), *(f"said {number}" for number in range(8))]
    async with Run(talking(talk), recording(says), file=path) as run:
        (trajectory,) = [each async for each in run]
    assert_exact(trajectory)
    causes = [segment.cause for segment in trajectory.segments]
    assert {"start", "branch", "again"} <= set(causes), causes
    result = verify(path)
    assert result.exit_code == 0, result.output
