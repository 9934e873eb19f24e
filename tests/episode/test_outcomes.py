"""Ends of an episode: every row of the table of limits and faults that needs no clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runner import (
    Conversation,
    Environment,
    EpisodeOver,
    FinishReason,
    Limits,
    Outcome,
    Run,
    Sampling,
    Task,
    Turn,
    metric,
    reward,
    tool,
)
from runner.options import Concurrency
from runner.testing import Fault, Reply, call
from runner.tokens.template import ChatTemplate
from tests.playing import Plain, play, play_all, recording, tasks

pytestmark = pytest.mark.anyio


class Endless(Plain):
    """Environment with a game that does not end by itself."""

    def step(self, turn: Turn) -> str | None:
        return "Continue."


def always(text: str) -> Any:
    return lambda turn: text


async def test_turns_reached_is_turn_limit_and_scored() -> None:
    trajectory = await play(Endless, always("More"), limits=Limits(turns=3))
    assert (trajectory.outcome, trajectory.limit, trajectory.limit_agent) == (Outcome.TURN_LIMIT, "turns", "main")
    assert (len(trajectory.turns), trajectory.reward) == (3, 1.0)
    assert trajectory.segments[0].unseen == 1  # the last answer was never in a prompt


async def test_token_limit_cuts_the_last_turn_to_fit() -> None:
    trajectory = await play(Endless, always("12345"), limits=Limits(tokens=10))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "tokens")
    assert trajectory.sampled == 10
    assert [(turn.finish, turn.stop) for turn in trajectory.turns][1:] == [(FinishReason.LENGTH, "tokens")]
    assert trajectory.reward == 1.0


async def test_tokens_reached_exactly_at_a_turns_end_leaves_that_turn_whole() -> None:
    trajectory = await play(Endless, always("1234"), limits=Limits(tokens=10))  # 4 ids and the stop, in two turns
    assert [turn.finish for turn in trajectory.turns] == [FinishReason.STOP] * 2
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TOKEN_LIMIT, "tokens")


async def test_rollout_that_returns_after_a_cut_turn_is_token_limit() -> None:
    trajectory = await play(Plain, "12345678", sampling=Sampling(max_tokens=4))
    (turn,) = trajectory.turns
    assert (turn.finish, turn.stop, turn.text) == (FinishReason.LENGTH, "max_tokens", "1234")
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.TOKEN_LIMIT, "max_tokens", 1.0)


async def test_game_may_answer_a_cut_turn_and_continue() -> None:
    trajectory = await play(Endless, always("12345678"), sampling=Sampling(max_tokens=4), limits=Limits(turns=3))
    assert [(turn.finish, turn.text) for turn in trajectory.turns] == [(FinishReason.LENGTH, "1234")] * 3
    assert (trajectory.outcome, trajectory.limit) == (Outcome.TURN_LIMIT, "turns")
    assert [message["content"] for message in trajectory.messages] == ["Question 0?", *["1234", "Continue."] * 3]
    assert len(trajectory.segments) == 1


async def test_a_game_that_ends_with_a_cut_turn_is_token_limit() -> None:
    class Short(Plain):
        def step(self, turn: Turn) -> str | None:
            return "Again." if turn.number == 0 else None

    trajectory = await play(Short, always("12345678"), sampling=Sampling(max_tokens=4))
    assert (trajectory.outcome, trajectory.limit, len(trajectory.turns)) == (Outcome.TOKEN_LIMIT, "max_tokens", 2)


async def test_complete_calls_of_a_cut_turn_are_run() -> None:
    class Writes(Plain):
        def __init__(self) -> None:
            self.notes: list[str] = []

        @tool
        def note(self, text: str) -> None:
            """Write a note."""
            self.notes.append(text)

        @metric
        def notes_written(self) -> float:
            return len(self.notes)

    text = "[note(text='a')]"
    cut = Reply(text, finish="length")
    trajectory = await play(Writes, [cut])
    assert trajectory.metrics == {"notes_written": 1.0}
    assert trajectory.outcome is Outcome.TOKEN_LIMIT


async def test_turn_that_fills_the_context_is_context_limit() -> None:
    trajectory = await play(Plain, "1" * 500, limits=Limits(context=100))
    (turn,) = trajectory.turns
    assert (turn.finish, turn.stop) == (FinishReason.CONTEXT, "context")
    assert turn.end == 100
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.CONTEXT_LIMIT, "context", 1.0)


async def test_author_may_replace_a_prompt_past_the_context() -> None:
    raised: list[str] = []

    class Compacts(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("x" * 500)
            try:
                await conversation.generate()
            except EpisodeOver as over:
                raised.append(str(over))
            conversation.replace("In short: x.")
            await conversation.generate()

    trajectory = await play(Compacts, always("Yes"), limits=Limits(context=200))
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.COMPLETED, "", 1.0)
    assert [segment.cause for segment in trajectory.segments] == ["start", "environment"]
    assert "t0#0" in raised[0]
    assert "200" in raised[0]


async def test_second_prompt_past_the_context_ends_the_episode() -> None:
    class Insists(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("x" * 500)
            for _ in range(2):
                with pytest.raises(EpisodeOver):
                    await conversation.generate()
            conversation.replace("In short: x.")
            with pytest.raises(EpisodeOver):
                await conversation.generate()

    trajectory = await play(Insists, always("Yes"), limits=Limits(context=200))
    assert (trajectory.outcome, trajectory.limit) == (Outcome.CONTEXT_LIMIT, "context")
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("after", ["return", "raise"])
async def test_swallowed_context_limit_is_still_the_outcome(after: str) -> None:
    class Swallows(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("x" * 500)
            try:
                await conversation.generate()
            except EpisodeOver:
                if after == "raise":
                    raise ValueError("and now?") from None

    trajectory = await play(Swallows, always("Yes"), limits=Limits(context=200))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.CONTEXT_LIMIT, 1.0)


async def test_first_prompt_past_the_context_names_the_task() -> None:
    given = [Task(id="short", prompt="Hi"), Task(id="endless", prompt="x" * 500)]
    short, endless = await play_all(Plain, "Yes", tasks=given, limits=Limits(context=200))
    if short.task.id != "short":
        short, endless = endless, short
    assert short.outcome is Outcome.COMPLETED
    assert (endless.outcome, endless.reward, endless.rewards) == (Outcome.CONTEXT_LIMIT, None, {})
    assert "endless" in endless.error
    assert endless.messages[0]["content"] == "x" * 500
    assert endless.segments[0].unseen == 1


async def test_prompt_without_room_for_an_id_is_never_sent() -> None:
    prompt = (await play(Plain, "Yes")).turns[0].start
    engine = recording("Yes")
    trajectory = await play(Plain, engine, limits=Limits(context=prompt))
    assert (trajectory.outcome, trajectory.limit, engine.calls) == (Outcome.CONTEXT_LIMIT, "context", [])
    (turn,) = (await play(Plain, "Yes", limits=Limits(context=prompt + 1))).turns
    assert (turn.text, turn.finish) == ("Y", FinishReason.CONTEXT)


async def test_result_too_large_by_its_bytes_is_never_encoded() -> None:
    encoded: list[int] = []

    class Dumps(Plain):
        @tool
        def dump(self) -> str:
            """Return a lot."""
            return "x" * 10_000

    engine = recording([call("dump"), "Done"])
    encode = engine.tokenizer.encode

    def counting(text: str, content: Sequence[tuple[int, int]] = ()) -> list[int]:
        encoded.append(len(text))
        return encode(text, content)

    engine.tokenizer.encode = counting  # type: ignore[method-assign]
    trajectory = await play(Dumps, engine, limits=Limits(context=400))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.CONTEXT_LIMIT, 1.0)
    assert max(encoded) < 10_000


async def test_an_exception_in_a_tool_is_env_error_with_its_place() -> None:
    class Breaks(Plain):
        @tool
        def broken(self) -> None:
            """Break."""
            raise KeyError("lost")

    trajectory = await play(Breaks, [call("broken")])
    assert (trajectory.outcome, trajectory.reward, trajectory.rewards) == (Outcome.ENV_ERROR, None, {})
    assert "KeyError: 'lost' (in broken" in trajectory.error


async def test_an_empty_list_from_step_is_an_error() -> None:
    class Nothing(Plain):
        def step(self, turn: Turn) -> list[Any]:
            return []

    trajectory = await play(Nothing, "Yes")
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "nothing to answer" in trajectory.error


async def test_an_authors_exception_after_a_limit_fired_leaves_the_limit() -> None:
    class Panics(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            try:
                while True:
                    await conversation.generate()
                    conversation.add("more")
            except EpisodeOver:
                raise ValueError("panic") from None

    trajectory = await play(Panics, always("Yes"), limits=Limits(turns=2))
    assert (trajectory.outcome, trajectory.limit, trajectory.reward) == (Outcome.TURN_LIMIT, "turns", 1.0)


@pytest.mark.parametrize("why", ["limit", "end"])
async def test_ending_that_the_rollout_swallows_still_ends_the_episode(why: str) -> None:
    class Stubborn(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            while True:
                try:
                    await conversation.generate()
                except EpisodeOver:
                    continue
                if why == "end":
                    self.episode.end("enough")
                conversation.add("more")

    trajectory = await play(Stubborn, always("Yes"), limits=Limits(turns=2))
    assert trajectory.outcome is (Outcome.TURN_LIMIT if why == "limit" else Outcome.COMPLETED)
    assert trajectory.reward == 1.0


async def test_an_exception_after_end_is_still_the_environments_fault() -> None:
    class Ends(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            self.episode.end()
            conversation.add("more")
            try:
                await conversation.generate()
            except EpisodeOver:
                raise ValueError("oops") from None

    trajectory = await play(Ends, always("Yes"))
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "oops" in trajectory.error


async def test_episode_ended_inside_a_tool_has_all_results_and_a_score() -> None:
    class Submits(Plain):
        @tool
        def submit(self, value: int) -> str:
            """Give the answer."""
            self.episode.end("submitted")
            return "thank you"

    trajectory = await play(Submits, [call("submit", value=3)])
    assert (trajectory.outcome, trajectory.reason, trajectory.reward) == (Outcome.COMPLETED, "submitted", 1.0)
    assert trajectory.messages[-1] == {
        "role": "tool",
        "content": "thank you",
        "tool_call_id": "call_0",
        "name": "submit",
    }
    assert trajectory.segments[0].unseen == 1


@pytest.mark.parametrize("fault", [Fault.error(2, "broken pipe"), Fault.reject("no room")], ids=lambda f: f.kind.value)
async def test_an_engines_failure_is_engine_error_with_what_was_sampled(fault: Fault) -> None:
    trajectory = await play(Plain, [Reply("Yes, I do", fault=fault)], retries=0)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.ENGINE_ERROR, None)
    assert fault.message in trajectory.error
    assert [len(turn.token_ids) for turn in trajectory.turns] == ([2] if fault.kind == "error" else [])


async def test_no_turn_at_all_has_no_reward_whatever_the_outcome() -> None:
    class Silent(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            return

    trajectory = await play(Silent, "Yes")
    assert (trajectory.outcome, trajectory.reward, trajectory.rewards) == (Outcome.COMPLETED, None, {})
    assert trajectory.text == ""


async def test_exception_group_of_only_episode_over_is_an_ending() -> None:
    class Grouped(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            import anyio

            async def talk() -> None:
                while True:
                    await conversation.generate()
                    conversation.add("more")

            async with anyio.create_task_group() as group:
                group.start_soon(talk)

    trajectory = await play(Grouped, always("Yes"), limits=Limits(turns=2))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.TURN_LIMIT, 1.0)


async def test_template_that_raises_mid_run_is_token_error() -> None:
    class Asks(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("no more")
            await conversation.generate()

    text = ChatTemplate.load("pythonic").text
    refusing = "{% for m in messages if m.content == 'no more' %}{{ raise_exception('enough') }}{% endfor %}" + text
    engine = recording(always("Yes"), template=ChatTemplate(refusing, name="refusing"))
    async with Run(Asks, engine) as run:
        (trajectory,) = [t async for t in run]
    assert (trajectory.outcome, trajectory.reward, run.summary.retried) == (Outcome.TOKEN_ERROR, None, 0)
    assert "template_raises" in trajectory.error


async def test_failures_do_not_touch_the_siblings() -> None:
    class Mixed(Plain):
        def tasks(self) -> list[Task]:
            return tasks(8)

        def step(self, turn: Turn) -> None:
            if int(self.task.id[1:]) % 2:
                raise RuntimeError("odd")

    played = await play_all(Mixed, "Yes", breaker=1, concurrency=Concurrency(episodes=3))
    assert {t.task.id: t.outcome.value for t in played} == {
        f"t{n}": "env_error" if n % 2 else "completed" for n in range(8)
    }


async def test_a_class_without_a_reward_is_refused_at_start() -> None:
    from runner import BadEnvironment

    class Unscored(Environment):
        def tasks(self) -> list[Task]:
            return tasks(1)

    with pytest.raises(BadEnvironment, match="Unscored has no reward"):
        Run(Unscored, recording("Yes"))


class OnlyMetrics(Environment):
    @metric
    def one(self) -> float:
        return 1


def test_class_with_only_metrics_is_refused_at_start() -> None:
    from runner import BadEnvironment

    with pytest.raises(BadEnvironment, match="@reward"):
        Run(OnlyMetrics, recording("Yes"))


class Unreachable(Environment):
    @reward
    def correct(self) -> bool:
        return True


async def test_environment_without_tasks_is_refused_by_name() -> None:
    from runner import BadEnvironment

    with pytest.raises(BadEnvironment, match="Unreachable has no tasks"):
        await play_all(Unreachable, "Yes")
