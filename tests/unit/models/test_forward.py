"""Following a forward: odd ways to fuse, store and use weights, each found without a name to go by."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.models.forward.trace import trace
from layerwise.routing.readings import Role
from layerwise.routing.split import Split, interleaved_rows, per_column_head, row_blocks, stack, transposed, whole

D, H, K = 12, 3, 4
"""Width, heads, size of a head."""
X = torch.zeros(2, 5, D)


class Uses(nn.Module):
    """A module of params and a function of them."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        self._function = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, **dict(self.named_parameters(recurse=False)))


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, K)).transpose(1, 2)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = (query @ key.transpose(-1, -2)).softmax(-1)
    return (scores @ value).transpose(1, 2).flatten(2)


def blocks(x: Tensor, w: Tensor) -> Tensor:
    return attend(*map(heads, F.linear(x, w).chunk(3, -1)))


def by_head(x: Tensor, w: Tensor) -> Tensor:
    return attend(*F.linear(x, w).unflatten(-1, (H, 3 * K)).transpose(1, 2).chunk(3, -1))


def by_group(x: Tensor, w: Tensor) -> Tensor:
    """Two queries for each of three keys and values."""
    groups = F.linear(x, w).unflatten(-1, (H, 4, K))
    query, key, value = groups[..., :2, :], groups[..., 2:3, :], groups[..., 3:, :]
    key, value = (part.expand(-1, -1, -1, 2, -1).flatten(2, 3).transpose(1, 2) for part in (key, value))
    return attend(query.flatten(2, 3).transpose(1, 2), key, value)


def rotated(x: Tensor, w: Tensor) -> Tensor:
    """Rotary positions go between the halves of a head, and leave one matrix of each."""
    query, key, value = map(heads, F.linear(x, w).chunk(3, -1))
    angles = torch.zeros(5, K)

    def rotate(part: Tensor) -> Tensor:
        first, second = part.chunk(2, -1)
        return part * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    return attend(rotate(query), rotate(key), value)


