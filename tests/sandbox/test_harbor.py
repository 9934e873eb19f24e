"""Harbor tasks: folders, rewards, solutions, agent programs, and tasks that cannot be played."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import BadOption, BadTask, Outcome, RunFile, ScriptedEngine
from runner.cli import run
from runner.cli.app import app
from runner.interop import Harbor
from runner.interop.harbor import read_json
from runner.interop.harbor_tasks import read_task
from runner.testing import call, play_many_async
from tests.sandbox.harbor_folders import CONFIGURATION, IMAGE, START_KEEPER, TASKS, write_task, write_tasks
from tests.sandbox.test_episodes import AGENT

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]
real = pytest.mark.usefixtures("default_engine")

Command = Callable[..., tuple[int, str]]

SOLUTIONS = {
    "greeting": "echo hello >greeting.txt",
    "sum": "echo $((FIRST + 22)) >sum.txt",
    "server": START_KEEPER,
}


@pytest.fixture
def deltarunner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command line on a scripted engine that solves the tasks: its exit code, and its output."""

    def reply(model_call: Any) -> Any:
        name = next(name for name in TASKS if TASKS[name]["instruction.md"] in model_call.prompt)
        if SOLUTIONS[name] in model_call.prompt:
            return "done"
        return [call("bash", command=SOLUTIONS[name])]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(run.run_command, "__defaults__", (lambda settings: ScriptedEngine(reply),))

    def execute(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, arguments)
        below = capfd.readouterr()
        return done.exit_code, " ".join((done.output + below.out + below.err).split())

    return execute


async def played(folder: Path, replies: Any = "done", **options: Any) -> list[Any]:
    return await play_many_async(Harbor(str(folder), **options), ScriptedEngine(replies), breaker=1)


# --- episodes


