"""The estimate of a run's time left."""

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from runner.runs.time_left import MIN_EPISODES, TimeLeft, TimeLeftEstimator


@dataclass
class SimulatedRun:
    """Episodes of known lengths, some of which play at once. A turn takes a second, and the first turn is slow."""

    lengths: list[int]
    width: int
    first_turn: float = 1.0
    seconds: Callable[[int], float] = lambda step: 1.0
    """Seconds of each turn after the first one."""
    finished: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.waiting, self.running = list(self.lengths), list[list[int]]()
        self.estimator, self.now, self.turns, self.steps = TimeLeftEstimator(), 0.0, 0, 0

    def step(self) -> None:
        """Play one turn of all episodes in flight."""
        while self.waiting and len(self.running) < self.width:
            self.running.append([0, self.waiting.pop(0)])
        self.now += self.first_turn if not self.turns else self.seconds(self.steps)
        self.steps += 1
        for episode in self.running:
            episode[0] += 1
            self.turns += 1
        for taken, length in [each for each in self.running if each[0] == each[1]]:
            self.running.remove([taken, length])
            self.finished[length] += 1

    def read(self) -> TimeLeft | None:
        left = len(self.waiting) + len(self.running)
        done = self.turns - sum(each[0] for each in self.running)
        taken = [each[0] for each in self.running]
        return self.estimator.read(self.now, finished=self.finished, done_turns=done, running=taken, left=left)

    def to_the_end(self) -> list[tuple[float, TimeLeft | None]]:
        """Return the estimates after each turn, with their times."""
        said = []
        while self.waiting or self.running:
            self.step()
            said.append((self.now, self.read()))
        return said


def test_no_estimate_before_some_episodes_have_finished() -> None:
    played = SimulatedRun([3] * 64, width=64)
    played.step()
    played.step()
    assert played.read() is None
    played.step()
    assert played.read() == TimeLeft(0.0, 0.0)


def test_no_estimate_if_the_number_of_episodes_is_unknown() -> None:
    played = Counter({3: MIN_EPISODES})
    assert TimeLeftEstimator().read(1.0, finished=played, done_turns=12, running=[1], left=None) is None


@pytest.mark.parametrize("width", [1, 4, 16, 64])
def test_time_left_of_equal_episodes_is_right(width: int) -> None:
    said = SimulatedRun([5] * 64, width=width).to_the_end()
    end = said[-1][0]
    estimates = [(now, left) for now, left in said[:-1] if left is not None]
    assert len(estimates) >= len(said) // 3 or width == 64
    for now, left in estimates:
        assert left.seconds == pytest.approx(end - now, rel=0.35, abs=2.5)


def test_no_estimate_while_most_episodes_may_be_longer() -> None:
    played = SimulatedRun([3] * 20 + [9] * 44, width=64, first_turn=20.0)
    for _ in range(4):
        played.step()
        assert played.read() is None


def test_concurrent_episodes_do_not_multiply_the_time_left() -> None:
    """Forty episodes have finished, and the others have one turn left: the rest takes seconds, not minutes."""
    played = SimulatedRun([3] * 40 + [4] * 24, width=64, first_turn=20.0)
    played.finished = Counter({4: 8})  # of an earlier launch
    for _ in range(3):
        played.step()
        left = played.read()
    assert left is not None
    assert left.seconds < 6, "the 20 s for reading prompts occur only once"
    assert left.seconds + 2 * left.spread >= 1


def test_a_slow_first_turn_is_forgotten_by_half_of_the_run() -> None:
    said = SimulatedRun([4] * 100, width=10, first_turn=12.0).to_the_end()
    end = said[-1][0]
    later = [(now, left) for now, left in said[:-1] if now > 26 and left is not None]
    assert later
    for now, left in later:
        assert left.seconds == pytest.approx(end - now, rel=0.4, abs=2.5)


@pytest.mark.parametrize("seed", range(8))
def test_most_runs_end_within_twice_the_spread(seed: int) -> None:
    rng = random.Random(seed)
    said = SimulatedRun([rng.randint(1, 9) for _ in range(200)], width=20).to_the_end()
    end = said[-1][0]
    estimates = [(now, left) for now, left in said if left is not None and left.seconds]
    inside = sum(abs(left.seconds - (end - now)) <= 2 * left.spread + 1 for now, left in estimates)
    assert inside >= 0.7 * len(estimates)


@pytest.mark.parametrize("seed", range(8))
def test_spread_covers_a_machine_that_others_slow_down(seed: int) -> None:
    """Turns take one second or eight seconds, for three to eight turns in a row."""
    rng = random.Random(seed)
    seconds = [pace for _ in range(200) for pace in (rng.choice((1.0, 8.0)),) for _ in range(rng.randint(3, 8))]
    lengths = [rng.randint(1, 9) for _ in range(1000)]
    said = SimulatedRun(lengths, width=20, seconds=seconds.__getitem__).to_the_end()
    end = said[-1][0]
    estimates = [(now, left) for now, left in said if left is not None and left.seconds > 30]
    far = sum(abs(left.seconds - (end - now)) > 3 * left.spread for now, left in estimates)
    assert estimates
    assert far <= 0.1 * len(estimates)
    assert all(left.spread < left.seconds for _, left in estimates)


def test_the_spread_shrinks_as_turns_are_played() -> None:
    rng = random.Random(1)
    said = [left for _, left in SimulatedRun([rng.randint(1, 9) for _ in range(400)], width=20).to_the_end() if left]
    shares = [left.spread / left.seconds for left in said if left.seconds]
    assert shares[0] > 2 * min(shares)


def test_an_estimate_over_ten_thousand_long_episodes_is_cheap() -> None:
    rng = random.Random(2)
    finished = Counter(rng.randint(1, 500) for _ in range(10_000))
    running = [rng.randint(0, 500) for _ in range(10_000)]
    estimator = TimeLeftEstimator()
    done = sum(turns * count for turns, count in finished.items())
    estimator.read(50.0, finished=finished, done_turns=0, running=[0], left=20_000)
    operations = 0

    def count(*_: object) -> None:
        nonlocal operations
        operations += 1

    sys.setprofile(count)
    try:
        left = estimator.read(100.0, finished=finished, done_turns=done, running=running, left=20_000)
    finally:
        sys.setprofile(None)
    assert left is not None
    assert operations < 20_000, "the number of calls grows with the episodes, not with their turns"
