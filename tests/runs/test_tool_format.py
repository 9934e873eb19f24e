"""A tool format that the user names: whole runs, refusals, and the run file."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
from pathlib import Path
from typing import Any, Self

import pytest
from anyio import from_thread
from typer.testing import CliRunner

from runner import (
    BadModel,
    BadOption,
    BadTemplate,
    ConfigurationChanged,
    Conversation,
    Outcome,
    Run,
    RunFile,
    Sampling,
    ScriptedEngine,
    ToolCalled,
    Trajectory,
    VllmEngine,
    reward,
    tool,
)
from runner.cli import run as command
from runner.cli.app import app
from runner.cli.settings import RunSettings
from runner.engines.vllm import call_reader
from runner.runs.options import RunOptions
from runner.testing import Reply, assert_exact, call, play_async
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from tests.conformance.corpus import VARIABLES, control_tokens, corpus, is_special
from tests.parsing.families import Library
from tests.verifying import verify

pytestmark = [pytest.mark.anyio, pytest.mark.slow]  # vLLM is imported, which takes seconds

XML = "<tool_call>\n<function=look_up>\n<parameter=query>\n{query}\n</parameter>\n</function>\n</tool_call>"
"""A tool call in the format of Qwen3-Coder, which no bundled template has."""


def said(query: str) -> str:
    return XML.format(query=query)


def retrained(*replies: Any, **options: Any) -> ScriptedEngine:
    """A model that was tuned on another format than the format of its chat template."""
    return ScriptedEngine([said("it's <b>x</b>"), *replies, "Done."], template="hermes", **options)


async def played(engine: Any, environment: type[Library] = Library, **options: Any) -> Trajectory:
    async with Run(environment, engine, **options) as run:
        (trajectory,) = [each async for each in run]
    assert trajectory.outcome.scored, trajectory.error
    assert_exact(trajectory)
    return trajectory


def calls_of(trajectory: Trajectory) -> list[list[tuple[str, str, Any, str | None]]]:
    return [[(c.id, c.name, c.arguments, c.error) for c in turn.tool_calls] for turn in trajectory.turns]


LOOKED_UP = ("call_0", "look_up", {"query": "it's <b>x</b>"}, None)


async def test_named_format_reads_a_model_tuned_on_it(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    malformed = f"I look. {said('y')[:-30]}"
    trajectory = await played(retrained(malformed), tool_format="vllm:qwen3_coder", file=path)
    first, second, last = calls_of(trajectory)
    assert (first, last) == ([LOOKED_UP], [])
    ((_, _, _, error),) = second
    assert error is not None
    assert [turn.text for turn in trajectory.turns] == ["", "I look.", "Done."]
    assert trajectory.reward == 1
    header = RunFile(path).header
    assert header.tool_format == "vllm:qwen3_coder"
    assert header.template["turns"]["source"] == "learnt"
    result = verify(path)
    assert result.exit_code == 0, result.output


async def test_calls_without_named_format_use_the_template() -> None:
    (first, *_) = calls_of(await played(retrained()))
    assert [error is None for *_, error in first] == [False]


async def test_the_kit_plays_with_a_named_format_too() -> None:
    trajectory = await play_async(Library, [said("it's <b>x</b>"), "Done."], tool_format="vllm:qwen3_coder")
    assert calls_of(trajectory) == [[LOOKED_UP], []]


async def test_a_template_that_nothing_else_reads_can_be_played() -> None:
    name = "MiniMaxAI-MiniMax-M3-MXFP8"
    text = next(entry.text for entry in corpus() if entry.name == name)
    template = ChatTemplate(text, name, VARIABLES)
    tokens = control_tokens(template.renderer().written())
    special = [token for token in tokens if is_special(token)]
    mark, stop = "]<]minimax[>[", "[e~["
    inside = f'{mark}<invoke name="look_up">{mark}<query>x y{mark}</query>{mark}<limit>2{mark}</limit>{mark}</invoke>'
    written = f"{mark}<tool_call>\n{inside}\n{mark}</tool_call>"

    def engine() -> ScriptedEngine:
        tokenizer = ByteTokenizer(special, added_tokens=[mark], eos_token=stop)
        return ScriptedEngine([written, "Done."], template=template, tokenizer=tokenizer)

    with pytest.raises(BadTemplate, match="--tool-format vllm:NAME"):
        async with Run(Library, engine()):
            pass
    trajectory = await played(engine(), tool_format="vllm:minimax_m3")
    assert calls_of(trajectory) == [[("call_0", "look_up", {"query": "x y", "limit": 2}, None)], []]


async def test_named_format_skips_agents_with_separate_engines() -> None:
    class Asks(Library):
        async def rollout(self, conversation: Conversation) -> None:
            other = self.episode.conversation("other", prompt="Look!", tools=self.bound_tools())
            for each in (conversation, other):
                turn = await each.generate()
                assert [found.error for found in turn.tool_calls] == [None]

        done = None  # type: ignore[assignment]  # another reward replaces it

        @reward
        def read(self) -> bool:
            return True

    other = ScriptedEngine([Reply("", calls=(call("look_up", query="x"),))], template="pythonic")
    await played(retrained(), Asks, engines={"other": other}, tool_format="vllm:qwen3_coder")


async def test_cancelled_run_keeps_a_turn_parsed_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, threads = call_reader.VllmCallReader.read, list[int]()
    run = Run(Library, retrained(), tool_format="vllm:qwen3_coder")

    def cancelled_meanwhile(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        from_thread.run_sync(run.cancel)
        return read(*arguments)

    monkeypatch.setattr(call_reader.VllmCallReader, "read", cancelled_meanwhile)
    async with run:
        (trajectory,) = [each async for each in run]
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    assert trajectory.outcome is Outcome.CANCELLED
    assert calls_of(trajectory) == [[LOOKED_UP]]


# --- refusals


class Requires(Library):
    async def rollout(self, conversation: Conversation) -> None:
        turn = await conversation.generate(tool_choice="required")
        conversation.add(*await conversation.call_tools(turn))
        await conversation.generate()


async def test_required_call_uses_the_learnt_format() -> None:
    engine = ScriptedEngine([[call("look_up", query="x")], "Done."], template="hermes", record=True)
    trajectory = await played(engine, Requires, tool_format="vllm:qwen3_coder")
    assert calls_of(trajectory)[0] == [("call_0", "look_up", {"query": "x"}, None)]
    constraint = trajectory.turns[0].constraint
    assert constraint is not None
    assert "tool_call" in constraint.value


class Streaming(Library):
    async def rollout(self, conversation: Conversation) -> None:
        async with conversation.stream(tool_choice="required") as stream:
            assert [event async for event in stream] == [ToolCalled(stream.turn.tool_calls[0])]
        conversation.add(*await conversation.call_tools(stream.turn))
        async with conversation.stream() as stream:
            _ = [event async for event in stream]


async def test_only_the_learnt_format_streams_turns() -> None:
    engine = ScriptedEngine([[call("look_up", query="x")], "Done."], template="hermes")
    async with Run(Streaming, engine, tool_format="vllm:qwen3_coder") as run:
        (trajectory,) = [each async for each in run]
    assert "conversation.stream(): vllm:qwen3_coder reads calls" in (trajectory.error or "")
    assert calls_of(trajectory) == [[("call_0", "look_up", {"query": "x"}, None)]]


class Required(Library):
    tool_choice = "required"


class Strict(Library):
    @tool(strict=True)
    def find(self, word: str) -> str:
        """Find a word.

        Args:
            word: which.
        """
        return word


@pytest.mark.parametrize(
    ("environment", "template", "says"),
    [
        (Strict, "hermes", "@tool(strict=True): vllm:hermes reads calls, .*give no tool format"),
        (Strict, "", "@tool(strict=True): vllm:hermes reads calls, .*a template whose calls can be learnt"),
        (Required, "", "tool_choice='required': vllm:hermes reads calls, .*give 'auto', or give a template"),
    ],
    ids=["strict", "strict, unlearnt", "required, unlearnt"],
)
async def test_enforcing_an_unknown_format_is_refused_at_the_start(
    environment: type[Library], template: str, says: str
) -> None:
    text = next(entry.text for entry in corpus() if entry.name == "microsoft-FrogMini-14B-2510")
    unlearnt = ChatTemplate(text, "unlearnt", VARIABLES)
    engine = ScriptedEngine("Done.", template=template or unlearnt, record=True)
    pattern = re.escape(says).replace(r"\.\*", ".*")
    with pytest.raises(BadOption, match=pattern):
        async with Run(environment, engine, tool_format="vllm:hermes"):
            pass
    assert engine.calls == []


# --- resuming and verifying


async def test_run_resumes_only_with_its_first_tool_format(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    await played(retrained(), tool_format="vllm:qwen3_coder", file=path)
    async with Run(Library, retrained(), tool_format="vllm:qwen3_coder", file=path) as run:
        assert [each async for each in run] == []
    for other in (None, "vllm:hermes"):
        with pytest.raises(ConfigurationChanged, match=f'tool_format: "vllm:qwen3_coder" -> {json.dumps(other)}'):
            async with Run(Library, retrained(), tool_format=other, file=path):
                pass


async def test_verifying_reads_with_the_format_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.db"
    await played(retrained(), tool_format="vllm:qwen3_coder", file=path)
    call_reader._parser_class.cache_clear()
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    refused = verify(path)
    assert refused.exit_code == BadModel.exit_code
    assert "vLLM" in refused.output


# --- names


class Unstartable(ScriptedEngine):
    async def __aenter__(self) -> Self:
        raise AssertionError("the engine was started")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hermes", "tool_format='hermes': give vllm:NAME"),
        ("vllm:", "tool_format='vllm:': give vllm:NAME"),
        (7, "tool_format=7: give vllm:NAME"),
    ],
)
def test_unknown_format_names_are_refused_without_vllm(name: Any, says: str) -> None:
    with pytest.raises(BadOption, match=says):
        RunOptions(tool_format=name)


async def test_an_unknown_name_is_refused_before_an_engine_starts() -> None:
    with pytest.raises(BadOption, match=r"no tool parser 'hermess'. Did you mean 'hermes'\?"):
        async with Run(Library, Unstartable("Done.", template="hermes"), tool_format="vllm:hermess"):
            pass


def test_command_line_refuses_an_unknown_tool_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(environment="calculator", tool_format="vllm:hermess")
    with pytest.raises(BadOption, match="Did you mean 'hermes'"):
        command.run_command(settings, lambda _: Unstartable("Done."))
    assert CliRunner().invoke(app, ["run", "calculator", "--tool-format", "hermes"]).exit_code == BadOption.exit_code


def test_command_line_plays_with_a_tool_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(environment=f"{Library.__module__}:Library", tool_format="vllm:qwen3_coder")
    assert command.run_command(settings, lambda _: retrained()) == 0
    (file,) = (tmp_path / "runs").glob("*.db")
    with RunFile(file) as stored:
        (trajectory,) = [stored.trajectory(row) for row in stored.rows()]
        assert stored.header.tool_format == "vllm:qwen3_coder"
    assert calls_of(trajectory) == [[LOOKED_UP], []]


# --- output of check-template


@pytest.mark.parametrize(
    ("name", "misread", "code"), [("vllm:hermes", 0, 0), ("vllm:qwen3_coder", 49, BadTemplate.exit_code)]
)
def test_check_template_tries_the_format_on_the_template(name: str, misread: int, code: int) -> None:
    done = CliRunner().invoke(app, ["check-template", "hermes", "--tool-format", name, "--json"])
    document = json.loads(done.stdout)
    assert (document["tool_format"]["name"], len(document["tool_format"]["misread"])) == (name, misread)
    assert document["tool_format"]["cases"] > 50
    assert (done.exit_code, document["exit_code"]) == (code, code)
    shown = CliRunner().invoke(app, ["check-template", "hermes", "--tool-format", name]).stdout
    assert ("does not parse the template's calls" in shown) is bool(misread)
    assert "tool format" in shown


# --- on the real engine


class Chosen(Library):
    """Environment in which the model must write a call in another format."""

    async def rollout(self, conversation: Conversation) -> None:
        turn = await conversation.generate(sampling=Sampling(choice=(said("naïve 日本"),)))
        conversation.add(*await conversation.call_tools(turn))
        await conversation.generate(sampling=Sampling(choice=("Done.",)))


async def test_a_named_format_reads_the_ids_of_a_real_model(engine: VllmEngine, tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    trajectory = await played(engine, Chosen, tool_format="vllm:qwen3_coder", file=path)
    assert calls_of(trajectory) == [[("call_0", "look_up", {"query": "naïve 日本"}, None)], []]
    assert trajectory.reward == 1
    result = verify(path)
    assert result.exit_code == 0, result.output
