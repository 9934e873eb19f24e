"""A run file holds all that its prompts were made from, and whatever is not as it was is found by making them again."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from typer.testing import CliRunner, Result

from envs.calculator import Calculator
from runner import Conversation, Environment, Run, RunFile, Sampling, Task, Tool, Turn, VllmEngine, reward, tool
from runner.cli import app
from runner.engines.base import FinishReason
from runner.options import History
from runner.store.header import Header
from runner.testing import Reply, ScriptedEngine, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.log import Source
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import load_tokenizer
from runner.trajectory import Trajectory
from runner.verification import first_difference, stored_chat

DATED = "<|im_start|>system\nIt is {{ strftime_now('%d %B %Y, %H:%M:%S') }}.<|im_end|>\n"


def jump(height: int) -> int:
    """Jump."""
    return height


class Wandering(Environment):
    """Everything that can become of a turn: calls, cuts, stops, a rewritten history, and two more agents."""

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
            conversation.add("Go on.", "Please.")
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
        conversation.add("Nobody sees this.")


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


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of three episodes of three agents."""
    path = tmp_path_factory.mktemp("verify") / "run.db"
    anyio.run(play, path, "pythonic")
    return path


@pytest.fixture
def path(played: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copy(played, tmp_path / "run.db"))


def verify(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["verify", str(path), *options])


