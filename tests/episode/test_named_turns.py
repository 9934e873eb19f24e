"""Ids of an answer identify its turn, even if a client removed, reformatted or renamed the parts around them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import Conversation, Trajectory
from runner.chat_requests import Tolerated, Verdict
from runner.testing import Reply, call
from tests.episode.test_chat import RUN, SYSTEM, TASK, asked, result, user, verdicts
from tests.playing import Plain, play_all, recording
from tests.verifying import verify

pytestmark = pytest.mark.anyio

TEXT = "I look, **first** of all, at the files; then I continue."
THINKS = f"<think>\nHm, the files.\n</think>\n{TEXT}"
CALLS = [call("run", command="ls"), call("run", command="pwd")]

Change = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that changes an assistant message as a client does."""


def without(name: str) -> Change:
    return lambda message: {key: value for key, value in message.items() if key != name}


def having(**fields: Any) -> Change:
    return lambda message: {**message, **fields}


def on_calls(change: Callable[[list[dict[str, Any]]], Any]) -> Change:
    return lambda message: {**message, "tool_calls": change(copy.deepcopy(list(message["tool_calls"])))}


def on_functions(**fields: Any) -> Change:
    return on_calls(lambda made: [{**each, "function": {**each["function"], **fields}} for each in made])


def wrapped(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "id": f"{each['id']}|fc_{number}"} for number, each in enumerate(made)]


CHANGES: dict[str, tuple[Change, set[Tolerated]]] = {
    "content null": (having(content=None), {Tolerated.CONTENT_NULL, Tolerated.TEXT_LEFT_OUT}),
    "content absent": (without("content"), {Tolerated.CONTENT_NULL, Tolerated.TEXT_LEFT_OUT}),
    "content empty": (having(content=""), {Tolerated.TEXT_LEFT_OUT}),
    "content blank": (having(content=" \n"), {Tolerated.TEXT_LEFT_OUT}),
    "content of no parts": (having(content=[]), {Tolerated.CONTENT_PARTS, Tolerated.TEXT_LEFT_OUT}),
    "text cut": (having(content="I look, **first** of all"), {Tolerated.TEXT_LEFT_OUT}),
    "end of text": (having(content="then I continue."), {Tolerated.TEXT_LEFT_OUT}),
    "middle left out": (having(content="I look; then I continue."), {Tolerated.TEXT_LEFT_OUT}),
    "markup taken off": (
        having(content="I look, first of all, at the files; then I continue."),
        {Tolerated.TEXT_REFORMATTED},
    ),
    "as HTML": (
        having(content="<p>I look, <strong>first</strong> of all, at the files; then I continue.</p>"),
        {Tolerated.TEXT_REFORMATTED},
    ),
    "white space joined": (
        having(content="I  look,\n**first** of all,\tat the files; then I continue."),
        {Tolerated.TEXT_REFORMATTED},
    ),
    "upper case": (having(content=TEXT.upper()), {Tolerated.TEXT_REFORMATTED}),
    "stripped and cut": (having(content=f" {TEXT}\n"), {Tolerated.WHITE_SPACE}),
    "reasoning left out": (without("reasoning_content"), {Tolerated.REASONING_LEFT_OUT}),
    "reasoning summed up": (having(reasoning_content="It thought."), {Tolerated.REASONING_REWRITTEN}),
    "reasoning and text left out": (
        lambda message: without("reasoning_content")(having(content=None)(message)),
        {Tolerated.CONTENT_NULL, Tolerated.TEXT_LEFT_OUT, Tolerated.REASONING_LEFT_OUT},
    ),
    "arguments as text": (on_functions(arguments='{ "command" :  "ls" }'), {Tolerated.ARGUMENTS_RESPELT}),
    "arguments as an object, no text": (
        lambda message: having(content=None)(on_functions(arguments={"command": "ls"})(message)),
        {Tolerated.CONTENT_NULL, Tolerated.TEXT_LEFT_OUT},
    ),
    "arguments cut": (on_functions(arguments='{"command": "l'), {Tolerated.ARGUMENTS_CUT}),
    "arguments empty": (on_functions(arguments=""), {Tolerated.ARGUMENTS_CUT}),
    "arguments null": (on_functions(arguments=None), {Tolerated.ARGUMENTS_CUT}),
    "tool renamed": (on_functions(name="mcp__box__run"), {Tolerated.CALLS_RENAMED}),
    "ids wrapped": (on_calls(wrapped), set()),
    "ids wrapped, no text": (
        lambda message: having(content=None)(on_calls(wrapped)(message)),
        {Tolerated.CONTENT_NULL, Tolerated.TEXT_LEFT_OUT},
    ),
}


