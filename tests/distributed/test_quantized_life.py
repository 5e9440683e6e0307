"""What happens to quantised weights beside training: they are written, saved, loaded, unwrapped, looked at; on any of these ways codes are those of what
masters round to, and a bf16 replica goes the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import layerwise
from layerwise.kernels.stored import stored_of
from layerwise.memory.replicas import ReplicaState
from layerwise.memory.staged import StagedReplica
from tests import seams
from tests.marks import sampled
from tests.quantizing import Way, build, coded_params, faults, prepare, tokens_of
from tests.ranks import raised, run_ranks
from tests.worlds import hash_tensors, put_together

Run = tuple[layerwise.DataParallel, layerwise.Optimizer]


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    tokens = tokens_of(rank, step, 0)
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def take_step(run: Run, rank: int, step: int) -> None:
    model, optimizer = run
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()


def truth(model: layerwise.DataParallel) -> dict[str, Tensor]:
    """Masters and state of all ranks together. Collective."""
    return {name: tensor for name, tensor in put_together(model).items() if not name.startswith("gradient")}


def writes_weights(run: Run, rank: int) -> None:
    """`load_state_dict()` of somebody's bf16 weights, in the middle of a run."""
    model, _ = run
    torch.manual_seed(11)
    given = {name: torch.randn_like(param.detach().clone()) * 0.1 for name, param in model.module.named_parameters()}
    model.module.load_state_dict(given)


def pulls_weights(run: Run, rank: int) -> None:
    """The same, and masters are told at once."""
    writes_weights(run, rank)
    run[1].pull_from_replicas()


def restores_state(run: Run, rank: int) -> None:
    """Back to a state of before, between backward and step: gathers run while gradients wait."""
    model, optimizer = run
    state = copy.deepcopy(optimizer.state_dict(part=True))
    take_step(run, rank, 50)
    loss_of(model, rank, 51).backward()
    optimizer.load_state_dict(state)
    optimizer.step()
    optimizer.zero_grad()


def keeps_a_graph(run: Run, rank: int) -> None:
    """A graph from before the step comes to its backward when gathers are under way in the gradients' memory."""
    model, optimizer = run
    params = model.engine.storage.params
    late = sum((param * 0.125).sum() for param in params.values())
    take_step(run, rank, 60)
    assert isinstance(late, Tensor)
    late.backward()
    optimizer.step()
    optimizer.zero_grad()


def leaves_modules_out(run: Run, rank: int) -> None:
    """A step in which most modules took no part: their gathers land when they are reduced."""
    model, optimizer = run
    model.module.head(torch.ones(2, 32).bfloat16()).float().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def fails_half_way(run: Run, rank: int) -> None:
    """A forward that fails, and is forgotten."""
    model, optimizer = run
    assert raised(lambda: model("no tokens"))
    optimizer.zero_grad()


def skips(run: Run, rank: int) -> None:
    """A step whose gradients are not finite."""
    model, optimizer = run
    (loss_of(model, rank, 70) * float("inf")).backward()
    optimizer.step()
    assert optimizer.stats.skipped
    optimizer.zero_grad()


def looks(run: Run, rank: int) -> None:
    """Weights are read by everything but a module's forward."""
    model, _ = run
    assert len(model.state_dict()) > 0
    copy.deepcopy(model.module.blocks[0])
    for _, param in coded_params(model):
        assert param.float().isfinite().all()


def writes_back(run: Run, rank: int) -> None:
    """What was read is written, and read and written again."""
    model, _ = run
    for _ in range(2):
        model.module.load_state_dict({name: tensor.clone() for name, tensor in model.module.state_dict().items()})


def swaps_an_average(run: Run, rank: int) -> None:
    """Other weights for an evaluation, and then the own ones again."""
    model, _ = run
    own = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    writes_weights(run, rank)
    with torch.no_grad():
        loss_of(model, rank, 80)
    model.module.load_state_dict(own)


