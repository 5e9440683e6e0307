"""What a model and its optimizer have on this rank, as boxes of whole tensors under names that belong to the model.

Shards of every kind are spans, and a span is a few boxes of its param. So flat buffers, DTensors and plain modules are listed by
the same lines, and what one of them wrote another one reads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

from layerwise.checkpoint.manifest import ITEMSIZES
from layerwise.comm.groups import Groups
from layerwise.comm.sharded import local_of
from layerwise.config.rules import RULES_BY_KIND, Rule
from layerwise.engine.engine import Engine
from layerwise.errors import CheckpointError
from layerwise.layout.shards import Ranks
from layerwise.layout.spans import Span
from layerwise.memory.shards import Shard
from layerwise.models.names import named_parameters
from layerwise.optim.optimizer import Optimizer
from layerwise.routing.geometry import Box, interval_boxes
from layerwise.routing.rules import Route
from layerwise.routing.spec import EXPERT

MODEL = "model"
STATE = "optimizer.state"
MASTER = "master"
FROZEN = "frozen"


class Place(NamedTuple):
    """Which part of a param this rank has, of how many. Ranks that have other experts of it have them one behind the other, along
    its first dim."""

    number: int
    places: int

    @classmethod
    def of(cls, groups: Groups, domain: str) -> Place:
        return cls(groups.expert_place, groups.expert_places) if domain == EXPERT else cls(0, 1)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all parts together."""
        return (shape[0] * self.places, *shape[1:]) if shape else shape

    def among_all(self, box: Box, shape: tuple[int, ...]) -> Box:
        """A box of this part, which has that shape, as one of all parts together."""
        return box.moved(self.number * shape[0]) if self.places > 1 and shape else box


class Part(NamedTuple):
    """A box of a tensor that this rank has."""

    key: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    tensor: Tensor
    """Of the box's shape: the memory itself."""
    is_mine: bool
    """Whether this rank writes it, of all that have it."""

    @property
    def dtype(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")


class ParamFacts(NamedTuple):
    """What is said of a param beside its tensors."""

    shape: list[int]
    rule: str
    """Kind of the rule that updates it; "frozen" where none does."""
    split: list[Any]
    """How it breaks into matrices, of which homes keep state; nothing where they keep none."""
    aliases: list[str]
    """Other names of it."""
    begun: int = 0
    """The step after which its optimizer state began."""


def state_key(name: str, kind: str) -> str:
    """The key of some state of a param."""
    return f"{STATE}.{name}.{kind}"


def _stepped_by(optimizer: object) -> Optimizer | None:
    """The optimizer itself, also where a framework has put its own around it."""
    if optimizer is None or isinstance(optimizer, Optimizer):
        return optimizer
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer):
        return inner
    raise TypeError(
        f"optimizer is a {type(optimizer).__module__}.{type(optimizer).__name__}: expected the layerwise.Optimizer that steps the model. "
        "Another one that belongs to the checkpoint goes into extra=."
    )


