"""Requests in the form that Claude Code sends: an episode continues from the turns that the client sends back."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from runner import Conversation, Outcome, Trajectory
from runner.endpoint.anthropic_messages import AnthropicMessages
from runner.endpoint.refusals import Reason, refusal_of
from runner.endpoint.wire_form import Answered
from runner.testing import Fault, Reply, assert_exact
from runner.trajectory import Turn
from runner.turn_events import TurnProgress
from tests.endpoint.anthropic_turns import rebuilt
from tests.endpoint.serving import ImmediateSink
from tests.episode.awkward import misspelling
from tests.playing import Plain, play_all

pytestmark = pytest.mark.anyio

RUN: Any = {
    "name": "run",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}
MARK: Any = {"cache_control": {"type": "ephemeral"}}
SENT_TOKENS = 12


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def assistant(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer["content"]}


def result(answer: Any, words: Any = "three files", number: int = 0, **more: Any) -> dict[str, Any]:
    calls = [block["id"] for block in answer["content"] if block["type"] == "tool_use"]
    return {"type": "tool_result", "tool_use_id": calls[number], "content": words, **more}


TASK = user(text("<system-reminder>\nBe brief.\n</system-reminder>"), text("Mend it.", **MARK))


def called(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': {'command': command}})}\n</tool_call>"


LOOKS = f"<think>\nI look first.\n</think>\n\nI will look.\n{called('ls')}"


class Program:
    """An agent program that asks an episode in this wire format, as an endpoint forwards its requests."""

    def __init__(self, episode: Any, form: AnthropicMessages, *, system_as_user: bool) -> None:
        self.system_as_user = system_as_user
        self._desk = episode._chat_service
        self._form = form
        self._asked = 0

    async def ask(self, *messages: Any, stream: bool = True, agent: str = "", **fields: Any) -> dict[str, Any]:
        """Ask with a whole history, and return the message that Anthropic's client builds from the answer."""
        self._asked += 1
        body = {
            "model": "demo",
            "max_tokens": 32000,
            "system": [
                text(f"x-anthropic-billing-header: cc_version=2; cch={self._asked};"),
                text("You mend programs.", **MARK),
            ],
            "messages": list(messages),
            "tools": [RUN, {"type": "web_search_20250305", "name": "web_search"}],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "user_0_account_0_session_7-7"},
            "stream": stream,
            **fields,
        }
        headers = {"user-agent": "claude-cli/2"} | ({"x-claude-code-agent-id": agent} if agent else {})
        request = self._form.read(json.loads(json.dumps(body)), headers)
        writer, parts, answers = self._form.writer(request, "demo", lambda ids: ""), list[TurnProgress](), list[Any]()

        async def give(turn: Turn, continued: Turn | None) -> None:
            answered = Answered.of(turn, continued)
            if not stream:
                answers.append(json.loads(writer.whole(answered)))
                return
            answers.append(rebuilt(b"".join(writer.write([each]) for each in parts) + writer.end(answered)))

        asked = replace(request.chat_call, system_as_user=self.system_as_user)
        await self._desk.ask(asked, sink=ImmediateSink(parts.append), deliver=give)
        (answer,) = answers
        return dict(answer)

    async def ask_and_go_away(self, engine: Any, *messages: Any) -> None:
        enough = engine.stats().sampled_tokens + SENT_TOKENS
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: self.ask(*messages))
            while engine.stats().sampled_tokens < enough:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        await anyio.wait_all_tasks_blocked()


Loop = Callable[[Program, Any], Awaitable[None]]


async def played(says: Any, loop: Loop, *, system_as_user: bool = False, **options: Any) -> list[Trajectory]:
    """The trajectories of an episode that runs only a program's loop."""
    form = AnthropicMessages()
    engine = misspelling(says)

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await loop(Program(self.episode, form, system_as_user=system_as_user), engine)

    trajectories = await play_all(Foreign, engine, **options)
    for trajectory in trajectories:
        assert trajectory.outcome in (Outcome.COMPLETED, Outcome.TOKEN_LIMIT), trajectory.error
        assert_exact(trajectory, engine)
    return trajectories


def verdicts(trajectory: Trajectory) -> list[str]:
    return [request.verdict.value for request in trajectory.requests]