@real
def test_check_plays_a_solution_and_no_action(deltarunner: Command, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", ("sum",))
    code, said = deltarunner("check", f"harbor:{tmp_path / 'tasks'}")
    assert code == 0, said
    assert "ok sum: solution 1, no action 0" in said
    assert "1 task, 0 wrong" in said


@real
@pytest.mark.whole
def test_check_plays_every_task_of_a_folder(deltarunner: Command, tmp_path: Path) -> None:
    code, said = deltarunner("check", f"harbor:{write_tasks(tmp_path / 'tasks')}")
    assert code == 0, said
    for name in TASKS:
        assert f"ok {name}: solution 1, no action 0" in said


@real
@pytest.mark.whole
def test_check_names_wrong_tasks(deltarunner: Command, tmp_path: Path) -> None:
    easy = {**TASKS["sum"], "tests/test.sh": "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n"}
    wrong = {**TASKS["greeting"], "solution/solve.sh": "#!/bin/sh\necho the cause >&2; exit 4\n"}
    write_task(tmp_path / "easy", easy)
    write_task(tmp_path / "wrong", wrong)
    write_task(tmp_path / "none", {k: v for k, v in TASKS["server"].items() if not k.startswith("solution")})
    code, said = deltarunner("check", "harbor:.")
    assert code == 3
    assert "error easy: solution 1, no action 1" in said
    assert "error wrong: solution -, no action 0" in said
    assert "/solution/solve.sh failed: the cause" in said
    assert "none: solution -, no action 0 the task has no solution/solve.sh" in said
    assert "3 tasks, 3 wrong" in said


@real
@pytest.mark.whole
def test_run_plays_a_folder_with_the_tool(deltarunner: Command, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", ("sum", "server"))
    code, said = deltarunner("run", f"harbor:{tmp_path / 'tasks'}", "--file", "tasks.db")
    assert code == 0, said
    with RunFile(Path("tasks.db")) as stored:
        trajectories = {each.task.id: each for each in stored.trajectories()}
    assert {name: each.reward for name, each in trajectories.items()} == {"sum": 1, "server": 1}
    assert trajectories["sum"].metrics == {"verifier.length": 2, "verifier.version": 3}
    assert trajectories["sum"].task.info["metadata"] == {"difficulty": "easy"}


@real
@pytest.mark.anyio
@pytest.mark.asyncio_alone
@pytest.mark.whole
async def test_an_agent_program_plays_a_task_inside(tmp_path: Path) -> None:
    build = f"FROM {IMAGE}\nCOPY agent /bin/agent\nRUN chmod 755 /bin/agent\n"
    tests = "#!/bin/sh\ngrep -c 42 answer.txt >/logs/verifier/reward.txt\n"
    write_task(
        tmp_path / "asked",
        {
            "instruction.md": "Ask.",
            "environment/Dockerfile": build,
            "environment/agent": AGENT,
            "tests/test.sh": tests,
        },
    )
    (trajectory,) = await played(tmp_path, "The answer is 42", agent="agent {prompt}")
    assert trajectory.reward == 1, trajectory.error
    assert len(trajectory.turns) == 1


# --- verifiers


@real
@pytest.mark.anyio
@pytest.mark.whole
async def test_a_verifier_without_a_reward_is_an_error_of_the_task(tmp_path: Path) -> None:
    scripts = {
        "none": "echo the cause",
        "prose": "echo 'looks good' >/logs/verifier/reward.txt",
        "nan": "echo NaN >/logs/verifier/reward.txt",
        "keys": 'echo \'{"a": 1, "b": 2}\' >/logs/verifier/reward.json',
    }
    for name, script in scripts.items():
        write_task(tmp_path / name, {"instruction.md": name, "tests/test.sh": f"#!/bin/sh\n{script}\n"})
    errors = {each.task.id: each for each in await played(tmp_path)}
    assert {each.outcome for each in errors.values()} == {Outcome.ENV_ERROR}
    assert "the verifier wrote no reward into /logs/verifier: the cause" in errors["none"].error
    assert "reward.txt holds no valid reward (its content is 'looks good', and not one" in errors["prose"].error
    assert "reward.txt holds no valid reward (its content is 'NaN'" in errors["nan"].error
    assert "none of its keys is 'reward': a, b" in errors["keys"].error


@real
@pytest.mark.anyio
@pytest.mark.whole
@pytest.mark.asyncio_alone
async def test_a_play_that_breaks_the_verifier_has_reward_0(tmp_path: Path) -> None:
    write_tasks(tmp_path, ("sum",))
    (trajectory,) = await played(tmp_path, [[call("bash", command="rm /bin/bash /bin/cat")], "done"])
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0)
    assert trajectory.metrics == {"verifier.broken": 1}


@real
@pytest.mark.anyio
@pytest.mark.whole
@pytest.mark.asyncio_alone
@pytest.mark.parametrize("broken", ["true", "rm /bin/sh", "rm /bin/rm", "rm /bin/rm; ln -s /bin/true /bin/rm"])
async def test_planted_rewards_and_tests_are_removed(tmp_path: Path, broken: str) -> None:
    write_tasks(tmp_path, ("sum",))
    plant = "mkdir -p /tests /logs/verifier; echo 1 >/logs/verifier/reward.txt; ln -s /tmp /tests/numbers.sh"
    (trajectory,) = await played(tmp_path, [[call("bash", command=f"{plant}; {broken}")], "done"])
    assert trajectory.reward == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "is not JSON"),
        ("1" * 400, "not a finite number"),
        ('{"a": true}', "a is True"),
        ("{}", "an object"),
    ],
    ids=["deep", "large", "bool", "empty"],
)
def test_an_odd_reward_file_is_refused(content: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_json(content)


# The program waits for the verifier of `FORGED`, so that its own reward would be read.
FORGER = "while :; do [ -e /tmp/verifying ] && echo 1 >/logs/verifier/reward.txt; sleep 0.05; done >/dev/null 2>&1 &"
FORGED = {
    "instruction.md": "Forge it.",
    "tests/test.sh": "#!/bin/bash\n>/tmp/verifying\n"
    "grep -q yes /solved && reward=1 || reward=0\necho $reward >/logs/verifier/reward.txt\n"
    "sleep 0.5\nrm /tmp/verifying\n",
    "solution/solve.sh": "#!/bin/sh\necho yes >/solved\n",
}


@real
@pytest.mark.anyio
@pytest.mark.parametrize("as_left", [False, pytest.param(True, marks=pytest.mark.whole)])
async def test_a_reward_forged_by_a_process_does_not_hold(tmp_path: Path, as_left: bool) -> None:
    write_task(tmp_path / "forged", FORGED)
    (trajectory,) = await played(tmp_path, [[call("bash", command=FORGER)], "done"], as_left=as_left)
    assert trajectory.reward == int(as_left), trajectory.error
    assert trajectory.metrics == ({} if as_left else {"verifier.first": 1})


FAKE = "printf '#!/bin/sh\\n' >/tmp/fake; chmod 755 /tmp/fake"
"""Shell commands that create a program which always succeeds, to put in the place of others."""


@real
@pytest.mark.anyio
@pytest.mark.whole
@pytest.mark.asyncio_alone
@pytest.mark.parametrize(
    "replace",
    [
        "mv /tmp/fake /bin/grep",
        "ln -sf /tmp/fake /bin/grep",
        "mkdir -p /usr/local/bin; mv /tmp/fake /usr/local/bin/grep",
        "mv /bin /b; /b/ln -s /b /bin; mv /tmp/fake /b/grep",
    ],
    ids=["file", "link", "earlier", "folder"],
)
async def test_a_replaced_program_cannot_forge_a_reward(tmp_path: Path, replace: str) -> None:
    write_task(tmp_path / "forged", FORGED)
    (trajectory,) = await played(tmp_path, [[call("bash", command=f"{FAKE}; {replace}")], "done"])
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 0), trajectory.error
    # A moved folder of programs may already break the verifier.
    assert trajectory.metrics in ({"verifier.first": 1}, {"verifier.broken": 1})


