"""`deltarunner serve`: episodes for agent programs that somebody starts by hand, a key each."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from runner.cli.run import RunPlan, play_plan, real_engine
from runner.cli.settings import RunSettings
from runner.endpoint.clients import Address, flags, pointers
from runner.endpoint.endpoint import Endpoint
from runner.engines.base import BaseEngine
from runner.environment.open_episodes import OpenEpisodes

__all__ = ["serve_command"]

NAME = "serve"
"""What its run files are called after."""


def serve_command(
    settings: RunSettings,
    make_engine: Callable[[RunSettings], BaseEngine] = real_engine,
    told: Callable[[list[str]], None] | None = None,
) -> int:
    """Serve until Ctrl-C, which ends the episodes that are open as any other; return the exit code.

    `--concurrency` is how many keys are open at once; for one that ends, another is shown. `told` gets the lines of
    each besides.
    """
    settings = replace(settings, environment=NAME, concurrency=settings.concurrency or 1)
    say: list[Callable[[str], None]] = []

    def tell(episode: str, endpoint: Endpoint, home: Path) -> None:
        lines = key_lines(episode, endpoint, home)
        for line in lines:
            say[0](line)
        if told is not None:
            told(lines)

    given = {name: value for name, value in settings.serving().items() if value is not None}
    environment = OpenEpisodes(tell, **given)
    plan = partial(RunPlan.of_environment, settings, environment, make_engine)
    return play_plan(settings, plan, lambda shown: say.append(shown.say))


def key_lines(episode: str, endpoint: Endpoint, home: Path) -> list[str]:
    """What somebody needs who starts a program by hand; settings that are files are in a folder beside their own."""
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
        "               a key of its own: keep it from the program, which could reward itself with it",
    ]


def _assigned(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
