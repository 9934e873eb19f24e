"""Check of the records of a trajectory: they agree with each other, and with the run's configuration.

`runner.verify.rebuild` checks prompts and turns. This module checks seeds against the seed of the run, rewards against
their parts, and the log-probability and weight version of each sampled id.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from runner.engines.base import FinishReason
from runner.episode.key import MAIN, EpisodeKey
from runner.errors import RunFileError
from runner.seeds import derive_seed
from runner.store.header import Header
from runner.tokens.log import VersionSpan
from runner.trajectory import Outcome, Segment, Trajectory, Turn
from runner.verify.differences import Comparison, Difference, DifferenceFound, Kind

__all__ = ["LIMITS_OF", "first_contradiction"]

LOGPROB_TOLERANCE: Final = 1e-3
"""Tolerance for log-probabilities, in nats, and for sums of probabilities, because of rounding to 32 bits."""

LIMITS_OF: Final[Mapping[Outcome, tuple[str, ...]]] = {
    Outcome.COMPLETED: ("",),
    Outcome.TURN_LIMIT: ("turns",),
    Outcome.TOKEN_LIMIT: ("tokens", "max_tokens"),
    Outcome.CONTEXT_LIMIT: ("context",),
    Outcome.TIME_LIMIT: ("seconds",),
    Outcome.CANCELLED: ("",),
}
"""Allowed values of `limit`, by outcome; other outcomes allow any value."""


def first_contradiction(trajectory: Trajectory, header: Header) -> Difference | None:
    """Return the first record of `trajectory` that contradicts another record or the run's configuration, or None.

    The caller has checked the trajectory's turns and ids with `first_difference`.
    """
    try:
        _Records(trajectory, header).check()
    except DifferenceFound as found:
        return found.difference
    return None


class _Records:
    """The check of one trajectory; raises `DifferenceFound` at the first contradiction."""

    def __init__(self, trajectory: Trajectory, header: Header) -> None:
        self._trajectory = trajectory
        self._header = header
        self._engine: Mapping[str, Any] = header.engines.get(trajectory.agent, header.engine)
        self._compare = Comparison(trajectory, repr)

    def check(self) -> None:
        self._check_identity()
        self._check_outcome()
        self._check_reward()
        for number, segment in enumerate(self._trajectory.segments):
            self._compare.segment = number
            turns = [turn for turn in self._trajectory.turns if turn.segment == number]
            self._check_logprobs(segment, turns)
            self._check_versions(segment, turns)
            self._check_names(segment)
        for position, turn in enumerate(self._trajectory.turns):
            self._compare.segment, self._compare.turn = turn.segment, turn.number
            self._check_turn(turn, position)
            self._check_top(turn)
            self._check_masks(turn)
        self._compare.segment = self._compare.turn = None
        numbers = {turn.number for turn in self._trajectory.turns}
        for request in self._trajectory.requests:
            if request.turn is not None and request.turn not in numbers:
                self._differ(Kind.LAYOUT, f"request {request.number} names a missing turn", request.turn, "a turn")

    def _differ(self, kind: Kind, what: str, stored: object, derived: object) -> None:
        self._compare.differ(kind, what, stored=str(stored), derived=str(derived))

    # --- the episode

    def _check_identity(self) -> None:
        trajectory = self._trajectory
        key = EpisodeKey(task=trajectory.task, index=trajectory.index, visit=trajectory.visit)
        if trajectory.id != key.id:
            problem = "the episode's id does not follow from its task and index"
            self._differ(Kind.EPISODES, problem, trajectory.id, key.id)
        seed = key.seed(self._header.seed)
        if trajectory.seed != seed:
            self._differ(Kind.SEED, "the episode's seed does not follow from the run's", trajectory.seed, seed)
        header = self._header
        untrained = trajectory.agent in header.engines or not header.has_ids(trajectory.agent)
        if (trajectory.trained and untrained) or (trajectory.agent == MAIN and trajectory.trained == untrained):
            problem = "the record of whether the agent is trained differs"
            self._differ(Kind.EPISODES, problem, trajectory.trained, not untrained)

    def _check_outcome(self) -> None:
        trajectory, outcome = self._trajectory, self._trajectory.outcome
        limits = LIMITS_OF.get(outcome)
        if limits is not None and trajectory.limit not in limits:
            problem = f"the outcome {outcome.value} does not fit the limit"
            self._differ(Kind.OUTCOME, problem, trajectory.limit, " or ".join(limits))
        if outcome is Outcome.COMPLETED and trajectory.error:
            self._differ(Kind.OUTCOME, "the episode is completed, but has an error", trajectory.error, "")
        if outcome in (Outcome.ENV_ERROR, Outcome.TOKEN_ERROR) and not trajectory.error:
            self._differ(Kind.OUTCOME, f"the episode ended by {outcome.value}, but it has no error", "", "an error")

    def _check_reward(self) -> None:
        trajectory, weights = self._trajectory, self._header.weights
        stored, rewards = trajectory.reward, trajectory.rewards
        unscored = not (trajectory.outcome.scored and trajectory.turns) or not (
            trajectory.trained or trajectory.agent == MAIN
        )
        if unscored and (rewards or stored is not None):
            self._differ(Kind.REWARD, "the agent was not scored, but has a reward", rewards or stored, None)
        unknown = ", ".join(rewards.keys() - weights.keys())
        if unknown:
            self._differ(Kind.REWARD, "the run does not have a reward of this name", unknown, ", ".join(weights))
        known = [weights[name] * value for name, value in rewards.items() if value is not None]
        derived = math.fsum(known) if known and len(known) == len(rewards) else None
        waits = stored is None and rewards.keys() != weights.keys()  # the group is not scored yet
        if not waits and not _same(stored, derived):
            self._differ(Kind.REWARD, "the reward is not the weighted sum of its parts", stored, derived)

    # --- values of each sampled id

    def _check_logprobs(self, segment: Segment, turns: Sequence[Turn]) -> None:
        log = segment.log
        sampled = [index for turn in turns for index in range(turn.start, turn.end)]
        recorded = self._engine.get("logprobs") is not None
        for index in sampled:
            value = log.logprobs[index]
            if value > LOGPROB_TOLERANCE:
                self._compare.differ(Kind.LOGPROBS, "a log-probability is above 0", index=index, stored=str(value))
            if recorded and math.isnan(value):
                self._compare.differ(
                    Kind.LOGPROBS, "a sampled id has no log-probability, although the engine returns them", index=index
                )

    def _check_masks(self, turn: Turn) -> None:
        try:
            masks = turn.sampling_masks
        except RunFileError as error:
            self._compare.differ(Kind.UNREADABLE, str(error))
        rows = [] if masks is None else masks.rows()
        for position, (token_id, allowed) in enumerate(zip(turn.token_ids, rows, strict=False)):
            if token_id not in allowed:
                problem = "the sampled id is not among the ids that could be sampled"
                self._compare.differ(Kind.LOGPROBS, problem, index=turn.start + position)

    def _check_top(self, turn: Turn) -> None:
        try:
            top = turn.top
        except RunFileError as error:
            self._compare.differ(Kind.UNREADABLE, str(error))
        asked = turn.sampling.logprobs if turn.sampling is not None else 0
        given = top is not None or not asked or turn.start == turn.end or self._engine.get("logprobs") is None
        if not given or (top is not None and top.count != asked):
            has = 0 if top is None else top.count
            self._differ(Kind.LOGPROBS, "the number of most likely ids differs from the requested number", has, asked)
        if top is None:
            return
        if len(top) != turn.end - turn.start:
            problem = "the number of positions with most likely ids differs"
            self._differ(Kind.LOGPROBS, problem, len(top), turn.end - turn.start)
        ids, logprobs = top.id_rows(), top.logprob_rows().astype(float)
        total, own = np.exp(logprobs).sum(axis=1), np.array(turn.logprobs)[:, None]
        # `<=` is true for two minus infinities. Comparisons with NaN are false, so NaN counts as wrong.
        sorted_down = (logprobs[:, 1:] <= logprobs[:, :-1]).all(axis=1)
        same = ((ids != np.array(turn.token_ids)[:, None]) | (np.abs(logprobs - own) <= LOGPROB_TOLERANCE)).all(axis=1)
        wrong = np.flatnonzero(~(sorted_down & same & (total <= 1 + LOGPROB_TOLERANCE)))
        if len(wrong):
            self._compare.differ(
                Kind.LOGPROBS,
                "the most likely ids of a position contradict each other or the sampled id",
                index=turn.start + int(wrong[0]),
                stored=str(dict(zip(ids[wrong[0]].tolist(), logprobs[wrong[0]].tolist(), strict=True))),
            )

    def _check_versions(self, segment: Segment, turns: Sequence[Turn]) -> None:
        spans = segment.log.versions
        taken = 0
        for turn in turns:
            self._compare.turn = turn.number
            mine = [span for span in spans if turn.start <= span.start < turn.end]
            taken += len(mine)
            ends = [turn.start, *(span.end for span in mine)]
            if mine or self._is_stamped(turn):
                starts = [*(span.start for span in mine), turn.end]
                if starts != ends:
                    self._differ(Kind.VERSIONS, "weight versions do not cover the sampled ids", _shown(mine), ends[0])
        self._compare.turn = None
        if taken != len(spans):
            self._differ(Kind.VERSIONS, "a weight version covers ids that were not sampled", _shown(spans), "")

    def _is_stamped(self, turn: Turn) -> bool:
        """Return True if the engine reports a weight version for a turn like this."""
        ended = turn.finish not in (FinishReason.ABORT, FinishReason.ERROR)
        return ended and turn.end > turn.start and not self._engine.keys().isdisjoint(_STAMPED)

    # --- turns and messages

    def _check_turn(self, turn: Turn, position: int) -> None:
        before = self._trajectory.turns[position - 1].number if position else -1
        if turn.number != position and (not self._trajectory.branched or turn.number <= before):
            self._differ(Kind.LAYOUT, "the number of the turn differs", turn.number, position)
        seed = derive_seed(self._trajectory.seed, self._trajectory.thread or turn.agent, turn.number)
        if turn.seed is not None and turn.seed != seed:
            self._differ(Kind.SEED, "the turn's seed does not follow from the episode's", turn.seed, seed)
        sampling, sampled = turn.sampling, turn.end - turn.start
        if sampling is None:  # the turn was not sampled by a run
            return
        if sampled > sampling.max_tokens:
            self._differ(Kind.TURN, "more ids were sampled than max_tokens", sampled, sampling.max_tokens)
        if turn.finish is FinishReason.STOP and turn.stop is not None:
            stops = (*sampling.all_stop_ids(self._engine.get("stop_ids", ())), *sampling.stop)
            if turn.stop not in stops:
                known = ", ".join(map(repr, stops))
                self._differ(Kind.STOP, "the turn's stop is not among the requested stops", repr(turn.stop), known)
            # With a grammar, a turn may have fewer ids, since the grammar may allow only the end of the turn.
            before = sampled - isinstance(turn.stop, int)
            if before < sampling.min_tokens and turn.constraint is None:
                self._differ(Kind.STOP, "the turn ended before it had min_tokens ids", before, sampling.min_tokens)

    def _check_names(self, segment: Segment) -> None:
        called: dict[str, str] = {}
        for message in segment.messages:
            for call in message.get("tool_calls") or ():
                called[call["id"]] = call["function"]["name"]
            answered, name = message.get("tool_call_id"), message.get("name")
            if message["role"] == "tool" and name is not None and called.get(str(answered), name) != name:
                self._differ(Kind.MESSAGE, "a result has another name than its call", name, called[str(answered)])


_STAMPED: Final = frozenset({"versions_stamped_by", "weight_version"})
"""Keys of `Engine.describe()`. An engine with weight versions has one of them."""


def _same(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)


def _shown(spans: Sequence[VersionSpan]) -> str:
    return ", ".join(f"{span.version!r} from {span.start} to {span.end}" for span in spans)
