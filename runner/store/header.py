"""The header of a run file: everything that matters about how a run was configured, and what of it may change."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

from runner.errors import ConfigurationChanged
from runner.store.json_values import decode_json, encode_json
from runner.store.schema import FORMAT
from runner.tokens.token_diff import first_mismatch
from runner.wording import WORDING_VERSION

__all__ = ["Change", "Header", "OnChange"]


class OnChange(enum.StrEnum):
    """What a difference between a file's header and a new one means."""

    REFUSE = "refuse"
    """The run is not gone on with: the episodes would not be those of one run."""
    WARN = "warn"
    """The run goes on, and says so."""
    FREE = "free"
    """The run goes on, and says nothing."""


# The first pattern that fits a field's path decides.
_RULES: Final = (
    ("created", OnChange.FREE),
    ("clock", OnChange.FREE),  # a resumed run goes on with the file's
    ("format", OnChange.FREE),
    ("concurrency.*", OnChange.FREE),
    ("retries", OnChange.FREE),
    ("breaker", OnChange.FREE),
    ("max_version_lag", OnChange.FREE),
    ("versions.*", OnChange.WARN),
    ("git.*", OnChange.WARN),
    ("platform", OnChange.WARN),
    ("*template.name", OnChange.FREE),
    ("*template.fingerprint", OnChange.FREE),  # follows from what is compared anyway
    ("*template.turns.format.response*", OnChange.REFUSE),  # of the checkpoint, and so it does not follow
    ("*template.turns.*", OnChange.FREE),  # likewise
    ("engine*.versions.*", OnChange.WARN),
    ("engine*.versions_stamped_by", OnChange.WARN),
    ("engine*.kind", OnChange.REFUSE),
    ("engine*.model", OnChange.REFUSE),
    ("engine*.replies*", OnChange.REFUSE),  # a scripted engine's are its model
    ("engine*.forced", OnChange.REFUSE),
    ("engine*.tokenizer", OnChange.REFUSE),
    ("engine*.stop_ids", OnChange.REFUSE),
    ("engine*.seed", OnChange.REFUSE),
    ("engine*.context", OnChange.REFUSE),
    ("engine*.logprobs", OnChange.REFUSE),
    ("engine*.arguments.dtype", OnChange.REFUSE),
    ("engine*.arguments.quantization", OnChange.REFUSE),
    ("engine*.arguments.*revision", OnChange.REFUSE),
    ("engine*.arguments.hf_overrides*", OnChange.REFUSE),
    ("engine*.template.*", OnChange.REFUSE),
    ("engine*.takes", OnChange.REFUSE),
    ("engine*.extra_body*", OnChange.REFUSE),
    ("engine*.leave_out", OnChange.REFUSE),
    ("engine*.reasoning_field", OnChange.REFUSE),
    ("engine.*", OnChange.FREE),  # sizes
    ("engines.*", OnChange.FREE),
    ("*", OnChange.REFUSE),
)


