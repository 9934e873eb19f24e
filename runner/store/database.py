"""Connections to a run file, its lock, and the errors of the database."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote

from runner.errors import NewerRunFile, RunFileError, StorageFailed
from runner.store.schema import APPLICATION_ID, FORMAT_VERSION

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

_SAFE = "episodes reported as finished are in the file"
_RETRY = "Run the same command again to resume, or give another path (--file)."

# Each pair is a prefix of SQLite's error names, and the text of the message. The first prefix that matches applies.
_CAUSES: Final = (
    (
        "SQLITE_FULL",
        f"the disk is full; {_SAFE}. Free some space and run the same command again to resume",
    ),
    (
        "SQLITE_IOERR",
        f"the disk reported an error ({{error}}); {_SAFE}. Check its space, quota and health, and run the same "
        "command again",
    ),
    ("SQLITE_READONLY", "it is read-only. Make the file and its folder writable, or give another path (--file)"),
    (
        "SQLITE_CANTOPEN",
        "it cannot be opened. Check that its folder exists and is writable, or give another path (--file)",
    ),
    ("SQLITE_CORRUPT", "it is damaged ({error}). Keep a copy, and save what is readable with `sqlite3 FILE .recover`"),
    (
        "SQLITE_BUSY",
        "another program holds it locked. End that program (an open SQL shell?) and run the same command again",
    ),
)


def storage_failed(path: Path, error: Exception) -> StorageFailed:
    """The error to raise for a database error of the file `path`."""
    name = getattr(error, "sqlite_errorname", "")
    for prefix, cause in _CAUSES:
        if name.startswith(prefix):
            return StorageFailed(f"run file {path}: {cause.format(error=f'{error}, {name}')}.")
    return StorageFailed(f"run file {path}: {type(error).__name__}: {error} ({name or 'no code'}); {_SAFE}. {_RETRY}")


@contextmanager
def storage_faults(path: Path) -> Iterator[None]:
    """Raise database errors of the block as `StorageFailed`, or `RunFileError` if the file is not a database."""
    try:
        yield
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorname", "") == "SQLITE_NOTADB":
            raise RunFileError(
                f"run file {path}: it is not a run file (not a SQLite database). Give another path (--file)."
            ) from error
        raise storage_failed(path, error) from error


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Commit all statements of the block, or none of them if the block raises."""
    # IMMEDIATE takes the write lock now, and waits for it. A transaction that begins with a read could fail to get the
    # lock later.
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # if the disk is full, SQLite has already rolled back
            connection.execute("ROLLBACK")
        raise


def make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailed(
            f"run file {path}: its folder cannot be created ({error.strerror}: {error.filename}). "
            f"Give a path in a folder that you can write to (--file)."
        ) from error
    if path.is_dir():
        raise StorageFailed(f"run file {path}: it is a folder. Give the path of a file (--file).")


def connect_writer(path: Path) -> sqlite3.Connection:
    """A writable connection, which waits up to ten seconds for locks."""
    # The connection is opened in a worker thread and used in the writer's thread; `transaction` begins transactions.
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)


def write_ahead(connection: sqlite3.Connection) -> None:
    """Turn on the write-ahead log (WAL), so that readers and the writer never block each other."""
    connection.execute("PRAGMA journal_mode = WAL")
    # A commit survives a crash of the process, and does not wait for the disk.
    connection.execute("PRAGMA synchronous = NORMAL")
    # This is four times SQLite's default, because each checkpoint waits for the disk.
    connection.execute("PRAGMA wal_autocheckpoint = 4000")


def open_reader(path: Path) -> sqlite3.Connection:
    """A read-only connection to a run file. A run may still write the file, or its disk may be read-only.

    Raises:
        RunFileError: the file does not exist, is not a run file, holds no run, or has an older format.
        NewerRunFile: the format is newer than this version's.
        StorageFailed: the file cannot be read.
    """
    if not path.is_file():
        state = "is a folder: give a file in it" if path.is_dir() else "does not exist"
        raise RunFileError(f"the run file {path} {state}. Run files are in runs/ unless --file named another path.")
    with storage_faults(path):
        try:
            connection = _connect_reader(path, "mode=ro")
        except sqlite3.OperationalError:
            # A file on a read-only disk has no writer, so it is read as immutable. But this would miss rows in a log.
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
            raise RunFileError(
                f"run file {path}: it is empty. Its run ended during the start: play the run again. Or the file was "
                f"copied while the run played: copy {path.name}-wal too."
            )
    except BaseException:
        connection.close()
        raise
    return connection


def tables_in(connection: sqlite3.Connection) -> bool:
    return connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is not None


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Refuse a database that is not a run file of this format; an empty one passes.

    Raises:
        RunFileError: the database is not a run file, or has an older format.
        NewerRunFile: the format is newer than this version's.
    """
    if not tables_in(connection):
        return
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise RunFileError(
            f"run file {path}: it is a SQLite database, but not a run file of deltarunner. Give another path (--file)."
        )
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > FORMAT_VERSION:
        raise NewerRunFile(
            f"run file {path}: its format is {version}, and this deltarunner reads format {FORMAT_VERSION}. "
            f"Upgrade it (pip install -U deltarunner), or give another path (--file)."
        )
    if version < FORMAT_VERSION:
        raise RunFileError(
            f"run file {path}: its format is {version}, and this deltarunner reads only format {FORMAT_VERSION}. "
            f"It cannot be converted: play the run again, with another path (--file)."
        )


class FileLock:
    """A lock that keeps other processes and other runs from writing the same run file.

    It is SQLite's lock on an empty database next to the file. The kernel releases the lock when the process ends, and
    forked processes do not inherit it. SQLite's lock on the run file itself is not enough: it is held only during
    transactions, so two runs could write in turn.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            StorageFailed: another run holds the lock, or the lock's file cannot be written.
        """
        side = self._path.with_name(f".{self._path.name}.lock")
        try:
            self._connection = sqlite3.connect(side, isolation_level=None, check_same_thread=False, timeout=0)
            self._connection.execute("PRAGMA journal_mode = MEMORY")  # the lock must not create a journal file
            self._connection.execute("BEGIN EXCLUSIVE")
        except sqlite3.Error as error:
            self.release()
            if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                raise StorageFailed(
                    f"run file {self._path}: it is being written by {_last_writer(self._path)}. "
                    f"Wait for it to end, or give another path (--file)."
                ) from None
            raise storage_failed(self._path, error) from error

    def is_held(self) -> bool:
        try:
            self.acquire()
        except StorageFailed:
            return True
        self.release()
        return False

    def release(self) -> None:
        """Release the lock if this object holds it."""
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
