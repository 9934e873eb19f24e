"""Training batches: by hand, for any trajectories, from runs and files, in torch, and as documented."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner import BadBatch, BadOption, Conversation, Group, Outcome, Run, RunFile, Sampling, Trajectory, reward
from runner.testing import ModelCall
from runner.training.advantages import dr_grpo, grpo
from runner.training.batch import TrainingBatch
from runner.training.selection import grouped
from tests import sweeps
from tests.playing import Plain, recording
from tests.repository import DOCS
from tests.training.making import group, groups, made, prompt, retried, said
from tests.training.test_rows import retrying

PAGE = DOCS / "training-batches.md"
ARRAYS = (
    *("input_ids", "attention_mask", "position_ids", "segment_ids", "loss_mask", "logprobs", "temperatures"),
    *("advantages", "weight_versions"),
)

padded_or_packed = st.one_of(
    st.just(lambda source: TrainingBatch.padded(source, pad_id=0)),
    st.integers(0, 80).map(lambda more: lambda source: TrainingBatch.packed(source, pad_id=0, length=60 + more)),
)


def two() -> list[Group]:
    """A group of two: one member has two turns, a bridge and a retried turn, and the other a rewritten history."""
    plain = made(
        [prompt(1, 2), said(3, version="a"), prompt(4), said(5, 6, version="b"), retried(7)], id="t0#0", reward=1
    )
    forked = made([prompt(1, 2), said(8, version="b")], [prompt(9), said(10, version="b")], id="t0#1", reward=0)
    return [group(plain, forked)]


def test_padded_batch_equals_one_made_by_hand() -> None:
    batch = TrainingBatch.padded(two(), pad_id=0, advantages=dr_grpo)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 0, 0, 0, 0], [9, 10, 0, 0, 0, 0, 0]]
    assert batch.attention_mask.tolist() == [[True] * 7, [True] * 3 + [False] * 4, [True] * 2 + [False] * 5]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]]
    assert batch.segment_ids.tolist() == [[1] * 7, [2] * 3 + [0] * 4, [3] * 2 + [0] * 5]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0, 0]]
    assert batch.logprobs.tolist() == [
        [0, 0, -3 / 8, 0, -5 / 8, -6 / 8, 0],
        [0, 0, -1, 0, 0, 0, 0],
        [0, -1.25] + [0] * 5,
    ]
    assert batch.advantages.tolist() == [[0, 0, 0.5, 0, 0.5, 0.5, 0], [0, 0, -0.5, 0, 0, 0, 0], [0, -0.5] + [0] * 5]
    assert batch.weight_versions.tolist() == [[-1, -1, 0, -1, 1, 1, -1], [-1, -1, 1] + [-1] * 4, [-1, 1] + [-1] * 5]
    assert batch.versions == ("a", "b")
    assert (batch.temperatures == 1).all()
    assert batch.rewards.tolist() == [1, 0]
    assert batch.trajectory_of.tolist() == [0, 1, 1]
    assert batch.lengths.tolist() == [7, 3, 2]
    assert (len(batch), batch.trained, batch.exact, batch.constrained) == (3, 5, True, 0)


def test_packed_batch_equals_one_made_by_hand() -> None:
    batch = TrainingBatch.packed(two(), length=10, pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 1, 2, 8], [9, 10, 0, 0, 0, 0, 0, 0, 0, 0]]
    assert batch.segment_ids.tolist() == [[1] * 7 + [2] * 3, [3] * 2 + [0] * 8]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7]]
    assert batch.loss_mask.astype(int).tolist() == [[0, 0, 1, 0, 1, 1, 0, 0, 0, 1], [0, 1] + [0] * 8]
    assert not batch.advantages.any()


def test_arrays_have_the_types_that_the_page_and_the_fields_promise() -> None:
    batch = TrainingBatch.padded(two(), pad_id=0)
    kinds = {name: getattr(batch, name).dtype.name for name in ARRAYS}
    assert kinds == {
        **dict.fromkeys(("input_ids", "position_ids", "segment_ids", "weight_versions"), "int32"),
        **dict.fromkeys(("attention_mask", "loss_mask"), "bool"),
        **dict.fromkeys(("logprobs", "temperatures", "advantages"), "float32"),
    }


def test_a_pad_id_that_is_also_sampled_loses_nothing() -> None:
    batch = TrainingBatch.padded(two(), pad_id=6)
    assert [ids.tolist() for ids in batch.unpadded(batch.input_ids)] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8], [9, 10]]
    assert batch.trained == 5


def test_sequences_may_have_a_fixed_length_or_a_multiple() -> None:
    assert TrainingBatch.padded(two(), pad_id=0, length=9).input_ids.shape == (3, 9)
    assert TrainingBatch.padded(two(), pad_id=0, multiple_of=8).input_ids.shape == (3, 8)


def test_batch_has_the_reason_of_an_inexact_ratio() -> None:
    sampling = Sampling(top_p=0.9, temperature=0.5).over(Sampling.defaults())
    batch = TrainingBatch.padded([made([prompt(1), said(2, 3)], sampling=sampling)], pad_id=0)
    assert (batch.exact, batch.inexact_reason) == (False, "top_p=0.9 (1 turn)")
    assert batch.temperatures.tolist() == [[1, 0.5, 0.5]]


def test_failed_episodes_do_not_change_the_group_mean() -> None:
    def member(index: int, **fields: Any) -> Trajectory:
        return made([prompt(1), said(2)], id=f"t0#{index}", **fields)

    whole = group(member(0, reward=0), member(1, reward=1))
    failed = [member(2, reward=None, outcome=Outcome.ENV_ERROR), member(3, reward=None)]
    with_failed = group(*whole.trajectories, *failed)
    batch, clean = (TrainingBatch.padded([each], pad_id=0, advantages=grpo) for each in (with_failed, whole))
    assert batch.advantages.tolist() == clean.advantages.tolist()
    assert batch.absent == {"env_error": 1, "no_reward": 1}


def test_a_rewritten_history_counts_once_in_its_group() -> None:
    three = made(*[[prompt(1), said(2)]] * 3, id="t0#0", reward=1)
    one = made([prompt(1), said(2)], id="t0#1", reward=0)
    batch = TrainingBatch.padded([group(three, one)], pad_id=0, advantages=dr_grpo)
    assert batch.advantages[:, 1].tolist() == [0.5, 0.5, 0.5, -0.5]


def test_batch_whose_groups_are_all_dropped_is_empty_and_false() -> None:
    flat = group(made([prompt(1), said(2)], id="t0#0"), made([prompt(1), said(3)], id="t0#1"))
    padded = TrainingBatch.padded([flat], pad_id=0, drop_flat=True, advantages=grpo)
    packed = TrainingBatch.packed([flat], pad_id=0, length=8, drop_flat=True, advantages=grpo)
    assert (padded.input_ids.shape, packed.input_ids.shape) == ((0, 0), (0, 8))
    for batch in (padded, packed):
        assert not batch
        assert (batch.trained, batch.exact, batch.unpadded(batch.input_ids)) == (0, True, [])
        assert [each.flat for each in batch.groups] == [True]


# --- advantages


def test_advantages_per_trajectory_or_position_are_placed() -> None:
    batch = TrainingBatch.packed(two(), length=10, pad_id=0)
    by_trajectory = batch.with_advantages([2.0, -1.0])
    assert by_trajectory.advantages.tolist() == [[0, 0, 2, 0, 2, 2, 0, 0, 0, -1], [0, -1] + [0] * 8]
    by_position = batch.with_advantages(np.full((2, 10), np.where(batch.loss_mask, 3.0, np.nan)))
    assert by_position.advantages.tolist() == np.where(batch.loss_mask, 3.0, 0.0).tolist()
    assert not batch.advantages.any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0], r"advantages of shape \(1,\): give one for each of the 2 trajectories.*shape \(3, 7\)"),
        ([1.0, 2.0, 3.0], r"advantages of shape \(3,\)"),
        (np.zeros((7, 3)), r"advantages of shape \(7, 3\)"),
        ([1.0, float("nan")], "the advantage of episode 't0#1' of agent 'main' is nan: give finite numbers"),
    ],
    ids=["too few", "by row", "transposed", "nan"],
)
def test_advantages_that_do_not_fit_are_refused(values: Any, message: str) -> None:
    with pytest.raises(BadBatch, match=message):
        TrainingBatch.padded(two(), pad_id=0).with_advantages(values)


# --- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: TrainingBatch.packed(two(), length=6, pad_id=0),
            BadBatch,
            r"'t0#0' of agent 'main', segment 0, has 7 ids and does not fit into length=6.*length=7.*context=6",
        ),
        (lambda: TrainingBatch.padded(two(), length=6, pad_id=0), BadBatch, "has 7 ids and does not fit"),
        (lambda: TrainingBatch.padded(two(), length=0, pad_id=0), BadOption, "length=0: give"),
        (lambda: TrainingBatch.packed(two(), length="8", pad_id=0), BadOption, "length='8': give"),  # type: ignore[arg-type]  # as a user may
        (lambda: TrainingBatch.padded(two(), pad_id=None), BadOption, r"pad_id=None: give a token id"),  # type: ignore[arg-type]  # likewise
        (lambda: TrainingBatch.padded(two(), pad_id=-1), BadOption, "pad_id=-1: give a token id"),
        (
            lambda: TrainingBatch.padded(two(), pad_id=99, vocabulary=50),
            BadOption,
            "pad_id=99: give one of the 50 ids",
        ),
        (lambda: TrainingBatch.padded(two(), pad_id=0, vocabulary=10), BadBatch, "id 10 is not one of the 10 ids"),
        (lambda: TrainingBatch.padded(two(), pad_id=0, multiple_of=0), BadOption, "multiple_of=0: give"),
        (
            lambda: TrainingBatch.padded(two(), pad_id=0, advantages="grpo"),  # type: ignore[arg-type]  # likewise
            BadOption,
            r"advantages='grpo': give a function: grpo, rloo or dr_grpo \(from runner.training import grpo\)",
        ),
        (
            lambda: TrainingBatch.packed(two(), length=8, pad_id=0, advantages=np.ones(2)),  # type: ignore[arg-type]  # likewise
            BadOption,
            r"use batch.with_advantages\(values\)",
        ),
    ],
    ids=[
        "packed",
        "padded",
        "zero",
        "text",
        "no pad id",
        "negative",
        "foreign pad id",
        "foreign id",
        "multiple",
        "a name",
        "values",
    ],
)
def test_invalid_batch_argument_is_refused_with_the_reason(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


# --- any trajectories


@settings(max_examples=sweeps.times(50, 20))
@given(groups(), padded_or_packed)
def test_a_batch_without_its_padding_is_the_rows_again(source: list[Group], make: Any) -> None:
    batch = make(source)
    for name, of_row in [
        ("input_ids", "ids"),
        ("loss_mask", "loss_mask"),
        ("logprobs", "logprobs"),
        ("weight_versions", "versions"),
    ]:
        parts = batch.unpadded(getattr(batch, name))
        assert [part.tolist() for part in parts] == [getattr(row, of_row).tolist() for row in batch.rows]
    outside = ~batch.attention_mask
    assert not batch.loss_mask[outside].any()
    assert (batch.input_ids[outside] == 0).all()


@settings(max_examples=sweeps.times(50, 20))
@given(groups(), padded_or_packed)
def test_trained_ids_are_the_sampled_ids_of_turns_not_retried(source: list[Group], make: Any) -> None:
    batch = make(source)
    kept = [turn for t in batch.trajectories for turn in t.turns if not turn.retried]
    assert batch.trained == batch.loss_mask.sum() == sum(turn.end - turn.start for turn in kept)
    assert not batch.loss_mask[batch.position_ids == 0].any()


@settings(max_examples=sweeps.times(50, 20))
@given(groups(), padded_or_packed, st.randoms())
def test_every_trained_id_has_the_advantage_of_its_own_trajectory(source: list[Group], make: Any, random: Any) -> None:
    batch = make(source)
    values = [random.uniform(-2, 2) for _ in batch.trajectories]
    parts = batch.with_advantages(values).advantages
    for row, part, index in zip(batch.rows, batch.unpadded(parts), batch.trajectory_of, strict=True):
        assert batch.trajectories[index] is row.trajectory
        assert set(part[row.loss_mask]) == {np.float32(values[index])}
        assert not part[~row.loss_mask].any()


@settings(max_examples=sweeps.times(50, 20))
@given(groups(), st.integers(60, 140))
def test_packing_neither_loses_nor_mixes_what_padding_holds(source: list[Group], length: int) -> None:
    padded, packed = TrainingBatch.padded(source, pad_id=0), TrainingBatch.packed(source, pad_id=0, length=length)
    assert len(packed) <= len(padded)
    for name in ARRAYS:
        one, other = padded.unpadded(getattr(padded, name)), packed.unpadded(getattr(packed, name))
        assert [part.tolist() for part in one] == [part.tolist() for part in other]


# --- runs and files


class Retries(Plain):
    """Environment with two turns, the second of which is retried. Odd episodes fail."""

    async def rollout(self, conversation: Conversation) -> None:
        await retrying(conversation)
        if self.episode.index == 3:
            raise RuntimeError("the table fell over")

    @reward
    def correct(self) -> float:
        return float(self.episode.index)


def answer(asked: ModelCall) -> str:
    return f"It is {asked.turn}"


def arrays_by_row(batch: TrainingBatch) -> dict[tuple[str, int], list[Any]]:
    """Return every array of a batch by row, in any order of rows."""
    parts = [batch.unpadded(getattr(batch, name)) for name in ARRAYS]
    rewards = batch.rewards[batch.trajectory_of]
    rows = enumerate(batch.rows)
    return {(row.trajectory.id, row.segment): [rewards[i], *(part[i].tolist() for part in parts)] for i, row in rows}


async def gathered(run: Run) -> list[Group]:
    async with run:
        return [each async for each in run.groups()]


@pytest.mark.anyio
async def test_groups_of_a_run_with_retried_turns_and_a_failed_episode() -> None:
    source = await gathered(Run(Retries, recording(answer), group_size=4, breaker=1))
    batch = TrainingBatch.packed(source, pad_id=0, length=512, advantages=grpo)
    assert batch.absent == {"env_error": 1}
    assert batch.trained == sum(t.sampled - (t.turns[1].end - t.turns[1].start) for t in batch.trajectories)
    assert batch.inexact_reason == ""
    assert [row.segment for row in batch.rows] == [0, 1] * 3
    for trajectory, row, part in zip(
        [t for t in batch.trajectories for _ in range(2)], batch.rows, batch.unpadded(batch.input_ids), strict=True
    ):
        assert part.tolist() == trajectory.segments[row.segment].log.ids.tolist()


@pytest.mark.anyio
async def test_a_run_file_and_a_resumed_run_give_equal_batches(tmp_path: Path) -> None:
    file = tmp_path / "run.db"
    options: dict[str, Any] = {"group_size": 4, "breaker": 1, "file": file}
    played = TrainingBatch.padded(await gathered(Run(Retries, recording(answer), **options)), pad_id=0, advantages=grpo)
    with RunFile(file) as run_file:
        assert run_file.header.engine["tokenizer"] == recording(answer).tokenizer.fingerprint  # as the page says
        loaded = grouped(run_file.trajectories(), group_size=run_file.header.group_size)
    async with Run(Retries, recording(answer), **options) as run:
        stored = grouped(run.stored(), group_size=4)
    for source in (loaded, stored):
        batch = TrainingBatch.padded(source, pad_id=0, advantages=grpo)
        assert arrays_by_row(batch) == arrays_by_row(played)
        assert (batch.absent, batch.versions, batch.exact) == (played.absent, played.versions, True)


# --- the page


def pages_names() -> dict[str, Any]:
    """Return the names that the page's Python blocks define."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL):
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.mark.anyio
async def test_the_code_of_the_page_runs(tmp_path: Path) -> None:
    names = pages_names()
    batch = await names["played"](Retries, recording(answer))
    assert batch.trained
    assert batch.advantages.any()
    assert names["clipped"](batch).advantages.max() <= 2
    file = tmp_path / "run.db"
    await gathered(Run(Retries, recording(answer), group_size=2, file=file))
    assert names["stored"](file).trained
    fixed = batch.with_advantages(names["against_a_fixed_baseline"](batch.rewards, batch.group_of))
    assert set(fixed.advantages[fixed.loss_mask]) <= set((batch.rewards - 0.5).tolist())


