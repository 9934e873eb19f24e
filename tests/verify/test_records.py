"""Changes outside of prompts and turns are found: log-probabilities, seeds, rewards, whole episodes."""

from __future__ import annotations

import json
import shutil
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest

from runner import Conversation, Environment, Group, Run, RunFile, Sampling, Task, group_reward, reward, tool
from runner.testing import Fault, ScriptedEngine, call
from tests.playing import Plain
from tests.verifying import verdict, verify

TASKS = [Task(id=f"t{number}", prompt=f"What is {number} + 1?") for number in range(3)]


class Scored(Environment):
    """Environment with two trained agents, an untrained critic, two weighted rewards, and a group reward."""

    def tasks(self) -> list[Task]:
        return TASKS

    @tool
    def add(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    @reward
    def correct(self) -> dict[str, float]:
        return {"main": 1.0, "black": 0.25}

    @reward(weight=0.3)
    def brief(self) -> float:
        return 0.7

    @group_reward(weight=0.1)
    def rank(self, group: Group) -> list[float]:
        return [float(trajectory.index) for trajectory in group.trajectories]

    async def rollout(self, conversation: Conversation) -> None:
        turn = await conversation.generate(sampling=Sampling(stop=("END",), stop_ids=(ord("!"),)))
        conversation.add(*await conversation.call_tools(turn))
        await conversation.generate()
        for name, train in (("black", True), ("critic", False)):
            await self.episode.conversation(name, prompt="Well?", train=train).generate()
        conversation.replace("And now?")
        await conversation.generate()
        conversation.add("No turn follows this.")


def replies(turn: Any) -> Any:
    return [call("add", a=1, b=2)] if turn.agent == "main" and turn.turn == 0 else "It is 3."


async def play(path: Path) -> None:
    """Play six episodes in two launches, one of them in its second attempt."""
    engine = ScriptedEngine(replies, faults=lambda ask: Fault.error(at=1) if ask.episode == "t1#0" else None)
    options: dict[str, Any] = {"group_size": 2, "file": path, "seed": 7}
    async with Run(Scored, engine, retries=0, breaker=1, **options) as run:
        async for _trajectory in run:
            pass
    async with Run(Scored, ScriptedEngine(replies), **options) as run:
        assert [trajectory.id async for trajectory in run] == ["t1#0", "t1#0"]
    assert run.summary.failed == 0


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("records") / "run.db"
    anyio.run(play, path)
    return path


@pytest.fixture
def path(played: Path, tmp_path: Path) -> Path:
    """A copy of the file, which a test may change."""
    return Path(shutil.copy(played, tmp_path / "run.db"))


def test_the_file_that_is_changed_below_is_as_its_run_left_it(path: Path) -> None:
    result = verify(path)
    assert result.exit_code == 0, result.output
    with RunFile(path) as stored:
        assert stored.complete
        rows = list(stored.rows(trained=None, superseded=None))
        rewards = {(row.id, row.agent): row.reward for row in stored}
    assert sorted({(row.id, row.attempt) for row in rows if row.superseded or row.attempt}) == [
        ("t1#0", 0),
        ("t1#0", 1),
    ]
    assert (rewards["t0#1", "main"], rewards["t0#0", "black"]) == pytest.approx((1.31, 0.46))


# --- the table


Change = Callable[[sqlite3.Connection], object]

KEY = "(SELECT key FROM episodes WHERE id = 't0#0' AND agent = 'main')"


def sql(statement: str) -> Change:
    return lambda connection: connection.execute(statement)


def logprobs(edit: Callable[[list[float]], list[float] | None]) -> Change:
    def change(connection: sqlite3.Connection) -> None:
        of_it = f"FROM segments WHERE episode = {KEY} AND number = 0"
        (data,) = connection.execute(f"SELECT logprobs {of_it}").fetchone()
        edited = edit(list(struct.unpack(f"<{len(data) // 4}f", data)))
        packed = None if edited is None else struct.pack(f"<{len(edited)}f", *edited)
        connection.execute(f"UPDATE segments SET logprobs = ? WHERE episode = {KEY} AND number = 0", (packed,))

    return change


def as_json(table: str, column: str, edit: Callable[[Any], object], where: str = "1") -> Change:
    def change(connection: sqlite3.Connection) -> None:
        rows = connection.execute(f"SELECT rowid, {column} FROM {table} WHERE {where}").fetchall()
        for row, text in rows:
            value = json.loads(text)
            edit(value)
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (json.dumps(value), row))

    return change


