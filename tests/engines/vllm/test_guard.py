"""A script that starts the engine while it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from envs.calculator import Calculator
from runner import VllmEngine, run

run(Calculator(questions=2), VllmEngine("smollm2-135m"))
"""


@pytest.mark.whole
@pytest.mark.engine
@pytest.mark.apart
@pytest.mark.usefixtures("demo_model_folder")
def test_script_without_a_main_guard_is_asked_to_add_one(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()
    assert any("BadModel" in line and "put its code under `if __name__ == '__main__':`" in line for line in last)
