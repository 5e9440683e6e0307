"""S13, nonfinite: inf or NaN in one gradient on one rank. All ranks skip the same step, name the same param, and nothing changes on any of them.

Models that torch has cut over meshes, or has copied, meet them too. There somebody else has reduced gradients: a bad value is on the rank that holds
the element, or on one of several that hold copies of it, where the others are clean; in a DistributedDataParallel it is on all ranks.

Beside the model that meets bad gradients runs one that never does. After every bad step both take a clean one and must be equal bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import layerwise
from tests.mesh_zoo import Scene, Stage
from tests.meshes import MESHES, local
from tests.ranks import RankFailure, run_ranks
from tests.reference.oracle import Hyper
from tests.reliability import Outcome, tally, tally_control
from tests.worlds import Case, deliver, gradient, hash_everything, hash_tensors, held, rules, wrap

PARAMS = ("qkv.weight", "experts", "conv.weight", "embed.weight", "norm.weight", "conv.bias", "gain", "column.weight")
"""One of each class: fused matrix, stack, convolution, embedding, norm, bias, scalar, a matrix of one column."""

VALUES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan, "overflow of the scaled loss": 128.0}
GIVEN_PARAMS = {
    "dense": ("blocks.0.up.weight", "embed.weight", "blocks.1.norm.weight", "blocks.0.down.bias", "head.weight"),
    "mixture": ("blocks.0.experts.up", "blocks.0.query.weight", "blocks.0.router.weight", "embed.weight"),
    "odd": ("blocks.0.rows.weight", "short.bias", "wide.weight"),
}
"""The same for models of the mesh zoo."""
MESH_SCENES: dict[str, str] = {
    "fsdp 2": "dense",
    "ddp 2": "dense",
    "tp 3": "odd",
    "hsdp 2x2": "dense",
    "ep x fsdp 2x2 dim 1": "mixture",
    "fsdp 3": "odd",
    "fsdp+tp 2x2": "dense",
    "blocks only 2": "dense",
    "ep 2": "mixture",
    "ep 3": "mixture",
    "zero-2 3": "dense",
    "fsdp+tp 3x2": "odd",
    "ddp 3": "mixture",
    "hsdp 2x3": "odd",
}
"""Models by meshes; the first ones are those of the quick profile."""
QUICK_MESHES = 5
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


def injections(world: int, *, scaled: bool, params: Sequence[str] = PARAMS) -> list[Injection]:
    kinds = [kind for kind in VALUES if (kind == "overflow of the scaled loss") == scaled]
    return [Injection(rank, kind, fqn) for rank in range(world) for kind in kinds for fqn in params]


class Run:
    """A model and its optimizer, fed with given gradients."""

    def __init__(self, case: Case, settings: dict[str, Any]) -> None:
        self.model = wrap(case, case.build())
        self.optimizer = layerwise.Optimizer(self.model, **{**rules(Hyper(ns_dtype=torch.float32)), **settings})
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
        return self.optimizer.state_dict(part=True)["layerwise"]["loss_scale"] is not None

    def hash(self) -> str:
        """Everything but the loss scaler's counters, which remember an overflow on purpose."""
        if not self._scaled:
            return hash_everything(self.optimizer)
        self.model.ensure()
        return f"{hash_tensors(held(self.model.engine.storage))} {self.optimizer.stats.step}"


def settings_for(policy: str, *, scaled: bool) -> dict[str, Any]:
    scale = layerwise.LossScale(initial=LOSS_SCALE, hysteresis=10**6, growth_interval=10**6)
    return {"gradient_policy": layerwise.GradientPolicy(nonfinite=policy), **({"loss_scale": scale} if scaled else {})}


def inject_all(rank: int, world: int, scaled: bool, policy: str, every: int) -> dict[str, tuple[str, str]]:
    """For every injection: what this rank decided, and what is wrong with it."""
    case = Case(dtype=torch.float16 if scaled else torch.float32, bucket_mib=None)
    settings = settings_for(policy, scaled=scaled)
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


class Hit(Protocol):
    """What is looked at after a bad step."""

    optimizer: layerwise.Optimizer

    def hash(self) -> str: ...


def _faults(run: Hit, injection: Injection, before: str) -> Iterator[str]:
    stats = run.optimizer.stats
    if not stats.skipped:
        yield "the step was taken"
    if stats.nonfinite != (injection.fqn,):
        yield f"named {stats.nonfinite}"
    if stats.skipped and injection.fqn not in stats.skip_reason:
        yield f"the reason does not name the param: {stats.skip_reason}"
    if run.hash() != before:
        yield "state changed"


