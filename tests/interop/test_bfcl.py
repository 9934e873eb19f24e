"""BFCL v4 multi-turn, with the real package: its ground truth is replayed, and scored by its checker."""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from runner import BadEnvironment, BadOption, Limits, Outcome, Sampling, ScriptedEngine, ToolError, Trajectory
from runner.interop import Bfcl
from runner.interop.bfcl_tasks import CATEGORIES, MAX_STEPS_COUNT
from runner.testing import ModelCall, call, play_many_async

pytestmark = [pytest.mark.anyio]
real = pytest.mark.package("bfcl_eval")


class GroundTruth:
    """The known correct calls, one per turn if there are few, and a word after the last call of each request."""

    def __init__(self, category: str) -> None:
        from runner.interop.bfcl_tasks import _entries

        self.entries = _entries(category)
        self.replies: dict[str, list[Any]] = {}

    def __call__(self, model_call: ModelCall) -> Any:
        name = model_call.episode.rpartition("#")[0]
        replies = self.replies.setdefault(model_call.episode, self.written(self.entries[name]))
        return replies.pop(0)

    def written(self, entry: dict[str, Any]) -> list[Any]:
        described = [*entry["function"], *(each for more in entry["missed_function"].values() for each in more)]
        names = {each["name"]: list(each["parameters"]["properties"]) for each in described}
        replies: list[Any] = []
        for request in entry["ground_truth"]:
            calls = [as_call(each, names) for each in request]
            replies += [[each] for each in calls] if len(calls) <= MAX_STEPS_COUNT else [calls]
            replies.append("Done.")
        return replies


def as_call(written: str, names: dict[str, list[str]]) -> Any:
    """Parse a call that BFCL wrote as Python. Some of its arguments have only a position."""
    node = ast.parse(written, mode="eval").body
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    given = dict(zip(names[node.func.id], map(ast.literal_eval, node.args), strict=False))
    return call(node.func.id, **given, **{str(each.arg): ast.literal_eval(each.value) for each in node.keywords})


async def played(replies: Any, only: Sequence[str] | int, category: str = "base", **options: Any) -> list[Trajectory]:
    environment = Bfcl(category)
    tasks = list(environment.tasks())
    chosen = tasks[:only] if isinstance(only, int) else [each for each in tasks if each.id in only]
    options.setdefault("sampling", Sampling(max_tokens=16384))  # one of the correct calls writes two files
    return await play_many_async(environment, ScriptedEngine(replies, context=131072), tasks=chosen, **options)


@real
@pytest.mark.parametrize("category", CATEGORIES)
async def test_ground_truth_scores_1(category: str) -> None:
    trajectories = await played(GroundTruth(category), 20, category)
    wrong = {each.task.id: each.error for each in trajectories if each.reward != 1}
    assert wrong == {}


@real
async def test_calls_that_leave_another_state_score_0() -> None:
    (each,) = await played("I cannot.", ["multi_turn_base_0"])
    assert (each.outcome, each.reward, len(each.turns)) == (Outcome.COMPLETED, 0.0, 4), each.error


@real
async def test_functions_of_a_later_request_are_added_to_the_tools() -> None:
    (each,) = await played(GroundTruth("miss_func"), ["multi_turn_miss_func_0"], "miss_func")
    assert each.reward == 1
    more = [n for n, m in enumerate(each.messages) if "updated some more functions" in str(m["content"])]
    assert len(more) == 1


@real
async def test_a_21st_turn_with_calls_ends_the_task_with_0() -> None:
    (each,) = await played(lambda _: [call("ls")], ["multi_turn_base_0"])
    assert (each.reward, each.reason, len(each.turns)) == (0.0, "too_many_steps", 21), each.error


@real
async def test_a_limit_that_cuts_the_task_scores_0() -> None:
    (each,) = await played("I cannot.", ["multi_turn_base_0"], limits=Limits(turns=2))
    assert (each.outcome, each.reward) == (Outcome.TURN_LIMIT, 0.0)


@real
async def test_episodes_share_no_objects_and_leave_none() -> None:
    from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

    trajectories = await played(GroundTruth("base"), ["multi_turn_base_0"], group_size=3)
    assert [each.reward for each in trajectories] == [1, 1, 1]
    assert [name for name in vars(multi_turn_utils) if name.startswith("episode_")] == []


@real
async def test_wrong_arguments_are_answered_by_bfcl() -> None:
    (each,) = await played([[call("cd", place=3)], *["Done."] * 4], ["multi_turn_base_0"])
    (result,) = [str(m["content"]) for m in each.messages if m["role"] == "tool"]
    assert "Error during execution" in result
    assert "unexpected keyword argument 'place'" in result


@real
def test_names_of_arguments_are_not_run_as_code() -> None:
    with pytest.raises(ToolError, match="unknown argument"):
        Bfcl()._call("cd", {"folder='x') or exit(": 1})


@real
def test_unknown_category_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadOption, match="category='live': give base, miss_func, miss_param, long_context"):
        Bfcl("live")


def test_a_missing_bfcl_is_named_with_both_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "bfcl_eval", None)
    with pytest.raises(BadEnvironment, match=r"'deltarunner\[bfcl\]' && pip install --no-deps bfcl-eval"):
        Bfcl()
