"""Sandboxes in episodes: the terminal environment, and agent programs inside sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from runner import BadEnvironment, BadOption, Environment, Limits, Outcome, Sandbox, ScriptedEngine, Task, reward, tool
from runner.interop import SandboxedProgram, Terminal
from runner.sandbox.container import ContainerSandbox
from runner.testing import call, no_leaks, play_many_async
from tests.sandbox.engines import IMAGE_FOLDER, remove_command

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("default_engine")]

TASKS = [Task(id="file", prompt="Write 42 to answer.txt.")]
CHECK = "test $(cat answer.txt) = 42"


def terminal(**options: Any) -> Terminal:
    return Terminal(str(IMAGE_FOLDER), **{"check": CHECK, "memory_mb": 64, "processes": 32, **options})


async def played(replies: Any, environment: Any = None, tasks: Any = TASKS, **options: Any) -> list[Any]:
    environment = environment or terminal()
    return await play_many_async(environment, ScriptedEngine(replies), tasks=tasks, breaker=1, **options)


def results(trajectory: Any) -> list[str]:
    return [str(each["content"]) for each in trajectory.messages if each["role"] == "tool"]


async def test_a_terminal_plays_and_its_check_decides(default_engine: str) -> None:
    tasks = [*TASKS, Task(id="other", prompt="Do nothing.", info={"check": "test ! -e answer.txt"})]
    with no_leaks():
        first, other = await played([[call("bash", command="echo 42 >answer.txt; ls; false")], "done"], tasks=tasks)
    assert results(first) == ["answer.txt\n[code 1]"]
    assert (first.reward, other.reward) == (1, 0)


@pytest.mark.whole
async def test_a_model_that_breaks_its_sandbox_is_scored() -> None:
    replies = [[call("bash", command="rm /bin/sh /bin/bash")], [call("bash", command="ls")], "done"]
    (trajectory,) = await played(replies)
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0)
    assert "not found" in results(trajectory)[1]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param("echo >/scratch", marks=pytest.mark.whole),
        "ln -s /scratch /scratch",
        pytest.param("mkdir /tmp/etc; mv /etc/* /tmp/etc; rm -r /lib /usr", marks=pytest.mark.whole),
    ],
    ids=["file", "loop", "system"],
)
async def test_a_damaged_working_folder_is_scored(damage: str) -> None:
    commands = [f"cd /; rm -r /scratch; {damage}", "echo next", "echo last"]
    replies = [*([call("bash", command=command)] for command in commands), "done"]
    (trajectory,) = await played(replies, limits=Limits(turns=5))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0), trajectory.error
    assert [text for text in results(trajectory)[1:] if "[code " not in text] == []


@pytest.mark.parametrize("as_left", [False, pytest.param(True, marks=pytest.mark.whole)])
async def test_a_check_uses_the_programs_of_the_image(as_left: bool) -> None:
    fake = "printf '#!/bin/sh\\n' >/tmp/fake; chmod 755 /tmp/fake; mv /tmp/fake /bin/test"
    replies = [[call("bash", command=fake)], "done"]
    environment = terminal(check="/bin/test -e answer.txt", as_left=as_left)
    (trajectory,) = await played(replies, environment)
    assert trajectory.reward == int(as_left), trajectory.error


@pytest.mark.whole
async def test_a_user_of_the_model_is_not_that_of_the_check() -> None:
    replies = [[call("bash", command="id -un >/tmp/answer.txt; rm /bin/ls")], "done"]
    environment = terminal(check='test "$(cat /tmp/answer.txt) $(id -u)" = "model 0"', user="model")
    (trajectory,) = await played(replies, environment)
    assert trajectory.reward == 1, results(trajectory)
    assert "Permission denied" in results(trajectory)[0]


async def test_a_sandbox_removed_from_outside_is_an_error(default_engine: str) -> None:
    class Removed(Terminal):
        @tool
        async def remove(self) -> str:
            """Remove the container from outside."""
            assert isinstance(self.sandbox, ContainerSandbox)
            await anyio.run_process(remove_command(default_engine, self.sandbox.name))
            return "removed"

    def reply(model_call: Any) -> Any:
        if "Break" in model_call.prompt and "removed" not in model_call.prompt:
            return [call("remove")]
        return [call("bash", command="echo 42 >answer.txt")] if "answer.txt\n" not in model_call.prompt else "done"

    tasks = [*TASKS, Task(id="broken", prompt="Break it.")]
    environment = Removed(str(IMAGE_FOLDER), CHECK, memory_mb=64)
    good, broken = await played(reply, environment, tasks, limits=Limits(turns=2))
    assert broken.outcome is Outcome.ENV_ERROR
    assert "SandboxGone: sandbox deltarunner-" in broken.error
    assert good.outcome is not Outcome.ENV_ERROR
    assert good.reward == 1


@pytest.mark.whole
async def test_a_terminal_without_image_or_check_is_refused() -> None:
    with pytest.raises(Exception, match="is not on this machine and cannot be pulled") as caught:
        await played("done", Terminal("localhost/none:1", "true"))
    assert type(caught.value).__name__ == "SandboxFailed"
    (trajectory,) = await played("done", terminal(check=""))
    assert "task 'file' has no check" in trajectory.error
    with pytest.raises(BadOption, match="network='host'"):
        terminal(network="host")
    with pytest.raises(BadEnvironment, match="upload='none': this is not an existing folder: give an existing folder"):
        terminal(upload="none")
    with pytest.raises(BadEnvironment, match="this is not an existing folder"):
        terminal(upload=__file__)
    with pytest.raises(Exception, match="unable to find user no-such-user"):
        await played("done", terminal(user="no-such-user"))


class Own(Environment):
    """An author's environment with a sandbox."""

    limits = Limits(turns=4)
    options: ClassVar[dict[str, Any]] = {"memory_mb": 64}
    sandbox: Sandbox

    def tasks(self) -> list[Task]:
        return TASKS

    async def setup(self) -> None:
        self.sandbox = await self.episode.sandbox(IMAGE_FOLDER, **self.options)

    @reward
    async def right(self) -> bool:
        return (await self.sandbox.exec(["true"])).ok


