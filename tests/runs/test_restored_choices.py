"""Engines of a resumed run restore their first choices before they start."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

from runner import ConfigurationChanged, Conversation, Environment, Run, RunFile, ScriptedEngine, Task, reward
from runner.cli.run import run_command
from runner.cli.settings import RunSettings
from runner.cluster.engines import FleetEngine
from runner.engines.base import Engine
from runner.engines.vllm.engine import VllmEngine
from runner.testing.forcing import FORCING, force

pytestmark = pytest.mark.anyio

HERE = f"{__name__}:Talks"


class Talks(Environment):
    """Environment in which two agents take one turn each."""

    def tasks(self) -> Iterator[Task]:
        for number in range(4):
            yield Task(id=str(number), prompt="hello")

    async def rollout(self, conversation: Conversation) -> None:
        await conversation.generate()

    @reward
    def spoke(self) -> bool:
        return True


class Choosing(ScriptedEngine):
    """Engine that computes in the dtype of its machine unless a run is resumed, and records its calls in order."""

    def __init__(self, machine: str = "float32") -> None:
        super().__init__("hi")
        self.dtype, self.happened = machine, list[str]()

    def restore_choices(self, described: Mapping[str, Any]) -> None:
        self.dtype = described.get("dtype", "the model's")
        self.happened.append(f"resumes in {self.dtype}")

    async def __aenter__(self) -> Self:
        self.happened.append(f"starts in {self.dtype}")
        return await super().__aenter__()

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "model": "a-model", "dtype": self.dtype}


async def played(engine: Engine, file: Path, **options: Any) -> None:
    async with Run(Talks, engine, file=file, **options) as run:
        async for _ in run:
            pass


async def test_a_new_run_takes_the_dtype_of_the_machine(tmp_path: Path) -> None:
    engine = Choosing("float32")
    await played(engine, tmp_path / "run.db")
    assert engine.happened == ["starts in float32"]


@pytest.mark.parametrize("empty", [False, True], ids=["absent", "empty"])
async def test_resumed_run_keeps_its_dtype_on_another_machine(tmp_path: Path, empty: bool) -> None:
    file = tmp_path / "run.db"
    if empty:
        file.touch()
    await played(Choosing("bfloat16"), file)
    other = Choosing("float32")
    await played(other, file)
    assert other.happened == ["resumes in bfloat16", "starts in bfloat16"]


async def test_engines_of_agents_keep_their_own_dtypes(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    await played(Choosing("bfloat16"), file, engines={"judge": Choosing("float16")})
    main, judge = Choosing(), Choosing()
    await played(main, file, engines={"judge": judge})
    assert (main.happened[-1], judge.happened[-1]) == ("starts in bfloat16", "starts in float16")


async def test_an_engine_that_runs_already_in_another_dtype_is_refused(tmp_path: Path) -> None:
    class Fixed(Choosing):
        def restore_choices(self, described: Mapping[str, Any]) -> None:
            """Do nothing, since the engine has already started."""

    file = tmp_path / "run.db"
    await played(Choosing("bfloat16"), file)
    with pytest.raises(ConfigurationChanged, match=r'engine\.dtype: "bfloat16" -> "float32"'):
        await played(Fixed("float32"), file)


async def test_writer_refuses_files_that_are_not_run_files(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    file.write_text("not a database, " * 100)
    engine = Choosing()
    with pytest.raises(Exception, match=r"run\.db"):
        await played(engine, file)
    assert "resumes" not in " ".join(engine.happened)


# --- the command line


def command(engine: Choosing, **options: Any) -> int:
    settings = RunSettings(environment=HERE, model="a-model", **options)
    return run_command(settings, lambda _: engine)


def make_incomplete(path: Path) -> None:
    with sqlite3.connect(path) as file:
        file.execute("UPDATE run SET complete = 0")


@pytest.mark.parametrize("named", [False, True], ids=["next file", "named file"])
def test_the_same_command_keeps_the_dtype_of_its_file(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"file": Path("mine.db")} if named else {}
    assert command(Choosing("bfloat16"), **options) == 0
    (path,) = tmp_path.rglob("*.db")
    make_incomplete(path)
    other = Choosing("float32")
    assert command(other, **options) == 0
    assert other.happened == ["resumes in bfloat16", "starts in bfloat16"]
    assert list(tmp_path.rglob("*.db")) == [path], "the run continued that file"
    with RunFile(path) as run_file:
        assert run_file.header.engine["dtype"] == "bfloat16"


def test_new_file_takes_the_dtype_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command(Choosing("bfloat16")) == 0
    other = Choosing("float32")
    assert command(other) == 0, "the first file is complete"
    assert command(third := Choosing("float16"), seed=7) == 0
    assert (other.happened, third.happened) == (["starts in float32"], ["starts in float16"])


# --- engines that contain other engines


def test_wrapping_engine_passes_restored_choices_on() -> None:
    inner = VllmEngine("a-model", **FORCING)
    force(inner, [[1]]).restore_choices({"kind": "vllm", "dtype": "float16"})
    assert inner._kept_dtype == "float16"


def test_workers_receive_restored_choices() -> None:
    inner = VllmEngine("a-model")
    fleet = FleetEngine(inner, launcher=None, workers=2)  # type: ignore[arg-type]  # nothing is launched
    fleet.restore_choices({"kind": "vllm", "dtype": "bfloat16"})
    assert inner.__getstate__()["_kept_dtype"] == "bfloat16"