def test_the_loss_of_the_page_skips_an_empty_batch() -> None:
    flat = group(*[made([prompt(1), said(2)], id=f"t0#{index}") for index in range(2)])
    empty = TrainingBatch.padded([flat], pad_id=0, drop_flat=True)
    assert pages_names()["loss"](None, empty) is None


def test_the_page_names_every_array() -> None:
    page = PAGE.read_text()
    assert all(f"`{name}`" in page for name in ARRAYS)
    public = [name for name in dir(TrainingBatch) if not name.startswith("_") and name not in ARRAYS]
    unnamed: Sequence[str] = [name for name in public if not re.search(rf"[`.]{name}\b", page)]
    assert unnamed == ["lengths"]


# --- the most likely ids


def _check_most_likely(batch: TrainingBatch, count: int) -> None:
    ids, logprobs = batch.top_logprobs(count)
    assert ids.shape == logprobs.shape == (*batch.input_ids.shape, count)
    assert (ids[~batch.loss_mask] == -1).all()
    assert (logprobs[~batch.loss_mask] == 0).all()
    for row, of_row, values in zip(batch.rows, batch.unpadded(ids), batch.unpadded(logprobs), strict=True):
        for turn in (turn for turn in row.turns if not turn.retried):
            assert (of_row[turn.start : turn.end] == turn.top_ids[:, :count]).all()
            assert (values[turn.start : turn.end] == turn.top_logprobs[:, :count]).all()


@pytest.mark.anyio
async def test_most_likely_ids_have_the_places_of_their_sampled_ids() -> None:
    class Retries(Plain):
        async def rollout(self, conversation: Conversation) -> None:
            await retrying(conversation)

    async with Run(Retries, recording("Yes"), sampling=Sampling(logprobs=3)) as run:
        groups = [each async for each in run.groups()]
    for batch in (TrainingBatch.padded(groups, pad_id=0), TrainingBatch.packed(groups, pad_id=0, length=400)):
        assert batch.trained
        for count in (1, 3):
            _check_most_likely(batch, count)
        with pytest.raises(BadBatch, match=r"t0#0/main/\d has 3 most likely .*Sampling\(logprobs=4\)"):
            batch.top_logprobs(4)


def test_batch_without_most_likely_ids_names_the_turn_and_the_fix() -> None:
    batch = TrainingBatch.padded(two(), pad_id=0)
    with pytest.raises(BadBatch, match=r"t0#0/main/0 has 0 most likely ids .*sample it with Sampling\(logprobs=2\)"):
        batch.top_logprobs(2)
    with pytest.raises(BadOption, match="count=0: give a whole number of at least 1"):
        batch.top_logprobs(0)