def verdict(path: Path, *options: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(verify(path, "--json", *options).stdout)
    return told


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
    """Another id at one place of a segment."""
    ids = trajectory_of(path, agent).segments[segment].log.ids
    packed = bytearray(struct.pack(f"<{len(ids)}i", *ids))
    struct.pack_into("<i", packed, 4 * index, ord("~"))
    change(path, f"UPDATE segments SET ids = ? WHERE {OF_ONE}", bytes(packed), agent, segment)


def change_message(path: Path, number: int, content: str, *, segment: int = 0) -> None:
    messages = trajectory_of(path).segments[segment].messages
    messages[number]["content"] = content
    change(path, f"UPDATE segments SET messages = ? WHERE {OF_ONE}", json.dumps(messages), "main", segment)


def bridges(trajectory: Trajectory, segment: int = 0) -> list[tuple[Turn, int]]:
    """The turns of a segment that a bridge leads to, and where that begins."""
    turns = [turn for turn in trajectory.turns if turn.segment == segment]
    pairs = zip(turns[1:], turns, strict=False)
    return [(turn, before.end) for turn, before in pairs if turn.start > before.end]


# --- what was not touched


@pytest.mark.parametrize("template", ["pythonic", "hermes"])
@pytest.mark.parametrize("vocabulary", ["bytes", "smollm2"])
def test_a_file_that_nobody_touched_follows_from_its_messages_and_sampled_ids(
    tmp_path: Path, template: str, vocabulary: str, demo_model_folder: Path
) -> None:
    path = tmp_path / "run.db"
    tokenizer = None if vocabulary == "bytes" else load_tokenizer(demo_model_folder)
    anyio.run(partial(play, tokenizer=tokenizer), path, template)
    options = [] if vocabulary == "bytes" else ["--model", str(demo_model_folder)]
    result = verify(path, *options)
    assert result.exit_code == 0, result.output
    with RunFile(path) as run_file:
        rows = list(run_file.rows(trained=None))
    assert {row.agent for row in rows} == {"main", "user", "judge"}
    counts = len(rows), sum(row.turns for row in rows), sum(row.tokens for row in rows)
    assert "{} trajectories, {} turns, {} ids: all of it follows".format(*counts) in result.output


@pytest.mark.parametrize(
    ("history", "segments"),
    [("refuse", 3), ("fork", 8), (History(content_safe=False), 3)],
    ids=["refuse", "fork", "contents may control"],
)
def test_a_file_is_verified_as_its_run_kept_the_past(tmp_path: Path, history: Any, segments: int) -> None:
    path = tmp_path / "run.db"
    anyio.run(partial(play, history=history), path, "pythonic")
    result = verify(path)
    assert result.exit_code == 0, result.output
    trajectory = trajectory_of(path)
    assert len(trajectory.segments) == segments
    begin = next(begin for part in range(segments) for _, begin in bridges(trajectory, part))
    part = next(part for part in range(segments) if bridges(trajectory, part))
    change_id(path, begin, segment=part)
    found = damaged(path)
    assert (found["kind"], found["segment"], found["index"]) == ("bridge", part, begin)


class Pondering(Environment):
    """Its model is cut while it thinks, and answered all the same."""

    def tasks(self) -> list[Task]:
        return [Task(id="t1", prompt="Why?")]

    @reward
    def correct(self) -> bool:
        return True

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("Well?")
        await conversation.generate()


THINKING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_turn_that_was_cut_inside_its_reasoning_is_verified_with_what_closed_it(tmp_path: Path) -> None:
    path = tmp_path / "run.db"

    async def ponder() -> None:
        engine = ScriptedEngine(
            [Reply("<think>Because", finish="length"), "So."], template=ChatTemplate(THINKING, name="thinking")
        )
        async with Run(Pondering, engine, file=path, history=History(close_reasoning=True)) as run:
            async for trajectory in run:
                assert trajectory.outcome.scored, trajectory.error

    anyio.run(ponder)
    assert verify(path).exit_code == 0, verify(path).output
    first, second = trajectory_of(path).turns
    assert (first.thinking, second.thinking) == (True, False)
    change_id(path, first.end)
    assert damaged(path)["index"] == first.end
    change(path, f"UPDATE turns SET thinking = 0 WHERE {OF_ONE}", "main", 0)
    assert (damaged(path)["kind"], damaged(path)["turn"]) == ("turn", 0)


def test_the_file_that_is_damaged_below_has_every_kind_of_turn(path: Path) -> None:
    trajectory = trajectory_of(path)
    finishes = [(turn.finish, turn.stop) for turn in trajectory.turns]
    for wanted in ((FinishReason.STOP, "END"), (FinishReason.STOP, 33), (FinishReason.LENGTH, "max_tokens")):
        assert wanted in finishes
    assert [len(turn.tool_calls) for turn in trajectory.turns[:4]] == [2, 1, 1, 0]
    assert trajectory.turns[1].tool_calls[0].error
    assert trajectory.turns[2].reasoning == "Hm."
    assert len(trajectory.turns) - len(trajectory.segments) - sum(len(bridges(trajectory, n)) for n in range(3)) == 2
    assert [segment.cause for segment in trajectory.segments] == ["start", "environment", "environment"]
    assert [[tool["function"]["name"] for tool in s.tools] for s in trajectory.segments] == [["add"], ["add"], ["jump"]]
    assert trajectory.segments[-1].unseen == 1


def test_json_counts_and_says_that_it_is_verified(path: Path) -> None:
    told = verdict(path)
    assert (told["verified"], told["trajectories"], told["differing"], told["exit_code"]) == (True, 9, 0, 0)
    assert (told["difference"], told["error"]) == (None, None)


# --- one id


def damaged(path: Path) -> dict[str, Any]:
    """The difference that was found, once the rest of the verdict is as it must be."""
    told = verdict(path)
    assert (told["verified"], told["differing"], told["exit_code"], verify(path).exit_code) == (False, 1, 7, 7)
    difference: dict[str, Any] = told["difference"]
    assert (difference["episode"], difference["attempt"]) == ("t1#0", 0)
    return difference


@pytest.mark.parametrize("segment", [0, 1, 2])
def test_one_id_of_a_first_prompt_is_found(path: Path, segment: int) -> None:
    change_id(path, 30, segment=segment)
    found = damaged(path)
    turn = next(turn for turn in trajectory_of(path).turns if turn.segment == segment)
    assert (found["kind"], found["agent"], found["segment"]) == ("first_prompt", "main", segment)
    assert (found["turn"], found["index"]) == (turn.number, 30)
    assert found["stored"].replace("~", "", 1) == found["derived"].replace(found["derived"][12], "", 1)
    changed = [pair for pair in zip(found["stored_ids"], found["derived_ids"], strict=True) if pair[0] != pair[1]]
    assert [stored for stored, _ in changed] == [ord("~")]


@pytest.mark.parametrize("junction", range(9))
def test_one_id_of_any_bridge_is_found(path: Path, junction: int) -> None:
    turn, begin = bridges(trajectory_of(path))[junction]
    at = turn.start - 3 if junction % 2 else begin
    change_id(path, at)
    found = damaged(path)
    assert (found["kind"], found["segment"], found["turn"], found["index"]) == ("bridge", 0, turn.number, at)
    assert "~" in found["stored"]
    assert "~" not in found["derived"]


def test_one_id_of_an_agent_that_is_not_trained_is_found(path: Path) -> None:
    for agent in ("user", "judge"):
        turn, begin = bridges(trajectory_of(path, agent))[0]
        change_id(path, begin, agent=agent)
        told = verdict(path)
        assert told["difference"]["agent"] == agent
        assert (told["difference"]["turn"], told["difference"]["index"]) == (turn.number, begin)
        change_id_back(path, begin, agent)


def change_id_back(path: Path, index: int, agent: str) -> None:
    trajectory = trajectory_of(path, agent, "t0#0")  # both are asked the same
    ids = trajectory.segments[0].log.ids
    change(path, f"UPDATE segments SET ids = ? WHERE {OF_ONE}", struct.pack(f"<{len(ids)}i", *ids), agent, 0)


@pytest.mark.parametrize("number", [2, 3, 4, 6, 7, 8, 10, 14], ids=lambda number: f"turn {number}")
def test_one_sampled_id_that_says_something_else_is_found_where_it_stands(path: Path, number: int) -> None:
    turn = trajectory_of(path).turns[number]
    at = turn.start if number != 2 else turn.start + len("<think>Hm.</think>")
    change_id(path, at, segment=turn.segment)
    found = damaged(path)
    assert (found["kind"], found["segment"], found["turn"]) == ("turn", turn.segment, number)
    assert found["index"] == at
    assert "~" in found["derived"]
    assert "~" not in found["stored"]


def test_one_sampled_id_of_a_call_is_found(path: Path) -> None:
    turn = trajectory_of(path).turns[0]
    change_id(path, turn.start + len("[add(a="))
    found = damaged(path)
    assert (found["kind"], found["turn"], found["index"]) == ("turn", 0, turn.start)


@pytest.mark.parametrize("number", [3, 4, 5], ids=["stop id", "stop string", "stop id of the author"])
def test_a_stop_that_was_not_sampled_is_found(path: Path, number: int) -> None:
    turn = trajectory_of(path).turns[number]
    change_id(path, turn.end - 1)
    found = damaged(path)
    assert (found["kind"], found["turn"]) == ("stop", number)


# --- messages, tools, what stands where


@pytest.mark.parametrize(("message", "turn"), [(0, 0), (2, 1), (3, 1), (-2, 11)])
def test_a_message_that_the_model_saw_otherwise_is_found(path: Path, message: int, turn: int) -> None:
    change_message(path, message, "Something else.")
    found = damaged(path)
    assert (found["kind"], found["turn"]) == ("first_prompt" if message == 0 else "bridge", turn)
    assert "Something el" in found["derived"]


def test_what_the_model_said_is_found_where_a_message_has_it_otherwise(path: Path) -> None:
    said = next(n for n, m in enumerate(trajectory_of(path).segments[0].messages) if m["content"] == "one ")
    change_message(path, said, "two ")
    found = damaged(path)
    assert (found["kind"], found["stored"], found["derived"]) == ("message", "two ", "one ")
    turn = trajectory_of(path).turns[found["turn"]]
    assert (turn.text, found["index"]) == ("one ", turn.start)


@pytest.mark.parametrize(
    ("column", "value"),
    [("text", "two "), ("reasoning", "Because."), ("tool_calls", '[{"id": "call_9", "name": "add"}]')],
)
def test_what_a_turn_holds_is_found_where_its_ids_say_otherwise(path: Path, column: str, value: str) -> None:
    of_one = OF_ONE.replace("number", "position")
    change(path, f"UPDATE turns SET {column} = ? WHERE {of_one}", value, "main", 4)
    assert (damaged(path)["kind"], damaged(path)["turn"]) == ("turn", 4)


def test_tools_that_the_model_was_not_shown_are_found(path: Path) -> None:
    change(path, "UPDATE tools SET tools = replace(tools, 'Jump.', 'Leap.')")
    told = verdict(path)
    found = told["difference"]
    assert (told["differing"], found["kind"], found["segment"]) == (3, "first_prompt", 2)
    assert ("Jump." in found["stored"], "Leap." in found["derived"]) == (True, True)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("start", "start + 1"),
        ('"end"', '"end" - 1'),
        ("finish", "'length'"),
        ("stop", "120"),
        ("segment", "1"),
        ("segment", "9"),
    ],
)
def test_a_turn_that_does_not_fit_its_ids_is_found(path: Path, column: str, value: str) -> None:
    change(path, f"UPDATE turns SET {column} = {value} WHERE {OF_ONE}", "main", 3)
    assert damaged(path)["kind"] in ("layout", "stop", "turn", "unreadable")


