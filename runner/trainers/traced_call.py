"""One engine call of a trace, and the checks of its fields that all formats of traces share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.errors import BadBatch
from runner.quantities import counted

__all__ = ["TracedCall", "ids_of", "list_of", "logprobs_of", "mask_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One engine call of a trace."""

    node_id: str
    """Id of the call, unique in the trace."""
    prompt_ids: tuple[int, ...]
    """Ids of the prompt."""
    token_ids: tuple[int, ...]
    """Sampled ids."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id in nats; empty if the trace has none."""
    mask: tuple[bool, ...]
    """One value for each sampled id: True if the id is trained."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that the producer of the trace wrote; empty if there are none."""
    messages: Sequence[Mapping[str, Any]] = ()
    """Messages of the prompt, in OpenAI's shape; empty if the trace has none."""
    reply: Mapping[str, Any] | None = None
    """Message that was read from the sampled ids; None if the trace has none."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools of the prompt, in OpenAI's shape."""
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template that the request set."""
    ignores_stops: bool = False
    """True if the request had `ignore_eos`, so that there may be sampled ids after a stop id."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and sampled ids."""
        return self.prompt_ids + self.token_ids


def list_of(where: str, fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list in a field; `where` is the place of the fields, for errors.

    Raises:
        BadBatch: the field is not a list; the message names the place and the field.
    """
    value = fields.get(name)
    if not isinstance(value, list):
        raise BadBatch(f"{where}: {name} is {value!r:.40}: give a list.")
    return value


def ids_of(where: str, fields: Mapping[str, Any], name: str, vocabulary: int | None) -> list[int]:
    """Return the token ids in a field.

    Raises:
        BadBatch: the field is not a list, or a value is not an id, or is not below `vocabulary`, the number of ids.
    """
    ids = list_of(where, fields, name)
    for place, value in enumerate(ids):
        if type(value) is not int or value < 0 or (vocabulary is not None and value >= vocabulary):
            limit = "of at least 0" if vocabulary is None else f"from 0 to {vocabulary - 1}"
            raise BadBatch(f"{where}: {name}[{place}] is {value!r:.30}: give a token id, a whole number {limit}.")
    return ids


def logprobs_of(where: str, fields: Mapping[str, Any], name: str, count: int) -> list[float]:
    """Return the `count` log-probabilities in a field.

    Raises:
        BadBatch: the field is not a list, has another length, or a value is not finite or is above 0.
    """
    logprobs = list_of(where, fields, name)
    if len(logprobs) != count:
        values, ids = counted(len(logprobs), "value"), counted(count, "sampled id")
        raise BadBatch(f"{where}: {name} has {values} for {ids}: give one value for each id.")
    for place, value in enumerate(logprobs):
        if type(value) not in (int, float) or not math.isfinite(value) or value > 0:
            raise BadBatch(f"{where}: {name}[{place}] is {value!r:.30}: give a finite number of at most 0.")
    return [float(value) for value in logprobs]


def mask_of(where: str, fields: Mapping[str, Any], name: str, count: int, ids: str) -> list[bool]:
    """Return the mask in a field: `count` values, each 0 or 1, as truth values.

    Args:
        where: the place, for messages.
        fields: the fields of that place.
        name: the name of the field.
        count: the number of ids.
        ids: a description of the ids, for messages.

    Raises:
        BadBatch: the field is not a list, has another length, or other values.
    """
    mask = list_of(where, fields, name)
    if len(mask) != count:
        raise BadBatch(f"{where}: {name} has {counted(len(mask), 'value')} for {ids}: give one value for each id.")
    for value in mask:
        if type(value) not in (int, bool) or value not in (0, 1):
            raise BadBatch(f"{where}: {name} has {value!r:.30}: a mask holds 0 and 1.")
    return [bool(value) for value in mask]
