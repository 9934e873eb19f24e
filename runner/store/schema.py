"""The tables of a run file, from which its SQL, its rows, its reader and its documentation are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from runner.attachments import AttachmentKind
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
    "ATTACHMENT",
    "ATTACHMENTS",
    "CONSTRAINTS",
    "EPISODES",
    "FORMAT_VERSION",
    "JUNCTION",
    "REQUEST",
    "REQUESTS",
    "SAMPLINGS",
    "SEGMENT",
    "SEGMENTS",
    "SIDE_DATA",
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

FORMAT_VERSION: Final = 7
"""The version of the tables, in `PRAGMA user_version`. Files of other versions are refused."""

APPLICATION_ID: Final = 0x64656C74
"""The `PRAGMA application_id` ("delt") that identifies run files among SQLite databases."""


def _stop(value: Any) -> Any:
    return encode_text(value) if isinstance(value, str) else value


def _read_stop(stored: Any) -> Any:
    return stored if stored is None or isinstance(stored, int) else decode_text(stored)


def _encode_calls(calls: Sequence[ToolCall]) -> str:
    return encode_json(
        [
            {"id": call.id, "name": call.name, "arguments": call.arguments, "error": call.error}
            | ({"failed": True} if call.failed else {})
            for call in calls
        ]
    )


def _ids(segments: Sequence[Segment]) -> int:
    return sum(len(segment.log) for segment in segments)


def _prompted(turns: Sequence[Turn]) -> int:
    return sum(turn.start for turn in turns)


def _cached(turns: Sequence[Turn]) -> int | None:
    cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
    return sum(cached) if cached else None


# --- one trajectory: one agent in one episode

# Columns with an Arrow type are in Parquet exports, in this order.
TRAJECTORY: Final = (
    field("id", "TEXT NOT NULL", "the episode's id, shared by its agents and attempts", TEXT, arrow="string"),
    derived("task_id", "TEXT NOT NULL", "the task", "task.id", TEXT, arrow="string"),
    field("visit", "INTEGER NOT NULL", "the number of the task's visit, from 0", arrow="int32"),
    field("group_index", "INTEGER NOT NULL", "the index in the task's group, from 0", attribute="index", arrow="int32"),
    field("agent", "TEXT NOT NULL", "the agent", TEXT, arrow="string"),
    field("attempt", "INTEGER NOT NULL", "the number of the attempt at the episode, from 0", arrow="int32"),
    field("trained", "INTEGER NOT NULL", "1: its sampled ids are meant to be trained on", FLAG),
    field("outcome", "TEXT NOT NULL", "the episode's result, such as `completed`", member_of(Outcome), arrow="string"),
    field("limit_name", "TEXT NOT NULL", "the limit that fired, or empty", attribute="limit", arrow="string"),
    field("limit_agent", "TEXT NOT NULL", "the agent whose limit it was, or empty", TEXT),
    field("reason", "TEXT NOT NULL", "the argument of `Episode.end(reason)`, or empty", TEXT, arrow="string"),
    field("error", "TEXT NOT NULL", "the error, or empty", TEXT, arrow="string"),
    field("reward", "REAL", "NULL if the episode failed or was not scored", arrow="float64"),
    field("rewards", "TEXT NOT NULL", "JSON: each reward by name, before weighting", JSON, arrow="string"),
    field("metrics", "TEXT NOT NULL", "JSON: each metric by name", JSON, arrow="string"),
    field("seed", "INTEGER NOT NULL", "the seed of the episode's sampling", arrow="int64"),
    derived("turns", "INTEGER NOT NULL", "the number of its turns", "turns", Form(len), arrow="int32"),
    derived("segments", "INTEGER NOT NULL", "the number of its segments", "segments", Form(len)),
    derived("tokens", "INTEGER NOT NULL", "the number of ids in all segments", "segments", Form(_ids)),
    derived("sampled", "INTEGER NOT NULL", "the number of `tokens` that the model sampled", "sampled", arrow="int64"),
    derived("prompted", "INTEGER NOT NULL", "the number of ids in the prompts of all turns", "turns", Form(_prompted)),
    derived(
        "cached",
        "INTEGER",
        "the number of `prompted` ids in the engine's prefix cache; NULL if the engine never reported it",
        "turns",
        Form(_cached),
    ),
    field("seconds", "REAL NOT NULL", "the duration of the episode", arrow="float64"),
    field("waited", "REAL NOT NULL", "the part of `seconds` in which it waited for a place in the engine"),
    field("thread", "TEXT NOT NULL", "the name from which its seeds are derived; empty for the agent's name", TEXT),
)

EPISODES: Final = Table(
    "episodes",
    "a trajectory: one agent in one episode",
    (
        Column("key", "INTEGER PRIMARY KEY", "counts up in the order of commits"),
        *TRAJECTORY,
        Column("superseded", "INTEGER NOT NULL", "1: an attempt that was repeated, or will be", FLAG),
        Column("committed", "REAL NOT NULL", "the time of the commit"),
        Column("launch", "INTEGER NOT NULL", "`launches.number` of the process that wrote it"),
    ),
)

# --- segments

SEGMENT: Final = (
    field("cause", "TEXT NOT NULL", "why the segment began"),
    field("unseen", "INTEGER NOT NULL", "the number of messages at the end that were in no prompt"),
    field("messages", "TEXT NOT NULL", "JSON: the messages that its ids represent", JSON),
    field("shared", "INTEGER NOT NULL", "how many `ids` at the beginning were copied from the origin"),
    derived("ids", "BLOB NOT NULL", "int32, little-endian, 4 bytes an id", "log.ids", Form(pack)),
    derived(
        "logprobs",
        "BLOB",
        "float32, little-endian, one per *sampled* id (2 or 3) in order; NULL if the engine returned none",
        "log",
        Form(packed_logprobs),
    ),
    derived(
        "sources",
        "TEXT NOT NULL",
        "JSON runs `[[source, length], ...]`: 0 first prompt, 1 bridge, 2 sampled, 3 sampled in a turn that was taken "
        "back. The loss mask is 1 for source 2",
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
    "a token log and the messages that it represents",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("number", "INTEGER NOT NULL", "counts from 0 in its trajectory"),
        *SEGMENT,
        Column("origin_agent", "TEXT", "the agent of the turn that it follows; NULL if it follows none"),
        Column("origin_turn", "INTEGER", "`turns.number` of that turn"),
        Column(
            "tools",
            "INTEGER",
            "`tools.key`: the tools in its prompts; NULL without tools",
        ),
    ),
    key="PRIMARY KEY (episode, number)",
)

# --- turns

TURN: Final = (
    field("number", "INTEGER NOT NULL", "counts the turns of this agent from 0"),
    field("segment", "INTEGER NOT NULL", "`segments.number`"),
    field("start", "INTEGER NOT NULL", "the first sampled id, as an index into the segment's `ids`"),
    field("end", "INTEGER NOT NULL", "the index after the last sampled id"),
    field(
        "finish",
        "TEXT NOT NULL",
        "`stop`, `length`, `context`, `abort`, `repetition`, `error` or `content_filter`",
        member_of(FinishReason),
    ),
    field("stop", "", "its cause: an integer is a stop id; text is a stop string or a cause", Form(_stop, _read_stop)),
    field("text", "TEXT NOT NULL", "the text without reasoning and tool calls", TEXT),
    field("reasoning", "TEXT NOT NULL", "the reasoning, or empty", TEXT),
    field(
        "tool_calls",
        "TEXT NOT NULL",
        'JSON: `[{"id", "name", "arguments", "error"}, ...]`, with `"failed": true` if its tool failed',
        Form(_encode_calls, lambda stored: [ToolCall(**call) for call in decode_json(stored)]),
    ),
    field("seed", "INTEGER", "the seed of its random numbers; NULL if it had none"),
    field("cached", "INTEGER", "the number of prompt ids in the engine's prefix cache", attribute="cached_tokens"),
    field("dropped", "INTEGER NOT NULL", "the number of ids sampled after a stop string, which are not in the segment"),
    field(
        "resampled",
        "INTEGER NOT NULL",
        "the number of ids of the earlier tries of the turn that the engine cut for its trainer",
    ),
    field("thinking", "INTEGER NOT NULL", "1: the turn was cut inside its reasoning", FLAG),
    field("tool_choice", "TEXT NOT NULL", "`auto`, `required`, `none`, or the required tool"),
    field("reward", "REAL NOT NULL", "the reward that the author set for this turn"),
    field("handle", "TEXT NOT NULL", "its name for a client of `Episode.chat`, or empty"),
    field("left_out", "INTEGER NOT NULL", "1: its conversation continued elsewhere, and it is not trained on", FLAG),
)

TIMINGS: Final = (
    field("queued", "REAL NOT NULL", "seconds until it had a place in the engine"),
    field("first_token", "REAL NOT NULL", "seconds from then to the first id"),
    field("decode", "REAL NOT NULL", "seconds from the first id to the last"),
    field("environment", "REAL NOT NULL", "seconds of the tools or the step that answered it"),
)


JUNCTION: Final = (
    field("junction_result", "TEXT", "the change of the history", member_of(Result), attribute="result"),
    field(
        "junction_anchor",
        "TEXT",
        "the place in the template's tail after which the bridge begins",
        member_of(Anchor),
        attribute="anchor",
    ),
    field(
        "junction_close",
        "TEXT",
        "the origin of the closing tokens of the turn before",
        member_of(Close),
        attribute="close",
    ),
    field("junction_seam", "TEXT", "the proof of the seam", member_of(Seam), attribute="seam"),
    field("junction_inserted", "INTEGER", "the number of inserted ids", attribute="inserted"),
    field("junction_dropped", "INTEGER", "the number of sampled ids that are not in this prompt", attribute="dropped"),
    field("junction_cause", "TEXT", "the cause if the prompt was not simply appended to, or empty", attribute="cause"),
)
"""The columns for the junction of a turn's prompt with the turn before; all are NULL for a first prompt."""

