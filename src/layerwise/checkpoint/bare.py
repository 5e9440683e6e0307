"""A module that nobody trains here, plain or cut by torch: what a checkpoint's weights go into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from layerwise.checkpoint.contents import MODEL, ParamFacts, Part, Place
from layerwise.comm.groups import Groups, all_ranks
from layerwise.comm.sharded import groups_of, is_sharded, local_of, placements_of, reshard
from layerwise.layout.meshes import Placed, copied_on
from layerwise.models import names
from layerwise.models.names import unwrapped
from layerwise.models.table import domains_by_prefix, named_params


@dataclass(frozen=True)
class BareModule:
    """The params and buffers of a module on this rank."""

    module: nn.Module
    groups: Groups
    placed: Mapping[str, Placed]
    domain_of: Callable[[str], str]
    optimizer: None = None

    @classmethod
    def of(cls, model: nn.Module) -> BareModule:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: expected a module.")
        module = unwrapped(model)
        if isinstance(module, DistributedDataParallel):
            module = unwrapped(module.module)
        reshard((module,))
        params, domain_of = dict(named_params(module)), domains_by_prefix(module)
        if not any(map(is_sharded, params.values())):
            return cls(module, all_ranks(), {}, domain_of)
        groups, placed = placements_of(groups_of(params, None), params, domain_of)
        return cls(module, groups, placed, domain_of)

    def facts(self) -> dict[str, ParamFacts]:
        """Every param, with its other names."""
        first: dict[int, str] = {}
        found: dict[str, ParamFacts] = {}
        for name, param in names.named_parameters(self.module, remove_duplicate=False):
            known = first.setdefault(id(param), name)
            if known == name:
                found[name] = ParamFacts(list(self._whole(name, param)), "", [], [])
            else:
                found[known].aliases.append(name)
        return found

    def masters(self) -> Iterator[tuple[str, Part]]:
        """Every param: there are no others than what forward reads."""
        for name, param in named_params(self.module):
            yield from ((name, part) for part in self._parts(name, param))

    def constants(self) -> Iterator[Part]:
        for name, buffer in names.named_buffers(self.module, persistent=True):
            yield from self._parts(name, buffer)

    def constant_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._whole(name, one) for name, one in names.named_buffers(self.module, persistent=True)}

    def names(self) -> set[str]:
        return {name for name, _ in named_params(self.module)} | set(self.constant_shapes())

    def state(self) -> Iterator[Part]:
        yield from ()

    def home_state(self) -> Iterator[Part]:
        yield from ()

    def _place(self, name: str) -> Place:
        return Place.of(self.groups, self.domain_of(name))

    def _whole(self, name: str, tensor: Tensor) -> tuple[int, ...]:
        return self._place(name).whole(tuple(tensor.shape))

    def _parts(self, name: str, tensor: Tensor) -> Iterator[Part]:
        shape, domain = tuple(tensor.shape), self.groups.domains[self.domain_of(name)]
        box = self.placed.get(name, copied_on(domain.world)).box(shape, domain.rank)
        if box.numel:
            box = self._place(name).among_all(box, shape)
            yield Part(f"{MODEL}.{name}", self._whole(name, tensor), box, local_of(tensor).detach(), False)
