"""State of a sharded model lies as its params do, so torch's distributed checkpoints save and reshard it without knowing
of it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import layerwise
from tests.ranks import raised, run_ranks

MESHES = {"fsdp": ("s",), "hsdp": ("r", "s")}


def build(mesh_name: str, world: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, layerwise.Optimizer]:
    """Weights are as they were seeded: a loaded model must bring its own."""
    shape = (world,) if mesh_name == "fsdp" else (2, world // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=MESHES[mesh_name])
    model = nn.Sequential(nn.Linear(12, 13), nn.LayerNorm(13), nn.Linear(13, 3)).to(dtype)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = layerwise.Optimizer(
        model, matrix=layerwise.Muon(lr=0.02, weight_decay=0.1), other=layerwise.AdamW(lr=0.01), clip_grad_norm=0.5
    )
    return model, optimizer


def train(model: nn.Module, optimizer: layerwise.Optimizer, steps: range) -> None:
    """Gradients of all ranks are the same: what reduces them adds equal numbers, in any order and on any mesh."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            whole = torch.randint(-8, 9, tuple(param.shape), generator=generator).to(param.dtype) / 8
            assert isinstance(param, DTensor)
            # By name of the mesh's dims: only the last one cuts.
            place = param.device_mesh.get_local_rank(param.device_mesh.ndim - 1)
            chunks = torch.chunk(whole, param.device_mesh.size(param.device_mesh.ndim - 1))
            local = chunks[place] if place < len(chunks) else whole[:0]
            param.grad = DTensor.from_local(
                local.clone(), param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
            )
        optimizer.step()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(one: tuple[nn.Module, layerwise.Optimizer], two: tuple[nn.Module, layerwise.Optimizer]) -> list[str]:
    found = []
    for (fqn, left), right in zip(one[0].named_parameters(), two[0].parameters(), strict=True):
        if not torch.equal(whole(left), whole(right)):
            found.append(fqn)
        mine, theirs = one[1].state[left], two[1].state[right]
        found += [
            f"{name} of {fqn}" for name in mine | theirs if not torch.equal(whole(mine[name]), whole(theirs[name]))
        ]
    return found


def reshard(rank: int, world: int, path: str, saved: str, loaded: str, dtype: torch.dtype) -> tuple[list[str], Any]:
    torch.manual_seed(0)
    one = build(saved, world, dtype)
    train(*one, range(3))
    weights, state = get_state_dict(*one)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    train(*one, range(3, 6))
    torch.manual_seed(1)
    two = build(loaded, world, dtype)
    weights, state = get_state_dict(*two)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path)
    set_state_dict(*two, model_state_dict=weights, optim_state_dict=state)
    train(*two, range(3, 6))
    return differences(one, two), two[1].stats.step


@pytest.mark.broad
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16 with masters"])
@pytest.mark.parametrize(("world", "saved", "loaded"), [(3, "fsdp", "fsdp"), (4, "fsdp", "hsdp"), (4, "hsdp", "fsdp")])
def test_a_run_goes_on_to_the_bit_after_dcp_on_another_mesh(
    tmp_path: Path, world: int, saved: str, loaded: str, dtype: torch.dtype
) -> None:
    assert run_ranks(world, reshard, str(tmp_path), saved, loaded, dtype) == [([], 6)] * world


