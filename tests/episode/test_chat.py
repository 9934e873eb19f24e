"""Agents with their own loop send whole histories: the turn that each history continues, and the ids that it reuses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from runner import BadInput, Conversation, EpisodeOver, Limits, Outcome, RunFile, Sampling, Trajectory, Turn
from runner.chat_requests import Again, Delivery, Tolerated, Verdict
from runner.episode import client_messages, history_tree
from runner.testing import Reply, assert_exact, call
from tests.episode.awkward import misspelling
from tests.histories import OPENER, template
from tests.playing import Plain, play_all, recording
from tests.verifying import verify

pytestmark = pytest.mark.anyio

RUN = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SYSTEM = {"role": "system", "content": "You mend programs."}
TASK = {"role": "user", "content": "Mend it."}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(turn: Turn, text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": turn.as_message()["tool_calls"][number]["id"], "content": text}


async def asked(loop: Callable[[Any], Awaitable[None]], says: Any, **options: Any) -> list[Trajectory]:
    """The trajectories of an episode that only runs the loop of an external agent."""

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await loop(self.episode)

    # Verification does not support the vocabulary of `misspelling`.
    engine = recording(says, template="hermes") if "file" in options else misspelling(says)
    trajectories = await play_all(Foreign, engine, **options)
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        assert_exact(trajectory, engine)
        mask = sum(sum(segment.log.mask()) for segment in trajectory.segments)
        kept = [turn for turn in trajectory.turns if not turn.retried]
        assert mask == sum(turn.end - turn.start for turn in kept), "every sampled id is trained once, in its turn"
    return trajectories


def verdicts(trajectory: Trajectory) -> list[Verdict]:
    return [request.verdict for request in trajectory.requests]


async def test_loop_that_appends_continues_from_the_same_ids() -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        for text in ("one", "two"):
            turn = await episode.chat(messages, tools=[RUN])
            messages += [turn.as_message(), result(turn, text)]
        await episode.chat(messages, tools=[RUN])

    (trajectory,) = await asked(loop, [call("run", command="ls"), call("run", command="pwd"), "Done."])
    assert trajectory.agent == "main"
    assert verdicts(trajectory) == ["new", "append", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    assert [request.delivery for request in trajectory.requests] == [Delivery.DELIVERED] * 3
    assert trajectory.requests[2].tolerated == ()
    assert (trajectory.requests[2].parent_agent, trajectory.requests[2].parent_turn) == ("main", 1)


async def test_a_turn_that_is_dropped_leaves_the_ids_of_the_turns_before_it() -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        turn = await episode.chat(messages, tools=[RUN])
        messages += [turn.as_message(), result(turn, "one")]
        await episode.chat(messages, tools=[RUN])
        await episode.chat([*messages, user("Call a tool.")], tools=[RUN])

    (trajectory,) = await asked(loop, [call("run", command="ls"), "I forgot.", call("run", command="pwd")])
    assert verdicts(trajectory) == ["new", "append", "rewound"]
    assert [segment.cause for segment in trajectory.segments] == ["start", "branch"]
    assert trajectory.segments[1].shared == trajectory.turns[0].end


async def test_simultaneous_requests_after_one_turn_are_a_branch() -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        turn = await episode.chat(messages, tools=[RUN])
        messages += [turn.as_message(), result(turn, "one")]
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: episode.chat([*messages, user("this")], tools=[RUN]))
            group.start_soon(lambda: episode.chat([*messages, user("that")], tools=[RUN]))

    (trajectory,) = await asked(loop, lambda turn: [call("run", command="ls"), "this", "that"][turn.turn])
    assert verdicts(trajectory) == ["new", "append", "branch"]
    assert {segment.cause for segment in trajectory.segments} == {"start", "branch"}


@pytest.mark.parametrize("apart", [False, True])
async def test_continued_cut_turn_is_found_as_one_message_or_two(
    apart: bool,
) -> None:
    async def loop(episode: Any) -> None:
        cut = await episode.chat([SYSTEM, TASK], tools=[RUN], sampling=Sampling(max_tokens=4))
        more = await episode.chat([SYSTEM, TASK, cut.as_message()], tools=[RUN])
        rest = {"role": "assistant", "content": more.text.removeprefix(cut.text)}
        said = [cut.as_message(), rest] if apart else [more.as_message()]
        await episode.chat([SYSTEM, TASK, *said, user("And?")], tools=[RUN])

    (trajectory,) = await asked(loop, ["It was a long way.", " And so on.", "Yes."])
    assert verdicts(trajectory) == ["new", "continued", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start"]


async def test_repeated_request_of_a_delivered_turn_is_a_sibling() -> None:
    async def loop(episode: Any) -> None:
        for _ in range(2):
            await episode.chat([SYSTEM, TASK], tools=[RUN])

    (trajectory,) = await asked(loop, ["one", "two"])
    assert [(request.verdict, request.again) for request in trajectory.requests] == [
        (Verdict.NEW, Again.NO),
        (Verdict.AGAIN, Again.SIBLING),
    ]
    first, second = trajectory.turns
    assert first.prompt_ids == second.prompt_ids
    assert [segment.cause for segment in trajectory.segments] == ["start", "again"]


async def test_latest_of_several_named_turns_is_the_parent() -> None:
    made: list[Turn] = []

    async def loop(episode: Any) -> None:
        first = await episode.chat([SYSTEM, TASK], tools=[RUN])
        history = [SYSTEM, TASK, first.as_message(), user("And?")]
        meant, _ = await episode.chat(history, tools=[RUN]), await episode.chat(history, tools=[RUN])
        history += [meant.as_message(), user("Continue.")]
        made.extend([meant, await episode.chat(history, tools=[RUN], handles=[first.handle, meant.handle])])

    trajectories = await asked(loop, ["Hm.", "Yes.", "Yes.", "Done."])
    meant, last = made
    (request,) = (
        each for one in trajectories for each in one.requests if (one.agent, each.turn) == (last.agent, last.number)
    )
    assert (request.parent_agent, request.parent_turn) == (meant.agent, meant.number)


async def test_unsampled_assistant_message_begins_a_foreign_segment() -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        turn = await episode.chat(messages, tools=[RUN])
        messages += [turn.as_message(), user("Files?"), {"role": "assistant", "content": "Ok."}, user("Continue.")]
        turn = await episode.chat(messages, tools=[RUN])
        await episode.chat([*messages, turn.as_message(), user("And?")], tools=[RUN])

    (trajectory,) = await asked(loop, ["one", "two", "three"])
    assert verdicts(trajectory) == ["new", "foreign", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start", "foreign"]


async def test_sub_agent_with_more_turns_is_not_main() -> None:
    async def loop(episode: Any) -> None:
        sends = await episode.chat([TASK], tools=[RUN])
        errand: list[Any] = [user("Look around.")]
        for _ in range(4):
            errand += [(await episode.chat(errand, tools=[RUN])).as_message(), user("Further.")]
        await episode.chat([TASK, sends.as_message(), user("It found nothing.")], tools=[RUN])

    main, errand = await asked(loop, lambda turn: "words")
    assert [(each.agent, len(each.turns)) for each in (main, errand)] == [("main", 2), ("main-1", 4)]


async def test_unknown_history_begins_a_thread_and_a_title_is_not_main(
    tmp_path: Path,
) -> None:
    async def loop(episode: Any) -> None:
        await episode.chat([user("A title for: Mend it.")], label="s1")
        messages: list[Any] = [SYSTEM, TASK]
        turn = await episode.chat(messages, tools=[RUN], label="s1")
        await episode.chat([*messages, turn.as_message(), user("And?")], tools=[RUN], label="s1")

    path = tmp_path / "run.db"
    (main,) = await asked(loop, lambda turn: "words", file=path)
    result = await anyio.to_thread.run_sync(verify, path)
    assert result.exit_code == 0, result.output
    with RunFile(path) as run_file:
        title = run_file.trajectory("t0#0", agent="s1")
        assert [run_file.trajectory("t0#0").requests] == [main.requests]
    assert (main.agent, main.trained, verdicts(main)) == ("main", True, ["new", "append"])
    assert (title.agent, title.trained, verdicts(title)) == ("s1", False, ["new"])


async def test_the_run_s_sampling_wins_for_a_thread_that_is_trained() -> None:
    async def loop(episode: Any) -> None:
        sampling = Sampling(temperature=0, max_tokens=9, stop=("x",))
        await episode.chat([SYSTEM, TASK], tools=[RUN], sampling=sampling)

    (trajectory,) = await asked(loop, ["one"])
    (turn,) = trajectory.turns
    assert turn.sampling is not None
    assert (turn.sampling.temperature, turn.sampling.max_tokens, turn.sampling.stop) == (1, 9, ("x",))
    assert trajectory.requests[0].not_granted == {"temperature": 0}


@pytest.mark.parametrize("system_as_user", [False, True])
async def test_a_late_system_message_is_a_users_where_that_is_wanted(system_as_user: bool) -> None:
    late = {"role": "system", "content": "Five tools are left."}

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            first = await self.episode.chat([SYSTEM, TASK], train=True)
            messages = [SYSTEM, TASK, first.as_message(), late, user("Continue.")]
            await self.episode.chat(messages, system_as_user=system_as_user)

    (trajectory,) = await play_all(Foreign, recording(["one", "two"], template=refusing()))
    if not system_as_user:
        assert trajectory.outcome is Outcome.ENV_ERROR, "this loop does not catch the refusal of its request"
        assert "serve(system_as_user=True)" in (trajectory.error or "")
        return
    assert (trajectory.outcome, verdicts(trajectory)) == (Outcome.COMPLETED, ["new", "append"])
    assert [message["role"] for message in trajectory.messages] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
        "assistant",
    ]
    assert trajectory.requests[1].tolerated == (Tolerated.SYSTEM_AS_USER,)


def refusing() -> Any:
    """Return a template that refuses a system message after the beginning."""
    text = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('a system message comes first') }}{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
    )
    return template(text)


async def test_the_same_tools_in_another_order_are_shown_as_they_were() -> None:
    look = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}

    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], tools=[RUN, look])
        await episode.chat([SYSTEM, TASK, turn.as_message(), user("And?")], tools=[look, RUN])

    (trajectory,) = await asked(loop, ["one", "two"])
    assert verdicts(trajectory) == ["new", "append"]
    assert len(trajectory.segments) == 1


@pytest.mark.parametrize(
    ("messages", "tools", "message"),
    [
        ([], [], "a request has no message"),
        ([{"role": "user"}, {"role": "robot", "content": "x"}], [], "message 1: a message's role is"),
        ([user("x"), {"role": "tool", "tool_call_id": "c", "content": "y"}], [], "answers no call"),
        ([user("x"), {"role": "assistant", "content": "y"}], [], "message 1, the last one, is an assistant message"),
        ([user("x")], [{"type": "web_search"}], r"tool 0 \(of type 'web_search'\) is not a function with a name"),
        ([user("x")], [RUN, RUN], "two tools are named 'run'"),
        (user("x"), [], "expected a list of messages"),
    ],
    ids=["none", "role", "answer", "spoken", "kind", "twice", "no list"],
)
async def test_bad_request_is_refused_by_its_place_and_ends_nothing(messages: Any, tools: Any, message: str) -> None:
    async def loop(episode: Any) -> None:
        with pytest.raises(BadInput, match=message):
            await episode.chat(messages, tools=tools)
        await episode.chat([SYSTEM, TASK], tools=[RUN])

    (trajectory,) = await asked(loop, ["one"])
    assert verdicts(trajectory) == ["new"]


async def test_result_without_a_call_is_refused_by_its_place_in_the_request() -> None:
    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], tools=[RUN])
        past = [SYSTEM, TASK, turn.as_message()]
        with pytest.raises(BadInput, match=r"message 3 \(tool\) answers no call"):
            await episode.chat(
                [*past, {"role": "tool", "tool_call_id": "functions.run:0", "content": "y"}], tools=[RUN]
            )
        await episode.chat([*past, result(turn, "y")], tools=[RUN])

    (trajectory,) = await asked(loop, [Reply("", calls=[call("run", command="ls")]), "Done."])
    assert len(trajectory.segments) == 1


async def test_a_history_that_does_not_fit_ends_nothing() -> None:
    async def loop(episode: Any) -> None:
        for _ in range(3):
            with pytest.raises(EpisodeOver, match="context"):
                await episode.chat([SYSTEM, user("x" * 5000)], tools=[RUN])
        await episode.chat([SYSTEM, TASK], tools=[RUN])

    (trajectory,) = await asked(loop, ["one"], limits=Limits(context=1500))
    assert [request.delivery for request in trajectory.requests] == [Delivery.REFUSED] * 3 + [Delivery.DELIVERED]
    assert "leave no room for a turn in the context" in trajectory.requests[0].error


@pytest.mark.parametrize("apart", [False, True])
async def test_results_of_parallel_calls_are_in_the_order_of_calls(apart: bool) -> None:
    """Clients send results as they arrive, and most templates match results to calls only by order."""

    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        turn = await episode.chat(messages, tools=[RUN])
        said = turn.as_message()
        parts = [said]
        if apart:  # a turn may arrive as several messages
            parts = [{**said, "tool_calls": [each], "content": ""} for each in said["tool_calls"]]
        results = [result(turn, name, number) for number, name in enumerate(["first", "second", "third"])]
        messages += [*parts, results[2], results[0], results[1]]
        await episode.chat(messages, tools=[RUN])

    (trajectory,) = await asked(loop, [[call("run", command=each) for each in "abc"], "Done."])
    assert verdicts(trajectory) == ["new", "append"]
    assert [each["content"] for each in trajectory.messages if each["role"] == "tool"] == ["first", "second", "third"]
    assert Tolerated.REORDERED in trajectory.requests[1].tolerated


async def test_result_of_a_later_request_is_in_the_order_of_calls() -> None:
    def answer(name: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": f"{name}_1", "content": name}

    async def loop(episode: Any) -> None:
        function = {"name": "run", "arguments": {"command": "ls"}}
        calls = [{"id": f"{name}_1", "type": "function", "function": function} for name in "abc"]
        messages = [SYSTEM, TASK, {"role": "assistant", "content": "", "tool_calls": calls}, answer("c")]
        await episode.chat(messages, tools=[RUN])
        await episode.chat([*messages, answer("b")], tools=[RUN])

    trajectories = await asked(loop, ["Wait.", "Done."])
    last = trajectories[-1].segments[-1].messages
    assert [each["content"] for each in last if each["role"] == "tool"] == ["b", "c"]
    assert Tolerated.REORDERED in trajectories[-1].requests[-1].tolerated


@pytest.mark.parametrize("answered", [[], [1], [0, 0], [0, 1, 1]])
async def test_client_may_omit_or_repeat_results(answered: list[int], tmp_path: Path) -> None:
    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], tools=[RUN])
        results = [result(turn, f"result {place}", number) for place, number in enumerate(answered)]
        await episode.chat([SYSTEM, TASK, turn.as_message(), *results, user("Never mind.")], tools=[RUN])

    file = tmp_path / "run.db"
    (trajectory,) = await asked(loop, [[call("run", command=each) for each in "ab"], "Done."], file=file)
    assert verdicts(trajectory) == ["new", "append"]
    assert len(trajectory.segments) == 1
    checked = await anyio.to_thread.run_sync(verify, file)
    assert checked.exit_code == 0, checked.output


async def test_assistant_messages_in_a_row_are_joined_in_linear_time(monkeypatch: Any) -> None:
    """Candidate turns are searched only at places that have turns."""
    looked: list[int] = []

    def counted(messages: Any) -> Any:
        looked.append(len(messages))
        return client_messages.joined(messages)

    monkeypatch.setattr(history_tree, "joined", counted)
    row = [{"role": "assistant", "content": f"Part {number}."} for number in range(300)]

    async def loop(episode: Any) -> None:
        for ending in ("One.", "Two."):
            await episode.chat([user("Go."), *row, user(ending)], tools=[RUN])

    await asked(loop, ["Done.", "Done."])
    assert sum(looked) <= 2 * len(row)
