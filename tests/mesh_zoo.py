"""One scene of the mesh zoo: a cut model steps beside the oracle, and every rank brings home what it saw."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import layerwise
from layerwise.comm import contract, facts, groups, joining, lifetimes
from layerwise.kernels import recorded
from tests.meshes import MESHES, MODELS, Blocks, Mesh, Model, like, local, placement, same
from tests.reference.oracle import Hyper, Oracle
from tests.worlds import gradient, hash_of, hash_tensors, rules

BAD_STEP = 1
"""In this step one element of one gradient is NaN: all ranks skip it."""
STEPS = 3


@dataclass(frozen=True)
class Scene:
    """One model under one rule on one mesh."""

    mesh: str
    model: str
    rule: str = "muon"
    clip: float | None = None
    """A bound that bites: gradients of any model here are longer than 1."""
    dtype: torch.dtype = torch.float32
    tp_mode: str = "auto"
    """Whether matrices are orthogonalised whole, or in the blocks that tensor parallelism has cut."""
    sabotage: str = ""
    """What is wrong on purpose, so that a comparison must see it."""

    @property
    def hyper(self) -> Hyper:
        return Hyper(
            matrix=self.rule, weight_decay=0.1, other_weight_decay=0.01, clip=self.clip, lr=0.02, other_lr=0.003
        )

    def options(self) -> dict[str, Any]:
        """The library's rules."""
        found = rules(self.hyper)
        return {**found, "matrix": replace(found["matrix"], tp_mode=self.tp_mode)}

    def matrices(self, model: Model) -> dict[str, Blocks]:
        """What is orthogonalised by itself, by hand."""
        if self.tp_mode == "auto":
            return model.matrices()
        return {fqn: [block for block, _ in blocks] for fqn, blocks in self._tensor_blocks(model).items()}

    def scaled_as(self, model: Model) -> dict[str, list[Shape]]:
        """The shapes of the whole matrices that those are parts of."""
        if self.tp_mode == "auto":
            return {}
        shapes = {fqn: tuple(param.shape) for fqn, param in model.named_parameters()}
        return {
            fqn: [_logical(shapes[fqn], model.matrices()[fqn])[number] for _, number in blocks]
            for fqn, blocks in self._tensor_blocks(model).items()
        }

    def _tensor_blocks(self, model: Model) -> dict[str, list[tuple[Tensor, int]]]:
        found = {}
        for fqn, blocks in model.matrices().items():
            shape = tuple(model.get_parameter(fqn).shape)
            places = torch.arange(math.prod(shape)).view(shape)
            every = list(places) if blocks is None else blocks
            whole = [block if isinstance(block, Tensor) else places[slice(*block)].flatten(1) for block in every]
            found[fqn] = MESHES[self.mesh].tensor_blocks(model, fqn, shape, whole)
        return found

    def build(self) -> Model:
        """The whole model, the same on every rank."""
        torch.manual_seed(5)
        model = MODELS[self.model]()
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape) * 0.1)
        return model.to(self.dtype)


Shape = tuple[int, int]
Place = tuple[str, tuple[tuple[int, int], ...]]
"""A param, and from where to where a rank holds it."""


@dataclass
class Seen:
    """What one rank saw of a scene."""

    found: list[str] = field(default_factory=list)
    """What is not as it should be, in words."""
    orthogonalised: Counter[Shape] = field(default_factory=Counter)
    """Shapes of the matrices that went through Newton-Schulz here, over all steps."""
    mine: Counter[tuple[str, Shape]] = field(default_factory=Counter)
    """Matrices that the plan says this rank orthogonalises: params and shapes."""
    repeated: set[tuple[str, int]] = field(default_factory=set)
    """Matrices that this rank orthogonalises and others too: params, and which matrix of them."""
    held: dict[Place, str] = field(default_factory=dict)
    """A hash of the weights, momenta and moments of each box."""
    steps: int = 0
    """Steps so far, taken or not."""
    wire_nbytes: int = 0
    """What really went out in all-to-alls, over all steps."""
    there: int = 0
    """Elements sent to homes in the last step."""
    back: int = 0
    """Elements sent back from homes in the last step."""