@real
@pytest.mark.anyio
@pytest.mark.whole
@pytest.mark.asyncio_alone
async def test_a_task_that_needs_its_server_keeps_its_reward(tmp_path: Path) -> None:
    write_tasks(tmp_path, ("server",))
    (trajectory,) = await played(tmp_path, [[call("bash", command=SOLUTIONS["server"])], "done"])
    assert (trajectory.reward, trajectory.metrics) == (1, {}), trajectory.error


@real
@pytest.mark.anyio
@pytest.mark.whole
async def test_a_health_check_is_waited_for(tmp_path: Path) -> None:
    command = "test $(cat /tmp/tries | wc -l) -ge 3 || {{ echo x >>/tmp/tries; exit 1; }}"  # fails three times
    check = f'[environment.healthcheck]\ncommand = "{command}"\n'
    configuration = CONFIGURATION + check + "interval_sec = 0.1\n{more}\n"
    image = f'docker_image = "{IMAGE}"'
    start = "retries = 1\nstart_period_sec = 900\nstart_interval_sec = 0.1"
    for name, more in {"three": "retries = 3", "four": "retries = 4", "start": start}.items():
        files = {**TASKS["sum"], "task.toml": configuration.format(image=image, more=more)}
        write_task(tmp_path / name, {**files, "tests/test.sh": "#!/bin/sh\necho 0 >/logs/verifier/reward.txt\n"})
    outcomes = {each.task.id: each for each in await played(tmp_path)}
    assert "the health check 'test $(cat" in outcomes["three"].error
    assert [outcomes["four"].reward, outcomes["start"].reward] == [0, 0], outcomes


# --- refusals


@pytest.mark.parametrize(
    ("change", "file", "needed"),
    [
        ("", "environment/docker-compose.yaml", "compose (docker-compose.yaml)"),
        ("custom_docker_compose = true", "", "compose (custom_docker_compose)"),
        ('network_mode = "allowlist"', "", "a network allow-list (network_mode)"),
        ("gpus = 1", "", "GPUs (gpus)"),
        ('os = "windows"', "", "windows (os)"),
        ('skills_dir = "/skills"', "", "skills (skills_dir)"),
        ('[[environment.mcp_servers]]\nname = "x"', "", "MCP servers (mcp_servers)"),
        ('[[steps]]\nname = "one"', "", "several steps (steps)"),
        ('[verifier]\nenvironment_mode = "separate"', "", "a separate verifier (environment_mode)"),
        ('[[verifier.collect]]\ncommand = "x"', "", "commands before the verifier (collect)"),
        ('[agent]\nnetwork_mode = "no-network"', "", "another network for the agent (agent.network_mode)"),
        ('[verifier]\nnetwork_mode = "allowlist"', "", "another network for the verifier (verifier.network_mode)"),
        ("", "trajectory.json", "an earlier conversation (trajectory.json)"),
        ("memroy_mb = 8192", "", "an unknown field (environment.memroy_mb)"),
        ("[sandbox]", "", "an unknown field (sandbox)"),
    ],
)
def test_unsupported_tasks_are_refused_by_name(tmp_path: Path, change: str, file: str, needed: str) -> None:
    head = f'[environment]\ndocker_image = "{IMAGE}"\n'
    write_task(tmp_path / "odd", {"task.toml": head + change, **({file: "x"} if file else {}), **_small()})
    write_task(tmp_path / "good", _small())
    with pytest.raises(BadTask) as refused:
        Harbor(str(tmp_path)).tasks()
    assert f"1 of 2 tasks need unsupported features: odd needs {needed}" in str(refused.value)
    assert "--set skip_unsupported=true" in str(refused.value)
    assert [task.id for task in Harbor(str(tmp_path), skip_unsupported=True).tasks()] == ["good"]