@pytest.mark.parametrize(
    "change_of_it",
    [
        "junction_inserted = 999",
        "junction_result = 'forked'",
        "junction_close = 'masked'",
        "junction_anchor = 'none'",
        "junction_seam = 'unverified'",
        "junction_result = NULL",
        "dropped = dropped + 7",
    ],
)
def test_a_junction_record_that_does_not_follow_is_found(path: Path, change_of_it: str) -> None:
    number = next(turn.number for turn in trajectory_of(path).turns if turn.junction and turn.junction.inserted)
    change(path, f"UPDATE turns SET {change_of_it} WHERE {OF_ONE}", "main", number)
    assert damaged(path)["kind"] == "junction"


def test_counts_in_an_episodes_row_that_are_not_its_own_are_found(path: Path) -> None:
    change(path, "UPDATE episodes SET turns = turns + 1 WHERE id = 't1#0' AND agent = 'main'")
    assert "its row counts" in damaged(path)["explanation"]


def test_an_id_whose_source_is_not_its_own_is_found(path: Path) -> None:
    turn = trajectory_of(path).turns[0]
    sources = json.dumps([[Source.SAMPLED, len(turn.log)]])
    change(path, f"UPDATE segments SET sources = ? WHERE {OF_ONE}", sources, "main", 0)
    found = damaged(path)
    assert (found["kind"], found["index"], found["stored"], found["derived"]) == ("layout", 0, "sampled", "prompt")


