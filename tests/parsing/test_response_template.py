"""The checkpoint's own response template reads turns whose calls cannot be learnt, if it passes the same check."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import (
    BadOption,
    BadTemplate,
    ConfigurationChanged,
    Conversation,
    Outcome,
    ReasoningPiece,
    Run,
    RunFile,
    ScriptedEngine,
    tool,
)
from runner.cli.app import app
from runner.models import ResolvedModel, chat_template
from runner.parsing.call_reader import ReadCall
from runner.parsing.format_cache import cached_format
from runner.parsing.learning.learnt_format import FormatSource, FormatVerdict, LearntFormat, learn_format
from runner.parsing.learning.probe_renders import FormatRequirement
from runner.parsing.limitations import CallLimitation
from runner.parsing.parser import TurnParser
from runner.parsing.response_template import ResponseTemplateReader
from runner.parsing.turn_format import ResponseFormat
from runner.testing import Reply, assert_exact, call
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from tests.parsing.families import Library
from tests.parsing.response_templates import HERMES, READS_IT, changed, said, unlearnable, vocabulary
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.sample_functions(2)]

LOOK_UP: Mapping[str, Any] = {
    "look_up": {"type": "object", "properties": {"query": {"type": "string"}, "limit": {"type": "integer"}}}
}


def learnt(template: ChatTemplate) -> LearntFormat:
    return learn_format(template.renderer())


# --- selection of the reader


def test_unlearnable_calls_are_read_by_the_response_template() -> None:
    assert learnt(unlearnable(None)).verdict is FormatVerdict.REFUSED
    learnt_format = learnt(unlearnable())
    assert (learnt_format.source, learnt_format.verdict) == (FormatSource.RESPONSE_TEMPLATE, FormatVerdict.LIMITED)
    assert learnt_format.limitations == (CallLimitation.UNTYPED,)
    assert learnt_format.format.response is not None
    assert learnt_format.format.response.template == READS_IT


@pytest.mark.parametrize("name", ["pythonic", "hermes"])
def test_learnt_format_has_precedence(name: str) -> None:
    template = replace(ChatTemplate.load(name), response_template=HERMES)
    learnt_format = learnt(template)
    assert learnt_format.source is FormatSource.LEARNT
    assert learnt_format == learnt(ChatTemplate.load(name))


@pytest.mark.parametrize(
    ("response_template", "case"),
    [
        (changed(repeats=False), "(two calls): 1 calls are read"),
        (changed(content="text", content_args={}), "(a string: words): no value begins at"),
        (
            changed(open="<function_call>", open_pattern=None),
            "refuses the response template: Field 'tool_calls': cannot specify both",
        ),
        ({**READS_IT, "fields": {**READS_IT["fields"], "thinking": {"open": "<thought>"}}}, "the content is read as"),
        ({"fields": {}}, "response_template.fields must be a non-empty dict"),
        (HERMES, "(a string: words): "),
    ],
    ids=["one call", "no arguments", "contradiction", "no thought", "no fields", "another format"],
)
def test_response_template_that_fails_is_refused_with_the_case(response_template: dict[str, Any], case: str) -> None:
    learnt_format = learnt(unlearnable(response_template))
    assert learnt_format.verdict is FormatVerdict.REFUSED
    assert learnt_format.missing is FormatRequirement.VALUES
    assert learnt_format.why.startswith(
        "no text ends a string in a call's arguments; the model's response_template cannot read its calls either: "
    )
    assert case in learnt_format.why


def test_response_template_needs_a_recent_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.utils.chat_parsing", None)
    fix = "the response template needs transformers 5.19 or newer: pip install -U transformers"
    assert fix in learnt(unlearnable()).why


def test_learnt_format_survives_a_json_round_trip() -> None:
    learnt_format = learnt(unlearnable())
    document = json.loads(json.dumps(learnt_format.as_json()))
    assert LearntFormat.from_json(document) == learnt_format
    assert (document["source"], document["verdict"]) == ("response_template", "limited")


def test_document_of_a_learnt_format_omits_response_templates() -> None:
    document = learnt(ChatTemplate.load("hermes")).as_json()
    assert "response" not in document["format"]
    assert LearntFormat.from_json(document) == learnt(ChatTemplate.load("hermes"))


def test_response_template_is_read_from_the_model_folder(demo_model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(demo_model_folder, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "response_template": HERMES}))
    model = ResolvedModel("mine", str(folder), folder)
    assert chat_template(model).response_template == HERMES
    assert chat_template(model, "hermes").response_template == HERMES
    assert chat_template(model, unlearnable()).response_template == READS_IT
    assert chat_template(ResolvedModel("own", str(demo_model_folder), demo_model_folder)).response_template is None


# --- reading


PLAIN = ResponseTemplateReader(ResponseFormat(HERMES, "<|im_end|>\n<|im_start|>assistant\n"))
CALL = '<tool_call>{"name": "look_up", "arguments": {"query": "a", "limit": 2}}</tool_call>'
READ = ReadCall("look_up", {"query": "a", "limit": 2})


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.", "Hello.", []),
        (f"I look. {CALL}", "I look.", [READ]),
        (CALL + CALL, "", [READ, READ]),
        (CALL.replace('{"query": "a", "limit": 2}', "null"), "", [ReadCall("look_up", {})]),
    ],
    ids=["an answer", "content and a call", "two calls", "no arguments"],
)
def test_content_and_calls_are_separated(text: str, content: str, calls: list[ReadCall]) -> None:
    reading = PLAIN.read(text, LOOK_UP)
    assert (reading.content, reading.calls) == (content, calls)


def test_reasoning_opened_by_the_prompt_is_read_with_calls() -> None:
    parser = TurnParser(cached_format(unlearnable().renderer()).format)
    tools = Library().bound_tools()
    written = said(json.dumps('it is "x"'), 2)
    read = parser.parse(f"Hm.</think>\n\nI look.{written}", tools)
    assert (read.reasoning, read.content) == ("Hm.", "I look.")
    (found,) = read.calls
    assert (found.id, found.name, found.arguments) == ("call_0", "look_up", {"query": 'it is "x"', "limit": 2})


def test_nothing_is_a_call_without_tools() -> None:
    parser = TurnParser(cached_format(unlearnable().renderer()).format)
    text = said('"x"', 2)
    read = parser.parse(f"Hm.</think>\n\n{text}", [])
    assert (read.reasoning, read.content, read.calls) == ("Hm.", text, [])


@pytest.mark.parametrize(
    ("text", "read", "error"),
    [
        (f"First. {CALL}{CALL.replace('2}', '2')} more", [READ], "Expecting ',' delimiter"),
        (CALL.replace('"name"', '"nam"'), [], "missing key 'name'"),
        (CALL.replace('"look_up"', "7"), [], "the name of a tool is missing"),
        (CALL.replace('{"query": "a", "limit": 2}', "[1]"), [], "must be a JSON object"),
        (CALL.replace("2}", "NaN}"), [], "not a JSON object"),
    ],
    ids=["broken JSON after a call", "no name", "a number for a name", "a list", "no number"],
)
def test_unreadable_text_is_a_call_with_an_error(text: str, read: list[ReadCall], error: str) -> None:
    reading = PLAIN.read(text, LOOK_UP)
    assert reading.calls[:-1] == read
    assert error in (reading.calls[-1].error or "")
    assert "<tool_call>" not in reading.content
    assert reading.content == ("First." if read else "")


def test_truncated_turn_has_no_invented_call() -> None:
    response = learnt(unlearnable()).format.response
    assert response is not None
    thinking = f"Hm.</think>{said(json.dumps('two words'), 20)}{said(json.dumps('x'), 1)}"
    for reader, text in ((ResponseTemplateReader(response), thinking), (PLAIN, CALL + CALL)):
        whole = reader.read(text, LOOK_UP).calls
        assert len(whole) == 2
        for cut in range(len(text)):
            read = [each for each in reader.read(text[:cut], LOOK_UP).calls if each.error is None]
            assert read == whole[: len(read)], text[:cut]


# --- episodes


REPLIES = [
    f"Hm.</think>\n\nI look.{said(json.dumps('it is <b>x</b>'), 2)}",
    f"Hm.</think>\n\n{said(json.dumps('x'), 3)[:-20]}",
    "Hm.</think>Done.",
]


def engine(template: ChatTemplate | None = None) -> ScriptedEngine:
    return ScriptedEngine(REPLIES, template=template or unlearnable(), tokenizer=vocabulary())


async def test_an_episode_with_tools_is_played_and_verified(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    async with Run(Library, engine(), file=path) as run:
        (trajectory,) = [each async for each in run]
    assert trajectory.reward == 1, trajectory.error
    assert_exact(trajectory)
    first, second, _ = trajectory.turns
    assert [(each.name, each.arguments) for each in first.tool_calls] == [
        ("look_up", {"query": "it is <b>x</b>", "limit": 2})
    ]
    assert (first.text, first.reasoning) == ("I look.", "Hm.")
    assert [each.error for each in second.tool_calls] == ["the close of a call is missing after it"]
    stored = RunFile(path).header.template["turns"]
    assert (stored["source"], stored["verdict"]) == ("response_template", "limited")
    assert stored["format"]["response"]["template"] == READS_IT
    result = verify(path)
    assert result.exit_code == 0, result.output


@pytest.mark.whole
@pytest.mark.slow
async def test_run_is_resumed_only_with_the_same_reader(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    for _ in range(2):
        async with Run(Library, engine(), file=path) as run:
            assert [each.reward async for each in run] in ([1], [])
    other = changed(open_pattern=READS_IT["fields"]["tool_calls"]["open_pattern"] + "(?:)")
    with pytest.raises(ConfigurationChanged, match=r"response\.template\.fields\.tool_calls\.open_pattern"):
        async with Run(Library, engine(unlearnable(other)), file=path):
            pass


class Required(Library):
    tool_choice = "required"


class Named(Library):
    tool_choice = "refresh"


class Strict(Library):
    @tool(strict=True)
    def find(self, word: str) -> str:
        """Find a word.

        Args:
            word: which.
        """
        return word


@pytest.mark.parametrize(
    ("environment", "asked"),
    [(Required, "tool_choice='required'"), (Named, "tool_choice='refresh'"), (Strict, "@tool(strict=True)")],
)
async def test_enforced_calls_are_refused_before_sampling(environment: type[Library], asked: str) -> None:
    playing = ScriptedEngine(REPLIES, template=unlearnable(), tokenizer=vocabulary(), record=True)
    with pytest.raises(BadOption, match=re.escape(f"{asked}: the model's response_template reads calls")):
        async with Run(environment, playing):
            pass
    assert playing.calls == []


async def test_streaming_is_refused_with_the_fix() -> None:
    class Streaming(Library):
        async def rollout(self, conversation: Conversation) -> None:
            async with conversation.stream(tool_choice="none") as stream:
                said = [event async for event in stream]
            assert "".join(each.text for each in said if isinstance(each, ReasoningPiece)) == "Hm."
            conversation.add("Continue.")
            async with conversation.stream() as stream:
                _ = [event async for event in stream]

    async with Run(Streaming, engine()) as run:
        (trajectory,) = [each async for each in run]
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "conversation.stream(): the model's response_template reads calls" in (trajectory.error or "")
    assert len(trajectory.turns) == 1


async def test_mark_spelled_with_letters_is_prose() -> None:
    tokenizer = ByteTokenizer(["<think>", "</think>"], added_tokens=["<tool_call>"])
    text = f"Hm.</think>Write {said(json.dumps('x'), 2)}"
    spelled = [each for char in text for each in tokenizer.encode(char)]
    first_ids = (*tokenizer.encode("Hm.</think>"), *spelled[len("Hm.</think>") :])
    replies: list[Any] = [Reply(ids=first_ids), "Hm.</think>Done."]

    class Asks(Library):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            conversation.add("Do it.")
            await conversation.generate()

    async with Run(Asks, ScriptedEngine(replies, template=unlearnable(), tokenizer=tokenizer)) as run:
        (trajectory,) = [each async for each in run]
    first = trajectory.turns[0]
    assert (first.text, first.tool_calls) == (text.removeprefix("Hm.</think>"), [])


def test_scripted_engine_asks_for_such_calls_as_text() -> None:
    with pytest.raises(BadOption, match=r"its response_template only reads them.*write the call as text"):
        ScriptedEngine([Reply("", calls=(call("refresh"),))], template=unlearnable())


async def test_unreadable_template_is_refused_with_requirement_and_fix() -> None:
    with pytest.raises(BadTemplate, match="values_told_apart") as refused:
        async with Run(Library, engine(unlearnable(None))):
            pass
    assert "no text ends a string in a call's arguments" in str(refused.value)
    for fix in ("--template pythonic", "--tool-format vllm:NAME", "response_template"):
        assert fix in str(refused.value)


@pytest.fixture
def model(demo_model_folder: Path, tmp_path: Path) -> Path:
    """The demo model with another chat template and response template."""
    folder = tmp_path / "model"
    shutil.copytree(demo_model_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = unlearnable()
    (folder / "chat_template.jinja").write_text(template.text)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["response_template"] = template.response_template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.slow
def test_check_template_shows_the_source_of_the_format(model: Path) -> None:
    done = CliRunner().invoke(app, ["check-template", str(model), "--json"])
    document = json.loads(done.stdout)
    assert (document["turn"]["source"], document["turn"]["verdict"]) == ("response_template", "limited")
    assert document["turn"]["enforceable"] is False
    shown = CliRunner().invoke(app, ["check-template", str(model)]).stdout
    for words in ("response_template", "limited", "untyped", "auto, none"):
        assert words in shown
    assert "cannot be read" not in shown
