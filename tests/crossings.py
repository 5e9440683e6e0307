"""One model, run in every kind there is, so that a checkpoint can go from any of them to any other.

Every kind says by hand what its ranks have of the whole model, and is compared with one oracle, which knows of no ranks.
Gradients are the same whole numbers over eight for everybody: a run on other ranks is the same run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import layerwise
from layerwise.kernels.stored import stored_of
from tests.mesh_zoo import whole_gradients
from tests.meshes import Blocks, Experts, Mesh, Model, like, local, same
from tests.quantizing import codes_of
from tests.reference.oracle import Hyper, Oracle
from tests.worlds import deliver, gradient, rules

STEPS = 2
"""Steps before a checkpoint is saved."""
RULES = ("muon", "normuon", "adamuon")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
Box = tuple[slice, ...]
Sabotage = Callable[[int], AbstractContextManager[Any]]
"""What is put in place of the library's own, on a rank."""

WIDTH, HIDDEN, VOCABULARY, EXPERTS, BLOCK = 8, 20, 13, 6, 32
CODES = "mxfp8"


class FirstBlock(nn.Module):
    """A fused weight, one in blocks that may be kept as codes, biases, something frozen, and buffers of which one is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, WIDTH + 8)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.wide = nn.Linear(2 * BLOCK, BLOCK, bias=False)
        self.frozen = nn.Linear(WIDTH, 5)
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.zeros(7))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (WIDTH, 4, 4)}


class SecondBlock(nn.Module):
    """Six experts: two or three ranks have equally many, of four the last has none."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = Experts(EXPERTS, WIDTH, 10)


class Whole(Model):
    """The model."""

    experts = EXPERTS

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.tied = tied
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([FirstBlock(), SecondBlock()])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.retie()

    def retie(self) -> None:
        if self.tied:
            self.head.weight = self.embed.weight

    def matrices(self) -> dict[str, Blocks]:
        return {
            "blocks.0.qkv.weight": [(0, 8), (8, 12), (12, 16)],
            "blocks.0.out.weight": [(0, WIDTH)],
            "blocks.0.up.weight": [(0, HIDDEN)],
            "blocks.0.down.weight": [(0, WIDTH)],
            "blocks.0.wide.weight": [(0, BLOCK)],
            "blocks.1.query.weight": [(0, WIDTH)],
            "blocks.1.experts.up": None,
            "blocks.1.experts.down": None,
        }

    def styles(self) -> dict[str, str]:
        rows = {f"blocks.0.{name}": "rows" for name in ("qkv", "up", "wide")}
        columns = {f"blocks.0.{name}": "columns" for name in ("out", "down")}
        return {"embed": "rows", "head": "rows", "norm": "copied", "blocks.1.query": "rows", **rows, **columns}


def filled(salt: int, dtype: torch.dtype, *, tied: bool = True) -> Whole:
    """The model with values that depend on names and on `salt`: a run that loads starts from others than one that saves."""
    model = Whole(tied=tied)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            drawn = gradient(f"value of {name} {salt}", tensor.shape, 0, 0, 0)
            tensor.copy_(drawn * 0.1 if tensor.is_floating_point() else (drawn * 8).long())
    return model.to(dtype)


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """What is not trained and belongs to the model's state."""
    trainable = {name for name, param in model.named_parameters(remove_duplicate=False) if param.requires_grad}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in trainable}


# ------------------------------------------------------------------------------------------------ kinds


