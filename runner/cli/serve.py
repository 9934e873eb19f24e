"""`deltarunner serve`: episodes for agent programs that a user starts by hand. Each episode has a key."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from runner.cli.run import RunPlan, play_plan, real_engine
from runner.cli.settings import RunSettings
from runner.endpoint.client_config import Address, flags, pointers
from runner.endpoint.endpoint import Endpoint
from runner.engines.base import BaseEngine
from runner.environment.open_episodes import OpenEpisodes

__all__ = ["serve_command"]

NAME = "serve"
"""The environment's name in the names of run files."""


def serve_command(
    settings: RunSettings,
    make_engine: Callable[[RunSettings], BaseEngine] = real_engine,
    on_key: Callable[[list[str]], None] | None = None,
) -> int:
    """Serve until Ctrl-C, and return the exit code. The open episodes then end normally.

    `--concurrency` is the number of open keys; after one ends, the next is printed. `on_key` also receives the lines
    of each key.
    """
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


def key_lines(episode: str, endpoint: Endpoint, home: Path) -> list[str]:
    """The settings for programs that are started by hand. Configuration files are in the folder `home`."""
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
