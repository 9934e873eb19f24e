"""Traits of a template, found by rendering it. A template that never ends or never begins a turn is named."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

import runner.template_probe as probe_module
from runner.template_probe import TemplateFault, UnusableTemplate, in_process, probe, request_of
from runner.tokens.probing.profile import TemplateProfile
from runner.tokens.probing.traits import profile_of
from runner.tokens.probing.usable import usable_renderer
from runner.tokens.template import ChatTemplate
from tests.conformance.corpus import VARIABLES, corpus

CLOCK = datetime(2026, 3, 14)

HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
THOUGHT = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}"
    "</tool_call>{% endfor %}"
)
OPENING = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def chatml(
    *,
    head: str = HEAD,
    before: str = "",
    role: str = "{{ m.role }}",
    thought: str = THOUGHT,
    content: str = "{{ m.content or '' }}",
    calls: str = CALLS,
    close: str = "<|im_end|>",
    separator: str = "\n",
    opening: str = OPENING,
) -> str:
    """A small template. Each argument changes one trait."""
    turn = f"<|im_start|>{role}\n{thought}{content}{calls}{close}{separator}"
    return f"{head}{{% for m in messages %}}{before}{turn}{{% endfor %}}{opening}"


def profile(text: str, **variables: str) -> TemplateProfile:
    template = ChatTemplate(text, name="tiny", variables=variables)
    return profile_of(usable_renderer(template, {}, CLOCK))


PLAIN = chatml()
LATE_TOOLS = (
    "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}" + CALLS + "<|im_end|>\n{% endfor %}" + OPENING
)
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}" + CALLS + "{% endfor %}<|assistant|>"
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if loop.last and m.role == 'assistant' %}<|return|>{% else %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TOGETHER = (
    "{% for m in messages %}{% if m.role != 'tool' or loop.first or loop.previtem.role != 'tool' %}"
    "<|im_start|>{{ m.role }}{% endif %}\n{{ m.content }}" + CALLS + "{% if m.role != 'tool' or loop.last or "
    "loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}{% endfor %}" + OPENING
)
TRAITS: list[tuple[str, str, Any]] = [
    # the small template unchanged
    ("bos", PLAIN, "not_written"),
    ("default_system", PLAIN, ""),
    ("clock", PLAIN, False),
    ("options", PLAIN, ()),
    ("generation_prompt", PLAIN, "<|im_start|>assistant\n"),
    ("prompt_reasoning", PLAIN, "left_to_the_model"),
    ("opened_twice", PLAIN, False),
    ("close", PLAIN, "<|im_end|>"),
    ("close_at_end", PLAIN, "<|im_end|>"),
    ("close_after_call", PLAIN, "<|im_end|>"),
    ("separator", PLAIN, "\n"),
    ("stop_opens_next", PLAIN, ()),
    ("reasoning", PLAIN, "kept"),
    ("inline_reasoning", PLAIN, "kept"),
    ("tools", PLAIN, "first"),
    ("calls_shown", PLAIN, True),
    ("results_shown", PLAIN, True),
    ("parallel_results", PLAIN, "one_by_one"),
    ("arguments", PLAIN, "object"),
    ("literals", PLAIN, "json"),
    ("null_content", PLAIN, "accepted"),
    ("system_mid_run", PLAIN, "kept"),
    ("trimmed", PLAIN, ()),
    # a template that behaves otherwise
    ("bos", "<s>" + PLAIN, "written"),
    ("bos", "<s><s>" + PLAIN, "twice"),
    (
        "default_system",
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe of use.<|im_end|>\n{% endif %}" + PLAIN,
        "Be of use.",
    ),
    ("clock", "Today is {{ strftime_now('%d %B %Y') }}." + PLAIN, True),
    (
        "options",
        "{% if enable_thinking is defined and enable_thinking %}Think.{% endif %}" + PLAIN,
        ("enable_thinking",),
    ),
    ("options", "{% if not mood is defined %}{% set mood = 'calm' %}{% endif %}{{ mood }}" + PLAIN, ("mood",)),
    ("options", "{% if tools %}{% set mine = 1 %}{% else %}{% set mine = 2 %}{% endif %}{{ mine }}" + PLAIN, ()),
    ("generation_prompt", chatml(opening=""), ""),
    ("prompt_reasoning", chatml(opening=OPENING.replace("assistant\n", "assistant\n<think>\n")), "opened"),
    (
        "prompt_reasoning",
        chatml(opening=OPENING.replace("assistant\n", "assistant\n<think>\n\n</think>")),
        "empty_block",
    ),
    ("opened_twice", chatml(separator="\n{% if m.role == 'tool' %}<|im_start|>assistant\n{% endif %}"), True),
    ("close", HARMONY, "<|end|>"),
    ("close_at_end", HARMONY, "<|return|>"),
    ("close", GLM, ""),
    ("stop_opens_next", GLM, ("<|tool|>", "<|user|>")),
    ("close_after_call", chatml(close="{% if m.tool_calls %}<|call|>{% else %}<|im_end|>{% endif %}"), "<|call|>"),
    ("separator", chatml(separator=""), ""),
    ("separator", chatml(separator="\n\n"), "\n\n"),
    ("reasoning", chatml(thought="{% if loop.last %}" + THOUGHT + "{% endif %}"), "only_last"),
    ("reasoning", chatml(thought=""), "not_shown"),
    ("inline_reasoning", chatml(content="{{ m.content.split('</think>')[-1] }}"), "not_shown"),
    (
        "inline_reasoning",
        chatml(content="{{ m.content if loop.last else m.content.split('</think>')[-1] }}"),
        "only_last",
    ),
    ("tools", LATE_TOOLS, "moves"),
    ("tools", chatml(head=""), "not_shown"),
    ("calls_shown", chatml(calls=""), False),
    ("results_shown", chatml(content="{{ m.content if m.role != 'tool' else '' }}"), False),
    ("parallel_results", TOGETHER, "together"),
    ("parallel_results", chatml(content="{{ m.content if m.role != 'tool' else '' }}"), "not_shown"),
    (
        "arguments",
        chatml(calls=CALLS.replace("c.function.arguments | tojson", "c.function.arguments")),
        "either",
    ),
    ("arguments", chatml(calls=CALLS.replace("c.function.arguments | tojson", "'' + c.function.arguments")), "string"),
    ("arguments", chatml(calls=""), "neither"),
    ("literals", chatml(calls=CALLS.replace(" | tojson", "")), "python"),
    ("literals", chatml(calls=""), "not_shown"),
    ("null_content", chatml(content="{{ m.content }}"), "written"),
    ("null_content", chatml(content="{{ '' + m.content }}"), "raises"),
    ("null_content", chatml(calls="{% if m.content is none %}" + CALLS + "{% endif %}"), "needed"),
    ("system_mid_run", chatml(before="{% if m.role == 'system' %}{% continue %}{% endif %}"), "dropped"),
    (
        "system_mid_run",
        chatml(before="{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"),
        "refused",
    ),
    (
        "system_mid_run",
        "{{ messages | selectattr('role', 'equalto', 'system') | map(attribute='content') | join }}"
        + chatml(before="{% if m.role == 'system' %}{% continue %}{% endif %}"),
        "moved",
    ),
    ("trimmed", chatml(content="{{ m.content | trim }}"), ("system", "user", "assistant", "tool")),
    ("trimmed", chatml(content="{{ m.content | trim if m.role == 'user' else m.content }}"), ("user",)),
]


@pytest.mark.parametrize(("trait", "text", "value"), TRAITS, ids=[f"{t}-{v}" for t, _, v in TRAITS])
def test_each_trait_is_seen_and_its_opposite_too(trait: str, text: str, value: Any) -> None:
    assert getattr(profile(text), trait) == value


MANY_NAMES = (
    "{% if not mood is defined %}{% set mood = 'calm' %}{% endif %}{{ mood }}{{ tone | default('dry') }}"
    "{% for m in messages %}{% set content = m.content %}{% if content is defined %}{% set own = 1 %}{% endif %}"
    "{% endfor %}{{ content }}{% if own is defined %}{% set own = 2 %}{% endif %}"
)


def test_names_set_by_a_template_are_options_only_if_they_matter() -> None:
    assert profile(MANY_NAMES.replace("{{ content }}", "") + PLAIN).options == ("mood", "tone")


def test_option_for_earlier_thoughts_only_is_found() -> None:
    thought = "{% if keep or loop.last %}" + THOUGHT + "{% endif %}"
    text = "{% if keep is not defined %}{% set keep = false %}{% endif %}" + chatml(thought=thought)
    assert profile(text).options == ("keep",)


def test_templates_that_add_to_the_list_of_messages_are_rendered_too() -> None:
    late = "{% set all = messages + [{'role': 'user', 'content': 'And?'}] %}" + PLAIN.replace("in messages", "in all")
    assert profile(late).carries_tools


def test_dropped_call_in_the_last_turn_counts_as_shown() -> None:
    assert profile(chatml(before="{% if loop.last and m.role == 'assistant' %}{% continue %}{% endif %}")).calls_shown


def test_every_value_of_every_trait_has_a_sentence_of_its_own() -> None:
    for trait, value, sentence in profile(PLAIN).traits():
        assert isinstance(value, str | bool | tuple), trait
        assert sentence.endswith("."), trait


def test_a_bos_is_missing_only_where_the_vocabulary_wants_one() -> None:
    renderer = usable_renderer(ChatTemplate(PLAIN, name="tiny"), {}, CLOCK)
    assert profile_of(renderer, wanted_bos="<s>").bos == "missing"
    assert profile("{{ bos_token }}" + PLAIN, bos_token="<begin>").bos == "written"


@pytest.mark.parametrize("shown", ["%A", "%H"], ids=["weekday", "hour"])
def test_clock_that_shows_one_part_of_the_time_is_found(shown: str) -> None:
    template = ChatTemplate("{{ strftime_now('" + shown + "') }}" + PLAIN, name="tiny")
    # The 3rd of May three years before, at 1 o'clock, has the same weekday and hour.
    assert profile_of(usable_renderer(template, {}, datetime(2026, 4, 1, 1))).clock


def test_a_profile_survives_json() -> None:
    found = profile(PLAIN)
    assert TemplateProfile.from_json(json.loads(json.dumps(found.as_json()))) == found
    assert set(found.as_json()) == {name for name, *_ in found.traits()}


REAL: list[tuple[str, Mapping[str, Any]]] = [
    (
        "Qwen-Qwen3-0.6B",
        {
            "close": "<|im_end|>",
            "separator": "\n",
            "reasoning": "only_last",
            "inline_reasoning": "only_last",
            "parallel_results": "together",
            "arguments": "either",
            "options": ("enable_thinking",),
        },
    ),
    ("mistralai-Mistral-Nemo-Instruct-2407", {"tools": "moves", "close": "</s>", "close_after_call": "</s>"}),
    ("GLM-4.6", {"stop_opens_next": ("<|observation|>", "<|user|>"), "close": "", "close_at_end": ""}),
    (
        "openai-gpt-oss-120b",
        {"close": "<|end|>", "close_at_end": "<|return|>", "close_after_call": "<|call|>", "clock": True},
    ),
    ("meta-llama-Llama-3.2-3B-Instruct", {"clock": True, "close": "<|eot_id|>", "separator": "", "bos": "written"}),
    ("mistralai-Devstral-Small-2-24B-Instruct-2512", {"tools": "first", "calls_shown": True, "results_shown": True}),
    ("nvidia-NVIDIA-Nemotron-Nano-12B-v2", {"tools": "first", "calls_shown": True}),
    (
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        {"prompt_reasoning": "opened", "null_content": "needed", "arguments": "string", "calls_shown": True},
    ),
    (
        "Qwen-Qwen2.5-7B-Instruct",
        {"default_system": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."},
    ),
]


@pytest.mark.parametrize(("name", "expected"), REAL, ids=[name for name, _ in REAL])
def test_templates_of_public_models_have_known_traits(name: str, expected: Mapping[str, Any]) -> None:
    entry = next(entry for entry in corpus() if entry.name == name)
    found = profile(entry.text, **VARIABLES)
    assert {trait: getattr(found, trait) for trait in expected} == expected


# --- in a process of its own

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.sample_cases(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "fault", "words"),
    [
        ("{% for m in messages", TemplateFault.NOT_JINJA, "is not valid jinja2, line 1"),
        (ENDLESS, TemplateFault.ENDLESS, "was still rendering a question or a call after 0.5 s"),
        ("{{ 'a' * 10**10 }}", TemplateFault.TOO_BIG, "more than 2 GiB"),
        ("{{ system_message.text }}" + PLAIN, TemplateFault.VARIABLE_MISSING, "--template-option system_message="),
        ("{{ raise_exception('Only in rhyme.') }}", TemplateFault.RAISES, "Only in rhyme."),
        ("{{ messages[0].parts[0] }}", TemplateFault.RAISES, "parts"),
        ("", TemplateFault.QUESTION_MISSING, "renders nothing:"),
        ("Hello.", TemplateFault.QUESTION_MISSING, "nothing of a user message"),
        (PLAIN + "<|im_start|>assistant\n", TemplateFault.OPENED_TWICE, "opens the assistant's turn twice"),
    ],
    ids=lambda value: value.value if isinstance(value, TemplateFault) else "",
)
def test_unusable_template_is_reported_with_its_fault(text: str, fault: TemplateFault, words: str) -> None:
    with pytest.raises(UnusableTemplate) as caught:
        probe(ChatTemplate(text, name="tiny"), seconds=0.5 if fault is TemplateFault.ENDLESS else 60)
    assert caught.value.fault is fault
    assert words in str(caught.value)
    assert "'tiny'" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "doing"),
    [
        ("messages[-1].role == 'tool'", "a question or a call"),
        ("messages | length > 2 and messages[1].reasoning_content", "conversations of several turns"),
    ],
)
def test_template_that_loops_on_some_messages_is_found_before_a_run(test: str, doing: str) -> None:
    text = PLAIN + "{% if " + test + " %}" + ENDLESS + "{% endif %}"
    with pytest.raises(UnusableTemplate, match=f"{doing} after 1 s"):
        probe(ChatTemplate(text, name="tiny"), seconds=1)


def test_profile_from_a_process_equals_the_one_made_here() -> None:
    text = chatml(head="Today is {{ strftime_now('%d %B %Y') }}, {{ mood }}.{{ bos_token }}" + HEAD)
    template = ChatTemplate(text, name="tiny", variables={"bos_token": "<s>"})
    here = profile_of(usable_renderer(template, {"mood": "calm"}, CLOCK))
    assert probe(template, {"mood": "calm"}, now=CLOCK) == here


def test_a_profile_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate("Once." + PLAIN, name="tiny")
    first = probe(template, {"mood": "calm"}, now=CLOCK)
    monkeypatch.setattr(probe_module, "in_process", lambda *given, **more: pytest.fail("asked again"))
    assert probe(template, {"mood": "calm"}, now=CLOCK) is first


def test_bundled_templates_need_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "in_process", lambda *given, **more: pytest.fail("a process"))
    for name in ("hermes", "pythonic"):
        assert probe(ChatTemplate.load(name)).carries_tools


def test_process_is_killed_when_the_wait_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            started.append(self)
            raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_process(request_of(ChatTemplate(ENDLESS, name="tiny"), {}, CLOCK), seconds=60)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.anyio
async def test_a_probe_ends_with_the_task_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    waiting = threading.Event()

    class Watched(subprocess.Popen[bytes]):
        def communicate(self, input: Any = None, timeout: float | None = None) -> Any:
            started.append(self)
            waiting.set()
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", Watched)
    template = ChatTemplate(ENDLESS, name="tiny")
    check = partial(probe, template, seconds=60, check_cancelled=anyio.from_thread.check_cancelled)
    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, check)
        await anyio.to_thread.run_sync(waiting.wait)
        group.cancel_scope.cancel()
    assert started[0].returncode == -signal.SIGKILL


def test_process_without_a_parent_ends_at_its_time_limit() -> None:
    request = json.dumps(request_of(ChatTemplate(ENDLESS, name="tiny"), {}, CLOCK)).encode()
    command = [sys.executable, "-m", "runner.template_probe", "0.5"]
    done = subprocess.run(command, input=request, capture_output=True, check=False, timeout=60)
    assert done.returncode == -signal.SIGPROF


def test_time_that_a_busy_machine_takes_away_does_not_count() -> None:
    waits = "import runner.template_probe as p, time; p.answer_to = lambda _: time.sleep(1) or {'made': 1}; p.main()"
    command = [sys.executable, "-c", waits, "0.5"]
    done = subprocess.run(command, input=b"{}", capture_output=True, check=False, timeout=60)
    assert done.returncode == 0
    assert json.loads(done.stdout) == {"answer": {"made": 1}}


def test_the_process_loads_little() -> None:
    script = "import sys, runner.template_probe; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    heavy = {"tokenizers", "anyio", "rich", "typer", "pydantic", "torch", "transformers", "runner.options"}
    assert heavy.isdisjoint(done.stdout.split())


def test_a_folder_full_of_strange_modules_does_not_matter(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("json", "jinja2", "runner"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not this one')")
    monkeypatch.chdir(tmp_path)
    assert os.getcwd() == str(tmp_path)
    assert probe(ChatTemplate("Elsewhere." + PLAIN, name="tiny")).carries_tools
