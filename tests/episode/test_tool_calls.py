"""Tool calls of a turn: parallel calls, results for the model, and constraints on sampling."""

from __future__ import annotations

import re
import threading
from typing import Any

import anyio
import pytest

from runner import Conversation, FinishReason, Outcome, Run, Sampling, Task, ToolError, Turn, tool
from runner.options import ConstraintKind
from runner.parsing.schema_grammar import answer_constraint
from runner.testing import Replies, Reply, ScriptedEngine, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from tests.playing import Plain, play, recording

pytestmark = [pytest.mark.anyio, pytest.mark.both_backends]


def results(trajectory: Any) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


async def test_async_calls_of_a_turn_run_together_and_results_are_in_order() -> None:
    class Meets(Plain):
        def setup(self) -> None:
            self.arrived: list[str] = []

        @tool
        async def meet(self, name: str, partners: int) -> str:
            """Wait for the others."""
            self.arrived.append(name)
            while len(self.arrived) < partners:
                await anyio.lowlevel.checkpoint()
            return name

    calls = [call("meet", name=name, partners=3) for name in "abc"]
    trajectory = await play(Meets, [calls, "Done"])
    assert results(trajectory) == ["a", "b", "c"]


async def test_sync_calls_run_one_at_a_time_in_order() -> None:
    log: list[str] = []
    inside = threading.Semaphore(1)

    class Writes(Plain):
        @tool
        def write(self, text: str) -> int:
            """Write."""
            assert inside.acquire(blocking=False)
            log.append(text)
            inside.release()
            return len(log)

        @tool
        async def read(self) -> str:
            """Read."""
            return "read"

    calls = [call("write", text="a"), call("read"), call("write", text="b"), call("write", text="c")]
    trajectory = await play(Writes, [calls, "Done"])
    assert log == ["a", "b", "c"]
    assert results(trajectory) == ["1", "read", "2", "3"]


async def test_a_call_that_is_not_parallel_is_a_barrier() -> None:
    log: list[str] = []

    class Barred(Plain):
        @tool
        async def look(self, name: str) -> None:
            """Look."""
            log.append(f"{name} begins")
            await anyio.lowlevel.checkpoint()
            log.append(f"{name} ends")

        @tool(parallel=False)
        async def move(self) -> None:
            """Move."""
            log.append("move begins")
            await anyio.wait_all_tasks_blocked()
            log.append("move ends")

    await play(Barred, [[call("look", name="a"), call("move"), call("look", name="b")], "Done"])
    assert log == ["a begins", "a ends", "move begins", "move ends", "b begins", "b ends"]


async def test_first_exception_by_the_order_of_calls_is_raised() -> None:
    class Breaks(Plain):
        @tool
        async def break_now(self, name: str) -> None:
            """Break."""
            raise ValueError(name)

    trajectory = await play(Breaks, [[call("break_now", name="one"), call("break_now", name="two")]])
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "ValueError: one" in trajectory.error


class Adds(Plain):
    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        if a > 100:
            raise ToolError("a is too large")
        return a + b


@pytest.mark.parametrize(
    ("said", "answered"),
    [
        ("[subtract(a=1, b=2)]", "There is no tool named subtract. The tools are: add."),
        ("[add(a=1)]", "Wrong arguments for add: b is missing."),
        ("[add(a=1, b='x')]", "Wrong arguments for add: b must be an integer, got a string."),
        ("[add(a=101, b=1)]", "a is too large"),
    ],
    ids=["unknown tool", "missing", "wrong type", "ToolError"],
)
async def test_bad_call_is_answered_by_a_tool_message_and_play_continues(said: str, answered: str) -> None:
    trajectory = await play(Adds, [said, call("add", a=1, b=2), "3"])
    first, second = results(trajectory)
    assert first[:30] == answered[:30]
    assert second == "3"
    assert (trajectory.outcome, trajectory.text) == (Outcome.COMPLETED, "3")
    assert [made.failed for turn in trajectory.turns for made in turn.tool_calls] == [True, False]


