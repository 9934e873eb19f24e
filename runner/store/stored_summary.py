"""The summary of a run file, computed from its rows."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any, Final

from runner.engines.base import FinishReason
from runner.estimates import MIN_SOLVED_REWARD, Mean, pass_all_k, pass_at_k
from runner.store.columns import decode_text
from runner.store.header import Header
from runner.store.json_values import decode_json
from runner.trajectory import Outcome

__all__ = ["summarize"]

_EPISODES: Final = """
    SELECT task_id, visit, group_index, agent, trained, outcome, reward, rewards, metrics, turns,
        (SELECT group_scored FROM tasks WHERE id = task_id AND tasks.visit = episodes.visit) AS group_scored
    FROM episodes WHERE NOT superseded ORDER BY task_id, visit, group_index, key
"""

_OF_CURRENT: Final = "JOIN episodes ON episodes.key = {0}.episode WHERE NOT episodes.superseded"

_TURNS: Final = f"""
    SELECT finish, junction_result, junction_anchor, junction_close, junction_seam, junction_cause, usage_model,
        count(*) AS count, sum(start) AS prompt, total(turns.cached) AS cached, sum("end" - start) AS sampled,
        total(junction_inserted) AS bridged, sum(resampled) AS resampled, sum(queued) AS queued,
        sum(first_token) AS first_token, sum(decode) AS decode, sum(environment) AS environment,
        total(usage_prompt) AS usage_prompt, total(usage_completion) AS usage_completion,
        total(usage_cached) AS usage_cached, total(usage_reasoning) AS usage_reasoning, total(usage_cost) AS usage_cost
    FROM turns {_OF_CURRENT.format("turns")}
    GROUP BY finish, junction_result, junction_anchor, junction_close, junction_seam, junction_cause, usage_model
"""

_CALLS: Final = f"SELECT tool_calls FROM turns {_OF_CURRENT.format('turns')} AND tool_calls != '[]'"

_REQUESTS: Final = f"""
    SELECT verdict, tolerated, count(*) AS count FROM requests {_OF_CURRENT.format("requests")}
    GROUP BY verdict, tolerated