@pytest.mark.parametrize("messages", ["[", "[1]", "[]", '[{"role": "user", "content": "?"}]', "null"])
def test_messages_that_are_none_are_a_difference_and_no_crash(path: Path, messages: str) -> None:
    change(path, f"UPDATE segments SET messages = ? WHERE {OF_ONE}", messages, "main", 0)
    assert damaged(path)["kind"] in ("unreadable", "message", "layout", "first_prompt")


# --- the configuration


def change_header(path: Path, change_it: Callable[[dict[str, Any]], object], *, launches: bool) -> None:
    with closing(sqlite3.connect(path)) as connection:
        header = json.loads(connection.execute("SELECT header FROM run").fetchone()[0])
        change_it(header)
        for table in ("run", "launches") if launches else ("run",):
            connection.execute(f"UPDATE {table} SET header = ?", (json.dumps(header),))
        connection.commit()


def turn_clock(header: dict[str, Any]) -> None:
    header["clock"] = "2001-02-03T04:05:06+00:00"


def edit_template(header: dict[str, Any]) -> None:
    header["template"]["text"] = header["template"]["text"].replace("It is", "Now is")


def edit_template_of_judge(header: dict[str, Any]) -> None:
    template = header["engines"]["judge"]["template"]
    template["text"] = template["text"].replace("<|im_start|>", "<|im_start|> ")


EDITS = [(turn_clock, "clock"), (edit_template, "template.text"), (edit_template_of_judge, "judge.template.text")]


@pytest.mark.parametrize(("edit", "name"), EDITS, ids=[name for _, name in EDITS])
def test_a_configuration_that_is_not_the_one_the_run_was_begun_with_is_named(path: Path, edit: Any, name: str) -> None:
    change_header(path, edit, launches=False)
    told = verdict(path)
    assert (told["verified"], told["exit_code"], told["trajectories"]) == (False, 7, 0)
    assert told["difference"]["kind"] == "header"
    assert told["difference"]["explanation"].endswith(name)
    assert (
        f"header: the run's header is not the one that it was begun with: {'engines.' * name.startswith('judge')}"
        in (verify(path).output)
    )


@pytest.mark.parametrize(("edit", "name"), EDITS, ids=[name for _, name in EDITS])
def test_a_configuration_that_was_changed_everywhere_is_found_in_the_prompts(path: Path, edit: Any, name: str) -> None:
    change_header(path, edit, launches=True)
    told = verdict(path)
    agent = "judge" if name.startswith("judge") else "main"
    found = told["difference"]
    assert (told["differing"], found["kind"], found["agent"]) == (3 if agent == "judge" else 6, "first_prompt", agent)
    assert found["turn"] == 0
    if edit is turn_clock:
        assert "It is 03 Februar" in found["derived"]


