"""Seeds: they depend on each part and its position, and are the same in every process."""

from __future__ import annotations

from runner.seeds import derive_seed


def test_seed_depends_on_the_limits_between_parts() -> None:
    parts: list[tuple[str | int, ...]] = [("ab", "c"), ("a", "bc"), ("abc",), ("c", "ab"), ("abc", ""), ("ab", "c", 0)]
    assert len({derive_seed(*each) for each in parts}) == len(parts)


def test_seed_is_the_same_in_every_process_and_fits_a_signed_integer() -> None:
    assert derive_seed(7, "t-0", "agent") == derive_seed("7", "t-0", "agent") == 7596316516457353438
    assert all(0 <= derive_seed(number) < 2**63 for number in range(100))