def headers(edit: Callable[[Any], object], *tables: str, where: str = "1") -> Change:
    """Change every copy of the header, or the copies in some tables."""
    edits = [as_json(table, "header", edit, where) for table in tables or ("run", "launches")]
    return lambda connection: [each(connection) for each in edits]


def of_one(statement: str, table: str = "episodes") -> Change:
    whose = "id = 't0#0' AND agent = 'main'" if table == "episodes" else f"episode = {KEY}"
    return sql(f"UPDATE {table} SET {statement} WHERE {whose}")


def delete(what: str, *, tasks: bool = False) -> Change:
    """Delete a whole episode with everything that belongs to it."""

    def change(connection: sqlite3.Connection) -> None:
        keys = f"(SELECT key FROM episodes WHERE {what})"
        for table in ("segments", "turns"):
            connection.execute(f"DELETE FROM {table} WHERE episode IN {keys}")
        connection.execute(f"DELETE FROM episodes WHERE {what}")
        if tasks:
            connection.execute("DELETE FROM tasks WHERE id NOT IN (SELECT task_id FROM episodes)")

    return change


def double(**changed: str) -> Change:
    """Copy the episode t0#0 with all its agents."""

    def change(connection: sqlite3.Connection) -> None:
        columns = [row[1] for row in connection.execute("PRAGMA table_info(episodes)")]
        values = ", ".join(changed.get(name, "key + 1000" if name == "key" else name) for name in columns)
        connection.execute(f"INSERT INTO episodes SELECT {values} FROM episodes WHERE id = 't0#0'")
        for table in ("segments", "turns"):
            columns = [f'"{row[1]}"' for row in connection.execute(f"PRAGMA table_info({table})")]
            values = ", ".join("episode + 1000" if name == '"episode"' else name for name in columns)
            keys = "(SELECT key FROM episodes WHERE id = 't0#0' AND key < 1000)"
            connection.execute(f"INSERT INTO {table} SELECT {values} FROM {table} WHERE episode IN {keys}")

    return change


