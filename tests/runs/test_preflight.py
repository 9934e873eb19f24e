"""Checks of templates before and during a run: refusals at the start, and appended messages that proved wrong."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import BadTemplate, Concurrency, Conversation, Message, Outcome, Run, Task, template_probe, tool
from runner.cli.app import app
from runner.tokens.junction import Result, Seam
from runner.tokens.probing import appends
from runner.tokens.probing.appends import Append
from runner.tokens.template import ChatTemplate, Renderer
from tests.histories import COUNTING, HIDDEN, OPENER, PLAIN, Twice, template
from tests.playing import Plain, play, recording, talked, talking, tasks

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_template_that_counts_is_followed_at_every_turn() -> None:
    async def talk(conversation: Conversation) -> None:
        for _ in range(7):
            await conversation.generate()
            conversation.add("More.")

    engine = recording(lambda turn: "yes", template=template(COUNTING))

    async with Run(talking(talk), engine) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    last = trajectory.turns[-1]
    inserted = engine.tokenizer.decode(last.prompt_ids[trajectory.turns[-2].end :])
    assert inserted == "\n<|im_start|>user\nMore.<|im_end|>\n(long)<|im_start|>assistant\n"
    assert {turn.junction.seam for turn in trajectory.turns if turn.junction is not None} == {Seam.SPECIAL}
    assert not run.summary.faults


SWITCH = (
    "{% set ns = namespace(quiet=false) %}{% for m in messages %}"
    "{% if m.role == 'system' and '/hush' in m.content %}{% set ns.quiet = true %}{% endif %}{% endfor %}" + PLAIN
).replace(OPENER, OPENER.replace("assistant\\n'", "assistant\\n' ~ ('(hush)' if ns.quiet else '')"))
KEYWORD = SWITCH.replace("m.role == 'system' and '/hush' in", "m.role == 'user' and 'secretly' in")
LONG = "{% set ns = namespace(quiet=messages | length > 22) %}" + SWITCH.partition("{% endfor %}")[2]
NAMED = SWITCH.replace("m.role == 'system' and '/hush' in m.content", "m.name is defined")


class TalksOn(Plain):
    """Environment of five turns. Every third episode begins with the text that these templates treat differently."""

    def tasks(self) -> list[Task]:
        return [Task(id=f"t{number}", prompt=self.begun(number)) for number in range(20)]

    def begun(self, number: int) -> list[Message]:
        unlike = number % 3 == 0
        asked: Message = {"role": "user", "content": "Tell me secretly." if unlike else "Tell me."}
        if unlike:
            asked["name"] = "bob"
        shots: list[Message] = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
        system: Message = {"role": "system", "content": "Be brief. /hush" if unlike else "Be brief."}
        return [system, *shots * (8 if unlike else 1), asked]

    async def rollout(self, conversation: Conversation) -> None:
        for _ in range(5):
            await conversation.generate()
            conversation.add("More.")


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("text", [SWITCH, KEYWORD, LONG, NAMED], ids=["switch", "keyword", "long", "named"])
async def test_text_of_one_episode_changes_no_token_of_another(text: str, tmp_path: Path) -> None:
    prompts = []
    for episodes in (1, 8):
        engine = recording(lambda turn: "yes", template=template(text))
        file = tmp_path / f"{episodes}.db"
        async with Run(TalksOn, engine, file=file, concurrency=Concurrency(episodes=episodes)) as run:
            done = [trajectory async for trajectory in run]
        prompts.append({each.id: [list(turn.prompt_ids) for turn in each.turns] for each in done})
        for trajectory in done:
            made = [turn.junction for turn in trajectory.turns[1:]]
            assert all(each and (each.result, each.seam) == (Result.APPENDED, Seam.SPECIAL) for each in made)
        # The command builds every prompt again by rendering its whole history.
        assert CliRunner().invoke(app, ["verify", str(file)]).exit_code == 0
    assert prompts[0] == prompts[1]


# --- before anything is sampled


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for m in messages %}", "not valid jinja2"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{{ missing_name.of.this }}", "missing_name"),
        ("no words of anybody", "user message"),
    ],
)
async def test_unusable_template_is_refused_before_sampling(text: str, says: str) -> None:
    engine = recording(["21"], template=template(text))
    with pytest.raises(BadTemplate, match=says):
        async with Run(Plain, engine):
            pass
    assert engine.calls == []


async def test_template_is_probed_with_the_options_of_the_run() -> None:
    engine = recording(
        ["21"], template=template("{% if not style %}{{ raise_exception('no style') }}{% endif %}" + PLAIN)
    )
    async with Run(Plain, engine, template_options={"style": "plain"}) as run:
        (trajectory,) = [trajectory async for trajectory in run]
    assert trajectory.text == "21"


async def test_template_runs_in_this_process_only_after_its_probe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def never_ends(*_: object, **__: object) -> None:
        raise BadTemplate("it was stopped")

    def rendered(*_: object, **__: object) -> str:
        raise AssertionError("it was rendered here")

    monkeypatch.setattr(template_probe, "probe", never_ends)
    engine = recording(["21"], template=template(PLAIN))
    monkeypatch.setattr(Renderer, "render", rendered)
    with pytest.raises(BadTemplate, match="it was stopped"):
        async with Run(Plain, engine):
            pass


@pytest.mark.parametrize("tools", [False, True], ids=["none", "tools"])
@pytest.mark.parametrize("system", [None, "Be brief."], ids=["no system prompt", "a system prompt"])
async def test_start_probes_only_appends_that_can_occur(
    tools: bool, system: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Append] = []
    try_one = appends._AppendTrial.verdict

    def noted(trial: appends._AppendTrial) -> appends.AppendVerdict:
        tried.append(trial._kind)
        return try_one(trial)

    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    class Asks(Plain):
        system_prompt = system
        if tools:
            add_two = tool(add)

    monkeypatch.setattr(appends._AppendTrial, "verdict", noted)
    await play(Asks, recording("Yes", template=template(ChatTemplate.load("pythonic").text + "{# no longer ours #}")))
    user = Append.UNDER_SYSTEM if system else Append.USER
    assert set(tried) == {user, *(kind for kind in Append if tools and kind.needed and kind.calls)}
    assert len(tried) == len(set(tried)) < len(Append)


async def test_refuse_policy_rejects_unbridgeable_templates_at_start() -> None:
    engine = recording(["yes", "no"], template=template(HIDDEN))
    with pytest.raises(BadTemplate, match="no_sentinel"):
        async with Run(Twice, engine, history="refuse"):
            pass
    assert engine.calls == []


async def test_append_policy_reports_unbridgeable_templates_at_start() -> None:
    async with Run(Twice, recording(["yes", "no"], template=template(HIDDEN))) as run:
        assert any("no_sentinel" in fault and "new segment" in fault for fault in run.summary.faults)
        _ = [trajectory async for trajectory in run]


LIMITED = "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}"


async def test_template_refusing_long_conversations_is_distrusted() -> None:
    async def talk(conversation: Conversation) -> None:
        for _ in range(4):
            await conversation.generate()
            conversation.add("More.")

    engine = recording(lambda turn: "yes", template=template(LIMITED + PLAIN))
    async with Run(talking(talk), engine, tasks=tasks(3)) as run:
        trajectories = [trajectory async for trajectory in run]
    assert {trajectory.outcome for trajectory in trajectories} == {Outcome.TOKEN_ERROR}
    assert any("too long" in fault for fault in run.summary.faults)


NUMBERED = COUNTING.replace(
    "{% if users | length > 5 and add_generation_prompt %}{{ '(long)' }}", "{% if True %}{{ users | length }}"
)


# The template has no generation prompt of the usual kind, and its prompt depends on the whole history. So only renders
# of the whole history show that it asks for an answer.
UNUSUAL = NUMBERED.replace(
    OPENER, "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' ~ users | length }}{% endif %}"
)


@pytest.mark.parametrize("text", [NUMBERED, UNUSUAL, PLAIN], ids=["non-local", "non-local, unusual", "local"])
async def test_no_long_history_is_rendered_on_the_event_loop(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[tuple[int, bool]] = []
    render, loop = Renderer.render, threading.get_ident()

    def watched(self: Renderer, messages: Any, **options: Any) -> str:
        if messages[0]["content"] == "Question 0?":  # only the conversation has this message, and no probe
            rendered.append((len(messages), threading.get_ident() == loop))
        return render(self, messages, **options)

    async def talk(conversation: Conversation) -> None:
        for _ in range(6):
            await conversation.generate()
            conversation.add("More.")

    engine = recording(lambda turn: "yes", template=template(text))
    trajectory = await talked(talk, engine)  # before the first turn the template is learnt; each turn is also compared
    assert len(trajectory.segments) == 1
    monkeypatch.setattr(Renderer, "render", watched)
    trajectory = await talked(talk, engine)
    assert len(trajectory.turns) == 6
    assert max(length for length, _ in rendered) >= (11 if text != PLAIN else 1)
    assert max(length for length, here in rendered if here) <= 4


async def test_appends_refused_by_a_comparison_stay_refused() -> None:
    # The template appends a text to words that end with a dot, which hides the sentinel after them.
    dotted = PLAIN.replace(
        OPENER, "{{ '(yes)' if messages | length > 1 and messages[-2].content[-1:] == '.' }}" + OPENER
    )

    class Talks(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            for _ in range(3):
                await conversation.generate()
                conversation.add("More.")

    engine = recording(lambda turn: "A dot.", template=template(dotted))
    async with Run(Talks, engine, tasks=tasks(3)) as run:
        trajectories = [trajectory async for trajectory in run]
    for trajectory in trajectories:
        causes = {turn.junction.cause for turn in trajectory.turns if turn.junction is not None}
        assert causes == {"marker_in_tail"}
