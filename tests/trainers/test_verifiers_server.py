"""verifiers' protocol: requests are answered with exact traces, and each kind of bad request with its own error.

tests/interop/test_verifiers.py tests the same answers with verifiers' own client.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from runner import (
    BadOption,
    Conversation,
    EngineDead,
    Environment,
    Sampling,
    ScriptedEngine,
    Task,
    ToolError,
    reward,
    tool,
)
from runner.cli.serve import serve_command
from runner.cli.settings import ServeSettings
from runner.testing import Fault, call
from runner.tokens.template import ChatTemplate
from runner.trainers import verifiers_server
from runner.trainers.trace_check import TraceModel, verify_trace
from runner.trainers.trace_files import read_traces
from runner.trainers.verifiers_server import VerifiersServer
from tests.playing import recording
from tests.trainers.verifiers_process import model_server, served

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]

ENGINE = "http://127.0.0.1:1/v1"


class Sums(Environment):
    """Environment with a tool that adds. The reward is 1 for the correct answer."""

    def tasks(self) -> list[Task]:
        return [Task(id="own", prompt="20 + 1?", answer="21")]

    @tool
    def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        if a < 0:
            raise ToolError("not below 0")
        return str(a + b)

    @reward
    def right(self) -> bool:
        if self.task.answer == "broken":
            raise OSError("no disk")
        return self.episode.text == self.task.answer


class Client:
    """A client in the wire format of verifiers: a DEALER socket, frames and msgpack."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context()
        self.socket: Any = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self._number = 0

    async def send(self, route: str, content: Any, *, raw: bool = False) -> str:
        self._number += 1
        name = f"request {self._number}"
        payload = content if raw else msgpack.packb(content)
        await self.socket.send_multipart([name.encode(), route.encode(), payload])
        return name

    async def receive(self) -> tuple[str, str, Any]:
        name, kind, payload = await asyncio.wait_for(self.socket.recv_multipart(), 60)
        return name.decode(), kind.decode(), msgpack.unpackb(payload, raw=False)

    async def ask(self, route: str, content: Any, *, raw: bool = False) -> tuple[Any, list[Any]]:
        """Return the reply to a request, and the deltas before it."""
        await self.send(route, content, raw=raw)
        deltas: list[Any] = []
        while True:
            _, kind, answer = await self.receive()
            if kind == "reply":
                return answer, deltas
            deltas.append(answer)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@asynccontextmanager
async def serving(
    make_engine: Callable[[str, str], Any], environment: Any = Sums, **options: Any
) -> AsyncIterator[tuple[VerifiersServer, Client]]:
    async with VerifiersServer(environment, make_engine, bind="tcp://127.0.0.1:0", **options) as server:
        answering = asyncio.create_task(server.serve())
        client = Client(server.address)
        try:
            yield server, client
        finally:
            client.close()
            answering.cancel()


def run_request(data: Any = None, **changes: Any) -> dict[str, Any]:
    return {
        "task_data": data or {"id": "t", "prompt": "1 + 2?", "answer": "3", "idx": 4, "image": None},
        "client": {"type": "train", "base_url": ENGINE},
        "model": "m",
        "sampling": {"temperature": 0.5, "max_tokens": 50, "logprobs": True, "extra": 1},
        **changes,
    }


def scripted(*_: str) -> ScriptedEngine:
    return recording([[call("add", a=1, b=2)], "3"])


async def test_episode_is_answered_with_its_exact_ids() -> None:
    engines: list[Any] = []

    def make(url: str, model: str) -> ScriptedEngine:
        engine = scripted()
        engines.append((url, model, engine))
        return engine

    async with serving(make) as (_, client):
        answer, (delta,) = await client.ask("run", run_request())
    assert answer["success"]
    assert answer["head"]["env"] == {"id": "Sums"}
    assert (answer["head"]["ok"], answer["head"]["errors"]) == (True, [])
    assert answer["traces"] == [{"id": delta["trace"], "nodes": len(delta["nodes"]), "calls": 2}]
    ((url, model, engine),) = engines
    assert (url, model) == (ENGINE, "m")
    assert delta["open"]["task"]["data"]["idx"] == 4
    assert delta["set"]["rewards"] == {"right": {"score": 1.0, "weight": 1.0}}
    assert [node["message"]["role"] for node in delta["nodes"]] == ["user", "assistant", "tool", "assistant"]
    assert [node["parent"] for node in delta["nodes"]] == [None, 0, 1, 2]
    ids = [token_id for node in delta["nodes"] for token_id in node["token_ids"]]
    first, second = engine.calls
    assert ids[: len(second.prompt)] == list(second.prompt)
    assert delta["nodes"][0]["token_ids"] == list(first.prompt)
    assert (second.sampling.temperature, second.sampling.max_tokens) == (0.5, 50)
    for node in delta["nodes"]:
        assert len(node["mask"]) == len(node["token_ids"])
        assert len(node["logprobs"]) == sum(node["mask"])
        assert any(node["mask"]) == node["sampled"]