def incomplete(change: Change) -> Change:
    """Make the change in a file whose run was killed, so that no summary counts its episodes."""

    def both(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE run SET complete = 0, summary = NULL")
        change(connection)

    return both


def put(*keys: str, value: Any) -> Callable[[Any], None]:
    def edit(whole: Any) -> None:
        for key in keys[:-1]:
            whole = whole[key]
        whole[keys[-1]] = value

    return edit


ASKED = {"role": "user", "content": "?"}


def in_the_place_of_another(connection: sqlite3.Connection) -> None:
    delete("id = 't0#1'")(connection)
    double(group_index="1")(connection)


def rename_result(messages: Any) -> None:
    next(message for message in messages if message["role"] == "tool")["name"] = "subtract"


TAMPERINGS: dict[str, tuple[Change, str, str]] = {
    # log-probabilities and weight versions
    "a log-probability above 0": (logprobs(lambda v: [*v[:-1], 0.5]), "logprobs", "above 0"),
    "an infinite log-probability": (logprobs(lambda v: [float("inf"), *v[1:]]), "logprobs", "above 0"),
    "a log-probability that is NaN": (logprobs(lambda v: [*v[:-1], float("nan")]), "logprobs", "has no log-prob"),
    "a log-probability too few": (logprobs(lambda v: v[:-1]), "unreadable", "log-probabilities for"),
    "a log-probability too many": (logprobs(lambda v: [*v, -1.0]), "unreadable", "log-probabilities for"),
    "no log-probabilities at all": (logprobs(lambda v: None), "logprobs", "has no log-prob"),
    "no weight versions": (of_one("versions = '[]'", "segments"), "versions", "do not cover"),
    "a weight version that ends early": (
        as_json("segments", "versions", lambda v: v[0].__setitem__(2, v[0][2] - 1), f"episode = {KEY}"),
        "versions",
        "do not cover",
    ),
    "a weight version of a prompt": (
        as_json("segments", "versions", lambda v: v.insert(0, ["9", 0, 1]), f"episode = {KEY}"),
        "versions",
        "not sampled",
    ),
    "two weight versions of one id": (
        as_json("segments", "versions", lambda v: v.insert(1, ["9", *v[0][1:]]), f"episode = {KEY}"),
        "versions",
        "do not cover",
    ),
    # rewards and outcomes
    "another reward": (of_one("reward = reward + 1"), "reward", "weighted sum"),
    "no reward": (of_one("reward = NULL"), "reward", "weighted sum"),
    "another part of a reward": (
        as_json("episodes", "rewards", put("brief", value=0.9), f"key = {KEY}"),
        "reward",
        "weighted sum",
    ),
    "a part without a number": (
        as_json("episodes", "rewards", put("brief", value=None), f"key = {KEY}"),
        "reward",
        "weighted sum",
    ),
    "a part by another name": (
        as_json("episodes", "rewards", put("luck", value=0.0), f"key = {KEY}"),
        "reward",
        "does not have",
    ),
    "another weight": (headers(put("weights", "brief", value=0.5)), "reward", "weighted sum"),
    "all its parts": (
        of_one("reward = 2.21, rewards = json_set(rewards, '$.correct', 2.0)"),
        "episodes",
        "agents main mean",
    ),
    "a reward for who is not trained": (
        sql("UPDATE episodes SET reward = 1, rewards = '{\"correct\": 1.0}' WHERE agent = 'critic'"),
        "reward",
        "was not scored",
    ),
    "a reward for what failed": (
        sql("UPDATE episodes SET reward = 1, rewards = '{\"correct\": 1.0}' WHERE superseded"),
        "reward",
        "was not scored",
    ),
    "a failure that keeps its reward": (
        sql("UPDATE episodes SET outcome = 'env_error', error = 'no' WHERE id = 't0#0'"),
        "reward",
        "was not scored",
    ),
    "a failure without an error": (
        sql("UPDATE episodes SET outcome = 'env_error', reward = NULL, rewards = '{}' WHERE id = 't0#0'"),
        "outcome",
        "but it has no error",
    ),
    "another outcome": (
        sql("UPDATE episodes SET outcome = 'turn_limit' WHERE id = 't0#0'"),
        "outcome",
        "turn_limit does not fit the limit",
    ),
    "another outcome with its limit": (
        sql("UPDATE episodes SET outcome = 'turn_limit', limit_name = 'turns' WHERE id = 't0#0'"),
        "episodes",
        "another value for 'outcomes completed'",
    ),
    "an outcome of one agent": (
        of_one("outcome = 'turn_limit', limit_name = 'turns'"),
        "episodes",
        "the records of the episode's agents differ",
    ),
    "metrics of one agent": (
        of_one("metrics = '{\"steps\": 4}'"),
        "episodes",
        "the records of the episode's agents differ",
    ),
    # seeds and sampling
    "the seed of the run": (headers(put("seed", value=8)), "seed", "does not follow from the run's"),
    "the seed of an episode": (of_one("seed = seed + 1"), "seed", "does not follow from the run's"),
    "the seed of a turn": (of_one("seed = seed + 1", "turns"), "seed", "does not follow from the episode's"),
    "what a turn was cut at": (
        as_json("samplings", "sampling", put("max_tokens", value=1)),
        "turn",
        "more ids were sampled than max_tokens",
    ),
    # headers
    "the header of a later launch": (
        headers(put("sampling", "temperature", value=0.1), "launches", where="number = 2"),
        "header",
        "launch 2 had another configuration than the run: sampling.temperature",
    ),
    "history in one copy": (headers(put("history", "content_safe", value=False), "run"), "header", "content_safe"),
    "history in the copies of the first launch": (
        headers(put("history", "content_safe", value=False), "launches", where="number = 1"),
        "header",
        "content_safe",
    ),
    # places
    "who is trained": (
        sql("UPDATE episodes SET trained = 0 WHERE agent = 'main'"),
        "episodes",
        "whether the agent is trained",
    ),
    "cached ids": (of_one("cached = 1", "turns"), "layout", "(cached)"),
    "ids in all prompts": (of_one("prompted = prompted + 1"), "layout", "(prompted)"),
    "the name of a result": (
        as_json("segments", "messages", rename_result, f"episode = {KEY} AND number = 0"),
        "message",
        "another name than its call",
    ),
    "a message after the last turn": (
        as_json("segments", "messages", lambda m: m.append(ASKED), f"episode = {KEY} AND number = 1"),
        "message",
        "after the last turn",
    ),
    "a message of an earlier segment": (
        sql(
            'UPDATE segments SET unseen = 1, messages = json_insert(messages, \'$[#]\', json(\'{"role": "user", '
            f'"content": "?"}}\')) WHERE episode = {KEY} AND number = 0'
        ),
        "message",
        "only the last segment",
    ),
    # whole episodes
    "an episode is gone": (delete("id = 't0#0'"), "episodes", "another value for 'episodes'"),
    "an agent is gone": (delete("id = 't0#0' AND agent = 'critic'"), "episodes", "another value for 'turns'"),
    "a task's episodes are gone": (
        incomplete(delete("task_id = 't0'")),
        "episodes",
        "the file has none of its episodes",
    ),
    "a task is gone": (delete("task_id = 't0'", tasks=True), "episodes", "another value for 'episodes'"),
    "the row of an episode is gone": (
        incomplete(sql(f"DELETE FROM episodes WHERE key = {KEY}")),
        "episodes",
        "segments that belong to no episode",
    ),
    "the attempt that failed is gone": (
        incomplete(delete("superseded")),
        "episodes",
        "an earlier attempt is missing",
    ),
    "the attempt that counts is gone": (
        delete("id = 't1#0' AND attempt = 1"),
        "episodes",
        "none of the episode's attempts is a result",
    ),
    "an episode twice, by its index": (
        incomplete(double(group_index="2", id="'t0#2'")),
        "seed",
        "does not follow from the run's",
    ),
    "an episode twice, past its group": (
        incomplete(double(group_index="2")),
        "episodes",
        "id does not follow from its task and index",
    ),
    "an episode in the place of another": (
        in_the_place_of_another,
        "episodes",
        "id does not follow from its task and index",
    ),
    "an episode twice, by its attempt": (
        incomplete(double(attempt="1")),
        "episodes",
        "two of the episode's attempts are results",
    ),
    "what was right is put aside": (
        incomplete(sql("UPDATE episodes SET superseded = 1 WHERE id = 't0#0'")),
        "episodes",
        "it did not fail",
    ),
    "what failed counts": (
        sql("UPDATE episodes SET superseded = 0 WHERE id = 't1#0'"),
        "episodes",
        "two of the episode's attempts are results",
    ),
    "a launch that there was not": (of_one("launch = 9"), "episodes", "launch that the file does not list"),
    "a summary that counts otherwise": (
        as_json("run", "summary", put("tokens", "sampled", value=1)),
        "episodes",
        "another value for 'tokens sampled'",
    ),
    "no summary": (sql("UPDATE run SET summary = NULL"), "episodes", "no summary that can be read"),
    "the size of the groups": (
        incomplete(headers(put("group_size", value=1))),
        "episodes",
        "not below the run's group size",
    ),
}


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_tampering_is_found_and_named(path: Path, tampering: str) -> None:
    change, kind, said = TAMPERINGS[tampering]
    with closing(sqlite3.connect(path)) as connection:
        before = connection.total_changes
        change(connection)
        assert connection.total_changes > before
        connection.commit()
    report = verdict(path)
    assert (report["verified"], report["exit_code"]) == (False, 7)
    found = report["difference"]
    assert (found["kind"], said in found["explanation"]) == (kind, True), found
    printed = verify(path)
    assert printed.exit_code == 7
    assert f"{kind}: {found['explanation']}" in printed.output


def test_turn_ended_by_a_wrong_stop_is_found_without_a_next_prompt(tmp_path: Path) -> None:
    path = tmp_path / "run.db"

    async def once() -> None:
        async with Run(Plain, ScriptedEngine("Yes"), file=path) as run:
            async for _trajectory in run:
                pass

    anyio.run(once)
    assert verdict(path)["verified"]
    with closing(sqlite3.connect(path)) as connection:
        headers(put("engine", "stop_ids", value=[258]))(connection)
        connection.commit()
    found = verdict(path)["difference"]
    assert (found["kind"], found["stored"], found["derived"]) == ("stop", "257", "258")
