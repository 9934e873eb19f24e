"""Weights that a trainer sends to a whole fleet at once: connections, order of the phases, and refusals."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from runner import BadWeights, LocalTransfer, Run, WeightTransfer
from runner.cluster.transfers import _on_a_free_port
from runner.engines.vllm.worker.file_transfer import FileTransferInfo
from runner.engines.weights import Checkpoint, read_folder
from tests.cluster.in_process import InProcess, InProcessWorker
from tests.cluster.playing import Dice, compared, dice_engine, fleet, game_tasks, played
from tests.cluster.rehearsed_trainer import Info, Parts, part
from tests.cluster.sending import KINDS, by_virtual_time, either, elsewhere, here, inits, members, of_version, sizes
from tests.cluster.test_control import asked_of, state_of, versions
from tests.engines.small_weights import Source
from tests.playing import until

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.sample_functions(2)]

TRANSFER_CALLS = ("check_weights", "meet", "hold", "receive_weights", "release")


def asked_times(worker: InProcessWorker, call: str, times: int) -> bool:
    return len(asked_of(worker, call)) == times


# --- connections


async def test_ranks_of_workers_follow_one_another() -> None:
    async with fleet(3) as (engine, launcher):
        sizes(launcher, 2, 4, 1)
        async with engine:
            assert len(await engine.devices()) == 7
            await engine.update_weights(elsewhere(8))
            assert [(init["rank_offset"], init["world_size"]) for init in inits(launcher)] == [(1, 8), (3, 8), (7, 8)]
            assert {init["master_address"] for init in inits(launcher)} == {"10.0.0.1"}
            assert of_version(launcher) == ["1", "1", "1"]


async def test_trainer_here_receives_the_world_size_of_all_workers() -> None:
    source = Parts()
    async with fleet(2) as (engine, launcher):
        sizes(launcher, 2, 3)
        async with engine:
            await engine.update_weights(here(source))
            assert source.met == [6]
            assert [init["rank_offset"] for init in inits(launcher)] == [1, 3]


@pytest.mark.parametrize("kind", [KINDS["without ranks"], KINDS["here without ranks"]], ids=["elsewhere", "here"])
async def test_transfer_without_ranks_reaches_all_workers_unchanged(kind: Callable[[], Any]) -> None:
    async with fleet(2) as (engine, launcher), engine:
        await engine.update_weights(kind())
        assert inits(launcher) == [{"packed": False}] * 2


async def test_world_of_another_size_is_refused_with_both_numbers() -> None:
    async with fleet(2) as (engine, launcher):
        sizes(launcher, 2, 2)
        async with engine:
            with pytest.raises(BadWeights, match=r"world_size=3, and there are 5 ranks.*len\(await engines.devices"):
                await engine.update_weights(elsewhere(3))
            with pytest.raises(BadWeights, match="rank_offset='1' is not a whole number"):
                await engine.update_weights(WeightTransfer(part("a"), init={"rank_offset": "1"}))
            assert [asked_of(worker, *TRANSFER_CALLS) for worker in launcher.alive] == [[], []]
            assert engine.weight_version == "scripted"


async def test_workers_connect_again_only_for_another_address_or_source() -> None:
    async with fleet(2) as (engine, launcher), engine:
        for given, meetings in (
            (elsewhere(), 1),
            (elsewhere(), 1),
            (WeightTransfer(part("a")), 1),
            (elsewhere(address="10.0.0.2"), 2),
        ):
            await engine.update_weights(given)
            assert [len(asked_of(worker, "meet")) for worker in launcher.alive] == [meetings] * 2
        source, other = Parts(), Parts()
        for transfer, met in ((here(source), 1), (here(source), 1), (here(other), 1), (here(source), 2)):
            await engine.update_weights(transfer)
            assert len(transfer.source.met) == met
        assert of_version(launcher) == ["8", "8"]


def test_trainer_here_takes_another_port_if_its_own_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        info = NCCLTrainerInitInfo("127.0.0.1", port, 2, rank=0)
        other = _on_a_free_port(info)
        assert other.master_port != port
        assert (other.master_address, other.world_size, other.rank) == ("127.0.0.1", 2, 0)
    assert _on_a_free_port(info) == info
    assert _on_a_free_port(Info()) == Info()


def small_trainer(kind: str, launcher: InProcess, folder: Path, **fields: Any) -> Any:
    """A model of transformers. Its checkpoint is also the checkpoint of every worker's engine."""
    sizes = {"vocab_size": 96, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    known = Checkpoint("the model", read_folder(folder).forms, tied=config.tie_word_embeddings), config

    async def checkpoint() -> Any:
        return known

    launcher.on_start = lambda worker: setattr(worker.worker, "checkpoint", checkpoint)
    return model


async def test_transfer_from_here_has_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    """Transformers 5 fuses experts, but vLLM loads single experts."""
    async with fleet(2) as (engine, launcher):
        model = small_trainer("Qwen3Moe", launcher, tmp_path / "start", head_dim=8, num_experts=2)
        wanted = read_folder(tmp_path / "start").forms.keys()
        async with engine:
            assert not {name for name, _ in model.named_parameters()} <= wanted
            info = FileTransferInfo(str(tmp_path), rank=0)
            await engine.update_weights(LocalTransfer(info, ModuleSource(model)))
            assert load_file(tmp_path / "sent.safetensors").keys() == wanted
            assert of_version(launcher) == ["1", "1"]


async def test_untied_output_layer_is_refused_before_any_worker_compares(tmp_path: Path) -> None:
    async with fleet(2) as (engine, launcher):
        model = small_trainer("Llama", launcher, tmp_path / "start", tie_word_embeddings=True)
        equal = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        async with engine:
            info = FileTransferInfo(str(tmp_path), rank=0)
            untied = {**equal, "lm_head.weight": equal["lm_head.weight"] + 1}
            with pytest.raises(BadWeights, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
                await engine.update_weights(LocalTransfer(info, Source(untied)))
            assert [asked_of(worker, *TRANSFER_CALLS) for worker in launcher.alive] == [[], []]
            await engine.update_weights(LocalTransfer(info, Source(equal)))
            assert of_version(launcher) == ["1", "1"]


async def test_weights_without_a_connection_are_refused_before_any_call() -> None:
    async with fleet(2) as (engine, launcher), engine:
        with pytest.raises(BadWeights, match="the engines are not connected to this trainer"):
            await engine.update_weights(WeightTransfer(part("a")))
        await engine.update_weights(here())
        with pytest.raises(BadWeights, match="the engines are not connected to this trainer"):
            await engine.update_weights(WeightTransfer(part("a")))
        assert [len(asked_of(worker, "check_weights")) for worker in launcher.alive] == [1, 1]


@pytest.mark.sample_cases(2)
@either
def test_worker_without_a_connection_is_named_before_any_call(kind: Callable[[], Any]) -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            await engine.update_weights(kind())
            launcher.workers[1].kill()
            await until(lambda: members(engine) == {0, 2})
            asked = len(launcher.workers[0].calls)
            if isinstance(kind(), WeightTransfer):
                with pytest.raises(BadWeights, match=r"worker 2 on \S+ is not connected.*Connect again, with init="):
                    await engine.update_weights(WeightTransfer(part("a")))
                assert not asked_of(launcher.workers[2], "check_weights")
                assert [call for call, _ in launcher.workers[0].calls[asked:] if call != "heartbeat"] == []
            await engine.update_weights(kind())
            assert of_version(launcher) == ["2", "2"]

    by_virtual_time(run)


# --- order of the phases


@pytest.mark.sample_cases(2)
@either
async def test_all_connect_before_any_pauses_and_pause_before_any_receives(
    kind: Callable[[], Any],
) -> None:
    async with fleet(2) as (engine, launcher), engine:
        first, last = launcher.workers[0], launcher.workers[1]
        held = last.held_in = {name: anyio.Event() for name in ("check_weights", "meet", "hold", "take_step")}
        async with anyio.create_task_group() as group:
            group.start_soon(engine.update_weights, kind())
            for at, after in (
                ("check_weights", "meet"),
                ("meet", "hold"),
                ("hold", "take_step"),
            ):
                await until(partial(asked_of, last, at))
                await anyio.wait_all_tasks_blocked()
                assert not asked_of(first, after), f"{after} before the last worker has done {at}"
                assert state_of(first) == ("paused" if at == "hold" else "running")
                held[at].set()
            held["take_step"].set()
        assert [state_of(worker) for worker in launcher.alive] == ["running", "running"]
        assert of_version(launcher) == ["1", "1"]


async def test_parts_are_sent_in_order_after_all_workers_have_the_last() -> None:
    source = Parts()
    async with fleet(3) as (engine, launcher), engine, anyio.create_task_group() as group:
        slow = launcher.workers[2]
        slow.held_in["take_step"] = anyio.Event()
        group.start_soon(engine.update_weights, here(source))
        await until(lambda: asked_of(slow, "take_step"))
        for number, _ in enumerate(("start", *source.names)):
            assert len(source.sent) == max(0, number - 1)
            released, slow.held_in["take_step"] = slow.held_in["take_step"], anyio.Event()
            released.set()
            await until(partial(asked_times, slow, "take_step", number + 2))
        slow.held_in["take_step"].set()
    for worker in launcher.alive:
        steps = [arguments for call, arguments in worker.calls if call == "take_step"]
        assert [step for step, _ in steps] == ["start", "load", "load", "load", "finish"]
        assert [given["names"] for _, given in steps if given] == [["a"], ["b"], ["c"]]


@pytest.mark.sample_cases(2)
@either
async def test_an_update_under_episodes_changes_nothing_but_versions(kind: Callable[[], Any]) -> None:
    alone = compared(await played(Dice, dice_engine(), tasks=game_tasks(60)))
    async with fleet(2) as (engine, launcher), Run(Dice, engine, tasks=game_tasks(60)) as run:
        got = []
        async for trajectory in run:
            got.append(trajectory)
            if len(got) in (5, 25):
                update = await engine.update_weights(kind())
                assert of_version(launcher) == [update.version] * 2
    assert compared(got) == alone
    assert all(versions(each) == sorted(versions(each), key=["scripted", "1", "2"].index) for each in got)
    assert {version for each in got for version in versions(each)} == {"scripted", "1", "2"}


@pytest.mark.sample_cases(2)
@either
async def test_episode_after_a_transfer_never_has_older_weights(kind: Callable[[], Any]) -> None:
    async with fleet(2) as (engine, _), engine:
        for number in range(1, 4):
            await engine.update_weights(kind())
            got = await played(Dice, engine)
            assert {version for each in got for version in versions(each)} == {str(number)}


@either
async def test_a_fleet_that_its_trainer_paused_stays_paused(kind: Callable[[], Any]) -> None:
    async with fleet(2) as (engine, launcher), engine:
        await engine.pause()
        await engine.update_weights(kind())
        assert [state_of(worker) for worker in launcher.alive] == ["paused", "paused"]
        assert of_version(launcher) == ["1", "1"]
        await engine.resume()
        assert [state_of(worker) for worker in launcher.alive] == ["running", "running"]


# --- refusals


@pytest.mark.sample_cases(3)
@either
@pytest.mark.parametrize("at", ["check_weights", "meet"])
async def test_refusal_by_every_worker_changes_and_leaves_nothing(kind: Callable[[], Any], at: str) -> None:
    async with fleet(2) as (engine, launcher), engine:
        for worker in launcher.alive:
            worker.fail_in[at] = BadWeights("the tensor 'a' has another shape")
        with pytest.raises(BadWeights, match="the tensor 'a' has another shape"):
            await engine.update_weights(kind(), version="new")
        await anyio.wait_all_tasks_blocked()
        for worker in launcher.alive:
            assert not asked_of(worker, "hold", *(("meet",) if at == "check_weights" else ()))
            assert worker.worker._checked is worker.worker._relay is None
            worker.fail_in.clear()
        assert len(launcher.alive) == 2
        assert engine.weight_version == "scripted"
        await engine.update_weights(kind(), version="new")
        assert of_version(launcher) == ["new", "new"]


@pytest.mark.sample_cases(2)
@either
def test_trainer_connection_timeout_leaves_workers_running(kind: Callable[[], Any]) -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            for worker in launcher.alive:
                worker.held_in["meet"] = anyio.Event()
            with pytest.raises(BadWeights, match=r"did not connect: .*not within 600 s: check that both use"):
                await engine.update_weights(kind())
            assert len(launcher.alive) == 2
            assert [state_of(worker) for worker in launcher.alive] == ["running", "running"]
            assert len(await played(Dice, engine)) == 8

    by_virtual_time(run)


@pytest.mark.sample_cases(2)
@either
def test_cancelling_a_call_while_some_are_paused_continues_them(kind: Callable[[], Any]) -> None:
    async def run() -> None:
        async with fleet(2) as (engine, launcher), engine:
            launcher.workers[1].held_in["hold"] = anyio.Event()
            with anyio.move_on_after(5):
                await engine.update_weights(kind())
            await anyio.wait_all_tasks_blocked()
            launcher.workers[1].held_in["hold"].set()
            await anyio.wait_all_tasks_blocked()
            assert [state_of(worker) for worker in launcher.alive] == ["running", "running"]
            await engine.update_weights(kind())
            assert of_version(launcher) == ["1", "1"]

    by_virtual_time(run)