async def test_traces_have_no_finding_when_they_are_verified(tmp_path: Any) -> None:
    import json

    async with serving(scripted) as (_, client):
        _, (delta,) = await client.ask("run", run_request())
    trace = {**delta["open"], "nodes": delta["nodes"], "calls": delta["calls"]}
    (tmp_path / "traces.jsonl").write_text(json.dumps({"traces": [trace]}))
    engine = scripted()
    template: ChatTemplate = engine.template
    model = TraceModel(engine.tokenizer, template, stop_ids=engine.stop_ids)
    (read,) = read_traces(tmp_path / "traces.jsonl")
    report = verify_trace(read.calls, model)
    assert (report.calls, report.findings, dict(report.unchecked)) == (2, [], {})


async def test_one_engine_serves_all_salts_and_samplings() -> None:
    made: list[str] = []

    def make(url: str, model: str) -> ScriptedEngine:
        made.append(model)
        return recording("3")

    async with serving(make) as (_, client):
        for model in ("m", "m", "other", "m"):
            answer, _ = await client.ask("run", run_request(model=model))
            assert answer["success"]
        for salt in range(2 * verifiers_server.MAX_PLAYERS):  # one salt for each weight version, as prime-rl sends them
            sampling = {"temperature": 1.0, "cache_salt": str(salt), "extra_body": {"cache_salt": str(salt)}}
            assert (await client.ask("run", run_request(sampling=sampling)))[0]["success"]
    assert made == ["m", "other"]


async def test_request_is_played_with_its_own_sampling() -> None:
    engine = recording("3")
    given = [
        {"temperature": 0.5, "top_k": -1, "stop": "x", "stop_token_ids": [7], "n": 4, "logprobs": 1},
        {"temperature": 0.0, "max_tokens": 9, "min_tokens": 2},
        {"top_p": 0.9},
    ]
    async with serving(lambda *_: engine, sampling=Sampling(temperature=0.25, max_tokens=77)) as (_, client):
        for sampling in given:
            assert (await client.ask("run", run_request(sampling=sampling)))[0]["success"]
    names = ("temperature", "max_tokens", "min_tokens", "top_k", "top_p", "stop", "stop_ids", "logprobs")
    assert [tuple(getattr(played.sampling, name) for name in names) for played in engine.calls] == [
        (0.5, 77, 0, 0, 1.0, ("x",), (7,), 0),
        (0.0, 9, 2, 0, 1.0, (), (), 0),
        (0.25, 77, 0, 0, 0.9, (), (), 0),
    ]


async def test_the_same_task_is_played_with_other_seeds_and_ids() -> None:
    engines: list[Any] = []

    def make(*_: str) -> ScriptedEngine:
        engines.append(recording("3"))
        return engines[-1]  # type: ignore[no-any-return]  # the type of the list's items

    async with serving(make) as (_, client):
        deltas = [(await client.ask("run", run_request()))[1][0] for _ in range(3)]
        # Each server of a trainer with several servers has its own player, whose visits start again at 0.
        other = {"type": "train", "base_url": "http://127.0.0.1:2/v1"}
        deltas += [(await client.ask("run", run_request(client=other)))[1][0] for _ in range(2)]
    episodes = ["t#0", "t@1#0", "t@2#0", "t#0", "t@1#0"]
    assert [delta["set"]["info"]["episode"] for delta in deltas] == episodes
    assert len({delta["trace"] for delta in deltas}) == 5
    assert [delta["open"]["id"] for delta in deltas] == [delta["trace"] for delta in deltas]
    assert len({played.seed for engine in engines for played in engine.calls}) == 5


