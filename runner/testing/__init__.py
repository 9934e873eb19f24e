"""The test kit for environments and engines: scripted replies, a linter, and checks of ids, cancellation and leaks."""

from __future__ import annotations

from runner.engines.scripted.engine import ScriptedEngine
from runner.engines.scripted.replies import Replies
from runner.engines.scripted.script import Fault, Latency, ModelCall, Reply, call
from runner.engines.scripted.stream import RecordedCall
from runner.testing.assertions import assert_exact
from runner.testing.cancellation_points import cancel_everywhere, play_cancelled
from runner.testing.chunking import inside
from runner.testing.environment_linter.findings import Finding
from runner.testing.environment_linter.linter import check_environment
from runner.testing.forcing import FORCING, ForcedEngine, force
from runner.testing.leaks import Leaked, no_leaks
from runner.testing.playing import play, play_async, play_many, play_many_async
from runner.testing.queued_engine import QueuedEngine
from runner.testing.recordings import record, replay
from runner.testing.virtual_clock import VirtualClock
from runner.testing.vocabulary import AwkwardTokenizer, PlainTokenizer
from runner.testing.watchdog import LoopWatchdog

__all__ = [
    "FORCING",
    "AwkwardTokenizer",
    "Fault",
    "Finding",
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
    "check_environment",
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
