"""A model like the demo model, but faster, for tests of the engine in which the text does not matter."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

__all__ = ["small_model"]


def small_model(folder: Path, demo: Path, *, layers: int = 6) -> Path:
    """Create in `folder` the lowest layers of the demo model, with its vocabulary and settings."""
    from safetensors.torch import load_file, save_file

    for path in demo.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}))
    tensors = load_file(demo / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if _layer(name) < layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _layer(name: str) -> int:
    numbered = re.match(r"model\.layers\.(\d+)\.", name)
    return int(numbered[1]) if numbered else 0