def changed_loop(change: Change, turns: int = 3) -> Callable[[Any], Any]:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        for number in range(turns):
            turn = await episode.chat(messages, tools=[RUN])
            message = change(dict(turn.as_message()))
            answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": f"result {number}"}
            messages += [message, answer]
        await episode.chat(messages, tools=[RUN])

    return loop


def says(turns: int = 3) -> list[Any]:
    return [*(Reply(THINKS, calls=[CALLS[0]]) for _ in range(turns)), "Done."]


@pytest.mark.parametrize("name", CHANGES)
async def test_message_changed_around_its_ids_keeps_one_segment(name: str) -> None:
    change, tolerated = CHANGES[name]
    (trajectory,) = await asked(changed_loop(change), says())
    assert verdicts(trajectory) == ["new", "append", "append", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    found = set(trajectory.requests[3].tolerated) - {Tolerated.REASONING_LEFT_OUT, Tolerated.REASONING_STRIPPED}
    assert found == tolerated - {Tolerated.REASONING_LEFT_OUT}
    if Tolerated.REASONING_LEFT_OUT in tolerated:
        assert Tolerated.REASONING_LEFT_OUT in trajectory.requests[3].tolerated


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", CHANGES)
async def test_message_changed_around_its_ids_verifies(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    await asked(changed_loop(CHANGES[name][0], 2), says(2), file=path)
    checked = await anyio.to_thread.run_sync(verify, path)
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2), (2,)], ids=str)
@pytest.mark.parametrize("results", [(0, 1, 2), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("text", [True, False])
async def test_calls_reordered_or_left_out_are_those_of_the_turn(
    order: tuple[int, ...], results: tuple[int, ...], text: bool
) -> None:
    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], tools=[RUN])
        message = dict(turn.as_message())
        made = message["tool_calls"]
        message |= {"content": message["content"] if text else None, "tool_calls": [made[each] for each in order]}
        answers = [
            {"role": "tool", "tool_call_id": made[each]["id"], "content": "abc"[each]}
            for each in results
            if each in order
        ]
        await episode.chat([SYSTEM, TASK, message, *answers], tools=[RUN])

    (trajectory,) = await asked(loop, [Reply(TEXT, calls=[call("run", command=each) for each in "abc"]), "Done."])
    assert verdicts(trajectory) == ["new", "append"]
    found = trajectory.requests[1].tolerated
    assert (Tolerated.CALLS_LEFT_OUT in found) == (len(order) < 3)
    orders = list(order), [each for each in results if each in order]
    assert (Tolerated.REORDERED in found) == any(each != sorted(each) for each in orders)
    given = [each["content"] for each in trajectory.messages if each["role"] == "tool"]
    assert given == sorted(given), "results are in the order of the turn's calls"


@pytest.mark.parametrize(
    "change",
    [
        having(content="I do something else."),
        having(content=f"{TEXT} And I add this."),
        on_functions(arguments={"command": "rm"}),
        on_functions(arguments={"command": "ls", "more": 1}),
        on_calls(lambda made: [*made, {**made[0], "id": "another"}]),
    ],
    ids=["text", "added text", "arguments", "added argument", "calls"],
)
async def test_a_turn_that_is_edited_beside_its_ids_stays_in_its_thread(change: Change) -> None:
    (trajectory,) = await asked(changed_loop(change, 2), says(2))
    assert set(verdicts(trajectory)[1:]) == {"edited"}
    assert [segment.cause for segment in trajectory.segments] == ["start", "edited", "edited"]


# --- changes before the turn


def clock(number: int) -> dict[str, Any]:
    return {"role": "system", "content": f"You mend programs. It is 12:0{number}."}


