"""A run file with every kind of turn, functions that damage it, and the verdict of `deltarunner verify`."""

from __future__ import annotations

import json
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

from typer.testing import CliRunner, Result

from runner import Conversation, Environment, Run, RunFile, Sampling, Task, Tool, Turn, reward, tool
from runner.cli.app import app
from runner.testing import Reply, ScriptedEngine, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.trajectory import Trajectory

DATED = "<|im_start|>system\nIt is {{ strftime_now('%d %B %Y, %H:%M:%S') }}.<|im_end|>\n"


def jump(height: int) -> int:
    """Jump."""
    return height


class Wandering(Environment):
    """Environment with every kind of turn: calls, cuts, stops, a rewritten history, and two more agents."""

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt=f"Question {number}, größer <|im_end|>?") for number in range(3)]

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @reward
    def correct(self) -> bool:
        return True

    async def rollout(self, conversation: Conversation) -> None:
        await self.calls(conversation)
        await self.cuts(conversation)
        await self.others(conversation)
        await self.rewrites(conversation)

    async def calls(self, conversation: Conversation) -> None:
        for _ in ("two calls", "one that does not parse", "a thought and text beside a call"):
            turn = await conversation.generate()
            conversation.add(*await conversation.call_tools(turn))
        turn = await conversation.generate(tool_choice="none")
        assert "add" in turn.text
        conversation.add("Good.")

    async def cuts(self, conversation: Conversation) -> None:
        for sampling in (Sampling(stop=("END", "STOP")), Sampling(stop_ids=(ord("!"),)), None):
            await conversation.generate(sampling=sampling)
            conversation.add("Continue.", "Please.")
        for sampling in (None, None, Sampling(stop=("END",))):
            turn = await conversation.generate(sampling=sampling)
        assert turn.text == "It was a dark "
        conversation.add("And?")

    async def others(self, conversation: Conversation) -> None:
        user = self.episode.conversation("user", system_prompt="You are a customer.")
        judge = self.episode.conversation("judge", prompt="Judge!")
        for _ in range(2):
            user.add((await conversation.generate()).text)
            conversation.add((await user.generate()).text)
            await judge.generate()
            judge.add("Again!")

    async def rewrites(self, conversation: Conversation) -> None:
        conversation.replace([*conversation.messages[:3], {"role": "assistant", "content": "An example."}, *ASKED])
        await conversation.generate()
        conversation.replace(tools=[Tool(jump)])
        conversation.add("Now jump.")
        turn = await conversation.generate()
        conversation.add(*await conversation.call_tools(turn))
        await conversation.generate()
        conversation.add("No turn follows this.")


ASKED: Any = [{"role": "user", "content": "In short?"}]

MAIN = [
    [call("add", a=1, b=2), call("add", a=3, b=4)],
    "[add(a=1, b=",
    "<think>Hm.</think>I add [add(a=5, b=6)]",
    "It was [add(a=7, b=8)]",
    "one END two",
    "Stop!",
    Reply("never", finish="length"),
    Reply("It w", finish="length"),
    Reply("as a", finish="length"),
    " dark END",
    "How can I help?",
    "And now?",
    "In short.",
    [call("jump", height=2)],
    "Done.",
]


def replies(hermes: bool) -> dict[str, Any]:
    main: list[Any] = list(MAIN)
    if hermes:
        main[1:4] = [
            '<tool_call>{"name": "add", </tool_call>',
            '<think>Hm.</think>I add <tool_call>{"name": "add", "arguments": {"a": 5, "b": 6}}</tool_call>',
            'It was <tool_call>{"name": "add", "arguments": {"a": 7, "b": 8}}</tool_call>',
        ]
    return {"main": main, "user": ["My order is late.", "Bye."]}


async def play(path: Path, template: str, tokenizer: Any = None, history: Any = None) -> None:
    own = ChatTemplate.load(template)
    dated = ChatTemplate(DATED + own.text, name="dated", variables={"eos_token": "<|im_end|>"})
    engine = ScriptedEngine(replies(template == "hermes"), template=dated, tokenizer=tokenizer)
    elsewhere = ScriptedEngine("Well said.", template="hermes", tokenizer=ByteTokenizer(["<|judge|>"]))
    options = {"enable_thinking": False}
    async with Run(
        Wandering, engine, engines={"judge": elsewhere}, file=path, template_options=options, history=history
    ) as run:
        async for trajectory in run:
            assert trajectory.outcome.scored, trajectory.error


def verify(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["verify", str(path), *options])


def verdict(path: Path, *options: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(verify(path, "--json", *options).stdout)
    return report


def trajectory_of(path: Path, agent: str = "main", id: str = "t1#0") -> Trajectory:
    with RunFile(path) as run_file:
        return run_file.trajectory(id, agent=agent)


def change(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as connection:
        changed = connection.execute(statement, values).rowcount
        connection.commit()
    assert changed >= 1


OF_ONE = "episode = (SELECT key FROM episodes WHERE id = 't1#0' AND agent = ?) AND number = ?"


def change_id(path: Path, index: int, *, agent: str = "main", segment: int = 0) -> None:
    """Change one id of a segment."""
    ids = trajectory_of(path, agent).segments[segment].log.ids
    packed = bytearray(struct.pack(f"<{len(ids)}i", *ids))
    struct.pack_into("<i", packed, 4 * index, ord("~"))
    change(path, f"UPDATE segments SET ids = ? WHERE {OF_ONE}", bytes(packed), agent, segment)


def change_message(path: Path, number: int, content: str, *, segment: int = 0) -> None:
    messages = trajectory_of(path).segments[segment].messages
    messages[number]["content"] = content
    change(path, f"UPDATE segments SET messages = ? WHERE {OF_ONE}", json.dumps(messages), "main", segment)


def bridges(trajectory: Trajectory, segment: int = 0) -> list[tuple[Turn, int]]:
    """The turns of a segment that have a bridge before them, each with the index of the bridge's first id."""
    turns = [turn for turn in trajectory.turns if turn.segment == segment]
    pairs = zip(turns[1:], turns, strict=False)
    return [(turn, before.end) for turn, before in pairs if turn.start > before.end]


def damaged(path: Path) -> dict[str, Any]:
    """Return the difference that was found, and assert the other fields of the verdict."""
    report = verdict(path)
    assert (report["verified"], report["differing"], report["exit_code"], verify(path).exit_code) == (False, 1, 7, 7)
    difference: dict[str, Any] = report["difference"]
    assert (difference["episode"], difference["attempt"]) == ("t1#0", 0)
    return difference
