"""`deltarunner view`: serve the pages of run files on loopback."""

from __future__ import annotations

import os
from pathlib import Path

from rich.text import Text

from runner.cli.report import make_console
from runner.report.prices import read_prices
from runner.report.viewer import Viewer

__all__ = ["view_command"]

NICE_COUNT = 10
"""Steps of priority (nice) below a run on the same machine."""


def view_command(path: Path, *, port: int, prices: Path | None) -> int:
    """Print the address, and serve the pages until Ctrl-C; return the exit code."""
    viewer = Viewer(path, port=port, prices=None if prices is None else read_prices(prices))
    os.nice(NICE_COUNT)
    console = make_console()
    console.print(Text(viewer.address), soft_wrap=True)
    console.print(
        Text("The key in the address opens it, read-only, on this machine. Ctrl-C ends the viewer."), style="dim"
    )
    console.file.flush()
    try:
        viewer.serve()
    except KeyboardInterrupt:
        return 0
    return 0
