"""Programs that an episode runs: their environment, their exit, and the end of all their processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import BadOption, Conversation, Endpoint, FinishedProgram, Limits, Outcome, Run, Sampling
from runner.endpoint import endpoint as endpoint_module
from runner.endpoint import programs
from runner.testing import ScriptedEngine
from tests.endpoint.serving import served
from tests.playing import Plain, until

pytestmark = [
    pytest.mark.sample_functions(2),
    pytest.mark.asyncio_alone,
    pytest.mark.anyio,
    pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc"),
    pytest.mark.slow,
]

ASKS = """
import json, os, sys, urllib.request
def ask(text):
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "tools": [
        {"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", ASKS + code]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def numbered(pid: int) -> bool:
    """True if a process has this number, including one that has ended and whose exit code was not read."""
    return Path(f"/proc/{pid}").exists()


async def ended(*pids: int) -> None:
    await until(lambda: not any(map(alive, pids)))


async def pids_in(folder: Path, count: int) -> list[int]:
    """The process ids that programs have written into files."""
    await until(lambda: len(_pids(folder)) == count)
    return _pids(folder)


def _pids(folder: Path) -> list[int]:
    return [int(text) for file in folder.glob("*.pid") if (text := file.read_text()).isdigit()]


async def ran(code: str, says: Any = ("Done.",), **options: Any) -> tuple[FinishedProgram, Any]:
    kept: list[FinishedProgram] = []

    async def loop(endpoint: Endpoint) -> None:
        kept.append(await endpoint.run(python(code)))

    (trajectory,) = await served(loop, list(says), **options)
    return kept[0], trajectory


async def test_program_finds_the_endpoint_by_its_variables() -> None:
    finished, trajectory = await ran("print(ask('One.'))")
    assert (finished.returncode, finished.stdout) == (0, "Done.\n")
    assert [turn.text for turn in trajectory.turns] == ["Done."]


async def test_a_program_gets_a_clean_environment_and_a_home_of_its_own(monkeypatch: Any) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "of the house")
    monkeypatch.setenv("OPENAI_API_KEY", "of the house")
    finished, _ = await ran(
        "ask('One.'); print(os.environ); print(os.getcwd()); print(sorted(os.listdir(os.environ['HOME'])))"
    )
    assert "of the house" not in finished.stdout
    home = finished.stdout.splitlines()[1]
    assert home != os.environ.get("HOME")
    assert ".codex" in finished.stdout.splitlines()[2]
    await until(lambda: not Path(home).exists())  # the home is removed with the episode


TEMPORARY = "; ".join(
    (
        "import json, tempfile",
        "file = tempfile.mkstemp()[1]",
        "print(json.dumps([file, os.environ['HOME'], *map(os.environ.get, ('TMPDIR', 'TMP', 'TEMP'))]))",
    )
)


async def temporary(env: dict[str, str]) -> Any:
    """Return the temporary file of a program, its home, and its variables TMPDIR, TMP and TEMP."""
    kept: list[Any] = []

    async def loop(endpoint: Endpoint) -> None:
        finished = await endpoint.run(python(f"ask('One.'); {TEMPORARY}"), env=env)
        kept.append(json.loads(finished.stdout))

    await served(loop, ["Done."])
    return kept[0]


async def test_temporary_files_are_deleted_with_the_programs_home(monkeypatch: Any) -> None:
    monkeypatch.setenv("TMP", "/of/the/house")
    file, home, *folders = await temporary({})
    assert Path(file).is_relative_to(home)
    assert folders == [str(Path(file).parent)] * 3, "programs differ in the variable that they read first"
    await until(lambda: not Path(file).exists())


@pytest.mark.parametrize("name", ["TMPDIR", "TMP", "TEMP"])
async def test_given_folder_for_temporary_files_replaces_the_default(name: str, tmp_path: Path) -> None:
    file, _, *folders = await temporary({name: str(tmp_path)})
    assert Path(file).parent == tmp_path
    assert [each for each in folders if each] == [str(tmp_path)], "no folder of ours comes before it"


