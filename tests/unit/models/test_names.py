"""Names past what torch.compile and checkpoint_wrapper put around modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import layerwise
from layerwise.models.table import domains_by_prefix, named_buffers, named_params, param_table
from layerwise.routing.spec import EXPERT
from tests.worlds import Zoo


class MoE(nn.Module):
    """Experts in a list, and what chooses among them."""

    def __init__(self) -> None:
        super().__init__()
        self.choose = nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def param_domains(self) -> dict[str, str]:
        return {f"experts.{number}.weight": EXPERT for number in range(3)}


class Everything(nn.Module):
    """Whatever is found by names, children or declarations: fused weights, routers, domains, heads, blocks, ties, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.zoo = Zoo(tied=True)
        self.attention = nn.MultiheadAttention(8, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(2)])
        self.single = nn.ModuleList([nn.Linear(8, 20, bias=False)])
        self.moe = MoE()
        self.head = nn.Linear(8, 20, bias=False)


Wrap = Callable[[nn.Module], nn.Module]


def compiled(module: nn.Module) -> nn.Module:
    found: Any = torch.compile(module, backend="eager")
    return found


def every_part(wrap: Wrap) -> Wrap:
    """Wrap everything within a module, from the inside out."""

    def applied(module: nn.Module) -> nn.Module:
        for name, child in list(module.named_children()):
            setattr(module, name, wrap(applied(child)))
        return module

    return applied


WRAPS: dict[str, Wrap] = {
    "compiled": compiled,
    "every part compiled": every_part(compiled),
    "checkpointed": checkpoint_wrapper,
    "every part checkpointed": every_part(checkpoint_wrapper),
    "all of it twice": lambda module: compiled(every_part(lambda part: compiled(checkpoint_wrapper(part)))(module)),
}


@pytest.mark.parametrize("how", WRAPS)
def test_a_wrapped_module_reads_like_the_plain_one(how: str) -> None:
    plain, wrapped = Everything(), WRAPS[how](Everything())
    assert param_table(wrapped) == param_table(plain)
    assert [fqn for fqn, _ in named_params(wrapped)] == [fqn for fqn, _ in plain.named_parameters()]
    assert [name for name, _ in named_buffers(wrapped)] == [name for name, _ in plain.named_buffers()]
    for name in ("moe.experts.1.weight", "moe.experts.1.bias", "blocks.1.1.running_mean"):
        assert domains_by_prefix(wrapped)(name) == domains_by_prefix(plain)(name)
    assert domains_by_prefix(wrapped)("moe.experts.1.weight") == EXPERT


def test_a_modules_own_part_of_such_a_name_stays() -> None:
    module = nn.ModuleDict({"_orig_mod": nn.Linear(4, 4), "_checkpoint_wrapped_module": nn.Linear(4, 4)})
    assert [fqn for fqn, _ in named_params(compiled(module))] == [fqn for fqn, _ in module.named_parameters()]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(8, 8, bias=False) for _ in range(2))

    def attention_heads(self) -> layerwise.AttentionHeads:
        return layerwise.AttentionHeads.grouped(query="query.weight", key="key.weight", n_heads=2, head_dim=4)

    def forward(self, x: Tensor) -> Tensor:
        query, key = (made.unflatten(-1, (2, 4)).transpose(1, 2) for made in (self.query(x), self.key(x)))
        return nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)


RULES = [layerwise.RouteRule(pattern="1.bias", to="other", options={"lr": 0.25})]


class Run:
    """A model in training under whatever stands around its modules."""

    def __init__(self, wrap: Wrap) -> None:
        torch.manual_seed(0)
        self.module: Any = nn.Sequential(Attention(), nn.Linear(8, 8))
        self.model = layerwise.DataParallel(wrap(self.module), rules=RULES)
        self.optimizer = layerwise.Optimizer(
            self.model,
            matrix=layerwise.Muon(lr=0.02),
            other=layerwise.AdamW(lr=0.003),
            qk_clip=layerwise.QKClip(threshold=0.01),
        )

    def train(self, steps: range) -> None:
        for step in steps:
            x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.module.parameters()]

    def take_over(self, other: Run) -> None:
        with torch.no_grad():
            for param, theirs in zip(self.module.parameters(), other.weights(), strict=True):
                param.copy_(theirs)
        self.optimizer.load_state_dict(other.optimizer.state_dict())


@pytest.mark.parametrize("how", ["compiled", "every part compiled", "every part checkpointed"])
def test_a_wrapped_run_goes_on_as_a_plain_one_and_back(how: str) -> None:
    plain, wrapped = Run(lambda module: module), Run(WRAPS[how])
    for run in (plain, wrapped):
        run.train(range(3))
        assert run.optimizer.param_groups[-1]["fqns"] == ["1.bias"]
        assert run.optimizer.stats.max_logit is not None
    after = [Run(WRAPS[how]), Run(lambda module: module), plain]
    after[0].take_over(plain)
    after[1].take_over(wrapped)
    for run in after:
        run.train(range(3, 5))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(run.weights(), after[0].weights(), strict=True))
