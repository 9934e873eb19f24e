"""The token log: sources, masks, and weight versions of ids that stay."""

from __future__ import annotations

from runner.tokens.log import Source, TokenLog, VersionSpan


def log_of(prompt: int, sampled: int) -> TokenLog:
    log = TokenLog()
    log.append_prompt(range(prompt), Source.PROMPT)
    log.append_sampled(range(sampled), [-1.0] * sampled)
    return log


def test_spans_of_versions_end_with_the_log() -> None:
    log = log_of(prompt=2, sampled=3)
    log.stamp([VersionSpan("1", 0, 2), VersionSpan("2", 2, 9), VersionSpan("3", 9, 12)], start=2)
    assert log.versions == [VersionSpan("1", 2, 4), VersionSpan("2", 4, 5)]


def test_cut_leaves_no_span_after_the_last_id() -> None:
    log = log_of(prompt=2, sampled=4)
    log.stamp([VersionSpan("1", 0, 1), VersionSpan("2", 1, 4)], start=2)
    log.cut(4)
    assert (len(log), log.versions) == (4, [VersionSpan("1", 2, 3)])


def test_ids_that_were_taken_back_are_not_in_the_mask() -> None:
    log = log_of(prompt=1, sampled=3)
    log.take_back(2, 3)
    assert list(log.mask()) == [0, 1, 0, 1]
    log.take_back(3)
    assert list(log.mask()) == [0, 1, 0, 0]