@pytest.mark.parametrize("template", ["pythonic", "hermes"])
async def test_unreadable_call_is_answered_by_a_user_message(template: str) -> None:
    broken = {
        "pythonic": "[add(a=1, b=2), add(a=1, b=",
        "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "ar',
    }[template]
    trajectory = await play(Adds, recording([broken, call("add", a=2, b=2), "4"], template=template))
    first = trajectory.turns[0]
    assert [bool(made.error) for made in first.tool_calls] == [False, True]
    assert not any(made.failed for made in first.tool_calls)
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "user", "assistant", "tool", "assistant"]
    assert len(trajectory.messages[1]["tool_calls"]) == 1
    assert trajectory.messages[3]["content"].startswith("That tool call could not be read: ")
    assert (trajectory.outcome, len(trajectory.segments)) == (Outcome.COMPLETED, 1)


async def test_turn_with_only_a_broken_call_does_not_end_the_episode() -> None:
    trajectory = await play(Adds, ["[add(a=1", "Sorry"])
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert trajectory.text == "Sorry"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("", "(empty)"),
        (None, "null"),
        ({"ü": 1}, '{"ü": 1}'),
        ([1, 2.5], "[1, 2.5]"),
        (True, "true"),
        ("as is", "as is"),
    ],
)
async def test_a_tools_result_becomes_text_and_never_an_empty_content(value: Any, read: str) -> None:
    class Gives(Plain):
        @tool
        def give(self) -> Any:
            """Give."""
            return value

    assert results(await play(Gives, [call("give"), "Done"])) == [read]


async def test_tool_choice_is_a_constraint_of_the_request_and_the_turn() -> None:
    class Chooses(Adds):
        tool_choice = "required"

        @tool
        def answer(self, value: int) -> None:
            """Answer."""
            self.tool_choice = "none"

        def step(self, turn: Turn) -> str | None:
            self.tool_choice = "auto"
            return "Anything else?" if len(self.episode.turns) < 5 else None

    replies: Replies = [call("add", a=1, b=2), call("answer", value=3), "[add(a=1, b=2)]", "No", "No"]
    engine = recording(replies)
    trajectory = await play(Chooses, engine)
    kinds = [made.constraint and made.constraint.kind for made in engine.calls]
    assert kinds == [ConstraintKind.GRAMMAR, ConstraintKind.GRAMMAR, None, None, None]
    assert [turn.constraint for turn in trajectory.turns] == [made.constraint for made in engine.calls]
    assert trajectory.turns[2].tool_calls == []  # with "none", text is never read as a call
    assert trajectory.turns[2].text == "[add(a=1, b=2)]"


async def test_a_named_tool_is_the_only_one_in_the_constraint() -> None:
    class Chooses(Adds):
        @tool
        def answer(self, value: int) -> None:
            """Answer."""
            self.episode.end()

        async def rollout(self, conversation: Conversation) -> None:
            await self.episode.answer(await conversation.generate(tool_choice="answer"))

    engine = recording([call("answer", value=3)])
    await play(Chooses, engine)
    constraint = engine.calls[0].constraint
    assert constraint is not None
    assert "answer" in constraint.value
    assert "add(" not in constraint.value


async def test_a_schema_a_regex_and_a_choice_reach_the_engine() -> None:
    class Constrained(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate(sampling=Sampling(schema={"type": "integer"}))
            conversation.add("Again.")
            await conversation.generate(sampling=Sampling(regex="[0-9]+"))
            conversation.add("Again.")
            await conversation.generate(sampling=Sampling(choice=("1", "2")))

    engine = recording(["1", "2", "1"])
    await play(Constrained, engine)
    made = [recorded.constraint for recorded in engine.calls]
    assert [constraint.kind for constraint in made if constraint] == [
        ConstraintKind.GRAMMAR,
        ConstraintKind.REGEX,
        ConstraintKind.CHOICE,
    ]
    assert made[0] == answer_constraint({"type": "integer"})


@pytest.mark.parametrize("where", ["class", "turn"])
async def test_unenforced_keywords_are_named_once_a_run(where: str) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}

    class Unique(Plain):
        sampling = Sampling(schema=schema) if where == "class" else Sampling()

        def tasks(self) -> list[Task]:
            return [Task(id=name, prompt="Name some.") for name in ("a", "b")]

        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate(sampling=Sampling(schema=schema))

    run = Run(Unique(), recording(["[1]", "[2]"]))
    async with run:
        assert [trajectory.outcome async for trajectory in run] == [Outcome.COMPLETED] * 2
    (fault,) = run.summary.faults
    assert fault.endswith("Sampling(schema=...): not enforced: uniqueItems")


