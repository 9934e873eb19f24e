"""Reader of the outputs of a token function; an invalid output is an error that names the field."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

from runner.engines.base import Delta, FinishReason
from runner.engines.function.token_function import TokenOutput, TokenSampling
from runner.errors import EngineError
from runner.quantities import counted
from runner.tokens.side_data import RoutedExperts, SamplingMasks, SideData
from runner.tokens.top_logprobs import TopLogprobs

__all__ = ["OutputReader"]

_ENDS: Final = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.REPETITION)
_ROUNDING_TOLERANCE: Final = 0.01
"""Largest accepted log-probability. It is above 0, since narrow number types round."""


class OutputReader:
    """Reader that checks the outputs for one turn, and converts them to deltas.

    Args:
        sampling: the sampling parameters that the function received.
        vocabulary: number of ids of the model.
        context: maximum number of ids of prompt and turn together.
        logprobs: True if every id needs a log-probability.
    """

    def __init__(self, sampling: TokenSampling, *, vocabulary: int, context: int, logprobs: bool) -> None:
        self.finish: FinishReason | None = None
        """Reason for the end of the turn; None before its end."""
        self.stop: int | None = None
        """Stop id that ended the turn; None if none was sampled."""
        self.count = 0
        self.version: str | None = None
        """Weight version of the newest ids; None if none was reported."""
        self.cached_tokens: int | None = None
        """Number of prompt ids that a prefix cache held; None if unknown."""
        self._sampling = sampling
        self._stops = frozenset(sampling.stop_ids)
        self._vocabulary = vocabulary
        self._room = context - len(sampling.request.prompt)
        self._logprobs = logprobs

    def read(self, output: Any) -> Delta:
        """Convert one output to a delta without a finish.

        Raises:
            EngineError: the output is invalid; the message names the field.
        """
        if not isinstance(output, TokenOutput):
            self._refuse(f"gave {_kind(output)}", "give a TokenOutput")
        if self.finish is not None:
            self._refuse("continued after its finish", "give `finish` only with the last output")
        ids = self._ids(output.token_ids)
        logprobs = self._logprobs_of(output.logprobs, len(ids)) if self._logprobs else None
        top = self._top(output.top, len(ids)) if self._sampling.logprobs else None
        self.count += len(ids)
        if self.count > self._sampling.max_tokens:
            self._refuse(f"gave {self.count} ids", f"max_tokens is {self._sampling.max_tokens}")
        self._keep_version(output.version)
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        if output.finish is not None:
            self._end(output.finish)
        return Delta(ids, logprobs, None, top, self._side(output, ids))

    def _side(self, output: TokenOutput, ids: Sequence[int]) -> SideData | None:
        if output.sampling_masks is None and output.routed_experts is None:
            return None
        return SideData(self._masks(output.sampling_masks, ids), self._experts(output.routed_experts))

    def end(self) -> None:
        """Check that the last output had a finish.

        Raises:
            EngineError: no output had a finish.
        """
        if self.finish is None:
            self._refuse("ended without a finish", "set `finish` in the last output")

    def refuse_type(self, given: object) -> NoReturn:
        """Raise EngineError for the result of a call that is neither awaitable nor an async iterator."""
        self._refuse(f"gave {_kind(given)} in place of an answer", "make it an `async def`, or an async generator")

    # --- the parts of an output

    def _ids(self, given: Any) -> array[int]:
        if given is None:
            self._refuse("gave None for token_ids", "give the sampled ids, or an empty list")
        try:
            ids = [operator.index(token_id) for token_id in given]
        except TypeError:
            self._refuse(f"gave {given!r:.60} for token_ids", "give whole numbers")
        for token_id in ids:
            if not 0 <= token_id < self._vocabulary:
                self._refuse(f"gave the id {token_id}", f"the model's ids are 0 to {self._vocabulary - 1}")
            if self.stop is not None:
                self._refuse(f"continued after the stop id {self.stop}", "end the turn at the first of stop_ids")
            if token_id in self._stops:
                self.stop = token_id
        return array("i", ids)

    def _logprobs_of(self, given: Any, count: int) -> list[float]:
        if given is None:
            self._refuse("gave no log-probabilities", "give one for each id, or take TokenEngine(logprobs='none')")
        try:
            values = [float(value) for value in given]
        except (TypeError, ValueError):
            self._refuse(f"gave {given!r:.60} for logprobs", "give a number for each id")
        if len(values) != count:
            self._refuse(f"gave {len(values)} log-probabilities of {count} ids", "give one for each id")
        for value in values:
            if not math.isfinite(value):
                self._refuse(f"gave the log-probability {value}", "give finite log-probabilities")
            if value > _ROUNDING_TOLERANCE:
                self._refuse(f"gave the log-probability {value:g}", "give logarithms, which are at most 0")
        return values

    def _top(self, given: Sequence[Mapping[int, float]] | None, count: int) -> TopLogprobs:
        wanted = self._sampling.logprobs
        rows = list(given or ())
        if len(rows) != count:
            self._refuse(f"gave the most likely ids of {len(rows)} positions of {count}", "give `top` for each")
        if any(len(row) < wanted for row in rows):
            count = min(map(len, rows))
            self._refuse(f"gave {counted(count, 'most likely id')} for a position", f"give {wanted}")
        return TopLogprobs.of(rows, wanted)

    def _masks(self, given: Sequence[Sequence[int]] | None, ids: Sequence[int]) -> SamplingMasks | None:
        if given is None:
            return None
        if len(given) != len(ids):
            self._refuse(f"gave sampling_masks of {len(given)} positions of {len(ids)}", "give the ids for each")
        for token_id, row in zip(ids, given, strict=True):
            if token_id not in row:
                self._refuse(
                    f"gave a sampling mask without its sampled id {token_id}", "give all that could be sampled"
                )
        return SamplingMasks.of(given)

    def _experts(self, given: Any) -> RoutedExperts | None:
        if given is None:
            return None
        import numpy as np  # NumPy is imported only here, since most functions return no routed experts

        positions = len(self._sampling.request.prompt) + self.count - 1
        try:
            experts = RoutedExperts.of(np.asarray(given))
        except (TypeError, ValueError) as error:
            self._refuse(f"gave {error}", "give an array of whole numbers")
        if len(experts) != positions:
            self._refuse(
                f"gave routed_experts of {len(experts)} positions", f"with the finish, give those of all {positions}"
            )
        return experts

    def _keep_version(self, given: Any) -> None:
        if given is None:
            return
        if not isinstance(given, str | int):
            self._refuse(f"gave the weight version {given!r:.60}", "give a string or a whole number")
        self.version = str(given)

    def _end(self, given: Any) -> None:
        if given not in _ENDS:
            self._refuse(f"gave the finish {given!r:.60}", f"give one of {', '.join(_ENDS)}; `finish_of` returns it")
        self.finish = FinishReason(given)
        stopped, whole = self.stop is not None, self.count in (self._sampling.max_tokens, self._room)
        if self.finish is FinishReason.STOP and not stopped:
            names = ", ".join(map(str, self._sampling.stop_ids)) or "none"
            self._refuse(
                "gave the finish 'stop' without a stop id",
                f"include the stop id as the last of token_ids; stop_ids: {names}",
            )
        if self.finish is FinishReason.LENGTH and stopped:
            self._refuse(
                "gave the finish 'length' after a stop id", "a turn that ends with a stop id has the finish 'stop'"
            )
        if self.finish is FinishReason.LENGTH and not whole:
            most = f"max_tokens is {self._sampling.max_tokens}, and {self._room} ids have room in the context"
            self._refuse(
                f"gave the finish 'length' after {self.count} ids",
                f"{most}; where the engine has a limit of its own, give it as context= or Sampling(max_tokens=)",
            )

    def _refuse(self, what: str, fix: str) -> NoReturn:
        raise EngineError(f"{self._sampling.request.name}: generate() {what}: {fix}.")


def _kind(given: object) -> str:
    return "None" if given is None else f"a {type(given).__name__}"
