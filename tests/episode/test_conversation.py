"""Conversations: the model's prompt, the parts of a turn that are kept, and changes by the author."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner import (
    BadOption,
    Conversation,
    EpisodeOver,
    FinishReason,
    Limits,
    Outcome,
    Run,
    RunFile,
    Sampling,
    ScriptedEngine,
    Task,
    Tool,
    Turn,
)
from runner.concurrency.threads import Job
from runner.episode import prompting
from runner.testing import Latency, Reply
from runner.testing.engine_pool import PooledEngine
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.log import Source
from tests.playing import Plain, play, play_all, recording, talked, talking, tasks, until

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("chunks", [1, 3, "whole"])
async def test_stop_string_cuts_the_text_and_keeps_its_last_id(chunks: Any) -> None:
    async def talk(conversation: Conversation) -> None:
        first = await conversation.generate(sampling=Sampling(stop=("END", "ND.")))
        assert (first.text, first.finish, first.stop) == ("one ", FinishReason.STOP, "END")
        conversation.add("Continue.")
        await conversation.generate()

    engine = recording(["one END. two", "three"], chunks=chunks)
    trajectory = await talked(talk, engine)
    first, second = trajectory.turns
    assert engine.tokenizer.decode(first.token_ids) == "one END"
    assert first.dropped == len("one END. two") + 1 - len("one END")
    assert second.prompt_ids[: first.end] == first.prompt_ids + first.token_ids
    assert second.junction is not None
    assert second.junction.dropped == first.dropped
    assert trajectory.messages[1]["content"] == "one "


async def test_generate_continues_a_cut_turn() -> None:
    async def talk(conversation: Conversation) -> None:
        first = await conversation.generate(sampling=Sampling(max_tokens=4))
        assert (first.text, first.finish) == ("Once", FinishReason.LENGTH)
        second = await conversation.generate()
        assert second.text == "Once upon"
        assert engine.tokenizer.decode(second.token_ids[:-1]) == " upon"

    engine = recording(["Once more", " upon"])
    trajectory = await talked(talk, engine)
    assert [message["content"] for message in trajectory.messages] == ["Question 0?", "Once upon"]
    assert (trajectory.outcome, len(trajectory.segments)) == (Outcome.COMPLETED, 1)


async def test_generate_after_a_whole_turn_needs_a_message() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        with pytest.raises(RuntimeError, match="nothing was added to conversation 'main'"):
            await conversation.generate()

    assert (await talked(talk, "Yes")).outcome is Outcome.COMPLETED


async def test_messages_added_in_a_row_share_one_bridge() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("one")
        conversation.add({"role": "user", "content": "two"}, "three")
        assert [message["content"] for message in conversation.messages][-3:] == ["one", "two", "three"]
        await conversation.generate()

    trajectory = await talked(talk, lambda turn: "Yes")
    sources = trajectory.segments[0].log.sources
    changes = [after for before, after in pairwise(sources) if before != after]
    assert changes == [Source.SAMPLED, Source.BRIDGE, Source.SAMPLED]


async def test_remaining_counts_what_is_left_also_if_messages_were_added() -> None:
    async def talk(conversation: Conversation) -> None:
        first = await conversation.remaining()
        await conversation.generate()
        said = await conversation.remaining()
        assert said == first - len("Yes") - 1
        assert await conversation.remaining("Continue.") < said
        assert await conversation.remaining() == said  # the call changed nothing
        assert await conversation.remaining("x" * 400) < 0
        assert await conversation.remaining("x" * 1_000_000) < 0
        conversation.add("Continue.")
        before = await conversation.remaining()
        turn = await conversation.generate()
        assert turn.start == 300 - before

    assert (await talked(talk, lambda turn: "Yes", limits=Limits(context=300))).outcome is Outcome.COMPLETED


async def test_score_is_of_the_next_reply_and_records_nothing() -> None:
    def scores(ids: Sequence[int]) -> list[float]:
        asked.append(list(ids))
        return [-float(each) for each in ids[1:]]

    async def talk(conversation: Conversation) -> None:
        for turn in range(2):
            assert await conversation.score(["a", "ab", "c"]) == [-97.0, -97.0 - 98.0, -99.0]
            assert len(conversation.turns) == turn
            await conversation.generate()
            conversation.add("Continue.")
        with pytest.raises(BadOption, match="give strings that are not empty"):
            await conversation.score(["a", ""])

    asked: list[list[int]] = []
    engine = ScriptedEngine("Yes", scores=scores, record=True)
    trajectory = await talked(talk, engine)
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.COMPLETED, 2)
    expected = [[*turn.prompt_ids, *text.encode()] for turn in trajectory.turns for text in ("a", "ab", "c")]
    assert sorted(asked) == sorted(expected)  # calls of one turn run in parallel, in any order


async def test_score_that_the_engine_refuses_ends_the_episode() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.score(["a"])

    trajectory = await talked(talk, ScriptedEngine("Yes", scores=lambda ids: [0.0], record=True))
    assert trajectory.outcome is Outcome.ENGINE_ERROR
    assert "returned 1 values for" in str(trajectory.error)


@pytest.mark.engine
def test_real_score_is_that_of_the_reply_when_sampled(float32_engine: PooledEngine) -> None:
    async def talk(conversation: Conversation) -> None:
        for _ in range(2):
            once = conversation.branch(f"once {len(conversation.turns)}", train=False)
            turn = await once.generate(sampling=Sampling(max_tokens=6, temperature=0.7))
            (scored,) = await conversation.score([turn.text])
            kept = await conversation.generate(sampling=Sampling(choice=(turn.text,)))
            ids = float32_engine.tokenizer.encode(turn.text)
            expected = await float32_engine.score([*kept.prompt_ids, *ids], start=len(kept.prompt_ids))
            assert scored == pytest.approx(sum(expected), abs=1e-3)
            assert scored < -0.1
            conversation.add("Continue.")

    async def main() -> None:
        async with Run(talking(talk), float32_engine, tasks=tasks(1)) as run:
            trajectories = [each async for each in run]
        assert {each.outcome for each in trajectories} == {Outcome.COMPLETED}, [each.error for each in trajectories]

    float32_engine.home.call(main)


async def test_replace_starts_a_segment_with_mask_0_and_its_cause() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.replace([{"role": "user", "content": "In short."}, {"role": "assistant", "content": "Yes"}])
        conversation.add("And?")
        await conversation.generate()

    trajectory = await talked(talk, lambda turn: "Yes")
    first, second = trajectory.segments
    assert (first.cause, second.cause) == ("start", "environment")
    assert sum(first.log.mask()) == sum(second.log.mask()) == 4
    start = trajectory.turns[1].start
    assert not any(second.log.mask()[:start])
    assert [turn.segment for turn in trajectory.turns] == [0, 1]
    assert trajectory.messages[0]["content"] == "In short."


async def test_replace_of_tools_shows_the_new_ones_and_keeps_the_history() -> None:
    def jump(height: int) -> int:
        """Jump."""
        return height

    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.replace(tools=[Tool(jump)])
        conversation.add("Now jump.")
        turn = await conversation.generate()
        conversation.add(*await conversation.call_tools(turn))
        await conversation.generate()

    engine = recording(["Yes", "[jump(height=2)]", "Done"])
    trajectory = await talked(talk, engine)
    assert [segment.cause for segment in trajectory.segments] == ["start", "environment"]
    prompt = engine.tokenizer.decode(trajectory.turns[1].prompt_ids)
    assert "jump(height: int)" in prompt
    assert "Question 0?" in prompt
    assert trajectory.messages[-2]["content"] == "2"


async def test_messages_that_the_model_never_saw_are_flagged() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("one", "two")

    trajectory = await talked(talk, "Yes")
    assert [message["content"] for message in trajectory.messages][-2:] == ["one", "two"]
    assert trajectory.segments[0].unseen == 2
    assert len(trajectory.segments[0].log) == trajectory.turns[-1].end


async def test_settings_go_generate_conversation_run_class() -> None:
    class Layers(Plain):
        sampling = Sampling(temperature=0.1, top_p=0.2, top_k=3, max_tokens=40)

        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate(sampling=Sampling(temperature=0.9))
            judge = self.episode.conversation("judge", prompt="?", sampling=Sampling(top_p=0.8))
            await judge.generate()

    engine = recording(lambda turn: "Yes")
    await play(Layers, engine, sampling=Sampling(temperature=0.5, top_p=0.5))
    main, judge = (made.sampling for made in engine.calls)
    assert (main.temperature, main.top_p, main.top_k, main.max_tokens) == (0.9, 0.5, 3, 40)
    assert (judge.temperature, judge.top_p, judge.top_k) == (0.1, 0.8, 3)  # the run's sampling is for trained agents


async def test_defaults_are_those_written_down() -> None:
    engine = recording("Yes")
    trajectory = await play(Plain, engine)
    asked = engine.calls[0]
    assert asked.sampling == Sampling.defaults()
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.top_p) == (1024, 1.0, 1.0)
    assert asked.stop_ids == engine.stop_ids
    assert trajectory.turns[0].stop == engine.tokenizer.eos_id


async def test_seeds_differ_within_a_group_and_repeat_in_every_run() -> None:
    class Random(Plain):
        def setup(self) -> None:
            numbers.append((self.task.id, self.episode.rng.random()))

    numbers: list[tuple[str, float]] = []
    engine = recording("Yes")
    first = await play_all(Random, engine, tasks=tasks(2), group_size=2, seed=5)
    again = await play_all(Random, "Yes", tasks=tasks(2), group_size=2, seed=5)
    other = await play_all(Random, "Yes", tasks=tasks(2), group_size=2, seed=6)
    seeds = {t.id: t.turns[0].seed for t in first}
    assert len(set(seeds.values())) == 4
    assert seeds == {t.id: t.turns[0].seed for t in again}
    assert not set(seeds.values()) & {t.turns[0].seed for t in other}
    assert set(seeds.values()) == {made.seed for made in engine.calls}
    assert len({number for _, number in numbers[:4]}) == 2  # one number for each task, shared by its group
    assert set(numbers[:4]) == set(numbers[4:8])
    assert not set(numbers[:4]) & set(numbers[8:])


async def test_assistant_messages_in_the_prompt_are_context_with_mask_0() -> None:
    class Shown(Plain):
        def prompt(self) -> Any:
            return [
                {"role": "user", "content": "1 + 1?"},
                {"role": "assistant", "content": "2"},
                {"role": "user", "content": "2 + 2?"},
            ]

    trajectory = await play(Shown, "4")
    assert sum(trajectory.segments[0].log.mask()) == 2
    assert len(trajectory.turns) == 1


async def test_control_text_in_a_reply_that_was_cut_still_extends() -> None:
    async def talk(conversation: Conversation) -> None:
        await conversation.generate(sampling=Sampling(max_tokens=5))
        conversation.add("Continue.")
        await conversation.generate()

    trajectory = await talked(talk, [Reply("né à Paris"), "Done"])
    assert trajectory.turns[1].junction is not None
    assert trajectory.turns[1].junction.close == "masked"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_unawaited_turn_of_a_rollout_ends_with_its_episode(tmp_path: Path, anyio_backend: str) -> None:
    left: list[asyncio.Task[Turn]] = []

    class Leaves(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("And then?")
            left.append(asyncio.create_task(conversation.generate()))
            await until(lambda: engine.stats().open == 1)

    file = tmp_path / "run.db"
    async with ScriptedEngine(["Yes", "word " * 50], latency=Latency(between=30), tick=0.01) as engine:
        async with Run(Leaves, engine, file=file) as run:
            (trajectory,) = [trajectory async for trajectory in run]
            assert engine.stats().open == 0
        with pytest.raises(EpisodeOver, match="t0#0 is over"):
            await left[0]
    with RunFile(file) as stored:
        (row,) = stored
    assert trajectory.outcome is Outcome.COMPLETED
    assert row.turns == len(trajectory.turns) == 2


@pytest.mark.both_backends
async def test_a_closed_conversation_refuses_to_speak() -> None:
    kept: list[Conversation] = []

    class Keeps(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            kept.append(conversation)
            await conversation.generate()
            conversation.add("And then?")

    await play(Keeps(), "Yes")
    with pytest.raises(EpisodeOver, match="'main'"):
        await kept[0].generate()


@pytest.mark.parametrize(("size", "threads"), [(100, {True}), (20_000, {False})])
async def test_long_first_prompt_is_encoded_once_per_group_in_a_thread(
    size: int, threads: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[bool] = []
    encode = Bridger._encoded

    def noting(bridger: Bridger, text: str, spans: Any) -> Any:
        encoded.append(threading.current_thread() is threading.main_thread())
        return encode(bridger, text, spans)

    def job(function: Any, name: str) -> Job:
        jobs.append(name)
        return Job(function, name)

    jobs: list[str] = []
    monkeypatch.setattr(Bridger, "_encoded", noting)
    monkeypatch.setattr(prompting, "Job", job)

    class Long(Plain):
        def tasks(self) -> list[Task]:
            return [Task(id="long", prompt="x" * size)]

    trajectories = await play_all(Long, ScriptedEngine(["Done."]), group_size=8)
    assert len(trajectories) == 8
    assert len({trajectory.turns[0].prompt_ids.tobytes() for trajectory in trajectories}) == 1
    assert (set(encoded), len(encoded)) == (threads, 1)
    assert jobs.count("prompt") == (size > prompting.MAX_CHARACTERS_ON_LOOP), (
        "waiting episodes get the first one's ids, and use no thread"
    )
