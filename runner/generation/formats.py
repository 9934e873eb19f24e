"""Forms of a batch: padded arrays or texts, parsed into rows, and written from sampled rows."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from runner.engines.base import FinishReason
from runner.errors import BadBatch
from runner.generation.config import GenerationOutputSpec, TextOutputSpec, as_strings
from runner.generation.padding import as_kind_of, read_padded, require_mapping
from runner.generation.rows import Row, SampledRow
from runner.tokens.tokenizer import Tokenizer

__all__ = ["Batch", "PaddedBatch", "TextBatch"]

T_co = TypeVar("T_co", covariant=True)

_OTHER_MEDIA = ("vllm_images", "vllm_videos", "vllm_audios")


class Batch(Protocol[T_co]):
    """A parsed batch."""

    rows: list[Row]
    """The rows to be sampled."""

    def write(self, sampled: Sequence[SampledRow]) -> T_co: ...


@dataclass(slots=True, eq=False)
class PaddedBatch:
    """Prompts in one padded array."""

    rows: list[Row]
    like: Any
    """The array that was passed. Outputs have its kind (torch or numpy) and its device."""
    dtype: np.dtype[np.integer[Any]]
    pad_id: int
    """The id of the padding."""

    @classmethod
    def read(cls, batch: Mapping[str, Any], *, pad_id: int, vocabulary: int) -> Self:
        """Parse a mapping with `input_ids` and `input_lengths`; its numbers are copied.

        Raises:
            BadBatch: the batch is invalid; the message names the row.
        """
        require_mapping(batch)
        for name in _OTHER_MEDIA:
            media = batch.get(name)
            if media is not None and any(len(one) for one in media):
                raise BadBatch(f"the batch has {name}: the engines here take token ids only. Leave it out.")
        ids, lengths = read_padded(batch, "input_ids", "input_lengths", pad_value=pad_id)
        _require_room(ids.dtype, vocabulary, pad_id)
        empty = np.flatnonzero(lengths == 0)
        if len(empty):
            raise BadBatch(f"row {empty[0]}: input_lengths is 0, but a prompt needs one id or more. Leave it out.")
        _check_vocabulary(ids, lengths, vocabulary)
        stop = _stop_strings(batch, len(ids))
        rows = [Row(i, array("i", ids[i, : lengths[i]].tolist()), stop[i]) for i in range(len(ids))]
        return cls(rows, batch["input_ids"], ids.dtype, pad_id)

    def write(self, sampled: Sequence[SampledRow]) -> GenerationOutputSpec:
        """Return the rows as arrays, as wide as the longest row."""
        lengths = np.array([len(row.log) for row in sampled], dtype=np.int64)
        shape = (len(sampled), int(lengths.max(initial=0)))
        ids = np.full(shape, self.pad_id, dtype=self.dtype)
        logprobs = np.zeros(shape, dtype=np.float32)
        for number, row in enumerate(sampled):
            ids[number, : len(row.log)] = row.log.ids
            logprobs[number, row.start : len(row.log)] = row.log.logprobs[row.start :]
        starts = np.array([row.start for row in sampled], dtype=np.int64)
        truncated = [row.finish in _CUT and len(row.log) > row.start for row in sampled]
        return GenerationOutputSpec(
            output_ids=self._give(ids),
            generation_lengths=self._give(lengths - starts),
            unpadded_sequence_lengths=self._give(lengths),
            logprobs=self._give(logprobs),
            truncated=self._give(np.array(truncated, dtype=np.bool_)),
            finish_reasons=[row.finish.value for row in sampled],
            weight_versions=[list(row.log.versions) for row in sampled],
        )

    def _give(self, values: NDArray[Any]) -> Any:
        return as_kind_of(self.like, values)


@dataclass(slots=True, eq=False)
class TextBatch:
    """Prompts as texts."""

    rows: list[Row]
    tokenizer: Tokenizer
    """Tokenizer that encodes prompts and decodes samples."""

    @classmethod
    def read(cls, batch: Mapping[str, Any], tokenizer: Tokenizer) -> Self:
        """Parse a mapping with `prompts`.

        Raises:
            BadBatch: the batch is invalid; the message names the row.
        """
        require_mapping(batch)
        prompts = batch.get("prompts")
        if not isinstance(prompts, list | tuple):
            raise BadBatch(f"the batch's prompts are {prompts!r:.60}: give a list of strings.")
        stop = _stop_strings(batch, len(prompts))
        rows = []
        for index, prompt in enumerate(prompts):
            ids = tokenizer.encode(prompt) if isinstance(prompt, str) else []
            if not ids:
                raise BadBatch(f"row {index}: the prompt is {prompt!r:.60}: give a string that is not empty.")
            rows.append(Row(index, array("i", ids), stop[index]))
        return cls(rows, tokenizer)

    def write(self, sampled: Sequence[SampledRow]) -> TextOutputSpec:
        return TextOutputSpec(texts=[self._text(row) for row in sampled])

    def _text(self, row: SampledRow) -> str:
        special = self.tokenizer.special_ids
        text = self.tokenizer.decode([token_id for token_id in row.log.ids[row.start :] if token_id not in special])
        if not isinstance(row.stop, str) or row.text is None:
            return text
        # The last id may have more text than the stop string. A stop string with special tokens is not in `text`.
        end = text.find(row.stop)
        return text[: end + len(row.stop)] if end >= 0 else row.text + row.stop


_CUT = (FinishReason.LENGTH, FinishReason.CONTEXT)


def _require_room(dtype: np.dtype[Any], vocabulary: int, pad_id: int) -> None:
    """Raise BadBatch if the type of the prompts cannot hold the sampled ids, which are returned in this type."""
    info = np.iinfo(dtype)
    if not info.min <= min(0, pad_id) or not max(vocabulary - 1, pad_id) <= info.max:
        raise BadBatch(
            f"input_ids has the type {dtype}, which cannot hold both the padding id {pad_id} and the {vocabulary} ids "
            "of the vocabulary: give int64."
        )


def _check_vocabulary(ids: NDArray[Any], lengths: NDArray[Any], vocabulary: int) -> None:
    within = np.arange(ids.shape[1]) < lengths[:, None]
    strange = within & ((ids < 0) | (ids >= vocabulary))
    if strange.any():
        row, position = np.argwhere(strange)[0]
        raise BadBatch(
            f"row {row}: {ids[row, position]} at position {position} is not an id of the engine's vocabulary of "
            f"{vocabulary}: the batch belongs to another tokenizer. Encode it with the tokenizer of the engine's model."
        )


def _stop_strings(batch: Mapping[str, Any], rows: int) -> list[tuple[str, ...]]:
    given: Any = batch.get("stop_strings")
    if given is None:
        return [()] * rows
    if not isinstance(given, list | tuple) or len(given) != rows:
        raise BadBatch(f"stop_strings = {given!r:.60}: give a list of strings, or None, for each of the {rows} rows.")
    return [as_strings(one, f"row {index}: stop_strings", BadBatch) for index, one in enumerate(given)]
