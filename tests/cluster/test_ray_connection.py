"""This process's connection to Ray: the engine that opens it, the engines that share it, and the one that closes it."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
from typing import Any
from unittest.mock import MagicMock

import pytest

from runner import BadOption, EngineDead, ScriptedEngine
from runner.cluster.protocol import WorkerLost
from runner.cluster.ray import connection
from tests.cluster.listening import HTTP2, listening
from tests.cluster.ray_double import launcher

pytestmark = [pytest.mark.anyio, pytest.mark.asyncio_alone]


async def test_connection_ends_when_the_last_launcher_closes(ray: Any) -> None:
    first, second = launcher(), launcher()
    await first.open()
    await second.open()
    await first.close()
    assert ray.is_initialized()
    await second.close()
    assert not ray.is_initialized()


async def test_ray_is_started_by_a_thread_that_lives_until_it_is_left(ray: Any) -> None:
    made, init = list[threading.Thread](), ray.init

    def noted(**settings: Any) -> None:
        made.append(threading.current_thread())
        init(**settings)

    ray.init = noted
    first, second = launcher(), launcher()
    await asyncio.create_task(first.open())  # the threads of anyio's pool end with the task that used it first
    await second.open()
    await first.close()
    (thread,) = made
    assert thread.is_alive()
    assert thread.daemon, "the thread does not keep the process alive"
    await second.close()
    assert not thread.is_alive()


async def test_no_thread_is_left_where_no_cluster_can_be_started(ray: Any) -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "deltarunner ray"}
    ray.init = MagicMock(side_effect=RuntimeError("the port is taken"))
    for _ in range(2):
        with pytest.raises(BadOption, match=r"no cluster of Ray could be started on this machine: the port is taken"):
            await launcher().open()
    assert before == {thread for thread in threading.enumerate() if thread.name == "deltarunner ray"}


def ray_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "deltarunner ray"]


@pytest.mark.parametrize("connects_again", [False, True])
async def test_connection_closed_by_other_code_is_opened_again(ray: Any, *, connects_again: bool) -> None:
    first, second = launcher(), launcher()
    await first.open()
    ray.shutdown()
    if connects_again:
        ray.init()
    await second.open()
    await first.close()
    assert ray.is_initialized(), "the first launcher does not close the second one's session"
    await second.close()
    assert ray.is_initialized() == connects_again, "the launcher that connected closes the connection"
    assert not ray_threads()


async def test_connection_of_other_code_outlives_ours(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    removed = list[str]()
    monkeypatch.setattr(connection, "give_own_token", lambda until_left: until_left.callback(removed.append, "token"))
    only = launcher()
    await only.open()
    ray.shutdown()
    ray.init()
    await only.close()
    assert ray.is_initialized()
    assert not ray_threads()
    assert not removed, "the other cluster requires the token"


async def test_cluster_that_ended_with_its_thread_is_refused() -> None:
    with listening(HTTP2) as address:
        connection._require_head("RayEngines", address)
    message = f"RayEngines: this process is connected to a cluster of Ray that is gone, the one at {address}"
    with pytest.raises(BadOption, match=f"^{re.escape(message)} .* Start this process again, .* in the main thread"):
        connection._require_head("RayEngines", address)


async def test_ray_is_not_called_after_other_code_closed_it(ray: Any) -> None:
    only = launcher()
    await only.open()
    worker = only.start(ScriptedEngine("hi"), 0)
    asked, unsent = worker.send("hello"), ray.mock_calls.copy()
    ray.shutdown()
    with pytest.raises(EngineDead, match=r"RayEngines: other code of this process called ray.shutdown\(\)"):
        await only.require_head()
    with pytest.raises(EngineDead):
        only.start(ScriptedEngine("hi"), 1)
    with pytest.raises(EngineDead):
        await only.put({})
    await asyncio.sleep(0.05)  # longer than the tick after which calls are sent
    with pytest.raises(WorkerLost, match=r"called ray.shutdown\(\)"):
        await asked
    worker.kill()
    only.forget(0)
    only.forget_run(0)
    await only.close()
    new = [call for call in ray.mock_calls[len(unsent) :] if "get_runtime_context" not in str(call)]
    assert not new, "Ray would start another cluster"


async def test_another_address_than_the_connections_is_refused_by_name(ray: Any, listener: str) -> None:
    ray.util.get_node_ip_address = lambda: "10.0.0.1"
    ray.get_runtime_context().gcs_address = f"10.0.0.1:{listener.rpartition(':')[2]}"
    first = launcher(address=listener)
    await first.open()
    for same in (None, listener, "auto", ray.get_runtime_context().gcs_address):
        second = launcher(address=same)
        await second.open()
        await second.close()
    message = (
        "RayEngines(address='10.0.0.9:6379'): this process is connected to another cluster of Ray already, the one"
    )
    with pytest.raises(BadOption, match=re.escape(message)):
        await launcher(address="10.0.0.9:6379").open()
    assert ray.is_initialized()
    await first.close()
    assert not ray.is_initialized()


@pytest.mark.parametrize(
    ("given", "there", "same"),
    [
        ("head:6379", "10.0.0.1:6379", True),
        ("head:6379", "[fd00::1]:6379", True),
        ("[fd00::1]:6379", "[fd00:0::0:1]:6379", True),
        ("[::1]:6379", "[fd00::7]:6379", True),
        ("localhost:6379", "[fd00::7]:6379", True),
        ("head:6380", "10.0.0.1:6379", False),
        ("[fd00::2]:6379", "[fd00::1]:6379", False),
        ("nowhere:6379", "10.0.0.1:6379", False),
        ("nowhere:6379", "nowhere:6379", True),
    ],
)
def test_addresses_are_compared_by_where_they_lead(
    ray: Any, monkeypatch: pytest.MonkeyPatch, given: str, there: str, *, same: bool
) -> None:
    ray.util.get_node_ip_address = lambda: "fd00::7"
    known, by_number = {"head": ["10.0.0.1", "fd00::1"], "nowhere": []}, socket.getaddrinfo

    def looked_up(host: str, *rest: Any) -> list[Any]:
        if known.get(host) == []:
            raise OSError("Name or service not known")
        return [found for number in known.get(host, [host]) for found in by_number(number, *rest)]

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    assert connection._meet(given, there) is same


@pytest.mark.parametrize("named", ["argument", "variable"])
async def test_an_address_is_refused_beside_a_cluster_of_ones_own(
    ray: Any, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    first = launcher()
    await first.open()
    address = "auto"
    if named == "variable":
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
        address = ""
    with pytest.raises(BadOption, match="connected to another cluster of Ray already, one that was started"):
        await launcher(address=address or None).open()
    await first.close()
