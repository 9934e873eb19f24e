"""Seeds: every random number of a run depends on the run's seed and on its purpose."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(*parts: str | int) -> int:
    """Return a seed of 63 bits that depends on every part and its position, and on nothing else.

    Python's `hash` would differ from process to process.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        # With its length, so that ("ab", "c") and ("a", "bc") are not the same bytes.
        digest.update(b"%d:%b" % (len(text), text))
    return int.from_bytes(digest.digest(), "big") >> 1  # the run file and Parquet hold signed integers of 64 bits