def inject_given(
    rank: int, world: int, meshes: Sequence[str], scaled: bool, policy: str, every: int
) -> dict[str, tuple[str, str]]:
    """The same for cut models, one mesh after the other."""
    answers: dict[str, tuple[str, str]] = {}
    for mesh in meshes:
        answers.update(_inject_given(rank, mesh, scaled, policy, every))
    return answers


def _inject_given(rank: int, mesh: str, scaled: bool, policy: str, every: int) -> dict[str, tuple[str, str]]:
    scene = Scene(mesh, MESH_SCENES[mesh], dtype=torch.float16 if scaled else torch.float32)
    hit, spared = (Stage(rank, scene, **settings_for(policy, scaled=scaled)) for _ in range(2))

    def step(stage: Stage, number: int, bad: Injection | None = None) -> None:
        scale = float(stage.optimizer.scale_loss(torch.ones(()))) if scaled else 1.0
        stage.deliver(number, scale=scale)
        if bad is not None and (bad.rank == rank or stage.mesh.ddp):
            grad = stage.params[bad.fqn].grad
            if grad is not None:
                local(grad).view(-1)[-1] = VALUES[bad.kind] * scale
        stage.optimizer.step()
        stage.optimizer.zero_grad()

    def is_held(injection: Injection) -> bool:
        box = hit.mesh.box(hit.model, injection.fqn, hit.whole[injection.fqn].shape, injection.rank)
        return all(side.stop > side.start for side in box)

    for stage in (hit, spared):
        step(stage, 0)
    answers = {}
    everything = injections(hit.mesh.world, scaled=scaled, params=GIVEN_PARAMS[scene.model])
    for number, injection in enumerate(list(filter(is_held, everything))[::every], start=1):
        before = hit.hash()
        step(hit, number, injection)
        decision = f"{hit.optimizer.stats.skipped} {hit.optimizer.stats.nonfinite}"
        complaint = "; ".join(_faults(hit, injection, before))
        for stage in (hit, spared):
            step(stage, number)
        if not complaint and hit.hash() != spared.hash():
            complaint = "the clean step after it differs from a run without it"
        answers[f"{injection.name} of {mesh}"] = (decision, complaint)
        if complaint:
            break  # from here on the two runs differ anyway
    return answers


def given_complaints(*, quick: bool, sabotage: bool) -> dict[str, str]:
    """Meshes of every kind; with sabotage every one of them must have something to complain of."""
    meshes = list(MESH_SCENES)[:QUICK_MESHES] if quick or sabotage else list(MESH_SCENES)
    policy, complaints = "ignore" if sabotage else "skip", dict[str, str]()
    for world in sorted({MESHES[mesh].world for mesh in meshes}):
        mine = [mesh for mesh in meshes if MESHES[mesh].world == world]
        for scaled in (False,) if (quick or sabotage) and world > 2 else (False, True):
            job = (mine, scaled, policy, 17 if quick or sabotage else 1)
            complaints.update(_complaints(f"meshes {mine}", world, inject_given, *job, scaled=scaled))
    return complaints


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every rank, kind and class of param on 2 and 4 ranks, then on meshes; with sabotage an optimizer that takes such steps."""
    complaints: dict[str, str] = {}
    # Quick thins out by 5 or 11, which share no factor with the number of params, so that it meets different ones.
    worlds = {2: 5 if quick else 1} if sabotage else {2: 5, 4: 11} if quick else {2: 1, 4: 1}
    for world, every in worlds.items():
        for scaled in (False, True):
            job = (scaled, "ignore" if sabotage else "skip", every)
            complaints.update(_complaints(f"world {world}", world, inject_all, *job, scaled=scaled))
    given = given_complaints(quick=quick, sabotage=sabotage)
    return tally_control(complaints, given) if sabotage else tally({**complaints, **given})


def _complaints(name: str, world: int, inject: Callable[..., Any], *job: Any, scaled: bool) -> dict[str, str]:
    """What is wrong with the answers of ranks, by injection."""
    try:
        answers = run_ranks(world, inject, *job)
    except RankFailure as failure:
        return {f"{name}, scaled {scaled}": str(failure)[-300:]}
    found = {}
    for injection in answers[0]:
        decisions = {answer[injection][0] for answer in answers if injection in answer}
        texts = [
            f"rank {rank}: {answer[injection][1]}"
            for rank, answer in enumerate(answers)
            if answer.get(injection, ("", ""))[1]
        ]
        found[injection] = "; ".join([*texts, *(["ranks decided differently"] if len(decisions) > 1 else [])])
    return found
