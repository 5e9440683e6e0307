"""One rank of doctor's self test: `python -m layerwise.cli.selftest` with RANK, WORLD_SIZE and MASTER_* set.

Two ranks take three Muon steps of a small model on different data. It passes if the loss falls and both end with the
same weights, which takes a reduce-scatter, an all-reduce, all-to-alls and an all-gather.
"""

from __future__ import annotations

import hashlib
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here uses it

import torch  # noqa: E402
from torch import nn  # noqa: E402

import layerwise  # noqa: E402
from layerwise.comm import joining  # noqa: E402

_TIMEOUT_S = 120.0
_STEPS = 3


def weight_hash(module: nn.Module) -> str:
    """A fingerprint of every weight's bits."""
    hasher = hashlib.sha256()
    for _, param in module.named_parameters():
        hasher.update(bytes(param.detach().contiguous().view(torch.uint8).flatten().tolist()))
    return hasher.hexdigest()


def main() -> int:
    torch.set_num_threads(1)
    ranks = joining.init(device="cpu", timeout_s=_TIMEOUT_S)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 8))
    model = layerwise.DataParallel(module, layout="flat")
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.01), other=layerwise.AdamW(lr=0.01))
    inputs, targets = torch.randn(ranks.world, 16, 24), torch.randn(ranks.world, 16, 8)
    losses = []
    for _ in range(_STEPS):
        loss = (model(inputs[ranks.rank]) - targets[ranks.rank]).square().mean()
        losses.append(joining.mean(float(loss), ranks))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    joining.same_on_all(weight_hash(module), "weights after the self test", ranks)
    joining.stop()
    if not losses[-1] < losses[0]:
        print(f"the loss did not fall: {losses}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
