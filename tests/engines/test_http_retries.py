"""Retries of requests: policy, waits and budget, without HTTP."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.http_retries import (
    FailureKind,
    HttpFailure,
    Retries,
    RetryPolicy,
    kind_of_status,
    retry_after_seconds,
)
from runner.errors import BadOption

BUSY = HttpFailure(FailureKind.BUSY, "full")
NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)


def test_a_wait_doubles_up_to_the_longest() -> None:
    policy = RetryPolicy(attempts=10, first_seconds=1.0, longest_seconds=8.0)
    retries = Retries(policy)
    for attempt, longest in enumerate((1, 2, 4, 8, 8, 8), start=1):
        seconds = retries.wait_after(BUSY, attempt)
        assert seconds is not None
        assert longest / 2 <= seconds <= longest


@given(asked=st.floats(0, 120), attempt=st.integers(1, 7), seed=st.integers())
def test_retry_waits_at_least_as_long_as_the_server_asks(asked: float, attempt: int, seed: int) -> None:
    seconds = Retries(RetryPolicy(), seed=seed).wait_after(HttpFailure(FailureKind.BUSY, "full", asked), attempt)
    assert seconds is not None
    assert seconds >= asked


def test_long_retry_after_is_not_retried() -> None:
    retries = Retries(RetryPolicy())
    assert retries.wait_after(HttpFailure(FailureKind.BUSY, "full", 121.0), 1) is None
    assert (retries.left, retries.counts.total()) == (RetryPolicy().budget, 0)


@pytest.mark.parametrize("kind", [kind for kind in FailureKind if kind not in ("connection", "busy")])
def test_only_failed_connections_and_busy_servers_are_asked_again(kind: FailureKind) -> None:
    assert Retries(RetryPolicy()).wait_after(HttpFailure(kind, "no"), 1) is None


def test_request_is_sent_as_often_as_the_policy_allows() -> None:
    retries = Retries(RetryPolicy(attempts=3))
    assert [retries.wait_after(BUSY, attempt) is None for attempt in (1, 2, 3)] == [False, False, True]
    assert retries.counts == {FailureKind.BUSY: 2}


def test_failures_spend_the_budget_and_successes_refill_it() -> None:
    retries = Retries(RetryPolicy(budget=2))
    assert [retries.wait_after(BUSY, 1) is None for _ in range(3)] == [False, False, True]
    retries.succeeded()
    assert retries.wait_after(BUSY, 1) is not None
    for _ in range(5):
        retries.succeeded()
    assert retries.left == 2


def test_waits_follow_from_the_seed_and_those_of_two_seeds_differ() -> None:
    first, again, other = (
        [Retries(RetryPolicy(), seed=seed).wait_after(BUSY, attempt) for attempt in range(1, 5)] for seed in (1, 1, 2)
    )
    assert first == again != other


def test_time_waited_for_retries_is_summed() -> None:
    retries = Retries(RetryPolicy())
    waits = [retries.wait_after(BUSY, attempt) or 0.0 for attempt in (1, 2)]
    assert retries.waited == pytest.approx(sum(waits))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("30", 30.0),
        ("-3", 0.0),
        ("Thu, 01 Jan 2026 12:01:30 GMT", 90.0),
        ("Thu, 01 Jan 2026 11:00:00 GMT", 0.0),
        ("soon", None),
    ],
)
def test_both_forms_of_retry_after_are_read(value: str | None, seconds: float | None) -> None:
    assert retry_after_seconds(value, now=NOW) == seconds


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (429, FailureKind.BUSY),
        (503, FailureKind.BUSY),
        (529, FailureKind.BUSY),
        (401, FailureKind.REFUSED),
        (403, FailureKind.REFUSED),
        (404, FailureKind.REFUSED),
        (400, FailureKind.BAD_REQUEST),
        (422, FailureKind.BAD_REQUEST),
        (500, FailureKind.SERVER),
        (502, FailureKind.SERVER),
    ],
)
def test_status_determines_the_kind_of_failure(status: int, kind: FailureKind) -> None:
    assert kind_of_status(status) is kind


@pytest.mark.parametrize(
    "given", [{"attempts": 0}, {"attempts": 1.5}, {"budget": -1}, {"first_seconds": -1}, {"longest_retry_after": "2"}]
)
def test_invalid_policy_is_refused_by_its_field(given: dict[str, object]) -> None:
    with pytest.raises(BadOption, match=next(iter(given))):
        RetryPolicy(**given)  # type: ignore[arg-type]


def test_a_run_without_a_budget_sends_nothing_again() -> None:
    retries = Retries(RetryPolicy(budget=0))
    assert retries.wait_after(BUSY, 1) is None
