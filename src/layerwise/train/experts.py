"""A mixture of experts in place of an MLP: a router sends each token to a few of many small MLPs.

No token is dropped: experts take as many rows as the router gives them. With several expert ranks every rank holds an
equal part of the experts, in order, and rows travel to the rank of their expert and back. Because all ranks of the
group send rows to an expert, its gradient is the sum over their tokens without any reduction between them.

Shapes: N tokens, K experts per token, E experts, L experts on this rank, D residual width, H width of one expert, R
rows on this rank, a row being one token on its way to one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.comm.dispatch import ALL_EXPERTS_HERE, ExpertRanks, exchange_counts, exchange_rows
from layerwise.comm.tensor_parallel import ALL_HEADS_HERE, TensorRanks
from layerwise.config.resolve import ModelShape
from layerwise.routing.split import Split, stack


@dataclass(frozen=True, slots=True)
class Choice:
    """What the router decided."""

    experts_NK: Tensor
    """Numbers of the chosen experts, best first."""
    weights_NK: Tensor
    """Their shares of the result, fp32."""
    counts_E: Tensor
    """Tokens of each expert."""
    imbalance: Tensor
    """Scalar: 1 where experts are equally loaded and equally probable, E where one gets everything. Differentiable."""


class Router(nn.Linear):
    """Scores of all experts for each token, and the best of them. Always computed in fp32: near ties decide."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__(shape.d_model, shape.n_experts, bias=False)
        self.top_k = shape.top_k

    def forward(self, x_ND: Tensor) -> Choice:  # type: ignore[override]
        probs_NE = F.linear(x_ND.float(), self.weight.float()).softmax(dim=-1)
        weights_NK, experts_NK = probs_NE.topk(self.top_k, dim=-1)
        if self.top_k > 1:  # a single expert keeps its probability: a share of 1 would teach the router nothing
            weights_NK = weights_NK / weights_NK.sum(dim=-1, keepdim=True)
        counts_E = torch.bincount(experts_NK.flatten(), minlength=self.out_features)
        loads_E = counts_E / experts_NK.numel()
        imbalance = self.out_features * (loads_E * probs_NE.mean(dim=0)).sum()
        return Choice(experts_NK, weights_NK, counts_E, imbalance)


class Experts(nn.Module):
    """The SwiGLU experts of one rank, stacked: each is a matrix of its own for Newton-Schulz, its gate and up two."""

    def __init__(self, shape: ModelShape, ranks: ExpertRanks) -> None:
        super().__init__()
        num_local = shape.n_experts // ranks.world
        self.ranks, self.hidden = ranks, shape.expert_hidden
        self.gate_up = nn.Parameter(torch.empty(num_local, 2 * shape.expert_hidden, shape.d_model))  # L, 2H, D
        self.down = nn.Parameter(torch.empty(num_local, shape.d_model, shape.expert_hidden))  # L, D, H

    def matrix_splits(self) -> dict[str, Split]:
        """One matrix per expert, and per half of the fused weight."""
        gate_up, down = self.gate_up.shape, self.down.shape
        return {
            "gate_up": stack((gate_up[0], gate_up[1], gate_up[2]), sizes=(self.hidden, self.hidden)),
            "down": stack((down[0], down[1], down[2])),
        }

    def param_domains(self) -> dict[str, str]:
        """Which params other expert ranks hold other parts of."""
        return {"gate_up": "expert", "down": "expert"}

    def forward(self, rows_RD: Tensor, counts: Sequence[int]) -> Tensor:
        return grouped_swiglu(rows_RD, counts, self.ranks.weight(self.gate_up), self.ranks.weight(self.down))


def grouped_swiglu(rows_RD: Tensor, counts: Sequence[int], gate_up_L2HD: Tensor, down_LDH: Tensor) -> Tensor:
    """The first `counts[0]` rows through expert 0, the next `counts[1]` through expert 1, and so on.

    A loop of plain products, which is what a CPU wants; a grouped kernel has the same arguments and result. Experts
    without a row take part too, so that their params always have a gradient.
    """
    results = []
    groups = torch.split(rows_RD, list(counts))
    for rows, gate_up_2HD, down_DH in zip(groups, gate_up_L2HD.unbind(), down_LDH.unbind(), strict=True):
        gate, up = F.linear(rows, gate_up_2HD).chunk(2, dim=-1)
        results.append(F.linear(F.silu(gate) * up, down_DH))
    return torch.cat(results)