def test_a_resumed_run_is_verified_with_the_clock_of_its_file(path: Path) -> None:
    change_header(path, turn_clock, launches=True)
    for table in ("turns", "segments", "episodes"):
        change(path, f"DELETE FROM {table}")
    anyio.run(play, path, "pythonic")
    told = verdict(path)
    assert (told["verified"], told["trajectories"]) == (True, 9)
    assert "It is 03 February 2001, 04:05:06." in ByteTokenizer().decode(trajectory_of(path).turns[0].prompt_ids)


# --- what is said


def test_the_difference_is_printed_with_its_place_and_both_sides(path: Path) -> None:
    turn, begin = bridges(trajectory_of(path))[0]
    change_id(path, begin + 1)
    result = verify(path)
    assert result.exit_code == 7
    lines = result.output.splitlines()
    assert lines[0].endswith(" ids: trajectories that do not follow: 1, first of them")
    assert lines[1] == f"t1#0 · agent main · segment 0 · turn {turn.number} · index {begin + 1}"
    assert re.fullmatch(r"bridge: the file has id 126 \('~'\) where id 256 \('<\|im_start\|>'\) follows", lines[2])
    assert lines[3].startswith("  stored   '\\n~tool")
    assert lines[5].startswith("  derived  '\\n<|im_start|>tool")
    assert lines[6].split()[:2] == ["10", "256"]


