"""A dispatch mode that sees every operation of a forward on meta tensors, and keeps account of params and of their outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from layerwise.models.forward import operations as ops
from layerwise.models.forward.answers import Answers
from layerwise.models.forward.features import Features
from layerwise.models.forward.labels import NONE, Labels, LabelsBySource, constant_along
from layerwise.models.forward.lanes import Lanes
from layerwise.models.forward.products import along_axis, outputs_of_convolution, outputs_of_product
from layerwise.models.forward.weights import Weights, storage_of

_MOST_SOURCES = 2
"""A sum of more products than this is a stream, whose features are all alike."""


class _Call(NamedTuple):
    """One operation: what was called, with what, and what it returned."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    ins: Sequence[Tensor]
    outs: Sequence[Tensor]


class Follower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a forward. Params and activations are meta tensors; what else there is may have values."""

    def __init__(self, params: Mapping[str, Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = Weights(params)
        self.features = Features()
        self.answers = Answers()
        self.labels = Labels(self.features.halves)
        self._lanes = Lanes(self.features)
        self._shapes = {fqn: tuple(param.shape) for fqn, param in params.items()}
        self.looked_up: set[str] = set()
        self.other_uses: dict[str, Counter[str]] = {}
        """What is done with params that is no product, by operation."""
        self.convolutions: dict[str, str] = {}
        """Of convolutions: "plain", "grouped", "input"."""
        self.lost: dict[str, str] = {}
        """Products with params in an order that cannot be told."""
        self._step = 0
        self._live: set[int] = set()
        """Storages that depend on the model's inputs and params, unlike masks, positions and rotations."""
        self._raw: set[int] = set()
        """Storages with the model's inputs, before any product."""
        self._kept: list[Tensor] = []
        self._real: dict[int, Tensor] = {}
        """Values of meta tensors that had some, by storage."""
        self._ranked: dict[int, tuple[float, list[int]]] = {}
        """Storages that say which outputs of these sources are the largest, with how many elements say all of it: who reads
        fewer lets outputs compete."""
        for tensor in inputs:
            if tensor.dtype.is_floating_point:
                self.mark_live(tensor)
                self._raw.add(storage_of(tensor))

    def mark_live(self, tensor: Tensor) -> None:
        """It depends on what the model is given."""
        if storage_of(tensor) not in self._live:
            self._live.add(storage_of(tensor))
            self._kept.append(tensor)

    def mark_outputs(self, outputs: Iterable[Tensor]) -> None:
        """These are what the model returns: products that are still in them, and were read by nothing else, are heads."""
        returned = [item for tensor in outputs for item in self.labels.of(tensor).items()]
        unread = {source for source, _ in returned if not self.features.sources[source].has_ends}
        for source, labels in returned:
            if source not in unread:
                self.features.end(source, labels, "output")
            elif bool((labels >= 0).any()):
                self.features.sources[source].is_output = True

    # -- one operation -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        is_answered, answer = self.answers.to(name, args, kwargs)
        if is_answered:
            self._ask(name, args)
            return answer
        args = self.answers.fitted(name, args)
        args, kwargs = self._all_meta(name, args, kwargs)
        out = func(*args, **kwargs)
        self._step += 1
        outs = [found for found in tree_leaves(out) if isinstance(found, Tensor)]
        ins = [found for found in tree_leaves((args, kwargs)) if isinstance(found, Tensor)]
        if outs and ins and name not in ops.NEITHER:
            self._follow(_Call(func, name, args, kwargs, ins, outs))
        return out

    def _all_meta(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        """Real tensors beside meta ones lose their values: nothing computes with both."""
        tensors = [found for found in tree_leaves((args, kwargs)) if isinstance(found, Tensor)]
        if not any(found.is_meta for found in tensors) or all(found.is_meta for found in tensors):
            return args, kwargs

        def bare(found: object) -> object:
            if not isinstance(found, Tensor) or found.is_meta or (found.dim() == 0 and name != "embedding"):
                return found
            made = torch.empty_strided(found.shape, found.stride(), dtype=found.dtype, device="meta")
            self._real[storage_of(made)] = found
            self._kept.append(made)
            for mark in (self._live, self._raw):
                if storage_of(found) in mark:
                    mark.add(storage_of(made))
            return made

        if name == "copy_" and not args[0].is_meta:  # a real tensor is overwritten with something unknown
            return [args[0], torch.zeros_like(args[0]), *args[2:]], kwargs
        args, kwargs = tree_map(bare, (args, kwargs))
        if "device" in kwargs and kwargs["device"] is not None:
            kwargs["device"] = torch.device("meta")
        return args, kwargs

    def _follow(self, call: _Call) -> None:
        held = {storage_of(tensor) for tensor in call.ins}
        self._compete(call.ins)
        is_view = not call.name.endswith("_") and all(storage_of(out) in held for out in call.outs)
        if is_view:
            return
        is_product = call.name in ops.PRODUCTS or call.name in ops.GROUPED_PRODUCTS or "convolution" in call.name
        self._pass_on(call.ins, call.outs, is_product=is_product or call.name in ops.LOOKUPS)
        handler = self._handler(call.func, call.name)
        if handler is not None:
            handler(call)
            return
        for tensor in call.ins:
            self._used(tensor, call.name)
        labelled = [(place, found) for place, tensor in enumerate(call.ins) if (found := self.labels.of(tensor))]
        for place, found in labelled:
            self._lose(found, call.name, place)

    def _compete(self, tensors: Sequence[Tensor]) -> None:
        """Who reads which outputs are the largest, but not the order of all of them, chooses."""
        for tensor in tensors:
            count, sources = self._ranked.get(storage_of(tensor), (0, []))
            if tensor.numel() < count:
                for source in sources:
                    self.features.sources[source].is_router = True

    def _handler(self, func: Any, name: str) -> Callable[[_Call], None] | None:
        if name in ops.PRODUCTS:
            return self._product
        if name in ops.GROUPED_PRODUCTS:
            return self._grouped_product
        if name in ("convolution", "_convolution", "mkldnn_convolution", "cudnn_convolution"):
            return self._convolution
        if name in ops.LOOKUPS:
            return self._look_up
        if ops.is_attention(name) or name in ops.ENDS:
            return self._read
        if name in _BY_NAME:
            handler: Callable[[_Call], None] = getattr(self, _BY_NAME[name])
            return handler
        if ops.is_upsampling(name):
            return self._per_channel
        if torch.Tag.pointwise in func.tags or name.removesuffix("_") in ops.IN_PLACE_ORDER:
            return self._elementwise
        return None

    def _pass_on(self, ins: Sequence[Tensor], outs: Sequence[Tensor], *, is_product: bool) -> None:
        is_of_params = is_product and any(self.weights.holds(tensor) for tensor in ins)
        if is_of_params or any(storage_of(tensor) in self._live for tensor in ins):
            for out in outs:
                self.mark_live(out)
        if is_product:
            return
        self._lanes.pass_on_gates(ins, outs)
        if any(storage_of(tensor) in self._raw for tensor in ins):
            self._raw.update(storage_of(out) for out in outs)

    def _is_live(self, tensor: object) -> bool:
        return isinstance(tensor, Tensor) and storage_of(tensor) in self._live

    # -- what may become of labels -----------------------------------------------------------------

    def _end(self, labels: LabelsBySource, place: object) -> None:
        for source, found in labels.items():
            self.features.end(source, found, (self._step, place))

    def _lose(self, labels: LabelsBySource, name: str, place: int) -> None:
        """They went into something that is not known. Of a stream nothing more is to be known."""
        for source, found in labels.items():
            self.features.end(source, found, (self._step, place))
            if not self.features.sources[source].is_joined:
                self.features.sources[source].not_followed = self.features.sources[source].not_followed or name

    def _used(self, tensor: Tensor, name: str) -> None:
        for fqn in self.weights.names(tensor):
            self.other_uses.setdefault(fqn, Counter())[name] += 1

    def _ask(self, name: str, args: Sequence[Any]) -> None:
        """Values that a forward asks for end there, as far as anybody can see."""
        for place, tensor in enumerate(found for found in tree_leaves(args) if isinstance(found, Tensor)):
            self._end(self.labels.of(tensor), (name, place))
            self._used(tensor, name)

    # -- products ----------------------------------------------------------------------------------

    def _product(self, call: _Call) -> None:
        left, right = (call.args[place] for place in ops.PRODUCTS[call.name])
        for place, tensor in ((0, left), (1, right)):
            self._end(self.labels.of(tensor), place)
        labels: LabelsBySource = {}
        if ops.PRODUCTS[call.name][0] == 1:  # something is added
            self._used(call.args[0], "bias")
            if not self.weights.holds(call.args[0]):
                self._end(self.labels.of(call.args[0]), 2)
        if self.weights.holds(right):
            lengths = self._lanes.runs(left)
            if lengths:
                self._in_lanes(right, lengths, call.outs[0])
            else:
                labels = self._labelled(right, call.outs[0], is_right=True)
            if any(self.features.sources[source].is_stack for source in labels):
                self._lanes.meet_stack(left)
            self._used(left, "input of a product")
        elif self.weights.holds(left):
            labels = self._labelled(left, call.outs[0], is_right=False)
        else:
            self._lanes.gate_as_product(left, right, call.outs[0])
        self.labels.put(call.outs[0], labels)

    def _labelled(self, weight: Tensor, out: Tensor, *, is_right: bool) -> LabelsBySource:
        if out.numel() == 0:  # data decide which entry gets how much, and this one got nothing
            return {}
        found = outputs_of_product(self.weights, self.features, weight, out, is_right=is_right)
        if found is None:
            for fqn in self.weights.names(weight):
                self.lost[fqn] = "it is multiplied in an order that cannot be told"
            return {}
        if not found:
            self._used(weight, "vector product")
        for source in found:
            self._lanes.begin(out, {source: found[source]}, self._shapes[self.features.sources[source].fqn])
        return found

    def _in_lanes(self, weight: Tensor, lengths: Sequence[int], out: Tensor) -> None:
        """Inputs of experts side by side: the product is the sum of one for each of them."""
        start = 0
        for length in lengths:
            labels = self._labelled(weight.narrow(-2, start, length), out, is_right=True)
            start += length
            self._end(labels, "stream")
            for source in labels:
                self.features.sources[source].is_joined = True

    def _grouped_product(self, call: _Call) -> None:
        """Rows in groups, each with an entry of a stack: any entry will do for the labels."""
        rows, weight = call.args[0], call.args[1]
        self._end(self.labels.of(rows), 0)
        if self.weights.holds(weight) and weight.dim() == 3 and call.outs[0].dim() == 2:
            self.answers.count += 1
            self.labels.put(call.outs[0], self._labelled(weight[0], call.outs[0], is_right=True))
        else:
            self._end(self.labels.of(weight), 1)

    def _convolution(self, call: _Call) -> None:
        images, weight, groups, out = call.args[0], call.args[1], call.args[8], call.outs[0]
        is_transposed = bool(call.args[6])
        labels = self.labels.of(images)
        channels = images.shape[1]
        for fqn in self.weights.names(weight):
            one_channel = min(weight.shape[:2]) == 1
            kind = "grouped" if groups > 1 else "input" if one_channel or storage_of(images) in self._raw else "plain"
            self.convolutions[fqn] = kind
        if isinstance(call.args[2], Tensor):
            self._used(call.args[2], "bias")
        if groups > 1 and groups == channels and out.shape[1] % channels == 0:
            self._channelwise(labels, images, out, times=out.shape[1] // channels)
            return
        self._end(labels, 0)
        found = None
        if self.weights.holds(weight) and groups == 1:
            found = outputs_of_convolution(self.weights, self.features, weight, out, is_transposed=is_transposed)
            if found is None:
                for fqn in self.weights.names(weight):
                    self.lost[fqn] = "it is multiplied in an order that cannot be told"
        self.labels.put(out, found or {})

    def _look_up(self, call: _Call) -> None:
        self.looked_up.update(self.weights.names(call.args[0]))

    def _read(self, call: _Call) -> None:
        for place, tensor in enumerate(call.ins):
            self._end(self.labels.of(tensor), place)
            self._used(tensor, call.name)

    # -- what moves or changes values one by one ---------------------------------------------------

    def _elementwise(self, call: _Call) -> None:
        out = call.outs[0]
        if call.name.removesuffix("_") == "mul":
            self._lanes.gate(call.ins, out)
        self._lanes.carry(call.ins, out)
        held = [tensor for tensor in call.ins if self.weights.holds(tensor)]
        if held and not any(self._is_live(tensor) for tensor in call.ins):
            self._of_params(call.name, held, out)
            return
        for tensor in held:
            self._used(tensor, call.name)
        labelled = [
            (place, tensor, found) for place, tensor in enumerate(call.ins) if (found := self.labels.of(tensor))
        ]
        if call.name.removesuffix("_") == "masked_fill":
            labelled = [item for item in labelled if item[0] != 1]
        if not labelled:
            if call.name.endswith("_"):
                self.labels.put(out, {})
            return
        if call.name == "_softmax" and not all(
            constant_along(labels, (call.args[1],)) for labels in labelled[0][2].values()
        ):
            self._lanes.mark_gates(out)
        spread = [item for item in labelled if item[1].numel() != out.numel()]
        full = [item for item in labelled if item[1].numel() == out.numel()]
        for place, _, found in spread:  # a gain of something larger, no part of it
            self._end(found, place)
        if not full:
            return
        others = [tensor for tensor in call.ins if self._is_live(tensor) and tensor.numel() == out.numel()]
        if len(others) == 1 or self._same(full, out):
            self.labels.put(out, _spread(full[0][2], out))
        elif call.name.removesuffix("_") in ops.SUMS or call.name.startswith(("where", "masked_scatter")):
            self._sum(full, others, out)
        else:
            for place, _, found in full:
                self._end(found, place)
            self.labels.put(out, {})

    def _same(self, full: Sequence[tuple[int, Tensor, LabelsBySource]], out: Tensor) -> bool:
        """Whether all labelled operands have the same labels, as in x * sigmoid(x), and there is no other of their size."""
        first = full[0][2]
        return len(full) > 1 and all(
            found.keys() == first.keys() and all(torch.equal(found[key], first[key]) for key in first)
            for _, tensor, found in full[1:]
        )

    def _sum(self, full: Sequence[tuple[int, Tensor, LabelsBySource]], others: Sequence[Tensor], out: Tensor) -> None:
        """Labels of a sum: of its terms, unless it is a stream that goes on from somewhere else."""
        total: dict[int, Tensor] = {}
        for _, _, found in full:
            for source, labels in found.items():
                before = total.get(source)
                labels = labels.expand(out.shape)
                if before is None:
                    total[source] = labels
                else:
                    self.features.pair(source, torch.stack([before.reshape(-1), labels.reshape(-1)], 1))
                    total[source] = torch.where(before >= 0, before, labels)
        is_stream = len(others) > len(full) or len(total) > _MOST_SOURCES * len(full)
        if is_stream or len(total) > 1:
            for source in total:
                self.features.sources[source].is_joined = True
        if is_stream:
            self._end(total, "stream")
        self.labels.put(out, {} if is_stream else total)

    def _of_params(self, name: str, held: Sequence[Tensor], out: Tensor) -> None:
        """Params alone: a weight that is cast or scaled is itself; what scales it is used."""
        weight = next((tensor for tensor in held if tensor.shape == out.shape), None)
        for tensor in held:
            if tensor is not weight:
                self._used(tensor, name)
        view = self.weights.view(weight) if weight is not None else None
        if view is not None and not self.weights.holds(out):
            self.weights.copied(out, view)
        elif weight is not None:
            self._used(weight, name)

    def _copy(self, call: _Call) -> None:
        source, out = call.args[0], call.outs[0]
        if self.weights.holds(source):
            self._of_params(call.name, [source], out)
            return
        self.labels.put(out, self.labels.of(source))
        self._lanes.carry([source], out)
        if out.is_meta and (not source.is_meta or storage_of(source) in self._real):
            self._real[storage_of(out)] = self._value(source).contiguous()
            self._kept.append(out)

    def _write(self, call: _Call) -> None:
        """`copy_`, `fill_`, `zero_`: a part of a tensor becomes something else."""
        source = call.args[1] if call.name == "copy_" else None
        if isinstance(source, Tensor):
            self._used(source, call.name)
        self.labels.put(
            call.args[0], {key: found.expand(call.args[0].shape) for key, found in self.labels.of(source).items()}
        )

    def _move(self, call: _Call) -> None:
        self._used(call.ins[0], call.name)
        found = self.labels.of(call.args[0])
        if not found:
            return
        indices = list(call.ins[1:])
        if any(tensor.is_meta and storage_of(tensor) not in self._real for tensor in indices):
            self._lose(found, call.name, 0)
            return
        rest = tree_map(self._value, list(call.args[1:]))
        self.labels.put(
            call.outs[0], {source: call.func(labels, *rest, **call.kwargs) for source, labels in found.items()}
        )

    def _value(self, found: Any) -> Any:
        """A tensor's values, where it has some."""
        if not isinstance(found, Tensor) or not found.is_meta:
            return found
        real = self._real[storage_of(found)]
        return torch.as_strided(real, found.shape, found.stride(), found.storage_offset()).cpu()

    def _join(self, call: _Call) -> None:
        """`cat` and `stack`."""
        parts: list[Tensor] = [part for part in call.args[0] if not (call.name == "cat" and part.shape == (0,))]
        dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
        if all(self.weights.holds(part) for part in parts):
            views = [self.weights.view(part) for part in parts]
            if call.name == "cat" and all(view is not None for view in views):
                self.weights.joined(call.outs[0], [view for view in views if view is not None], dim)
        for part in parts:
            if not self.weights.holds(call.outs[0]):
                self._used(part, call.name)
        labels = [self.labels.of(part) for part in parts]
        sources = dict.fromkeys(source for found in labels for source in found)
        join = torch.cat if call.name == "cat" else torch.stack
        nothing = [torch.full(part.shape, NONE, dtype=torch.int32, device="cpu") for part in parts] if sources else []
        self.labels.put(
            call.outs[0],
            {
                source: join([found.get(source, none) for found, none in zip(labels, nothing, strict=True)], dim)
                for source in sources
            },
        )

    def _pad(self, call: _Call) -> None:
        self._used(call.args[0], call.name)
        padded = {
            source: torch.constant_pad_nd(labels, call.args[1], NONE)
            for source, labels in self.labels.of(call.args[0]).items()
        }
        self.labels.put(call.outs[0], padded)

    def _norm(self, call: _Call) -> None:
        for tensor in call.ins:
            self._used(tensor, call.name)
        for fqn in self.weights.names(call.args[0]):  # a weight in place of activations
            self.lost[fqn] = "it is normalised before it is used"
        found = self.labels.of(call.args[0])
        self._end(found, 0)
        self.labels.put(call.outs[0], found)

    def _choose(self, call: _Call) -> None:
        place = ops.CHOICES[call.name]
        dim = (
            call.args[place]
            if len(call.args) > place
            else call.kwargs.get("dim", None if call.name == "argmax" else -1)
        )
        for source, labels in self.labels.of(call.args[0]).items():
            dims = tuple(range(labels.dim())) if dim is None or isinstance(dim, bool) else (dim,)
            if constant_along(labels, dims):
                continue
            for out in call.outs:
                self._lanes.mark_gates(out)
            for out in call.outs if call.name in ops.ORDERS else ():
                self._rank(out, source, out.numel())
            self.features.sources[source].is_router |= call.name not in ops.ORDERS
        self._end(self.labels.of(call.args[0]), 0)
        self._used(call.args[0], call.name)

    def _rank(self, out: Tensor, source: int, count: float) -> None:
        self._ranked.setdefault(storage_of(out), (count, []))[1].append(source)
        self._kept.append(out)

    def _reduce(self, call: _Call) -> None:
        """Over tokens, features stay what they are; over features, they end here."""
        self._used(call.args[0], call.name)
        dims = _reduced_dims(call.func, call.args, call.kwargs)
        for source, labels in self.labels.of(call.args[0]).items():
            axes = tuple(range(labels.dim())) if dims is None else tuple(dim % labels.dim() for dim in dims)
            if not constant_along(labels, axes):
                self._end({source: labels}, 0)
                if call.name in ("max", "min") and len(call.outs) == 2:
                    self._rank(call.outs[1], source, math.inf)
                continue
            for axis in axes:
                labels = labels.narrow(axis, 0, 1)
            for out in call.outs:
                if out.numel() == labels.numel():
                    self.labels.put(out, {**self.labels.of(out), source: labels.reshape(out.shape)})

    def _per_channel(self, call: _Call) -> None:
        self._used(call.args[0], call.name)
        labels = self.labels.of(call.args[0])
        times = (
            call.outs[0].shape[1] // call.args[0].shape[1] if call.outs[0].dim() > 1 and call.args[0].shape[1] else 1
        )
        self._channelwise(labels, call.args[0], call.outs[0], times=max(1, times))

    def _channelwise(self, labels: LabelsBySource, images: Tensor, out: Tensor, *, times: int) -> None:
        """Each channel of the input makes its own channels of the output."""
        carried = {}
        for source, found in labels.items():
            axis = 1 if found.dim() == out.dim() or found.dim() > 2 else 0
            others = tuple(dim for dim in range(found.dim()) if dim != axis)
            per_channel = found.amax(others) if others else found
            spread = along_axis(per_channel, found.shape, axis)
            if not bool(((found == spread) | (found == NONE)).all()):
                self._lose({source: found}, "a mix of channels", 0)
                continue
            carried[source] = along_axis(per_channel.repeat_interleave(times), out.shape, axis)
        self.labels.put(out, carried)

    def _index(self, call: _Call) -> None:
        """Advanced indexing: of a stack of weights any entry will do; of activations, along axes on which features are the
        same, or by known indices."""
        tensor = call.args[0]
        indices = (
            call.args[1]
            if call.name == "index"
            else [*(None for _ in range(call.args[1] % tensor.dim())), call.args[2]]
        )
        if self.weights.holds(tensor):
            self._entries(tensor, indices, call.outs[0])
            return
        found = self.labels.of(tensor)
        carried = {}
        axes = tuple(axis for axis, index in enumerate(indices) if index is not None)
        is_known = all(index is None or not index.is_meta or storage_of(index) in self._real for index in indices)
        for source, labels in found.items():
            if call.name == "index" and is_known:
                values: list[Any] = [None if index is None else self._value(index) for index in indices]
                carried[source] = torch.ops.aten.index(labels, values)
            elif constant_along(labels, axes):
                for axis in axes:
                    labels = labels.narrow(axis, 0, 1)
                anywhere = [
                    None if index is None else torch.zeros(index.shape, dtype=torch.long, device="cpu")
                    for index in indices
                ]
                carried[source] = (
                    torch.ops.aten.index(labels, anywhere)
                    if call.name == "index"
                    else labels.expand(call.outs[0].shape)
                )
            else:
                self._lose({source: labels}, call.name, 0)
        self.labels.put(call.outs[0], carried)

    def _entries(self, tensor: Tensor, indices: Sequence[Tensor | None], out: Tensor) -> None:
        """Rows or entries of a param that data choose: as if it were the first, for all of them."""
        view = self.weights.view(tensor)
        first = indices[0] if indices else None
        names = self.weights.names(tensor)
        if view is None or first is None or any(index is not None for index in indices[1:]) or tensor.dim() < 3:
            self.looked_up.update(names)
            return
        self.answers.count += 1
        sizes = (*first.shape, *view.sizes[1:])
        strides = (*(0 for _ in first.shape), *view.strides[1:])
        self.weights.copied(out, type(view)(view.fqn, view.offset, tuple(sizes), tuple(strides)))

    def _put(self, call: _Call) -> None:
        """Parts of one tensor are put into another, or added: a stream of many."""
        for place, tensor in enumerate(call.ins):
            self._used(tensor, call.name)
            found = self.labels.of(tensor)
            for source in found:
                self.features.sources[source].is_joined = True
            self._end(found, place)

    def _halves(self, call: _Call) -> None:
        """`glu`: one half of the features gates the other."""
        dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", -1)
        for source, labels in self.labels.of(call.args[0]).items():
            for place, half in enumerate(labels.chunk(2, dim)):
                self._end({source: half}, place)


def _spread(labels: LabelsBySource, out: Tensor) -> LabelsBySource:
    return {
        source: found.reshape(out.shape) if found.numel() == out.numel() else found for source, found in labels.items()
    }


def _reduced_dims(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The axes that a reduction is over; None for all."""
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("dim") if "dim" in names else None
    dim = kwargs.get("dim", args[place] if place is not None and place < len(args) else None)
    if dim is None or dim == []:
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


_BY_NAME = {
    **dict.fromkeys(ops.NORMS, "_norm"),
    **dict.fromkeys(ops.COPIES, "_copy"),
    **dict.fromkeys(ops.MOVES, "_move"),
    **dict.fromkeys(ops.REDUCTIONS, "_reduce"),
    **dict.fromkeys(ops.PER_CHANNEL, "_per_channel"),
    **dict.fromkeys(ops.WRITES, "_put"),
    **dict.fromkeys(ops.CHOICES, "_choose"),
    **dict.fromkeys(("cat", "stack"), "_join"),
    **dict.fromkeys(("copy_", "fill_", "zero_"), "_write"),
    **dict.fromkeys(("index", "gather"), "_index"),
    "constant_pad_nd": "_pad",
    "glu": "_halves",
}