async def test_task_of_the_environment_is_found_by_its_id() -> None:
    async with serving(lambda *_: recording("21")) as (_, client):
        answer, (delta,) = await client.ask("run", run_request({"id": "own"}))
        assert (answer["success"], delta["nodes"][0]["message"]["content"]) == (True, "20 + 1?")
        assert delta["set"]["rewards"]["right"]["score"] == 1
        answer, _ = await client.ask("run", run_request({"id": "none"}))
        assert "BadTask: task_data has no prompt, and its id 'none' is not one" in answer["error"]


async def test_system_prompt_of_the_data_stands_before_the_prompt() -> None:
    async with serving(lambda *_: recording("3")) as (_, client):
        data = {"prompt": [{"role": "user", "content": "Hi"}], "system_prompt": "Be brief."}
        _, (delta,) = await client.ask("run", run_request(data))
    assert [node["message"]["role"] for node in delta["nodes"]] == ["system", "user", "assistant"]


async def test_failed_episode_is_not_ok_and_has_no_reward() -> None:
    class Fails(Sums):
        async def rollout(self, conversation: Conversation) -> None:
            await conversation.generate()
            raise OSError("no disk")

    async with serving(lambda *_: recording("3"), Fails) as (_, client):
        answer, (delta,) = await client.ask("run", run_request())
    assert answer["success"]
    assert (answer["head"]["ok"], delta["set"]["ok"], delta["set"]["rewards"]) == (False, False, {})
    (error,) = answer["head"]["errors"]
    assert error["type"] == "env_error"
    assert "no disk" in error["message"]


async def test_reward_that_raises_is_none_and_not_zero() -> None:
    async with serving(lambda *_: recording("3")) as (_, client):
        _, (delta,) = await client.ask("run", run_request({"id": "b", "prompt": "?", "answer": "broken"}))
    assert [value for value in delta["set"]["rewards"].values() if value] == []


class Waits(Sums):
    """Environment whose episode ends only by cancellation."""

    begun: asyncio.Event
    ended: list[str]

    async def rollout(self, conversation: Conversation) -> None:
        type(self).begun.set()
        try:
            await asyncio.sleep(3600)
        finally:
            type(self).ended.append(self.task.id)


async def test_cancelled_run_cuts_its_episode_and_is_answered() -> None:
    Waits.begun, Waits.ended = asyncio.Event(), []
    async with serving(lambda *_: recording("3"), Waits) as (_, client):
        name = await client.send("run", run_request())
        await asyncio.wait_for(Waits.begun.wait(), 60)
        cancel = await client.send("cancel", {"request_id": name})
        answers = {name: answer for name, _, answer in [await client.receive(), await client.receive()]}
        assert answers[cancel] == {"success": True, "error": None, "cancelled": True}
        assert answers[name]["error"].startswith("Cancelled")
        again, _ = await client.ask("cancel", {"request_id": name})
        assert again["cancelled"] is False
        assert (await client.ask("health", {}))[0]["success"]
    assert Waits.ended == ["t"]


async def test_client_that_is_gone_harms_no_other() -> None:
    Waits.begun, Waits.ended = asyncio.Event(), []
    async with serving(lambda *_: recording("3"), Waits) as (server, client):
        gone = Client(server.address)
        await gone.send("run", run_request({"id": "gone", "prompt": "?"}))
        await asyncio.wait_for(Waits.begun.wait(), 60)
        gone.close()
        assert (await client.ask("health", {}))[0]["success"]
    assert Waits.ended == ["gone"]


async def test_eight_runs_at_once_are_answered_each_by_its_own() -> None:
    async with serving(lambda *_: recording("3")) as (_, client):
        names = [await client.send("run", run_request({"id": f"t{n}", "prompt": f"{n}?"})) for n in range(8)]
        found: dict[str, str] = {}
        while len(found) < 8:
            name, kind, answer = await client.receive()
            if kind == "delta":
                found[name] = answer["nodes"][0]["message"]["content"]
    assert found == {name: f"{n}?" for n, name in enumerate(names)}


