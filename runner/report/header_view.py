"""Description of a run's configuration for a page, and the command that plays it again."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from runner.options import Limits
from runner.sampling_fields import SAMPLING_FIELDS
from runner.store.header import Header
from runner.store.json_values import encode_json

__all__ = ["command_again", "model_name", "run_settings"]

MAX_VALUE_CHARS = 400
"""Maximum number of characters of a setting's value that are shown."""


def model_name(header: Header) -> str:
    """The name of the run's model, or the kind of its engine if the engine has no model."""
    model = header.engine.get("model")
    return model if isinstance(model, str) and model else f"the engine {header.engine.get('kind', '')!r}"


def run_settings(header: Header) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of each setting that readers need first."""
    yield "environment", header.environment
    if header.arguments:
        yield "arguments", _pairs(header.arguments)
    engine = header.engine
    kind = engine.get("kind", "")
    about = [str(kind), *(f"{name} {engine[name]}" for name in ("dtype", "context") if engine.get(name))]
    yield "model", f"{model_name(header)} ({', '.join(part for part in about if part)})"
    for agent, other in header.engines.items():
        yield f"model of {agent}", str(other.get("model") or other.get("kind", ""))
    template = header.template
    if template:
        fingerprint = str(template.get("fingerprint", ""))[:12]
        yield "chat template", " ".join(part for part in (str(template.get("name", "")), fingerprint) if part)
    if header.template_options:
        yield "template options", _pairs(header.template_options)
    sampling = {**header.environment_sampling, **header.sampling}
    yield "sampling", _pairs(sampling) or "defaults"
    limits = {name: value for name, value in header.limits.items() if value is not None}
    yield "limits", _pairs(limits) or "none"
    yield "episodes of a task", str(header.group_size)
    yield "seed", str(header.seed)
    if header.weights:
        yield "weights of rewards", _pairs(header.weights)
    yield "history", _pairs(header.history)
    yield "begun", f"{header.created:%Y-%m-%d %H:%M:%S %Z}".strip()
    yield "versions", _pairs(header.versions, " ")
    if header.git:
        dirty = " with changes that are not committed" if header.git.get("dirty") else ""
        yield "commit", f"{header.git.get('revision', '')}{dirty}"
    yield "platform", header.platform


def command_again(header: Header, episodes: int | None = None) -> str:
    """Return the command that plays the configuration of a header again.

    Args:
        header: the header.
        episodes: the number of episodes of a complete run, which is not in the header; None if it is not known.
    """
    words = ["deltarunner", "run", header.environment]
    for name, value in header.arguments.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else encode_json(value)}"]
    words += _model_words(header.engine)
    if header.group_size != 1:
        words += ["--group-size", str(header.group_size)]
    if episodes and episodes % header.group_size == 0:
        words += ["--episodes", str(episodes)]
    words += ["--seed", str(header.seed)]
    words += _sampling_words(header.sampling)
    for name, value in header.limits.items():
        if value != _DEFAULT_LIMITS.get(name):
            words += ["--limit", f"{name}={'none' if value is None else value}"]
    for name, value in header.template_options.items():
        words += ["--template-option", f"{name}={encode_json(value)}"]
    return shlex.join(words)


def _model_words(engine: Mapping[str, Any]) -> list[str]:
    if not isinstance(engine.get("model"), str):
        return []
    return ["--api-model" if engine.get("takes") == "messages" else "--model", engine["model"]]


def _sampling_words(sampling: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, row in SAMPLING_FIELDS.items():
        value = sampling.get(name)
        if row.help is None or value is None:
            continue
        option = (row.option or name).replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
            continue
        values = [f"{key}={each}" for key, each in value.items()] if isinstance(value, Mapping) else value
        for each in values if isinstance(values, list | tuple) else [value]:
            words += [f"--{option}", str(each)]
    return words


def _pairs(values: Mapping[str, Any], equals: str = "=") -> str:
    return ", ".join(f"{name}{equals}{_value(value)}" for name, value in values.items())


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else encode_json(value)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[:MAX_VALUE_CHARS]}..."


_DEFAULT_LIMITS: Mapping[str, Any] = Limits.defaults().given()
