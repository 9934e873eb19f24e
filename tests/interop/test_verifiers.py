"""Task sets of verifiers v1, with the real package: their tools, state, stops, rewards and refusals."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from runner import BadEnvironment, BadOption, BadTask, Outcome, Run, ScriptedEngine, Trajectory
from runner.interop import Verifiers, verifiers_tasks
from runner.testing import call, play_many_async

pytestmark = [pytest.mark.anyio]
real = pytest.mark.package("verifiers.v1.trace")


@pytest.fixture(autouse=True)
def taskset(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task set as an installed package, and a folder for verifiers' output."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


async def played(replies: Any, tasks: int = 1, **options: Any) -> list[Trajectory]:
    environment = Verifiers("verifiers-words", options.pop("config", None))
    return await play_many_async(environment, ScriptedEngine(replies), tasks=tasks, breaker=1, **options)


@real
async def test_a_task_set_plays_with_its_tools_rewards_and_metrics() -> None:
    (each,) = await played([[call("word_letter", place=0)], [call("alphabet")], "3"])
    assert (each.outcome, each.task.id, each.reward) == (Outcome.COMPLETED, "strawberry", 3.0), each.error
    assert [m["role"] for m in each.messages] == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    results = [str(m["content"]) for m in each.messages if m["role"] == "tool"]
    assert results[0] == "s"
    assert '"vowels": "aeiou"' in results[1]
    expected = {"right": 1.0, "few turns": 0.0, "few ids": 1.0, "looked": 1.0, "same_folder": 1.0, "tool_messages": 2.0}
    assert {name: each.metrics[f"task_metrics.{name}"] for name in expected} == expected


@real
async def test_wrong_replies_get_the_rewards_of_their_tasks() -> None:
    trajectories = await played("3", tasks=3)
    assert {each.task.id: each.reward for each in trajectories} == {"strawberry": 4.0, "raspberry": 4.0, "pear": 2.0}


@real
async def test_each_episode_has_its_own_state_and_shared_tools_start_once() -> None:
    trajectories = await played([[call("word_letter", place=1)], [call("alphabet")], "3"], group_size=3)
    assert [each.metrics["task_metrics.looked"] for each in trajectories] == [1, 1, 1]
    starts = {str(m["content"]) for each in trajectories for m in each.messages if "starts" in str(m["content"])}
    assert len(starts) == 1


@real
async def test_tools_that_block_run_in_threads_and_lists_are_lines() -> None:
    (each,) = await played([[call("word_spell")], "3"])
    assert [m["content"] for m in each.messages if m["role"] == "tool"] == ["\n".join("strawberry")]
    assert each.metrics["task_metrics.looked"] == 10


@real
async def test_a_stop_condition_ends_the_episode_and_it_is_scored() -> None:
    (each,) = await played([[call("word_spell")], [call("word_letter", place=1)]])
    assert (each.outcome, each.reason, each.reward) == (Outcome.COMPLETED, "too_curious", 2.0), each.error
    assert each.metrics["task_metrics.few turns"] == 1


@real
async def test_wrong_arguments_and_errors_of_a_tool_are_read_by_the_model() -> None:
    (each,) = await played([[call("word_letter", place="first")], [call("word_letter", place=99)], "3"])
    results = [str(m["content"]) for m in each.messages if m["role"] == "tool"]
    assert "Error executing tool word_letter" in results[0]
    assert "string index out of range" in results[1]
    assert each.outcome is Outcome.COMPLETED


@real
async def test_config_selects_and_unknown_fields_are_refused() -> None:
    (each,) = await played("1", config={"letter": "b"})
    assert each.reward == 4
    with pytest.raises(BadOption, match=r"config of task set 'verifiers-words'.*colour"):
        Verifiers("verifiers-words", {"colour": 1})


@real
async def test_a_task_without_a_prompt_ends_the_run_by_name() -> None:
    with pytest.raises(BadTask, match="task 'raspberry' has no prompt: a user opens its conversation"):
        await played("3", tasks=3, config={"broken": True})


@real
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_taskset", "not found"),
        ("textarena", "textarena|environment of its own"),
        ("harbor", "environment of its own|container"),
        ("json", "exports no Taskset|defines no"),
    ],
)
def test_task_sets_that_cannot_be_played_are_refused_by_name(name: str, said: str) -> None:
    with pytest.raises(BadEnvironment, match=said):
        Verifiers(name)


@real
async def test_no_folder_of_verifiers_is_left() -> None:
    from verifiers.v1.utils.paths import CACHE_DIR

    folder = CACHE_DIR / "runtimes" / "subprocess"
    before = set(folder.glob("*"))
    await played("3", tasks=2)
    assert set(folder.glob("*")) == before


@real
async def test_a_task_of_a_stored_run_needs_no_task_set_object(tmp_path: Path) -> None:
    async with Run(Verifiers("verifiers-words"), ScriptedEngine("3"), file=tmp_path / "words.db") as run:
        assert len([each async for each in run]) == 4
    async with Run(Verifiers("verifiers-words"), ScriptedEngine("3"), file=tmp_path / "words.db") as run:
        assert [each async for each in run] == []


def test_missing_verifiers_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.interop import verifiers_tasks

    for name in [name for name in sys.modules if name.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setattr(verifiers_tasks, "_verifiers", verifiers_tasks._verifiers.__wrapped__)
    with pytest.raises(BadEnvironment, match=r"verifiers .*pip install 'deltarunner\[verifiers\]'"):
        Verifiers("words")


def test_secrets_of_this_process_are_blank_for_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "GOOGLE_APPLICATION_CREDENTIALS")
    for name in (*names, "HF_HOME"):
        monkeypatch.setenv(name, "value")
    blank = verifiers_tasks._blank_secrets()
    assert {name: blank.get(name) for name in names} == dict.fromkeys(names, "")
    assert "HF_HOME" not in blank
    assert "PATH" not in blank
