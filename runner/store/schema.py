"""The tables of a run file. docs/run-file.md explains them to people who read one from SQL."""

from __future__ import annotations

from typing import Final

__all__ = ["APPLICATION_ID", "FORMAT", "TABLES"]

FORMAT: Final = 3
"""The version of the tables, kept in `PRAGMA user_version`. A file of any other version is refused by its number."""

APPLICATION_ID: Final = 0x64656C74
"""In `PRAGMA application_id` ("delt"): tells a run file from any other SQLite database."""

TABLES: Final = """
CREATE TABLE run (
    one         INTEGER PRIMARY KEY CHECK (one = 1),
    header      TEXT NOT NULL,              -- JSON: the configuration, as the run was begun
    created     REAL NOT NULL,              -- seconds since 1970, as all points in time here
    complete    INTEGER NOT NULL DEFAULT 0, -- 1: every task of the run was played
    summary     TEXT                        -- JSON; NULL until the run ended
);

CREATE TABLE launches (                     -- one row each time a process opened the file to write
    number      INTEGER PRIMARY KEY,
    started     REAL NOT NULL,
    process     INTEGER NOT NULL,
    host        TEXT NOT NULL,
    header      TEXT NOT NULL               -- JSON: as it was for this launch (versions, sizes)
);

CREATE TABLE tasks (
    id           TEXT NOT NULL,
    visit        INTEGER NOT NULL,
    class        TEXT NOT NULL,             -- module:Class of the task
    task         TEXT NOT NULL,             -- JSON: its fields
    group_scored INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (id, visit)
);

CREATE TABLE episodes (                     -- one row per trajectory: what one agent saw and did in one episode
    key           INTEGER PRIMARY KEY,      -- counts up in the order of commits
    id            TEXT NOT NULL,            -- the episode's, shared by its agents and attempts
    task_id       TEXT NOT NULL,
    visit         INTEGER NOT NULL,
    group_index   INTEGER NOT NULL,
    agent         TEXT NOT NULL,
    attempt       INTEGER NOT NULL,
    trained       INTEGER NOT NULL,
    superseded    INTEGER NOT NULL,         -- 1: an attempt that was, or is to be, played again
    outcome       TEXT NOT NULL,
    limit_name    TEXT NOT NULL,
    limit_agent   TEXT NOT NULL,
    reason        TEXT NOT NULL,
    error         TEXT NOT NULL,
    reward        REAL,                     -- NULL where it was not scored; never 0 for a failure
    rewards       TEXT NOT NULL,            -- JSON: each by name, before weighting
    metrics       TEXT NOT NULL,            -- JSON
    turns         INTEGER NOT NULL,
    segments      INTEGER NOT NULL,
    tokens        INTEGER NOT NULL,         -- ids in all segments
    sampled       INTEGER NOT NULL,         -- of those, sampled by the model
    prompted      INTEGER NOT NULL,         -- prompt ids over all turns: what the engine was given to read
    cached        INTEGER,                  -- of those, in the engine's prefix cache; NULL where it never says
    seed          INTEGER NOT NULL,
    seconds       REAL NOT NULL,
    waited        REAL NOT NULL,
    committed     REAL NOT NULL,
    launch        INTEGER NOT NULL
);
CREATE UNIQUE INDEX episodes_by_task ON episodes (task_id, visit, group_index, agent, attempt);
CREATE INDEX episodes_by_id ON episodes (id);
CREATE INDEX episodes_current ON episodes (superseded, trained);

CREATE TABLE segments (
    episode     INTEGER NOT NULL,           -- episodes.key
    number      INTEGER NOT NULL,
    cause       TEXT NOT NULL,
    unseen      INTEGER NOT NULL,
    messages    TEXT NOT NULL,              -- JSON
    ids         BLOB NOT NULL,              -- int32, little-endian, one per id
    logprobs    BLOB,                       -- float32, little-endian, one per *sampled* id; NULL where there are none
    sources     TEXT NOT NULL,              -- JSON: [[source, length], ...]; numbers of `Source`
    versions    TEXT NOT NULL,              -- JSON: [[weight version, start, end], ...]
    tools       INTEGER,                    -- tools.key: what could be called; NULL where there was nothing
    PRIMARY KEY (episode, number)
);

CREATE TABLE turns (
    episode     INTEGER NOT NULL,           -- episodes.key
    position    INTEGER NOT NULL,           -- counts from 0 in its trajectory
    number      INTEGER NOT NULL,
    segment     INTEGER NOT NULL,
    start       INTEGER NOT NULL,           -- the first sampled id, as an index into the segment's ids
    "end"       INTEGER NOT NULL,           -- one past the last
    finish      TEXT NOT NULL,
    stop,                                   -- INTEGER: the stop id; TEXT: the stop string or cause; or NULL
    text        TEXT NOT NULL,
    reasoning   TEXT NOT NULL,
    tool_calls  TEXT NOT NULL,              -- JSON: [{"id", "name", "arguments", "error"}, ...]
    seed        INTEGER,
    constrained INTEGER,                    -- constraints.key: what could be sampled
    sampled     INTEGER,                    -- samplings.key: temperature and so on; NULL where the turn does not say
    cached      INTEGER,
    dropped     INTEGER NOT NULL,
    resampled   INTEGER NOT NULL,           -- ids of tries that the engine cut for its trainer
    thinking    INTEGER NOT NULL,           -- 1: it was cut inside its reasoning
    tool_choice TEXT NOT NULL,
    reward      REAL NOT NULL,
    queued      REAL NOT NULL,              -- seconds, as the next three
    first_token REAL NOT NULL,
    decode      REAL NOT NULL,
    environment REAL NOT NULL,
    junction_result   TEXT,                 -- all NULL for the first turn of a segment
    junction_anchor   TEXT,
    junction_close    TEXT,
    junction_seam     TEXT,
    junction_inserted INTEGER,
    junction_dropped  INTEGER,
    junction_cause    TEXT,
    PRIMARY KEY (episode, position)
);

CREATE TABLE constraints (                  -- a grammar is the same for thousands of turns
    key         INTEGER PRIMARY KEY,        -- a hash of the rest
    kind        TEXT NOT NULL,
    value       TEXT NOT NULL
);

CREATE TABLE samplings (                    -- as the turn asked for it; the same for thousands of turns
    key         INTEGER PRIMARY KEY,        -- a hash of the rest
    sampling    TEXT NOT NULL               -- JSON: the fields of `Sampling`; constraints are in `constraints`
);

CREATE TABLE tools (                        -- as the prompts were rendered with; the same for thousands of segments
    key         INTEGER PRIMARY KEY,        -- a hash of the rest
    tools       TEXT NOT NULL               -- JSON: in OpenAI's form, in order
);

CREATE VIEW trajectories AS                 -- what one trains on: the last attempts of trained agents
    SELECT * FROM episodes WHERE trained AND NOT superseded;
"""
