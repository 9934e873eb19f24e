"""Every change in a run file is found and named: ids, messages, tools, places."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from runner.tokens.log import Source
from tests.verifying import OF_ONE, bridges, change, change_id, change_message, damaged, trajectory_of, verdict

# --- one id


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
        report = verdict(path)
        assert report["difference"]["agent"] == agent
        assert (report["difference"]["turn"], report["difference"]["index"]) == (turn.number, begin)
        change_id_back(path, begin, agent)


def change_id_back(path: Path, index: int, agent: str) -> None:
    trajectory = trajectory_of(path, agent, "t0#0")  # both agents have the same prompt
    ids = trajectory.segments[0].log.ids
    change(path, f"UPDATE segments SET ids = ? WHERE {OF_ONE}", struct.pack(f"<{len(ids)}i", *ids), agent, 0)


@pytest.mark.parametrize("number", [2, 3, 4, 6, 7, 8, 10, 14], ids=lambda number: f"turn {number}")
def test_one_changed_sampled_id_is_found_in_its_place(path: Path, number: int) -> None:
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


# --- messages, tools, places


@pytest.mark.parametrize(("message", "turn"), [(0, 0), (2, 1), (3, 1), (-2, 11)])
def test_a_message_that_the_model_saw_otherwise_is_found(path: Path, message: int, turn: int) -> None:
    change_message(path, message, "Something else.")
    found = damaged(path)
    assert (found["kind"], found["turn"]) == ("first_prompt" if message == 0 else "bridge", turn)
    assert "Something el" in found["derived"]


def test_models_words_are_found_where_a_message_differs(path: Path) -> None:
    said = next(n for n, m in enumerate(trajectory_of(path).segments[0].messages) if m["content"] == "one ")
    change_message(path, said, "two ")
    found = damaged(path)
    assert (found["kind"], found["stored"], found["derived"]) == ("message", "two ", "one ")
    turn = trajectory_of(path).turns[found["turn"]]
    assert (turn.text, found["index"]) == ("one ", turn.start)


def test_a_call_is_found_where_a_message_has_it_otherwise(path: Path) -> None:
    other = """replace(messages, '"height":2', '"height":3')"""
    change(path, f"UPDATE segments SET messages = {other} WHERE {OF_ONE}", "main", 2)
    found = damaged(path)
    assert (found["kind"], found["turn"]) == ("message", 13)


@pytest.mark.parametrize(
    ("column", "value"),
    [("text", "two "), ("reasoning", "Because."), ("tool_calls", '[{"id": "call_9", "name": "add"}]')],
)
def test_column_of_a_turn_that_contradicts_its_ids_is_found(path: Path, column: str, value: str) -> None:
    of_one = OF_ONE.replace("number", "position")
    change(path, f"UPDATE turns SET {column} = ? WHERE {of_one}", value, "main", 4)
    assert (damaged(path)["kind"], damaged(path)["turn"]) == ("turn", 4)


def test_tools_that_the_model_was_not_shown_are_found(path: Path) -> None:
    change(path, "UPDATE tools SET tools = replace(tools, 'Jump.', 'Leap.')")
    report = verdict(path)
    found = report["difference"]
    assert (report["differing"], found["kind"], found["segment"]) == (3, "first_prompt", 2)
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
    assert "the row of the episode counts" in damaged(path)["explanation"]


def test_an_id_whose_source_is_not_its_own_is_found(path: Path) -> None:
    turn = trajectory_of(path).turns[0]
    sources = json.dumps([[Source.SAMPLED, len(turn.log)]])
    change(path, f"UPDATE segments SET sources = ? WHERE {OF_ONE}", sources, "main", 0)
    assert "log-probabilities for" in damaged(path)["explanation"]
    change(path, f"UPDATE segments SET logprobs = NULL WHERE {OF_ONE}", "main", 0)
    found = damaged(path)
    assert (found["kind"], found["index"], found["stored"], found["derived"]) == ("layout", 0, "sampled", "prompt")


@pytest.mark.parametrize("messages", ["[", "[1]", "[]", '[{"role": "user", "content": "?"}]', "null"])
def test_invalid_stored_messages_are_reported_as_a_difference(path: Path, messages: str) -> None:
    change(path, f"UPDATE segments SET messages = ? WHERE {OF_ONE}", messages, "main", 0)
    assert damaged(path)["kind"] in ("unreadable", "message", "layout", "first_prompt")