async def test_processes_that_a_program_leaves_running_end_with_it(tmp_path: Path) -> None:
    """The program leaves its process group running, and a process that has left the group."""
    code = f"""
ask("One.")
import subprocess
folder = {str(tmp_path)!r}
write = f"import os, time; open(f'{{folder}}/{{{{os.getpid()}}}}.pid', 'w').write(str(os.getpid())); time.sleep(600)"
for apart in (False, True):
    subprocess.Popen([sys.executable, "-c", write], start_new_session=apart)
import time, glob
while len([f for f in glob.glob({str(tmp_path)!r} + "/*.pid") if open(f).read()]) < 2: time.sleep(0.01)
"""
    await ran(code)
    await ended(*await pids_in(tmp_path, 2))


async def test_a_program_that_ignores_sigterm_and_forks_is_ended_by_a_limit(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(programs, "TERMINATE_GRACE_SECONDS", 0.1)
    code = f"""
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ask("One.")
os.fork()
open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").write(str(os.getpid()))
time.sleep(600)
"""

    async def loop(endpoint: Endpoint) -> None:
        await endpoint.run(python(code))

    (trajectory,) = await served(loop, ["Done."], outcome=Outcome.TIME_LIMIT, limits=Limits(seconds=2), breaker=1)
    assert [turn.text for turn in trajectory.turns] == ["Done."], "the earlier turn is kept"
    await ended(*await pids_in(tmp_path, 2))


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("descriptors", [True, False], ids=["by descriptor", "by a thread"])
@pytest.mark.parametrize("late", [False, True], ids=["ends", "is ended"])
async def test_group_is_signalled_while_its_leader_holds_its_process_id(
    descriptors: bool, late: bool, monkeypatch: Any
) -> None:
    """After that, another process group may have this number and would receive the signal."""
    held: dict[signal.Signals, bool] = {}
    kill = os.killpg

    def killpg(pid: int, number: int) -> None:
        pids.add(pid)
        held[signal.Signals(number)] = numbered(pid)
        kill(pid, number)

    pids = set[int]()
    monkeypatch.setattr(os, "killpg", killpg)
    if not descriptors:
        monkeypatch.delattr(os, "pidfd_open")

    async def loop(endpoint: Endpoint) -> None:
        code = f"import time; print(os.getpid(), flush=True); ask('One.'); time.sleep({600 * late})"
        finished = await endpoint.run(python(code))
        pids.add(int(finished.stdout))

    if late:
        await served(loop, ["Done."], outcome=Outcome.TIME_LIMIT, limits=Limits(seconds=2), breaker=1)
        assert held == {signal.SIGTERM: True, signal.SIGKILL: True}
    else:
        await served(loop, ["Done."])
        assert held == {signal.SIGKILL: True}
    (pid,) = pids
    assert not numbered(pid), "no process of the program is left"


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("ends", ["limit", "time", "cancelled"])
async def test_process_group_of_a_program_ends_with_its_episode(ends: str, tmp_path: Path, monkeypatch: Any) -> None:
    """The limit is ten times the promised time. test_interrupted has Ctrl-C on a process."""
    monkeypatch.setattr(programs, "TERMINATE_GRACE_SECONDS", 0.1)
    monkeypatch.setattr(endpoint_module, "END_GRACE_SECONDS", 0.1)
    code = f"""
import signal, time, urllib.error
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ask("One.")
os.fork()
open({str(tmp_path)!r} + f"/{{os.getpid()}}.pid", "w").write(str(os.getpid()))
try: ask("Two.")
except urllib.error.HTTPError: pass
time.sleep(600)
"""

    class Served(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            async with self.episode.serve() as endpoint:
                await endpoint.run(python(code))

    limits = {"limit": Limits(turns=1), "time": Limits(seconds=3), "cancelled": Limits(seconds=600)}[ends]
    pids: list[int] = []

    async def watch(run: Run) -> None:
        pids.extend(await pids_in(tmp_path, 2))
        assert len(set(map(os.getpgid, pids))) == 1
        if ends == "cancelled":
            run.cancel()

    outcomes = []
    with anyio.fail_after(50):
        async with (
            Run(Served(), ScriptedEngine(lambda _: "Done."), limits=limits, breaker=1) as run,
            anyio.create_task_group() as watching,
        ):
            watching.start_soon(watch, run)
            outcomes += [trajectory.outcome async for trajectory in run]
            assert len(pids) == 2
            await ended(*pids)
    expected = {"limit": Outcome.TURN_LIMIT, "time": Outcome.TIME_LIMIT, "cancelled": Outcome.CANCELLED}
    assert set(outcomes) == {expected[ends]}


async def test_crashed_program_is_env_error_with_its_last_lines() -> None:
    async def loop(endpoint: Endpoint) -> None:
        await endpoint.run(python("ask('One.'); raise SystemExit('no file to mend')"))

    (trajectory,) = await served(loop, ["Done."], outcome=Outcome.ENV_ERROR, breaker=1)
    assert "ended with code 1: no file to mend" in trajectory.error
    assert trajectory.reward is None
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ({"sampling": Sampling(max_tokens=3)}, Outcome.TOKEN_LIMIT),
        ({"limits": Limits(context=440)}, Outcome.CONTEXT_LIMIT),
    ],
    ids=["at max_tokens", "at the end of the context"],
)
async def test_program_that_fails_after_a_cut_turn_is_not_an_error(options: dict[str, Any], outcome: Outcome) -> None:
    """Codex fails in this way, and the cut was a limit of ours."""

    async def loop(endpoint: Endpoint) -> None:
        finished = await endpoint.run(python("ask('One.'); sys.exit(1)"))
        assert finished.returncode == 1

    (trajectory,) = await served(loop, ["A long answer. " * 20], outcome=outcome, **options)
    assert trajectory.reward is not None