BAD = {
    "not msgpack": ("run", b"\xc1", "FormatError"),
    "no map": ("run", [1], "the request is [1]: give a map"),
    "no such method": ("play", {}, "unknown method 'play': give health, run or cancel"),
    "no task": ("run", run_request(task_data=5), "task_data is 5: give a map"),
    "no sampling": ("run", run_request(sampling=None), "sampling is None: give a map"),
    "client of another type": ("run", run_request(client={"type": "eval"}), "token ids need a client of type train"),
    "no address": ("run", run_request(client={"type": "train"}), "base_url is None"),
    "no model": ("run", run_request(model=None), "model None"),
    "sampling out of range": ("run", run_request(sampling={"temperature": -1}), "Sampling(temperature=-1)"),
    "prompt of another kind": ("run", run_request({"prompt": 5}), "BadMessage"),
    "image": ("run", run_request({"prompt": [{"role": "user", "content": [{"type": "image_url"}]}]}), "only text"),
    "answer of another kind": ("run", run_request({"prompt": "?", "answer": 5}), "answer: a string is needed"),
}


async def test_bad_request_has_one_clear_error_and_the_server_lives() -> None:
    async with serving(lambda *_: recording("3")) as (_, client):
        await client.socket.send_multipart([b"only", b"two"])  # dropped, since it has no address for a reply
        for name, (route, content, fault) in BAD.items():
            answer, deltas = await client.ask(route, content, raw=isinstance(content, bytes))
            assert (answer["success"], deltas) == (False, []), name
            assert fault in answer["error"], name
        assert (await client.ask("run", run_request()))[0]["success"]


async def test_engine_that_does_not_start_is_tried_again() -> None:
    tries: list[str] = []

    def make(url: str, model: str) -> ScriptedEngine:
        tries.append(url)
        if len(tries) == 1:
            raise EngineDead("no power")
        return recording("3")

    async with serving(make) as (_, client):
        answer, _ = await client.ask("run", run_request())
        assert answer["error"] == "EngineDead: no power"
        assert (await client.ask("run", run_request()))[0]["success"]
    assert len(tries) == 2


async def test_engine_that_dies_is_replaced_for_the_next_request() -> None:
    engines = [ScriptedEngine("3", faults={0: Fault.death()}), recording("3")]
    async with serving(lambda *_: engines.pop(0)) as (_, client):
        answers = []
        while engines:  # the death may be detected after the first episode
            answers.append((await client.ask("run", run_request()))[0])
        assert any("EngineDead" in (answer["error"] or "") for answer in answers)
        assert (await client.ask("run", run_request()))[0]["success"]


@pytest.mark.slow
async def test_command_serves_an_environment_on_an_engine_over_http(demo_model_folder: Path, tmp_path: Path) -> None:
    async with model_server(demo_model_folder) as url:
        with served(tmp_path, demo_model_folder) as address:
            client = Client(address)
            try:
                where = {"type": "train", "base_url": f"{url}/v1"}
                answer, (delta,) = await client.ask("run", run_request(client=where, model="demo"))
            finally:
                client.close()
    assert (answer["success"], delta["set"]["rewards"]["right"]["score"]) == (True, 1.0)
    assert [node["message"]["role"] for node in delta["nodes"]] == ["user", "assistant", "tool", "assistant"]


async def test_players_that_are_not_used_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers_server, "MAX_PLAYERS", 2)
    async with serving(lambda *_: recording("3")) as (server, client):
        for number in range(5):
            assert (await client.ask("run", run_request(model=f"m{number}")))[0]["success"]
            assert len(server._players) <= 2


async def test_address_that_is_taken_is_refused_by_name() -> None:
    async with serving(scripted) as (server, _):
        with pytest.raises(BadOption, match=r"--bind tcp://127.0.0.1:\d+: Address already in use"):
            async with VerifiersServer(Sums, scripted, bind=server.address):
                pass


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"protocol": "tinker", "environment": "calculator"}, "--as tinker: the protocol is not known"),
        ({"protocol": "verifiers"}, "give an environment"),
        ({"protocol": "verifiers", "environment": "calculator", "file": "x.db"}, "the trainer keeps the traces"),
        ({"environment": "calculator"}, "serve calculator: to serve an environment to a trainer, add --as"),
        ({"bind": "tcp://127.0.0.1:1"}, "serve --bind: to serve an environment"),
    ],
)
def test_options_of_the_command_that_do_not_fit_are_refused(given: Any, fault: str) -> None:
    with pytest.raises(BadOption, match=fault):
        serve_command(ServeSettings(**given))
