"""Changed weights of a model, for tests of updates."""

import shutil
from pathlib import Path

__all__ = ["changed_weights"]


def changed_weights(folder: Path, source: Path, *, layer: int = 2, factor: float = 3.0) -> Path:
    """Copy the model in `source` to `folder`, with one layer changed; names and shapes are the same.

    The change also affects later layers, so that cached keys and values of the first weights lead to other results.
    """
    from safetensors.torch import load_file, save_file

    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, folder / path.name)
    for path in source.glob("*.safetensors"):
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if name.endswith(f"layers.{layer}.mlp.down_proj.weight"):
                tensor *= factor
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
    return folder
