"""Connections to a run file, and what is said when one cannot be had."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from runner.errors import NewerRunFile, RunFileError, StorageFailed
from runner.store.schema import APPLICATION_ID, FORMAT

__all__ = [
    "FileLock",
    "check_format",
    "connect_writer",
    "make_folder",
    "open_reader",
    "storage_failed",
    "storage_faults",
    "tables_in",
    "transaction",
    "write_ahead",
]

_GO_ON = "what was announced is in the file"

# By the beginning of SQLite's name for the error, the more precise ones first.
_CAUSES: Final = (
    (
        "SQLITE_FULL",
        f"the disk is full; {_GO_ON}. Free some space and give the same command again: it goes on from there",
    ),
    (
        "SQLITE_IOERR",
        f"the disk refused ({{error}}); {_GO_ON}. Check its space, quota and health, and give the same command again",
    ),
    ("SQLITE_READONLY", "it is read-only. Make the file and its folder writable, or give another path (--file)"),
    (
        "SQLITE_CANTOPEN",
        "it cannot be opened. Check that its folder is there and writable, or give another path (--file)",
    ),
    ("SQLITE_CORRUPT", "it is damaged ({error}). Keep a copy, and save what is readable with `sqlite3 FILE .recover`"),
    (
        "SQLITE_BUSY",
        "another program holds it locked. End that program (an open SQL shell?) and give the same command again",
    ),
)


def storage_failed(path: Path, error: Exception) -> StorageFailed:
    """What to tell people about an error of the database at `path`."""
    name = getattr(error, "sqlite_errorname", "")
    for prefix, cause in _CAUSES:
        if name.startswith(prefix):
            return StorageFailed(f"run file {path}: {cause.format(error=f'{error}, {name}')}.")
    return StorageFailed(f"run file {path}: {type(error).__name__}: {error} ({name or 'no code'}); {_GO_ON}.")


@contextmanager
def storage_faults(path: Path) -> Iterator[None]:
    """Errors of the database inside the block are raised as `StorageFailed`; `RunFileError` where it is no database."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise RunFileError(
                f"run file {path}: it is no run file (not a SQLite database). Give another path (--file)."
            ) from error
        raise storage_failed(path, error) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of the block or nothing of it."""
    # The write lock is taken here, where SQLite waits for it; a transaction that begins by reading could be refused
    # it at once, in the middle.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # a full disk has rolled it back already
            connection.execute("ROLLBACK")
        raise


def make_folder(path: Path) -> None:
    """Make the folder that `path` is to stand in."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(
            f"run file {path}: its folder cannot be made ({error.strerror}: {error.filename}). "
            f"Give a path in a folder that you can write to (--file)."
        ) from error
    if path.is_dir():
        raise StorageFailed(f"run file {path}: this is a folder. Give the path of a file (--file).")


def connect_writer(path: Path) -> sqlite3.Connection:
    """A connection that may write and has not done so; it waits ten seconds for others' locks."""
    # Opened in a worker thread and used in the writer's own; transactions are begun by hand (`transaction`).
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)


def write_ahead(connection: sqlite3.Connection, *, durable: bool) -> None:
    """Have commits go to a log (WAL), so that readers and the writer are never in each other's way."""
    connection.execute("PRAGMA journal_mode = WAL")
    # NORMAL hands a commit to the operating system, which outlives this process; FULL waits until the disk has it.
    connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    # The log goes into the file after so many pages, four times SQLite's own number: each time it waits for the disk.
    connection.execute("PRAGMA wal_autocheckpoint = 4000")


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that cannot write, also to a file that grows or stands on a read-only disk.

    Raises:
        RunFileError: there is no such file, or no run in it.
    """
    if not path.is_file():
        raise RunFileError(f"there is no run file {path}. Run files are in runs/ unless --file named another path.")
    with storage_faults(path):
        try:
            connection = _connect_reader(path, "mode=ro")
        except sqlite3.OperationalError:
            # On a read-only disk nothing can be shared with a writer, and nothing needs to be; but what is in the log
            # alone would be missed.
            log = path.with_name(f"{path.name}-wal")
            if (log.is_file() and log.stat().st_size > 0) or os.access(path.parent, os.W_OK):
                raise
            connection = _connect_reader(path, "mode=ro&immutable=1")
    connection.row_factory = sqlite3.Row
    return connection


def _connect_reader(path: Path, mode: str) -> sqlite3.Connection:
    uri = f"file:{quote(os.path.abspath(path))}?{mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        check_format(connection, path)
        if not tables_in(connection):
            raise RunFileError(f"run file {path}: it is empty; its run ended before it began.")
    except BaseException:
        connection.close()
        raise
    return connection


def tables_in(connection: sqlite3.Connection) -> bool:
    """Whether the database holds any table."""
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse what is no run file of this format; a database that is still empty passes.

    Raises:
        RunFileError: a database, but no run file, or one of an older format.
        NewerRunFile: its format is newer than this version's.
    """
    if not tables_in(connection):
        return
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise RunFileError(
            f"run file {path}: this is a SQLite database, but no run file of deltarunner. Give another path (--file)."
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > FORMAT:
        raise NewerRunFile(
            f"run file {path}: its format is {version}, and this deltarunner reads format {FORMAT}. "
            f"Upgrade it (pip install -U deltarunner), or give another path (--file)."
        )
    if version < FORMAT:
        raise RunFileError(
            f"run file {path}: its format is {version}, and this deltarunner reads format {FORMAT} alone. "
            f"Nothing converts it: play the run anew, to another path (--file)."
        )


class FileLock:
    """Keeps every other process, and every other run of this one, from writing the same run file.

    It is SQLite's own lock on an empty database beside the file: the kernel lets go of it when the process dies, in
    whatever way, and processes forked from it do not inherit it. The file's own lock is taken and left with every
    transaction, so it would let two runs write by turns.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def acquire(self) -> None:
        """Take it, or raise `StorageFailed` where somebody else has it."""
        side = self._path.with_name(f".{self._path.name}.lock")
        try:
            self._connection = sqlite3.connect(side, isolation_level=None, check_same_thread=False, timeout=0)
            self._connection.execute("PRAGMA journal_mode = MEMORY")  # no journal of the lock stands beside it
            self._connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            self.release()
            if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                raise StorageFailed(
                    f"run file {self._path}: it is being written by {_last_writer(self._path)}. "
                    f"Wait for it to end, or give another path (--file)."
                ) from None
            raise storage_failed(self._path, error) from error

    def held(self) -> bool:
        """Whether somebody has it now."""
        try:
            self.acquire()
        except StorageFailed:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Let go of it, if it is held by this object."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _last_writer(path: Path) -> str:
    try:
        with closing(open_reader(path)) as connection:
            row = connection.execute("SELECT process, host FROM launches ORDER BY number DESC LIMIT 1").fetchone()
    except (RunFileError, sqlite3.Error):
        return "another run"
    return f"process {row['process']} on {row['host']}" if row else "another run"