USAGE: Final = (
    field("usage_model", "TEXT", "the server's name of the model version", TEXT, attribute="model"),
    field("usage_fingerprint", "TEXT", "the server's fingerprint of its configuration", TEXT, attribute="fingerprint"),
    field("usage_prompt", "INTEGER", "tokens of the prompt, by the server's count", attribute="prompt_tokens"),
    field("usage_completion", "INTEGER", "the number of sampled tokens", attribute="completion_tokens"),
    field("usage_cached", "INTEGER", "the number of cached prompt tokens", attribute="cached_tokens"),
    field("usage_reasoning", "INTEGER", "tokens of the reasoning, shown or not", attribute="reasoning_tokens"),
    field("usage_cost", "REAL", "the price that the server charges", attribute="cost"),
)
"""The columns for the usage that a message server reports for a turn; all are NULL for turns with token ids."""

TURNS: Final = Table(
    "turns",
    "a generation by the model: its prompt is `ids[:start]` of its segment, and its sampled ids are `ids[start:end]`",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("position", "INTEGER NOT NULL", "counts from 0 in its trajectory"),
        Column("constrained", "INTEGER", "`constraints.key`: the grammar of the turn; NULL without a constraint"),
        Column("sampled", "INTEGER", "`samplings.key`: temperature and so on; NULL if no run sampled it"),
        *TURN,
        *TIMINGS,
        *JUNCTION,
        *USAGE,
    ),
    key="PRIMARY KEY (episode, position)",
)

