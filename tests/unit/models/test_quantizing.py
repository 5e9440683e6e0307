"""layerwise.quantize(): what it takes, what it leaves alone, and what is refused, each by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import layerwise
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import ModelConfig
from layerwise.kernels.stored import recipe_of, stored_of
from layerwise.layout.quantizing import quantized_table
from layerwise.models.table import param_table
from layerwise.train.model import build_gpt
from tests.ranks import run_ranks

RULES: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.1), "other": layerwise.AdamW(lr=0.1)}


def two_layers(width: int = 64) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(width, width)).bfloat16()


def gpt(**more: Any) -> nn.Module:
    config = ModelConfig(d_model=64, n_layers=2, n_heads=2, n_kv_heads=1, hidden=64, seq_len=16, **more)
    return build_gpt(resolve_model(config), seed=0, dtype=torch.bfloat16)


@pytest.mark.parametrize("more", [{}, {"tie_embeddings": True}, {"n_experts": 4, "expert_hidden": 32}])
def test_linears_and_experts_are_taken_and_everything_else_is_left_alone(more: dict[str, Any]) -> None:
    module = gpt(**more)
    table = param_table(module)
    before = {fqn: param.detach().clone() for fqn, param in module.named_parameters()}
    assert layerwise.quantize(module) is module
    found = {fqn for fqn, param in module.named_parameters() if recipe_of(param)}
    kinds = (
        "attn.qkv.weight",
        "attn.out.weight",
        "gate_up.weight",
        "mlp.down.weight",
        "experts.gate_up",
        "experts.down",
    )
    assert found == {fqn for fqn in before if fqn.endswith(kinds)} != set()
    for fqn, param in module.named_parameters():
        if fqn not in found:
            assert type(param) is nn.Parameter
            assert torch.equal(param, before[fqn])
    # What a plan says without a module is what a module has.
    assert {spec.fqn: spec.recipe for spec in quantized_table(table, "mxfp8")} == {
        spec.fqn: spec.recipe for spec in param_table(module)
    }


def test_a_weight_under_two_names_stays_one() -> None:
    module = two_layers()
    module[2].weight = module[0].weight  # type: ignore[union-attr, index]
    layerwise.quantize(module)
    assert module[0].weight is module[2].weight  # type: ignore[union-attr, index]


def test_what_is_skipped_stays_as_it_is() -> None:
    module = layerwise.quantize(two_layers(), skip=["0.*"])
    assert [recipe_of(param) for _, param in module.named_parameters()] == ["", "", "", "", "mxfp8", ""]


@pytest.mark.parametrize("recipe", ["fp4", "nvfp4", "mxfp4"])
def test_four_bits_are_refused(recipe: str) -> None:
    with pytest.raises(ValueError, match=rf"one of mxfp8, blockwise, got '{recipe}': there are no codes of four bits"):
        layerwise.quantize(two_layers(), recipe)


@pytest.mark.parametrize(("recipe", "words"), [("mxfp9", "Did you mean 'mxfp8'"), (8, "got 8"), ("int8", "got 'int8'")])
def test_an_unknown_recipe_is_refused_with_those_that_there_are(recipe: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"recipe must be one of mxfp8, blockwise.*") as refused:
        layerwise.quantize(two_layers(), recipe)
    assert words in str(refused.value)


def test_shapes_that_blocks_do_not_divide_are_refused_alike_with_and_without_a_module() -> None:
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 64)).bfloat16()
    table = param_table(module)
    with pytest.raises(ValueError, match=r"mxfp8 cannot keep '1.weight \(48 x 64, expected multiples of 32") as refused:
        layerwise.quantize(module)
    assert "as in skip=['1.weight']" in str(refused.value)
    assert all(type(param) is nn.Parameter for param in module.parameters())  # nothing was done
    with pytest.raises(ValueError, match="cannot keep") as planned:
        quantized_table(table, "mxfp8", whose="Sequential")
    assert str(planned.value) == str(refused.value)


@pytest.mark.parametrize(
    ("module", "more", "words"),
    [
        (lambda: two_layers().float(), {}, r"it is torch.float32, expected torch.bfloat16: call module.bfloat16\(\)"),
        (lambda: layerwise.quantize(two_layers()), {}, "quantised by mxfp8 already"),
        (lambda: two_layers().to("meta"), {}, "on the meta device"),
        (lambda: nn.Sequential(nn.Embedding(64, 64)).bfloat16(), {}, "has no weight to quantise"),
        (two_layers, {"skip": ["*"]}, "has no weight to quantise"),
        (two_layers, {"skip": ["layers.*"]}, r"skip='layers.\*' matches no param of Sequential"),
        (
            lambda: layerwise.DataParallel(two_layers()),
            {},
            "expected a plain param of a module that nobody has wrapped",
        ),
    ],
)
def test_each_mistake_is_named(module: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        layerwise.quantize(module(), **more)


def test_one_glob_is_no_list_of_them() -> None:
    with pytest.raises(TypeError, match=r"expected a list of globs, as in skip=\['0\.\*'\]"):
        layerwise.quantize(two_layers(), skip="0.*")


def refused_by_the_optimizer(rank: int, world: int, wrapper: str) -> str:
    module = two_layers()
    if wrapper == "cut first":
        fully_shard(module)
        try:
            layerwise.quantize(module)
        except ValueError as error:
            return str(error)
    layerwise.quantize(module)
    model: Any = {"DDP": DistributedDataParallel, "fully_shard": fully_shard}.get(wrapper, lambda found: found)(module)
    try:
        layerwise.Optimizer(model, **RULES, gradients="reduced" if wrapper == "reduced" else None)
    except ValueError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize("wrapper", ["plain", "DDP", "fully_shard", "reduced"])
def test_an_optimizer_without_our_wrapper_is_refused(wrapper: str) -> None:
    (found,) = run_ranks(1, refused_by_the_optimizer, wrapper)
    name = "module.0.weight" if wrapper == "DDP" else "0.weight"
    assert found.startswith(f"param '{name}' is quantised (mxfp8)")
    assert "Wrap it: layerwise.DataParallel(module)" in found


def test_params_that_torch_has_cut_are_refused() -> None:
    (found,) = run_ranks(1, refused_by_the_optimizer, "cut first")
    assert "mxfp8 cannot keep '0.weight (it is a DTensor, expected a plain param" in found


def test_an_input_in_fp32_is_refused_and_autocast_helps() -> None:
    module = layerwise.quantize(two_layers())
    x = torch.ones(2, 64)
    with pytest.raises(TypeError, match="expected bf16"):
        module(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x).dtype is torch.bfloat16


# -- torch.compile ---------------------------------------------------------------------------------


class Odd(nn.Module):
    """Weights that are read by ways which are no product of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(torch.relu(x @ self.first.weight.t()), self.second.weight * 1.5)


