"""Calls to an actor of Ray, many in one: a call of Ray's costs half a millisecond on either side, whatever is in it."""

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
from collections.abc import Awaitable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias
from uuid import uuid4

import anyio
import anyio.to_thread

from runner.cluster.words import Stored, WorkerLost
from runner.errors import BadOption, DeltarunnerError, EngineError
from runner.version import installed_version

__all__ = ["AnsweringActor", "RayWorker", "leave_word"]

WORDS_SECONDS: Final = 2.0
"""How long last words may take to be left, or to be found."""

ASK_AGAIN_SECONDS: Final = 0.2
"""Seconds from one question why an actor is unavailable to the next."""

_SCRIPT: Final = b"__main__"
"""Classes of a script are sent by value, as only Ray does."""

Call: TypeAlias = tuple[int, str, Any]
"""Its number, the method, what it is given: pickled, or as it is where only Ray can send it."""

Answer: TypeAlias = tuple[int, bytes]
"""The number of the call, and what came of it, pickled."""


class RayWorker:
    """An actor as who calls it has it.

    What is sent within a tick goes as one call, and answers come the same way: one call of Ray's is always out that
    waits for some. It also tells of the actor's death.

    Args:
        actor: Ray's handle of an `AnsweringActor`.
        tick: how many seconds calls wait for others that go with them.
    """

    def __init__(self, actor: Any, *, tick: float) -> None:
        self._actor = actor
        self._take = actor.take.options(num_returns=0)
        self._tick = tick
        self._name = uuid4().hex
        self._numbers = itertools.count()
        self._calls: list[Call] = []
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._hears = False
        self._sent = 0
        self._lost: BaseException | None = None

    def send(self, call: str, *arguments: Any) -> Awaitable[Any]:
        """Have a method of the actor's object called."""
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
        if self._lost is not None:
            return
        try:
            self._take.remote(self._name, calls)
            self._sent += 1
        except Exception:  # Ray's, of what it cannot send
            for call in calls:
                self._send_alone(call)
        if self._answers and not self._hears:
            self._hear()

    def _send_alone(self, call: Call) -> None:
        number, name, _ = call
        try:
            self._take.remote(self._name, [call])
            self._sent += 1
        except Exception as error:
            _fail(self._answers.pop(number), BadOption(f"{name}: what is sent to a worker cannot be pickled: {error}"))

    def _hear(self) -> None:
        self._hears = True
        try:
            told = self._ask()
        except Exception as error:  # Ray's own, where it was left meanwhile
            self._lose(WorkerLost(f"nobody can ask it any more: {error}"))
            return
        told.add_done_callback(self._heard)

    def _ask(self) -> asyncio.Future[list[Answer]]:
        answers = self._actor.answers.remote(self._name)
        self._sent += 1
        return asyncio.wrap_future(answers.future())

    def _heard(self, told: asyncio.Future[Any]) -> None:
        if (error := told.exception()) is not None:
            if type(error).__name__ == "ActorUnavailableError" and self._lost is None:
                self._lost = error
                asyncio.get_running_loop().call_later(WORDS_SECONDS, self._lose, error)
                self._ask_why()
            else:
                self._lose(error)
        else:
            for number, packed in told.result():
                if (answer := self._answers.pop(number, None)) is None:  # it was given up meanwhile
                    continue
                try:
                    answer.set_result(pickle.loads(packed))
                except Exception as error:  # of a class that is not here
                    _fail(answer, WorkerLost(f"what it gave cannot be read here: {error}"))
            self._hears = False
            if self._answers:
                self._hear()

    def _ask_why(self) -> None:
        """Ask Ray again why the actor is unavailable: first it says so of a dead process too, and then what is true."""
        try:
            told = self._ask()
        except Exception:  # Ray's own, where it was left meanwhile
            return
        told.add_done_callback(self._heard_why)

    def _heard_why(self, told: asyncio.Future[Any]) -> None:
        error = None if told.cancelled() else told.exception()
        if error is None or not self._answers:
            return
        if type(error).__name__ == "ActorUnavailableError":
            asyncio.get_running_loop().call_later(ASK_AGAIN_SECONDS, self._ask_why)
        else:
            self._lost = error
            self._lose(error)

    def _lose(self, error: BaseException) -> None:
        self._lost = self._lost or error
        for answer in self._answers.values():
            _fail(answer, self._lost)
        self._answers.clear()

    def part(self) -> None:
        """Leave the actor to others, once what was sent has gone there; nobody may wait for an answer any more."""
        if self._lost is None:
            self._send()
            self._lose(WorkerLost("it was left"))
            self._actor.part.options(num_returns=0).remote(self._name, self._sent)

    def kill(self) -> None:
        """End the actor. Who waits for an answer is told at once: a machine that is silent would never tell."""
        if self._lost is None or self._answers:
            self._lose(WorkerLost("it was ended"))
        importlib.import_module("ray").kill(self._actor)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    answer.set_exception(error)
    answer.exception()  # looked at, so that nobody is told of one that nobody waits for


