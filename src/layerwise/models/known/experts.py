"""How experts are stacked: which way round, one below the other, with gate and up in halves or taking turns."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from layerwise.models.known.sizes import Describe, pair_of, shape_of, size_of, triple_of
from layerwise.routing.split import Split, stack


def rows_of_experts(module: nn.Module) -> Mapping[str, Split]:
    """DBRX: the experts' weights one below the other; the last of the three is stored transposed."""
    experts = size_of(module, "moe_num_experts")
    found = {}
    for name, roles in (("w1", "arc"), ("v1", "arc"), ("w2", "acr")):
        rows, cols = pair_of(module, name)
        found[name] = Split(grid=(experts, rows // experts, cols), roles=roles)
    return found


def parallel_experts(gated: bool) -> Describe:
    """JetMoE: stacked experts, whose first layer makes gate and up, or the queries of attention."""

    def describe(module: nn.Module) -> Mapping[str, Split]:
        first, last = (triple_of(shape_of(module, f"{name}.weight")) for name in ("input_linear", "output_linear"))
        halves = (first[1] // 2,) * 2 if gated else ()
        return {"input_linear.weight": stack(first, sizes=halves), "output_linear.weight": stack(last)}

    return describe


def concatenated_experts(module: nn.Module) -> Mapping[str, Split]:
    return _expert_stacks(module, turned=False, halves=True)


def stacked_experts(module: nn.Module) -> Mapping[str, Split]:
    """Stacked experts. The module says which way round they are stored, and whether gate and up are halves or take
    turns; one that does not say is not guessed at."""
    turned, halves = getattr(module, "is_transposed", None), getattr(module, "is_concatenated", None)
    if not isinstance(turned, bool) or not isinstance(halves, bool):
        return {}
    return _expert_stacks(module, turned=turned, halves=halves)


def _expert_stacks(module: nn.Module, *, turned: bool, halves: bool) -> Mapping[str, Split]:
    found = {}
    for name in ("gate_up_proj", "up_proj", "down_proj"):
        shape = shape_of(module, name)
        if shape:
            found[name] = (
                _gate_and_up(triple_of(shape), turned, halves)
                if name == "gate_up_proj"
                else stack(triple_of(shape), transposed=turned)
            )
    return found


def _gate_and_up(shape: tuple[int, int, int], turned: bool, halves: bool) -> Split:
    experts, first, second = shape
    if halves:
        return stack(shape, transposed=turned, sizes=((second if turned else first) // 2,) * 2)
    if turned:
        return Split(grid=(experts, first, second // 2, 2), roles="acra")
    return Split(grid=(experts, first // 2, 2, second), roles="arac")


def transposed_halves(module: nn.Module) -> Mapping[str, Split]:
    return _expert_stacks(module, turned=True, halves=True)
