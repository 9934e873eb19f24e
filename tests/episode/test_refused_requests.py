"""Requests that a template cannot render: each fails alone, and the episode continues as if it had not been sent."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from runner import BadInput, Conversation, Outcome, Trajectory
from runner.chat_requests import Delivery, Tolerated
from runner.testing import Reply, assert_exact, call
from runner.tokens.system_support import SystemSupport, system_support
from runner.tokens.template import ChatTemplate, TemplateRaised
from tests import sweeps
from tests.conformance.corpus import VARIABLES, corpus
from tests.conformance.sweep import is_tool_capable
from tests.episode.test_chat import SYSTEM, TASK, result, user, verdicts
from tests.histories import OPENER, PLAIN, template
from tests.playing import Plain, play_all, recording
from tests.verifying import verify

pytestmark = pytest.mark.anyio

COMMAND = {"type": "string", "description": "The command."}
PARAMETERS = {"type": "object", "properties": {"command": COMMAND}, "required": ["command"]}
RUN = {"type": "function", "function": {"name": "run", "description": "Run a command.", "parameters": PARAMETERS}}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def failing(expression: str) -> ChatTemplate:
    """Return a template that raises at a user message with the text `fail`."""
    return template(
        "{% for m in messages %}{% if m.content == 'fail' %}" + expression + "{% endif %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
    )


RAISES = {
    "raise_exception": "{{ raise_exception('no') }}",
    "undefined attribute": "{{ m.name.first }}",
    "undefined call": "{{ nothing(m) }}",
    "type": "{{ m.content + 1 }}",
    "division": "{{ 1 / 0 }}",
    "index": "{{ 'a'.split('b')[3] + 'x' }}",
    "value": "{{ 'abc'.index('z') }}",
    "overflow": "{{ range(10 ** 9) | list }}",
    "sandbox": "{{ m.__class__.__mro__[1]() }}",
    "attribute": "{{ m.content.nothing() }}",
    "recursion": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "key": "{{ {}.popitem() }}",
    "filter argument": "{{ m.content | tojson(indent='x', separators=3) }}",
}


async def played(chat_template: Any, loop: Any, says: Any, path: Path | None = None, **options: Any) -> Trajectory:
    engine = recording(says, template=chat_template)

    class Foreign(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await loop(self.episode)

    trajectories = await play_all(Foreign, engine, file=path, **options)
    for trajectory in trajectories:
        assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
        assert_exact(trajectory, engine)
    if path is not None:
        checked = await anyio.to_thread.run_sync(verify, path)
        assert checked.exit_code == 0, checked.output
    assert trajectories[0].reward is not None
    return trajectories[0]


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("name", RAISES)
@pytest.mark.parametrize("first", [True, False])
async def test_a_template_that_raises_refuses_that_request_alone(name: str, first: bool, tmp_path: Path) -> None:
    async def loop(episode: Any) -> None:
        messages: list[Any] = [SYSTEM, TASK]
        if not first:
            messages += [(await episode.chat(messages, train=True)).as_message(), user("And?")]
        for _ in range(2):
            with pytest.raises(BadInput, match="the chat template cannot write this history"):
                await episode.chat([*messages[:-1], user("fail")], train=True)
        turn = await episode.chat(messages, train=True)
        await episode.chat([*messages, turn.as_message(), user("Then?")], train=True)

    trajectory = await played(failing(RAISES[name]), loop, lambda _: "words", tmp_path / "run.db")
    assert len(trajectory.turns) == (2 if first else 3)
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    refused = [each for each in trajectory.requests if each.delivery is Delivery.REFUSED]
    assert [each.turn for each in refused] == [None, None]
    assert all("cannot write" in each.error for each in refused)


async def test_a_missing_result_of_mistral_nemo_refuses_that_request_alone(tmp_path: Path) -> None:
    entry = next(each for each in corpus() if each.name == "mistralai-Mistral-Nemo-Instruct-2407")

    async def loop(episode: Any) -> None:
        turn = await episode.chat([TASK], tools=[RUN])
        past = [TASK, turn.as_message(), result(turn, "a file")]
        for bad in ([*past[:2], user("Never mind.")], [TASK, user("Two in a row.")], [*past, system("Late.")]):
            with pytest.raises(BadInput, match="cannot write this history"):
                await episode.chat(bad, tools=[RUN])
        await episode.chat(past, tools=[RUN])

    chat_template = ChatTemplate(entry.text, name=entry.name, variables=VARIABLES)
    says = [Reply("", calls=[call("run", command="ls")]), "Done."]
    trajectory = await played(chat_template, loop, says, tmp_path / "run.db")
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    assert [each.delivery for each in trajectory.requests] == ["delivered", *["refused"] * 3, "delivered"]


async def test_tools_that_a_template_hides_refuse_that_request_alone(tmp_path: Path) -> None:
    async def loop(episode: Any) -> None:
        for choice in (None, "required", "none"):
            with pytest.raises(BadInput, match="does not show the tools to the model"):
                await episode.chat([SYSTEM, TASK], tools=[RUN], tool_choice=choice, train=True)
        await episode.chat([SYSTEM, TASK], train=True)

    trajectory = await played(template(PLAIN), loop, "words", tmp_path / "run.db")
    assert len(trajectory.turns) == 1


# --- system messages

ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message comes first') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
)
NO_ROWS = (
    "{% for m in messages %}{% if not loop.first and m.role == 'user' and messages[loop.index0 - 1].role == 'user' %}"
    "{{ raise_exception('two users in a row') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
)


async def test_the_option_for_system_messages_is_named_where_it_helps() -> None:
    async def refused(text: str, messages: list[Any]) -> str:
        why = []

        async def loop(episode: Any) -> None:
            with pytest.raises(BadInput) as raised:
                await episode.chat(messages, train=True)
            why.append(str(raised.value))
            await episode.chat([TASK], train=True)

        await played(template(text), loop, "words")
        return why[0]

    assert "system_as_user" not in await refused(NO_ROWS, [SYSTEM, TASK, user("Two in a row.")])
    assert "system_as_user=True" in await refused(ONE_SYSTEM, [SYSTEM, TASK, system("Late.")])
    takes_none = ONE_SYSTEM.replace(" and not loop.first", "")
    assert "system_as_user=True" in await refused(takes_none, [SYSTEM, TASK])


MISTRALS = ("mistralai-Mistral-Nemo-Instruct-2407", "mistralai-Mistral-7B-Instruct-v0.3")


@pytest.mark.parametrize("name", MISTRALS)
@pytest.mark.parametrize("as_user", [True, False])
async def test_system_message_may_change_while_a_result_is_last(name: str, as_user: bool, tmp_path: Path) -> None:
    """The templates then hide the system message. The refusal names the option that converts it to a user message."""
    (entry,) = [each for each in corpus() if each.name == name]
    chat_template = ChatTemplate(entry.text, name=entry.name, variables=VARIABLES)
    engine = recording([Reply("", calls=[call("run", command="ls")])] * 2 + ["Done."], template=chat_template)

    class Changes(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            ask = partial(self.episode.chat, tools=[RUN], train=True, system_as_user=as_user)
            turn = await ask([system("It is noon."), TASK])
            past = [TASK, turn.as_message(), result(turn, "ok")]
            if not as_user:
                with pytest.raises(BadInput, match=r"hides message 0 \(role system\).* serve\(system_as_user=True\)"):
                    await ask([system("It is one."), *past])
                await ask([system("It is noon."), *past])
                return
            turn = await ask([system("It is one."), *past])
            await ask([system("It is one."), *past, turn.as_message(), result(turn, "ok")])

    (trajectory,) = await play_all(Changes, engine, file=tmp_path / "run.db")
    assert trajectory.outcome is Outcome.COMPLETED, trajectory.error
    assert_exact(trajectory, engine)
    if as_user:
        assert verdicts(trajectory) == ["new", "edited", "append"]
        assert trajectory.segments[1].messages[0]["content"] == f"It is one.\n\n{TASK['content']}"
    else:
        assert [segment.cause for segment in trajectory.segments] == ["start"]


HIDING = (
    "{% if messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content }}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}" + OPENER
)


@pytest.mark.parametrize("text", [ONE_SYSTEM, HIDING], ids=["refusing", "hiding"])
@pytest.mark.parametrize("roles", ["system system", "system developer system", "developer developer"])
async def test_leading_system_messages_are_joined(text: str, roles: str, tmp_path: Path) -> None:
    begin = [{"role": role, "content": f"Rule {number}."} for number, role in enumerate(roles.split())]

    async def loop(episode: Any) -> None:
        turn = await episode.chat([*begin, TASK], train=True)
        await episode.chat([*begin, TASK, turn.as_message(), user("And?")], train=True)

    trajectory = await played(template(text), loop, ["one", "two"], tmp_path / "run.db")
    assert verdicts(trajectory) == ["new", "append"]
    assert trajectory.messages[0]["content"] == "\n\n".join(each["content"] for each in begin)
    assert all(Tolerated.SYSTEM_JOINED in each.tolerated for each in trajectory.requests)


async def test_leading_system_messages_stay_if_the_template_shows_all() -> None:
    async def loop(episode: Any) -> None:
        await episode.chat([system("One."), system("Two."), TASK], train=True)

    trajectory = await played("hermes", loop, ["one"])
    assert [each["role"] for each in trajectory.messages] == ["system", "system", "user", "assistant"]
    assert trajectory.requests[0].tolerated == ()


@pytest.mark.parametrize("text", [ONE_SYSTEM, HIDING], ids=["refusing", "hiding"])
async def test_a_late_system_message_is_refused_by_the_name_of_the_option(text: str) -> None:
    async def loop(episode: Any) -> None:
        turn = await episode.chat([SYSTEM, TASK], train=True)
        past = [SYSTEM, TASK, turn.as_message()]
        for bad in ([*past, system("Late."), user("And?")], [SYSTEM, TASK, system("Late.")]):
            with pytest.raises(BadInput, match=r"--system-as-user of `deltarunner serve` and `run --agent`"):
                await episode.chat(bad, train=True)
        await episode.chat([*past, user("And?")], train=True)

    trajectory = await played(template(text), loop, ["one", "two"])
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    assert len(trajectory.turns) == 2


async def test_a_system_message_is_a_users_where_a_template_takes_none(tmp_path: Path) -> None:
    async def loop(episode: Any) -> None:
        with pytest.raises(BadInput, match="--system-as-user"):
            await episode.chat([SYSTEM, TASK], train=True)
        turn = await episode.chat([SYSTEM, system("More."), TASK], train=True, system_as_user=True)
        past = [SYSTEM, system("More."), TASK, turn.as_message(), user("And?")]
        turn = await episode.chat([*past, system("Late.")], train=True, system_as_user=True)
        past += [system("Late."), turn.as_message(), user("Then?")]
        await episode.chat(past, train=True, system_as_user=True)

    trajectory = await played(template(NO_SYSTEM), loop, ["one", "two", "three"], tmp_path / "run.db")
    assert [segment.cause for segment in trajectory.segments] == ["start"]
    users = [each["content"] for each in trajectory.messages if each["role"] == "user"]
    assert users == [f"{SYSTEM['content']}\n\nMore.\n\n{TASK['content']}", "And?\n\nLate.", "Then?"]


@pytest.mark.parametrize(
    ("shown", "several"),
    [("messages", True), ("messages[:2] + messages[-1:]", False), ("messages[-1:]", False), ("messages[:1]", False)],
)
def test_several_system_messages_are_probed_with_three(shown: str, several: bool) -> None:
    text = f"{{% for m in {shown} %}}{{{{ '<|im_start|>' + m.role + m.content }}}}{{% endfor %}}"
    assert system_support(ChatTemplate(text, name="inline").renderer()).several is several


@pytest.mark.parametrize("entry", sweeps.part(corpus(), 40), ids=lambda each: each.name)
def test_leading_system_messages_reach_the_model_in_every_template(entry: Any) -> None:
    """The messages are joined if necessary: three are shown completely, like one."""
    renderer = entry.renderer()
    takes: SystemSupport = system_support(renderer)
    begin = [system(text) for text in ("zqonez", "zqtwoz", "zqthreez")]
    joined = begin if takes.several else [system("\n\n".join(each["content"] for each in begin))]
    for tools in ([], [RUN]) if is_tool_capable(entry) else ([],):
        try:
            alone = renderer.render([begin[0], TASK], tools=tools)
        except TemplateRaised:
            continue
        if "zqonez" in alone:
            text = renderer.render([*joined, TASK], tools=tools)
            places = [text.find(each["content"]) for each in begin]
            assert -1 not in places
            assert places == sorted(places)
