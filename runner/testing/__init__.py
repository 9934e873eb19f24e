"""For tests of environments and engines: scripted replies, exactness, cancellation at every point, and leaks."""

from __future__ import annotations

from runner.engines.replies import Replies
from runner.engines.script import Fault, Latency, ModelCall, Reply, call
from runner.engines.scripted import RecordedCall, ScriptedEngine
from runner.testing.assertions import assert_exact
from runner.testing.cancellation import cancel_everywhere
from runner.testing.forcing import FORCING, ForcedEngine, force
from runner.testing.leaks import Leaked, no_leaks

__all__ = [
    "FORCING",
    "Fault",
    "ForcedEngine",
    "Latency",
    "Leaked",
    "ModelCall",
    "RecordedCall",
    "Replies",
    "Reply",
    "ScriptedEngine",
    "assert_exact",
    "call",
    "cancel_everywhere",
    "force",
    "no_leaks",
]