class RayAnswer:
    """The answer to a call; it stays when who waits for it is cancelled."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        return self._read().__await__()

    async def _read(self) -> Any:
        from ray.exceptions import RayError

        try:
            answer = await asyncio.shield(self._answer)
        except RayError as error:
            if "creation task" in str(error):  # what keeps one from being made keeps them all
                raise EngineError(_not_made(str(error))) from error
            raise WorkerLost(await _last_words(error) or _why(error)) from error
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
    return str(error).strip().splitlines()[0]


def _how(told: str) -> str:
    """How a process died, as far as Ray says it."""
    if (code := re.search(r"exit code[ =:]+(-?\d+)", told)) is not None:
        number = int(code[1])
        try:
            return f": {signal.Signals(-number).name}" if number < 0 else f" with exit code {number}"
        except ValueError:
            return f" with exit code {number}"
    if "connection error" in told:  # nothing but the kernel ends a process without a word
        return ": it was killed (SIGKILL, as by the kernel where memory is short) or crashed; its log may say more"
    return ""


def _not_made(told: str) -> str:
    machine = re.search(r"\bip=([^,\s)]+)", told)
    where = f" on {machine[1]}" if machine is not None else ""
    cause = told.strip().splitlines()[-1].strip()
    if re.search(r"No module named 'runner['.]", cause) is None:
        return f"a worker cannot be made{where}: {cause}"
    version = installed_version("deltarunner")
    return (
        f"a worker cannot be made{where}: deltarunner is not there, or another version of it ({cause}). Install it "
        f"with the Python that `ray start` runs with on that machine: pip install 'deltarunner[ray]"
        f"{f'=={version}' if version is not None else ''}', and what its engine needs."
    )


def leave_word(words: str) -> None:
    """Leave the last words of this actor, which is about to end, where who called it finds them."""
    ray = importlib.import_module("ray")
    put = importlib.import_module("ray.experimental.internal_kv")._internal_kv_put
    key = _words_key(ray.get_runtime_context().get_actor_id())
    # In a thread: where they cannot be left it ends all the same.
    leaving = threading.Thread(target=put, args=(key, words.encode()), daemon=True)
    leaving.start()
    leaving.join(WORDS_SECONDS)


async def _last_words(error: BaseException) -> str:
    """What the actor left to be said of its death, if anything."""
    from ray.exceptions import ActorDiedError

    if not isinstance(error, ActorDiedError) or error.actor_id is None:
        return ""
    get = importlib.import_module("ray.experimental.internal_kv")._internal_kv_get
    with anyio.move_on_after(WORDS_SECONDS), suppress(Exception):  # Ray's, where it was left meanwhile
        found = await anyio.to_thread.run_sync(get, _words_key(error.actor_id), abandon_on_cancel=True)
        return "" if found is None else found.decode()
    return ""


def _words_key(actor: str) -> bytes:
    return f"deltarunner-last-words-{actor}".encode()


class Raised:
    """An error that a method raised, on its way to who called it."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        # By class and text: what it was raised from may not be pickled, and says nothing there.
        return _raised, (type(self.error), str(self.error))


def _raised(kind: type[DeltarunnerError], text: str) -> Raised:
    error = kind.__new__(kind)
    error.args = (text,)
    return Raised(error)


@dataclass(frozen=True, slots=True)
class Failed:
    """A method failed in a way that is none of ours: its worker is not to be relied on."""

    why: str

    @property
    def error(self) -> WorkerLost:
        """What who called it gets."""
        return WorkerLost(f"it failed: {self.why}")


@dataclass(eq=False, slots=True)
class _Caller:
    """One who calls, as the actor knows it."""

    answers: list[Answer] = field(default_factory=list)
    """What came of calls since it last heard."""
    some: anyio.Event = field(default_factory=anyio.Event)
    """Set when there is some."""
    came: int = 0
    """How many messages came from it."""
    sent: int | None = None
    """How many messages it sent in all; `None` until it has left."""

    @property
    def gone(self) -> bool:
        """It has left, and nothing of it is still to come."""
        return self.came == self.sent


class AnsweringActor:
    """The other end: calls the methods of `process`."""

    tick: float
    """How many seconds answers wait for others that go with them."""
    process: Any

    def __init__(self) -> None:
        self._callers: defaultdict[str, _Caller] = defaultdict(_Caller)

    async def take(self, name: str, calls: Sequence[Call]) -> None:
        """Call methods, each in a task of its own, for the caller of this name."""
        caller = self._message_of(name)
        async with anyio.create_task_group() as group:
            for call in calls:
                group.start_soon(self._answer, caller, *call)

    async def part(self, name: str, sent: int) -> None:
        """Forget a caller once all the messages it sent are here: Ray may deliver this one before others."""
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
        except Exception as error:  # whatever it is, who called is told
            answer = Failed(repr(error))
        finally:
            caller.answers.append((number, _packed(answer)))
            caller.some.set()

    async def answers(self, name: str) -> list[Answer]:
        """What came of this caller's calls since it last heard, as soon as there is any."""
        caller = self._message_of(name)
        await caller.some.wait()
        await anyio.sleep(self.tick)
        answers, caller.answers, caller.some = caller.answers, [], anyio.Event()
        return answers


class _Packer(pickle.Pickler):
    """Leaves to Ray what lies in its store, whose owners it counts."""

    def persistent_id(self, value: Any) -> None:
        if isinstance(value, Stored):
            raise pickle.PicklingError("it lies in Ray's store")


def _wrapped(arguments: tuple[Any, ...]) -> Any:
    """Pickled each by itself: what cannot be read at the other end is then the trouble of its own call alone."""
    buffer = io.BytesIO()
    try:
        _Packer(buffer).dump(arguments)
    except Exception:
        return arguments
    packed = buffer.getvalue()
    return arguments if _SCRIPT in packed else packed


def _packed(answer: Any) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception:  # what only Ray's can, such as an object of a script's own class
        try:
            packed: bytes = importlib.import_module("ray").cloudpickle.dumps(answer)
        except Exception as error:
            packed = pickle.dumps(Failed(f"what it gave cannot be pickled: {error}"))
        return packed