def complex_rotated(x: Tensor, w: Tensor) -> Tensor:
    query, key, value = map(heads, F.linear(x, w).chunk(3, -1))
    turn = torch.polar(torch.ones(5, K // 2), torch.zeros(5, K // 2))

    def rotate(part: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(part.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)

    return attend(rotate(query), rotate(key), value)


def partly_complex(x: Tensor, w: Tensor) -> Tensor:
    """Half of each head is rotated as complex numbers, in place of all of it."""
    query, key, value = map(heads, F.linear(x, w).chunk(3, -1))
    turn = torch.polar(torch.ones(5, K // 4), torch.zeros(5, K // 4))

    def rotate(part: Tensor) -> Tensor:
        plain, turned = part.chunk(2, -1)
        turned = torch.view_as_real(torch.view_as_complex(turned.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(
            -2
        )
        return torch.cat((plain, turned), -1)

    return attend(rotate(query), rotate(key), value.div_(2))


def gated_halves(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def taking_turns(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    both = F.linear(x, w)
    return F.linear(F.silu(both[..., ::2]) * both[..., 1::2], down)


def glu(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.glu(F.linear(x, w)), down)


def stored_transposed(x: Tensor, w: Tensor) -> Tensor:
    gate, up = (x @ w).chunk(2, -1)
    return gate.sigmoid() * up


def weight_in_chunks(x: Tensor, w: Tensor) -> Tensor:
    return attend(*(heads(F.linear(x, part)) for part in w.chunk(3)))


def chunks_joined(x: Tensor, w: Tensor) -> Tensor:
    """As DeBERTa does it: rows of each head are taken apart and put together before the product."""
    rows = w.chunk(3 * H)
    return attend(*(heads(F.linear(x, torch.cat([rows[3 * n + part] for n in range(H)]))) for part in range(3)))


def columns_in_chunks(x: Tensor, w: Tensor) -> Tensor:
    """Two inputs of different size, and a block of columns for each."""
    left, right = w[:, :D], w[:, D:]
    return F.linear(x, left).relu() * F.linear(x[..., :4], right)


def column_heads(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("bthk,ohk->btho", x.unflatten(-1, (H, K)), w.unflatten(-1, (H, K))).softmax(2)


def experts(x: Tensor, w: Tensor, down: Tensor) -> Tensor:
    gate, up = (x.flatten(0, 1).expand(5, -1, -1) @ w.transpose(1, 2)).chunk(2, -1)
    return ((gate.relu() * up) @ down.transpose(1, 2)).sum(0)


def transposed_experts(x: Tensor, w: Tensor) -> Tensor:
    both = x.flatten(0, 1).expand(4, -1, -1) @ w
    return both[..., ::2] * both[..., 1::2].sigmoid()


def chosen_experts(x: Tensor, router: Tensor, w: Tensor) -> Tensor:
    """A loop over the experts that were chosen, which depends on values."""
    tokens = x.flatten(0, 1)
    best = F.linear(tokens, router).softmax(-1).topk(2).indices
    total = torch.zeros_like(tokens)
    for expert in best.unique():
        rows = (best == expert).any(-1).nonzero().squeeze(-1)
        gate, up = F.linear(tokens[rows], w[expert]).chunk(2, -1)
        total.index_add_(0, rows, gate.relu() * up)
    return total


def gates_of(x: Tensor, router: Tensor) -> Tensor:
    scores = F.linear(x, router).softmax(-1)
    best, places = scores.topk(2)
    return torch.zeros_like(scores).scatter(-1, places, best)


def all_experts_at_once(x: Tensor, router: Tensor, w: Tensor, down: Tensor) -> Tensor:
    """One product with all experts, whose outputs are gated and summed by the next."""
    hidden = torch.einsum("btd,efd->btef", x, w).relu()
    return torch.einsum("btef,efd->btd", hidden * gates_of(x, router).unsqueeze(-1), down)


def gated_experts_at_once(x: Tensor, router: Tensor, w: Tensor, down: Tensor) -> Tensor:
    """Stored (in, out), each with gate and up, and the gates of the router in the same sum."""
    gate, up = torch.einsum("btd,edf->btef", x, w).chunk(2, -1)
    return torch.einsum("bte,btef,efd->btd", gates_of(x, router), gate.relu() * up, down)


def experts_summed_last(x: Tensor, router: Tensor, w: Tensor, down: Tensor) -> Tensor:
    """No top-k: shares of all experts."""
    hidden = torch.einsum("btd,edf->btef", x, w).relu()
    return torch.einsum("bted,bte->btd", torch.einsum("btef,efd->bted", hidden, down), F.linear(x, router).softmax(-1))


def heads_at_once(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Heads are no experts: what they make is not chosen from."""
    query, key, value = (torch.einsum("btd,hkd->bhtk", x, part) for part in w.chunk(3, 1))
    return torch.einsum("bhtk,hkd->btd", (query @ key.transpose(-1, -2)).softmax(-1) @ value, out).relu()


def rows_of_experts(x: Tensor, w: Tensor) -> Tensor:
    """Experts one below the other in a weight of two dims."""
    total = torch.zeros_like(x)
    for part in w.view(4, D, D):
        total = total + F.linear(x, part)
    return total


def three_dims_as_one(x: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("btd,hkd->bthk", x, w).flatten(2).relu()


def looked_up_and_multiplied(x: Tensor, w: Tensor) -> Tensor:
    tokens = F.embedding(torch.arange(5), w)
    return (x + tokens) @ w.T


def both_ways(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.linear(x, w).relu(), w.T).relu()


def modulated(x: Tensor, w: Tensor, mix: Tensor) -> Tensor:
    """Shift, scale and gate of a norm, for each token."""
    shift, scale, gate = F.linear(F.silu(x), w).chunk(3, -1)
    return x + gate * F.linear(F.layer_norm(x, (D,)) * (1 + scale) + shift, mix)


def scaled_weight(x: Tensor, w: Tensor, gains: Tensor) -> Tensor:
    """A weight that is cast and scaled before it is used."""
    query, key = F.linear(x.double(), (w * gains).double()).chunk(2, -1)
    return query @ key.transpose(-1, -2)


def pooled_then_split(x: Tensor, w: Tensor) -> Tensor:
    """A mean over tokens leaves features what they are."""
    left, right = F.linear(x, w).mean(1).chunk(2, -1)
    return left * right.sigmoid()


def conv_then_split(x: Tensor, w: Tensor, taps: Tensor) -> Tensor:
    """A depthwise convolution over what is fused."""
    inner, gate = F.linear(x, w).chunk(2, -1)
    inner = F.conv1d(inner.transpose(1, 2), taps, padding=1, groups=D).transpose(1, 2)
    return F.silu(inner) * gate


ODD: list[tuple[Callable[..., Tensor], dict[str, tuple[int, ...]], dict[str, Split | Role]]] = [
    (blocks, {"w": (36, D)}, {"w": row_blocks((36, D), (12, 12, 12))}),
    (by_head, {"w": (36, D)}, {"w": interleaved_rows((36, D), H, (K, K, K))}),
    (by_group, {"w": (48, D)}, {"w": interleaved_rows((48, D), H, (2 * K, K, K))}),
    (rotated, {"w": (36, D)}, {"w": row_blocks((36, D), (12, 12, 12))}),
    (complex_rotated, {"w": (36, D)}, {"w": row_blocks((36, D), (12, 12, 12))}),
    (partly_complex, {"w": (36, D)}, {"w": row_blocks((36, D), (12, 12, 12))}),
    (gated_halves, {"w": (40, D), "down": (D, 20)}, {"w": row_blocks((40, D), (20, 20))}),
    (taking_turns, {"w": (40, D), "down": (D, 20)}, {"w": Split(grid=(20, 2, D), roles="rac")}),
    (glu, {"w": (40, D), "down": (D, 20)}, {"w": row_blocks((40, D), (20, 20))}),
    (stored_transposed, {"w": (D, 14)}, {"w": transposed((D, 14), (7, 7))}),
    (weight_in_chunks, {"w": (36, D)}, {"w": row_blocks((36, D), (12, 12, 12))}),
    (chunks_joined, {"w": (36, D)}, {"w": interleaved_rows((36, D), H, (K, K, K))}),
    (columns_in_chunks, {"w": (9, 16)}, {"w": Split(grid=(9, 16), roles="rc", block_axis=1, blocks=(12, 4))}),
    (column_heads, {"w": (9, D)}, {"w": per_column_head((9, D), H)}),
    (experts, {"w": (5, 14, D), "down": (5, D, 7)}, {"w": stack((5, 14, D), sizes=(7, 7)), "down": stack((5, D, 7))}),
    (transposed_experts, {"w": (4, D, 14)}, {"w": Split(grid=(4, D, 7, 2), roles="acra")}),
    (
        chosen_experts,
        {"router": (6, D), "w": (6, 24, D)},
        {"router": Role.ROUTER, "w": stack((6, 24, D), sizes=(12, 12))},
    ),
    (
        all_experts_at_once,
        {"router": (5, D), "w": (5, 7, D), "down": (5, 7, D)},
        {"router": Role.ROUTER, "w": stack((5, 7, D)), "down": stack((5, 7, D), transposed=True)},
    ),
    (
        gated_experts_at_once,
        {"router": (5, D), "w": (5, D, 14), "down": (5, 7, D)},
        {"w": stack((5, D, 14), transposed=True, sizes=(7, 7)), "down": stack((5, 7, D), transposed=True)},
    ),
    (
        experts_summed_last,
        {"router": (5, D), "w": (5, D, 7), "down": (5, 7, D)},
        {"w": stack((5, D, 7), transposed=True), "down": stack((5, 7, D), transposed=True)},
    ),
    (
        heads_at_once,
        {"w": (H, 3 * K, D), "out": (H, K, D)},
        {"w": interleaved_rows((36, D), H, (K, K, K)), "out": transposed((D, D))},
    ),
    (rows_of_experts, {"w": (48, D)}, {"w": Split(grid=(4, D, D), roles="arc")}),
    (three_dims_as_one, {"w": (H, K, D)}, {"w": whole((H * K, D))}),
    (looked_up_and_multiplied, {"w": (5, D)}, {"w": Role.TABLE}),
    (both_ways, {"w": (7, D)}, {"w": whole((7, D))}),
    (modulated, {"w": (36, D), "mix": (D, D)}, {"w": row_blocks((36, D), (12, 12, 12)), "mix": whole((D, D))}),
    (scaled_weight, {"w": (24, D), "gains": (24, 1)}, {"w": row_blocks((24, D), (12, 12)), "gains": Role.ADDED}),
    (pooled_then_split, {"w": (14, D)}, {"w": row_blocks((14, D), (7, 7))}),
    (conv_then_split, {"w": (24, D), "taps": (D, 1, 3)}, {"w": row_blocks((24, D), (12, 12)), "taps": Role.GROUPED}),
]


def elements(split: Split) -> set[frozenset[int]]:
    """Which elements make up each matrix."""
    grid = torch.arange(int(torch.tensor(split.grid).prod())).reshape(split.grid)
    return {
        frozenset(
            grid[tuple(slice(a, b) for a, b in zip(part.box.starts, part.box.stops, strict=True))].flatten().tolist()
        )
        for part in split.parts()
    }


@pytest.mark.parametrize(("forward", "shapes", "expected"), ODD, ids=[forward.__name__ for forward, *_ in ODD])
def test_an_odd_module_is_read_as_it_is_used(
    forward: Callable[..., Tensor], shapes: dict[str, tuple[int, ...]], expected: dict[str, Split | Role]
) -> None:
    found = trace(Uses(forward, **shapes), (X,))
    assert found.problem == ""
    for name, wanted in expected.items():
        reading = found.readings[name]
        if isinstance(wanted, Role):
            assert reading.role is wanted
            continue
        assert reading.role in (Role.MAP, Role.HEAD), reading
        assert reading.split is not None
        assert reading.split.transposed == wanted.transposed
        assert elements(reading.split) == elements(wanted)


def test_a_module_keeps_its_memory_its_mode_and_its_forward() -> None:
    layer = nn.TransformerEncoderLayer(D, H, 20, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).train()
    before = {name: param.data_ptr() for name, param in model.named_parameters()}
    found = trace(model, (X,))
    assert {name: param.data_ptr() for name, param in model.named_parameters()} == before
    assert all(module.training for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())
    for number in range(3):  # one of them was followed, the others are like it
        reading = found.readings[f"layers.{number}.self_attn.in_proj_weight"]
        assert reading.split == row_blocks((36, D), (12, 12, 12))


class Cache:
    """No module, and keeps tables."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, torch.Tensor]] = {"cos": {}}
        self.last: torch.Tensor | None = None


class Remembering(nn.Module):
    """Keeps a table that it makes when it is first asked, and other things that forwards keep."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 20), nn.Linear(20, D)
        self.table: torch.Tensor | None = None
        self.mean, self.count = torch.full((D,), 5.0), torch.zeros(1, dtype=torch.long)
        self.register_buffer("steps", torch.zeros(1))
        self.lengths: list[int] = [1]
        self.by_length: dict[int, torch.Tensor] = {1: torch.ones(1)}
        self.calls = 0
        self.cache = Cache()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1], device=x.device).float()[:, None].cos()
            self.extra = self.down(self.up(x))
        out = x * self.table + self.down(self.up(x).relu())
        self.mean.copy_(out.mean((0, 1)))
        self.count += 1
        self.steps += 1
        self.by_length[1].mul_(3)
        mask.masked_fill_(mask > 0, 9)
        self.lengths.append(x.shape[1])
        self.by_length[x.shape[1]] = self.table
        self.calls += 1
        self.cache.last = out
        return out + self.cache.tables["cos"].setdefault(x.shape[1], torch.ones(x.shape[1], 1, device=x.device))


def test_a_module_keeps_what_its_forward_remembers() -> None:
    model, mask = Remembering(), torch.ones(3, dtype=torch.long)
    names = set(vars(model))
    found = trace(model, (X, mask))
    assert found.problem == ""
    assert found.readings["up.weight"].role is Role.MAP
    assert set(vars(model)) == names
    assert (model.table, model.lengths, list(model.by_length), model.calls) == (None, [1], [1], 0)
    assert (model.cache.tables, model.cache.last) == ({"cos": {}}, None)
    assert model.mean.tolist() == [5.0] * D
    assert model.by_length[1].tolist() == [1.0]
    assert model.count.tolist() == [0]
    assert mask.tolist() == [1, 1, 1]
    assert model.steps.tolist() == [0.0]
    assert model(X, mask).isfinite().all()  # with values, and a table of its own
    assert model.lengths == [1, X.shape[1]]


@pytest.mark.parametrize(
    ("layer", "gates"), [(nn.LSTM(D, 7, batch_first=True), 4), (nn.GRU(D, 7, batch_first=True), 3)]
)
def test_gates_of_recurrent_layers_are_seen(layer: nn.Module, gates: int) -> None:
    found = trace(layer, (X,)).readings
    assert found["weight_ih_l0"].split == row_blocks((7 * gates, D), (7,) * gates)
    assert found["weight_hh_l0"].split == row_blocks((7 * gates, 7), (7,) * gates)
    assert not layer._flat_weights[0].is_meta


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)) for _ in range(2)])
        self.last = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x.reshape(7, 7))


def test_after_a_failure_only_what_was_through_is_seen() -> None:
    found = trace(Fails(), (X,))
    assert found.problem.startswith("RuntimeError")
    assert found.readings["blocks.1.0.weight"].role is Role.MAP
    assert found.readings["last.weight"].role is Role.UNSEEN


def test_an_operation_that_is_not_known_is_no_guess() -> None:
    def through(x: Tensor, w: Tensor) -> Tensor:
        left, right = torch.fft.fft(F.linear(x, w), dim=-1).real.chunk(2, -1)
        return left * right

    reading = trace(Uses(through, w=(24, D)), (X,)).readings["w"]
    assert (reading.role, reading.family) == (Role.UNSEEN, "")
    assert "cannot be followed" in reading.why


def test_a_head_is_what_leaves_the_model_and_a_param_that_is_added_is_no_matrix() -> None:
    model = nn.Sequential(nn.Embedding(9, D), nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 9))
    found = trace(model, (torch.zeros(2, 5, dtype=torch.long),)).readings
    assert [found[f"{n}.weight"].role for n in (0, 1, 3)] == [Role.TABLE, Role.MAP, Role.HEAD]

    def positions(x: Tensor, table: Tensor) -> Tensor:
        return (x + table).relu()

    assert trace(Uses(positions, table=(5, D)), (X,)).readings["table"].role is Role.ADDED


def test_what_is_never_called_is_not_seen() -> None:
    def half(x: Tensor, used: Tensor, idle: Tensor, partly: Tensor) -> Tensor:
        return F.linear(x, used).sum(-1) + F.linear(x, partly[:3]).sum(-1)

    found = trace(Uses(half, used=(4, D), idle=(4, D), partly=(7, D)), (X,)).readings
    assert [found[name].role for name in ("used", "idle", "partly")] == [Role.MAP, Role.UNSEEN, Role.UNSEEN]


def test_a_param_without_elements_is_not_seen_and_stops_nothing() -> None:
    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Parameter(torch.zeros(1, 0, 8))
            self.proj = nn.Linear(8, 8)
            self.out = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.out(self.proj(torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], 1)).relu())
            return found

    found = trace(Registers(), (torch.zeros(2, 3, 8),))
    assert found.problem == ""
    assert found.readings["tokens"].role is Role.UNSEEN
    assert found.readings["proj.weight"].role is Role.MAP


def test_heads_whose_outputs_are_added_are_heads() -> None:
    def mean_of_two(x: Tensor, hidden: Tensor, one: Tensor, other: Tensor) -> Tensor:
        x = F.linear(x, hidden).relu()
        return (F.linear(x, one) + F.linear(x, other)) / 2

    found = trace(Uses(mean_of_two, hidden=(D, D), one=(7, D), other=(7, D)), (X,)).readings
    assert [found[name].role for name in ("hidden", "one", "other")] == [Role.MAP, Role.HEAD, Role.HEAD]


class LayerOfItsOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.back = nn.Linear(D, K), nn.Linear(K, D)

    def forward(self, x: Tensor, own: Tensor) -> Tensor:
        found: Tensor = x + self.back(self.gate(x).relu() * own)
        return found


class RowsOfLayers(nn.Module):
    """A projection that makes something for each layer, of which each reads its own."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(D, 3 * K, bias=False)
        self.layers = nn.ModuleList([LayerOfItsOwn() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        own = self.project(x).unflatten(-1, (3, K))
        for number, layer in enumerate(self.layers):
            x = layer(x, own[..., number, :])
        return x


def test_rows_that_each_layer_has_of_its_own_are_matrices_apart() -> None:
    found = trace(RowsOfLayers(), (X,)).readings
    assert found["project.weight"].split == row_blocks((3 * K, D), (K, K, K))
    assert found["layers.2.gate.weight"].split == whole((K, D))


def test_a_sort_chooses_nothing_until_somebody_reads_a_part_of_the_order() -> None:
    def ordered(x: Tensor, w: Tensor, then: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).sort(-1).values, then)

    def best(x: Tensor, w: Tensor, then: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).sort(-1, descending=True).values[..., :2], then)

    assert trace(Uses(ordered, w=(4, D), then=(3, 4)), (X,)).readings["w"].role is Role.MAP
    assert trace(Uses(best, w=(4, D), then=(3, 2)), (X,)).readings["w"].role is Role.ROUTER


def test_outputs_that_nothing_reads_leave_a_param_unseen() -> None:
    def first_three(x: Tensor, w: Tensor, then: Tensor) -> Tensor:
        return F.linear(F.linear(x, w)[..., :3], then)

    reading = trace(Uses(first_three, w=(4, D), then=(5, 3)), (X,)).readings["w"]
    assert (reading.role, reading.why) == (Role.UNSEEN, "the forward read only some of its outputs")


def test_outputs_that_are_returned_are_apart_from_those_that_are_read() -> None:
    def both(x: Tensor, w: Tensor, then: Tensor) -> tuple[Tensor, Tensor]:
        inner, out = F.linear(x, w).split((4, 3), -1)
        return F.linear(inner.relu(), then), out

    assert trace(Uses(both, w=(7, D), then=(5, 4)), (X,)).readings["w"].split == row_blocks((7, D), (4, 3))


def test_outputs_in_an_order_that_no_split_can_say_are_not_seen() -> None:
    def both(x: Tensor, w: Tensor, then: Tensor) -> Tensor:
        return F.linear(torch.einsum("btd,hdk->bthk", x, w).flatten(2).relu(), then)

    reading = trace(Uses(both, w=(H, D, K), then=(5, D)), (X,)).readings["w"]
    assert (reading.role, reading.split) == (Role.UNSEEN, None)
    assert "no split can say" in reading.why
