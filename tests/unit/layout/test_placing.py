"""Where the usual sharding puts params: by names, and so that every element is somewhere. Runs are compared in tests/distributed/test_planned_sharded.py."""

from __future__ import annotations

import pytest

from layerwise.layout.placing import MeshSizes, expert_dim, is_stack, placements_for, tensor_dim
from layerwise.planner.presets import PRESETS, preset
from layerwise.routing.spec import ModuleKind, ParamSpec
from layerwise.routing.split import transposed


def linear(fqn: str, shape: tuple[int, ...] = (8, 4), **facts: object) -> ParamSpec:
    return ParamSpec(fqn=fqn, shape=shape, module_kind=ModuleKind.LINEAR, **facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("param", "dim"),
    [
        (linear("layers.0.attn.q_proj.weight"), 0),
        (linear("layers.0.attn.q_proj.bias", (8,)), 0),
        (linear("layers.0.mlp.gate_up_proj.weight"), 0),
        (linear("layers.0.attn.o_proj.weight"), 1),
        (linear("layers.0.attn.o_proj.bias", (8,)), None),
        (linear("layers.0.mlp.down.weight"), 1),
        (linear("h.0.attn.c_attn.weight", split=transposed((8, 4))), 1),
        (linear("h.0.attn.c_proj.weight", split=transposed((8, 4))), 0),
        (linear("layers.0.mlp.gate.weight", routes_to=8), None),
        (linear("layers.0.attn.q_a_proj.weight"), None),
        (linear("lm_head.weight", maps_to_vocabulary=True), 0),
        (ParamSpec(fqn="embed.weight", shape=(9, 4), module_kind=ModuleKind.EMBEDDING), 0),
        (ParamSpec(fqn="norm.weight", shape=(4,), module_kind=ModuleKind.NORM), None),
        (ParamSpec(fqn="mlp.up", shape=(4, 4)), None),
    ],
    ids=lambda value: value.fqn if isinstance(value, ParamSpec) else "",
)
def test_tensor_parallelism_goes_by_the_names_of_layers(param: ParamSpec, dim: int | None) -> None:
    assert tensor_dim(param) == dim


@pytest.mark.parametrize(
    ("shape", "sizes", "dim"),
    [
        ((8, 6, 4), MeshSizes(fsdp=4), 0),
        ((8, 6, 4), MeshSizes(fsdp=4, ep=4), 0),
        ((4, 6, 4), MeshSizes(fsdp=3), 1),
        ((4, 6, 4), MeshSizes(fsdp=4, tp=2, ep=4), 1),
        ((4, 6, 4), MeshSizes(fsdp=4, tp=4, ep=4), 0),  # neither divides: fully_shard() cuts rows evenly or not at all
    ],
)
def test_a_stack_is_cut_by_its_experts_or_by_their_rows(shape: tuple[int, ...], sizes: MeshSizes, dim: int) -> None:
    assert expert_dim(shape, sizes) == dim


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("sizes", [MeshSizes(1, 6, 1, 2), MeshSizes(2, 4, 2, 1), MeshSizes(1, 2, 4, 8)])
def test_every_element_is_on_as_many_ranks_as_there_are_copies(name: str, sizes: MeshSizes) -> None:
    table = preset(name)
    placed = placements_for(table, sizes)
    seen = set()
    for param in (param for param in table if param.trainable):
        if (key := (param.shape, tensor_dim(param), is_stack(param))) in seen:
            continue
        seen.add(key)
        boxes = placed[param.fqn].boxes(param.shape, sizes.world)
        uncut = not is_stack(param) and tensor_dim(param) is None
        copies = sizes.replicate * (sizes.tp if uncut else 1)
        assert sum(box.numel for box in boxes) == copies * param.numel, param.fqn
        assert len(set(boxes)) <= sizes.world // copies + 1
