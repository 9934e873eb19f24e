"""The logger `deltarunner`, with a child for each package; silent until a program or `--log-level` turns it on.

Only warnings that a result may be wrong are printed on stderr before that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from runner.errors import BadOption

__all__ = ["LEVELS", "check_level", "log_to_file", "logger_for", "warn_always"]

LEVELS: Final = ("debug", "info", "warning", "error")
"""The names of the levels that `--log-level` takes, the most verbose first."""

_ROOT: Final = logging.getLogger("deltarunner")
_ROOT.addHandler(logging.NullHandler())  # without a handler, Python would print warnings on stderr

_FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s"
_TIME_FORMAT: Final = "%Y-%m-%d %H:%M:%S"


def logger_for(package: str) -> logging.Logger:
    """The logger of a package, such as `deltarunner.runs` for "runs"."""
    logger = _ROOT.getChild(package)
    logger.addFilter(_escape_surrogates)  # a filter that is there already is not added again
    return logger


def warn_always(logger: logging.Logger, message: str, *args: object) -> None:
    """Log a warning, and print it on stderr if the program has set up no logging."""
    logger.warning(message, *args)
    if not _has_handler(logger) and logging.lastResort is not None:
        text = f"deltarunner: {message}"
        logging.lastResort.handle(logger.makeRecord(logger.name, logging.WARNING, "", 0, text, args, None))


def _has_handler(logger: logging.Logger | None) -> bool:
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _escape_surrogates(record: logging.LogRecord) -> bool:
    """Escape unpaired surrogates, which tasks and models may contain and most handlers cannot write."""
    text = record.getMessage()
    if not text.isascii():
        record.msg, record.args = text.encode("utf-8", "backslashreplace").decode(), ()
    return True


def check_level(level: str | None) -> None:
    """Check the value of the option `--log-level`.

    Raises:
        BadOption: the level is unknown.
    """
    if level is not None and level not in LEVELS:
        raise BadOption(f"--log-level {level}: give {', '.join(LEVELS[:-1])} or {LEVELS[-1]}.")


@contextmanager
def log_to_file(path: Path, level: str | None, *, secrets: Collection[str] = ()) -> Iterator[None]:
    """Append records to a file while the block lasts.

    Args:
        path: the log file; its folder is created.
        level: the least severe level that is written, one of `LEVELS`; None writes nothing.
        secrets: texts that are written as ***.

    Raises:
        BadOption: the level is unknown.
    """
    check_level(level)
    if level is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace", delay=True)
    handler.setFormatter(_SecretFormatter(secrets))
    previous = _ROOT.level
    _ROOT.addHandler(handler)
    _ROOT.setLevel(level.upper())
    try:
        yield
    finally:
        _ROOT.setLevel(previous)
        _ROOT.removeHandler(handler)
        handler.close()


class _SecretFormatter(logging.Formatter):
    def __init__(self, secrets: Collection[str]) -> None:
        super().__init__(_FORMAT, _TIME_FORMAT)
        self._secrets = [secret for secret in secrets if secret]

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