def does_nothing(run: Run, rank: int) -> None:
    """What these two come to."""


ACTIONS: dict[str, Callable[[Run, int], None]] = {
    action.__name__: action
    for action in (
        *(writes_weights, pulls_weights, restores_state, keeps_a_graph),
        *(leaves_modules_out, fails_half_way, skips, looks),
        *(writes_back, swaps_an_average),
    )
}


def live(rank: int, world: int, name: str, way: Way) -> list[str]:
    """An action in the middle of a run with codes kept and with bf16 kept: everything alike, and codes right."""
    found = []
    hashes = []
    for gather in ("quantized", "bf16"):
        run = prepare(replace(way, gather=gather))
        take_step(run, rank, 0)
        ACTIONS[name](run, rank)
        take_step(run, rank, 1)
        take_step(run, rank, 2)
        found += [f"rank {rank} {name} {gather}: {text}" for text in faults(run[0])]
        hashes.append(hash_tensors(truth(run[0]).values()))
    return found if hashes[0] == hashes[1] else [*found, f"rank {rank} {name}: masters or state differ"]


WAYS = {
    "flat": Way(),
    "padded, waited for": Way("padded", overlap=False),
    "compact, gradients kept": Way("compact", experts=2),
    "gradients released": Way(options=(("shard_grads", True),)),
    "one bucket ahead": Way(options=(("prefetch", 1),)),
    "everything checked": Way(options=(("check_collectives", True), ("check_replicas", True))),
}


@pytest.mark.filterwarnings("ignore:step .* was skipped")
@pytest.mark.parametrize("way", sampled(WAYS, "flat"))
@pytest.mark.parametrize("name", ACTIONS)
def test_whatever_happens_codes_are_those_of_masters(name: str, way: str) -> None:
    assert [text for texts in run_ranks(2, live, name, WAYS[way]) for text in texts] == []


def untouched(rank: int, world: int, gather: str) -> list[str]:
    """Hashes of a run in which weights are read and written back, in two ways, and of one in which nobody does that."""
    found = []
    for action in (does_nothing, writes_back, swaps_an_average):
        run = prepare(replace(Way(), gather=gather))
        for step in range(3):
            take_step(run, rank, step)
            action(run, rank)
        take_step(run, rank, 3)
        found.append(hash_tensors(truth(run[0]).values()))
    return found


@pytest.mark.parametrize("gather", ["quantized", "bf16"])
def test_masters_know_better_than_codes_that_are_written_back(gather: str) -> None:
    for nothing, back, swapped in run_ranks(2, untouched, gather):
        assert nothing == back == swapped


def graph_across_weights(rank: int, world: int, gather: str) -> list[str]:
    """Behind torch's back: other weights, a forward of them, the own ones again, and a backward of that forward."""
    model, _ = prepare(replace(Way(), gather=gather))
    model.ensure()
    params = [param for _, param in coded_params(model)]
    own = [param.detach().clone() for param in params]
    for param, kept in zip(params, own, strict=True):
        param.data.copy_(2 * kept)
    late = loss_of(model, rank, 0)
    for param, kept in zip(params, own, strict=True):
        param.data.copy_(kept)
    return [raised(late.backward)]


@pytest.mark.parametrize("gather", ["quantized", "bf16"])
def test_a_graph_of_weights_that_were_taken_out_again_is_of_no_use(gather: str) -> None:
    for (said,) in run_ranks(2, graph_across_weights, gather):
        assert said.startswith("StateError")


def loaded_in_between(rank: int, world: int, gather: str) -> list[str]:
    """Other weights, state of before, and then what is read is written back: masters are those of the state."""
    run = prepare(replace(Way(), gather=gather))
    model, optimizer = run
    take_step(run, rank, 0)
    kept = copy.deepcopy(optimizer.state_dict(part=True))
    expected = hash_tensors(truth(model).values())
    take_step(run, rank, 1)
    writes_weights(run, rank)
    optimizer.load_state_dict(kept)
    model.ensure()
    loaded = hash_tensors(truth(model).values())
    writes_back(run, rank)
    optimizer.state_dict(part=True)
    return [expected, loaded, hash_tensors(truth(model).values())]


