"""The displays of a notebook in a real Jupyter kernel, as the notebook's page shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.browser import browser, needs_browser

# warnings of these packages
pytestmark = [pytest.mark.package("nbconvert"), pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PLAY = """
from runner import Environment, Run, RunFile, Task, reward, run
from runner.testing import ScriptedEngine

class Greeting(Environment):
    def tasks(self):
        return [Task(id="<b>hi</b>", prompt="<script>document.title = 'attacked'</script>")]

    @reward
    def polite(self):
        return 1.0

async with Run(Greeting(), ScriptedEngine("yes"), group_size=2, file="run.db") as played:
    groups = [group async for group in played.groups()]
groups[0]
"""
CELLS = (
    PLAY,
    "played.summary",
    "run_file = RunFile('run.db')\nnext(run_file.trajectories())",
    "run_file.frame('tokens').to_pandas()[['token_id', 'mask']]",
    "import polars\npolars.from_arrow(run_file.frame())[['id', 'reward', 'rewards.polite']]",
    "run(Greeting(), ScriptedEngine('yes'))",
)


def executed(folder: Path, form: str) -> str:
    """Return the notebook after a kernel has run its cells, as a notebook or a page."""
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    (folder / "given.ipynb").write_text(nbformat.writes(notebook))
    # In another process, since Jupyter's client leaves sockets and an event loop open.
    options = ["--execute", "--allow-errors", "--to", form, "--output", "made", "given.ipynb"]
    subprocess.run([sys.executable, "-m", "nbconvert", *options], cwd=folder, check=True, timeout=300)
    return (folder / f"made.{'ipynb' if form == 'notebook' else form}").read_text()


@needs_browser
@pytest.mark.anyio
async def test_notebook_shows_runs_and_runs_nothing(tmp_path: Path) -> None:
    notebook = json.loads(executed(tmp_path, "notebook"))
    shown = [cell["outputs"][-1] for cell in notebook["cells"]]
    assert ["text/html" in each.get("data", ()) for each in shown] == [True, True, True, True, True, False]
    assert "2 episodes" in "".join(shown[1]["data"]["text/html"])
    assert "token_id" in "".join(shown[3]["data"]["text/plain"])
    assert "shape: (2, 3)" in "".join(shown[4]["data"]["text/plain"])
    assert (shown[5]["ename"], "async with Run(" in shown[5]["evalue"]) == ("BadOption", True)
    executed(tmp_path, "html")
    async with browser(tmp_path / "profile") as tab:
        await tab.open(tmp_path / "made.html")
        body = await tab.value("document.body.innerText")
        for words in ("<b>hi</b>", "polite", "<script>document.title = 'attacked'</script>", "segment 0"):
            assert words in body
        assert await tab.value("document.title") != "attacked"
