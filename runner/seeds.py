"""Seeds: every random number of a run depends on the run's seed and on its purpose."""

from __future__ import annotations

import hashlib
from itertools import chain

__all__ = ["derive_seed"]


def derive_seed(*parts: str | int) -> int:
    """Return a seed of 63 bits that depends on every part and its position, and on nothing else.

    Python's `hash` would differ from process to process.
    """
    texts = list(map(str.encode, map(str, parts)))
    # The parts are hashed with their lengths, so that ("ab", "c") and ("a", "bc") are not the same bytes.
    pairs = chain.from_iterable(zip(map(len, texts), texts, strict=True))
    digest = hashlib.blake2b(b"%d:%b" * len(texts) % tuple(pairs), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # the run file and Parquet hold signed integers of 64 bits
