"""Simultaneous requests: siblings, threads of a synchronous program, disconnecting clients, and their clocks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest

from runner import Conversation, EpisodeOver, Limits, Outcome, Trajectory, Turn, tool
from runner.chat_requests import Again, Delivery, Verdict
from runner.episode.history_tree import HistoryTree
from runner.testing import Fault, Reply, assert_exact, call
from tests.episode.awkward import misspelling
from tests.episode.client_recordings import RUN
from tests.playing import Plain, assert_nothing_open, play_all

pytestmark = pytest.mark.anyio

ASKED: Any = [{"role": "user", "content": "Mend it."}]
STALLS = Reply("It was a long way.", fault=Fault.stall(at=5), chunks=1)


ENGINES: list[Any] = []


async def sampled(count: int) -> None:
    """Wait until this many ids were sampled."""
    while ENGINES[-1].stats().sampled_tokens < count:
        await anyio.lowlevel.checkpoint()


def trained(trajectory: Trajectory) -> int:
    return sum(sum(segment.log.mask()) for segment in trajectory.segments)


async def played(environment: Any, says: Any, **options: Any) -> Trajectory:
    engine = misspelling(says)
    ENGINES.append(engine)
    (trajectory,) = await play_all(environment, engine, **options)
    assert_exact(trajectory, engine)
    assert_nothing_open(engine)
    return trajectory


async def test_same_prompt_at_the_same_time_is_sampled_for_each() -> None:
    class Twins(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turns: list[Turn] = []

            async def ask() -> None:
                turns.append(await self.episode.chat(ASKED, tools=[RUN]))

            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask)
            answers = [[*ASKED, turn.as_message(), {"role": "user", "content": turn.text}] for turn in turns]
            async with anyio.create_task_group() as group:
                for answer in answers:
                    group.start_soon(partial(self.episode.chat, answer, tools=[RUN]))

    words = iter(["one", "two", "three", "four", "five", "six"])
    trajectory = await played(Twins, lambda asked: next(words))
    assert [request.verdict for request in trajectory.requests] == ["new", "again", "again"] + ["append"] * 3
    assert [request.again for request in trajectory.requests[1:3]] == [Again.SIBLING] * 2
    assert [turn.number for turn in trajectory.turns] == list(range(6))
    assert len({tuple(turn.prompt_ids) for turn in trajectory.turns[:3]}) == 1
    for request in trajectory.requests[3:]:
        parent, turn = trajectory.turns[request.parent_turn or 0], trajectory.turns[request.turn or 0]
        assert turn.prompt_ids[: parent.end] == parent.log.ids[: parent.end]
    assert trained(trajectory) == trajectory.sampled


async def test_threads_of_a_synchronous_program_ask_side_by_side() -> None:
    class Program(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            token = anyio.lowlevel.current_token()
            await anyio.to_thread.run_sync(self.program, token)

        def program(self, token: Any) -> None:
            first = anyio.from_thread.run(partial(self.episode.chat, ASKED, tools=[RUN]))

            def ask(number: int) -> str:
                messages = [*ASKED, first.as_message(), {"role": "user", "content": f"part {number}"}]
                asking = partial(self.episode.chat, messages, tools=[RUN])
                return anyio.from_thread.run(asking, token=token).text

            with ThreadPoolExecutor(3) as pool:
                self.said = sorted(pool.map(ask, range(3)))

    trajectory = await played(Program, lambda asked: "words")
    new, append, *others = (request.verdict for request in trajectory.requests)
    assert (new, append) == ("new", "append")
    # The verdict depends on whether the earlier thread already has its answer.
    assert set(others) <= {Verdict.BRANCH, Verdict.REWOUND}
    assert [segment.shared for segment in trajectory.segments] == [0, trajectory.turns[0].end, trajectory.turns[0].end]
    assert trajectory.outcome is Outcome.COMPLETED
    assert trained(trajectory) == trajectory.sampled


async def test_disconnected_client_asks_again_from_the_same_ids() -> None:
    class GoesAway(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(self.episode.chat, ASKED, tools=[RUN]))
                await sampled(5)
                group.cancel_scope.cancel()
            await self.episode.chat(ASKED, tools=[RUN])

    said = iter([STALLS, "Done."])
    trajectory = await played(GoesAway, lambda asked: next(said))
    cut, done = trajectory.turns
    assert [request.again for request in trajectory.requests] == [Again.NO, Again.TAKEN_BACK]
    assert [request.delivery for request in trajectory.requests] == [Delivery.CUT, Delivery.DELIVERED]
    assert (cut.retried, done.retried, cut.prompt_ids == done.prompt_ids) == (True, False, True)
    assert trained(trajectory) == len(done.token_ids)


async def test_undelivered_answer_is_sent_without_sampling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = anyio.CancelScope()
    add_answer = HistoryTree.add_answer

    def and_goes_away(histories: Any, *given: Any) -> None:
        add_answer(histories, *given)
        client.cancel()

    monkeypatch.setattr(HistoryTree, "add_answer", and_goes_away)

    class LosesIt(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            with client:
                await self.episode.chat(ASKED, tools=[RUN])
            turn = await self.episode.chat(ASKED, tools=[RUN])
            assert turn.text == "Done."

    trajectory = await played(LosesIt, ["Done."])
    assert [request.again for request in trajectory.requests] == [Again.NO, Again.REPLAYED]
    assert [request.delivery for request in trajectory.requests] == [Delivery.UNDELIVERED, Delivery.DELIVERED]
    assert [request.turn for request in trajectory.requests] == [0, 0]
    assert len(trajectory.turns) == 1


async def test_request_in_flight_when_the_rollout_ends_is_cut_and_kept() -> None:
    class Leaves(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(partial(self.episode.chat, ASKED, tools=[RUN]))
                await sampled(5)
                group.cancel_scope.cancel()

    trajectory = await played(Leaves, [STALLS])
    assert (trajectory.outcome, len(trajectory.turns)) == (Outcome.COMPLETED, 1)
    assert trajectory.requests[0].delivery is Delivery.CUT


async def test_tool_of_the_usual_loop_may_ask_another_agent() -> None:
    class HandsOff(Plain):
        @tool
        async def ask(self) -> str:
            """Ask another agent."""
            turn = await self.episode.chat([{"role": "user", "content": "Help."}], label="helper", train=False)
            return turn.text

    trajectory = await played(HandsOff, {"main": [call("ask"), "Thanks."], "helper": ["I help."]})
    assert trajectory.messages[2]["content"] == "I help."


async def test_request_while_nothing_is_played_is_refused() -> None:
    class Asks(Plain):
        async def setup(self) -> None:
            with pytest.raises(EpisodeOver, match="t0#0 is not being played"):
                await self.episode.chat(ASKED)

    assert (await played(Asks, ["Yes"])).outcome is Outcome.COMPLETED


async def test_a_limit_of_turns_ends_every_request() -> None:
    class Asks(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            turn = await self.episode.chat(ASKED, tools=[RUN])
            with pytest.raises(EpisodeOver):
                await self.episode.chat([*ASKED, turn.as_message(), *ASKED], tools=[RUN])

    trajectory = await played(Asks, lambda asked: "words", limits=Limits(turns=1))
    assert (trajectory.outcome, trajectory.limit, trajectory.limit_agent) == (Outcome.TURN_LIMIT, "turns", "main")
    assert [request.delivery for request in trajectory.requests] == [Delivery.DELIVERED, Delivery.REFUSED]
    assert "turn_limit" in trajectory.requests[1].error
    assert trajectory.requests[1].verdict is Verdict.APPEND


def test_no_thread_of_a_pool_is_left_running() -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPoolExecutor")]