class MoE(nn.Module):
    """Router and experts.

    Args:
        shape: of the model.
        ranks: who holds which experts.
        tensor: who else has the same tokens; each of them sends a part of them.
        penalty_share: what part of a step's loss one backward is: 1 / microbatches where each of them is divided so.
    """

    def __init__(
        self,
        shape: ModelShape,
        ranks: ExpertRanks = ALL_EXPERTS_HERE,
        tensor: TensorRanks = ALL_HEADS_HERE,
        *,
        penalty_share: float = 1.0,
    ) -> None:
        super().__init__()
        if shape.n_experts % ranks.world != 0:
            raise ValueError(
                f"{shape.n_experts} experts cannot be shared out evenly to {ranks.world} ranks: "
                "expected a divisor of the number of experts."
            )
        self.ranks, self.tensor = ranks, tensor
        self.penalty = shape.router_penalty * penalty_share
        self.router = Router(shape)
        self.experts = Experts(shape, ranks)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_ND = x_BTD.flatten(0, 1)
        choice: Choice = self.router(x_ND)
        parts = (x_ND, choice.experts_NK, choice.weights_NK)
        mixed_ND = self.tensor.gather_rows(self._mix(*map(self.tensor.scatter_rows, parts)), x_ND.shape[0])
        if self.penalty > 0 and torch.is_grad_enabled():
            mixed_ND = _also_minimise(mixed_ND, self.penalty * choice.imbalance)
        return mixed_ND.view_as(x_BTD)

    def _mix(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        """What the chosen experts make of tokens."""
        num_tokens, top_k = experts_NK.shape
        # Rows by expert, and those of one expert by token, which makes the order the same on every run.
        order_R = experts_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(experts_NK.flatten(), minlength=self.router.out_features)
        rows_RD = self._through_experts(x_ND[order_R // top_k], counts_E)
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))
        results_NKD = rows_RD[back_R].view(num_tokens, top_k, -1)
        return (results_NKD * weights_NK.unsqueeze(-1).to(results_NKD.dtype)).sum(dim=1)

    def _through_experts(self, rows_RD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows in the order of their experts to where these are, through them, and back into the order they came in."""
        results_RD: Tensor
        if self.ranks.world == 1:
            results_RD = self.experts(rows_RD, counts_E.tolist())
            return results_RD
        sent_WL = counts_E.view(self.ranks.world, -1)
        received_WL = exchange_counts(sent_WL, self.ranks)
        sent, received = sent_WL.sum(dim=1).tolist(), received_WL.sum(dim=1).tolist()
        arrived_RD = exchange_rows(rows_RD, sent, received, self.ranks)
        # They arrive rank by rank and within a rank expert by expert; the experts want them the other way round.
        experts_L = torch.arange(received_WL.shape[1], device=rows_RD.device)
        order_R = experts_L.repeat(self.ranks.world).repeat_interleave(received_WL.flatten()).argsort(stable=True)
        results_RD = self.experts(arrived_RD[order_R], received_WL.sum(dim=0).tolist())
        back_R = torch.empty_like(order_R).scatter_(0, order_R, torch.arange(order_R.numel(), device=order_R.device))
        return exchange_rows(results_RD[back_R], received, sent, self.ranks)


def _also_minimise(x: Tensor, penalty: Tensor) -> Tensor:
    """`x`, such that whatever is minimised through it, the penalty is minimised as well.

    A pipeline's loss is known on its last stage only, and penalties on all of them: this way none has to travel.
    """
    joined: Tensor = _AlsoMinimise.apply(x, penalty)  # type: ignore[no-untyped-call]
    return joined


class _AlsoMinimise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, penalty: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(penalty))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], ctx.saved_tensors[0]