def whole_state(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    one, two = build("fsdp", world), build("hsdp", world)
    train(*one, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(*one, options=options)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(*two, state if rank == 0 else {}, options=options)
    return [text for text in differences(one, two) if " of " in text]


def test_whole_state_of_one_rank_is_cut_as_the_params_are() -> None:
    assert run_ranks(4, whole_state) == [[]] * 4


def placements(rank: int, world: int) -> list[str]:
    """What changes its placement, its mesh or its memory in a step."""
    torch.manual_seed(0)
    model, optimizer = build("fsdp", world)
    before = {id(tensor): tensor for param in model.parameters() for tensor in optimizer.state[param].values()}
    found = []
    train(model, optimizer, range(2))
    for param in model.parameters():
        for name, tensor in optimizer.state[param].items():
            found += [] if id(tensor) in before else [f"{name} is another tensor"]
            if name == "step":
                found += [] if int(tensor) == 2 else [f"step is {tensor}"]
                continue
            alike = (tensor.shape, tensor.placements, tensor.to_local().shape) == (
                param.shape,
                param.placements,
                param.to_local().shape,
            )
            found += [] if alike else [f"{name} lies as {tensor.placements}"]
    return found


def test_state_has_the_placements_of_its_param_on_every_rank_from_the_start() -> None:
    """The last layer has three rows for four ranks: one of them holds nothing of it."""
    assert run_ranks(4, placements) == [[]] * 4


def wrong_state(rank: int, world: int) -> list[str]:
    torch.manual_seed(0)
    one, two = build("fsdp", world), build("hsdp", world)
    train(*one, range(1))
    before = {fqn: whole(param).clone() for fqn, param in two[0].named_parameters()}
    state = one[1].state_dict()
    said = [raised(lambda: two[1].load_state_dict(state))]
    state.pop("layerwise")
    said.append(raised(lambda: two[1].load_state_dict(state)))
    kept = all(torch.equal(before[fqn], whole(param)) for fqn, param in two[0].named_parameters())
    train(*two, range(1))  # and it goes on
    return [*said, "kept" if kept else "weights have changed"]


def test_state_of_another_mesh_is_refused_by_name_and_nothing_is_lost() -> None:
    for layout, mesh, kept in run_ranks(4, wrong_state):
        assert kept == "kept"
        assert "ValueError: state dict belongs to another layout" in layout
        assert "of param '0.weight' on other ranks, or cut in another way" in mesh


def loaded_after_an_evaluation(rank: int, world: int) -> bool:
    """A forward without backward leaves the root gathered: what is loaded then is what the next one reads."""
    model = fully_shard(
        nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).bfloat16(), mesh=init_device_mesh("cpu", (world,))
    )
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    x = torch.ones(2, 6, dtype=torch.bfloat16)
    state = copy.deepcopy(optimizer.state_dict())
    with torch.no_grad():
        before = model(x).clone()
    model(x).square().sum().backward()
    optimizer.step()
    with torch.no_grad():
        moved = model(x).clone()
        optimizer.load_state_dict(state)
        after = model(x)
    return torch.equal(before, after) and not torch.equal(before, moved)


def test_weights_that_were_gathered_for_an_evaluation_follow_what_is_loaded() -> None:
    assert run_ranks(2, loaded_after_an_evaluation) == [True, True]


def kept_at_home(rank: int, world: int) -> list[str]:
    """The answer of torch's way to save under either rule, and the names of state in the part of a rank."""
    mesh = init_device_mesh("cpu", (world,))
    said = []
    for matrix in (layerwise.Muon(lr=0.02), layerwise.NorMuon(lr=0.02)):
        model = fully_shard(nn.Linear(4, 6), mesh=mesh)
        optimizer = layerwise.Optimizer(model, matrix=matrix, other=layerwise.AdamW(lr=0.01))
        said.append(raised(lambda model=model, optimizer=optimizer: get_optimizer_state_dict(model, optimizer)))  # type: ignore[misc]
    kept: Any = optimizer.state_dict(part=True)["state"]
    return [*said, *sorted({name for own in kept.values() for name in own})]


def test_what_homes_keep_goes_through_no_checkpoint_of_torchs_and_saving_says_so() -> None:
    for muon, normuon, *part in run_ranks(2, kept_at_home):
        assert muon == "nothing was raised"
        assert "StateError" in normuon
        assert "keeps 'row_moment' of whole matrices" in normuon
        assert "Call layerwise.save(folder, model, optimizer)" in normuon
        assert any(name.startswith("row_moment") for name in part)
