"""Games of Gymnasium, with the real package, in the lane that installs it."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from runner import BadEnvironment, BadOption, Limits, Outcome, ScriptedEngine
from runner.interop import Gymnasium
from runner.testing import play_many_async
from tests.repository import DOCS

pytestmark = [pytest.mark.anyio]
real = pytest.mark.package("gymnasium")

ARROWS = ("left", "down", "right", "up")
# The shortest path over the ice of the map of four by four.
PATH = ["down", "down", "right", "right", "down", "right"]


def lake(**options: Any) -> Gymnasium:
    return Gymnasium("FrozenLake-v1", ARROWS, games=2, options={"is_slippery": False}, **options)


@real
async def test_a_right_path_reaches_the_goal() -> None:
    played = await play_many_async(lake(instructions="Reach G."), ScriptedEngine(PATH))
    for each in played:
        assert (each.outcome, each.reward, each.metrics["steps"]) == (Outcome.COMPLETED, 1, 6), each.error
        assert str(each.messages[0]["content"]).startswith("Reach G.\n\nReply with one of: left, down, right, up.")
        assert "SFFF" in str(each.messages[0]["content"])


@real
async def test_only_legal_actions_can_be_sampled() -> None:
    environment = Gymnasium("Taxi-v4", ("south", "north", "east", "west", "pickup", "dropoff"), games=4)
    played = await play_many_async(environment, ScriptedEngine(["pickup"]), limits=Limits(turns=1), breaker=1)
    allowed = {tuple(json.loads(str(each.turns[0].constraint.value))) for each in played if each.turns[0].constraint}
    assert any("pickup" not in names for names in allowed)


@real
async def test_text_that_is_not_an_action_is_answered_with_the_actions() -> None:
    replies = ["jump", *PATH]
    played = await play_many_async(lake(choice=False), ScriptedEngine(replies))
    for each in played:
        assert "'jump' is not a legal action. Reply with one of: left, down" in str(each.messages[2]["content"])
        assert each.reward == 1


@real
async def test_other_action_spaces_are_parsed_by_a_function() -> None:
    environment = Gymnasium("Pendulum-v1", parse=lambda text: [float(text)], games=1)
    (each,) = await play_many_async(environment, ScriptedEngine(["0.5", "much", "1"]), limits=Limits(turns=3))
    assert (each.outcome, each.metrics["steps"]) == (Outcome.TURN_LIMIT, 2)
    assert "could not convert string to float" in str(each.messages)


@real
async def test_all_games_that_were_made_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    gymnasium = importlib.import_module("gymnasium")
    make: Callable[..., Any] = gymnasium.make
    made: list[Any] = []
    closed: list[Any] = []

    def watched(*arguments: Any, **options: Any) -> Any:
        game = make(*arguments, **options)
        close = game.close

        def watched_close() -> None:
            closed.append(game)
            close()

        made.append(game)
        game.close = watched_close
        return game

    monkeypatch.setattr(gymnasium, "make", watched)
    await play_many_async(lake(), ScriptedEngine(PATH))
    assert len(made) >= 4  # one to read the render modes, one for the check, and one for each episode
    assert {id(game) for game in made} == {id(game) for game in closed}


@real
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"game": "NoSuchGame-v0"}, r"game='NoSuchGame-v0' cannot be made"),
        ({"game": "Pendulum-v1"}, "give parse=, a function that returns the action"),
        ({"game": "FrozenLake-v1", "actions": ["left"]}, "has 4 actions: name all of them"),
        ({"game": "FrozenLake-v1", "actions": "left"}, "give a list of names"),
    ],
    ids=["unknown", "continuous", "few names", "text"],
)
def test_a_game_that_cannot_be_played_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((BadEnvironment, BadOption), match=said):
        Gymnasium(**arguments).tasks()


def test_a_missing_gymnasium_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(BadEnvironment, match=r"gymnasium .*pip install 'deltarunner\[gymnasium\]'"):
        Gymnasium("FrozenLake-v1")


@real
def test_block_of_the_page_reaches_the_goal(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (DOCS / "games.md").read_text(), flags=re.DOTALL)
    exec(compile(block, "games.md", "exec"), {"__name__": "page"})
    assert capsys.readouterr().out.startswith("1.0")