def losses(build: Any, compiled: str) -> list[float]:
    torch.manual_seed(0)
    module = layerwise.quantize(build().bfloat16())
    if compiled == "inside":
        module[0] = torch.compile(module[0], backend="aot_eager")  # type: ignore[operator, index]
    model = layerwise.DataParallel(module)
    optimizer = layerwise.Optimizer(model, **RULES)
    run = torch.compile(model, backend="aot_eager") if compiled == "outside" else model
    x = torch.randn(8, 64, dtype=torch.bfloat16)
    found = []
    for _ in range(4):
        loss = run(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


BUILDERS: dict[str, Any] = {"linears": two_layers, "odd": lambda: nn.Sequential(Odd(), Odd())}


@pytest.mark.parametrize("compiled", ["inside", pytest.param("outside", marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", BUILDERS)
def test_compiled_code_reads_the_codes_of_every_step(model: str, compiled: str) -> None:
    """What a trace saw of codes must not be what it reads for ever."""
    build = BUILDERS[model]
    wanted = losses(build, "")
    assert len(set(wanted)) == len(wanted)
    assert losses(build, compiled) == wanted


def test_values_that_were_given_are_let_go_once_there_are_masters() -> None:
    module = layerwise.quantize(two_layers())
    stored = [stored_of(param) for param in module.parameters() if recipe_of(param)]
    assert all(kept is not None and kept.given is not None for kept in stored)
    layerwise.DataParallel(module)
    assert all(kept is not None and kept.given is None for kept in stored)
