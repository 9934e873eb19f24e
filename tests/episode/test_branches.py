"""Branches of a conversation: exact from any turn, in parallel, with tools and a reward of their own."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from examples.branches import BestOfN, RetryFromTheMiddle, TreeSearch
from runner import BadOption, Conversation, Outcome, Tool, Trajectory, reward
from runner.episode import prompting
from runner.testing import Fault, Reply, assert_exact
from runner.training import Selection
from runner.training.tree import TokenTree
from tests.episode.awkward import misspelling
from tests.playing import Plain, assert_nothing_open, play_all, recording
from tests.verifying import change, verdict, verify

pytestmark = pytest.mark.anyio


async def played(environment: Any, says: Any, **options: Any) -> list[Trajectory]:
    # Verification does not support the vocabulary of `misspelling`.
    engine = recording(says, template="hermes") if "file" in options else misspelling(says)
    trajectories = await play_all(environment, engine, **options)
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        assert_exact(trajectory, engine)
    assert_nothing_open(engine)
    return trajectories


def trained(trajectory: Trajectory) -> int:
    return sum(sum(segment.log.mask()) for segment in trajectory.segments)


# --- branches


async def test_branch_continues_the_ids_and_has_its_own_reward() -> None:
    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            first = await conversation.generate()
            conversation.add("b")
            await conversation.generate()
            early = conversation.branch("early", turn=first)
            early.add("c")
            late, unseen = conversation.branch("late"), conversation.branch("unseen", train=False)
            late.add("d")
            assert [message["content"] for message in early.messages] == ["Question 0?", "one", "c"]
            async with anyio.create_task_group() as group:
                for one in (early, late):
                    group.start_soon(one.generate)
            assert unseen.turns == []

        @reward
        def correct(self) -> dict[str, float]:
            return {"main": 0, "early": 1, "late": 0.5}

    words = iter(["one", "two", "three", "four"])
    main, early, late = await played(Branches, lambda asked: next(words))
    assert [(each.agent, each.reward) for each in (main, early, late)] == [("main", 0), ("early", 1), ("late", 0.5)]
    for branch, turn in ((early, main.turns[0]), (late, main.turns[1])):
        (segment,) = branch.segments
        assert (segment.cause, segment.shared) == ("branch", turn.end)
        assert segment.log.ids[: turn.end] == turn.log.ids[: turn.end]
        assert trained(branch) == branch.sampled
    assert trained(main) == main.sampled, "ids that the branches share are trained once, in their turn"


async def test_branches_share_one_tree_in_training() -> None:
    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            for name in "ab":
                branch = conversation.branch(name)
                branch.add(f"this way: {name}")
                await branch.generate()

    trajectories = await played(Branches, lambda asked: "words")
    rows = Selection.of(trajectories).rows
    tree = TokenTree.of(rows)
    main, a, b = (len(trajectory.segments[0].log) for trajectory in trajectories)
    begins = [trajectory.segments[0].log.ids for trajectory in trajectories[1:]]
    common = next(at for at, pair in enumerate(zip(*begins, strict=False)) if pair[0] != pair[1])
    assert len(tree.ids) == a + b - common
    assert common > main
    assert len(tree.terms) == sum(trajectory.sampled for trajectory in trajectories)


async def test_a_branch_before_the_first_turn_has_the_prompt() -> None:
    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            branches = [conversation.branch(name) for name in "ab"]
            async with anyio.create_task_group() as group:
                for one in branches:
                    group.start_soon(one.generate)

    a, b = await played(Branches, lambda asked: "words")
    assert a.turns[0].prompt_ids == b.turns[0].prompt_ids
    assert [segment.cause for segment in (*a.segments, *b.segments)] == ["start", "start"]


async def test_a_branch_with_other_tools_shows_them() -> None:
    def jump() -> str:
        """Jump."""
        return "up"

    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            branch = conversation.branch("jumper", tools=[Tool(jump)])
            branch.add("Jump.")
            await branch.generate()

    _, jumper = await played(Branches, lambda asked: "words")
    assert [segment.cause for segment in jumper.segments] == ["environment"]
    assert [tool["function"]["name"] for tool in jumper.segments[0].tools] == ["jump"]


async def test_stored_branches_follow_from_messages_and_ids(tmp_path: Path) -> None:
    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            branch = conversation.branch("a")
            branch.add("b")
            await branch.generate()
            further = branch.branch("further")
            further.add("c")
            await further.generate()

    path = tmp_path / "run.db"
    trajectories = await played(Branches, lambda asked: "words", file=path)
    assert [trajectory.segments[0].shared > 0 for trajectory in trajectories] == [False, True, True]
    result = await anyio.to_thread.run_sync(verify, path)
    assert result.exit_code == 0, result.output
    await anyio.to_thread.run_sync(
        change, path, "UPDATE segments SET shared = shared - 1 WHERE shared AND origin_agent = ?", "a"
    )
    found = (await anyio.to_thread.run_sync(verdict, path))["difference"]
    assert (found["agent"], found["kind"]) == ("further", "layout")


async def test_invalid_branch_keep_and_tries_are_refused() -> None:
    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turn = await conversation.generate()
            other = conversation.branch("a")
            with pytest.raises(BadOption, match=r"branch\('a'\): there is an agent of that name"):
                conversation.branch("a")
            with pytest.raises(BadOption, match="is not a turn of conversation 'a'"):
                other.branch("b", turn=turn)
            with pytest.raises(BadOption, match="is not a turn of conversation 'a'"):
                other.keep(turn)
            with pytest.raises(BadOption, match="tries"):
                await conversation.tries(0)

    await played(Branches, lambda asked: "words")


# --- tries


@pytest.mark.parametrize("train_others", [False, True])
async def test_one_try_is_kept_and_others_are_trained_or_not(train_others: bool) -> None:
    class Tries(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("b")
            tries = await conversation.tries(3)
            conversation.keep(tries[1], train_others=train_others)
            assert conversation.messages[-1]["content"] == tries[1].text
            conversation.add("c")
            await conversation.generate()

    words = iter(["one", "two", "three", "four", "five"])
    (trajectory,) = await played(Tries, lambda asked: next(words))
    first, *tries, last = trajectory.turns
    assert len({tuple(turn.prompt_ids) for turn in tries}) == 1
    assert len({turn.seed for turn in tries}) == 3
    assert last.prompt_ids[: tries[1].end] == tries[1].log.ids[: tries[1].end]
    assert [turn.left_out for turn in tries] == [not train_others, False, not train_others]
    kept = [turn for turn in trajectory.turns if not turn.left_out]
    assert trained(trajectory) == sum(turn.end - turn.start for turn in kept)
    assert first.segment == 0


async def test_an_error_in_one_try_is_that_of_all() -> None:
    class Tries(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.tries(3)

    engine = misspelling([Reply("one"), Reply("two", fault=Fault.reject()), Reply("three")])
    (trajectory,) = await play_all(Tries, engine, retries=0)
    assert (trajectory.outcome, "refus" in trajectory.error) == (Outcome.ENGINE_ERROR, True)
    assert_nothing_open(engine)


# --- the check


async def test_branch_that_was_encoded_again_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    branch_off = prompting._branch_off

    def encoded_anew(prompt: Any, node: Any) -> None:
        branch_off(prompt, node)
        text = tokenizer.decode(prompt.ids)
        prompt.ids = prompt.new_ids = array("i", tokenizer.encode(text))

    class Branches(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            branch = conversation.branch("a")
            branch.add("b")
            await branch.generate()

    engine = misspelling(lambda asked: "It is the same")
    tokenizer = engine.tokenizer
    monkeypatch.setattr(prompting, "_branch_off", encoded_anew)
    with pytest.raises(
        AssertionError, match=r"a segment 0 \(branch\): it was encoded again, and does not have the ids of"
    ):
        await play_all(Branches, engine)


# --- the examples


async def test_best_of_n_keeps_one_try_of_each_line() -> None:
    count = iter(range(100))
    for trajectory in await played(BestOfN, lambda asked: f"the sea, the tree {next(count)}"):
        assert len(trajectory.turns) == 12
        assert sum(turn.left_out for turn in trajectory.turns) == 9
        assert trajectory.reward == 1


async def test_tree_search_has_a_trajectory_for_each_branch() -> None:
    trajectories = await played(TreeSearch, lambda asked: "the sea" if asked.agent.endswith("b") else "the tree")
    of_first = [trajectory for trajectory in trajectories if trajectory.task.id == "sea"]
    assert {len(trajectory.agent.split(".")) for trajectory in of_first} == {2, 3}
    assert len(of_first) == 2 + 4
    assert all(trajectory.segments[0].shared for trajectory in of_first if trajectory.agent.count(".") == 2)


async def test_a_retry_from_the_middle_leaves_what_was_said_trained() -> None:
    for trajectory in await played(RetryFromTheMiddle, lambda asked: "nothing that ends alike"):
        assert [segment.cause for segment in trajectory.segments] == ["start", "branch"]
        assert (len(trajectory.turns), trained(trajectory)) == (6, trajectory.sampled)
