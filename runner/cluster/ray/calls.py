"""Batches of calls to an actor of Ray. One call of Ray takes half a millisecond on each side, for any size."""

from __future__ import annotations

import asyncio
import importlib
import io
import itertools
import pickle
import re
import signal
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import uuid4

import anyio
import anyio.to_thread

from runner.cluster.protocol import StoredObject, WorkerLost
from runner.errors import BadOption, DeltarunnerError, EngineError, first_line
from runner.version import installed_version

__all__ = ["AnsweringActor", "RayWorker", "record_exit_reason"]

EXIT_REASON_SECONDS: Final = 2.0
"""Seconds to record or read the reason of an actor's exit."""

ASK_AGAIN_SECONDS: Final = 0.2
"""Seconds between two requests for the reason why an actor is unavailable."""

_SCRIPT: Final = b"__main__"
"""The module name of a script in a pickle. Its classes must be sent by value, which only Ray's pickler does."""

Call: TypeAlias = tuple[int, str, Any]
"""Number, method and arguments of a call. The arguments are pickled, or are objects that only Ray can pickle."""

Answer: TypeAlias = tuple[int, bytes]
"""The number of the call, and its pickled result."""


class RayWorker:
    """The caller's side of an actor.

    Calls of one tick are sent as one call of Ray. While results are awaited, another call of Ray is pending. That
    call returns all results of a tick, and fails when the actor dies.

    Args:
        actor: Ray's handle of an `AnsweringActor`.
        tick: seconds that a call waits for others to be sent with it.
        connected: a function that returns False once the connection to the actor's cluster is closed. Then Ray must
            not be called, since it would start another cluster.
    """

    def __init__(self, actor: Any, *, tick: float, connected: Callable[[], bool] = lambda: True) -> None:
        self._actor = actor
        self._take = actor.take.options(num_returns=0)
        self._tick = tick
        self._name = uuid4().hex
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._is_fetching = False
        self._sent = 0
        self._connected = connected
        self._lost: BaseException | None = None

    def send(self, call: str, *arguments: Any) -> Awaitable[Any]:
        """Call a method of the actor's object, and return the answer, to be awaited."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        if self._lost is not None:
            _fail(answer, self._lost)
            return RayAnswer(answer)
        number = next(self._numbers)
        self._answers[number] = answer
        self._calls.append((number, call, _wrapped(arguments)))
        if len(self._calls) == 1:
            loop.call_later(self._tick, self._send)
        return RayAnswer(answer)

    def _send(self) -> None:
        calls, self._calls = self._calls, []
        if self._lost is not None or self._is_disconnected():
            return
        try:
            self._take.remote(self._name, calls)
            self._sent += 1
        except Exception:  # raised by Ray for a value that it cannot pickle
            for call in calls:
                self._send_alone(call)
        if self._answers and not self._is_fetching:
            self._fetch_answers()

    def _is_disconnected(self) -> bool:
        """Return True if other code has closed the connection. In this case, fail all pending calls."""
        if self._connected():
            return False
        self._lose(WorkerLost("other code of this process called ray.shutdown()"))
        return True

    def _send_alone(self, call: Call) -> None:
        number, name, _ = call
        try:
            self._take.remote(self._name, [call])
            self._sent += 1
        except Exception as error:
            fix = "give values that can be sent to a worker, such as functions of a module"
            _fail(self._answers.pop(number), BadOption(f"{name}: an argument cannot be pickled ({error}): {fix}."))

    def _fetch_answers(self) -> None:
        if self._is_disconnected():
            return
        self._is_fetching = True
        try:
            future = self._request_answers()
        except Exception as error:  # raised by Ray if the process has disconnected
            self._lose(WorkerLost(f"it cannot be called any more: {error}"))
            return
        future.add_done_callback(self._on_answers)

    def _request_answers(self) -> asyncio.Future[list[Answer]]:
        answers = self._actor.answers.remote(self._name)
        self._sent += 1
        return asyncio.wrap_future(answers.future())

    def _on_answers(self, future: asyncio.Future[Any]) -> None:
        if (error := future.exception()) is not None:
            if type(error).__name__ == "ActorUnavailableError" and self._lost is None:
                self._lost = error
                asyncio.get_running_loop().call_later(EXIT_REASON_SECONDS, self._lose, error)
                self._fetch_reason()
            else:
                self._lose(error)
        else:
            for number, packed in future.result():
                if (answer := self._answers.pop(number, None)) is None:  # the caller no longer waits for the result
                    continue
                try:
                    answer.set_result(pickle.loads(packed))
                except Exception as error:  # a result of a class that cannot be imported here
                    _fail(answer, WorkerLost(f"its result cannot be read here: {error}"))
            self._is_fetching = False
            if self._answers:
                self._fetch_answers()

    def _fetch_reason(self) -> None:
        """Call the actor again for the cause of its loss. At first, Ray reports a dead actor only as unavailable."""
        if self._is_disconnected():
            return
        try:
            future = self._request_answers()
        except Exception:  # raised by Ray if the process has disconnected
            return
        future.add_done_callback(self._on_reason)

    def _on_reason(self, future: asyncio.Future[Any]) -> None:
        error = None if future.cancelled() else future.exception()
        if error is None or not self._answers:
            return
        if type(error).__name__ == "ActorUnavailableError":
            asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self._fetch_reason)
        else:
            self._lost = error
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self._lost = self._lost or error
        for answer in self._answers.values():
            _fail(answer, self._lost)
        self._answers.clear()

    def part(self) -> None:
        """Send the queued calls, then disconnect from the actor. Other callers may continue to use it.

        Every call without a result, including the calls just sent, fails with `WorkerLost`.
        """
        if self._lost is None and not self._is_disconnected():
            self._send()
            self._lose(WorkerLost("this client has disconnected from it"))
            self._actor.part.options(num_returns=0).remote(self._name, self._sent)

    def kill(self) -> None:
        """Kill the actor. Pending calls fail at once, even if the actor's machine does not answer."""
        if self._lost is None or self._answers:
            self._lose(WorkerLost("it was ended"))
        if not self._is_disconnected():
            importlib.import_module("ray").kill(self._actor)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # retrieves the exception; otherwise asyncio warns if nothing awaits the future


