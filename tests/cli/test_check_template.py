"""`deltarunner check-template`: its output, the order of the ids, and its exit codes."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from runner import Run, ScriptedEngine
from runner.cli import check_template as command
from runner.cli.app import app
from runner.errors import BadModel
from runner.models import resolve_model, stop_ids
from runner.parsing.limitations import DESCRIPTIONS, CallLimitation
from runner.template_probe import UnusableTemplate, in_process, request_of
from runner.tokens.bridging.bridge import Bridger
from runner.tokens.bridging.refusal import Property
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.tokens.control_text import lacking
from runner.tokens.probing.appends import Append, AppendVerdict, Exactness, example, verdicts
from runner.tokens.probing.profile import TemplateProfile
from runner.tokens.probing.traits import profile_of
from runner.tokens.template import ChatTemplate
from runner.tokens.tokenizer import load_tokenizer
from tests.conformance.corpus import corpus
from tests.playing import Plain
from tests.repository import DOCS
from tests.tokens.families import FAMILIES, model
from tests.tokens.profiles import BEGIN, END, table

pytestmark = [pytest.mark.slow, pytest.mark.sample_cases(5), pytest.mark.sample_functions(2)]

Check = Callable[..., Result]


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Run the command in its own folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["check-template", *arguments])


@pytest.fixture
def public(tmp_path: Path) -> Callable[[str], str]:
    """Return a file with a public model's template."""

    def write(name: str) -> str:
        text = next(entry.text for entry in corpus() if entry.name == name)
        (tmp_path / "public.jinja").write_text(text)
        return "public.jinja"

    return write


def document(done: Result) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert report["exit_code"] == done.exit_code
    return report


def judged(bridger: Bridger) -> dict[Append, AppendVerdict]:
    return {verdict.kind: verdict for verdict in verdicts(bridger, profile_of(bridger.renderer))}


# --- output


def test_a_template_that_does_everything_ends_with_ok(check: Check) -> None:
    done = check("hermes")
    assert (done.exit_code, done.stderr) == (0, "")
    assert "ok: all appends of an environment with tools are exact" in done.stdout
    for kind in Append:
        assert f"{kind.value} " in done.stdout
    for name in ("parallel_results", "together", "<|im_start|>assistant⏎"):
        assert name in done.stdout


def test_example_passages_show_source_and_id_borders(check: Check) -> None:
    lines = [line for line in check("hermes").stdout.splitlines() if re.search(" mask [01] ", line)]
    assert [line.split()[:3] for line in lines] == [
        ["prompt", "mask", "0"],
        ["sampled", "mask", "1"],
        ["bridge", "mask", "0"],
        ["sampled", "mask", "1"],
        ["bridge", "mask", "0"],
    ]
    assert lines[2].endswith(
        "│⏎│<|im_start|>│user⏎│<tool_response>│⏎a wading bird⏎│</tool_response>│<|im_end|>│⏎│<|im_start|>│assistant⏎│"
    )


def test_inexact_append_shows_a_reason_a_consequence_and_a_fix(check: Check, public: Callable[[str], str]) -> None:
    done = check(public("mistralai-Mistral-Nemo-Instruct-2407"))
    assert done.exit_code == 6
    block = done.stdout.partition("user after an answer: tools_move\n")[2].splitlines()[:3]
    assert [line.split()[0] for line in block] == ["why", "then", "fix"]
    assert "a new segment begins here" in block[1]
    assert "a template that writes the tools first" in block[2]
    assert "appends that environments with tools make are not exact" in done.stdout


