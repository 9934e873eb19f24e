"""The tables of a run file, column by column; its SQL, its rows, what is read back and the docs follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from runner.chat_requests import Again, Delivery, Tolerated, Verdict
from runner.engines.base import FinishReason
from runner.messages import ToolCall
from runner.store.columns import (
    FLAG,
    JSON,
    TEXT,
    Column,
    Form,
    Table,
    decode_text,
    derived,
    encode_text,
    field,
    member_of,
)
from runner.store.json_values import decode_json, encode_json
from runner.store.packing import pack, packed_logprobs, source_spans
from runner.tokens.junction import Anchor, Close, Result, Seam
from runner.trajectory import Outcome, Segment, Turn

__all__ = [
    "APPLICATION_ID",
    "CONSTRAINTS",
    "EPISODES",
    "FORMAT",
    "JUNCTION",
    "REQUEST",
    "REQUESTS",
    "SAMPLINGS",
    "SEGMENT",
    "SEGMENTS",
    "TABLES",
    "TASKS",
    "TIMINGS",
    "TOOLS",
    "TOP_LOGPROBS",
    "TRAJECTORY",
    "TURN",
    "TURNS",
    "USAGE",
    "schema_statements",
]

FORMAT: Final = 5
"""The version of the tables, kept in `PRAGMA user_version`. A file of any other version is refused by its number."""

APPLICATION_ID: Final = 0x64656C74
"""In `PRAGMA application_id` ("delt"): tells a run file from any other SQLite database."""


def _stop(value: Any) -> Any:
    return encode_text(value) if isinstance(value, str) else value


def _read_stop(stored: Any) -> Any:
    return stored if stored is None or isinstance(stored, int) else decode_text(stored)


def _ids(segments: Sequence[Segment]) -> int:
    return sum(len(segment.log) for segment in segments)


def _prompted(turns: Sequence[Turn]) -> int:
    return sum(turn.start for turn in turns)


def _cached(turns: Sequence[Turn]) -> int | None:
    cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
    return sum(cached) if cached else None


# --- one trajectory: what one agent saw and did in one episode

# What a Parquet export has of it has an Arrow type. Its columns come in this order.
TRAJECTORY: Final = (
    field("id", "TEXT NOT NULL", "the episode's id, shared by its agents and attempts", TEXT, arrow="string"),
    derived("task_id", "TEXT NOT NULL", "the task", "task.id", TEXT, arrow="string"),
    field("visit", "INTEGER NOT NULL", "which visit of the task, from 0", arrow="int32"),
    field("group_index", "INTEGER NOT NULL", "which of the task's group, from 0", attribute="index", arrow="int32"),
    field("agent", "TEXT NOT NULL", "who saw and did it", TEXT, arrow="string"),
    field("attempt", "INTEGER NOT NULL", "which attempt at the episode, from 0", arrow="int32"),
    field("trained", "INTEGER NOT NULL", "1: its sampled ids are meant to be trained on", FLAG),
    field("outcome", "TEXT NOT NULL", "how the episode ended", member_of(Outcome), arrow="string"),
    field("limit_name", "TEXT NOT NULL", "the limit that fired, or empty", attribute="limit", arrow="string"),
    field("limit_agent", "TEXT NOT NULL", "the agent whose limit it was, or empty", TEXT),
    field("reason", "TEXT NOT NULL", "what `Episode.end(reason)` was given, or empty", TEXT, arrow="string"),
    field("error", "TEXT NOT NULL", "what went wrong, or empty", TEXT, arrow="string"),
    field("reward", "REAL", "NULL where it was not scored; never 0 for a failure", arrow="float64"),
    field("rewards", "TEXT NOT NULL", "JSON: each reward by name, before weighting", JSON, arrow="string"),
    field("metrics", "TEXT NOT NULL", "JSON: each metric by name", JSON, arrow="string"),
    field("seed", "INTEGER NOT NULL", "the seed of the episode's sampling", arrow="int64"),
    derived("turns", "INTEGER NOT NULL", "how many turns it has", "turns", Form(len), arrow="int32"),
    derived("segments", "INTEGER NOT NULL", "how many segments it has", "segments", Form(len)),
    derived("tokens", "INTEGER NOT NULL", "ids in all segments", "segments", Form(_ids)),
    derived("sampled", "INTEGER NOT NULL", "how many of `tokens` the model sampled", "sampled", arrow="int64"),
    derived("prompted", "INTEGER NOT NULL", "ids in the prompts of all turns", "turns", Form(_prompted)),
    derived(
        "cached",
        "INTEGER",
        "how many of `prompted` the engine's prefix cache held; NULL where it never said",
        "turns",
        Form(_cached),
    ),
    field("seconds", "REAL NOT NULL", "how long the episode was alive", arrow="float64"),
    field("waited", "REAL NOT NULL", "how many of those seconds it waited for a place in the engine"),
    field("thread", "TEXT NOT NULL", "the name that its seeds follow from, or empty where that is its agent's", TEXT),
)

EPISODES: Final = Table(
    "episodes",
    "a trajectory: what one agent saw and did in one episode",
    (
        Column("key", "INTEGER PRIMARY KEY", "counts up in the order of commits"),
        *TRAJECTORY,
        Column("superseded", "INTEGER NOT NULL", "1: an attempt that was, or is to be, played again", FLAG),
        Column("committed", "REAL NOT NULL", "when it was committed"),
        Column("launch", "INTEGER NOT NULL", "`launches.number` of the process that wrote it"),
    ),
)

# --- its segments

SEGMENT: Final = (
    field("cause", "TEXT NOT NULL", "why it was begun"),
    field("unseen", "INTEGER NOT NULL", "how many of the last messages the model never saw"),
    field("messages", "TEXT NOT NULL", "JSON: the view of it", JSON),
    field("shared", "INTEGER NOT NULL", "how many of its first `ids` are a copy of those that its origin has"),
    derived("ids", "BLOB NOT NULL", "int32, little-endian, 4 bytes an id", "log.ids", Form(pack)),
    derived(
        "logprobs",
        "BLOB",
        "float32, little-endian, one per *sampled* id (2 or 3) in order; NULL where the engine gave none",
        "log",
        Form(packed_logprobs),
    ),
    derived(
        "sources",
        "TEXT NOT NULL",
        "JSON runs `[[source, length], ...]`: 0 first prompt, 1 bridge, 2 sampled, 3 sampled in a turn that was taken "
        "back. The loss mask is 1 where it is 2",
        "log.sources",
        Form(lambda sources: encode_json(list(source_spans(sources)))),
    ),
    derived(
        "versions",
        "TEXT NOT NULL",
        "JSON `[[weight version, start, end], ...]`, indices into `ids`",
        "log.versions",
        Form(lambda versions: encode_json([(span.version, span.start, span.end) for span in versions])),
    ),
)

SEGMENTS: Final = Table(
    "segments",
    "a token log and the messages that are its view",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("number", "INTEGER NOT NULL", "counts from 0 in its trajectory"),
        *SEGMENT,
        Column("origin_agent", "TEXT", "the agent of the turn that it follows; NULL where it follows none"),
        Column("origin_turn", "INTEGER", "`turns.number` of that turn"),
        Column(
            "tools",
            "INTEGER",
            "`tools.key`: what its prompts were rendered with; NULL where nothing could be called",
        ),
    ),
    key="PRIMARY KEY (episode, number)",
)

# --- its turns

TURN: Final = (
    field("number", "INTEGER NOT NULL", "counts the turns of this agent from 0"),
    field("segment", "INTEGER NOT NULL", "`segments.number`"),
    field("start", "INTEGER NOT NULL", "the first sampled id, as an index into the segment's `ids`"),
    field("end", "INTEGER NOT NULL", "one past the last"),
    field(
        "finish",
        "TEXT NOT NULL",
        "`stop`, `length`, `context`, `abort`, `repetition`, `error` or `content_filter`",
        member_of(FinishReason),
    ),
    field(
        "stop", "", "what caused it: an integer is the stop id, text the stop string or cause", Form(_stop, _read_stop)
    ),
    field("text", "TEXT NOT NULL", "what was said beside reasoning and tool calls", TEXT),
    field("reasoning", "TEXT NOT NULL", "what was thought, or empty", TEXT),
    field(
        "tool_calls",
        "TEXT NOT NULL",
        'JSON: `[{"id", "name", "arguments", "error"}, ...]`',
        Form(encode_json, lambda stored: [ToolCall(**call) for call in decode_json(stored)]),
    ),
    field("seed", "INTEGER", "the seed of its random numbers; NULL where it had none"),
    field("cached", "INTEGER", "ids of its prompt that the engine's prefix cache held", attribute="cached_tokens"),
    field("dropped", "INTEGER NOT NULL", "ids that were sampled past a stop string and are not in the segment"),
    field(
        "resampled",
        "INTEGER NOT NULL",
        "ids of tries that the engine cut for its trainer: the turn is the last try",
    ),
    field("thinking", "INTEGER NOT NULL", "1: it was cut inside its reasoning", FLAG),
    field("tool_choice", "TEXT NOT NULL", "`auto`, `required`, `none`, or the tool that it had to call"),
    field("reward", "REAL NOT NULL", "the credit that the author gave to this turn"),
    field("handle", "TEXT NOT NULL", "what names it to a client that asked for it with `Episode.chat`, or empty"),
    field("left_out", "INTEGER NOT NULL", "1: its conversation went on elsewhere, and it is not trained on", FLAG),
)

TIMINGS: Final = (
    field("queued", "REAL NOT NULL", "seconds until it had a place in the engine"),
    field("first_token", "REAL NOT NULL", "seconds from there to the first id"),
    field("decode", "REAL NOT NULL", "seconds from the first id to the last"),
    field("environment", "REAL NOT NULL", "seconds of the tools or the step that answered it"),
)


JUNCTION: Final = (
    field("junction_result", "TEXT", "what became of the history", member_of(Result), attribute="result"),
    field("junction_anchor", "TEXT", "what the bridge was attached after", member_of(Anchor), attribute="anchor"),
    field(
        "junction_close",
        "TEXT",
        "where the closing tokens of the turn before came from",
        member_of(Close),
        attribute="close",
    ),
    field("junction_seam", "TEXT", "how the seam was proven", member_of(Seam), attribute="seam"),
    field("junction_inserted", "INTEGER", "ids that were put in between", attribute="inserted"),
    field("junction_dropped", "INTEGER", "sampled ids that are not in this prompt", attribute="dropped"),
    field("junction_cause", "TEXT", "why the prompt was not simply appended to, or empty", attribute="cause"),
)
"""How a turn's prompt was made from the turn before; all are NULL for a prompt that was made from nothing."""