async def test_changed_marks_and_billing_line_continue_the_ids() -> None:
    async def loop(program: Program, engine: Any) -> None:
        history = [TASK]
        for _ in range(2):
            answer = await program.ask(*history)
            assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
            moved = [user(*({**block, "cache_control": None} for block in TASK["content"]))]
            history = [*moved, *history[1:], assistant(answer)]
            history.append(user(result(answer, [text("three files")], **MARK), text("Five tools are left.")))
        answer = await program.ask(*history)
        assert (answer["content"], answer["stop_reason"]) == ([text("Done.")], "end_turn")

    (trajectory,) = await played([LOOKS, LOOKS, "Done."], loop)
    assert verdicts(trajectory) == ["new", "append", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    for request in trajectory.requests:
        assert {each.value for each in request.tolerated} == {"volatile_lines", "cache_marks"}
        assert (request.volatile, request.label, request.client, request.form) == (
            1,
            "7-7",
            "claude-cli/2",
            "anthropic",
        )
        assert request.not_granted == {"thinking": {"type": "adaptive"}, "tools": ["web_search"]}
    assert "billing" not in str(trajectory.messages)


def with_calls_last(answer: Any) -> dict[str, Any]:
    """Return a turn as Claude Code sends it back: first all text, then all calls."""
    return {"role": "assistant", "content": sorted(answer["content"], key=lambda block: block["type"] == "tool_use")}


@pytest.mark.parametrize("sent_back", [assistant, with_calls_last])
async def test_alternating_text_and_calls_return_as_their_turn(sent_back: Any) -> None:
    async def loop(program: Program, engine: Any) -> None:
        answer = await program.ask(TASK)
        kinds = [block["type"] for block in answer["content"]]
        assert kinds == ["thinking", "text", "tool_use", "text", "tool_use", "text"]
        # The result of the first call must be the first answer.
        results = user(result(answer, "2", 1, is_error=True), text("Look at both."), result(answer, "1"))
        await program.ask(TASK, sent_back(answer), results)

    says = f"<think>\nI look.\n</think>\n\nOne:\n{called('one')}\nTwo:\n{called('two')}\nThat is all."
    (trajectory,) = await played([says, "Done."], loop)
    assert verdicts(trajectory) == ["new", "append"]
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    tolerated = {each.value for each in trajectory.requests[1].tolerated}
    assert tolerated == {"volatile_lines", "cache_marks", "extra_keys", "reordered"}
    asked = trajectory.messages[-4:-1]
    assert [(each["role"], each["content"]) for each in asked] == [
        ("tool", "1"),
        ("tool", "2"),
        ("user", "Look at both."),
    ]


async def test_a_turn_that_comes_back_as_it_was_given_whole_is_the_same() -> None:
    async def loop(program: Program, engine: Any) -> None:
        answer = await program.ask(TASK, stream=False)
        await program.ask(TASK, assistant(answer), user(result(answer)), stream=False)

    (trajectory,) = await played([LOOKS + "\nAnd so on.", "Done."], loop)
    assert verdicts(trajectory) == ["new", "append"]


async def test_signature_of_a_thought_names_its_turn() -> None:
    async def loop(program: Program, engine: Any) -> None:
        one, other = await program.ask(TASK), await program.ask(TASK)
        assert one["id"] != other["id"]
        assert one["content"][1] == other["content"][1] == text("Done.")
        await program.ask(TASK, assistant(one), user(text("And?")))
        await program.ask(TASK, assistant(other), user(text("And so?")))

    thought = "<think>\nI know.\n</think>\n\nDone."
    (trajectory,) = await played([thought, thought, "This.", "That."], loop)
    assert verdicts(trajectory) == ["new", "again", "append", "append"]
    assert [request.parent_turn for request in trajectory.requests] == [None, None, 0, 1]


async def test_sub_agents_with_one_prompt_are_threads_of_their_own() -> None:
    async def loop(program: Program, engine: Any) -> None:
        answers = [await program.ask(TASK, agent=agent) for agent in ("one", "two")]
        for agent, answer in zip(("one", "two"), answers, strict=True):
            await program.ask(TASK, assistant(answer), user(result(answer)), agent=agent)

    trajectories = await played([LOOKS, LOOKS, "Done.", "Done."], loop)
    assert [verdicts(trajectory) for trajectory in trajectories] == [["new", "append"]] * 2
    assert [request.label for request in trajectories[0].requests] == ["one"] * 2


async def test_cut_turn_requested_again_without_stream_is_sampled_again() -> None:
    async def loop(program: Program, engine: Any) -> None:
        answer = await program.ask(TASK)
        history = [TASK, assistant(answer), user(result(answer))]
        await program.ask_and_go_away(engine, *history)
        answer = await program.ask(*history, stream=False)
        assert answer["content"] == [text("Done.")]

    cut = Reply("It was a long way to where the files are.", fault=Fault.stall(at=SENT_TOKENS), chunks=1)
    (trajectory,) = await played([LOOKS, cut, "Done."], loop)
    assert [(each.verdict.value, each.again.value) for each in trajectory.requests] == [
        ("new", ""),
        ("append", ""),
        ("again", "taken_back"),
    ]


async def test_cut_turn_continues_if_it_is_sent_last() -> None:
    async def loop(program: Program, engine: Any) -> None:
        cut = await program.ask(TASK, max_tokens=4)
        assert cut["stop_reason"] == "max_tokens"
        rest = await program.ask(TASK, assistant(cut))
        assert cut["content"][0]["text"] + rest["content"][0]["text"] == "It was a long way."
        assert rest["id"] != cut["id"]

    (trajectory,) = await played(["It was a long way.", "as a long way."], loop)
    assert verdicts(trajectory) == ["new", "continued"]


async def test_words_put_into_the_mouth_of_the_model_are_refused() -> None:
    async def loop(program: Program, engine: Any) -> None:
        with pytest.raises(Exception, match="the last one, is an assistant message") as raised:
            await program.ask(TASK, {"role": "assistant", "content": "The answer is ("})
        assert refusal_of(raised.value).reason is Reason.INVALID

    (trajectory,) = await played(["so"], loop)
    assert trajectory.turns == []


@pytest.mark.parametrize("system_as_user", [False, True])
async def test_system_message_in_mid_conversation_may_be_a_users(system_as_user: bool) -> None:
    late = {"role": "system", "content": "Five tools are left."}

    async def loop(program: Program, engine: Any) -> None:
        answer = await program.ask(TASK)
        await program.ask(TASK, assistant(answer), user(result(answer)), late)

    (trajectory,) = await played([LOOKS, "Done."], loop, system_as_user=system_as_user)
    assert verdicts(trajectory) == ["new", "append"]
    assert trajectory.messages[-2]["role"] == ("user" if system_as_user else "system")
    assert ("system_as_user" in {each.value for each in trajectory.requests[1].tolerated}) == system_as_user