TOP_LOGPROBS: Final = Table(
    "top_logprobs",
    "the most likely ids at the position of each sampled id of a turn, if `Sampling(logprobs=)` requested them",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("position", "INTEGER NOT NULL", "`turns.position`"),
        Column("count", "INTEGER NOT NULL", "the number of ids at each position"),
        Column("ids", "BLOB NOT NULL", "int32, little-endian, `count` ids for each sampled id, the most likely first"),
        Column(
            "logprobs",
            "BLOB NOT NULL",
            "float32, little-endian, one for each of `ids`; -inf if the id could not be sampled",
        ),
    ),
    key="PRIMARY KEY (episode, position)",
)

SIDE_DATA: Final = Table(
    "side_data",
    "the ids that could be sampled in a turn, and the experts that computed it, if the engine returned them",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("position", "INTEGER NOT NULL", "`turns.position`"),
        Column("mask_counts", "BLOB", "int32, little-endian: the number of ids that could be sampled in each place"),
        Column("mask_ids", "BLOB", "int32, little-endian: these ids, one place after the other; NULL without masks"),
        Column("first", "INTEGER", "the index in `segments.ids` of the first id with experts; NULL without experts"),
        Column("layers", "INTEGER", "the number of layers with experts"),
        Column("top", "INTEGER", "the number of experts of each id in a layer"),
        Column("experts", "BLOB", "int16, little-endian: `layers` times `top` numbers of experts for each id"),
    ),
    key="PRIMARY KEY (episode, position)",
)