USAGE: Final = (
    field(
        "usage_model", "TEXT", "the version of the model that answered, as its server calls it", TEXT, attribute="model"
    ),
    field("usage_fingerprint", "TEXT", "the server's word for its configuration", TEXT, attribute="fingerprint"),
    field("usage_prompt", "INTEGER", "tokens of the prompt, by the server's count", attribute="prompt_tokens"),
    field("usage_completion", "INTEGER", "tokens that were sampled", attribute="completion_tokens"),
    field("usage_cached", "INTEGER", "tokens of the prompt that were cached", attribute="cached_tokens"),
    field("usage_reasoning", "INTEGER", "tokens of the reasoning, shown or not", attribute="reasoning_tokens"),
    field("usage_cost", "REAL", "what the server charges for it", attribute="cost"),
)
"""What a server of messages says that a turn took, NULL where it does not; all are NULL where ids were sampled."""

TURNS: Final = Table(
    "turns",
    "a generation by the model: it saw `ids[:start]` of its segment and sampled `ids[start:end]`",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("position", "INTEGER NOT NULL", "counts from 0 in its trajectory"),
        Column("constrained", "INTEGER", "`constraints.key`: what could be sampled; NULL where anything could"),
        Column("sampled", "INTEGER", "`samplings.key`: temperature and so on; NULL where no run sampled it"),
        *TURN,
        *TIMINGS,
        *JUNCTION,
        *USAGE,
    ),
    key="PRIMARY KEY (episode, position)",
)

