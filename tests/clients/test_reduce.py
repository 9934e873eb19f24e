"""Reduced requests of external programs: the structure stays, and no word stays."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.clients.reduce import MAX_TEXT_CHARS, SentRequest, as_text, reduced
from tests.filler import MARK, expanded, filler

HANDLE = "call_0123456789ab"
CALL = '{"name": "Bash", "arguments": {"command": "ls  -l"}}'
SAYS = f"<think>Where? </think>Let me look.\n<tool_call>\n{CALL}\n</tool_call>"


def sent(*messages: Any, handle: str = HANDLE, says: str = SAYS, **given: Any) -> SentRequest:
    body = {"messages": [{"role": "system", "content": "You mend."}, *messages], **given.pop("body", {})}
    known: dict[str, Any] = {
        "form": "chat",
        "headers": {},
        "ends": "delivered",
        "trained": True,
        "verdict": "new",
        "again": "",
        "tolerated": [],
        "parent": None,
        "cause": "start",
    }
    return SentRequest(body=body, handle=handle, says=says, **{**known, **given})


def kept(*requests: SentRequest) -> list[dict[str, Any]]:
    """The requests in the recording of these requests, after reading it back."""
    recording = expanded(json.loads(as_text(reduced("one", "1", "tools", requests))))
    for request in recording["requests"]:
        for key in ("messages", "tools"):
            parts = request["body"].get(key)
            if parts is not None:
                request["body"][key] = [recording["parts"][part] for part in parts]
    return list(recording["requests"])


def contents(*texts: str) -> list[str]:
    (request,) = kept(sent(*({"role": "user", "content": text} for text in texts)))
    return [message["content"] for message in request["body"]["messages"][1:]]


def shape(text: str) -> str:
    return re.sub(r"\S", "x", text)


@pytest.mark.parametrize("text", ["Mend it.", "  \n one\n\n\ttwo \n", "", " ", "x", "{}", "«3:4» a mark's like"])
def test_text_length_counts_white_space_of_lines_and_no_words(text: str) -> None:
    (content,) = contents(text)
    assert len(content) == len(text)
    assert [(len(line), len(line.strip())) for line in content.split("\n")] == [
        (len(line), len(line.strip())) for line in text.split("\n")
    ]
    assert re.search(r"[^\sa-z.]|[aeiouy]", content) is None


def test_equal_texts_stay_equal_and_others_others() -> None:
    texts = ["one", "two", "one ", "One", "a", "b", "ab", "three is longer", "three is other."]
    contained = [each.strip() for each in contents(*texts)]
    assert [one == other for one in contained for other in contained] == [
        one.strip() == other.strip() for one in texts for other in texts
    ]


def test_prefix_of_another_line_stays_its_prefix() -> None:
    whole, begun = contents("I write at length what it is.", "I write at le")
    assert whole.startswith(begun)
    assert whole != begun


def test_long_text_is_cut_and_differs_from_one_with_the_same_begin() -> None:
    one, other, again = contents("word " * 200 + "one", "word " * 200 + "two", "word " * 200 + "one\n")
    assert len(one) == MAX_TEXT_CHARS
    assert one != other
    assert again == f"{one}\n"


def test_arguments_stay_json_with_their_keys_numbers_and_spacing() -> None:
    call = {"id": f"{HANDLE}_0", "type": "function"}
    given = ['{"command": "ls  -l",  "seconds":2.0, "all": [true, null, "ls  -l"]}', '{ "command":"l\\u0073  -l" }']
    messages = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{**call, "function": {"name": "Bash", "arguments": each}}],
        }
        for each in given
    ]
    (request,) = kept(sent(*messages))
    texts = [each["tool_calls"][0]["function"]["arguments"] for each in request["body"]["messages"][1:]]
    command = json.loads(texts[0])["command"]
    assert command != "ls  -l"
    assert len(command) == len("ls  -l")
    assert texts[0] == given[0].replace("ls  -l", command)
    assert texts[1] == given[1].replace("l\\u0073  -l", command)
    said = re.search(r'\{"name": "(\w+)", "arguments": (.*)\}\n', request["says"])
    assert said is not None
    assert json.loads(said[2]) == {"command": command}
    assert said[1] == request["body"]["messages"][1]["tool_calls"][0]["function"]["name"]
    assert said[1][0].isupper()


def test_turn_ids_become_placeholders_and_client_ids_filler() -> None:
    answers = [{"role": "tool", "tool_call_id": each, "content": "three"} for each in (f"{HANDLE}_1", "call_their_own")]
    first, second = kept(sent(), sent(*answers, handle="call_ba9876543210"))
    ours, theirs = (each["tool_call_id"] for each in second["body"]["messages"][1:])
    assert ours == "call_$0$_1"
    assert "own" not in theirs
    assert first["body"]["messages"][0] == second["body"]["messages"][0]


def test_billing_lines_that_differ_still_differ_after_reduction() -> None:
    lines = [f"x-anthropic-billing-header: cch={each};\nYou mend." for each in ("a1", "b2")]
    one, other = contents(*lines)
    assert one != other
    assert one.startswith("x-anthropic-billing-header: ")
    assert one.partition("\n")[2] == other.partition("\n")[2]


def test_tools_keep_their_names_parameters_and_no_description() -> None:
    words = "Runs whatever one likes to be run, at once."
    properties = {"command": {"type": "string", "description": words}, "default": {"type": "boolean", "default": True}}
    schema = {"type": "object", "properties": properties, "required": ["command"]}
    tools = [
        {"type": "function", "function": {"name": name, "description": words, "parameters": schema}}
        for name in ("Bash", "look_up")
    ]
    (request,) = kept(sent(body={"tools": tools}))
    called, other = (each["function"] for each in request["body"]["tools"])
    assert shape(other["name"]) == shape("look_up")
    assert "_" in other["name"]
    assert not set(called["description"].split()) & set(words.split())
    assert len(called["description"]) <= len(words)
    assert list(called["parameters"]["properties"]) == list(other["parameters"]["properties"]) == [*properties]
    assert called["parameters"]["required"] == ["command"]


def test_name_joined_from_two_names_is_still_joined_after_reduction() -> None:
    inner = {"type": "function", "name": "spawn_agent", "parameters": {}}
    tools = [{"type": "namespace", "name": "multi_agent_v1", "tools": [inner]}]
    says = '<tool_call>\n{"name": "multi_agent_v1__spawn_agent", "arguments": {}}\n</tool_call>'
    (request,) = kept(sent(says=says, body={"tools": tools}))
    (tool,) = request["body"]["tools"]
    assert f'"{tool["name"]}__{tool["tools"][0]["name"]}"' in request["says"]


def test_fillers_differ_by_number_and_shorter_ones_are_prefixes() -> None:
    for number in (0, 1, 19, 20, 21, 400, 8000):
        assert all(filler(number, 90).startswith(filler(number, length)) for length in range(90))
    assert len({filler(number, 4) for number in range(8000)}) > 7900
    assert MARK.sub("", "«1:2»«33:4^»") == ""