class RayAnswer:
    """The result of a call. Cancelling one task that awaits it does not cancel the result."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        return self._read().__await__()

    async def _read(self) -> Any:
        from ray.exceptions import RayError

        try:
            answer = await asyncio.shield(self._answer)
        except RayError as error:
            if "creation task" in str(error):  # a failure to create the actor is the result of all calls
                raise EngineError(_not_made(str(error))) from error
            raise WorkerLost(await _exit_reason(error) or _why(error)) from error
        if isinstance(answer, Raised | Failed):
            raise answer.error
        return answer


def _why(error: BaseException) -> str:
    from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayTaskError

    if isinstance(error, RayTaskError):
        return f"it failed: {error.cause!r}"
    if isinstance(error, ActorUnavailableError):
        return "its machine cannot be reached"
    if isinstance(error, ActorDiedError):
        return f"its process died{_how(str(error))}"
    if isinstance(error, OutOfMemoryError):
        used = re.search(r"was (\S+ used / \S+ limit)", str(error))
        return "its machine was short of memory, and Ray ended it" + (f": {used[1]}" if used is not None else "")
    return first_line(error)


def _how(report: str) -> str:
    """Return how a process died, as a clause to append; "" if Ray does not report it."""
    if (code := re.search(r"exit code[ =:]+(-?\d+)", report)) is not None:
        number = int(code[1])
        try:
            return f": {signal.Signals(-number).name}" if number < 0 else f" with exit code {number}"
        except ValueError:
            return f" with exit code {number}"
    if "connection error" in report:  # Ray reports this for a process that was killed or that crashed
        return ": it was killed (SIGKILL, for example by the kernel when memory is short) or crashed; see its log"
    return ""


def _not_made(report: str) -> str:
    machine = re.search(r"\bip=([^,\s)]+)", report)
    where = f" on {machine[1]}" if machine is not None else ""
    cause = report.strip().splitlines()[-1].strip()
    if re.search(r"No module named 'runner['.]", cause) is None:
        return f"a worker cannot be created{where}: {cause}"
    version = installed_version("deltarunner")
    return (
        f"a worker cannot be created{where}: deltarunner is missing there, or has another version ({cause}). Install "
        f"it with the Python that `ray start` runs with on that machine: pip install 'deltarunner[ray]"
        f"{f'=={version}' if version is not None else ''}', and what its engine needs."
    )


def record_exit_reason(words: str) -> None:
    """Record the reason why this actor is about to end, so that its callers can read the reason."""
    ray = importlib.import_module("ray")
    put = importlib.import_module("ray.experimental.internal_kv")._internal_kv_put
    key = _exit_reason_key(ray.get_runtime_context().get_actor_id())
    # A thread calls Ray, so that the process ends even if the call hangs.
    leaving = threading.Thread(target=put, args=(key, words.encode()), daemon=True)
    leaving.start()
    leaving.join(EXIT_REASON_SECONDS)


async def _exit_reason(error: BaseException) -> str:
    """Return the recorded reason why an actor exited, given Ray's error about the actor; "" if none can be read."""
    from ray.exceptions import ActorDiedError

    if not isinstance(error, ActorDiedError) or error.actor_id is None:
        return ""
    get = importlib.import_module("ray.experimental.internal_kv")._internal_kv_get
    with anyio.move_on_after(EXIT_REASON_SECONDS), suppress(Exception):  # raised by Ray if the process has disconnected
        found = await anyio.to_thread.run_sync(get, _exit_reason_key(error.actor_id), abandon_on_cancel=True)
        return "" if found is None else found.decode()
    return ""