def whole_gradients(whole: dict[str, Tensor], step: int, *, bad: bool = False) -> dict[str, Tensor]:
    """What others have averaged: whole numbers over 8, the same for everybody. A bad one has NaN in one place."""
    found = {fqn: gradient(fqn, tensor.shape, 0, step, 0) for fqn, tensor in whole.items()}
    if bad:
        fqn = sorted(found)[hash_of(repr(sorted(found))) % len(found)]
        found[fqn].view(-1)[hash_of(fqn) % found[fqn].numel()] = float("nan")
    return found


def play(rank: int, world: int, scenes: Sequence[Scene]) -> list[Seen]:
    """Scenes one after the other on the same ranks, which is quicker than ranks for each."""
    return [_play(rank, scene) for scene in scenes]


def _play(rank: int, scene: Scene) -> Seen:
    seen, mesh, model = Seen(), MESHES[scene.mesh], scene.build()
    matrices, scaled_as = scene.matrices(model), scene.scaled_as(model)
    whole = {fqn: param.detach().clone() for fqn, param in model.named_parameters()}
    given = mesh.cut(model)
    params = dict(model.named_parameters())
    boxes = {fqn: mesh.box(model, fqn, tensor.shape, rank) for fqn, tensor in whole.items()}
    if list(params) != list(whole):
        raise AssertionError(f"params are called {list(params)} now, and were {list(whole)}")
    for fqn, param in params.items():
        if not same(local(param.detach()), whole[fqn][boxes[fqn]]):
            raise AssertionError(f"{fqn} is {placement(param)}, and not {boxes[fqn]}: the scene itself is wrong")
    placed = {fqn: placement(param) for fqn, param in params.items()}
    oracle = Oracle(
        whole, _oracles_matrices(scene, matrices), scene.hyper, scaled_as={} if scene.sabotage == "scale" else scaled_as
    )
    with _sabotaged(scene):
        optimizer = layerwise.Optimizer(given, **scene.options(), count_zeros=True)
    first_expert = partial(mesh.first_expert, model, rank)
    with watched(seen):
        for step in range(STEPS):
            grads = whole_gradients(whole, step, bad=step == BAD_STEP)
            is_taken = oracle.step([dict(grads)])
            for fqn, param in params.items():
                param.grad = like(param, grads[fqn][boxes[fqn]].to(scene.dtype))
            _spoil_gradient(scene, rank, step, params)
            optimizer.step()
            seen.steps += 1
            optimizer.zero_grad()
            _spoil_state(scene, rank, step, optimizer, params)
            found = _differences(
                optimizer, oracle, params, boxes, first_expert, is_taken=is_taken, lies_alike=not mesh.ddp
            )
            if dict(model.named_parameters()) != params:
                found.append("the model has other params now")
            found += [
                f"{fqn} was {placed[fqn]} and is {placement(param)}"
                for fqn, param in params.items()
                if placed[fqn] != placement(param)
            ]
            seen.found += [f"rank {rank} step {step}: {text}" for text in found]
    planned = optimizer.schedule.bytes_by_collective(optimizer.engine.storage.ranks).get("all_to_all", 0)
    if seen.wire_nbytes != (STEPS - 1) * planned:
        seen.found.append(
            f"rank {rank}: {seen.wire_nbytes} bytes went out in {STEPS - 1} steps, {planned} each were planned"
        )
    for work in optimizer.plan.works:
        for item in work.items:
            if optimizer.engine.storage.ranks[work.domain] in item.homes:
                seen.mine[item.matrix.fqn, item.matrix.logical_shape] += 1
                number = item.matrix.index + first_expert(item.matrix.fqn)
                seen.repeated.update([(item.matrix.fqn, number)] if len(item.homes) > 1 else ())
    for fqn, param in params.items():
        state = optimizer.state[param]
        tensors = [local(tensor) for name, tensor in sorted(state.items()) if "." not in name and not mesh.ddp]
        place = (fqn, tuple((part.start, part.stop) for part in boxes[fqn]))
        seen.held[place] = hash_tensors([local(param.detach()), *tensors])
    return seen


