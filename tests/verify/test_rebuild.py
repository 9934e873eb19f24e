"""A run file contains everything that its prompts were built from, and rebuilding them finds every change."""

from __future__ import annotations

import json
import re
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
from typer.testing import CliRunner

from envs.calculator import Calculator
from runner import Conversation, Environment, Run, RunFile, Sampling, Task, VllmEngine, reward
from runner.cli.app import app
from runner.engines.base import FinishReason
from runner.options import History
from runner.store.header import Header
from runner.testing import Reply, ScriptedEngine
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.log import Source
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import load_tokenizer
from runner.verify.rebuild import first_difference, stored_chat
from tests.verifying import (
    OF_ONE,
    bridges,
    change,
    change_id,
    damaged,
    play,
    trajectory_of,
    verdict,
    verify,
)

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

# --- unchanged files


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("template", ["pythonic", "hermes"])
@pytest.mark.parametrize("vocabulary", ["bytes", "smollm2"])
def test_untouched_file_follows_from_messages_and_sampled_ids(
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
    assert "{} trajectories, {} turns, {:,} ids: all follow".format(*counts) in result.output


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
    """Environment whose model is cut while it reasons, and is answered nevertheless."""

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


def test_turn_cut_inside_its_reasoning_is_verified_with_its_close(tmp_path: Path) -> None:
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


def test_json_has_the_counts_and_the_verdict(path: Path) -> None:
    report = verdict(path)
    assert (report["verified"], report["trajectories"], report["differing"], report["exit_code"]) == (True, 9, 0, 0)
    assert (report["difference"], report["error"]) == (None, None)


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
def test_configuration_that_differs_from_the_runs_first_is_named(path: Path, edit: Any, name: str) -> None:
    change_header(path, edit, launches=False)
    report = verdict(path)
    assert (report["verified"], report["exit_code"], report["trajectories"]) == (False, 7, 0)
    assert report["difference"]["kind"] == "header"
    assert report["difference"]["explanation"].endswith(name)
    assert f"header: the run's header has changed since the run began: {'engines.' * name.startswith('judge')}" in (
        verify(path).output
    )


@pytest.mark.parametrize(("edit", "name"), EDITS, ids=[name for _, name in EDITS])
def test_configuration_changed_everywhere_is_found_in_the_prompts(path: Path, edit: Any, name: str) -> None:
    change_header(path, edit, launches=True)
    report = verdict(path)
    agent = "judge" if name.startswith("judge") else "main"
    found = report["difference"]
    assert (report["differing"], found["kind"], found["agent"]) == (3 if agent == "judge" else 6, "first_prompt", agent)
    assert found["turn"] == 0
    if edit is turn_clock:
        assert "It is 03 Februar" in found["derived"]


def test_a_resumed_run_is_verified_with_the_clock_of_its_file(path: Path) -> None:
    change_header(path, turn_clock, launches=True)
    for table in ("turns", "segments", "episodes"):
        change(path, f"DELETE FROM {table}")
    anyio.run(play, path, "pythonic")
    report = verdict(path)
    assert (report["verified"], report["trajectories"]) == (True, 9)
    assert "It is 03 February 2001, 04:05:06." in ByteTokenizer().decode(trajectory_of(path).turns[0].prompt_ids)


# --- messages


def test_the_difference_is_printed_with_its_place_and_both_sides(path: Path) -> None:
    turn, begin = bridges(trajectory_of(path))[0]
    change_id(path, begin + 1)
    result = verify(path)
    assert result.exit_code == 7
    lines = result.output.splitlines()
    assert lines[0].endswith(" ids: 1 trajectory differs; the first one:")
    assert lines[1] == f"t1#0 · agent main · segment 0 · turn {turn.number} · index {begin + 1}"
    assert re.fullmatch(r"bridge: the file has id 126 \('~'\), expected id 256 \('<\|im_start\|>'\)", lines[2])
    assert lines[3].startswith("  stored   '\\n~tool")
    assert lines[5].startswith("  derived  '\\n<|im_start|>tool")
    assert lines[6].split()[:2] == ["10", "256"]


def test_missing_file_and_foreign_file_exit_with_7(tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("This is text, and no database at all.")
    for path, message in ((tmp_path / "nowhere.db", "the run file"), (other, "it is not a run file")):
        result = verify(path)
        assert (result.exit_code, result.stdout) == (7, "")
        assert message in result.stderr
        report = verdict(path)
        assert (report["verified"], report["error"]["kind"], report["exit_code"]) == (False, "RunFileError", 7)


def test_missing_model_or_another_vocabulary_exits_with_5(tmp_path: Path, demo_model_folder: Path) -> None:
    path = tmp_path / "run.db"
    anyio.run(partial(play, tokenizer=load_tokenizer(demo_model_folder)), path, "pythonic")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    text = (demo_model_folder / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text + "\n")
    for options, message in (
        ([], "does not name the model. Give its folder: --model FOLDER"),
        (["--model", "nowhere/"], "no model folder 'nowhere/'"),
        (["--model", str(other)], "is not the run's"),
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


def test_another_byte_vocabulary_names_the_version_or_the_option(path: Path, demo_model_folder: Path) -> None:
    def of_another_version(header: dict[str, Any]) -> None:
        header["engine"]["tokenizer"] = "f"
        header["versions"]["deltarunner"] = "0.0.1"

    def of_the_model(header: dict[str, Any]) -> None:
        header["engine"]["tokenizer"] = load_tokenizer(demo_model_folder).fingerprint

    change_header(path, of_another_version, launches=True)
    assert "with the version of deltarunner that wrote it: 0.0.1." in verify(path).stderr
    given = ["--model", str(demo_model_folder)]
    assert "Give the folder of the run's model: --model FOLDER" in verify(path, *given).stderr
    change_header(path, of_the_model, launches=True)
    assert "vocabulary" in verify(path).stderr
    assert "vocabulary" not in verify(path, *given).stderr


def test_help_names_an_option_and_a_missing_argument_is_refused() -> None:
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
    """Environment that takes back its last turn twice, and once a cut turn that was continued."""

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


def test_sources_that_mix_up_sampled_and_retried_are_found(retried: Path) -> None:
    change(retried, f"UPDATE segments SET sources = replace(sources, '[3,', '[2,') WHERE {OF_ONE}", "main", 1)
    found = damaged(retried)
    assert (found["kind"], found["stored"], found["derived"]) == ("layout", "sampled", "retried")
    change(retried, f"UPDATE segments SET sources = replace(sources, '[2,', '[3,') WHERE {OF_ONE}", "main", 1)
    change(retried, f"UPDATE segments SET sources = replace(sources, '[2,', '[3,') WHERE {OF_ONE}", "main", 3)
    found = damaged(retried)
    assert (found["segment"], found["stored"], found["derived"]) == (3, "retried", "sampled")


def test_a_turn_that_was_asked_something_else_is_not_played_again(retried: Path) -> None:
    change(retried, f"UPDATE segments SET messages = replace(messages, 'now', 'then') WHERE {OF_ONE}", "main", 2)
    assert damaged(retried)["explanation"] == "the turn that is played again has other messages before it"
    change(retried, f"UPDATE segments SET cause = 'retry' WHERE {OF_ONE}", "main", 0)
    assert damaged(retried)["explanation"] == "the segment repeats or continues a turn, but has no origin"


# --- the real engine


@pytest.mark.anyio
async def test_real_episodes_follow_from_messages_and_sampled_ids(engine: VllmEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with Run(Calculator(questions=8), engine, sampling=Sampling(max_tokens=64), file=path) as run:
        ids = [trajectory.id async for trajectory in run]
    report = await anyio.to_thread.run_sync(verdict, path)
    assert (report["verified"], report["trajectories"], report["difference"]) == (True, len(ids), None)
    id, begin = next((id, begin) for id in ids for _, begin in bridges(trajectory_of(path, id=id)))
    log = trajectory_of(path, id=id).segments[0].log
    log.ids[begin] += 1
    of_it = "episode = (SELECT key FROM episodes WHERE id = ?)"
    change(path, f"UPDATE segments SET ids = ? WHERE {of_it}", struct.pack(f"<{len(log)}i", *log.ids), id)
    report = await anyio.to_thread.run_sync(verdict, path)
    found = report["difference"]
    assert (report["differing"], found["kind"], found["episode"], found["index"]) == (1, "bridge", id, begin)
