"""S13, nonfinite: inf or NaN in one gradient on one rank. All ranks skip the same step, name the same param, and nothing changes on any of them.

Beside the model that meets bad gradients runs one that never does. After every bad step both take a clean one and must be equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import layerwise
from tests.ranks import RankFailure, run_ranks
from tests.reference.oracle import Hyper
from tests.reliability import Outcome, tally
from tests.worlds import Case, deliver, gradient, hash_everything, hash_tensors, held, rules, wrap

PARAMS = ("qkv.weight", "experts", "conv.weight", "embed.weight", "norm.weight", "conv.bias", "gain", "column.weight")
"""One of each class: fused matrix, stack, convolution, embedding, norm, bias, scalar, a matrix of one column."""

VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "overflow of the scaled loss": 128.0}
LOSS_SCALE = 2.0**10  # 128 * 2^10 is past fp16's 65504, the clean gradients (at most 0.5) are far below it


@dataclass(frozen=True)
class Injection:
    """Where a bad value is put."""

    rank: int
    kind: str
    fqn: str

    @property
    def name(self) -> str:
        return f"{self.kind} in {self.fqn} on rank {self.rank}"


def injections(world: int, *, scaled: bool) -> list[Injection]:
    kinds = [kind for kind in VALUES if (kind == "overflow of the scaled loss") == scaled]
    return [Injection(rank, kind, fqn) for rank in range(world) for kind in kinds for fqn in PARAMS]


class Run:
    """A model and its optimizer, fed with given gradients."""

    def __init__(self, case: Case, settings: dict[str, Any]) -> None:
        self.model = wrap(case, case.build())
        self.optimizer = layerwise.Optimizer(self.model, **rules(Hyper(ns_dtype=torch.float32)), **settings)
        self.shapes = {fqn: param.shape for fqn, param in self.model.engine.storage.params.items()}

    def step(self, rank: int, number: int, bad: Injection | None = None) -> None:
        grads = {fqn: gradient(fqn, shape, rank, number, 0) for fqn, shape in self.shapes.items()}
        if bad is not None and bad.rank == rank:
            grads[bad.fqn].view(-1)[-1] = VALUES[bad.kind]
        if self._scaled:
            scale = float(self.optimizer.scale_loss(torch.ones(())))
            grads = {fqn: grad * scale for fqn, grad in grads.items()}
        deliver(self.model, grads, sync=True)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def _scaled(self) -> bool:
        return self.optimizer.state_dict()["layerwise"]["loss_scale"] is not None

    def hash(self) -> str:
        """Everything but the loss scaler's counters, which remember an overflow on purpose."""
        if not self._scaled:
            return hash_everything(self.optimizer)
        self.model.ensure()
        return f"{hash_tensors(held(self.model.engine.storage))} {self.optimizer.stats.step}"


def inject_all(rank: int, world: int, scaled: bool, policy: str, every: int) -> dict[str, tuple[str, str]]:
    """For every injection: what this rank decided, and what is wrong with it."""
    case = Case(dtype=torch.float16 if scaled else torch.float32, bucket_mib=None)
    settings: dict[str, Any] = {"nonfinite": policy}
    if scaled:
        settings["loss_scale"] = layerwise.LossScale(initial=LOSS_SCALE, hysteresis=10**6, growth_interval=10**6)
    hit, spared = Run(case, settings), Run(case, settings)
    for run in (hit, spared):
        run.step(rank, 0)
    answers = {}
    for number, injection in enumerate(injections(world, scaled=scaled)[::every], start=1):
        before = hit.hash()
        hit.step(rank, -number, injection)
        decision = f"{hit.optimizer.stats.skipped} {hit.optimizer.stats.nonfinite}"
        complaint = "; ".join(_faults(hit, injection, before))
        for run in (hit, spared):
            run.step(rank, number)
        if not complaint and hit.hash() != spared.hash():
            complaint = "the clean step after it differs from a run without it"
        answers[f"{injection.name} of {world}"] = (decision, complaint)
        if complaint:
            break  # from here on the two runs differ anyway
    return answers


def _faults(run: Run, injection: Injection, before: str) -> Iterator[str]:
    stats = run.optimizer.stats
    if not stats.skipped:
        yield "the step was taken"
    if stats.nonfinite != (injection.fqn,):
        yield f"named {stats.nonfinite}"
    if stats.skipped and injection.fqn not in stats.skip_reason:
        yield f"the reason does not name the param: {stats.skip_reason}"
    if run.hash() != before:
        yield "state changed"


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every rank, kind and class of param on 2 and 4 ranks; with sabotage an optimizer that takes such steps."""
    complaints: dict[str, str] = {}
    # Quick thins out by 5 or 11, which share no factor with the number of params, so that it meets different ones.
    worlds = {2: 5 if quick else 1} if sabotage else {2: 5, 4: 11} if quick else {2: 1, 4: 1}
    for world, every in worlds.items():
        for scaled in (False, True):
            try:
                answers = run_ranks(world, inject_all, scaled, "ignore" if sabotage else "skip", every)
            except RankFailure as failure:
                complaints[f"world {world}, scaled {scaled}"] = str(failure)[-300:]
                continue
            for name in answers[0]:
                decisions = {answer[name][0] for answer in answers if name in answer}
                texts = [
                    f"rank {rank}: {answer[name][1]}"
                    for rank, answer in enumerate(answers)
                    if answer.get(name, ("", ""))[1]
                ]
                complaints[name] = "; ".join([*texts, *(["ranks decided differently"] if len(decisions) > 1 else [])])
    return tally(complaints)
