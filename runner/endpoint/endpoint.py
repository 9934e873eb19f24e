"""An episode's endpoint for the environment's author: its address, its threads, and agent programs that use it."""

from __future__ import annotations

import os
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio

from runner.chat_requests import Verdict
from runner.endpoint.client_config import Address, environ, files
from runner.endpoint.episode_route import EpisodeRoute, RequestHandler
from runner.endpoint.programs import (
    MAX_OUTPUT_BYTES,
    FinishedProgram,
    program_environ,
    program_variables,
    run_program,
    write_files,
)
from runner.endpoint.server import EndpointServer
from runner.engines.base import FinishReason
from runner.errors import BadOption, EpisodeOver
from runner.sandbox.sandbox import Sandbox
from runner.trajectory import Turn

__all__ = ["ChatThread", "Endpoint", "serving"]

END_GRACE_SECONDS: Final = 10.0
"""Time for a program to end by itself once the episode is over."""


@dataclass(frozen=True, slots=True)
class ChatThread:
    """A conversation that a client began, such as with a main agent or a sub-agent, or for a title."""

    name: str
    """Name of the conversation's agent. The final names, `main` and numbers, are set after the `rollout`."""
    label: str
    """The client's own name for the conversation, or ""."""
    tools: Sequence[str]
    """Names of the tools that the first request of the conversation offered."""
    trained: bool
    """True if the turns of the conversation are trained on."""
    turns: Sequence[Turn]
    """The turns of the conversation."""
    verdicts: Sequence[Verdict]
    """The relation of each request of the conversation to earlier turns."""