def _differences(
    optimizer: layerwise.Optimizer,
    oracle: Oracle,
    params: dict[str, torch.nn.Parameter],
    boxes: dict[str, tuple[slice, ...]],
    first_expert: Callable[[str], int],
    *,
    is_taken: bool,
    lies_alike: bool,
) -> list[str]:
    """What this rank holds that is not what the oracle has there; state too, where it lies as its param does."""
    found, weights, stats = [], oracle.weights(), optimizer.stats
    for fqn, param in params.items():
        if not same(local(param.detach()), weights[fqn][boxes[fqn]]):
            found.append(f"weight of {fqn}")
        if not lies_alike:
            continue
        expected = {"master": oracle.masters[fqn], **oracle.state[fqn]}
        for name, tensor in optimizer.state[param].items():
            kind, _, index = name.partition(".")
            if name == "step":
                found += [f"{fqn} is at step {int(tensor)}"] if int(tensor) != oracle.step_count else []
            elif index:  # with its matrix, at its home; where experts go by the same name, those here are the first
                there = expected.get(f"second.{int(index) + first_expert(fqn)}", torch.zeros(()))
                if tensor.numel() and not torch.equal(local(tensor), there):
                    found.append(f"{name} of {fqn}")
            else:
                if placement(tensor) != placement(param):
                    found.append(f"{name} of {fqn} is {placement(tensor)}, the param {placement(param)}")
                if not same(local(tensor), expected.get(kind, torch.zeros(param.shape))[boxes[fqn]]):
                    found.append(f"{name} of {fqn}")
        if is_taken and {name for name in expected if "." not in name} - {"master"} - set(optimizer.state[param]):
            found.append(f"state of {fqn}: {sorted(optimizer.state[param])}, expected {sorted(expected)}")
    if stats.skipped is is_taken:
        found.append(f"skipped: {stats.skipped} ({stats.skip_reason})")
    if not is_taken:
        return found
    if stats.grad_norm != oracle.grad_norm:
        found.append(f"grad norm {stats.grad_norm} against {oracle.grad_norm}")
    if stats.num_zeros != oracle.num_zeros:
        found.append(f"zero count {stats.num_zeros} against {oracle.num_zeros}")
    planned = optimizer.schedule.bytes_by_collective(optimizer.engine.storage.ranks)
    if dict(stats.bytes_by_collective) != planned:
        found.append(f"bytes {dict(stats.bytes_by_collective)} against {planned}")
    return found