def _exit_reason_key(actor: str) -> bytes:
    return f"deltarunner-exit-reason-{actor}".encode()


class Raised:
    """An error that a method raised, in the form that is sent to the caller."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        # The error is sent as class and text, since its cause may not be picklable, and the caller does not need it.
        return _raised, (type(self.error), str(self.error))


def _raised(kind: type[DeltarunnerError], text: str) -> Raised:
    error = kind.__new__(kind)
    error.args = (text,)
    return Raised(error)


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of a method that raised an error other than a `DeltarunnerError`.

    The caller treats the worker as lost.
    """

    why: str

    @property
    def error(self) -> WorkerLost:
        """The error that the caller receives."""
        return WorkerLost(f"it failed: {self.why}")


@dataclass(eq=False, slots=True)
class _Caller:
    """The actor's record of one caller."""

    answers: list[Answer] = field(default_factory=list)
    """Results since the caller's last request for results."""
    some: anyio.Event = field(default_factory=anyio.Event)
    """Set when there are results."""
    came: int = 0
    """Number of messages that arrived from the caller."""
    sent: int | None = None
    """Number of all messages that the caller sent; None until the caller has left."""

    @property
    def gone(self) -> bool:
        """True if the caller has left and all its messages have arrived."""
        return self.came == self.sent


class AnsweringActor:
    """The receiver of calls in an actor: it runs methods of `process`, and keeps the results for the callers."""

    tick: float
    """Seconds that results wait for others to be sent with them."""
    process: Any

    def __init__(self) -> None:
        self._callers: defaultdict[str, _Caller] = defaultdict(_Caller)

    async def take(self, name: str, calls: Sequence[Call]) -> None:
        """Call methods for the named caller, each in a task of its own."""
        caller = self._message_of(name)
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(self._answer, caller, *call)

    async def part(self, name: str, sent: int) -> None:
        """Forget a caller once all of its `sent` messages have arrived. Ray may deliver this message before others."""
        caller = self._callers[name]
        caller.sent = sent
        caller.some.set()
        if caller.gone:
            del self._callers[name]

    def _message_of(self, name: str) -> _Caller:
        caller = self._callers[name]
        caller.came += 1
        if caller.gone:
            del self._callers[name]
        return caller

    async def _answer(self, caller: _Caller, number: int, call: str, wrapped: Any) -> None:
        answer: Any = Failed("it was cut")
        try:
            arguments = pickle.loads(wrapped) if isinstance(wrapped, bytes) else wrapped
            answer = await getattr(self.process, call)(*arguments)
        except DeltarunnerError as error:
            answer = Raised(error)
        except Exception as error:  # any error is reported to the caller
            answer = Failed(repr(error))
        finally:
            caller.answers.append((number, _packed(answer)))
            caller.some.set()

    async def answers(self, name: str) -> list[Answer]:
        """Return the results of this caller's calls since its last request, as soon as there are any."""
        caller = self._message_of(name)
        await caller.some.wait()
        await anyio.sleep(self.tick)
        answers, caller.answers, caller.some = caller.answers, [], anyio.Event()
        return answers


class _ArgumentPickler(pickle.Pickler):
    """A pickler that refuses references to Ray's store. Ray must pickle these references, since it counts them."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, StoredObject):
            raise pickle.PicklingError("it is in Ray's store")


def _wrapped(arguments: tuple[Any, ...]) -> Any:
    """Pickle the arguments of one call, so that unreadable arguments fail only this call.

    Arguments that only Ray can pickle are returned as they are.
    """
    buffer = io.BytesIO()
    try:
        _ArgumentPickler(buffer).dump(arguments)
    except Exception:
        return arguments
    packed = buffer.getvalue()
    return arguments if _SCRIPT in packed else packed


def _packed(answer: Any) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception:  # only Ray can pickle the answer, such as an object of a class of a script
        try:
            packed: bytes = importlib.import_module("ray").cloudpickle.dumps(answer)
        except Exception as error:
            packed = pickle.dumps(Failed(f"its result cannot be pickled: {error}"))
        return packed