class Endpoint:
    """The address of an episode for agent programs."""

    base_url: str
    """The URL for OpenAI's clients; it ends with /v1, and contains the key."""
    root_url: str
    """`base_url` without /v1, for Anthropic's clients."""
    api_key: str
    """The API key, for clients that need one. It is valid for this episode, until the episode ends."""
    end_url: str
    """The URL that ends the episode with a reward, by `POST` with `{"reward": number}`.

    The URL contains a second key, which allows nothing else. Do not show this URL to the programs that are rewarded.
    `environ` and the settings of programs do not contain it.
    """
    model: str
    """Name of the model."""
    context: int
    """Maximum number of ids of prompt and answer together, for clients that limit their histories."""
    environ: Mapping[str, str]
    """Environment variables by which known clients find the endpoint."""

    def __init__(
        self,
        address: Address,
        end_url: str,
        threads: Callable[[], list[ChatThread]],
        stack: AsyncExitStack,
        route: EpisodeRoute,
        draining: anyio.Event,
        accepting: Callable[[socket.socket], AbstractAsyncContextManager[None]],
    ) -> None:
        self._address = address
        self._threads = threads
        self._stack = stack
        self._home: Path | None = None
        self._over = anyio.Event()
        self._route = route
        self._draining = draining
        self._accepting = accepting
        self._port = urlsplit(address.root_url).port or 0
        route.on_over = self._over.set
        self.base_url, self.root_url = address.base_url, address.root_url
        self.api_key, self.model, self.context = address.api_key, address.model, address.context
        self.end_url = end_url
        self.environ = environ(address)

    @property
    def threads(self) -> list[ChatThread]:
        """The conversations that clients began so far, in that order."""
        return self._threads()

    @property
    def over(self) -> bool:
        """True once a client ended the episode, or was refused because the episode reached a limit."""
        return self._over.is_set()

    async def wait(self) -> Mapping[str, Any]:
        """Wait until a client ends the episode with a `POST` request, or until the run begins no further episode.

        A program ends the episode by a `POST` to `{base_url}/end`, without a reward. A client that may set a reward
        posts to `end_url` instead. After the `POST`, further requests are refused, whether or not `wait` was called,
        and a program of `run` has ten seconds to end by itself. The episode ends when its `rollout` ends.

        Returns:
            The reward as {"reward": number} if a client sent one to `end_url`, else {}.
        """
        async with anyio.create_task_group() as group:
            for event in (self._route.ended, self._draining):
                group.start_soon(_then_cancel, event, group.cancel_scope)
        return self._route.end_body

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        check: bool = True,
        sandbox: Sandbox | None = None,
        user: str | None = None,
    ) -> FinishedProgram:
        """Run an agent program until it has ended, and then end the processes that it left.

        In a sandbox, the program reaches this endpoint at the same URL. If the sandbox has no network, the program
        reaches nothing else. Processes that it leaves in a sandbox are not ended, as later checks may need them.

        The program has a clean environment: PATH, the language, `environ`, `env`, and its own HOME with settings for
        known clients and a folder for temporary files. Without a sandbox, it has the rights of this process unless
        `wrap` limits them. Once the episode is over, it has ten seconds to end by itself.

        Args:
            argv: the program and its arguments.
            cwd: the working folder of the program; by default its home, or the working folder of the sandbox.
            env: further environment variables.
            wrap: a command to put before `argv`, such as `["bwrap", ...]` or `["docker", "run", ...]`.
            check: True to raise `ProgramFailed` if the exit code is not 0.
            sandbox: the sandbox to run it in; `cwd` is then a path inside.
            user: the user of the program in the sandbox.

        Raises:
            ProgramFailed: the exit code is not 0, although the episode was not over and the last turn was not cut.
            EpisodeOver: the episode is over, and the program did not end in ten seconds.
            BadOption: the program or the folder does not exist, or the system cannot start the program.
            SandboxFailed: the sandbox is gone, or cannot reach the endpoint.
        """
        for given in (argv, wrap):
            if isinstance(given, str | bytes):
                raise BadOption(f"run({given!r:.80}): give a list of strings, such as ['mini', '-y'].")
        if sandbox is not None:
            run = await self._inside(sandbox, [*wrap, *argv], cwd, env or {}, user)
            async with self._accepting(await sandbox.listen(self._port)):
                return await self._until_finished(run, argv[0], check=check)
        home = await self.home()
        environment = program_environ(home, {**self.environ, **(env or {})})
        async with run_program([*wrap, *argv], cwd=cwd or home, env=environment) as program:
            return await self._until_finished(program.wait, argv[0], check=check)

    async def _inside(
        self,
        sandbox: Sandbox,
        argv: Sequence[str],
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str],
        user: str | None,
    ) -> Callable[[], Awaitable[FinishedProgram]]:
        """Write the settings of clients into a sandbox, and return the function that runs a program there."""
        root = f"http://127.0.0.1:{self._port}/e/{self.api_key}"
        address = replace(self._address, base_url=f"{root}/v1", root_url=root)
        home = f"/tmp/deltarunner-{secrets.token_hex(4)}"
        with tempfile.TemporaryDirectory(prefix="deltarunner-") as folder:
            await anyio.to_thread.run_sync(write_files, Path(folder), files(address))
            await sandbox.upload(folder, home)
        if user is not None:
            await sandbox.exec(["chown", "-R", user, home], user="0")
        variables = {**program_variables(home), **environ(address), **env}
        where = os.fspath(cwd) if cwd is not None else None

        async def run() -> FinishedProgram:
            done = await sandbox.exec(
                argv, seconds=None, env=variables, cwd=where, user=user, output_bytes=MAX_OUTPUT_BYTES
            )
            return FinishedProgram(list(argv), done.code, done.stdout, done.stderr)

        return run

    async def _until_finished(
        self, wait: Callable[[], Awaitable[FinishedProgram]], name: str, *, check: bool
    ) -> FinishedProgram:
        """Wait for a program, which has a few seconds to end once the episode is over.

        Raises:
            EpisodeOver: the program did not end in this time.
            ProgramFailed: see `run`.
        """
        finished: FinishedProgram | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(self._until_late, group.cancel_scope)
            finished = await wait()
            group.cancel_scope.cancel()
        if finished is None:
            raise EpisodeOver(f"the episode is over: {name} did not end within {END_GRACE_SECONDS:g} s and was stopped")
        if check and not finished.ok and not self.over and not self._cut_short():
            raise finished.failure()
        return finished

    def _cut_short(self) -> bool:
        """Return True if the last turn of a trained conversation was cut at a limit, after which some programs fail."""
        turns = [thread.turns[-1] for thread in self.threads if thread.trained and thread.turns]
        return any(turn.finish in (FinishReason.LENGTH, FinishReason.CONTEXT) for turn in turns)

    async def _until_late(self, scope: anyio.CancelScope) -> None:
        await self._over.wait()
        await anyio.sleep(END_GRACE_SECONDS)
        scope.cancel()

    async def home(self) -> Path:
        """Return the HOME of programs, with settings for known clients. The folder is removed with the endpoint."""
        if self._home is None:
            # An error while a program's files are removed must not fail the episode.
            make = partial(tempfile.TemporaryDirectory, prefix="deltarunner-", ignore_cleanup_errors=True)
            folder = await anyio.to_thread.run_sync(make)
            self._stack.push_async_callback(_removed, folder)
            self._home = Path(folder.name)
            await anyio.to_thread.run_sync(write_files, self._home, files(self._address))
        return self._home


async def _removed(folder: tempfile.TemporaryDirectory[str]) -> None:
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(folder.cleanup)


async def _then_cancel(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@asynccontextmanager
async def serving(
    server: EndpointServer,
    handler: RequestHandler,
    threads: Callable[[], list[ChatThread]],
    *,
    model: str,
    context: int,
    max_requests: int,
) -> AsyncIterator[Endpoint]:
    """Serve an episode at a new endpoint while the block runs.

    Args:
        server: the run's server.
        handler: the episode.
        threads: a function that returns the conversations of the episode.
        model: name of the model.
        context: maximum context of the model, in ids.
        max_requests: maximum number of requests in flight.
    """
    route = EpisodeRoute(handler, model=model, context=context, max_requests=max_requests)
    async with AsyncExitStack() as stack:
        key, end_key = stack.enter_context(server.serving(route))
        root = f"{server.url}/e/{key}"
        address = Address(f"{root}/v1", root, key, model, context)
        end_url = f"{server.url}/e/{end_key}/v1/end"
        yield Endpoint(address, end_url, threads, stack, route, server.draining, server.accepting)