def test_template_without_tools_is_reported(check: Check, tmp_path: Path) -> None:
    (tmp_path / "plain.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    done = check("plain.jinja")
    assert done.exit_code == 6
    assert "no environment with tools can be played; without tools everything is exact" in done.stdout


def test_a_process_of_its_own_prints_the_same(check: Check, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner.cli.app", "check-template", "hermes"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, check("hermes").stdout)


# --- JSON


def test_json_has_every_property_verdict_and_id(check: Check, public: Callable[[str], str]) -> None:
    report = document(check(public("Qwen-Qwen3-0.6B"), "--json"))
    assert report["profile"]["reasoning"]["value"] == "only_last"
    assert report["profile"]["options"]["value"] == ["enable_thinking"]
    assert {verdict["kind"]: verdict["result"] for verdict in report["appends"]} == {k.value: "exact" for k in Append}
    assert {verdict["kind"] for verdict in report["appends"] if verdict["rewrites"]} >= {"user after reasoning"}
    assert [passage["source"] for passage in report["example"]] == ["prompt", "sampled", "bridge", "sampled", "bridge"]
    assert report["error"] is None


def test_json_describes_the_limitations_of_the_calls(check: Check, public: Callable[[str], str]) -> None:
    report = document(check(public("DeepHat-DeepHat-V1-7B"), "--json", "--tool-format", "vllm:hermes"))
    named = [CallLimitation.BARE, CallLimitation.CONTENT_DROPPED]
    assert report["turn"]["limitations"] == {name: DESCRIPTIONS[name] for name in named}
    assert report["tool_format"]["limitations"].keys() <= DESCRIPTIONS.keys()


def test_a_models_own_vocabulary_and_stops_are_used(check: Check, demo_model_folder: Path) -> None:
    report = document(check(str(demo_model_folder), "--template", "pythonic", "--json"))
    tokenizer = load_tokenizer(demo_model_folder)
    stops = stop_ids(resolve_model(demo_model_folder), tokenizer.eos_id)
    assert tuple(report["stops"].values()) == stops
    renderer = ChatTemplate.load("pythonic").renderer()
    played = example(Bridger(tokenizer, renderer, stops), profile_of(renderer))
    assert [passage["ids"] for passage in report["example"]] == [list(passage.ids) for passage in played]
    log: list[int] = []
    for passage in report["example"]:
        assert passage["mask"] == (passage["source"] == "sampled")
        log += passage["ids"]
    assert "│".join(report["example"][1]["texts"]) == "[│look│_│up│(│word│='│her│on│')]│<|im_end|>"
    assert tokenizer.decode(log).endswith("<|im_start|>user\nAnd an egret?<|im_end|>\n<|im_start|>assistant\n")


def test_turn_end_that_the_model_does_not_stop_at_is_reported(
    check: Check, demo_model_folder: Path, tmp_path: Path
) -> None:
    template = ChatTemplate.load("pythonic").text.replace("<|im_end|>", "<|endofturn|>")
    (tmp_path / "other.jinja").write_text(template)
    done = check(str(demo_model_folder), "--template", "other.jinja")
    assert done.exit_code == 6
    assert "stops: the template ends turns with <|endofturn|>, but the model has no stop id for it" in done.stdout
    assert "eos_token_id" not in done.stdout  # an id that is missing cannot be added
    assert "no token for <|endofturn|>, which the template writes" in done.stdout
    assert document(check(str(demo_model_folder), "--template", "other.jinja", "--json"))["unstopped"]
    report = document(check(str(demo_model_folder), "--json"))
    assert (report["unstopped"], report["lacking"]) == ([], [])


def test_missing_stop_id_is_named_with_its_fix(check: Check, demo_model_folder: Path, tmp_path: Path) -> None:
    template = ChatTemplate.load("pythonic").text.replace("<|im_end|>", "<|endoftext|>")
    (tmp_path / "other.jinja").write_text(template)
    assert "add it to eos_token_id" in check(str(demo_model_folder), "--template", "other.jinja").stdout


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", FAMILIES)
def test_no_family_lacks_a_token_that_its_template_writes(name: str) -> None:
    # Both templates use the vocabulary of an older Mistral model, whose calls had no such token.
    younger = ("[ARGS]",) if name in ("devstral", "ministral-3") else ()
    made = model(name)
    assert lacking(made.renderer.rendered(), made.tokenizer) == younger


@pytest.mark.anyio
async def test_run_names_the_tokens_of_its_template_that_are_letters() -> None:
    made = model("qwen2.5")
    zephyr = ChatTemplate(made.template.text.replace("<|im_start|>", "<|turn|>"), name="turns")
    engine = ScriptedEngine(["yes"], tokenizer=made.tokenizer, template=zephyr, stop_ids=made.stop_ids)
    run = Run(Plain(), engine)
    async with run:
        [_ async for _ in run]
    (message,) = [fault for fault in run.summary.faults if "plain text" in fault]
    assert "writes <|turn|>, for which the vocabulary has no token" in message


def test_options_are_given_to_the_template(check: Check, public: Callable[[str], str]) -> None:
    file = public("Qwen-Qwen3-0.6B")
    report = document(check(file, "--template-option", "enable_thinking=false", "--json"))
    assert report["profile"]["prompt_reasoning"]["value"] == "empty_block"
    assert report["options"] == {"enable_thinking": False}
    refused = check(file, "--template-option", "enable_thoughts=false")
    assert refused.exit_code == 2
    assert "reads only these variables: enable_thinking" in refused.stderr


# --- errors


@pytest.mark.parametrize(
    ("text", "fault", "words"),
    [
        ("{% for", "does_not_compile", "not valid jinja2"),
        ("{{ raise_exception('Only in rhyme.') }}", "raises", "Only in rhyme."),
        ("{{ sep_token.x }}", "variable_missing", "--template-option sep_token="),
        ("Hello.", "question_not_shown", "nothing of a user message"),
        ("{{ 'a' * 10**10 }}", "too_much_memory", "of memory"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_message(
    check: Check, tmp_path: Path, text: str, fault: str, words: str
) -> None:
    (tmp_path / "bad.jinja").write_text(text)
    done = check("bad.jinja", "--json")
    report = document(done)
    assert (done.exit_code, report["error"]["fault"]) == (6, fault)
    assert words in report["error"]["message"]
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("options", [["thinking"], ["a=1", "a=2"]])
def test_invalid_option_is_printed_as_json_too(check: Check, options: list[str]) -> None:
    done = check("chatml", "--json", *(part for option in options for part in ("--template-option", option)))
    error = document(done)["error"]
    assert (error["kind"], error["fault"]) == ("BadOption", None)
    assert error["message"] in done.stderr


def test_a_template_that_never_ends_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "PROBE_SECONDS", 0.5)
    file = tmp_path / "endless.jinja"
    file.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(UnusableTemplate, match=r"after 0.5 s and was stopped"):
        command.check_template_command(str(file), template=None, options=(), as_json=True)
    assert json.loads(capsys.readouterr().out)["error"]["fault"] == "never_ends"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere.jinja"], 6, "cannot be read"),
        (["nowhere/"], 5, "no model folder 'nowhere/'"),
        (["hermes", "--template-option", "mood"], 2, "name=value"),
        (["smollm2-135m", "--template", "nowhere.jinja"], 6, "cannot be read"),
    ],
)
def test_missing_file_or_malformed_option_is_named(check: Check, arguments: list[str], code: int, words: str) -> None:
    done = check(*arguments)
    assert done.exit_code == code
    assert words in done.stderr


def test_a_vocabulary_that_cannot_be_used_is_the_models_fault(tmp_path: Path) -> None:
    request = request_of(ChatTemplate.load("hermes"), {}, datetime(2026, 3, 14))
    with pytest.raises(BadModel, match="no tokenizer can be read"):
        in_process({**request, "vocabulary": {"folder": str(tmp_path), "stop_ids": []}})


@pytest.mark.parametrize(
    ("processor", "wanted"),
    [
        (None, ""),
        ({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}, "<s>"),
        ({"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]}, ""),
        (
            {
                "type": "Sequence",
                "processors": [{"type": "ByteLevel"}, {"type": "T", "single": [{"SpecialToken": {"id": "<b>"}}]}],
            },
            "<b>",
        ),
    ],
)
def test_the_bos_that_a_vocabulary_wants_is_its_post_processors(tmp_path: Path, processor: Any, wanted: str) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": processor}))
    assert command._wanted_bos(tmp_path) == wanted


# --- verdicts are the bridge's own


def test_a_seam_whose_ids_might_have_merged_is_soft(demo_model_folder: Path) -> None:
    text = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}land\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = load_tokenizer(demo_model_folder)
    bridger = Bridger(tokenizer, ChatTemplate(text, name="island").renderer(), [2])
    assert judged(bridger)[Append.CUT].result is Exactness.SOFT


def test_refusals_have_the_bridges_own_names() -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('late') }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content if m.role != 'tool' else '' }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_id is not None
    found = judged(Bridger(tokenizer, ChatTemplate(text, name="tiny").renderer(), [tokenizer.eos_id]))
    assert found[Append.SYSTEM].refusal is Property.TEMPLATE_RENDERS
    assert found[Append.RESULT].refusal is Property.CONTENT_SHOWN
    assert found[Append.USER].result is Exactness.EXACT


def test_append_to_numbered_messages_is_not_local() -> None:
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{{ loop.index }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_id is not None
    numbered = judged(Bridger(tokenizer, ChatTemplate(text, name="numbered").renderer(), [tokenizer.eos_id]))
    plain = judged(Bridger(tokenizer, ChatTemplate.load("hermes").renderer(), [tokenizer.eos_id]))
    assert (numbered[Append.USER].local, plain[Append.USER].local) == (False, True)


def test_a_template_that_leaves_the_past_alone_rewrites_nothing() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.eos_id is not None
    found = judged(Bridger(tokenizer, ChatTemplate.load("hermes").renderer(), [tokenizer.eos_id]))
    assert not any(verdict.rewrites for verdict in found.values())


# --- docs/chat-templates.md


PAGE = (DOCS / "chat-templates.md").read_text()


def test_the_page_names_every_property_and_every_refusal() -> None:
    for name in (*(field.name for field in dataclasses.fields(TemplateProfile)), *Property):
        assert f"`{name}`" in PAGE, name


def test_the_pages_examples_are_what_the_command_prints(check: Check) -> None:
    printed = [line.rstrip() for line in check("hermes").stdout.splitlines()]
    blocks = re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    shown = [line for block in blocks if not block.startswith("$") for line in block.splitlines()]
    assert len(shown) > 10
    for line in shown:
        assert line in printed


def test_the_pages_python_runs() -> None:
    (source,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert "assert" in source
    exec(compile(source, "chat-templates.md", "exec"), {})


@pytest.mark.whole
def test_the_pages_counts_are_those_of_the_corpus() -> None:
    written = PAGE.partition(BEGIN)[2].partition(END)[0]
    assert written == table(), "python -m tests.tokens.profiles --write"