def test_a_missing_file_and_one_that_is_no_run_file_end_with_7(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("This is text, and no database at all.")
    for path, message in ((tmp_path / "nowhere.db", "there is no run file"), (other, "it is no run file")):
        result = verify(path)
        assert (result.exit_code, result.stdout) == (7, "")
        assert message in result.stderr
        told = verdict(path)
        assert (told["verified"], told["error"]["kind"], told["exit_code"]) == (False, "RunFileError", 7)


def test_a_file_that_was_begun_in_format_1_says_that_it_keeps_too_little(path: Path) -> None:
    change_header(path, lambda header: header.update(format=1), launches=True)
    result = verify(path)
    assert result.exit_code == 7
    assert "begun in format 1" in result.stderr


def test_a_model_that_is_not_here_or_has_another_vocabulary_ends_with_5(
    tmp_path: Path, demo_model_folder: Path
) -> None:
    path = tmp_path / "run.db"
    anyio.run(partial(play, tokenizer=load_tokenizer(demo_model_folder)), path, "pythonic")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    text = (demo_model_folder / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    for options, message in (
        ([], "does not say of which model. Give its folder: --model FOLDER"),
        (["--model", "nowhere/"], "no model folder 'nowhere/'"),
        (["--model", str(other)], "is not the one that the run had"),
    ):
        result = verify(path, *options)
        assert result.exit_code == 5, result.output
        assert message in result.stderr
    assert verify(path, "--model", str(other), "--model", str(demo_model_folder)).exit_code == 0


def test_a_model_that_has_moved_is_named_with_the_option(path: Path) -> None:
    def moved(header: dict[str, Any]) -> None:
        header["engine"] = {"kind": "vllm", "model": "nowhere/", "tokenizer": "f", "stop_ids": [2]}

    change_header(path, moved, launches=True)
    result = verify(path)
    assert result.exit_code == 5
    assert re.search(r"no model folder 'nowhere/'.* give its folder: --model FOLDER", result.stderr)


def test_help_and_a_missing_argument() -> None:
    assert "--model" in CliRunner().invoke(app, ["verify", "--help"]).output
    assert CliRunner().invoke(app, ["verify"]).exit_code == 2


# --- the pure part


@pytest.mark.parametrize("agent", ["main", "user"])
def test_every_id_that_was_not_sampled_is_found_at_its_index(path: Path, agent: str) -> None:
    with RunFile(path) as run_file:
        trajectory, chat = run_file.trajectory("t1#0", agent=agent), pure_chat(run_file.header)
    for number, segment in enumerate(trajectory.segments):
        masked = [index for index, source in enumerate(segment.log.sources) if source != Source.SAMPLED]
        for index in masked[:: 1 + len(masked) // 40]:
            segment.log.ids[index] += 1
            found = first_difference(trajectory, chat)
            assert found is not None
            assert (found.segment, found.index) == (number, index)
            segment.log.ids[index] -= 1
    assert first_difference(trajectory, chat) is None


def pure_chat(header: Header) -> Any:
    template = ChatTemplate(header.template["text"], name="dated", variables=header.template["variables"])
    return stored_chat(ByteTokenizer(), template, stop_ids=[257], options={}, now=header.clock, history=History())


class Retrying(Environment):
    """Takes back what its model said last, twice, and once something that was cut and gone on with."""

    def tasks(self) -> list[Task]:
        return [Task(id="t1", prompt="Say it right.")]

    @reward
    def correct(self) -> bool:
        return True

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()
        conversation.add("And now?")
        for _ in range(3):
            await conversation.generate()
            if conversation.turns[-1].finish is FinishReason.LENGTH:
                await conversation.generate()
            conversation.replace(conversation.messages[:3])
        await conversation.generate()
        conversation.add("Thanks.")
        await conversation.generate()


@pytest.fixture
def retried(tmp_path: Path) -> Path:
    path = tmp_path / "retried.db"
    replies: list[Any] = ["Yes.", "Wrong.", Reply("Half ", finish="length"), "wrong.", "Wrong.", "Right.", "Bye."]

    async def play_again() -> None:
        async with Run(Retrying, ScriptedEngine(replies), file=path) as run:
            async for trajectory in run:
                assert trajectory.outcome.scored, trajectory.error

    anyio.run(play_again)
    return path


def test_a_turn_that_is_played_again_has_the_prompt_that_it_had(retried: Path) -> None:
    result = verify(retried)
    assert result.exit_code == 0, result.output
    trajectory = trajectory_of(retried)
    assert [segment.cause for segment in trajectory.segments] == ["start", "retry", "retry", "retry"]
    assert [turn.text for turn in trajectory.turns if not turn.retried] == ["Yes.", "Right.", "Bye."]
    for segment, kind in ((0, "bridge"), (1, "first_prompt"), (3, "first_prompt")):
        at = trajectory.turns[1].start - 5
        ids = trajectory.segments[segment].log.ids
        whole = struct.pack(f"<{len(ids)}i", *ids)
        change_id(retried, at, segment=segment)
        assert (damaged(retried)["kind"], damaged(retried)["segment"], damaged(retried)["index"]) == (kind, segment, at)
        change(retried, f"UPDATE segments SET ids = ? WHERE {OF_ONE}", whole, "main", segment)


def test_what_was_taken_back_and_is_trained_on_all_the_same_is_found(retried: Path) -> None:
    change(retried, f"UPDATE segments SET sources = replace(sources, '[3,', '[2,') WHERE {OF_ONE}", "main", 1)
    found = damaged(retried)
    assert (found["kind"], found["stored"], found["derived"]) == ("layout", "sampled", "retried")
    change(retried, f"UPDATE segments SET sources = replace(sources, '[2,', '[3,') WHERE {OF_ONE}", "main", 1)
    change(retried, f"UPDATE segments SET sources = replace(sources, '[2,', '[3,') WHERE {OF_ONE}", "main", 3)
    found = damaged(retried)
    assert (found["segment"], found["stored"], found["derived"]) == (3, "retried", "sampled")


def test_a_turn_that_was_asked_something_else_is_not_played_again(retried: Path) -> None:
    change(retried, f"UPDATE segments SET messages = replace(messages, 'now', 'then') WHERE {OF_ONE}", "main", 2)
    assert damaged(retried)["explanation"] == "the turn that is played again was asked something else"
    change(retried, f"UPDATE segments SET cause = 'retry' WHERE {OF_ONE}", "main", 0)
    assert damaged(retried)["explanation"] == "there is no turn before that could be played again"


# --- the real engine


@pytest.mark.anyio
async def test_what_the_real_engine_played_follows_from_its_messages_and_sampled_ids(
    engine: VllmEngine, tmp_path: Path
) -> None:
    path = tmp_path / "run.db"
    async with Run(Calculator(questions=8), engine, sampling=Sampling(max_tokens=64), file=path) as run:
        ids = [trajectory.id async for trajectory in run]
    told = await anyio.to_thread.run_sync(verdict, path)
    assert (told["verified"], told["trajectories"], told["difference"]) == (True, len(ids), None)
    id, begin = next((id, begin) for id in ids for _, begin in bridges(trajectory_of(path, id=id)))
    log = trajectory_of(path, id=id).segments[0].log
    log.ids[begin] += 1
    of_it = "episode = (SELECT key FROM episodes WHERE id = ?)"
    change(path, f"UPDATE segments SET ids = ? WHERE {of_it}", struct.pack(f"<{len(log)}i", *log.ids), id)
    told = await anyio.to_thread.run_sync(verdict, path)
    found = told["difference"]
    assert (told["differing"], found["kind"], found["episode"], found["index"]) == (1, "bridge", id, begin)