async def test_exit_code_is_ignored_without_a_check() -> None:
    async def loop(endpoint: Endpoint) -> None:
        finished = await endpoint.run(python("ask('One.'); sys.exit(3)"), check=False)
        assert (finished.returncode, finished.ok) == (3, False)

    await served(loop, ["Done."])


async def test_program_has_ten_seconds_after_the_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(endpoint_module, "END_GRACE_SECONDS", 0.2)
    code = """
import time
ask("One.")
try:
    ask("Two.")
except urllib.error.HTTPError as error:
    print(error.code, flush=True)
time.sleep(600)
"""

    async def loop(endpoint: Endpoint) -> None:
        await endpoint.run(python(code))

    (trajectory,) = await served(loop, ["Done."], outcome=Outcome.TURN_LIMIT, limits=Limits(turns=1))
    assert len(trajectory.turns) == 1


async def test_program_that_fails_after_the_episode_is_not_an_error() -> None:
    async def loop(endpoint: Endpoint) -> None:
        finished = await endpoint.run(python("ask('One.'); ask('Two.')"))
        assert finished.returncode == 1
        assert endpoint.over

    (trajectory,) = await served(loop, ["Done."], outcome=Outcome.TURN_LIMIT, limits=Limits(turns=1))
    assert len(trajectory.turns) == 1


async def test_wrapping_command_is_put_before_the_program() -> None:
    async def loop(endpoint: Endpoint) -> None:
        finished = await endpoint.run(python("print(ask('One.'))"), wrap=["env", "WRAPPED=yes"])
        assert finished.stdout == "Done.\n"
        assert finished.argv[:2] == ["env", "WRAPPED=yes"]

    await served(loop, ["Done."])


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    ("argv", "cwd", "named"),
    [
        (["no-such-program"], None, "no-such-program"),
        (["/dev/null"], None, "'/dev/null' is neither a program on PATH nor the path of"),
        ([], None, r"run\(\[\]\)"),
        ([sys.executable], "/no/such/folder", "/no/such/folder"),
        ("mini -y", None, "give a list of strings, such as"),
        ([sys.executable, 3], None, "not of int"),
        ([sys.executable, "x" * 200_000], None, "cannot start it .Argument list too long"),
        ([sys.executable, "a\0b"], None, "cannot start it .embedded null byte"),
        ([sys.executable, "\ud800"], None, "cannot start it .*surrogates"),
    ],
    ids=range(9),
)
async def test_invalid_program_or_folder_is_refused_by_name(argv: Any, cwd: Any, named: str) -> None:
    async def loop(endpoint: Endpoint) -> None:
        with pytest.raises(BadOption, match=named):
            await endpoint.run(argv, cwd=cwd)
        await endpoint.run(python("ask('One.')"))

    await served(loop, ["Done."])


