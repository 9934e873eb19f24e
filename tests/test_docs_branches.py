"""The code of docs/branches.md plays unchanged."""

from __future__ import annotations

import re
from typing import Any

import pytest

from examples import branches
from runner import Environment, Outcome
from runner.chat_requests import Verdict
from runner.testing import call
from tests.episode.awkward import misspelling
from tests.playing import Plain, play_all
from tests.repository import DOCS

pytestmark = pytest.mark.anyio

PAGE = (DOCS / "branches.md").read_text(encoding="utf-8")


def shown(name: str) -> Any:
    """A class of the page, with a task and a reward added if the page shows none."""
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if f"class {name}(" in each]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "branches.md", "exec"), names)
    made: type[Environment[Any]] = names[name]
    return made if "tasks" in vars(made) else type(name, (made, Plain), {"rollout": made.rollout})


async def test_example_keeps_the_best_of_several_tries() -> None:
    words = iter(["the sky", "the sea", "the tree", "the end"] * 3)
    (trajectory,) = await play_all(shown("BestOfFour"), misspelling(lambda asked: next(words)))
    assert (trajectory.outcome, trajectory.reward) == (Outcome.COMPLETED, 1)
    assert {turn.text for turn in trajectory.turns if not turn.left_out} == {"the sea"}


async def test_example_plays_branches_at_the_same_time() -> None:
    trajectories = await play_all(shown("TwoWays"), misspelling(lambda asked: "It is said"))
    assert [trajectory.agent for trajectory in trajectories] == ["main", "brief", "long"]


async def test_loop_of_another_library_appends_its_requests() -> None:
    (trajectory,) = await play_all(shown("Foreign"), misspelling([call("bash", command="ls"), "It is done"]))
    assert [request.verdict for request in trajectory.requests] == ["new", "append"]


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_explained(verdict: Verdict) -> None:
    assert f"| `{verdict.value}` |" in PAGE


async def test_the_examples_print_what_they_played(capsys: pytest.CaptureFixture[str]) -> None:
    engine = misspelling(lambda asked: "the sea")
    async with engine:
        await branches.main(engine)
    lines = capsys.readouterr().out.splitlines()
    assert any("'branch'" in line for line in lines)
    assert len(lines) == 2 + 2 * 6 + 2