@dataclass(frozen=True, slots=True)
class Change:
    """A field that is not what it was."""

    path: str
    """The field, such as "sampling.temperature"."""
    old: Any
    """The value in the file; `MISSING` where it is not there."""
    new: Any
    """The value now; `MISSING` likewise."""
    meaning: OnChange
    """The consequence of the change."""

    def __str__(self) -> str:
        return f"{self.path}: {_difference(self.old, self.new)}"


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """How a run was configured. All values are JSON; secrets among them are hashes."""

    environment: str
    """The environment, as module:Class."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of its constructor, defaults included."""
    unrecorded: tuple[str, ...] = ()
    """The names of those arguments that have no form in JSON."""
    system_prompt: str | None = None
    """The environment's system prompt."""
    tool_choice: str = "auto"
    """The environment's tool choice."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The environment's tools in OpenAI's shape, by name."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """What `Engine.describe()` says, the fingerprint of its `tokenizer` and its `stop_ids`; of a vocabulary of bytes
    also the `control_tokens` and the `eos_token` that it is made of. An engine that takes messages has only the first,
    and says so by `takes`."""
    engines: Mapping[str, Any] = field(default_factory=dict)
    """The descriptions of the engines that agents have of their own, by agent."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """The engine's chat template: name, text, variables, fingerprint, and how it writes turns, as it was learnt, or
    how the checkpoint says that they are read. An engine that takes messages has none."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Names that the template reads, such as `enable_thinking`."""
    tool_format: str | None = None
    """The format that calls are read in, where the user named one; None where the template's own is."""
    clock: datetime
    """The time that templates see."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The run's sampling, which goes over that of the environment, by field."""
    environment_sampling: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own sampling, by field."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The limits, with every field."""
    concurrency: Mapping[str, Any] = field(default_factory=dict)
    """How wide the run is."""
    group_size: int = 1
    """The number of episodes of each task."""
    seed: int = 0
    """The number from which all random numbers follow."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each reward, by name."""
    history: Mapping[str, Any] = field(default_factory=dict)
    """How the past of a conversation is kept, as a `History` has it."""
    wording: int = WORDING_VERSION
    """The version of the fixed words that go back to a model."""
    retries: int = 0
    """How often an episode is played again after an engine's failure."""
    breaker: float = 1.0
    """The share of failures that ends the run."""
    max_version_lag: int | None = None
    """The number of weight updates that an episode may be behind; None for any."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python and of the packages that matter; those not installed are absent."""
    platform: str = ""
    """The operating system and the machine."""
    git: Mapping[str, Any] = field(default_factory=dict)
    """The `revision` of the environment's folder, and whether it is `dirty`; empty where there is none."""
    created: datetime
    """When the run was begun."""
    format: int = FORMAT
    """The format of the file."""

    def gives_ids(self, agent: str) -> bool:
        """Whether what an agent said is there as token ids: no server of messages spoke for it."""
        engine: Mapping[str, Any] = self.engines.get(agent, self.engine)
        return engine.get("takes") != "messages"

    def to_json(self) -> str:
        """The header as the text that the file keeps."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values["clock"] = self.clock.isoformat()
        values["created"] = self.created.isoformat()
        return encode_json(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The header in `text`; fields of other versions are left out."""
        values = decode_json(text)
        known = {item.name for item in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        values["clock"] = datetime.fromisoformat(values["clock"])
        values["created"] = datetime.fromisoformat(values["created"])
        values["unrecorded"] = tuple(values["unrecorded"])
        return cls(**values)

    def changes(self, new: Header) -> list[Change]:
        """How `new` differs from this one, in the order of the fields; what is free to change is among it."""
        old_fields, new_fields = dict(_flat(decode_json(self.to_json()))), dict(_flat(decode_json(new.to_json())))
        return [
            Change(path, old, changed, next(meaning for pattern, meaning in _RULES if fnmatchcase(path, pattern)))
            for path in dict.fromkeys([*old_fields, *new_fields])
            if (old := old_fields.get(path, MISSING)) != (changed := new_fields.get(path, MISSING))
        ]

    def refused(self, new: Header) -> list[Change]:
        """The changes with which the run cannot be resumed."""
        return [change for change in self.changes(new) if change.meaning is OnChange.REFUSE]

    def check_same(self, new: Header, path: Path) -> None:
        """Refuse to go on with the run file `path`, whose header this is, as the run that `new` describes.

        Raises:
            ConfigurationChanged: they are two configurations; the message lists what differs.
        """
        refused = self.refused(new)
        if refused:
            lines = "\n".join(f"  {change}" for change in refused)
            raise ConfigurationChanged(
                f"run file {path} holds a run of another configuration:\n{lines}\n"
                f"Give the same options to resume it, or another path (--file) to begin a new run."
            )


# --- what changed


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts by dotted path; lists are leaves."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{path}.{name}" if path else str(name))


_SHOWN = 80
"""Characters of a value that a message shows."""


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, str) and isinstance(new, str) and max(len(old), len(new)) > _SHOWN:
        return _first_different_line(old, new)
    return f"{_shown(old)} -> {_shown(new)}"


def _first_different_line(old: str, new: str) -> str:
    old_lines, new_lines = [*old.splitlines(), ""], [*new.splitlines(), ""]
    line = min(first_mismatch(old_lines, new_lines), len(old_lines) - 1, len(new_lines) - 1)
    return f"differs from line {line + 1} on: {_shown(old_lines[line])} -> {_shown(new_lines[line])}"


def _shown(value: Any) -> str:
    if value is MISSING:
        return "(not set)"
    text = encode_json(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