async def test_program_path_is_relative_to_its_folder_then_to_ours(tmp_path: Path, monkeypatch: Any) -> None:
    for folder in ("ours", "its"):
        (tmp_path / folder).mkdir()
        script = tmp_path / folder / "agent.sh"
        script.write_text(f"#!/bin/sh\necho {folder}\n")
        script.chmod(0o755)
    monkeypatch.chdir(tmp_path / "ours")

    async def loop(endpoint: Endpoint) -> None:
        assert (await endpoint.run(["./agent.sh"], cwd=tmp_path / "its")).stdout == "its\n"
        assert (await endpoint.run(["./agent.sh"], cwd=tmp_path)).stdout == "ours\n"
        await endpoint.run(python("ask('One.')"))

    await served(loop, ["Done."])


async def test_programs_of_one_episode_run_side_by_side_and_each_ends_alone(tmp_path: Path) -> None:
    """The remaining processes of a program end with it, and another program is not one of them."""
    ends = tmp_path / "ends"

    async def loop(endpoint: Endpoint) -> None:
        async def long() -> None:
            code = f"import time\nwhile not os.path.exists({str(ends)!r}): time.sleep(0.01)\nprint(ask('One.'))"
            assert (await endpoint.run(python(code))).stdout == "Done.\n"

        async with anyio.create_task_group() as group:
            group.start_soon(long)
            await endpoint.run(python("ask('Two.')"))
            ends.touch()

    await served(loop, ["Done.", "Done."])


async def test_environment_variable_that_is_not_text_is_refused() -> None:
    async def loop(endpoint: Endpoint) -> None:
        with pytest.raises(BadOption, match="cannot start it"):
            await endpoint.run([sys.executable], env={"PORT": 80})  # type: ignore[dict-item]  # the tested mistake
        await endpoint.run(python("ask('One.')"))

    await served(loop, ["Done."])


AGAIN = """
import subprocess, sys
while True:
    subprocess.run([sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w'); time.sleep(600)", sys.argv[1]])
"""


async def test_processes_that_restart_their_children_end_with_the_program(tmp_path: Path) -> None:
    """The processes have left the group, and each starts its child again when it is killed."""
    code = f"""
ask("One.")
import subprocess, time
for number in range(4):
    subprocess.Popen([sys.executable, "-c", {AGAIN!r}, f"{tmp_path}/{{number}}"], start_new_session=True)
while len(os.listdir({str(tmp_path)!r})) < 4: time.sleep(0.01)
"""
    await ran(code)
    assert not _commands_with(str(tmp_path))


def _commands_with(word: str) -> list[str]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            found.append(file.read_bytes().decode("utf-8", "replace"))
    return [each for each in found if word in each]


async def test_home_that_a_program_replaced_by_a_file_is_not_an_error() -> None:
    await ran(
        "ask('One.'); import shutil; home = os.environ['HOME']; os.chdir('/'); shutil.rmtree(home); open(home, 'w')"
    )


async def test_only_the_end_of_what_a_program_prints_is_kept() -> None:
    finished, _ = await ran("ask('One.')\nfor n in range(100000): print('line', n)")
    assert len(finished.stdout) <= programs.MAX_OUTPUT_BYTES
    assert finished.stdout.endswith("line 99999\n")


async def test_programs_of_many_episodes_are_each_answered_by_their_own(tmp_path: Path) -> None:
    from tests.playing import Plain, play_all

    class Many(Plain):
        def tasks(self) -> Any:
            from runner import Task

            return [Task(id=f"t{n}", prompt=f"Number {n}") for n in range(6)]

        async def rollout(self, conversation: Any) -> None:
            async with self.episode.serve() as endpoint:
                finished = await endpoint.run(python(f"print(ask({self.task.prompt!r}))"))
                assert finished.stdout.strip() == f"You said {self.task.prompt}"

    def said(model_call: Any) -> str:
        number = model_call.prompt.rpartition("Number ")[2][0]
        return f"You said Number {number}"

    trajectories = await play_all(Many, ScriptedEngine(said))
    assert [each.outcome for each in trajectories] == [Outcome.COMPLETED] * 6, [each.error for each in trajectories]