@dataclass
class Run:
    """A model and its optimizer on one rank, and what the rank has of the whole model."""

    model: nn.Module
    """What is saved and loaded."""
    optimizer: layerwise.Optimizer
    chunks: Sequence[nn.Module]
    votes: int = 1
    """How many ranks' gradients are averaged; 1 where others have done it."""
    boxes: Mapping[str, Box] = field(default_factory=dict)
    """This rank's part of a param, where it is not all of it."""
    lies_alike: bool = False
    """Whether state lies as its param does; else in spans of it."""
    ep: int = 1
    """Ranks that have experts of their own under one name."""
    halves_tie: bool = False
    """Whether each of two stages delivers a part of the tied weight's gradient."""
    first_expert: int = 0
    stage: int = 0

    def name_of(self, fqn: str) -> str:
        """What the whole model calls a param of this rank."""
        name = fqn if len(self.chunks) == 1 else fqn.partition(".")[2]
        return "embed.weight" if name == "head.weight" else name

    def params(self) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Name here, name in the whole model, and trained param."""
        for fqn, param in self.optimizer.engine.storage.params.items():
            yield fqn, self.name_of(fqn), param

    def mine(self, name: str, whole: Tensor) -> Tensor:
        return whole[self.boxes[name]] if name in self.boxes else whole

    def step(self, number: int) -> None:
        """One step on the gradients of this number."""
        grads = whole_gradients({name: torch.empty(shape) for name, shape in shapes().items()}, number)
        given: dict[str, Tensor] = {}
        for fqn, name, _ in self.params():
            grad = self.mine(name, grads[name])
            if self.ep > 1 and ".experts." in name:
                grad = grad * self.ep  # only these ranks have them, and the mean is over all
            if self.halves_tie and name == "embed.weight":
                half = gradient("half of the tie", grad.shape, 0, number, 0)
                grad = grad - half if self.stage == 0 else half
            given[fqn] = grad
        if isinstance(self.model, layerwise.DataParallel):
            deliver(self.model, given, sync=True)
        else:
            for fqn, _, param in self.params():
                param.grad = like(param, given[fqn].to(param.dtype))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def differences(self, oracle: Oracle, constants: Mapping[str, Tensor], *, stepped: bool = False) -> list[str]:
        """What this rank has that is not what the oracle has there."""
        engine = self.optimizer.engine
        engine.publisher.ensure_all()
        weights, found = oracle.weights(), list[str]()
        for fqn, name, param in self.params():
            if not _is_read_as(param, self.mine(name, weights[name])):
                found.append(f"weight of {fqn}")
            for kind, tensor in self.optimizer.state[param].items():
                found += self._state_differences(oracle, fqn, name, kind, tensor)
        for shard in () if self.lies_alike else engine.storage.shards:
            for span in shard.spans:
                name = self.name_of(span.fqn)
                kept = {"master": shard.master, **shard.state}
                expected = {"master": oracle.masters[name], **oracle.state[name]}
                for kind in ("master", *(kind for kind in oracle.state[name] if "." not in kind)):
                    whole = self.mine(name, expected[kind]).reshape(-1)[span.start : span.stop]
                    if not torch.equal(kept[kind][span.part], whole):
                        found.append(f"{kind} of {span.fqn}")
        for number, chunk in enumerate(self.chunks):
            for name, tensor in constants_of(chunk).items():
                expected_here = self.mine(name, constants[name])
                if not same(local(tensor), expected_here) or tensor.dtype != constants[name].dtype:
                    found.append(f"constant {name} of chunk {number}")
        if stepped:
            stats = self.optimizer.stats
            if (stats.grad_norm, stats.num_zeros) != (oracle.grad_norm, oracle.num_zeros):
                found.append(f"norm and zeros {stats.grad_norm}, {stats.num_zeros}")
        return found

    def _state_differences(self, oracle: Oracle, fqn: str, name: str, kind: str, tensor: Tensor) -> list[str]:
        """Steps, what homes keep, and state that lies as its param does."""
        what, _, index = kind.partition(".")
        expected: Tensor
        if kind == "step":
            return [] if int(tensor) == oracle.step_count else [f"{fqn} is at step {int(tensor)}"]
        if index:
            first = self.first_expert if ".experts." in name else 0
            expected = oracle.state[name][f"second.{int(index) + first}"]
            is_right = not tensor.numel() or torch.equal(local(tensor), expected)
        elif self.lies_alike:
            expected = oracle.masters[name] if what == "master" else oracle.state[name][what]
            is_right = same(local(tensor), self.mine(name, expected))
        else:
            is_right = True  # compared by spans
        return [] if is_right else [f"{kind} of {fqn}"]


def _is_read_as(param: nn.Parameter, weight: Tensor) -> bool:
    """Whether forward reads this weight, or its codes in both directions where they are what is kept."""
    stored = stored_of(param)
    if stored is None:
        return same(local(param.detach()), weight)
    sides = ((stored.rows(), weight), (stored.cols(), weight.mT.contiguous()))
    return stored.is_by_codes and all(
        torch.equal(kept.values.contiguous().view(torch.uint8), codes) and torch.equal(kept.scales, scales)
        for kept, (codes, scales) in ((kept, codes_of(side, CODES)) for kept, side in sides)
    )


class Kind:
    """A way to run the model on some numbers of ranks."""

    worlds: tuple[int, ...]
    codes: bool = False
    """Whether a weight is kept as codes: such a model is in bf16."""

    def build(self, rank: int, world: int, salt: int, dtype: torch.dtype, hyper: Hyper) -> Run:
        raise NotImplementedError

    def votes(self, world: int) -> int:
        """How many ranks' gradients are averaged."""
        return 1


