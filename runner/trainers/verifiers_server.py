"""A server in verifiers' protocol, with which prime-rl and verifiers' `EnvClient` play an environment.

The trainer has the tasks, the groups and the engine. Each request contains a task and the address of the engine; the
answer is the episode as traces with exact ids. Checked with verifiers 0.4.0.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any, Final, Self

from typing_extensions import Unpack

from runner.engines.base import BaseEngine
from runner.environment.checks import as_environment
from runner.environment.environment import Environment
from runner.environment.task_feed import environment_tasks
from runner.errors import BadOption, BadTask, DeltarunnerError
from runner.interop.packages import optional_package
from runner.logs import logger_for
from runner.messages import as_messages
from runner.options import Sampling
from runner.runs.options import RunKeywords
from runner.runs.task_player import Player
from runner.seeds import derive_seed
from runner.tasks import Task, TaskBuilder
from runner.trainers.verifiers_traces import episode_head, trace_delta, trace_summary

__all__ = ["VerifiersServer"]

log = logger_for("trainers")

MAX_PLAYERS: Final = 8
"""Maximum number of cached players: one for each engine, model and `chat_template_kwargs` that a trainer names.

Players in use are not closed, so there may be more.
"""

MAX_OWN_TASKS: Final = 100_000
"""Maximum number of tasks of the environment that are looked up by id."""


class VerifiersServer:
    """A server that plays an environment for clients of verifiers.

        async with VerifiersServer(environment, make_engine, bind="tcp://127.0.0.1:5000") as server:
            await server.serve()

    Args:
        environment: the environment, or its class.
        make_engine: a function that returns the engine for the base URL and the model name of a request.
        bind: the address, in ZeroMQ's notation; port 0 is any free port.
        options: the options of the players: the fields of `RunOptions` by name.

    Raises:
        BadOption: an option is invalid; or, when the server is entered, the address cannot be bound.
        BadEnvironment: pyzmq or msgpack is not installed.
    """

    address: str
    """The address at which the server listens; it has the real port once the server is entered."""

    def __init__(
        self,
        environment: Environment[Any] | type[Environment[Any]],
        make_engine: Callable[[str, str], BaseEngine],
        *,
        bind: str = "tcp://127.0.0.1:5000",
        **options: Unpack[RunKeywords],
    ) -> None:
        optional_package("zmq", extra="verifiers-server", package="pyzmq")
        optional_package("msgpack", extra="verifiers-server")
        if "file" in options:
            raise BadOption("file=: the trainer keeps the traces; leave file= out.")
        self.environment = as_environment(environment)
        """The environment that is played."""
        self.address = bind
        self._make_engine = make_engine
        self._options = options
        self._builder = TaskBuilder(self.environment.task_class())
        self._own: dict[str, Task] | None = None
        self._players: dict[str, asyncio.Task[Player]] = {}
        self._playing: dict[str, int] = {}
        self._started = 0  # number of players that were started
        self._running: dict[tuple[bytes, str], asyncio.Task[None]] = {}
        self._socket: Any = None
        self._context: Any = None

    async def __aenter__(self) -> Self:
        import zmq
        import zmq.asyncio

        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a message to a client that is gone raises an error
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise BadOption(
                f"--bind {self.address}: {error}. Give a free address, such as tcp://127.0.0.1:5001."
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return self

    async def __aexit__(self, *_: object) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for key in list(self._players):
            await self._close_player(key)
        self._socket.close()
        self._context.term()

    async def serve(self) -> None:
        """Answer requests until the call is cancelled."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 4:
                log.warning("a message with %d frames in place of 4 was dropped", len(frames))
                continue
            client, request_id, route, payload = frames
            key = client, request_id.decode(errors="replace")
            # The task is registered before it begins, since a cancellation may follow at once.
            task = asyncio.create_task(self._answer(client, request_id, route, payload))
            self._running[key] = task
            # `key=key` binds the current key, since the next round assigns another one.
            task.add_done_callback(lambda _, key=key: self._running.pop(key, None))  # type: ignore[misc]  # see above

    # --- one request

    async def _answer(self, client: bytes, request_id: bytes, route: bytes, payload: bytes) -> None:
        import msgpack

        try:
            given = msgpack.unpackb(payload, raw=False)
            if not isinstance(given, Mapping):
                raise BadOption(f"the request is {given!r:.60}: give a map.")
            answer = {"success": True, "error": None, **await self._response(client, request_id, route, given)}
        except asyncio.CancelledError:
            # A cancelled request is answered too, since brokers count answers.
            answer = _failure("Cancelled: rollout aborted")
        except Exception as error:  # the error affects only this request
            log.warning("a request failed: %s: %s", type(error).__name__, error)
            answer = _failure(f"{type(error).__name__}: {error}")
        await self._send(client, request_id, b"reply", answer)

    async def _response(
        self, client: bytes, request_id: bytes, route: bytes, given: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        if route == b"health":
            return {}
        if route == b"cancel":
            running = self._running.get((client, str(given.get("request_id"))))
            if running is not None:
                running.cancel()
            return {"cancelled": running is not None}
        if route == b"run":
            return await self._run(client, request_id, given)
        raise BadOption(f"unknown method {route.decode(errors='replace')!r:.40}: give health, run or cancel.")

    async def _run(self, client: bytes, request_id: bytes, given: Mapping[str, Any]) -> dict[str, Any]:
        data, where, sampling = (_map(given, name) for name in ("task_data", "client", "sampling"))
        url, model = _engine_of(where, given.get("model"))
        task = self._task(data)
        async with self._player(url, model, sampling.get("chat_template_kwargs") or {}) as player:
            trajectories = await player.play(task, sampling=Sampling.of_request(sampling))
            weights = {scorer.name: scorer.weight for scorer in player.run.scorers}
        deltas = [trace_delta(each, task=data, weights=weights) for each in trajectories]
        for delta in deltas:
            await self._send(client, request_id, b"delta", delta)
        name = type(self.environment).__name__
        head = episode_head(trajectories, task=data, environment=name, number=uuid.uuid4().hex)
        return {"head": head, "traces": [trace_summary(delta) for delta in deltas]}

    async def _send(self, client: bytes, request_id: bytes, kind: bytes, content: Mapping[str, Any]) -> None:
        import msgpack
        import zmq

        try:
            await self._socket.send_multipart([client, request_id, kind, msgpack.packb(content, use_bin_type=True)])
        except zmq.ZMQError as error:
            log.warning("an answer was not sent: %s", error)

    # --- tasks

    def _task(self, data: Mapping[str, Any]) -> Task:
        """Return a task made from the data of a request; without a prompt, the environment's task with the same id.

        Raises:
            BadTask: the request has neither a prompt nor the id of a task of the environment, or its data is invalid.
        """
        if data.get("prompt") is None and data.get("id") is not None:
            own = self._own_tasks()
            if data["id"] in own:
                return own[data["id"]]
        if data.get("prompt") is None:
            raise BadTask(
                f"task_data has no prompt, and its id {data.get('id')!r:.60} is not one of the environment's tasks: "
                "give a prompt, or the id of a task."
            )
        fields = {name: value for name, value in data.items() if name in self._builder.known and value is not None}
        further = {name: value for name, value in data.items() if name not in self._builder.known and value is not None}
        system = further.pop("system_prompt", None)
        prompt = [{"role": "system", "content": system}] if system else []
        fields["prompt"] = [*prompt, *as_messages(data["prompt"])]
        fields["id"] = str(data.get("id") or data.get("name") or _hash(data))
        fields["info"] = {**further, **(fields.get("info") or {})}
        try:
            return self._builder(fields)
        except (TypeError, ValueError) as error:
            raise BadTask(f"task_data: {error}") from error

    def _own_tasks(self) -> Mapping[str, Task]:
        if self._own is None:
            given: Any = environment_tasks(self.environment) if self.environment.overrides("tasks") else ()
            tasks = islice(given, MAX_OWN_TASKS) if isinstance(given, Iterable) else ()
            self._own = {task.id: task for task in tasks}
        return self._own

    # --- players

    @asynccontextmanager
    async def _player(self, url: str, model: str, template: Mapping[str, Any]) -> AsyncIterator[Player]:
        """Yield the player for an engine, a model and variables of the template, and keep it for later requests."""
        key = json.dumps([url, model, template], sort_keys=True, default=str)
        if key not in self._players:
            await self._make_room()
        if key not in self._players:
            self._players[key] = asyncio.create_task(self._start_player(url, model, template))
        self._playing[key] = self._playing.get(key, 0) + 1
        starting = self._players[key]
        try:
            # The start is shielded, since other requests may wait for it when the request that began it is cancelled.
            player = await asyncio.shield(starting)
            yield player
        except DeltarunnerError:
            if self._players.get(key) is starting and _has_ended(starting):
                await self._close_player(key)  # the next request starts another player, since the engine may be back
            raise
        finally:
            self._playing[key] -= 1
            if not self._playing[key]:
                del self._playing[key]

    async def _start_player(self, url: str, model: str, template: Mapping[str, Any]) -> Player:
        options: dict[str, Any] = {**self._options}
        options["template_options"] = {**(options.get("template_options") or {}), **template}
        if self._started:  # each player counts visits of a task from 0, so later players need other seeds
            options["seed"] = derive_seed(options.get("seed", 0), "player", self._started)
        self._started += 1
        return await Player(self.environment, self._make_engine(url, model), **options).start()

    async def _make_room(self) -> None:
        idle = [key for key in self._players if not self._playing.get(key)]
        for key in idle[: max(0, len(self._players) - MAX_PLAYERS + 1)]:
            await self._close_player(key)

    async def _close_player(self, key: str) -> None:
        starting = self._players.pop(key)
        with suppress(Exception):  # the error of a failed start was already sent as the answer to its requests
            player = await starting
            player.cancel()
            await player.aclose()


def _has_ended(starting: asyncio.Task[Player]) -> bool:
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().error is not None


def _failure(text: str) -> dict[str, Any]:
    return {"success": False, "error": text}


def _map(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = given.get(name)
    if not isinstance(value, Mapping):
        raise BadOption(f"run: {name} is {value!r:.60}: give a map.")
    return value


def _engine_of(client: Mapping[str, Any], model: Any) -> tuple[str, str]:
    url = client.get("base_url")
    if client.get("type") != "train":
        raise BadOption(f"run: the client's type is {client.get('type')!r:.40}: token ids need a client of type train.")
    if not isinstance(url, str) or not isinstance(model, str):
        raise BadOption(f"run: base_url is {url!r:.60} and model {model!r:.60}: give the engine's address and model.")
    return url, model


def _hash(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