TOP_LOGPROBS: Final = Table(
    "top_logprobs",
    "the likeliest ids in the place of each id that a turn sampled, where `Sampling(logprobs=)` asked for them",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("position", "INTEGER NOT NULL", "`turns.position`"),
        Column("count", "INTEGER NOT NULL", "how many of each position"),
        Column("ids", "BLOB NOT NULL", "int32, little-endian, `count` of each sampled id, the likeliest first"),
        Column("logprobs", "BLOB NOT NULL", "float32, little-endian, one of each of `ids`; -inf: not to be sampled"),
    ),
    key="PRIMARY KEY (episode, position)",
)

# --- its requests

REQUEST: Final = (
    field("number", "INTEGER NOT NULL", "counts the requests of its episode from 0"),
    field("label", "TEXT NOT NULL", "the client's own name for who asked, or empty", TEXT),
    field("form", "TEXT NOT NULL", "the form in which it came"),
    field("client", "TEXT NOT NULL", "what the client's program calls itself, or empty", TEXT),
    field("purpose", "TEXT NOT NULL", "what the client says that it asks for, in its own word, or empty", TEXT),
    field("verdict", "TEXT NOT NULL", "what its history was to the turns that there were", member_of(Verdict)),
    field("again", "TEXT NOT NULL", "what was done where its prompt had been asked before, or empty", member_of(Again)),
    field("turn", "INTEGER", "`turns.number` of the turn that answered it; NULL where nothing did"),
    field("parent_agent", "TEXT NOT NULL", "the agent of the turn that it goes on from, or empty", TEXT),
    field("parent_turn", "INTEGER", "`turns.number` of that turn"),
    field(
        "tolerated",
        "TEXT NOT NULL",
        "JSON: the names of the differences that changed nothing",
        Form(
            lambda names: encode_json([name.value for name in names]),
            lambda stored: tuple(map(Tolerated, decode_json(stored))),
        ),
    ),
    field("volatile", "INTEGER NOT NULL", "how many lines were taken out of system messages"),
    field(
        "not_granted",
        "TEXT NOT NULL",
        "JSON: the sampling that it asked for and did not get",
        Form(lambda given: encode_json(dict(given)), decode_json),
    ),
    field("messages", "INTEGER NOT NULL", "how many messages it had"),
    field("size", "INTEGER NOT NULL", "how many bytes these have as JSON"),
    field("align_seconds", "REAL NOT NULL", "how long it took to find where it stands"),
    field("seconds", "REAL NOT NULL", "how long it took from its arrival until its answer was given"),
    field("delivery", "TEXT NOT NULL", "how far its answer came", member_of(Delivery)),
    field("error", "TEXT NOT NULL", "why there is no answer, or empty", TEXT),
)

