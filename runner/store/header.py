"""The header of a run file: the configuration of a run, and the changes with which it can be resumed."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, Self

from runner.errors import ConfigurationChanged
from runner.store.json_values import decode_json, encode_json
from runner.store.schema import FORMAT_VERSION
from runner.tokens.token_diff import first_mismatch
from runner.wording import WORDING_VERSION

__all__ = ["Change", "Header", "OnChange"]


class OnChange(enum.StrEnum):
    """The consequence of a difference between the header of a file and the header of a run that resumes it."""

    REFUSE = "refuse"
    """The run cannot be resumed: its episodes would not belong to one run."""
    WARN = "warn"
    """The run is resumed with a warning."""
    FREE = "free"
    """The run is resumed without a warning."""


# The first pattern that matches a field's path applies.
_RULES: Final = (
    ("created", OnChange.FREE),
    ("clock", OnChange.FREE),  # a resumed run uses the value of the file
    ("format", OnChange.FREE),
    ("group_rewards", OnChange.FREE),  # this follows from the environment; files of earlier versions lack it
    ("concurrency.*", OnChange.FREE),
    ("retries", OnChange.FREE),
    ("breaker", OnChange.FREE),
    ("max_version_lag", OnChange.FREE),
    ("versions.*", OnChange.WARN),
    ("git.*", OnChange.WARN),
    ("code.*", OnChange.WARN),
    ("platform", OnChange.WARN),
    ("*template.name", OnChange.FREE),
    ("*template.fingerprint", OnChange.FREE),  # this follows from compared fields
    ("*template.turns.format.response*", OnChange.REFUSE),  # this is from the checkpoint, not from compared fields
    ("*template.turns.*", OnChange.FREE),  # these follow from compared fields
    ("engine*.versions.*", OnChange.WARN),
    ("engine*.versions_stamped_by", OnChange.WARN),
    ("engine*.kind", OnChange.REFUSE),
    ("engine*.model", OnChange.REFUSE),
    ("engine*.replies*", OnChange.REFUSE),  # a scripted engine has these replies in place of a model
    ("engine*.forced", OnChange.REFUSE),
    ("engine*.tokenizer", OnChange.REFUSE),
    ("engine*.stop_ids", OnChange.REFUSE),
    ("engine*.seed", OnChange.REFUSE),
    ("engine*.context", OnChange.REFUSE),
    ("engine*.logprobs", OnChange.REFUSE),
    ("engine*.arguments.quantization", OnChange.REFUSE),
    ("engine*.arguments.*revision", OnChange.REFUSE),
    ("engine*.arguments.hf_overrides*", OnChange.REFUSE),
    ("engine*.template.*", OnChange.REFUSE),
    ("engine*.takes", OnChange.REFUSE),
    ("engine*.extra_body*", OnChange.REFUSE),
    ("engine*.leave_out", OnChange.REFUSE),
    ("engine*.reasoning_field", OnChange.REFUSE),
    ("engine.*", OnChange.FREE),  # such as sizes and other arguments; `_meaning` has a rule for dtypes
    ("engines.*", OnChange.FREE),
    ("*", OnChange.REFUSE),
)


_DTYPE: Final = re.compile(
    r"(engine|engines\..+?)(\.arguments)?\.dtype"
)  # this field is the dtype in use or, below `arguments`, the dtype that was given


@dataclass(frozen=True, slots=True)
class Change:
    """A changed field."""

    path: str
    """The field, such as "sampling.temperature"."""
    old: Any
    """The value in the file; `MISSING` if absent."""
    new: Any
    """The value now; `MISSING` if absent."""
    meaning: OnChange
    """The consequence of the change."""

    def __str__(self) -> str:
        return f"{self.path}: {_difference(self.old, self.new)}"


class _Missing(enum.Enum):
    MISSING = "missing"


MISSING: Final = _Missing.MISSING


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The configuration of a run. Secrets are replaced by hashes."""

    environment: str
    """The environment, as module:Class."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the environment's constructor, including defaults."""
    unrecorded: tuple[str, ...] = ()
    """The names of arguments that JSON cannot hold."""
    system_prompt: str | None = None
    """The environment's system prompt."""
    tool_choice: str = "auto"
    """The environment's tool choice."""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """The environment's tools in OpenAI's shape, by name."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The description of the engine (`Engine.describe()`), the fingerprint of its `tokenizer`, and its `stop_ids`; for
    a byte vocabulary also its `control_tokens` and `eos_token`. An engine that takes messages has only the
    description, with `takes`."""
    engines: Mapping[str, Any] = field(default_factory=dict)
    """The descriptions of the separate engines of agents, by agent, each with its `template`."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """The engine's chat template: name, text, variables, fingerprint, and the turn format, learnt or from the
    checkpoint. Empty for an engine that takes messages."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Values of names that the template reads, such as `enable_thinking`."""
    tool_format: str | None = None
    """The tool call format that the user named; None for the template's format."""
    clock: datetime
    """The time passed to templates."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The run's sampling by field, which overrides the environment's."""
    environment_sampling: Mapping[str, Any] = field(default_factory=dict)
    """The environment's own sampling, by field."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The limits, with every field."""
    concurrency: Mapping[str, Any] = field(default_factory=dict)
    """The concurrency options, as in `Concurrency`."""
    group_size: int = 1
    """The number of episodes of each task."""
    seed: int = 0
    """The seed of all random numbers."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weight of each reward, by name."""
    group_rewards: tuple[str, ...] = ()
    """The names of the group rewards."""
    history: Mapping[str, Any] = field(default_factory=dict)
    """The history options, as in `History`."""
    wording: int = WORDING_VERSION
    """The version of the fixed texts that a run sends to a model."""
    retries: int = 0
    """Maximum number of repeated attempts of an episode after engine failures."""
    breaker: float = 1.0
    """The run stops if more than this share of the recent episodes failed; 1 never stops it."""
    max_version_lag: int | None = None
    """Maximum number of weight updates by which an episode may lag; None for no maximum."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of Python and of packages that may change results. Packages that are not installed are absent."""
    platform: str = ""
    """The operating system and the machine."""
    git: Mapping[str, Any] = field(default_factory=dict)
    """The git `revision` of the environment's folder and its `dirty` flag; empty outside a repository."""
    code: Mapping[str, str] = field(default_factory=dict)
    """A hash of each source file that defines the environment, by module; without modules of deltarunner."""
    created: datetime
    """The time at which the run began."""
    format: int = FORMAT_VERSION
    """The format of the file."""

    def has_ids(self, agent: str) -> bool:
        """Return True if the turns of an agent have token ids: its engine is not a message server."""
        engine: Mapping[str, Any] = self.engines.get(agent, self.engine)
        return engine.get("takes") != "messages"

    def parts(self) -> list[str]:
        """The names of a mixture's environments, which are prefixes of its task ids; empty for other environments."""
        # A mixture has arguments such as `NAME.weight`; names of other environments' arguments have no dots.
        names = [*self.arguments, *self.unrecorded]
        return [name for name in self.arguments if f"{name}.weight" in names]

    def to_json(self) -> str:
        """The header as JSON text for the file."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        values["clock"] = self.clock.isoformat()
        values["created"] = self.created.isoformat()
        return encode_json(values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the header in `text`; fields that only other versions have are left out."""
        values = decode_json(text)
        known = {item.name for item in dataclasses.fields(cls)}
        values = {name: value for name, value in values.items() if name in known}
        values["clock"] = datetime.fromisoformat(values["clock"])
        values["created"] = datetime.fromisoformat(values["created"])
        for name in ("unrecorded", "group_rewards"):
            values[name] = tuple(values.get(name, ()))
        return cls(**values)

    def changes(self, new: Header) -> list[Change]:
        """The differences from this header to `new`, in field order, including those without a consequence."""
        old_fields, new_fields = dict(_flat(decode_json(self.to_json()))), dict(_flat(decode_json(new.to_json())))
        return [
            Change(path, old, changed, _meaning(path, old_fields))
            for path in dict.fromkeys([*old_fields, *new_fields])
            if (old := old_fields.get(path, MISSING)) != (changed := new_fields.get(path, MISSING))
        ]

    def refused(self, new: Header) -> list[Change]:
        """The changes that prevent a resume."""
        return [change for change in self.changes(new) if change.meaning is OnChange.REFUSE]

    def check_same(self, new: Header, path: Path) -> None:
        """Check that a run with the header `new` may resume the run file `path`, which has this header.

        Raises:
            ConfigurationChanged: the configurations differ; the message lists the differences.
        """
        refused = self.refused(new)
        if refused:
            lines = "\n".join(f"  {change}" for change in refused)
            raise ConfigurationChanged(
                f"run file {path} holds a run of another configuration:\n{lines}\n"
                f"Give the same options to resume it, or another path (--file) to begin a new run."
            )


# --- what changed


def _meaning(path: str, old: Mapping[str, Any]) -> OnChange:
    if path.startswith("code.") and path not in old:
        return OnChange.FREE  # the file was written before runs recorded the code
    dtype = _DTYPE.fullmatch(path)
    if dtype is None:
        return next(meaning for pattern, meaning in _RULES if fnmatchcase(path, pattern))
    # An older file, written before runs recorded the dtype in use, has at most the given dtype.
    written = f"{dtype[1]}.dtype" in old
    return OnChange.REFUSE if written is (dtype[2] is None) else OnChange.FREE


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of nested dicts by dotted path; lists are leaves."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _flat(inner, f"{path}.{name}" if path else str(name))


_MAX_SHOWN_CHARS = 80
"""Maximum number of characters of a value that a message shows."""


def _difference(old: Any, new: Any) -> str:
    if isinstance(old, str) and isinstance(new, str) and max(len(old), len(new)) > _MAX_SHOWN_CHARS:
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
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."