# --- requests

REQUEST: Final = (
    field("number", "INTEGER NOT NULL", "counts the requests of its episode from 0"),
    field("label", "TEXT NOT NULL", "the client's own name of the requester, or empty", TEXT),
    field("form", "TEXT NOT NULL", "the API form of the request"),
    field("client", "TEXT NOT NULL", "the name of the client program, or empty", TEXT),
    field("purpose", "TEXT NOT NULL", "the purpose that the client states, or empty", TEXT),
    field("verdict", "TEXT NOT NULL", "the relation of its history to the existing turns", member_of(Verdict)),
    field("again", "TEXT NOT NULL", "the treatment of a repeated prompt, or empty", member_of(Again)),
    field("turn", "INTEGER", "`turns.number` of the turn that answered it; NULL without an answer"),
    field("parent_agent", "TEXT NOT NULL", "the agent of the turn that it continues, or empty", TEXT),
    field("parent_turn", "INTEGER", "`turns.number` of that turn"),
    field(
        "tolerated",
        "TEXT NOT NULL",
        "JSON: the names of tolerated differences",
        Form(
            lambda names: encode_json([name.value for name in names]),
            lambda stored: tuple(map(Tolerated, decode_json(stored))),
        ),
    ),
    field("volatile", "INTEGER NOT NULL", "the number of lines removed from system messages"),
    field(
        "not_granted",
        "TEXT NOT NULL",
        "JSON: options that were requested and not applied, such as sampling, tools, and unknown fields",
        Form(lambda given: encode_json(dict(given)), decode_json),
    ),
    field("messages", "INTEGER NOT NULL", "the number of its messages"),
    field("size", "INTEGER NOT NULL", "the size of its messages as JSON, in bytes"),
    field("align_seconds", "REAL NOT NULL", "the seconds until its history was matched"),
    field("seconds", "REAL NOT NULL", "the seconds from its arrival to its answer"),
    field("delivery", "TEXT NOT NULL", "the delivery state of its answer", member_of(Delivery)),
    field("error", "TEXT NOT NULL", "the error of a request without answer, or empty", TEXT),
)

REQUESTS: Final = Table(
    "requests",
    "a request of `Episode.chat`, with the match of its history",
    (Column("episode", "INTEGER NOT NULL", "`episodes.key`"), *REQUEST),
    key="PRIMARY KEY (episode, number)",
)

# --- attachments

ATTACHMENT: Final = (
    field("name", "TEXT NOT NULL", "its name for readers", TEXT),
    field("kind", "TEXT NOT NULL", "`text`, `json`, `image` or `file`", member_of(AttachmentKind)),
    field("media_type", "TEXT NOT NULL", "the type of the data, such as `image/png`"),
    field("turn", "INTEGER NOT NULL", "the number of turns of `main` before it"),
    field("data", "BLOB NOT NULL", "the content; text and JSON in UTF-8"),
)

ATTACHMENTS: Final = Table(
    "attachments",
    "an artefact that the author attached with `Episode.attach`",
    (
        Column("episode", "INTEGER NOT NULL", "`episodes.key`"),
        Column("number", "INTEGER NOT NULL", "counts from 0 in its episode"),
        *ATTACHMENT,
    ),
    key="PRIMARY KEY (episode, number)",
)

# --- shared rows, and tables of the whole run


def _key(meaning: str = "a hash of the rest") -> Column:
    return Column("key", "INTEGER PRIMARY KEY", meaning)