"""

_OF_THE_LAUNCH: Final[Mapping[str, Any]] = {
    "throttled": 0,
    "resent": 0,
    "seconds": None,
    "tokens_per_second": None,
    "retried": 0,
    "retry_causes": {},
    "stale": 0,
    "flat": 0,
    "faults": [],
}
"""The values that no row holds, with their defaults for a file without a summary of its last launch."""


def summarize(connection: sqlite3.Connection, header: Header) -> dict[str, Any]:
    """The summary of the episodes in the file, with the keys of `Summary.as_dict()`.

    Superseded attempts are left out; episodes cut short count under their outcome. All values are read from one state
    of the file.

    Args:
        connection: a connection without an open transaction.
        header: the header of the file. If it has group rewards, rewards of groups that were not scored are not counted.
    """
    connection.execute("BEGIN")
    try:
        parts = {name: Mean() for name in header.parts()}
        episodes = _Episodes(header.group_size, bool(header.group_rewards), environments=parts)
        for _, rows in groupby(connection.execute(_EPISODES), key=itemgetter("task_id")):
            episodes.add_task(list(rows))
        turns = _turns(connection)
        requests = _requests(connection)
        (stored,) = connection.execute("SELECT summary FROM run").fetchone()
    finally:
        connection.execute("ROLLBACK")
    summary = {**episodes.as_dict(), **turns, **requests}
    launched = None if stored is None else decode_json(stored)
    # If the last launch was killed, the stored summary may be from an earlier launch, with another number of episodes.
    # The summary of a launch leaves out cancelled episodes.
    counted = summary["episodes"] - episodes.outcomes[Outcome.CANCELLED]
    if isinstance(launched, dict) and launched.get("episodes") in (counted, summary["episodes"]):
        return {**_OF_THE_LAUNCH, **launched, **summary}
    return {**summary, **_OF_THE_LAUNCH}


@dataclass(slots=True)
class _Episodes:
    """Sums over episodes, added by task."""

    group_size: int
    has_group_rewards: bool
    episodes: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    reward: Mean = field(default_factory=Mean)
    agents: dict[str, Mean] = field(default_factory=dict)
    environments: dict[str, Mean] = field(default_factory=dict)
    rewards: dict[str, Mean] = field(default_factory=dict)
    metrics: dict[str, Mean] = field(default_factory=dict)
    solved: Counter[tuple[int, int]] = field(default_factory=Counter)

    def add_task(self, rows: Sequence[sqlite3.Row]) -> None:
        task = decode_text(rows[0]["task_id"])
        for _, visit in groupby(rows, key=itemgetter("visit")):
            group = [list(agents) for _, agents in groupby(visit, key=itemgetter("group_index"))]
            for agents in group:
                self._add_episode(agents, task)
            if group[0][0]["group_scored"] or not self.has_group_rewards:
                self._add_rewards(group, task)
        named = (self.agents, self.environments, self.rewards, self.metrics)
        for mean in (self.reward, *(mean for means in named for mean in means.values())):
            mean.close(task)

    def _add_episode(self, agents: Sequence[sqlite3.Row], task: str) -> None:
        self.episodes += 1
        self.outcomes[Outcome(agents[0]["outcome"])] += 1
        for name, value in decode_json(agents[0]["metrics"]).items():
            self.metrics.setdefault(name, Mean()).add(value, task)

    def _add_rewards(self, group: Sequence[Sequence[sqlite3.Row]], task: str) -> None:
        solved: list[bool] = []
        for agents in group:
            if agents[0]["outcome"] == Outcome.CANCELLED:
                continue
            for row in agents:
                if row["trained"] and row["turns"]:
                    self.agents.setdefault(decode_text(row["agent"]), Mean()).add(row["reward"], task)
            main = next((row for row in agents if row["trained"]), agents[0])
            self.reward.add(main["reward"], task)
            if (environment := self.environments.get(task.partition("/")[0])) is not None:
                environment.add(main["reward"], task)
            for name, value in decode_json(main["rewards"]).items():
                if value is not None:
                    self.rewards.setdefault(name, Mean()).add(value, task)
            solved.append(main["reward"] is not None and main["reward"] >= MIN_SOLVED_REWARD)
        if len(solved) == self.group_size:
            self.solved[len(solved), sum(solved)] += 1

    def as_dict(self) -> dict[str, Any]:
        powers = [1 << power for power in range(self.group_size.bit_length())]
        return {
            "episodes": self.episodes,
            "scored": sum(count for outcome, count in self.outcomes.items() if outcome.scored),
            "failed": sum(count for outcome, count in self.outcomes.items() if outcome.failed),
            "outcomes": {outcome.value: count for outcome, count in sorted(self.outcomes.items())},
            "reward": self.reward.as_dict(),
            "agents": {agent: mean.as_dict() for agent, mean in self.agents.items()},
            "environments": {name: mean.as_dict() for name, mean in self.environments.items()},
            "rewards": {name: mean.as_dict() for name, mean in self.rewards.items()},
            "metrics": {name: mean.as_dict() for name, mean in self.metrics.items()},
            "pass_at": {str(k): pass_at_k(self.solved, k) for k in powers},
            "pass_all": {str(k): pass_all_k(self.solved, k) for k in powers},
        }


def _turns(connection: sqlite3.Connection) -> dict[str, Any]:
    rows = connection.execute(_TURNS).fetchall()

    def total(name: str, among: Sequence[sqlite3.Row] = rows) -> Any:
        return sum(row[name] for row in among)

    def counts(among: Iterator[tuple[str, int]]) -> dict[str, int]:
        counter: Counter[str] = Counter()
        for name, count in among:
            counter[name] += count
        return dict(sorted(counter.items()))

    junction = ("junction_result", "junction_anchor", "junction_close", "junction_seam")
    answered = [row for row in rows if row["usage_model"] is not None]
    calls = malformed = failed = 0
    for (text,) in connection.execute(_CALLS):
        of_turn = decode_json(text)
        calls += len(of_turn)
        malformed += sum(call["error"] is not None for call in of_turn)
        failed += sum(call.get("failed", False) for call in of_turn)
    tokens = ("prompt", "cached", "sampled", "bridged")
    usage = ("prompt", "completion", "cached", "reasoning")
    return {
        "turns": total("count"),
        "finishes": counts((FinishReason(row["finish"]).value, row["count"]) for row in rows),
        "calls": calls,
        "malformed_calls": malformed,
        "failed_calls": failed,
        "tokens": {name: int(total(name)) for name in tokens},
        "usage": {
            **{name: int(total(f"usage_{name}", answered)) for name in usage},
            "cost": float(total("usage_cost", answered)),
            "models": counts((decode_text(row["usage_model"]), row["count"]) for row in answered),
        },
        "junctions": counts(
            ("/".join(row[part] for part in junction), row["count"])
            for row in rows
            if row["junction_result"] is not None
        ),
        "junction_causes": counts((row["junction_cause"], row["count"]) for row in rows if row["junction_cause"]),
        "times": {name: float(total(name)) for name in ("queued", "first_token", "decode", "environment")},
        "resampled": total("resampled"),
    }


def _requests(connection: sqlite3.Connection) -> dict[str, Any]:
    verdicts: Counter[str] = Counter()
    tolerated: Counter[str] = Counter()
    for verdict, names, count in connection.execute(_REQUESTS):
        verdicts[verdict] += count
        for name in decode_json(names):
            tolerated[name] += count
    return {"requests": dict(sorted(verdicts.items())), "tolerated": dict(sorted(tolerated.items()))}
