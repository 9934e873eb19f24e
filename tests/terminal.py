"""A program in a terminal of its own, in which Ctrl-C reaches the whole process group."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

CTRL_C = b"\x03"


class Terminal:
    """A command in a pseudo-terminal. It leads a session, so that the terminal is its controlling terminal."""

    def __init__(self, command: Sequence[str], *, folder: Path, columns: int = 100, rows: int = 30) -> None:
        self._master, self._slave = pty.openpty()
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        name = os.ttyname(self._slave)
        # A session leader that opens a terminal gets it as its controlling terminal.
        script = f"exec {shlex.join(command)} <{name} >{name} 2>&1"
        # pytest-xdist sets a fixed size in its processes, and a program would use it as the size of its window.
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment["TERM"] = "xterm-256color"
        self.process = subprocess.Popen(["sh", "-c", script], cwd=folder, env=environment, start_new_session=True)
        self.text = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self._slave)
        os.close(self._master)

    def read_until(self, text: str, *, seconds: float) -> None:
        """Read the output until it contains `text`."""
        end = time.monotonic() + seconds
        start = len(self.text)
        while text not in self.text[max(0, start - len(text)) :]:
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{text!r} was not printed within {seconds:g} s, but: {self.text[-3000:]}")

    def read_until_like(self, pattern: str, *, seconds: float) -> None:
        """Read the output until it matches `pattern`."""
        end = time.monotonic() + seconds
        start = len(self.text)
        while not re.search(pattern, self.text[start:]):
            if not self._read(end - time.monotonic()):
                raise AssertionError(f"{pattern!r} was not printed within {seconds:g} s, but: {self.text[-3000:]}")

    def resize(self, *, columns: int, rows: int) -> None:
        """Resize the window; the program receives SIGWINCH."""
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self, *, seconds: float) -> int:
        """Wait for the end of the program, and return its exit code."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > end:
                raise AssertionError(f"the process did not end within {seconds:g} s: {self.text[-3000:]}")
            self._read(0.1)
        while self._read(0.1):
            pass
        return self.process.returncode

    def _read(self, seconds: float) -> bool:
        readable, _, _ = select.select([self._master], [], [], max(0.0, seconds))
        if not readable:
            return False
        self.text += os.read(self._master, 1 << 16).decode(errors="replace")
        return True