@pytest.mark.parametrize("gather", ["quantized", "bf16"])
def test_what_is_written_back_after_loading_is_what_was_loaded(gather: str) -> None:
    for expected, loaded, back in run_ranks(2, loaded_in_between, gather):
        assert expected == loaded == back


def lends(rank: int, world: int) -> list[str]:
    """Where gathers lie: in idle gradients, or in slots while those are held."""
    found = []
    model, optimizer = prepare(Way())
    take_step((model, optimizer), rank, 0)
    staged = [replica for replica in model.engine.storage.replicas if isinstance(replica, StagedReplica)]
    if not staged or not all(replica.is_lent for replica in staged if replica.state is ReplicaState.IN_FLIGHT):
        found.append("a gather after a step does not lie in gradients")
    if any(replica.slots.tensors for replica in staged):
        found.append("slots were made though gradients are idle")
    state = copy.deepcopy(optimizer.state_dict(part=True))
    loss_of(model, rank, 1).backward()
    model.engine.reducer.finish()  # or sums are still on their way into gradients
    held = {replica.plan.index: None if replica.grad is None else replica.grad.clone() for replica in staged}
    optimizer.load_state_dict(state)
    if any(replica.is_lent for replica in staged):
        found.append("a gather has gradients that are not used up")
    model.ensure()
    for replica in staged:
        if replica.grad is not None and not torch.equal(replica.grad, held[replica.plan.index]):
            found.append(f"gradients of {replica.plan.label} were written by a gather")
    if not 1 <= len(staged[0].slots.tensors) <= 2:
        found.append(f"{len(staged[0].slots.tensors)} slots")
    return [f"rank {rank}: {text}" for text in found]


def test_gathers_lie_in_idle_gradients_and_else_in_two_slots() -> None:
    assert [text for texts in run_ranks(2, lends) for text in texts] == []


# ------------------------------------------------------------------------------------------------ to files and back

KINDS: dict[str, Way | None] = {
    "codes, flat": Way(),
    "codes, compact": Way("compact", overlap=False),
    "codes, blockwise": Way("padded", recipe="blockwise"),
    "bf16 of which codes are made": Way(gather="bf16"),
    "bf16, no codes": None,
}


def prepared(kind: str, blockwise: bool) -> Run:
    way = KINDS[kind]
    if way is not None:
        return prepare(way)
    module = build(Way(recipe="blockwise" if blockwise else "mxfp8"))
    model = layerwise.DataParallel(module, layout="flat", bucket_mib=0.012)
    optimizer = layerwise.Optimizer(
        model, matrix=layerwise.Muon(lr=0.05, weight_decay=0.1), other=layerwise.AdamW(lr=0.02), clip_grad_norm=1.0
    )
    return model, optimizer


def save_one(rank: int, world: int, folder: str, kind: str, blockwise: bool) -> str:
    run = prepared(kind, blockwise)
    for step in range(2):
        take_step(run, rank, step)
    layerwise.save(folder, *run)
    return hash_tensors(truth(run[0]).values())


def load_one(rank: int, world: int, folder: str, kind: str, blockwise: bool) -> tuple[str, list[str]]:
    run = prepared(kind, blockwise)
    for step in range(3):  # somewhere else
        take_step(run, 5 + rank, step)
    layerwise.load(folder, *run)
    loaded, found = hash_tensors(truth(run[0]).values()), []
    for step in range(2):
        found += faults(run[0]) if KINDS[kind] is not None else []
        take_step(run, rank, step)
    return loaded, found


PAIRS = [(one, other) for one in KINDS for other in KINDS if (one == other or "blockwise" not in one + other)]


