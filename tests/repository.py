"""Paths of the repository and its pages, for tests that read or run them."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
