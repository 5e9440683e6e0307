from __future__ import annotations

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import layerwise
from tests.ranks import raised, run_ranks
from tests.worlds import Net, hash_tensors, net_loss


def wrapped() -> tuple[layerwise.DataParallel, Net]:
    torch.manual_seed(3)
    module = Net()
    return layerwise.DataParallel(module), module


def test_forward_is_the_modules_own() -> None:
    model, module = wrapped()
    x = torch.ones(2, 6)
    assert torch.equal(model(x), module(x))


def test_gradients_go_to_buckets_and_grad_stays_none() -> None:
    model, module = wrapped()
    net_loss(model, 0, 0).backward()
    assert all(param.grad is None for param in module.parameters())
    expected = Net()
    expected.load_state_dict(module.state_dict())
    net_loss(expected, 0, 0).backward()
    for fqn, param in expected.named_parameters():
        assert torch.equal(model.engine.storage.grad_view(fqn), param.grad), fqn


def test_no_sync_ends_with_its_block_even_when_that_fails_or_is_nested() -> None:
    model, _ = wrapped()
    try:
        with model.no_sync(), model.no_sync():
            assert not model.engine.reducer.sync
            raise FloatingPointError
    except FloatingPointError:
        pass
    assert model.engine.reducer.sync


def test_the_plan_explains_itself() -> None:
    model, _ = wrapped()
    assert "Linear" in model.plan.route("shared.weight").reason
    assert model.plan.describe().startswith(f"plan {model.plan.digest[:12]}")


def test_the_modules_own_state_dict_has_no_prefix() -> None:
    model, module = wrapped()
    assert set(model.module.state_dict()) == {fqn for fqn, _ in module.named_parameters()}


