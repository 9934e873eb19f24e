"""Seeds: every random number of a run follows from the run's seed and from what it is for."""

from __future__ import annotations

import hashlib

__all__ = ["derive_seed"]


def derive_seed(*parts: str | int) -> int:
    """A seed of 63 bits that depends on every part and its place, and on nothing else."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = str(part).encode()
        digest.update(b"%d:%b" % (len(text), text))
    return int.from_bytes(digest.digest(), "big") >> 1