@pytest.mark.whole
async def test_wrong_uses_of_a_sandbox_name_the_fix() -> None:
    class Unknown(Own):
        options: ClassVar[dict[str, Any]] = {"memory": 64}

    (trajectory,) = await played("done", Unknown())
    assert "sandbox(memory): unknown option; the options are image, memory_mb, cpus" in trajectory.error

    class Late(Own):
        async def setup(self) -> None:
            pass

        @tool
        async def open(self) -> str:
            """Open it too late."""
            await self.episode.sandbox(IMAGE_FOLDER)
            return ""

    (trajectory,) = await played([[call("open")], "done"], Late())
    assert "can be entered in setup() only" in trajectory.error


# --- agent programs inside

AGENT = """#!/bin/bash
# A program of the image: it asks the model once, over HTTP, and looks for other ways out.
body='{"model": "m", "messages": [{"role": "user", "content": "'$1'"}], "tools": [{"type": "function", "function":
{"name": "write", "parameters": {"type": "object", "properties": {}}}}]}'
host=${OPENAI_BASE_URL#http://}; path=/${host#*/}; host=${host%%/*}
exec 3<>/dev/tcp/${host/:/\\/}
printf 'POST %s/chat/completions HTTP/1.1\\r\\nHost: %s\\r\\nContent-Type: application/json\\r\\n' "$path" "$host" >&3
printf 'Content-Length: %d\\r\\nConnection: close\\r\\n\\r\\n%s' ${#body} "$body" >&3
answer=$(cat <&3)
case $answer in *'The answer is 42'*) echo 42 >answer.txt ;; *) echo "$answer" >&2; exit 9 ;; esac
for other in 127.0.0.1/22 127.0.0.1/1 192.0.2.1/80; do
  (exec 4<>/dev/tcp/$other) 2>/dev/null && exit 8
done
[ -d "$HOME/.codex" ] && [ -w "$TMPDIR" ]
"""


@pytest.mark.asyncio_alone
async def test_a_program_inside_reaches_its_endpoint_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text(AGENT)
    (tmp_path / "agent").chmod(0o755)
    environment = SandboxedProgram(
        "./agent {prompt}", str(IMAGE_FOLDER), "sh -c 'test $(cat answer.txt) = 42'", copy=str(tmp_path), memory_mb=64
    )
    tasks = [Task(id=str(number), prompt=f"Question {number}?") for number in range(2)]
    for trajectory in await played("The answer is 42", environment, tasks):
        assert trajectory.reward == 1, trajectory.error
        assert len(trajectory.turns) == 1
        assert trajectory.turns[0].token_ids


@pytest.mark.whole
@pytest.mark.asyncio_alone
async def test_a_user_of_the_program_is_not_that_of_the_check(tmp_path: Path) -> None:
    (tmp_path / "agent").write_text(AGENT.replace("answer.txt", "/tmp/answer.txt; id -un >/tmp/user.txt"))
    (tmp_path / "agent").chmod(0o755)
    check = """sh -c 'test "$(echo $(cat /tmp/answer.txt /tmp/user.txt) $(id -u))" = "42 model 0"'"""
    environment = SandboxedProgram(
        "./agent {prompt}", str(IMAGE_FOLDER), check, copy=str(tmp_path), memory_mb=64, user="model"
    )
    (trajectory,) = await played("The answer is 42", environment)
    assert trajectory.reward == 1, trajectory.error


@pytest.mark.whole
@pytest.mark.asyncio_alone
async def test_a_program_that_fails_inside_shows_its_errors() -> None:
    environment = SandboxedProgram("bash -c 'echo the cause >&2; exit 5' {prompt}", str(IMAGE_FOLDER), memory_mb=64)
    (trajectory,) = await played("x", environment)
    assert trajectory.outcome is Outcome.ENV_ERROR
    assert "bash ended with code 5: the cause" in trajectory.error


def test_bad_programs_are_refused_before_any_sandbox() -> None:
    with pytest.raises(BadOption, match="give one of them"):
        SandboxedProgram("x {prompt}", "image", wrap="bwrap")
    with pytest.raises(BadEnvironment, match="the command must contain"):
        SandboxedProgram("x", "image")