def test_a_phase_may_name_the_network_of_the_environment(tmp_path: Path) -> None:
    head = f'[environment]\ndocker_image = "{IMAGE}"\n'
    for own, mode in (("allow_internet = false", "no-network"), ("", "public")):
        phases = f'{own}\n[agent]\nnetwork_mode = "{mode}"\n[verifier]\nnetwork_mode = "{mode}"\n'
        write_task(tmp_path, {"task.toml": head + phases, **_small()})
        assert read_task(tmp_path).options.network == ("none" if own else "internet")


def test_storage_is_a_limit_only_if_it_is_asked_for(tmp_path: Path) -> None:
    for field, size in (("storage_mb = 300", 300), ('storage = "2G"', 2048), ("", None)):
        text = f'[environment]\ndocker_image = "{IMAGE}"\n{field}\n'
        write_task(tmp_path, {"task.toml": text, **_small()})
        assert [read_task(tmp_path, storage=each).options.disk_mb for each in (False, True)] == [None, size]


def _small() -> dict[str, str]:
    return {"instruction.md": "Do it.", "tests/test.sh": "#!/bin/sh\n"}


def test_a_refused_folder_ends_the_command_before_anything(deltarunner: Command, tmp_path: Path) -> None:
    write_task(tmp_path / "odd", {"task.toml": "[environment]\ngpus = 2\n", **_small()})
    code, said = deltarunner("run", "harbor:odd")
    assert code == 4
    assert "odd needs GPUs (gpus)" in said
    code, said = deltarunner("run", "harbor:nothing")
    assert code == 2
    assert "harbor:nothing: there is no task.toml in this folder" in said
    write_task(tmp_path / "good", _small())
    code, said = deltarunner("run", "harbor:good", "--agent", "x {prompt}", "--copy", ".")
    assert code == 2
    assert "--copy and harbor:good: a Harbor task has its own sandbox and check" in said
    assert "the command must contain {prompt}" in deltarunner("run", "harbor:good", "--agent", "x")[1]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[environment\n", "task.toml cannot be read"),
        ("environment = 3\n", "environment is 3; it must be a table"),
        ("[environment]\n", "neither docker_image in [environment] nor environment/Dockerfile exists: add one"),
        (f'[environment]\ndocker_image = "{IMAGE}"\nmemory = "much"\n', "memory = 'much': give a size such as '2G'"),
        (
            f'[environment]\ndocker_image = "{IMAGE}"\n[agent]\ntimeout_sec = -1\n',
            "timeout_sec = -1: give a number above",
        ),
        (
            f'[environment]\ndocker_image = "{IMAGE}"\n[verifier.env]\nKEY = "${{NO_SUCH_VARIABLE}}"\n',
            "NO_SUCH_VARIABLE",
        ),
    ],
    ids=["syntax", "table", "image", "size", "time", "variable"],
)
def test_a_bad_task_file_names_the_folder_and_the_fix(tmp_path: Path, text: str, said: str) -> None:
    write_task(tmp_path, {"task.toml": text, **_small()})
    with pytest.raises(BadTask, match=r"task\.toml|NO_SUCH") as refused:
        read_task(tmp_path)
    assert said in str(refused.value)


def test_fields_of_a_task_file_become_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_TOKEN", "secret")
    text = f"""schema_version = "1.1"
[task]
name = "org/name"
[agent]
timeout_sec = 5
user = "model"
[verifier]
timeout_sec = 7
[environment]
docker_image = "{IMAGE}"
cpus = 2
memory = "1.5G"
workdir = "/srv"
allow_internet = false
build_timeout_sec = 9
env = {{ TOKEN = "${{TEST_TOKEN}}", MODE = "${{TEST_MODE:-fast}}" }}
"""
    task = read_task(write_task(tmp_path, {"task.toml": text, **_small()}))
    options = task.options
    assert (options.image, options.cpus, options.memory_mb, options.workdir) == (IMAGE, 2, 1536, "/srv")
    assert (options.network, options.build_seconds, options.env) == ("none", 9, {"TOKEN": "secret", "MODE": "fast"})
    assert (task.agent_seconds, task.agent_user, task.verifier_seconds, task.verifier_user) == (5, "model", 7, "0")
    assert task.metadata["task"] == {"name": "org/name"}


def test_a_folder_without_tasks_or_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"there is no task\.toml in this folder or below it"):
        Harbor(str(tmp_path)).tasks()
    (tmp_path / "task.toml").write_text("")
    with pytest.raises(BadTask, match=r"has no instruction\.md"):
        read_task(tmp_path)