TASKS: Final = Table(
    "tasks",
    "one visit of a task",
    (
        Column("id", "TEXT NOT NULL", "the task's id"),
        Column("visit", "INTEGER NOT NULL", "the number of the visit, from 0"),
        Column("class", "TEXT NOT NULL", "`module:Class` of the task"),
        Column("task", "TEXT NOT NULL", "JSON: its fields"),
        Column("group_scored", "INTEGER NOT NULL", "1: the rewards of its group are stored"),
    ),
    key="PRIMARY KEY (id, visit)",
    shared=True,
)
CONSTRAINTS: Final = Table(
    "constraints",
    "a grammar, stored once for all turns that it constrained",
    (
        _key(),
        Column("kind", "TEXT NOT NULL", "`json`, `regex`, `grammar`, `choice` or `structural_tag`"),
        Column("value", "TEXT NOT NULL", "the grammar"),
    ),
    shared=True,
)
SAMPLINGS: Final = Table(
    "samplings",
    "sampling options, stored once for all turns that share them",
    (_key(), Column("sampling", "TEXT NOT NULL", "JSON: the fields of `Sampling` without constraints")),
    shared=True,
)
TOOLS: Final = Table(
    "tools",
    "tools, stored once for all segments that share them",
    (_key(), Column("tools", "TEXT NOT NULL", "JSON: their schemas in OpenAI's form and order")),
    shared=True,
)
RUN: Final = Table(
    "run",
    "the run; there is one",
    (
        Column("one", "INTEGER PRIMARY KEY CHECK (one = 1)", "1"),
        Column("header", "TEXT NOT NULL", "JSON: the configuration at the beginning of the run"),
        Column("created", "REAL NOT NULL", "the time of its beginning"),
        Column("complete", "INTEGER NOT NULL DEFAULT 0", "1: every task of the run was played"),
        Column("summary", "TEXT", "JSON: the report of the last launch at its end; NULL if rows were added since"),
    ),
)
LAUNCHES: Final = Table(
    "launches",
    "one opening of the file by a process that writes",
    (
        Column("number", "INTEGER PRIMARY KEY", "counts from 1"),
        Column("started", "REAL NOT NULL", "the time of the launch"),
        Column("process", "INTEGER NOT NULL", "the id of the process"),
        Column("host", "TEXT NOT NULL", "the machine"),
        Column("header", "TEXT NOT NULL", "JSON: the configuration at the launch (versions, sizes)"),
    ),
)
WEIGHTS: Final = Table(
    "weights",
    "a weight update of an engine while the run played",
    (
        Column("launch", "INTEGER NOT NULL", "the launch of the update"),
        Column("engine", "INTEGER NOT NULL", "the index of the engine in the run, 0 for the run's own"),
        Column("version", "TEXT NOT NULL", "the version of the weights"),
        Column("time", "REAL NOT NULL", "the time of the update"),
        Column("proof_ids", "INTEGER", "the number of ids of the proof; NULL without a proof"),
        Column("proof_median", "REAL", "the median difference between the engine's and the trainer's scores, in nats"),
        Column("proof_largest", "REAL", "the largest difference, in nats"),
        Column("proof_arrived", "REAL", "the share of the trainer's change that the engine shows; NULL if unknown"),
    ),
)

TABLES: Final = (
    RUN,
    LAUNCHES,
    TASKS,
    EPISODES,
    SEGMENTS,
    TURNS,
    TOP_LOGPROBS,
    SIDE_DATA,
    REQUESTS,
    ATTACHMENTS,
    CONSTRAINTS,
    SAMPLINGS,
    TOOLS,
    WEIGHTS,
)
"""Every table of a run file."""


def schema_statements() -> list[str]:
    """The statements that make an empty database a run file."""
    return [
        *(table.create() for table in TABLES),
        "CREATE UNIQUE INDEX episodes_by_task ON episodes (task_id, visit, group_index, agent, attempt)",
        "CREATE INDEX episodes_by_id ON episodes (id)",
        "CREATE INDEX episodes_current ON episodes (superseded, trained)",
        "CREATE VIEW trajectories AS -- the trajectories to train on: the last attempts of trained agents\n"
        "    SELECT * FROM episodes WHERE trained AND NOT superseded",
        f"PRAGMA application_id = {APPLICATION_ID}",
        f"PRAGMA user_version = {FORMAT_VERSION}",
    ]
