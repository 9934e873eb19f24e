"""Agents: their order, their engines, and the ones that are trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import (
    Conversation,
    Limits,
    Outcome,
    Run,
    RunFile,
    Tool,
    Turn,
    reward,
    tool,
)
from runner.engines.base import GenerationRequest
from runner.testing import Fault, Replies, Reply, ScriptedEngine, assert_exact, call
from runner.tokens.template import ChatTemplate
from tests.playing import Plain, play, play_all, recording, tasks
from tests.verifying import verify

pytestmark = pytest.mark.anyio


async def test_conversation_is_opened_once() -> None:
    class Asks(Plain):
        def step(self, turn: Turn) -> None:
            first = self.episode.conversation("judge", system_prompt="Judge.", prompt="Well?")
            again = self.episode.conversation("judge", prompt="ignored")
            assert first is again
            assert [message["role"] for message in first.messages] == ["system", "user"]

    assert (await play_all(Asks, "Yes"))[0].outcome is Outcome.COMPLETED


async def test_main_cannot_be_opened_before_the_runner_does() -> None:
    class Early(Plain):
        def setup(self) -> None:
            self.episode.conversation()

    trajectory = await play(Early, "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "the runner opens this conversation after prompt()" in trajectory.error


async def test_a_simulated_user_is_recorded_and_not_trained() -> None:
    class Served(Plain):
        async def step(self, turn: Turn) -> str | None:
            user = self.episode.conversation("user", system_prompt="You are a customer.")
            user.add(turn.text)
            said = await user.generate()
            return None if said.text == "Bye" else said.text

    engine = recording({"main": lambda turn: "How can I help?", "user": ["My order is late", "Bye"]})
    async with Run(Served, engine) as run:
        (trajectory,) = [t async for t in run]
    assert_exact(trajectory, engine)
    assert (trajectory.agent, len(trajectory.turns), trajectory.reward) == ("main", 2, 1.0)
    assert run.summary.turns == 4  # turns of the user are counted and stored, but not announced


async def test_turns_of_an_episode_are_bound_to_one_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Spreads(Plain):
        def tasks(self) -> list[Any]:
            return tasks(2)

        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            branch = conversation.branch("branch", train=False)
            branch.add("Else?")
            critic = self.episode.conversation("critic", prompt="Well?")
            for speaker in (branch, critic, self.episode.conversation("judge", prompt="And?")):
                await speaker.generate()

    bound: dict[str, set[int]] = {"ours": set(), "the judge's": set()}
    engines = {"ours": recording(lambda turn: "Yes"), "the judge's": recording(lambda turn: "Right")}
    for name, engine in engines.items():
        stream = engine.stream

        def watch(asked: GenerationRequest, name: str = name, stream: Any = stream) -> Any:
            assert asked.session is not None
            bound[name].add(id(asked.session.affinity))
            kept.append(asked.session.affinity)
            return stream(asked)

        monkeypatch.setattr(engine, "stream", watch)
    kept: list[object] = []  # keeps the objects, since a new object could have the id of a deleted one
    await play_all(Spreads, engines["ours"], engines={"judge": engines["the judge's"]})
    assert len(kept) == 8
    assert {name: len(affinities) for name, affinities in bound.items()} == {"ours": 2, "the judge's": 2}
    assert not bound["ours"] & bound["the judge's"]


async def test_self_play_has_two_trajectories_announced_together() -> None:
    class Duel(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            other = self.episode.conversation("black", system_prompt="You are black.", train=True)
            while len(conversation.turns) < 2:
                other.add((await conversation.generate()).text)
                conversation.add((await other.generate()).text)

        @reward
        def correct(self) -> dict[str, float]:
            return {"main": 1.0, "black": -1.0}

    engine = recording({"main": lambda turn: "e4", "black": lambda turn: "e5"})
    white, black = await play_all(Duel, engine)
    assert (white.agent, white.reward, black.agent, black.reward) == ("main", 1.0, "black", -1.0)
    assert white.id == black.id
    assert (white.trained, black.trained) == (True, True)
    assert white.turns[0].seed != black.turns[0].seed


class SelfPlay(Plain):
    """Environment with two trained players and a referee. `main` has no turn, and black none in every third episode."""

    async def rollout(self, conversation: Conversation) -> None:
        white = self.episode.conversation("white", prompt="You are white.", train=True)
        black = self.episode.conversation("black", prompt="You are black.", train=True)
        self.episode.conversation("referee", prompt="Is it legal?")
        await white.generate()
        if self.episode.index != 2:
            await black.generate()

    @reward
    def correct(self) -> dict[str, float]:
        return {"white": 1.0, "black": -1.0}


async def test_an_agent_that_never_spoke_leaves_no_trajectory_and_no_group(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with Run(SelfPlay, recording(lambda turn: "e4"), group_size=3, tasks=tasks(2), file=file) as run:
        groups = [group async for group in run.groups()]
    indices = [(g.task.id, g.agent, [t.index for t in g.trajectories], g.complete) for g in groups]
    assert sorted(indices) == [
        (task, agent, list(range(size)), True) for task in ("t0", "t1") for agent, size in (("black", 2), ("white", 3))
    ]
    assert all(trajectory.turns for group in groups for trajectory in group.trajectories)
    assert run.summary.outcomes == {Outcome.COMPLETED: 6}
    assert (run.summary.reward.mean, run.summary.reward.count) == (1.0, 6)
    assert {agent: mean.count for agent, mean in run.summary.agents.items()} == {"white": 6, "black": 4}
    with RunFile(file) as stored:
        assert {row.agent for row in stored.rows(trained=None)} == {"white", "black"}
        assert stored.outcomes() == {Outcome.COMPLETED: 6}
        rows = sorted((group.agent, len(group.rows), group.complete) for group in stored.groups())
        assert rows == [("black", 2, True), ("black", 2, True), ("white", 3, True), ("white", 3, True)]
    async with Run(SelfPlay, recording(lambda turn: "e4"), group_size=3, tasks=tasks(2), file=file) as again:
        assert [trajectory async for trajectory in again] == []
    assert (again.summary.outcomes, again.summary.turns) == ({Outcome.COMPLETED: 6}, 10)


@pytest.mark.parametrize("hook", ["setup", "prompt", "rollout", "the referee"])
async def test_episode_without_a_trained_turn_has_an_outcome(hook: str) -> None:
    class Failing(SelfPlay):
        async def rollout(self, conversation: Conversation) -> None:
            self.episode.conversation("white", prompt="You are white.", train=True)
            if hook == "the referee":
                await self.episode.conversation("referee", prompt="Is it legal?").generate()
            raise ValueError("broken")

    async def broken(self: Any) -> None:
        raise ValueError("broken")

    if hook in ("setup", "prompt"):
        setattr(Failing, hook, broken)
    async with Run(Failing, recording("Yes"), breaker=1, group_size=2) as run:
        groups = [group async for group in run.groups()]
    assert [(group.agent, len(group.trajectories), group.complete) for group in groups] == [("main", 2, True)]
    for trajectory in groups[0].trajectories:
        assert (trajectory.outcome, trajectory.turns, trajectory.reward) == (Outcome.ENV_ERROR, [], None)
        assert "broken" in trajectory.error
    assert (run.summary.episodes, run.summary.failed, run.summary.agents) == (2, 2, {})


async def test_limits_count_trained_conversations_together_and_no_others() -> None:
    class Talks(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            partner = self.episode.conversation("partner", train=True)
            user = self.episode.conversation("user")
            while True:
                user.add((await conversation.generate()).text)
                partner.add((await user.generate()).text)
                conversation.add((await partner.generate()).text)

    main, partner = await play_all(Talks, lambda turn: "Yes", limits=Limits(turns=3))
    assert (len(main.turns), len(partner.turns)) == (2, 1)
    assert (main.outcome, main.limit_agent, partner.outcome) == (Outcome.TURN_LIMIT, "partner", Outcome.TURN_LIMIT)


async def test_an_agent_on_an_engine_of_its_own_is_not_trained() -> None:
    class Opposed(Plain):
        train = False

        async def step(self, turn: Turn) -> None:
            opponent = self.episode.conversation("opponent", prompt="Move!", train=self.train)
            assert (await opponent.generate()).text == "from elsewhere"

    class Trained(Opposed):
        train = True

    elsewhere = ScriptedEngine("from elsewhere")
    trajectory = await play(Opposed, "Yes", engines={"opponent": elsewhere})
    assert (trajectory.outcome, trajectory.error) == (Outcome.COMPLETED, "")
    trajectory = await play(Trained, "Yes", engines={"opponent": elsewhere})
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "'opponent' plays on its own engine" in trajectory.error


@pytest.mark.parametrize("what", ["context", "template"])
async def test_failure_of_an_untrained_agent_is_env_error_and_names_it(what: str) -> None:
    class Served(Plain):
        async def step(self, turn: Turn) -> str:
            user = self.episode.conversation("user", prompt="x" * 500 if what == "context" else "Hello")
            await user.generate()
            user.add("no more")
            await user.generate()
            return "more"

    text = ChatTemplate.load("pythonic").text
    refusing = "{% for m in messages if m.content == 'no more' %}{{ raise_exception('enough') }}{% endfor %}" + text
    engine = recording(lambda turn: "Yes", template=ChatTemplate(refusing, name="refusing"))
    trajectory = await play(Served, engine, limits=Limits(context=200))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENV_ERROR, None)
    assert "agent 'user'" in trajectory.error


async def test_an_exception_in_a_tool_of_an_untrained_agent_names_it() -> None:
    def lookup() -> str:
        """Look something up."""
        raise LookupError("no such order")

    class Served(Plain):
        async def step(self, turn: Turn) -> str:
            user = self.episode.conversation("user", prompt="Hello", tools=[Tool(lookup)])
            await self.episode.answer(await user.generate())
            return "more"

    trajectory = await play(Served, {"main": lambda turn: "Yes", "user": [call("lookup")]})
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "no such order" in trajectory.error
    assert "agent 'user'" in trajectory.error


class Judged(Plain):
    @reward
    async def correct(self) -> bool:
        judge = self.episode.conversation("judge", prompt=f"Is {self.episode.text!r} right?")
        return (await judge.generate()).text == "right"


async def test_a_judge_in_a_reward_speaks_also_after_a_limit_or_an_end() -> None:
    class Endless(Judged):
        def step(self, turn: Turn) -> str:
            return "Continue."

    class Ends(Judged):
        def step(self, turn: Turn) -> str:
            self.episode.end()
            return "Thank you."

    replies = {"main": lambda turn: "4", "judge": ["right"]}
    assert (await play(Judged, replies)).reward == 1.0
    limited = await play(Endless, replies, limits=Limits(turns=2))
    assert (limited.outcome, limited.reward) == (Outcome.TURN_LIMIT, 1.0)
    ended = await play(Ends, replies)
    assert (ended.outcome, ended.reward) == (Outcome.COMPLETED, 1.0)


async def test_a_trained_agent_cannot_speak_while_it_is_scored() -> None:
    class Adds(Plain):
        @reward
        async def correct(self) -> bool:
            main = self.episode.conversation()
            main.add("Once more?")
            await main.generate()
            return True

    trajectory = await play(Adds, lambda turn: "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "agent 'main' cannot take a turn in a reward" in trajectory.error
    assert len(trajectory.turns) == 1


async def test_engine_failure_under_a_judge_is_played_again() -> None:
    replies: Replies = {"main": "4", "judge": [Reply("right")]}
    failed: list[int] = []

    def once(turn: Any) -> Fault | None:
        if turn.agent == "judge" and not failed:
            failed.append(turn.number)
            return Fault.error(0, "out of memory")
        return None

    async with Run(Judged, recording(replies, faults=once)) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.outcome, trajectory.attempt, trajectory.reward) == (Outcome.COMPLETED, 1, 1.0)
    assert run.summary.retried == 1


class Branches(Plain):
    """Environment that opens another conversation with the messages of main, by its prompt or by `add`."""

    def __init__(self, *, train: bool, added: bool = False, few_shot: bool = False) -> None:
        self.train = train
        self.added = added
        self.few_shot = few_shot

    async def step(self, turn: Turn) -> None:
        messages: list[Any] = self.episode.conversation().messages
        if self.few_shot:
            messages = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "Four"}]
        branch = self.episode.conversation("branch", prompt=() if self.added else messages, train=self.train)
        branch.add(*(messages if self.added else ()), "Another way?")
        await branch.generate()
        branch.add("And again?")
        await branch.generate()


@pytest.mark.parametrize("added", [False, True], ids=["prompt", "add"])
async def test_sampled_text_in_a_first_prompt_is_recorded_as_reencoded(added: bool) -> None:
    said = Reply(ids=tuple(b"It is 78"))
    async with Run(Branches(train=True, added=added), recording([said, "Yes", "No"])) as run:
        main, branch = [t async for t in run]
    assert [segment.cause for segment in branch.segments] == ["reencoded"]
    assert run.summary.junction_causes == {"reencoded": 1}
    assert_exact(main)
    with pytest.raises(AssertionError, match=r"^t0#0 branch: its first prompt contains text that this episode sampled"):
        assert_exact(branch)


@pytest.mark.parametrize(("train", "few_shot"), [(False, False), (True, True)], ids=["untrained", "few-shot"])
async def test_untrained_or_unsampled_prompt_passes_assert_exact(train: bool, few_shot: bool) -> None:
    replies = {"main": "It is 78", "branch": ["Yes", "No"]}
    async with Run(Branches(train=train, few_shot=few_shot), recording(replies)) as run:
        trajectories = [t async for t in run]
    for trajectory in trajectories:
        assert_exact(trajectory)
    assert sum(run.summary.junction_causes.values()) == (not few_shot)


async def test_run_file_with_a_reencoded_conversation_is_verified(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    async with Run(Branches(train=True), recording(["It is 78", "Yes", "No"]), file=file) as run:
        assert len([t async for t in run]) == 2
    proven = await anyio.to_thread.run_sync(verify, file)
    assert proven.exit_code == 0, proven.output


@pytest.mark.both_backends
@pytest.mark.parametrize("choice", ["look", "required"])
async def test_the_tool_choice_of_the_class_is_for_main(choice: str) -> None:
    def weigh(grams: int) -> int:
        """Weigh it."""
        return grams

    class Both(Plain):
        tool_choice = choice

        @tool
        async def look(self) -> str:
            """Look."""
            self.tool_choice = "none"
            other = self.episode.conversation("other", prompt="x", tools=[Tool(weigh)])
            self.tool_choice = choice
            turn = await other.generate()
            self.tool_choice = "none"
            return turn.text

    trajectory = await play(Both(), lambda ask: "said" if ask.agent == "other" else [call("look"), "bye"][ask.turn])
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert [m["content"] for m in trajectory.messages if m["role"] == "tool"] == ["said"]