FORBIDDEN = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)
"""What sends pickled objects."""


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Count what Newton-Schulz is given and what really goes out in all-to-alls, and let no object travel."""
    orthogonalize, all_to_all_single = recorded.orthogonalize, dist.all_to_all_single
    gather_facts = facts.gather_facts
    sent: list[int] = []

    def counted(update_BMN: Tensor, **more: Any) -> Tensor:
        seen.orthogonalised[update_BMN.shape[1], update_BMN.shape[2]] += update_BMN.shape[0]
        return orthogonalize(update_BMN, **more)

    def told(output: Tensor, mine: Tensor, to: list[int], out: list[int], **more: Any) -> Any:
        sent.append(sum(out) - out[dist.get_rank(more["group"])])
        seen.wire_nbytes += sent[-1] * mine.element_size()
        return all_to_all_single(output, mine, to, out, **more)

    def refused(*args: Any, **more: Any) -> Any:
        raise AssertionError("an object travelled after construction")

    def refused_later(*args: Any, **more: Any) -> Any:
        # Our own gathering of text. The first step compares copies by it, once.
        return gather_facts(*args, **more) if seen.steps == 0 else refused()

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(recorded, "orthogonalize", counted))
        stack.enter_context(mock.patch.object(dist, "all_to_all_single", told))
        for name in FORBIDDEN:
            stack.enter_context(mock.patch.object(dist, name, refused))
        for module in (contract, facts, groups, joining, lifetimes):
            stack.enter_context(mock.patch.object(module, "gather_facts", refused_later))
        yield
    # One cohort, so two all-to-alls a step, unless nothing has to move.
    if len(sent) == 2 * (STEPS - 1):
        seen.there, seen.back = sent[-2:]


def problems(scene: Scene, by_rank: Sequence[Seen]) -> list[str]:
    """What is wrong with a scene: what ranks found, and what only shows when all of them are seen together."""
    found = [text for seen in by_rank for text in seen.found]
    mesh, model = MESHES[scene.mesh], scene.build()
    shapes = {fqn: tuple(param.shape) for fqn, param in model.named_parameters()}
    matrices = scene.matrices(model)
    by_hand = Counter((fqn, shape) for fqn, blocks in matrices.items() for shape in _logical(shapes[fqn], blocks))
    planned = sum((seen.mine for seen in by_rank), Counter[tuple[str, Shape]]())
    repeated = {fqn for seen in by_rank for fqn, _ in seen.repeated}
    for matrix in sorted(by_hand | planned):
        if planned[matrix] != by_hand[matrix] and not (matrix[0] in repeated and by_hand[matrix]):
            found.append(f"{planned[matrix]} homes for {by_hand[matrix]} matrices of {matrix}")
    for rank, seen in enumerate(by_rank):
        for fqn, number in sorted(seen.repeated):
            if not _holds(mesh, model, fqn, shapes[fqn], matrices[fqn], number, rank):
                found.append(f"rank {rank} repeats matrix {number} of {fqn}, which it does not hold")
    expected = Counter[Shape]()
    for (_, shape), count in planned.items():
        expected[shape] += (STEPS - 1) * count
    orthogonalised = sum((seen.orthogonalised for seen in by_rank), Counter[Shape]())
    if orthogonalised != expected:
        found.append(f"orthogonalised {dict(orthogonalised)}, expected {dict(expected)}")
    copies: dict[Place, set[str]] = {}
    for seen in by_rank:
        for place, digest in seen.held.items():
            copies.setdefault(place, set()).add(digest)
    found += [f"copies of {place} differ" for place, digests in copies.items() if len(digests) > 1]
    return found


def _logical(shape: tuple[int, ...], blocks: Blocks) -> list[Shape]:
    if blocks is None:
        return [(shape[1], shape[2])] * shape[0]
    return [
        (block.shape[0], block.shape[1]) if isinstance(block, Tensor) else (block[1] - block[0], shape[1])
        for block in blocks
    ]


def _holds(mesh: Mesh, model: Model, fqn: str, shape: tuple[int, ...], blocks: Blocks, number: int, rank: int) -> bool:
    """Whether a rank has all of a matrix: then it may orthogonalise it though others do too, and nothing has to move."""
    places = torch.arange(math.prod(shape)).view(shape)
    block = places[number] if blocks is None else blocks[number]
    wanted = block if isinstance(block, Tensor) else places[slice(*block)]
    return bool(torch.isin(wanted, places[mesh.box(model, fqn, shape, rank)]).all())


def _oracles_matrices(scene: Scene, matrices: dict[str, Blocks]) -> dict[str, Blocks]:
    """As they are; or the first fused weight in one piece, for a scene that must fail."""
    if scene.sabotage == "unsplit":
        fqn = "blocks.0.qkv.weight"
        return {**matrices, fqn: [(0, scene.build().get_parameter(fqn).shape[0])]}
    return scene.build().matrices() if scene.sabotage == "whole" else matrices


@contextmanager
def _sabotaged(scene: Scene) -> Iterator[None]:
    """Have the library think that chunks of chunks were cut in the other order: every rank's box has the right shape and the
    wrong place."""
    if scene.sabotage != "order":
        yield
        return
    from layerwise.layout.meshes import Placed

    real = Placed._order
    with mock.patch.object(Placed, "_order", lambda self, dim: list(reversed(real(self, dim)))):
        yield


def _spoil_gradient(scene: Scene, rank: int, step: int, params: dict[str, torch.nn.Parameter]) -> None:
    """Move one element of one rank by one ulp."""
    if scene.sabotage == "gradient" and step == 0 and rank == dist.get_world_size() - 1:
        grad = next(local(param.grad) for param in params.values() if param.grad is not None and local(param).numel())
        first = grad.view(-1)[:1]
        first.copy_(torch.nextafter(first, torch.full_like(first, float("inf"))))


def _spoil_state(
    scene: Scene, rank: int, step: int, optimizer: layerwise.Optimizer, params: dict[str, torch.nn.Parameter]
) -> None:
    """Move one element of a momentum of one replica, or orthogonalise something that nobody asked for."""
    if scene.sabotage == "replica" and step == STEPS - 1 and rank == 0:
        states = [optimizer.state[param] for param in params.values()]
        momentum = next(local(state["momentum"]) for state in states if "momentum" in state)
        momentum.view(-1)[:1].add_(1.0)
    if scene.sabotage == "twice" and step == STEPS - 1 and rank == 0:
        recorded.orthogonalize(torch.ones(1, 8, 8), schedule=[(1.0, 0.0, 0.0)])


class Stage:
    """A cut model of the zoo on this rank, with an optimizer."""

    def __init__(self, rank: int, scene: Scene, **options: Any) -> None:
        self.rank, self.mesh, self.model, self.dtype = rank, MESHES[scene.mesh], scene.build(), scene.dtype
        scene = replace(scene, clip=None)
        matrices, scaled_as = scene.matrices(self.model), scene.scaled_as(self.model)
        self.whole = {fqn: param.detach().clone() for fqn, param in self.model.named_parameters()}
        given = self.mesh.cut(self.model)
        self.params = dict(self.model.named_parameters())
        self.hyper = scene.hyper
        self.oracle = Oracle(self.whole, matrices, self.hyper, scaled_as=scaled_as)
        self.optimizer = layerwise.Optimizer(given, **{**scene.options(), **options})

    def box(self, fqn: str) -> tuple[slice, ...]:
        return self.mesh.box(self.model, fqn, self.whole[fqn].shape, self.rank)

    def deliver(self, step: int, *, scale: float = 1.0) -> dict[str, Any]:
        """Gradients for all params, those of a loss that was scaled if it was; returns the whole ones."""
        grads: dict[str, Any] = dict(whole_gradients(self.whole, step))
        for fqn, param in self.params.items():
            param.grad = like(param, (grads[fqn][self.box(fqn)] * scale).to(self.dtype))
        return grads

    def differs(self) -> list[str]:
        return [
            fqn
            for fqn, param in self.params.items()
            if local(param).numel() and not torch.equal(local(param.detach()), self.oracle.masters[fqn][self.box(fqn)])
        ]

    def hash(self) -> str:
        """Of all that a step may change."""
        states = [self.optimizer.state[param] for param in self.params.values()]
        tensors = [local(tensor) for state in states for _, tensor in sorted(state.items())]
        return hash_tensors([*(local(param.detach()) for param in self.params.values()), *tensors])


def with_rule(scene: Scene, rule: str) -> Scene:
    """The same scene under another rule; AdaMuon's is not clipped, so that both are seen."""
    return replace(scene, rule=rule, clip=None if rule == "adamuon" else 0.75)