def _check_belongs(model: object, engine: Engine) -> None:
    """Raise unless a model has the params of what is trained, all of them and no others, whatever stands around either."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: expected the module that the optimizer was built with.")
    trained = {id(param) for chunk in engine.chunks for param in chunk.parameters()}
    own = {id(param): name for name, param in named_parameters(model)}
    foreign = [name for key, name in own.items() if key not in trained]
    if foreign or trained - own.keys():
        what = f"{foreign[0]!r} of it would not be in the checkpoint" if foreign else "it lacks some of its params"
        raise ValueError(
            f"model and optimizer do not belong together: the optimizer steps another model than this {type(model).__name__}, and "
            f"{what}. Pass the model that the optimizer was built with; a second model, such as an average of weights, goes into "
            "extra= or into a checkpoint of its own."
        )


@dataclass(frozen=True)
class Contents:
    """Everything that one rank has to say in a checkpoint."""

    engine: Engine
    optimizer: Optimizer | None

    @classmethod
    def of(cls, model: nn.Module | None, optimizer: Optimizer | None) -> Contents:
        """What a model and its optimizer have, or either of them."""
        stepping = _stepped_by(optimizer)
        own = getattr(model, "engine", None)
        engine = stepping.engine if stepping is not None else own
        if not isinstance(engine, Engine):
            raise TypeError(
                f"model is a {type(model).__name__} without its optimizer: expected a DataParallel, or a model and the "
                "layerwise.Optimizer that steps it."
            )
        if model is not None and own is not engine:
            _check_belongs(model, engine)
        return cls(engine, stepping)

    @property
    def groups(self) -> Groups:
        return self.engine.groups

    def make_ready(self) -> None:
        """`Engine.make_ready`."""
        self.engine.make_ready()

    def parts(self) -> Iterator[Part]:
        """Weights, what is not trained, and the optimizer's state."""
        yield from self.weights()
        yield from self.constants()
        yield from self.state()
        yield from self.home_state()

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank writes of all that, found without bringing any of it together."""
        found = sum(
            part.tensor.nbytes for part in chain(self.constants(), self.state(), self.home_state()) if part.is_mine
        )
        for shard in self.engine.storage.shards:
            weights = (part for fqn in shard.plan.fqns for part in self._of_shard(MODEL, fqn, shard, shard.master))
            found += shard.dtype.itemsize * sum(part.tensor.numel() for part in weights if part.is_mine)
        return found

    def weights(self) -> Iterator[Part]:
        """What forward reads, as far as this rank owns it."""
        for shard in self.engine.storage.shards:
            rounded = shard.rounded()
            for fqn in shard.plan.fqns:
                yield from self._of_shard(f"{MODEL}.{self.name_of(fqn)}", fqn, shard, rounded)

    def masters(self) -> Iterator[tuple[str, Part]]:
        """The truth, as far as this rank owns it, each with the name of its param."""
        for shard in self.engine.storage.shards:
            for fqn in shard.plan.fqns:
                name = self.name_of(fqn)
                for part in self._of_shard(state_key(name, MASTER), fqn, shard, shard.master):
                    yield name, part

    def state(self) -> Iterator[Part]:
        """Masters, where they are other numbers than weights, and what rules keep for every element."""
        if self.optimizer is None:
            return
        rules = self.rules
        for shard in self.engine.storage.shards:
            for fqn in shard.plan.fqns:
                name = self.name_of(fqn)
                tensors = {MASTER: shard.master} if shard.is_apart else {}
                tensors.update({kind: shard.state[kind] for kind in rules[fqn].state_names})
                for kind, flat in tensors.items():
                    yield from self._of_shard(state_key(name, kind), fqn, shard, flat)

    def home_state(self) -> Iterator[Part]:
        """What homes keep of their matrices. Of several homes all have the same."""
        if self.optimizer is None:
            return
        update, ranks = self.optimizer.stepper.update, self.engine.storage.ranks
        kept = update.home_state_by_fqn()
        for (fqn, local), home in update.at_home().items():
            tensor = kept[fqn][local]
            if not tensor.numel():
                continue
            kind, _, index = local.rpartition(".")
            number = int(index) + self._place(fqn).number * len(self.engine.plan.routes[fqn].matrices)
            key = state_key(self.name_of(fqn), f"{kind}.{number}")
            mine = home.first == ranks[self.engine.domain_of(fqn)] and self._speaks(fqn)
            yield Part(key, home.shape, Box.whole(home.shape), tensor, mine)

    def constants(self) -> Iterator[Part]:
        """Frozen params and buffers that belong to the model's state."""
        for name, tensor, box, copies in self.engine.constants_here():
            key = f"{MODEL}.{self.name_of(name)}"
            if box.numel or not tensor.numel():
                local = local_of(tensor).detach()
                # Ranks may have buffers of their own: those that belong together must come from one of them.
                writers = copies if name in self.engine.plan.table.by_name else copies[:1]
                yield self._part(key, name, tuple(tensor.shape), box, local, writers, self._rank(name))

    def buffers(self) -> Iterator[Part]:
        """Of those, what is no param."""
        params = {f"{MODEL}.{self.name_of(param.fqn)}" for param in self.engine.plan.table}
        yield from (part for part in self.constants() if part.key not in params)

    @property
    def place(self) -> list[Any]:
        """Where this rank sits in what shares out the model itself: stages, experts, and what cuts params for good."""
        return [*self.groups.place, self.engine.model_place()]

    def constant_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of those, whoever has any of them."""
        return {
            self.name_of(name): self._place(name).whole(tuple(tensor.shape))
            for name, tensor in self.engine.saved_constants().items()
        }

    def names(self) -> set[str]:
        """Every param of this rank, and every buffer that belongs to the model's state."""
        return {self.name_of(param.fqn) for param in self.engine.plan.table} | set(self.constant_shapes())

    @property
    def rules(self) -> dict[str, type[Rule]]:
        """The rule of every trainable param, where there is an optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return {fqn: RULES_BY_KIND[group["rule"]] for group in groups for fqn in group["fqns"]}

    @property
    def given_rates(self) -> dict[str, float]:
        """The lr that every param group began with, by its name."""
        return {} if self.optimizer is None else self.optimizer.given_rates

    def facts(self) -> dict[str, ParamFacts]:
        """What is said of every param of this rank."""
        rules, plan = self.rules, self.engine.plan
        found: dict[str, ParamFacts] = {}
        for param in plan.table:
            rule = rules.get(param.fqn)
            keeps = rule is not None and rule.is_matrix_rule and rule.home_state(1, 1)
            found[self.name_of(param.fqn)] = ParamFacts(
                list(self._place(param.fqn).whole(param.shape)),
                FROZEN if not param.trainable else "" if rule is None else rule.kind,
                _split_of(plan.routes[param.fqn], param.shape) if keeps else [],
                [self._plain(name) for name in (*param.aliases, *self._other_copies(param.fqn))],
                self.engine.count.begun.get(param.fqn, 0),
            )
        return found

    def name_of(self, fqn: str) -> str:
        """The name of a param in the model: that of its first copy, where pipeline stages share it."""
        copies = self._copies(fqn)
        return self._plain(fqn if copies is None else copies[min(copies)])

    def _plain(self, fqn: str) -> str:
        """Without the number of the chunk that it is in on this rank."""
        return fqn if len(self.engine.chunks) == 1 else fqn.partition(".")[2]

    def _copies(self, fqn: str) -> Mapping[int, str] | None:
        """The names of a tied weight, by stage."""
        stage = self.engine.groups.stage
        return next((names for names in self.engine.roster.copies.values() if names.get(stage) == fqn), None)

    def _other_copies(self, fqn: str) -> list[str]:
        copies = self._copies(fqn) or {}
        return [other for stage, other in sorted(copies.items()) if self._plain(other) != self.name_of(fqn)]

    def _speaks(self, fqn: str) -> bool:
        """Whether this stage is the first that has a param."""
        copies = self._copies(fqn)
        return copies is None or min(copies) == self.engine.groups.stage

    def _rank(self, fqn: str) -> int:
        return self.engine.storage.ranks[self.engine.domain_of(fqn)]

    def _place(self, fqn: str) -> Place:
        return Place.of(self.engine.groups, self.engine.domain_of(fqn))

    def _of_shard(self, key: str, fqn: str, shard: Shard, flat: Tensor) -> Iterator[Part]:
        rank, shape = self._rank(fqn), tuple(self.engine.storage.params[fqn].shape)
        if 0 in shape:  # nobody has a span of it, and it is there
            yield self._part(key, fqn, shape, Box.whole(shape), flat[:0].view(shape), (0,), rank)
        for span in shard.spans_by_fqn.get(fqn, ()):
            copies, at = shard.plan.copies(span, rank), span.shard_offset
            for box in _boxes(span, shape):
                piece = flat[at : at + box.numel].view(box.shape)
                at += box.numel
                yield self._part(key, fqn, shape, box, piece, copies, rank)

    def _part(
        self, key: str, fqn: str, shape: tuple[int, ...], box: Box, tensor: Tensor, copies: Ranks, rank: int
    ) -> Part:
        """A box of a local tensor as a box of the whole one."""
        if str(tensor.dtype).removeprefix("torch.") not in ITEMSIZES:
            raise CheckpointError(f"{key!r} has dtype {tensor.dtype}: checkpoints know {', '.join(ITEMSIZES)}.")
        place = self._place(fqn)
        box = place.among_all(box, shape)
        chosen = copies[zlib.crc32(f"{key} {box.starts}".encode()) % len(copies)]
        return Part(key, place.whole(shape), box, tensor, chosen == rank and self._speaks(fqn))


def _boxes(span: Span, shape: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of a param that a span is made of, in its order."""
    if not shape:
        yield Box.whole(shape)
        return
    if span.block is None:
        yield from interval_boxes(shape, span.start, span.stop)
        return
    zero = span.block.box.starts
    for piece in interval_boxes(span.block.box.shape, span.start, span.stop):
        yield piece.shifted_from(tuple(-start for start in zero))


def _split_of(route: Route, shape: Sequence[int]) -> list[Any]:
    """How a param breaks into matrices, or one entry of a stack: the same however many experts a rank has."""
    count = len(route.matrices)
    entries = shape[0] if len(shape) > 2 and count % shape[0] == 0 else 1
    return [
        [*matrix.logical_shape, list(matrix.box.starts), list(matrix.box.shape)]
        for matrix in route.matrices[: count // entries]
    ]