REQUESTS: Final = Table(
    "requests",
    "a request of `Episode.chat`: what its history was found to be",
    (Column("episode", "INTEGER NOT NULL", "`episodes.key`"), *REQUEST),
    key="PRIMARY KEY (episode, number)",
)

# --- what rows refer to, and what stands for the whole run


def _key(meaning: str = "a hash of the rest") -> Column:
    return Column("key", "INTEGER PRIMARY KEY", meaning)


TASKS: Final = Table(
    "tasks",
    "one visit of a task",
    (
        Column("id", "TEXT NOT NULL", "the task's id"),
        Column("visit", "INTEGER NOT NULL", "which visit of it, from 0"),
        Column("class", "TEXT NOT NULL", "`module:Class` of the task"),
        Column("task", "TEXT NOT NULL", "JSON: its fields"),
        Column("group_scored", "INTEGER NOT NULL", "1: the rewards of its group are stored"),
    ),
    key="PRIMARY KEY (id, visit)",
    shared=True,
)
CONSTRAINTS: Final = Table(
    "constraints",
    "a grammar, kept once for the thousands of turns that it constrained",
    (
        _key(),
        Column("kind", "TEXT NOT NULL", "`json`, `regex`, `grammar`, `choice` or `structural_tag`"),
        Column("value", "TEXT NOT NULL", "the grammar"),
    ),
    shared=True,
)
SAMPLINGS: Final = Table(
    "samplings",
    "how turns were sampled, kept once for all that were sampled alike",
    (_key(), Column("sampling", "TEXT NOT NULL", "JSON: the fields of `Sampling` beside constraints")),
    shared=True,
)
TOOLS: Final = Table(
    "tools",
    "the tools that could be called, kept once for all segments that had the same",
    (_key(), Column("tools", "TEXT NOT NULL", "JSON: their schemas in OpenAI's form and order")),
    shared=True,
)
RUN: Final = Table(
    "run",
    "the run; there is one",
    (
        Column("one", "INTEGER PRIMARY KEY CHECK (one = 1)", "1"),
        Column("header", "TEXT NOT NULL", "JSON: the configuration, as the run was begun"),
        Column("created", "REAL NOT NULL", "when it was begun"),
        Column("complete", "INTEGER NOT NULL DEFAULT 0", "1: every task of the run was played"),
        Column("summary", "TEXT", "JSON; NULL until the run ended"),
    ),
)
LAUNCHES: Final = Table(
    "launches",
    "one time that a process opened the file to write",
    (
        Column("number", "INTEGER PRIMARY KEY", "counts from 1"),
        Column("started", "REAL NOT NULL", "when it was"),
        Column("process", "INTEGER NOT NULL", "the id of the process"),
        Column("host", "TEXT NOT NULL", "the machine"),
        Column("header", "TEXT NOT NULL", "JSON: the configuration as it was then (versions, sizes)"),
    ),
)

TABLES: Final = (RUN, LAUNCHES, TASKS, EPISODES, SEGMENTS, TURNS, TOP_LOGPROBS, REQUESTS, CONSTRAINTS, SAMPLINGS, TOOLS)
"""Every table of a run file."""


def schema_statements() -> list[str]:
    """What makes an empty database a run file."""
    return [
        *(table.create() for table in TABLES),
        "CREATE UNIQUE INDEX episodes_by_task ON episodes (task_id, visit, group_index, agent, attempt)",
        "CREATE INDEX episodes_by_id ON episodes (id)",
        "CREATE INDEX episodes_current ON episodes (superseded, trained)",
        "CREATE VIEW trajectories AS -- what one trains on: the last attempts of trained agents\n"
        "    SELECT * FROM episodes WHERE trained AND NOT superseded",
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {FORMAT}",
    ]