@pytest.mark.parametrize(
    ("saved", "loaded"), sampled(PAIRS, ("codes, flat", "bf16, no codes"), ("bf16, no codes", "codes, flat"))
)
def test_checkpoints_go_from_codes_to_bf16_and_back(tmp_path: Path, saved: str, loaded: str) -> None:
    blockwise = "blockwise" in saved + loaded
    folder = str(tmp_path / "step")
    expected = run_ranks(2, save_one, folder, saved, blockwise)[0]
    for world in (1, 3):
        for masters, found in run_ranks(world, load_one, folder, loaded, blockwise):
            assert found == []
            assert masters == expected


def unwraps(rank: int, world: int, way: Way) -> list[str]:
    """A module is taken back and wrapped again: masters begin with what the old ones rounded to."""
    run = prepare(way)
    for step in range(2):
        take_step(run, rank, step)
    masters = {name: tensor for name, tensor in put_together(run[0]).items() if name.startswith("master")}
    module = run[0].unwrap()
    with torch.no_grad():
        module(tokens_of(0, 0, 0)[:, :-1])
    again = layerwise.DataParallel(module, layout=way.layout, bucket_mib=0.012)
    layerwise.Optimizer(again, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.02))
    found = faults(again)
    for name, tensor in put_together(again).items():
        if name.startswith("master") and not torch.equal(tensor, masters[name].bfloat16().float()):
            found.append(f"{name} is another one")
    return [f"rank {rank}: {text}" for text in found]


@pytest.mark.parametrize("gather", ["quantized", "bf16"])
def test_a_module_that_is_unwrapped_can_be_trained_again(gather: str) -> None:
    assert [text for texts in run_ranks(2, unwraps, Way(gather=gather)) for text in texts] == []


def in_chunks(rank: int, world: int) -> list[str]:
    """Two chunks of a pipeline on every rank, each with codes."""
    hashes: list[Any] = []
    found: list[str] = []
    for gather in ("quantized", "bf16"):
        torch.manual_seed(4)
        chunks = [
            layerwise.quantize(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).bfloat16())
            for _ in range(2)
        ]
        model = seams.data_parallel(chunks, param_gather=gather, overlap_param_gather="by chunk", bucket_mib=0.01)  # type: ignore[arg-type]
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.05), other=layerwise.AdamW(lr=0.02))
        for step in range(4):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16()
            chunks[1](chunks[0](x)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found += faults(model)
        hashes.append(hash_tensors(truth(model).values()))
    return found if hashes[0] == hashes[1] else [*found, "chunks differ"]


def test_chunks_of_a_pipeline_have_codes_each() -> None:
    assert [text for texts in run_ranks(2, in_chunks) for text in texts] == []


def test_stale_codes_are_brought_up_to_date_by_whoever_reads_them() -> None:
    assert [text for texts in run_ranks(2, reads_stale) for text in texts] == []


def reads_stale(rank: int, world: int) -> list[str]:
    found = []
    for read in (
        lambda model, param: param.detach().clone(),
        lambda model, param: F.linear(torch.eye(param.shape[1]).bfloat16(), param).mT,
        lambda model, param: param.float(),
        lambda model, param: model.module.state_dict()["blocks.0.up.weight"] * 1,
        lambda model, param: copy.deepcopy(param).detach().clone(),
        lambda model, param: torch.cat([param, param])[: param.shape[0]],
    ):
        run = prepare(Way())
        param = run[0].module.blocks[0].up.weight
        before = param.detach().clone()
        take_step(run, rank, 0)
        if run[0].engine.storage.replicas[run[0].plan.bucket_of["blocks.0.up.weight"]].state is ReplicaState.FRESH:
            found.append("nothing is stale: nothing is tested")
        seen = read(run[0], param)
        stored = stored_of(param)
        if stored is None or torch.equal(seen.bfloat16(), before) or not torch.equal(seen.bfloat16(), stored.read()):
            found.append("old values were read")
    return found
