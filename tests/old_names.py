"""Names that were replaced or that slow readers, part of the check `tests.plain_english`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

UNCLEAR_IN_IDENTIFIERS: Final = re.compile(
    r"_(tells?|told|hears?|heard|knows|says|behind|news|anew|likeliest|meanwhile|whoever|whichever|somebody|nobody"
    r"|(go|goes)_on)_"
)
"""Words that slow readers of an identifier, with an underscore at both ends."""

OLD_NAMES: Final = {
    "COMPANY": "MAX_AFFINITY_IMBALANCE",
    "WORDS_KEPT": "CONTROL_TEXT_CACHE_SIZE",
    "NOBODY": "NO_SINKS",
    "Hand": "WorkerHandle",
    "hand": "worker_handle",
    "Party": "TransferGroup",
    "party": "transfer_group",
    "Seat": "Slot",
    "Ticket": "Assignment",
    "Seating": "SlotQueue",
    "standing_for": "placeholder_for",
    "Bulletin": "StreamBatch",
    "News": "StreamEvent",
    "Outbox": "StreamBuffer",
    "Catch": "FleetSnapshot",
    "Joined": "WorkerInfo",
    "Pulse": "Heartbeat",
    "Stored": "ObjectRef",
    "RunSent": "RunSpec",
    "Played": "AttemptResult",
    "Absence": "IdleReason",
    "stand_still": "hold",
    "leave_word": "record_exit_reason",
    "last_words": "exit_reason",
    "ChatDesk": "ChatService",
    "Desk": "ChatService",
    "Door": "EpisodeRoute",
    "Line": "ClientConnection",
    "Answering": "RequestHandler",
    "Asked": "ChatCall",
    "AskedTurn": "RequestNode",
    "HistoryPoint": "HistoryNode",
    "Aligned": "Alignment",
    "Walk": "HistoryMatch",
    "Node": "TurnNode",
    "Head": "Cursor",
    "Play": "EpisodeRunner",
    "TurnSpot": "TurnContext",
    "TurnAudience": "TurnSinks",
    "Speech": "_Generation",
    "Sample": "SampledTurn",
    "GiveTurn": "DeliverTurn",
    "TurnRelay": "TurnEvents",
    "likeness": "version_check",
    "lent": "external_llm",
    "keeper": "cleanup_process",
    "ticker": "tick_clock",
    "trainer_end": "trainer_endpoint",
    "scheduler_count": "scheduler_stats",
    "asked_server": "http_engine",
    "fleet_figures": "fleet_stats",
    "spelt": "spelled_tokens",
    "unspoken": "message_turns",
    "let_speak": "check_may_take_turn",
    "go_on_with": "restore_choices",
}
"""Names that were replaced, and the name that is used now."""

OLD_MODULES: Final = {
    "words": "protocol",
    "asking": "broadcast",
    "elsewhere": "placeholder_engines",
    "hosting": "engine_host",
    "hosted": "engine_client",
    "catch": "fleet_snapshot",
    "answering": "request_handler",
    "forest": "turn_tree",
    "histories": "history_tree",
    "reading": "client_messages",
    "threads": "thread_names",
    "stage": "run_setup",
    "started": "active_run",
    "process": "event_loop",
    "figures": "live_stats",
    "ending": "shutdown_logging",
    "waiting": "spin_wait_patch",
    "marks": "cut_points",
    "watching": "end_detector",
    "carrying": "roundtrip",
    "foreign": "external_reader",
    "learnt": "format_cache",
    "traits": "limitations",
    "pieces": "token_bytes",
    "closes": "turn_closers",
    "contents": "content_spans",
    "shape": "turn_shape",
    "leftovers": "leak_checks",
    "slowing": "delayed_tools",
    "at_once": "gather",
}
"""The same for modules whose old names are words that other names may contain."""

ALLOWED_NAMES: Final = {
    "runner/concurrency/threads.py": "worker threads; the old module was about threads of a conversation",
    "runner/parsing/limitations.py: CONTENT_BEHIND": "named like its value, which is in run files",
    "runner/testing/cancellation_points.py: says": "the replies of a model, which speaks",
    "runner/sandbox/leftovers.py": "containers of processes that were killed",
    "runner/tokens/probing/traits.py": "properties of a template; the old module was about limitations of a format",
}
"""Places that may have an old or unclear name, each with the reason."""


def unclear_names(tree: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of each old or unclear name of a module: of its own, and of those that it binds."""
    module = Path(name).stem
    if name not in ALLOWED_NAMES and (better := OLD_MODULES.get(module) or better_name(module)):
        yield name, f"{module} ({better})"
    for identifier, line in bound_names(tree):
        if (better := better_name(identifier)) and f"{name}: {identifier}" not in ALLOWED_NAMES:
            yield f"{name}:{line}", f"{identifier} ({better})"


def better_name(identifier: str) -> str:
    """Return what to write instead of an old or unclear name; "" if it is neither."""
    if better := OLD_NAMES.get(identifier.lstrip("_")):
        return better
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", identifier).lower()
    return "send, notify, after, ..." if UNCLEAR_IN_IDENTIFIERS.search(f"_{words}_") else ""


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Names of definitions, parameters, variables and attributes where they are bound, with their lines."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