class Odd(nn.Module):
    """Buffers of every kind that a backend may not be able to send, and a frozen weight."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        for name, dtype in {
            "quantised": torch.float8_e4m3fn,
            "short": torch.int16,
            "mask": torch.bool,
            "wide": torch.float64,
        }.items():
            self.register_buffer(name, torch.full((3,), rank == 0).to(dtype))
        self.register_buffer("strided", torch.arange(6.0).reshape(2, 3).T * (rank + 1))
        self.register_buffer("nothing", torch.zeros(0))


def start_apart(rank: int, world: int) -> tuple[str, list[Tensor]]:
    torch.manual_seed(rank)
    module = Odd(rank)
    layerwise.DataParallel(module)
    return hash_tensors(module.state_dict().values()), [module.mask, module.strided]


def test_all_ranks_start_from_the_first_ones_weights_frozen_weights_and_buffers() -> None:
    answers = run_ranks(3, start_apart)
    assert len({digest for digest, _ in answers}) == 1
    mask, strided = answers[2][1]
    assert mask.all()
    assert torch.equal(strided, torch.arange(6.0).reshape(2, 3).T)


def test_a_model_with_little_under_the_matrix_rule_is_announced_by_name() -> None:
    module = nn.Sequential(nn.Embedding(500, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"only .* under the matrix rule\. The largest that are not: '0\.weight'"):
        layerwise.DataParallel(module)


def test_strict_routing_refuses_what_only_a_fallback_explains() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    module.odd = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(ValueError, match="strict routing: 1 param with two or more dims went by a fallback: 'odd'"):
        layerwise.DataParallel(module, strict=True)


def wrap_without_values_on_the_second_rank(rank: int, world: int) -> str:
    module = nn.Linear(4, 4, device="meta" if rank == 1 else "cpu")
    return raised(lambda: layerwise.DataParallel(module))


def test_a_model_without_values_on_one_rank_is_an_error_on_both() -> None:
    first, second = run_ranks(2, wrap_without_values_on_the_second_rank)
    assert first.startswith(
        "PlanMismatchError: rank 1 failed where others did not: ValueError: param 'bias' is on the meta"
    )
    assert second.startswith("ValueError: param 'bias' is on the meta device: it has no values.")


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_of_a_model_that_nobody_has_any_more_stays_in_memory(overlap: bool) -> None:
    module = Net()
    model = layerwise.DataParallel(module, overlap_param_gather=overlap)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    net_loss(model, 0, 0).backward()
    optimizer.step()
    kept = [
        weakref.ref(model),
        weakref.ref(model.engine.storage),
        weakref.ref(model.engine.storage.replicas[0].weights),
    ]
    del model, optimizer
    net_loss(module, 0, 1).backward()
    assert all(param.grad is not None for param in module.parameters())  # nobody takes them away any more
    del module
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def test_the_module_and_the_optimizer_do_without_the_wrapper() -> None:
    module = Net()
    optimizer = layerwise.Optimizer(
        layerwise.DataParallel(module), matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1)
    )
    net_loss(module, 0, 0).backward()
    optimizer.step()
    assert not optimizer.stats.missing


def test_pulling_one_changed_weight_leaves_the_fp32_bits_of_all_others() -> None:
    model = layerwise.DataParallel(nn.Linear(4, 4, bias=False, dtype=torch.bfloat16), overlap_param_gather=False)
    (shard,) = model.engine.storage.shards
    shard.master.add_(2.0**-20)
    before = shard.master.clone()
    model.module.weight.data[1, 2] = 3.0
    model.engine.pull_from_replicas()
    assert (shard.master != before).nonzero().tolist() == [[6]]
    assert shard.master[6] == 3.0


def test_pulling_takes_every_param_of_a_bucket_from_its_own_place() -> None:
    module = nn.ModuleList([nn.Linear(4, rows, bias=False, dtype=torch.bfloat16) for rows in (3, 5, 2)])
    model = layerwise.DataParallel(module, overlap_param_gather=False)
    (shard,) = model.engine.storage.shards
    for number, layer in enumerate(module):
        layer.weight.data.copy_(torch.arange(layer.weight.numel()).view_as(layer.weight) + 100.0 * number)
    model.engine.pull_from_replicas()
    assert len(shard.spans) == 3
    for span in shard.spans:
        written = dict(module.named_parameters())[span.fqn].detach().reshape(-1)
        assert shard.master[span.part].tolist() == written.float().tolist()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_is_refused_by_name_and_can_be_trained_without_overlap() -> None:
    module = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 2)))
    with pytest.raises(TypeError, match=r"module '1' is a torch.jit.ScriptModule.* Pass overlap_param_gather=False."):
        layerwise.DataParallel(module)
    layerwise.DataParallel(module, overlap_param_gather=False)(torch.ones(1, 4)).sum().backward()


def test_attention_that_reads_its_child_finds_it_fresh_and_takes_its_quick_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = layerwise.DataParallel(nn.MultiheadAttention(16, 2, batch_first=True), bucket_mib=0.0001)
    optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    x = torch.randn(3, 5, 16)
    model(x, x, x)[0].square().sum().backward()
    optimizer.step()
    taken: list[bool] = []
    real = torch._native_multi_head_attention
    monkeypatch.setattr(torch, "_native_multi_head_attention", lambda *given: (taken.append(True), real(*given))[1])
    model.eval()
    with torch.no_grad():
        model(x, x, x)
    assert taken == [True]


@pytest.mark.parametrize(("conv", "form"), [(nn.Conv2d, torch.channels_last), (nn.Conv3d, torch.channels_last_3d)])
def test_weights_that_lose_channels_last_are_named_and_activations_may_keep_it(
    conv: Any, form: torch.memory_format
) -> None:
    module: Any = nn.Sequential(conv(8, 16, 3), nn.ReLU(), conv(16, 8, 2)).to(memory_format=form)
    twin = copy.deepcopy(module)
    with pytest.warns(UserWarning, match="^channels_last is lost for '0.weight', '2.weight':") as caught:
        model = layerwise.DataParallel(module)
    assert len(caught) == 1
    x = torch.randn(2, 8, *(5,) * (form is torch.channels_last_3d), 5, 5).to(memory_format=form)
    assert all(param.is_contiguous() for param in module.parameters())
    result, expected = model(x), twin(x)
    # Which format a kernel chooses is torch's: the same as with weights in that format.
    assert result.is_contiguous(memory_format=form) == expected.is_contiguous(memory_format=form)
    torch.testing.assert_close(result, expected)


def test_a_module_that_nobody_wraps_is_told_the_same() -> None:
    module = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 2)).to(memory_format=torch.channels_last)
    rules: dict[str, Any] = {"matrix": layerwise.Muon(lr=0.1), "other": layerwise.AdamW(lr=0.1)}
    with pytest.warns(UserWarning, match="^channels_last is lost for '0.weight', '1.weight':") as caught:
        layerwise.Optimizer(module, **rules)
    assert "buffer" not in str(caught[0].message)


def test_plain_weights_lose_no_memory_format() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layerwise.DataParallel(nn.Sequential(nn.Conv2d(8, 16, 3), nn.Conv2d(16, 8, 1)))


def test_an_average_of_the_module_follows_training_and_has_memory_of_its_own() -> None:
    averages = []
    for overlap in (True, False):
        torch.manual_seed(3)
        model = layerwise.DataParallel(Net().bfloat16(), overlap_param_gather=overlap)
        optimizer = layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.02), other=layerwise.AdamW(lr=0.003))
        with pytest.raises(TypeError, match=r"Copy model.module, .* AveragedModel\(model.module\)"):
            AveragedModel(model)
        average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        for _ in range(3):
            model(torch.ones(2, 6, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model.module)
        averages.append(average.module)
        for ours, theirs in zip(average.module.parameters(), model.module.parameters(), strict=True):
            assert ours.untyped_storage().nbytes() == ours.nbytes
            assert not torch.equal(ours, theirs)
    for ours, theirs in zip(averages[0].parameters(), averages[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


class Viewing(nn.Module):
    """A module with buffers that are views of its param, of none, and of a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("whole", self.weight.detach())
        self.register_buffer("column", self.weight.detach()[:, 2], persistent=False)
        self.register_buffer("copied", self.weight.detach().clone())
        self.register_buffer("steady", self.fixed.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


VIEWS = r"buffers are views of params: 'whole' of 'weight', 'column' of 'weight'\. .* update them after step\(\)"


def test_buffers_that_are_views_of_params_are_named() -> None:
    with pytest.warns(UserWarning, match=VIEWS):
        model = layerwise.DataParallel(Viewing())
    layerwise.Optimizer(model, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
    with torch.no_grad():
        model.module.weight.zero_()
    assert model.module.whole.sum() == 16, "as the warning says"


def test_buffers_of_a_model_that_stays_where_it_is_stay_views() -> None:
    module = Viewing()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = layerwise.Optimizer(module, matrix=layerwise.Muon(lr=0.1), other=layerwise.AdamW(lr=0.1))
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert torch.equal(module.whole, module.weight)
    assert torch.equal(module.column, module.weight[:, 2])
