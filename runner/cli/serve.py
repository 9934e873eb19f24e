"""`deltarunner serve`: episodes for agent programs that a user starts by hand, or an environment for a trainer."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from runner.cli.name_values import parse_pairs
from runner.cli.run import RunPlan, log_path, play_plan, real_engine, run_options
from runner.cli.settings import RunSettings, ServeSettings
from runner.endpoint.client_config import Address, flags, pointers
from runner.endpoint.endpoint import Endpoint
from runner.engines.base import BaseEngine
from runner.environment.checks import check_playable
from runner.environment.loading import construct, find_environment
from runner.environment.open_episodes import OpenEpisodes
from runner.errors import BadOption
from runner.logs import check_level, log_to_file

__all__ = ["serve_command"]

NAME = "serve"
"""The name that stands for an environment in the names of run files, as in runs/serve-001.db."""

_PLAYER_OPTIONS = ("sampling", "limits", "concurrency", "seed", "template_options", "tool_format", "history", "listen")
"""Names of the fields of `RunOptions` that are passed to `VerifiersServer`."""

_DEFAULTS = {each.name: each.default for each in fields(RunSettings)}


def serve_command(
    settings: RunSettings,
    make_engine: Callable[[RunSettings], BaseEngine] = real_engine,
    on_key: Callable[[list[str]], None] | None = None,
) -> int:
    """Serve until Ctrl-C, and return the exit code. After Ctrl-C the open episodes end normally.

    Each episode has a key, and `--concurrency` episodes are open at once; after one has ended, the key of the next is
    printed. `on_key` also receives the printed lines.

    Raises:
        BadOption: an option is invalid, or needs `--as`.
    """
    if isinstance(settings, ServeSettings) and settings.protocol is not None:
        return serve_trainer(settings, make_engine)
    bind = settings.bind if isinstance(settings, ServeSettings) else None
    if settings.environment is not None or settings.settings or bind is not None:
        named = settings.environment or ("--set" if settings.settings else "--bind")
        raise BadOption(f"serve {named}: to serve an environment to a trainer, add --as verifiers.")
    settings = replace(settings, environment=NAME, concurrency=settings.concurrency or 1)
    say: list[Callable[[str], None]] = []

    def print_key(episode: str, endpoint: Endpoint, home: Path) -> None:
        lines = key_lines(episode, endpoint, home)
        for line in lines:
            say[0](line)
        if on_key is not None:
            on_key(lines)

    given = {name: value for name, value in settings.serving().items() if value is not None}
    environment = OpenEpisodes(print_key, **given)
    plan = partial(RunPlan.of_environment, settings, environment, make_engine)
    return play_plan(settings, plan, lambda shown: say.append(shown.say))


def serve_trainer(settings: ServeSettings, make_engine: Callable[[RunSettings], BaseEngine] = real_engine) -> int:
    """Play an environment for clients of verifiers until Ctrl-C, and return the exit code.

    Raises:
        BadOption: an option is invalid.
    """
    from runner.trainers.verifiers_server import VerifiersServer

    if settings.protocol != "verifiers":
        raise BadOption(f"--as {settings.protocol}: the protocol is not known: give verifiers.")
    if settings.environment is None:
        raise BadOption("serve --as verifiers: give an environment (`deltarunner list`).")
    if settings.file is not None:
        raise BadOption(f"--file {settings.file}: the trainer keeps the traces; leave this option out.")
    check_level(settings.log_level)
    environment = construct(find_environment(settings.environment), parse_pairs(settings.settings, "--set"))
    check_playable(environment)
    given = run_options(settings)
    options = {each.name: getattr(given, each.name) for each in fields(given) if each.name in _PLAYER_OPTIONS}
    own_model = settings.model != _DEFAULTS["model"]

    def engine_of(url: str, model: str) -> BaseEngine:
        """The engine for a request of a client: on the server of --server, else on the client's `url`."""
        folder = settings.model if own_model else model
        named = [*(settings.engine_options or ()), *([f"name={model}"] if folder != model else [])]
        return make_engine(replace(settings, server=settings.server or url, model=folder, engine_options=named))

    async def play() -> None:
        bind = settings.bind or "tcp://127.0.0.1:5000"
        async with VerifiersServer(environment, engine_of, bind=bind, **options) as server:
            print(f"serving {settings.environment} to verifiers at {server.address}; Ctrl-C ends it", flush=True)
            await server.serve()

    log = log_path(settings)
    if settings.log_level is not None:
        print(f"log   {log}", file=sys.stderr)
    with suppress(KeyboardInterrupt), log_to_file(log, settings.log_level, secrets=settings.keys):
        asyncio.run(play())
    return 0


def key_lines(episode: str, endpoint: Endpoint, home: Path) -> list[str]:
    """The lines to print for a key: settings for programs that a user starts; `home` has their configuration files."""
    exported = _assigned(endpoint.environ)
    address = Address(endpoint.base_url, endpoint.root_url, endpoint.api_key, endpoint.model, endpoint.context)
    codex = shlex.join(flags(address)["codex"])
    return [
        f"{episode}",
        f"  base_url     {endpoint.base_url}",
        f"  api_key      {endpoint.api_key}",
        f"  model        {endpoint.model}",
        f"  most clients export {exported}",
        f"  codex        codex exec {codex} 'PROMPT'",
        *(f"  {program:12} {_assigned(named)} {program}" for program, named in pointers(home).items()),
        f"  done         curl -X POST {endpoint.base_url}/end",
        f"  reward       curl -X POST {endpoint.end_url} -d '{{\"reward\": 1}}'",
        "               a separate key: hide it from the program, which could reward itself with it",
    ]


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
