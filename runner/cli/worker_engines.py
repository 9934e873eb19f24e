"""`--workers` and `--cluster`: the engine of a command, many times over."""

from __future__ import annotations

import re
from collections.abc import Callable

from runner.cli.settings import RunSettings
from runner.endpoint.server import parse_listen
from runner.engines.base import BaseEngine, Engine
from runner.errors import BadOption

__all__ = ["engine_with_workers"]

_WORKER_OPTIONS = {"worker_gpus": "gpus", "worker_cpus": "cpus", "stall_seconds": "stall_seconds"}
"""The options that are arguments of `RayEngines`, by their names there."""


def engine_with_workers(settings: RunSettings, make_engine: Callable[[RunSettings], BaseEngine]) -> BaseEngine:
    """The engine, or where workers were asked for, as many.

    Raises:
        BadOption: what was given does not go with workers, or Ray is not installed.
    """
    if settings.workers is None:
        for name in ("cluster", *_WORKER_OPTIONS):
            if (value := getattr(settings, name)) is not None:
                raise BadOption(
                    f"--{name.replace('_', '-')} {value:{'g' if isinstance(value, float) else ''}}: give --workers "
                    "too, how many there are to be."
                )
        return make_engine(settings)
    workers = _numbers(settings.workers)
    _require_none_in_the_way(settings)
    from runner.cluster.ray_engines import RayEngines, require_ray

    require_ray("--workers")
    engine = make_engine(settings)
    if not isinstance(engine, Engine):
        raise BadOption(f"--workers {settings.workers}: {type(engine).__name__} samples no token ids.")
    given = {argument: getattr(settings, name) for name, argument in _WORKER_OPTIONS.items()}
    given = {argument: value for argument, value in given.items() if value is not None}
    return RayEngines(engine, workers=workers, address=settings.cluster, **given)


def _numbers(text: str) -> int | tuple[int, int]:
    """How many, in `4` or `8-64`."""
    found = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", text, re.ASCII)
    least, most = (int(number) for number in (found[1], found[2] or found[1])) if found else (1, 0)
    if least > most:
        raise BadOption(
            f"--workers {text}: give how many (4), or the least to begin with and the most, which join as machines "
            "come (8-64)."
        )
    return least if least == most else (least, most)


def _require_none_in_the_way(settings: RunSettings) -> None:
    asked = f"--workers {settings.workers}"
    for option, value in (("--server", settings.server), ("--api-model", settings.api_model)):
        if value is not None:
            raise BadOption(
                f"{asked} and {option}: workers have engines of their own, and a server is asked by one process; give "
                "one of them."
            )
    if settings.debug:
        raise BadOption(f"{asked} and --debug: breakpoint() stops this process, where no episode is played; give one.")
    if settings.listen is not None and parse_listen(settings.listen)[1]:
        raise BadOption(
            f"{asked} and --listen {settings.listen}: each worker serves its own episodes; give a host without a port."
        )