@dataclass(frozen=True)
class Plain(Kind):
    """One process, without anything around the module."""

    worlds: tuple[int, ...] = (1,)

    def build(self, rank: int, world: int, salt: int, dtype: torch.dtype, hyper: Hyper) -> Run:
        model = filled(salt, dtype)
        return Run(model, layerwise.Optimizer(model, **rules(hyper), count_zeros=True), [model])


@dataclass(frozen=True)
class Wrapped(Kind):
    """A DataParallel, with experts and pipeline stages as asked for."""

    layout: str = "flat"
    worlds: tuple[int, ...] = (1, 2, 3, 4)
    ep: int = 1
    """The largest number of parts that experts are shared out in."""
    pp: int = 1
    chunks: int = 1
    bucket_mib: float = 0.001
    routes: tuple[layerwise.RouteRule, ...] = ()
    codes: bool = False

    def votes(self, world: int) -> int:
        return world // self.pp

    def build(self, rank: int, world: int, salt: int, dtype: torch.dtype, hyper: Hyper) -> Run:
        model = filled(salt, dtype, tied=self.pp == 1)
        ep = next(size for size in range(self.ep, 0, -1) if world // self.pp % size == 0)
        stage, place = divmod(rank, world // self.pp)
        boxes: dict[str, Box] = {}
        if ep > 1:
            experts, each = model.blocks[1].experts, EXPERTS // ep
            assert isinstance(experts, Experts)
            experts.domain = "expert"
            for name, param in list(experts.named_parameters()):
                boxes[f"blocks.1.experts.{name}"] = box = (slice(place % ep * each, (place % ep + 1) * each),)
                experts.register_parameter(name, nn.Parameter(param.detach()[box].clone()))
        if self.codes:
            others = {name for name, _ in model.named_parameters()} - {"blocks.0.wide.weight"}
            layerwise.quantize(model, CODES, skip=sorted(others))
        parts = self._pieces(model, stage)
        mesh = None
        if ep > 1 or self.pp > 1:
            shape = (self.pp, world // self.pp // ep, ep)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "ep"))
        tied = {0: "embed.weight", 1: "head.weight"}[stage]
        prefix = "" if self.chunks == 1 else f"{0 if stage == 0 else 1}."
        wrapped = layerwise.DataParallel(
            parts if self.chunks > 1 else parts[0],
            mesh=mesh,
            ties={"the tie": f"{prefix}{tied}"} if self.pp > 1 else {},
            layout=self.layout,
            rules=self.routes,
            bucket_mib=self.bucket_mib,
        )
        optimizer = layerwise.Optimizer(wrapped, **rules(hyper), count_zeros=True)
        return Run(
            wrapped,
            optimizer,
            parts,
            votes=self.votes(world),
            boxes=boxes,
            ep=ep,
            halves_tie=self.pp > 1,
            first_expert=place % ep * (EXPERTS // ep),
            stage=stage,
        )

    def _pieces(self, model: Whole, stage: int) -> list[nn.Module]:
        """The chunks of this stage: of two stages with two chunks the first has the first and the third."""
        if self.pp == 1:
            return [model]
        if self.chunks == 1:
            return [_piece(model, *(("embed", "blocks.0") if stage == 0 else ("blocks.1", "norm", "head")))]
        halves = (("embed",), ("blocks.1",)) if stage == 0 else (("blocks.0",), ("norm", "head"))
        return [_piece(model, *names) for names in halves]


def _piece(model: Whole, *names: str) -> nn.Module:
    """Some modules of the model, under the names that they have in it."""
    piece = nn.Module()
    for name in names:
        first, _, number = name.partition(".")
        inner = model.get_submodule(name)
        piece.add_module(first, nn.ModuleDict({number: inner}) if number else inner)
    return piece


@dataclass(frozen=True)
class Cut(Kind):
    """What torch has cut over a mesh, or copied."""

    meshes: Mapping[int, Mesh]
    """By the number of ranks."""

    @property
    def worlds(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.meshes)

    def cut(self, rank: int, world: int, salt: int, dtype: torch.dtype) -> tuple[Whole, nn.Module, dict[str, Box]]:
        """The model, what torch has made of it, and this rank's part of every param."""
        mesh, model = self.meshes[world], filled(salt, dtype)
        before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        given = mesh.cut(model)
        boxes = {name: mesh.box(model, name, tensor.shape, rank) for name, tensor in before.items()}
        for name, param in model.named_parameters():
            if not same(local(param.detach()), before[name][boxes[name]]):
                raise AssertionError(f"{name} is not {boxes[name]} on rank {rank}: the scene itself is wrong")
        return model, given, boxes

    def build(self, rank: int, world: int, salt: int, dtype: torch.dtype, hyper: Hyper) -> Run:
        model, given, boxes = self.cut(rank, world, salt, dtype)
        mesh, optimizer = self.meshes[world], layerwise.Optimizer(given, **rules(hyper), count_zeros=True)
        first = mesh.first_expert(model, rank, "blocks.1.experts.up")
        return Run(given, optimizer, [model], boxes=boxes, lies_alike=not mesh.ddp, first_expert=first)


def _experts(shards: int, ep: int, how: Any = "one stack", dim: int = 0) -> Mesh:
    return Mesh((("shard", shards * ep),), experts=(("eshard", shards), ("ep", ep)), expert_dim=dim, experts_are=how)


KINDS: dict[str, Kind] = {
    "plain": Plain(),
    "flat": Wrapped("flat"),
    "padded": Wrapped("padded"),
    "compact": Wrapped("compact"),
    "replicated": Wrapped("replicated"),
    CODES: Wrapped("flat", codes=True),
    "flat ep": Wrapped("flat", worlds=(2, 3, 4), ep=3),
    "padded ep": Wrapped("padded", worlds=(2, 3, 4), ep=3, bucket_mib=0.0005),
    "stages": Wrapped("compact", worlds=(2, 4), pp=2),
    "chunks": Wrapped("flat", worlds=(2, 4), pp=2, chunks=2, ep=2),
    "ddp": Cut({world: Mesh((("all", world),), ddp=True) for world in (1, 2, 3, 4)}),
    "fsdp": Cut({world: Mesh((("shard", world),)) for world in (1, 2, 3, 4)}),
    "hsdp": Cut({4: Mesh((("replicate", 2), ("shard", 2)))}),
    "tp": Cut({world: Mesh((("tp", world),)) for world in (2, 3)}),
    "fsdp+tp": Cut({4: Mesh((("shard", 2), ("tp", 2)))}),
    "ep": Cut({world: Mesh((("all", world),), experts=(("ep", world),)) for world in (2, 3, 4)}),
    "ep beside fsdp": Cut({world: Mesh((("shard", world),), experts=(("ep", world),)) for world in (2, 3, 4)}),
    "ep x fsdp": Cut({4: _experts(2, 2, dim=1)}),
    "declared ep x fsdp": Cut({4: _experts(2, 2, "declared")}),
    "apart ep x fsdp": Cut({2: _experts(1, 2, "apart"), 3: _experts(1, 3, "apart"), 4: _experts(2, 2, "apart", 1)}),
}


# ------------------------------------------------------------------------------------------------ runs that save, runs that load


class Ranks(NamedTuple):
    """A kind on so many ranks."""

    kind: str
    world: int

    @property
    def votes(self) -> int:
        return KINDS[self.kind].votes(self.world)


class Crossing(NamedTuple):
    """A checkpoint that some ranks have saved, and others load."""

    saved: Ranks
    loaded: Ranks
    rule: str
    dtype: torch.dtype
    """Of the run that saves."""
    into: torch.dtype
    """Of the run that loads."""

    @property
    def file(self) -> str:
        return f"{self.saved.kind} {self.saved.world} {self.rule} {NAMES[self.dtype]}"

    def __str__(self) -> str:
        return f"{self.file} to {self.loaded.kind} {self.loaded.world} {NAMES[self.into]}"


def hyper_of(rule: str) -> Hyper:
    return Hyper(matrix=rule, weight_decay=0.1, other_weight_decay=0.01, clip=0.75)


@cache
def shapes() -> dict[str, torch.Size]:
    return {name: param.shape for name, param in Whole().named_parameters() if param.requires_grad}


def new_oracle(hyper: Hyper, dtype: torch.dtype) -> Oracle:
    """An oracle of the model as it begins."""
    model = filled(0, dtype)
    params = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    return Oracle(params, model.matrices(), hyper)


def take_step(oracle: Oracle, number: int, votes: int) -> None:
    """The step that runs take on the gradients of this number."""
    oracle.step([dict(whole_gradients(oracle.params, number)) for _ in range(votes)])


@cache
def _trained(rule: str, dtype: torch.dtype, votes: int) -> Oracle:
    oracle = new_oracle(hyper_of(rule), dtype)
    for step in range(STEPS):
        take_step(oracle, step, votes)
    return oracle


def oracle_of(crossing: Crossing) -> Oracle:
    """The oracle when the checkpoint was saved, with weights of the dtype that they are loaded in."""
    oracle = copy.deepcopy(_trained(crossing.rule, crossing.dtype, crossing.saved.votes))
    oracle.params = {name: param.to(crossing.into) for name, param in oracle.params.items()}
    return oracle


def constants_in(crossing: Crossing) -> dict[str, Tensor]:
    saved = constants_of(filled(0, crossing.dtype))
    return {name: tensor.to(crossing.into) if tensor.is_floating_point() else tensor for name, tensor in saved.items()}


def save_all(rank: int, world: int, folder: str, crossings: Sequence[Crossing]) -> list[str]:
    """Train and save what these crossings start from, all on as many ranks; returns what is not as the oracle has it."""
    found = []
    for crossing in crossings:
        run = KINDS[crossing.saved.kind].build(rank, world, 0, crossing.dtype, hyper_of(crossing.rule))
        for step in range(STEPS):
            run.step(step)
        own = crossing._replace(into=crossing.dtype)
        seen = run.differences(oracle_of(own), constants_in(own), stepped=True)
        found += [f"{crossing.file}, rank {rank}, before saving: {text}" for text in seen]
        layerwise.save(Path(folder) / crossing.file, run.model, run.optimizer, extra={"file": crossing.file})
    return found


def load_all(
    rank: int, world: int, folder: str, crossings: Sequence[Crossing], sabotage: Sabotage | None = None
) -> list[str]:
    """Load checkpoints one after the other, and take a step after each; returns what is not as the oracle has it."""
    found, runs = list[str](), dict[tuple[str, str, torch.dtype], Run]()
    for crossing in crossings:
        key = crossing.loaded.kind, crossing.rule, crossing.into
        if key not in runs:
            runs[key] = KINDS[key[0]].build(rank, world, 1, crossing.into, hyper_of(crossing.rule))
        run, oracle, constants = runs[key], oracle_of(crossing), constants_in(crossing)
        with nullcontext() if sabotage is None else sabotage(rank):
            loaded = layerwise.load(Path(folder) / crossing.file, run.model, run.optimizer)
        seen = [] if (loaded.step, loaded.extra) == (STEPS, {"file": crossing.file}) else [str(loaded)]
        seen += run.differences(oracle, constants)
        found += [f"{crossing}, rank {rank}: {text}" for text in seen]
        run.step(STEPS)
        take_step(oracle, STEPS, run.votes)
        seen = run.differences(oracle, constants, stepped=True)
        found += [f"{crossing}, rank {rank}, one step later: {text}" for text in seen]
    return found


def load_weights(rank: int, world: int, folder: str, crossings: Sequence[Crossing]) -> list[str]:
    """Load weights alone, into models that nobody trains here; returns what is not as the oracle has it."""
    found = []
    for crossing in crossings:
        kind = KINDS[crossing.loaded.kind]
        assert isinstance(kind, Cut)
        model, given, boxes = kind.cut(rank, world, 1, crossing.into)
        layerwise.load(Path(folder) / crossing.file, given)
        expected = {**oracle_of(crossing).weights(), **constants_in(crossing)}
        for name, tensor in model.state_dict().items():
            name = "embed.weight" if name == "head.weight" else name
            if not same(local(tensor), expected[name][boxes.get(name, ...)]):
                found.append(f"{crossing}, rank {rank}, weights alone: {name}")
    return found
