"""Wrong tasks are found before an engine starts and before a run file is created."""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import anyio
import pytest

from runner import (
    BadOption,
    BadTask,
    Concurrency,
    Environment,
    Run,
    RunFile,
    ScriptedEngine,
    Task,
    Trajectory,
    reward,
)
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.environment.loading import find_environment
from tests.playing import Plain, until_end

ONE = Concurrency(episodes=1)
GOOD = '{"id": "a", "prompt": "hello"}'


class NeverStarted(ScriptedEngine):
    """An engine that must not be entered."""

    async def __aenter__(self) -> Self:
        raise AssertionError("the engine was started")


FILES: dict[str, tuple[bytes | None, str]] = {
    "missing": (None, "is not an existing file; give a JSONL file"),
    "empty": (b"", "has no task: write one JSON object per line"),
    "blank lines": (b"\n  \n\n", "has no task"),
    "not JSON": (f"{GOOD}\nhello\n".encode(), r"tasks.jsonl:2: not JSON"),
    "cut": (GOOD.encode()[:-3], r"tasks.jsonl:1: not JSON"),
    "a list over lines": (f"[\n{GOOD},\n{GOOD}\n]\n".encode(), r":1: not JSON .*without a list around them"),
    "a list in a line": (f"[{GOOD}]\n".encode(), r":1: a task is a JSON object, got list; .*without a list"),
    "an object over lines": (b'{\n"id": "a"\n}\n', r":1: not JSON .*on its own line"),
    "a number": (b"3\n", r":1: a task is a JSON object, got int"),
    "missing prompt": (b'{"id": "a"}\n', r":1: task 'a' has no prompt, and the environment writes none"),
    "empty prompt": (b'{"id": "a", "prompt": ""}\n', r":1: task 'a' has no prompt"),
    "missing id": (
        f'{GOOD}\n{{"prompt": "x"}}\n'.encode(),
        r':2: \'id\' is missing: each line needs at least {"id": ...}',
    ),
    "duplicate id": (f"{GOOD}\n\n{GOOD}\n".encode(), r":3: line 1 has the same id 'a'"),
    "empty id": (b'{"id": "", "prompt": "x"}\n', r":1: a task has no id \(prompt 'x'\)"),
    "blank id": (b'{"id": "  ", "prompt": "x"}\n', r":1: a task has the id '  ', which is blank"),
    "number as id": (b'{"id": 3, "prompt": "x"}\n', r":1: id: a string is needed, got 3"),
    "null id": (b'{"id": null, "prompt": "x"}\n', r":1: id: a string is needed, got None"),
    "number as prompt": (b'{"id": "a", "prompt": 3}\n', r":1: expected a string, a message or a list"),
    "wrong role": (b'{"id": "a", "prompt": [{"role": "me", "content": "x"}]}\n', r":1: message 0: a message's role"),
    "an image": (
        b'{"id": "a", "prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}\n',
        r":1: message 0 .*only text is supported",
    ),
    "list as info": (b'{"id": "a", "prompt": "x", "info": [1]}\n', r":1: info: an object is needed, got \[1\]"),
    "number as answer": (b'{"id": "a", "prompt": "x", "answer": 4}\n', r":1: answer: a string is needed, got 4"),
    "unknown key": (b'{"id": "a", "question": "x"}\n', r":1: unknown field 'question': put it under 'info'"),
    "latin-1": (
        '{"id": "a", "prompt": "größer"}\n'.encode("latin-1"),
        r":1: not UTF-8 \(byte \d+ .*save the file as UTF-8",
    ),
    "utf-16": (f"{GOOD}\n".encode("utf-16"), r":1: .*it is UTF-16: save it as UTF-8"),
    "gzip": (gzip.compress(GOOD.encode()), r":1: .*gunzip"),
    "parquet": (b"PAR1\x00\x01PAR1", r":1: .*Parquet"),
    "half a pair as id": (b'{"id": "\\ud800", "prompt": "x"}\n', r":1: the task id .* half a surrogate pair"),
    "too deep": (b'{"id": "a", "info": {"a": ' + b"[" * 300 + b"]" * 300 + b"}}\n", r":1: .*nested more than 200"),
    "far too deep": (b'{"id": "a", "info": {"a": ' + b"[" * 9999 + b"]" * 9999 + b"}}\n", r":1: not JSON"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


def made_from(path: Path, content: bytes | None) -> Path:
    if content is not None:
        path.write_bytes(content)
    return path


@pytest.mark.anyio
@pytest.mark.parametrize("name", FILES)
async def test_wrong_file_is_refused_before_the_engine_starts(file: Path, name: str) -> None:
    content, said = FILES[name]
    run_file = file.with_name("run.db")
    with pytest.raises(BadTask, match=said):
        await until_end(Run(Plain, NeverStarted("Yes"), tasks=made_from(file, content), file=run_file), [])
    assert not run_file.exists()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("episodes", [None, 4])
def test_command_refuses_wrong_file_and_leaves_nothing(
    file: Path, name: str, episodes: int | None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    content, said = FILES[name]
    made_from(file, content)
    (file.parent / "mine.py").write_text(MINE)
    monkeypatch.chdir(file.parent)
    before = sorted(file.parent.iterdir())
    settings = RunSettings(environment="mine.py:Plain", tasks=file, episodes=episodes)
    with pytest.raises(BadTask, match=said):
        run_command(settings, lambda _: NeverStarted("Yes"))
    assert [path for path in sorted(file.parent.iterdir()) if path.name != "__pycache__"] == before
    assert "resumes this run" not in "".join(capfd.readouterr())


MINE = """
from runner import Environment, Task, reward
from contextlib import contextmanager
import datetime

class Plain(Environment):
    def tasks(self):
        return [Task(id="a", prompt="hello")]

    @reward
    def correct(self):
        return True

class Raising(Plain):
    def tasks(self):
        raise FileNotFoundError("no puzzles here")

class RaisingLate(Plain):
    def tasks(self):
        raise FileNotFoundError("no puzzles here")
        yield

class Leaving(Plain):
    def tasks(self):
        raise SystemExit(0)

class Nothing(Plain):
    def tasks(self):
        return None

class Empty(Plain):
    def tasks(self):
        return []

class EmptyLate(Plain):
    def tasks(self):
        yield from ()

class Twice(Plain):
    def tasks(self):
        return [Task(id="a", prompt="hello"), Task(id="b", prompt="hello"), Task(id="a", prompt="hello")]

class Blank(Plain):
    def tasks(self):
        return (Task(id="a", prompt="hello"), Task(id="\\t", prompt="hello"))

class Words(Plain):
    def tasks(self):
        yield "hello"

class Dated(Plain):
    def tasks(self):
        return [Task(id="a", prompt="hello", info={"when": datetime.date(2026, 1, 2)})]

class DatedLate(Plain):
    def tasks(self):
        yield from Dated.tasks(self)

class RaisingAsync(Plain):
    async def tasks(self):
        raise FileNotFoundError("no puzzles here")
        yield

class WordsAsync(Plain):
    async def tasks(self):
        yield "hello"

class AfterOpening(RaisingAsync):
    def lifespan(self):
        yield

class DatedAfterOpening(DatedLate):
    async def lifespan(self):
        yield

class NothingAfterOpening(Nothing):
    def lifespan(self):
        yield

class Missing(Plain):
    def tasks(self):
        from pathlib import Path
        return Path("nowhere.jsonl")
"""

WRONG = {
    "Raising": "no puzzles here",
    "RaisingLate": "no puzzles here",
    "Leaving": r"tasks\(\) raised SystemExit",
    "Nothing": r"tasks\(\) returned None: return a list of Task",
    "Empty": r"tasks\(\) returns no task",
    "EmptyLate": r"tasks\(\) returns no task",
    "Twice": "task 3 has the same id 'a' as task 1",
    "Blank": "which is blank",
    "Words": "which is not a Task",
    "Dated": r"task 'a': info\['when'\] is of type datetime.date, which a run file cannot keep: .*isoformat",
    "DatedLate": r"task 'a': info\['when'\] is of type datetime.date",
    "RaisingAsync": "no puzzles here",
    "WordsAsync": "which is not a Task",
    "AfterOpening": "no puzzles here",
    "DatedAfterOpening": r"task 'a': info\['when'\] is of type datetime.date",
    "NothingAfterOpening": r"tasks\(\) returned None: return a list of Task",
    "Missing": "'nowhere.jsonl' is not an existing file",
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("episodes", [None, 3])
def test_command_refuses_wrong_own_tasks_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, episodes: int | None
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    find_environment("mine.py:Plain")
    with pytest.raises(BadTask, match=WRONG[name]):
        run_command(RunSettings(environment=f"mine.py:{name}", episodes=episodes), lambda _: NeverStarted("Yes"))
    left = {path.name for path in tmp_path.rglob("*.*") if "__pycache__" not in str(path)}
    assert left <= {"mine.py", f"{name}.log"}  # a log exists if the environment's code ran when the run started


def test_command_that_played_nothing_offers_nothing_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BadTask, match="no puzzles here"):
        run_command(RunSettings(environment="mine.py:RaisingAsync"), lambda _: ScriptedEngine("Yes"))
    assert "resumes this run" not in "".join(capfd.readouterr())


def test_command_counts_tasks_and_takes_a_byte_order_mark(
    file: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps({"id": f"größe {number}", "prompt": "hello"}, ensure_ascii=False) for number in range(3)]
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    (file.parent / "mine.py").write_text(MINE)
    monkeypatch.chdir(file.parent)
    settings = RunSettings(environment="mine.py:Plain", tasks=file, group_size=2)
    assert run_command(settings, lambda _: ScriptedEngine("Yes")) == 0
    assert "6 episodes of 3 tasks" in capfd.readouterr().out


def test_command_of_a_program_refuses_a_line_without_a_prompt(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('{"id": "a"}\n')
    monkeypatch.chdir(file.parent)
    settings = RunSettings(agent="echo {prompt}", tasks=file).with_program()
    with pytest.raises(BadTask, match=r"tasks.jsonl:1: task 'a' has no prompt"):
        run_command(settings, lambda _: NeverStarted("Yes"))


@pytest.mark.anyio
async def test_environment_with_prompt_takes_lines_without_one(file: Path) -> None:
    class Writes(Plain):
        def prompt(self) -> str:
            return f"Task {self.task.id}"

    await anyio.Path(file).write_text('{"id": "a"}\n')
    got: list[Trajectory] = []
    await until_end(Run(Writes, ScriptedEngine("Yes"), tasks=file), got)
    assert got[0].messages[0]["content"] == "Task a"


def test_command_reads_only_the_lines_that_it_plays(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(f"{GOOD}\nnot a task\n")
    (file.parent / "mine.py").write_text(MINE)
    monkeypatch.chdir(file.parent)
    settings = RunSettings(environment="mine.py:Plain", tasks=file, episodes=1)
    assert run_command(settings, lambda _: ScriptedEngine("Yes")) == 0


# --- from Python


class Lists(Plain):
    def __init__(self, given: Callable[[], Any]) -> None:
        self.given = given

    def tasks(self) -> Any:
        return self.given()


def wrong() -> list[Task]:
    return [Task("a", "hello"), Task("b", "hello", info={"seen": {"x"}})]


SAID = r"task 'b': info\['seen'\] is of type set, which a run file cannot keep: give a list, sorted\(value\)"


@pytest.mark.anyio
@pytest.mark.both_backends
@pytest.mark.parametrize("own", [False, True])
async def test_value_of_a_list_is_refused_before_the_engine_starts(tmp_path: Path, own: bool) -> None:
    environment, tasks = (Lists(wrong), None) if own else (Plain(), wrong())
    run_file = tmp_path / "run.db"
    with pytest.raises(BadTask, match=SAID):
        await until_end(Run(environment, NeverStarted("Yes"), tasks=tasks, file=run_file), [])
    assert not run_file.exists()


async def later() -> AsyncIterator[Task]:
    for task in wrong():
        yield task


def generated() -> Iterator[Task]:
    yield from wrong()


class Source:
    def __iter__(self) -> Iterator[Task]:
        return iter(wrong())

    def finished(self, trajectory: Trajectory) -> None: ...


@pytest.mark.anyio
@pytest.mark.both_backends
@pytest.mark.parametrize("source", [later, generated, Source])
@pytest.mark.parametrize("own", [False, True])
async def test_value_of_a_source_is_refused_before_its_first_episode(
    tmp_path: Path, source: Callable[[], Any], own: bool
) -> None:
    """Begun episodes are played to their end, and the same run continues once the task is right."""
    environment, tasks = (Lists(source), None) if own else (Plain(), source())
    run_file = tmp_path / "run.db"
    got: list[Trajectory] = []
    with pytest.raises(BadTask, match=SAID):
        await until_end(Run(environment, ScriptedEngine("Yes"), tasks=tasks, file=run_file, concurrency=ONE), got)
    assert [trajectory.task.id for trajectory in got] == ["a"]
    with RunFile(run_file) as stored:
        assert [row.task_id for row in stored] == ["a"]


@pytest.mark.anyio
async def test_template_option_that_cannot_be_kept_is_refused_early(tmp_path: Path) -> None:
    options: Any = {"template_options": {"when": datetime.date(2026, 1, 2)}, "file": tmp_path / "run.db"}
    with pytest.raises(BadOption, match=r"template_options\['when'\] is of type datetime.date"):
        await until_end(Run(Plain, NeverStarted("Yes"), **options), [])


@pytest.mark.anyio
async def test_value_is_not_refused_where_no_file_is_kept() -> None:
    got: list[Trajectory] = []
    await until_end(Run(Plain, ScriptedEngine("Yes"), tasks=wrong()), got)
    assert {"seen": {"x"}} in [trajectory.task.info for trajectory in got], "in the order in which they finish"


@pytest.mark.anyio
async def test_tasks_that_need_the_lifespan_are_asked_for_inside_of_it(tmp_path: Path) -> None:
    class Shared(Environment):
        opened = False

        @asynccontextmanager
        async def lifespan(self) -> AsyncIterator[str]:
            Shared.opened = True
            yield "open"

        def tasks(self) -> list[Task]:
            assert Shared.opened
            return [Task("a", "hello", info={"when": datetime.date(2026, 1, 2)})]

        @reward
        def correct(self) -> bool:
            return True

    with pytest.raises(BadTask, match=r"info\['when'\]"):
        await until_end(Run(Shared, ScriptedEngine("Yes"), file=tmp_path / "run.db"), [])


@pytest.mark.anyio
async def test_tasks_are_asked_for_once(tmp_path: Path) -> None:
    calls: list[int] = []

    def counted() -> list[Task]:
        calls.append(1)
        return [Task("a", "hello")]

    await until_end(Run(Lists(counted), ScriptedEngine("Yes"), file=tmp_path / "run.db"), [])
    assert calls == [1]


@pytest.mark.anyio
async def test_integers_of_a_file_keep_their_value(file: Path) -> None:
    large = 2**100 + 1
    line = json.dumps({"id": "a", "prompt": "hello", "info": {"n": large}})
    await anyio.Path(file).write_text(line)
    got: list[Trajectory] = []
    run_file = file.with_name("run.db")
    await until_end(Run(Plain, ScriptedEngine("Yes"), tasks=file, file=run_file), got)
    assert got[0].task.info == {"n": large}
    with RunFile(run_file) as stored:
        assert stored.trajectory("a#0").task.info == {"n": large}