@pytest.mark.parametrize("tools_change", [False, True])
@pytest.mark.parametrize("content", ["as it was", None])
@pytest.mark.parametrize("first", ["system", "user"])
async def test_a_beginning_that_changes_stays_in_one_thread(
    first: str, content: str | None, tools_change: bool, tmp_path: Path
) -> None:
    async def loop(episode: Any) -> None:
        rest: list[Any] = []
        for number in range(4):
            begin = [clock(number), TASK] if first == "system" else [SYSTEM, user(f"Mend it, attempt {number}.")]
            run: Any = RUN
            look = {**run, "function": {**run["function"], "name": f"look{number}"}}
            turn = await episode.chat([*begin, *rest], tools=[RUN, look] if tools_change else [RUN])
            if turn.tool_calls:
                message = dict(turn.as_message())
                rest += [message if content else {**message, "content": None}, result(turn, f"result {number}")]

    path = tmp_path / "run.db"
    (trajectory,) = await asked(loop, says(), file=path)
    assert verdicts(trajectory) == ["new", "edited", "edited", "edited"]
    assert trajectory.reward is not None
    assert [request.parent_turn for request in trajectory.requests] == [None, 0, 1, 2]
    # The prompt again contains the text that a client left out of a turn which its ids identify.
    last = trajectory.segments[-1].messages
    assert [each["content"] for each in last if each["role"] == "assistant"] == [TEXT, TEXT, TEXT, "Done."]
    checked = await anyio.to_thread.run_sync(verify, path)
    assert checked.exit_code == 0, checked.output


async def test_beginning_that_changes_once_starts_one_new_segment() -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        for number in range(4):
            turn = await episode.chat(messages, tools=[RUN])
            if turn.tool_calls:
                messages += [turn.as_message(), result(turn, f"result {number}")]
            if number == 0:
                messages[0] = clock(1)

    (trajectory,) = await asked(loop, says())
    assert verdicts(trajectory) == ["new", "edited", "append", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start", "edited"]


async def test_the_same_edited_request_again_is_a_sibling() -> None:
    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], tools=[RUN])
        for _ in range(2):
            await episode.chat([clock(1), TASK, turn.as_message(), result(turn, "a")], tools=[RUN])

    (trajectory,) = await asked(loop, [says()[0], "Done.", "Done too."])
    assert verdicts(trajectory) == ["new", "edited", "again"]


async def test_a_window_that_slides_over_a_history_stays_in_one_thread() -> None:
    async def loop(episode: Any) -> None:
        past: list[Any] = []
        for number in range(6):
            turn = await episode.chat([SYSTEM, TASK, *past[-4:]], tools=[RUN])
            if turn.tool_calls:
                past += [turn.as_message(), result(turn, f"result {number}")]

    (trajectory,) = await asked(loop, says(5))
    assert verdicts(trajectory) == ["new", "append", "append", "edited", "edited", "edited"]


@pytest.mark.parametrize("how", ["cleared", "shortened", "left out"])
async def test_results_of_the_past_that_change_stay_in_one_thread(how: str) -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        for number in range(3):
            turn = await episode.chat(messages, tools=[RUN])
            if turn.tool_calls:
                messages += [turn.as_message(), result(turn, f"result {number}")]
            if number == 1:
                old = messages[3]
                messages[3:4] = (
                    [] if how == "left out" else [{**old, "content": "[cleared]" if how == "cleared" else "res"}]
                )

    (trajectory,) = await asked(loop, says(2))
    assert verdicts(trajectory) == ["new", "append", "edited"]


async def test_another_errand_with_the_same_past_is_another_thread() -> None:
    """A summary is requested with another system message and without tools, so it is not part of the task."""

    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], tools=[RUN])
        past = [turn.as_message(), result(turn, "a")]
        await episode.chat([{"role": "system", "content": "Sum it up."}, TASK, *past])
        await episode.chat([SYSTEM, TASK, *past], tools=[RUN])

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await loop(self.episode)

    trajectories: list[Trajectory] = await play_all(Foreign, recording([says()[0], "Sum.", "Done."], template="hermes"))
    by_number = {each.number: each.verdict for one in trajectories for each in one.requests}
    assert (by_number[0], by_number[2]) == (Verdict.NEW, Verdict.APPEND)
