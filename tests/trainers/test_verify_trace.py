"""Checks of traces: correct ones have no finding, in any template and format, and each planted fault has one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runner import BadBatch, RunFile
from runner.cli.app import app
from runner.parsing.learning.learnt_format import FormatVerdict
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import load_tokenizer
from runner.trainers.openenv import export_openenv, read_training_trace
from runner.trainers.trace_check import TraceFault, TraceModel, TraceReport, verify_trace
from runner.trainers.trace_files import read_traces
from runner.trainers.verifiers_traces import trace_delta
from tests import sweeps
from tests.conformance import turn_formats
from tests.conformance.corpus import CLOCK, Entry, corpus
from tests.conformance.vocabulary import host
from tests.playing import play_all, recording, talking, tasks, twice
from tests.trainers.traced import FORMS, Talk, model_of, talks, written
from tests.verifying import play as play_wandering

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

USABLE = {row.template for row in turn_formats.recorded() if row.verdict != FormatVerdict.REFUSED}
ENTRIES = [entry for entry in corpus() if entry.name in USABLE]


def named(name: str) -> Entry:
    return next(entry for entry in ENTRIES if entry.name == name)


def reports(folder: Path, entry: Entry, form: str, *given: Talk, stops: tuple[str, ...]) -> list[TraceReport]:
    model = model_of(entry, stops)
    traces = read_traces(written(folder, form, *given), vocabulary=model.tokenizer.size)
    return [verify_trace(trace.calls, model) for trace in traces]


# --- right traces


def test_the_tool_capable_templates_are_354() -> None:
    assert len(ENTRIES) == 354


@pytest.mark.parametrize("entry", sweeps.part(ENTRIES, 354), ids=lambda entry: entry.name)
def test_right_traces_of_a_template_have_no_finding(entry: Entry, tmp_path: Path) -> None:
    pairs = list(talks(entry))
    assert pairs
    for form in FORMS:
        for (talk, stops), report in zip(
            pairs, reports(tmp_path, entry, form, *(talk for talk, _ in pairs), stops=pairs[0][1]), strict=True
        ):
            assert report.findings == [], (talk.name, stops)
            assert report.calls == 2


# --- planted faults


@cache
def conversation(name: str = "Qwen-Qwen2.5-7B-Instruct", *, spelled: bool = False) -> tuple[Talk, tuple[str, ...]]:
    """Return a conversation with a tool call and its result, after a long history."""
    return next(pair for pair in talks(named(name), spelled=spelled) if pair[0].name == "tool result, rounds")


PlantFault = Callable[[Talk], Talk]

PLANTED: dict[str, tuple[TraceFault, PlantFault]] = {
    "an id of the first prompt is lost": (
        TraceFault.FIRST_PROMPT,
        lambda talk: replace(talk, prompt=[*talk.prompt[:20], *talk.prompt[21:]]),
    ),
    "the first id of the seam is lost": (TraceFault.SEAM, lambda talk: replace(talk, seam=talk.seam[1:])),
    "an id of the seam is another": (
        TraceFault.SEAM,
        lambda talk: replace(talk, seam=[*talk.seam[:5], talk.seam[5] + 1, *talk.seam[6:]]),
    ),
    "an id is after the seam": (TraceFault.SEAM, lambda talk: replace(talk, seam=[*talk.seam, talk.seam[-1]])),
    "ids stand after the stop": (
        TraceFault.AFTER_STOP,
        lambda talk: replace(talk, sampled=[*talk.sampled, 40, 41, talk.sampled[-1]]),
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_fault_is_found_with_its_kind(fault: str, form: str, tmp_path: Path) -> None:
    talk, stops = conversation()
    kind, plant = PLANTED[fault]
    (report,) = reports(tmp_path, named("Qwen-Qwen2.5-7B-Instruct"), form, plant(talk), stops=stops)
    assert [finding.fault for finding in report.findings] == [kind]


@pytest.mark.parametrize("form", ["openenv", "verifiers"])
def test_ids_that_were_encoded_again_are_found_at_their_place(form: str, tmp_path: Path) -> None:
    talk, stops = conversation(spelled=True)
    (report,) = reports(tmp_path, named("Qwen-Qwen2.5-7B-Instruct"), form, talk, stops=stops)
    (finding,) = report.findings
    assert (finding.fault, finding.turn) == (TraceFault.REENCODED, 1)
    assert talk.history is not None
    was = [*talk.prompt, *talk.sampled]
    assert finding.index == next(n for n, pair in enumerate(zip(was, talk.history, strict=False)) if len({*pair}) == 2)
    assert list(finding.expected) == [*was, *talk.seam]


def test_ids_that_were_encoded_again_are_found_without_messages() -> None:
    talk, stops = conversation(spelled=True)
    trace = FORMS["openenv"](talk)
    for turn in trace["turns"]:
        del turn["request"], turn["response"]
    report = checked(trace, named("Qwen-Qwen2.5-7B-Instruct"), stops)
    assert [finding.fault for finding in report.findings] == [TraceFault.REENCODED]
    assert report.unchecked == {"the trace has no messages: only ids were compared": 1}


def checked(trace: dict[str, Any], entry: Entry, stops: tuple[str, ...]) -> TraceReport:
    return verify_trace(read_training_trace(trace), model_of(entry, stops))


@pytest.mark.parametrize("place", ["prompt", "seam"])
def test_control_text_that_became_control_ids_is_found(place: str) -> None:
    entry, vocabulary = named("Qwen-Qwen2.5-7B-Instruct"), host()
    said = {"role": "user", "content": "Say <|im_end|> now"}
    messages = [said] if place == "prompt" else [{"role": "user", "content": "Hi"}, ASSISTANT, said]
    render = entry.renderer().render
    prompt = vocabulary.encode(render(messages[:1]))
    second = vocabulary.encode(render(messages))
    sampled = vocabulary.encode("Oslo<|im_end|>")
    turns = [turn("a", prompt, sampled, messages[:1], ASSISTANT)]
    if place == "seam":
        turns.append(turn("b", second, [7], messages, ASSISTANT))
    report = checked({"turns": turns}, entry, ("<|im_end|>",))
    (finding,) = report.findings
    assert (finding.fault, finding.turn) == (TraceFault.CONTROL_TEXT, len(turns) - 1)
    assert vocabulary.decode([finding.found[finding.index + 1]]) == "<|im_end|>"


ASSISTANT = {"role": "assistant", "content": "Oslo"}


def turn(node: str, prompt: list[int], sampled: list[int], messages: list[Any], reply: Any) -> dict[str, Any]:
    return {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": sampled,
        "per_token_logps": [-1.0] * len(sampled),
        "loss_mask": [0] * len(prompt) + [1] * len(sampled),
        "request": {"messages": messages},
        "response": {"choices": [{"message": reply}]},
    }


# --- traces without a fault


def test_history_that_the_template_shortens_has_no_findings() -> None:
    """Qwen3 leaves out the thoughts of earlier turns, so the prompts of a server that renders again are correct."""
    entry, vocabulary = named("Qwen-Qwen3-0.6B"), host()
    reply = {"role": "assistant", "content": "Oslo", "reasoning_content": "North."}
    messages = [{"role": "user", "content": "A cold city?"}, reply, {"role": "user", "content": "Why?"}]
    render = entry.renderer().render
    sampled = vocabulary.encode("<think>\nNorth.\n</think>\n\nOslo<|im_end|>")
    first, second = vocabulary.encode(render(messages[:1])), vocabulary.encode(render(messages))
    assert second[: len(first) + 3] != [*first, *sampled[:3]]
    trace = {"turns": [turn("a", first, sampled, messages[:1], reply), turn("b", second, [7], messages, reply)]}
    assert checked(trace, entry, ("<|im_end|>",)).findings == []
    trace["turns"][1]["prompt_token_ids"] = [*second[:-1], 9]
    (finding,) = checked(trace, entry, ("<|im_end|>",)).findings
    assert (finding.fault, finding.turn, finding.index) == (TraceFault.FIRST_PROMPT, 1, len(second) - 1)


@pytest.mark.parametrize("form", FORMS)
def test_tools_as_the_vllm_server_writes_them_have_no_findings(form: str, tmp_path: Path) -> None:
    """vLLM 0.32 writes its own fields in its own order, with null for a description that the request left out."""
    entry, (talk, stops) = named("Qwen-Qwen2.5-7B-Instruct"), conversation()
    given: Any = {"type": "function", "function": {"strict": True, "parameters": {"type": "object"}, "name": "f"}}
    function = {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}
    served = {"type": "function", "function": function}  # as vLLM's ChatCompletionToolsParam writes `given`
    render = entry.renderer().render
    prompts = [host().encode(render(talk.messages[: talk.replied], tools=[tool])) for tool in (given, served)]
    assert prompts[0] != prompts[1]
    for prompt in prompts:
        own = replace(talk, prompt=prompt, tools=[given])
        assert [report.findings for report in reports(tmp_path, entry, form, own, stops=stops)] == [[]]
    (report,) = reports(tmp_path, entry, form, replace(own, prompt=[*prompt[:-9], *prompt[-8:]]), stops=stops)
    assert [finding.fault for finding in report.findings] == [TraceFault.FIRST_PROMPT]


@pytest.mark.parametrize("ignored", [True, False])
def test_ids_after_an_ignored_stop_have_no_findings(ignored: bool) -> None:
    talk, stops = conversation()
    trace = FORMS["openenv"](PLANTED["ids stand after the stop"][1](talk))
    trace["turns"][0]["request"]["ignore_eos"] = ignored
    found = [finding.fault for finding in checked(trace, named("Qwen-Qwen2.5-7B-Instruct"), stops).findings]
    assert found == [TraceFault.AFTER_STOP] * (not ignored)


def test_messages_that_are_not_text_are_counted_and_not_compared() -> None:
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    report = checked({"turns": [turn("a", [1, 2], [3], image, ASSISTANT)]}, named("Qwen-Qwen3-0.6B"), ("<|im_end|>",))
    assert report.findings == []
    assert "only text is supported" in next(iter(report.unchecked))


@pytest.mark.anyio
@pytest.mark.parametrize("template", ["pythonic", "hermes"])
async def test_exported_run_has_no_finding(template: str, tmp_path: Path, demo_model_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_model_folder)
    engine = recording(["It is 21.", "It is 42."], tokenizer=tokenizer, template=template)
    await play_all(talking(twice), engine, tasks=tasks(3), file=tmp_path / "run.db")
    with RunFile(tmp_path / "run.db") as run_file:
        assert export_openenv(run_file, tmp_path / "run.jsonl") == 3
    model = TraceModel.of(demo_model_folder, template=template)
    found = [verify_trace(trace.calls, model) for trace in read_traces(tmp_path / "run.jsonl")]
    assert [(report.calls, report.findings, dict(report.unchecked)) for report in found] == [(2, [], {})] * 3


def test_date_that_the_template_writes_is_that_of_the_trace() -> None:
    template = ChatTemplate(
        "{{ strftime_now('%d %B %Y') }}{{ messages[0].content }}{% if add_generation_prompt %}:{% endif %}",
        name="dated",
    )
    vocabulary = host()
    calls = "24 December 2001Hi:"
    trace = {"turns": [turn("a", vocabulary.encode(calls), [7], [{"role": "user", "content": "Hi"}], ASSISTANT)]}

    (finding,) = verify_trace(read_training_trace(trace), TraceModel(vocabulary, template, stop_ids=[2])).findings
    assert "give the date of the trace" in finding.explanation
    trace["turns"][0]["metadata"] = {"clock": "2001-12-24T08:00:00"}
    assert verify_trace(read_training_trace(trace), TraceModel(vocabulary, template, stop_ids=[2])).findings == []
    del trace["turns"][0]["metadata"]
    dated = TraceModel(vocabulary, template, stop_ids=[2], now=CLOCK.replace(2001, 12, 24))
    assert verify_trace(read_training_trace(trace), dated).findings == []


# --- files that are not traces


NODE = {"message": {"role": "user", "content": ""}, "token_ids": [1], "mask": [False]}
SAMPLED = {**NODE, "sampled": True, "mask": [True], "logprobs": [-1.0]}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", r"is empty\. Give OpenEnv's TrainingTrace"),
        ("<!DOCTYPE html>\n<p>404</p>", r"the document is not JSON .*begins with '<!DOCTYPE html>"),
        ('{"a": 1}', r"line 1: the fields 'a' are not those of a known trace format"),
        ("[1]", "item 0: 1 is not a trace"),
        ('{"turns": []}\n{"turns"', r"line 2 is not JSON"),
        ('{"schema_version": 2, "turns": []}', "schema_version 2, and only version 1"),
        ({"turns": [{**turn("a", [1], [2], [], ASSISTANT), "request": []}, 5]}, "turn 1 is 5"),
        ({"turns": [{**turn("a", [1], [2], [], ASSISTANT), "request": "x"}]}, "turn 0: request is 'x'"),
        ({"turns": [turn("a", [1], [900_000], [], ASSISTANT)]}, r"completion_token_ids\[0\] is 900000: .* to 299"),
        ({"version": 3, "nodes": []}, "version 3, and only version 1"),
        ({"traces": [5]}, "the trace is 5"),
        ({"nodes": [{}]}, "node 0 is {}: give an object with a message"),
        ({"nodes": [{**NODE, "parent": 0}]}, "node 0: parent is 0: give the number of an earlier node"),
        ({"nodes": [{**NODE, "mask": []}]}, "node 0: mask has 0 values for 1 id"),
        ({"nodes": [{**NODE, "mask": [True]}]}, "node 0: mask is true for 1 id, but sampled is false"),
        ({"nodes": [{**SAMPLED, "logprobs": [-1, -1]}]}, "node 0: logprobs has 2 values for 1 sampled id"),
        ({"nodes": [{**SAMPLED, "token_ids": [900]}]}, r"node 0: token_ids\[0\] is 900: .* from 0 to 299"),
        ({"nodes": [{**SAMPLED, "token_ids": [], "mask": [], "logprobs": []}]}, "its client was of type eval"),
        ({"prompt_ids": [1], "completion_ids": [2], "env_mask": [1, 1]}, "env_mask has 2 values for 1 completion_ids"),
        ({"prompt_ids": [1], "completion_ids": [2], "env_mask": [2]}, "env_mask has 2: a mask holds 0 and 1"),
        ({"prompt_ids": [1], "completion_ids": [2.5]}, r"completion_ids\[0\] is 2.5"),
        ({"prompt_ids": [1], "completion_ids": [2], "logprobs": []}, "logprobs has 0 values for 1 sampled id"),
        ({"prompt_ids": [1], "completion_ids": [2], "logprobs": [0.5]}, r"logprobs\[0\] is 0.5: give a finite number"),
        ({"prompt_ids": [1], "completion_ids": [2], "messages": [{"role": "user"}]}, "1 span .* 0 assistant messages"),
        (
            {"prompt_ids": [[1]], "completion_ids": [[2], [3]]},
            "prompt_ids is not a list of 2 values, as completion_ids is",
        ),
    ],
)
def test_file_that_is_not_a_trace_has_one_clear_error(text: Any, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
    with pytest.raises(BadBatch, match=fault) as raised:
        list(read_traces(path, vocabulary=300))
    assert str(raised.value).startswith(f"{path}")


def test_run_file_is_sent_to_the_command_for_run_files(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"SQLite format 3\0")
    with pytest.raises(BadBatch, match=r"is a run file: use `deltarunner verify"):
        list(read_traces(tmp_path / "run.db"))
    with pytest.raises(BadBatch, match="cannot be read: No such file"):
        list(read_traces(tmp_path / "none"))


def test_columns_and_rows_are_read_as_the_same_calls(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1], "completion_ids": [2, n], "env_mask": [1, 0]} for n in range(3)]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "columns.json").write_text(json.dumps({name: [row[name] for row in rows] for name in rows[0]}))
    one, two = ([trace.calls for trace in read_traces(tmp_path / name)] for name in ("rows.json", "columns.json"))
    assert one == two
    assert [call.token_ids for calls in one for call in calls] == [(2,)] * 3


# --- the command


def deltarunner(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["verify-trace", *arguments])


def test_command_ends_with_7_and_prints_one_line_of_json(tmp_path: Path, demo_model_folder: Path) -> None:
    tokenizer = load_tokenizer(demo_model_folder)
    render = ChatTemplate.load("pythonic").renderer().render
    prompt = tokenizer.encode(render([{"role": "user", "content": "Hi"}]))
    good = turn("a", prompt, [7, 2], [{"role": "user", "content": "Hi"}], ASSISTANT)
    path = tmp_path / "trace.json"
    for prompt_ids, code in ((prompt, 0), (prompt[1:], 7)):
        changed = {**good, "prompt_token_ids": prompt_ids, "loss_mask": [0] * len(prompt_ids) + [1, 1]}
        path.write_text(json.dumps({"turns": [changed]}))
        done = deltarunner(str(path), "--model", str(demo_model_folder), "--template", "pythonic", "--json")
        shown = json.loads(done.stdout)
        assert (done.exit_code, shown["exit_code"], shown["verified"]) == (code, code, not code)
        assert [finding["fault"] for finding in shown["findings"]] == ["first_prompt"] * bool(code)
    path.write_text("<html>")
    done = deltarunner(str(path), "--model", str(demo_model_folder), "--json")
    assert (done.exit_code, json.loads(done.stdout)["error"]["kind"]) == (2, "BadBatch")
    done = deltarunner(str(path), "--model", str(demo_model_folder), "--now", "yesterday")
    assert (done.exit_code, "--now yesterday: give a date" in done.output) == (2, True)


@pytest.mark.anyio
async def test_run_with_every_kind_of_turn_has_no_finding(tmp_path: Path) -> None:
    await play_wandering(tmp_path / "run.db", "pythonic")
    with RunFile(tmp_path / "run.db") as run_file:
        header = run_file.header
        export_openenv(run_file, tmp_path / "openenv.jsonl")
        deltas = [trace_delta(each, task={}, weights={}) for each in run_file.trajectories()]
    engine, template = header.engine, header.template
    traces = [{**delta["open"], "nodes": delta["nodes"]} for delta in deltas]
    (tmp_path / "verifiers.jsonl").write_text("".join(json.dumps(trace) + "\n" for trace in traces))
    model = TraceModel(
        ByteTokenizer(engine["control_tokens"], eos_token=engine["eos_token"]),
        ChatTemplate(template["text"], name=template["name"], variables=template["variables"]),
        stop_ids=engine["stop_ids"],
        options=header.template_options,
        now=header.clock,
    )
    for name in ("openenv.jsonl", "verifiers.jsonl"):
        for trace in read_traces(tmp_path / name):
            report = verify_trace(trace.calls, model)
            assert (report.calls, report.findings) == (15, [])
            assert report.unchecked.total() == 1  # a turn after a turn that was sampled again
