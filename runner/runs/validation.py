"""Checks of what a run is given: each thing that cannot be is named, with the fix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.engines.base import Engine
from runner.errors import BadOption
from runner.options import Concurrency, Limits, Sampling

__all__ = [
    "check_engines",
    "check_file",
    "check_numbers",
    "check_objects",
    "check_retry_failed",
    "check_template_options",
]

OF_THE_TEMPLATE = ("messages", "tools", "add_generation_prompt")
"""What the runner itself gives to a chat template."""


def check_engines(engine: Any, engines: Any) -> None:
    """`engine=` and `engines=` of a run.

    Raises:
        BadOption: one is no engine object.
    """
    _check_engine("engine", engine)
    if not isinstance(engines, Mapping | None):
        raise BadOption(
            f"engines={engines!r:.60}: give a dict of agent names and engines, such as {{'judge': engine}}."
        )
    for name, other in (engines or {}).items():
        if not isinstance(name, str):
            raise BadOption(f"engines={{{name!r:.60}: ...}}: the name of an agent is a string.")
        _check_engine(f"engines[{name!r}]", other)


def _check_engine(where: str, engine: Any) -> None:
    if isinstance(engine, type) and issubclass(engine, Engine):
        raise BadOption(f"{where}={engine.__name__} is the class: give an engine object, {engine.__name__}(...).")
    if not isinstance(engine, Engine):
        raise BadOption(f"{where}={engine!r:.60} is no engine: give an engine object, such as VllmEngine('MODEL').")


def check_objects(*, sampling: Any, limits: Any, concurrency: Any) -> None:
    """The options of a run that are objects, or None.

    Raises:
        BadOption: one is something else, such as a dict.
    """
    for name, value, kind in (
        ("sampling", sampling, Sampling),
        ("limits", limits, Limits),
        ("concurrency", concurrency, Concurrency),
    ):
        if not isinstance(value, kind | None):
            raise BadOption(f"{name}={value!r:.60}: give {kind.__name__}(...).")


def check_numbers(*, group_size: Any, retries: Any, seed: Any, breaker: Any) -> None:
    """The options of a run that are numbers.

    Raises:
        BadOption: one is no number, or out of its bounds.
    """
    for name, value, least in (("group_size", group_size, 1), ("retries", retries, 0), ("seed", seed, None)):
        if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
            bound = "" if least is None else f" of at least {least}"
            raise BadOption(f"{name}={value!r:.60}: give a whole number{bound}.")
    if isinstance(breaker, bool) or not isinstance(breaker, int | float) or not 0 < breaker <= 1:
        raise BadOption(f"breaker={breaker!r:.60}: give a share above 0 and at most 1 (1 never stops the run).")


def check_retry_failed(retry_failed: Any, file: Any) -> None:
    """`retry_failed=` of a run.

    Raises:
        BadOption: it is no bool, or no file says what failed.
    """
    if not isinstance(retry_failed, bool):
        raise BadOption(f"retry_failed={retry_failed!r:.60}: give True or False.")
    if retry_failed and file is None:
        raise BadOption("retry_failed=True: without a run file nothing says what failed; give file=.")


def check_template_options(options: Any) -> None:
    """Names and values for the chat template.

    Raises:
        BadOption: they are no mapping, or name what the runner itself gives to the template.
    """
    if not isinstance(options, Mapping | None):
        raise BadOption(f"template_options={options!r:.60}: give a dict, such as {{'enable_thinking': False}}.")
    for name in options or {}:
        if not isinstance(name, str) or name in OF_THE_TEMPLATE:
            raise BadOption(
                f"template_options={{{name!r}: ...}}: give names that only the template reads, such as "
                f"enable_thinking; {', '.join(OF_THE_TEMPLATE)} are given to it by the run."
            )


def check_file(file: Any) -> None:
    """The run file: a path, what names one, or None.

    Raises:
        BadOption: it is something else.
    """
    if not isinstance(file, str | Path | None) and not callable(file):
        raise BadOption(f"file={file!r:.60}: give a path such as 'runs/one.db', or None to keep none.")
    if file == "":
        raise BadOption("file='': give a path such as 'runs/one.db', or None to keep none.")
