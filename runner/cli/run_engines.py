"""Engines of a command: engines of single agents (`--engine judge=api:MODEL`), and several workers (`--workers`)."""

from __future__ import annotations

import re
from collections.abc import Callable

from runner.cli.name_values import parse_pairs
from runner.cli.settings import RunSettings
from runner.endpoint.server import parse_listen
from runner.engines.base import BaseEngine, Engine
from runner.errors import BadOption

__all__ = ["agent_engines", "engine_with_workers"]

API = "api:"
"""Prefix of a value of `--engine` that selects a chat API."""

_WORKER_OPTIONS = {"worker_gpus": "gpus", "worker_cpus": "cpus", "stall_seconds": "stall_seconds"}
"""The options that are arguments of `RayEngines`, each with the name of its argument."""


def agent_engines(settings: RunSettings) -> dict[str, BaseEngine]:
    """The engines of `--engine AGENT=ENGINE`, by agent. ENGINE is `api:MODEL`, `api:MODEL@URL` or `MODEL@URL`.

    Raises:
        BadOption: a value has another form, or the package that its engine needs is missing.
    """
    given = parse_pairs(settings.engines, "--engine")
    return {agent: _engine(agent, value, settings) for agent, value in given.items()}


def _engine(agent: str, value: str, settings: RunSettings) -> BaseEngine:
    model, at, url = value.removeprefix(API).rpartition("@") if "@http" in value else (value.removeprefix(API), "", "")
    if not model:
        raise BadOption(f"--engine {agent}={value}: name the model: api:MODEL, api:MODEL@URL or MODEL@URL.")
    if value.startswith(API):
        from runner.engines.chat.engine import ChatEngine
        from runner.engines.chat.server import require_openai

        require_openai()
        return ChatEngine(model, base_url=url or None, api_key=settings.api_key or None)
    if not at:
        raise BadOption(
            f"--engine {agent}={value}: give api:{value} for a chat API, or {value}@http://HOST:PORT for a server of "
            "vLLM or SGLang; without --engine, the run's own engine plays the agent."
        )
    from runner.engines.remote.engine import RemoteEngine
    from runner.engines.remote.server import require_aiohttp

    require_aiohttp()
    return RemoteEngine(url, model, api_key=settings.server_key or None)


# --- workers


def engine_with_workers(settings: RunSettings, make_engine: Callable[[RunSettings], BaseEngine]) -> BaseEngine:
    """The engine, or with `--workers` a `RayEngines` with this engine on each worker.

    Raises:
        BadOption: an option does not work with workers, or only with workers; the engine does not return token ids; or
            Ray is not installed.
    """
    if settings.workers is None:
        for name in ("cluster", *_WORKER_OPTIONS):
            if (value := getattr(settings, name)) is not None:
                raise BadOption(
                    f"--{name.replace('_', '-')} {value:{'g' if isinstance(value, float) else ''}}: give --workers, "
                    "the number of workers, as well."
                )
        return make_engine(settings)
    workers = _numbers(settings.workers)
    _require_none_in_the_way(settings)
    from runner.cluster.ray.engines import RayEngines, require_ray

    require_ray("--workers")
    engine = make_engine(settings)
    if not isinstance(engine, Engine):
        raise BadOption(
            f"--workers {settings.workers}: {type(engine).__name__} does not return token ids: give another engine."
        )
    given = {argument: getattr(settings, name) for name, argument in _WORKER_OPTIONS.items()}
    given = {argument: value for argument, value in given.items() if value is not None}
    return RayEngines(engine, workers=workers, address=settings.cluster, **given)


def _numbers(text: str) -> int | tuple[int, int]:
    """Return the number of workers in `4`, or (minimum, maximum) in `8-64`; raise BadOption for other texts."""
    found = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", text, re.ASCII)
    least, most = (int(number) for number in (found[1], found[2] or found[1])) if found else (1, 0)
    if least > most:
        raise BadOption(
            f"--workers {text}: give a number (4), or the minimum to start with and the maximum, reached as machines "
            "join (8-64)."
        )
    return least if least == most else (least, most)


def _require_none_in_the_way(settings: RunSettings) -> None:
    given = f"--workers {settings.workers}"
    for option, value in (("--server", settings.server), ("--api-model", settings.api_model)):
        if value is not None:
            raise BadOption(
                f"{given} and {option}: workers have their own engines, and a server is used from one process; give "
                "one of them."
            )
    if settings.debug:
        raise BadOption(f"{given} and --debug: breakpoint() stops this process, which plays no episode; leave one out.")
    if settings.listen is not None and parse_listen(settings.listen)[1]:
        raise BadOption(
            f"{given} and --listen {settings.listen}: each worker serves its own episodes; give a host without a port."
        )