async def test_two_constraints_on_one_turn_are_refused_with_the_fix() -> None:
    class Both(Adds):
        tool_choice = "required"
        sampling = Sampling(regex="[0-9]+")

    trajectory = await play(Both, [call("add", a=1, b=2)])
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "tool_choice='none'" in trajectory.error


async def test_agent_inside_a_tool_works_and_two_at_once_are_refused() -> None:
    class HandsOff(Plain):
        @tool
        async def ask(self, question: str) -> str:
            """Ask the expert."""
            expert = self.episode.conversation("expert", system_prompt="You are an expert.")
            expert.add(question)
            return (await expert.generate()).text

    one = await play(HandsOff, {"main": [call("ask", question="Why?"), "So"], "expert": ["Because"]})
    assert (one.outcome, results(one)) == (Outcome.COMPLETED, ["Because"])
    two = await play(HandsOff, {"main": [[call("ask", question="a"), call("ask", question="b")]], "expert": ["x", "y"]})
    assert two.outcome is Outcome.ENV_ERROR
    assert "RuntimeError: conversation 'expert' is already generating" in two.error
    assert "another name" in two.error


async def test_finish_of_a_turn_with_calls_is_the_stop_that_was_sampled() -> None:
    trajectory = await play(Adds, [call("add", a=1, b=2), "3"])
    assert [turn.finish for turn in trajectory.turns] == [FinishReason.STOP] * 2
    assert trajectory.turns[0].junction is None
    assert trajectory.turns[1].junction is not None
    assert trajectory.turns[1].junction.result == "appended"


class Fails(Plain):
    @tool
    def raw_bytes(self) -> bytes:
        """Give bytes."""
        return b"\xff\xfe"

    @tool
    async def itself(self) -> list[Any]:
        """Give a list that holds itself."""
        circle: list[Any] = []
        circle.append(circle)
        return circle

    @tool
    def drained(self) -> str:
        """Give the next one."""
        return next(iter(()))

    @tool
    async def drained_async(self) -> str:
        """Give the next one."""
        return next(iter(()))

    @tool
    async def both(self) -> str:
        """Fail twice."""
        raise ExceptionGroup("two", [ValueError("one"), ExceptionGroup("one more", [KeyError("other")])])


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("raw_bytes", "TypeError: a tool returned a bytes, which has no JSON form: return a string"),
        ("itself", "ValueError: Circular reference detected"),
        ("drained", "StopIteration"),
        ("drained_async", "StopIteration"),
        ("both", "ExceptionGroup: two (2 sub-exceptions): ValueError: one; KeyError: 'other'"),
    ],
)
async def test_error_inside_a_tool_names_the_tool_and_its_line(name: str, kind: str) -> None:
    error = (await play(Fails, [call(name)])).error
    assert error.startswith(kind)
    assert re.search(rf"\b{name}\b.*{re.escape(__file__)}:\d+", error), error


SPELT = [ord(sign) for sign in '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>']


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_a_mark_that_is_spelt_with_letters_is_prose(choice: str) -> None:
    class Choosing(Plain):
        @tool
        def add(self, a: int, b: int) -> int:
            """Add two integers."""
            return a + b

        async def rollout(self, conversation: Conversation) -> None:
            turn = await conversation.generate(tool_choice=choice)
            assert (turn.tool_calls, turn.text) == ([], bytes(SPELT).decode())

    tokenizer = ByteTokenizer(added_tokens=["<tool_call>", "</tool_call>"])
    engine = ScriptedEngine(Reply(ids=SPELT), template="hermes", tokenizer=tokenizer)
    trajectory = await play(Choosing, engine)
    assert trajectory.outcome.scored, trajectory.error
