"""For tests of environments and engines: scripted replies, exactness, cancellation at every point, and leaks."""

from __future__ import annotations

from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.replies import Replies
from runner.engines.scripted.script import Fault, Latency, ModelCall, Reply, call
from runner.engines.scripted.stream import RecordedCall
from runner.testing.assertions import assert_exact
from runner.testing.cancelling import cancel_everywhere, play_cancelled
from runner.testing.chunking import inside
from runner.testing.clock import VirtualClock
from runner.testing.forcing import FORCING, ForcedEngine, force
from runner.testing.leaks import Leaked, no_leaks
from runner.testing.playing import play, play_async, play_many, play_many_async
from runner.testing.queued import QueuedEngine
from runner.testing.recordings import record, replay
from runner.testing.vocabulary import AwkwardTokenizer, PlainTokenizer
from runner.testing.watchdog import LoopWatchdog

__all__ = [
    "FORCING",
    "AwkwardTokenizer",
    "Fault",
    "ForcedEngine",
    "Latency",
    "Leaked",
    "LoopWatchdog",
    "ModelCall",
    "PlainTokenizer",
    "QueuedEngine",
    "RecordedCall",
    "Replies",
    "Reply",
    "ScriptedEngine",
    "VirtualClock",
    "assert_exact",
    "call",
    "cancel_everywhere",
    "force",
    "inside",
    "no_leaks",
    "play",
    "play_async",
    "play_cancelled",
    "play_many",
    "play_many_async",
    "record",
    "replay",
]
