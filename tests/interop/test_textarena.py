"""Games of TextArena, with the real package, in the lane that installs it."""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest

from runner import BadEnvironment, BadOption, Limits, Outcome, Run, ScriptedEngine, Trajectory
from runner.interop import TextArena
from runner.testing import ModelCall, play_many_async

pytestmark = [pytest.mark.anyio]
real = pytest.mark.package("textarena")


async def played(replies: Any, **options: Any) -> list[Trajectory]:
    run_options = {name: options.pop(name) for name in ("limits", "group_size", "engines") if name in options}
    environment = TextArena("TicTacToe-v0", games=options.pop("games", 1), **options)
    return await play_many_async(environment, ScriptedEngine(replies), **run_options)


def by_player(first: list[str], second: list[str]) -> Any:
    """Return the moves of two players, each by the number of the player's earlier moves."""

    def reply(model_call: ModelCall) -> str:
        moves = second if "You are Player 1" in model_call.prompt else first
        return moves[model_call.prompt.count("<|im_start|>assistant") - 1]

    return reply


@real
async def test_self_play_rewards_each_player() -> None:
    trajectories = await played(by_player(["[0]", "[1]", "[2]"], ["[3]", "[4]"]))
    assert {each.agent: (each.reward, each.trained) for each in trajectories} == {
        "main": (1.0, True),
        "player_1": (-1.0, True),
    }
    assert {each.outcome for each in trajectories} == {Outcome.COMPLETED}
    assert {each.metrics["finished"] for each in trajectories} == {1.0}


@real
async def test_players_read_only_what_is_new() -> None:
    main, _ = await played(by_player(["[0]", "[1]", "[2]"], ["[3]", "[4]"]))
    second = str(main.messages[2]["content"])
    assert second.startswith("Player 0 placed their symbol")
    assert "[Player 1] [3]" in second
    assert "Your goal is to win" not in second
    assert "[Player 0]" not in second


@real
async def test_a_game_that_ends_in_the_opponents_move_is_scored() -> None:
    trajectories = await played(by_player(["[0]", "[1]", "[8]"], ["[3]", "[4]", "[5]"]), self_play=False)
    main = next(each for each in trajectories if each.agent == "main")
    assert (main.outcome, main.reward, len(main.turns)) == (Outcome.COMPLETED, -1, 3)
    assert [each.agent for each in trajectories if each.trained] == ["main"]


@real
async def test_an_opponent_may_have_an_engine_of_its_own() -> None:
    opponent = ScriptedEngine(by_player([], ["[3]", "[4]", "[5]"]))
    trajectories = await played(by_player(["[0]", "[1]", "[8]"], []), self_play=False, engines={"player_1": opponent})
    assert [each.reward for each in trajectories if each.agent == "main"] == [-1]


@real
async def test_invalid_moves_lose_by_the_rules_of_the_game() -> None:
    trajectories = await played(by_player(["no", "idea"], []))
    assert [each.reward for each in trajectories if each.agent == "main"] == [-1]


@real
async def test_a_game_that_a_limit_ends_is_a_draw() -> None:
    trajectories = await played(by_player(["[0]", "[1]"], ["[3]", "[4]"]), limits=Limits(turns=2))
    assert {each.agent: (each.outcome, each.reward) for each in trajectories} == {
        "main": (Outcome.TURN_LIMIT, 0.0),
        "player_1": (Outcome.TURN_LIMIT, 0.0),
    }
    assert {each.metrics["finished"] for each in trajectories} == {0.0}


@real
async def test_games_leave_the_global_random_numbers_alone() -> None:
    random.seed(7)
    expected = random.random()
    random.seed(7)
    await played(by_player(["[0]", "[1]", "[2]"], ["[3]", "[4]"]), games=3)
    assert random.random() == expected


@real
async def test_a_group_plays_one_game_with_the_same_seed() -> None:
    async def secrets(seed: int) -> list[str]:
        environment = TextArena("GuessTheNumber-v0", players=1, games=2)
        async with Run(environment, ScriptedEngine("[5]"), group_size=2, seed=seed) as run:
            return sorted(f"{each.task.id}: {each.messages[2:]}" for each in [each async for each in run])

    assert await secrets(1) == await secrets(1)


@real
@pytest.mark.parametrize(
    ("arguments", "said"),
    [({"game": "Poker-v99"}, "no game 'Poker-v99'"), ({"game": "TicTacToe-v0", "players": 0}, "players=0")],
)
def test_a_game_that_is_not_there_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises((BadEnvironment, BadOption), match=said):
        TextArena(**arguments)


def test_a_missing_textarena_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(BadEnvironment, match=r"textarena .*pip install 'deltarunner\[textarena\]'"):
        TextArena("TicTacToe-v0")
