"""What is read off a model: heads, routers, input layers and tables, by type, sharing, shape and position."""

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from layerwise.models.table import param_table
from layerwise.routing.rules import route_params


def families(module: nn.Module) -> dict[str, str]:
    return {fqn: route.family for fqn, route in route_params(param_table(module)).items()}


def reason(module: nn.Module, fqn: str) -> str:
    return route_params(param_table(module))[fqn].reason


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.output = nn.Linear(2 * width, width, bias=False)


class Model(nn.Module):
    """Embedding, blocks, then whatever else is given."""

    def __init__(self, vocabulary: int = 50, width: int = 6, **more: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(2)])
        for name, module in more.items():
            self.add_module(name, module)


@pytest.mark.parametrize("name", ["projection", "lm_head", "decode"])
def test_a_linear_layer_onto_the_vocabulary_is_a_head_whatever_its_name(name: str) -> None:
    assert reason(Model(**{name: nn.Linear(6, 50)}), f"{name}.weight").startswith("is an output head: a linear layer")


def test_several_heads_are_all_heads() -> None:
    model = Model(first=nn.Linear(6, 50), more=nn.ModuleList([nn.Linear(6, 50) for _ in range(3)]))
    found = families(model)
    assert {found["first.weight"], *(found[f"more.{n}.weight"] for n in range(3))} == {"other"}


def test_a_head_need_not_be_the_last_layer() -> None:
    found = families(Model(decode=nn.Linear(6, 50), value=nn.Linear(6, 8)))
    assert (found["decode.weight"], found["value.weight"]) == ("other", "matrix")


def test_hidden_layers_with_as_many_rows_as_the_vocabulary_stay_matrices() -> None:
    model = Model(vocabulary=12, width=6, head=nn.Linear(6, 12))
    found = families(model)
    assert found["head.weight"] == "other"
    assert found["blocks.0.up.weight"] == found["blocks.1.up.weight"] == "matrix"


def test_no_head_maps_onto_positions() -> None:
    model = nn.ModuleDict({"position_embeddings": nn.Embedding(6, 6), "pooler": nn.Linear(6, 6)})
    assert families(model)["pooler.weight"] == "matrix"


def test_a_tied_head_is_an_embedding_under_both_names() -> None:
    model = Model(decode=nn.Linear(6, 50, bias=False))
    model.decode.weight = model.tokens.weight
    assert reason(model, "tokens.weight").startswith("is an embedding table (Embedding, tied to 'decode.weight')")


def test_a_layer_called_output_inside_a_block_is_no_head() -> None:
    assert families(Model())["blocks.0.output.weight"] == "matrix"


def test_the_model_may_name_its_output_embeddings() -> None:
    model = Model(decode=nn.Linear(9, 50), after=nn.Linear(6, 6))
    model.get_output_embeddings = lambda: model.decode
    assert families(model)["decode.weight"] == "other"


def test_a_linear_layer_onto_the_labels_of_the_config_is_a_head() -> None:
    model = Model(guess=nn.Linear(6, 5))
    model.config = SimpleNamespace(num_labels=5)
    assert reason(model, "guess.weight") == "is an output head: a linear layer onto the labels of the model's config"


def test_a_linear_layer_beside_as_many_experts_as_it_has_rows_is_a_router() -> None:
    moe = nn.ModuleDict({"gate": nn.Linear(6, 4), "experts": nn.ModuleList([Block(6) for _ in range(4)])})
    assert reason(moe, "gate.weight").startswith("is a router that chooses among 4 experts")
    plain = nn.ModuleDict({"gate": nn.Linear(6, 5), "experts": nn.ModuleList([Block(6) for _ in range(4)])})
    assert families(plain)["gate.weight"] == "matrix"


def test_only_the_last_layer_of_a_router_chooses() -> None:
    class TopKRouter(nn.Sequential):
        pass

    found = families(nn.ModuleDict({"choose": TopKRouter(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))}))
    assert (found["choose.0.weight"], found["choose.2.weight"]) == ("matrix", "other")


def test_convolutions_over_pixels_or_the_channels_of_the_config_are_input_layers() -> None:
    model = nn.ModuleDict(
        {"patches": nn.Conv2d(3, 8, 4, stride=4), "mel": nn.Conv1d(16, 8, 3), "next": nn.Conv1d(8, 8, 3)}
    )
    model.config = SimpleNamespace(num_mel_bins=16)
    found = families(model)
    assert (found["patches.weight"], found["mel.weight"], found["next.weight"]) == ("other", "other", "matrix")


@pytest.mark.parametrize("name", ["LlamaRMSNorm", "T5LayerNorm", "MambaRMSNormGated"])
def test_norms_of_any_library_are_known_by_their_class(name: str) -> None:
    norm = type(name, (nn.Module,), {})()
    norm.weight = nn.Parameter(nn.Linear(4, 4).weight.detach())
    assert reason(nn.ModuleDict({"n": norm}), "n.weight") == f"belongs to a normalisation layer ({name})"


def test_a_table_held_by_a_class_called_embeddings_is_no_matrix() -> None:
    embeddings = type("ViTEmbeddings", (nn.Module,), {})()
    embeddings.table = nn.Parameter(nn.Linear(4, 4).weight.detach())
    assert families(nn.ModuleDict({"e": embeddings}))["e.table"] == "other"


def both_ways(build: Callable[[], nn.Module]) -> list[tuple[nn.Module, str, str]]:
    """A module under weight_norm as torch has it now and as it had it, with the names of scale and directions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        old = torch.nn.utils.weight_norm(build())
    new = weight_norm(build())
    return [
        (new, "layer.parametrizations.weight.original0", "layer.parametrizations.weight.original1"),
        (old, "layer.weight_g", "layer.weight_v"),
    ]


@pytest.mark.parametrize("build", [lambda: nn.Linear(16, 16), lambda: nn.Conv1d(8, 16, 3), lambda: nn.Conv2d(8, 16, 3)])
def test_weight_norm_has_directions_that_are_a_matrix_and_a_scale_that_is_none(build: Callable[[], nn.Module]) -> None:
    plain = route_params(param_table(nn.ModuleDict({"layer": build()})))["layer.weight"]
    for module, scale, directions in both_ways(build):
        routes = route_params(param_table(nn.ModuleDict({"layer": module})))
        assert routes[scale].family == "other"
        assert routes[scale].reason.startswith("is the scale that weight_norm sets apart from 'layer.weight'")
        found = routes[directions]
        assert (found.family, found.reason) == (plain.family, plain.reason)
        assert [m.logical_shape for m in found.matrices] == [m.logical_shape for m in plain.matrices]


class Fused(nn.Module):
    def __init__(self, splits: bool) -> None:
        super().__init__()
        self.qkv = spectral_norm(nn.Linear(8, 24))
        self.splits = splits

    def matrix_splits(self) -> dict[str, tuple[int, ...]]:
        return {"qkv.weight": (8, 8, 8)} if self.splits else {}


def test_a_parametrized_module_is_what_it_was_before() -> None:
    model = Model(
        head=spectral_norm(nn.Linear(6, 50)),
        segments=weight_norm(nn.Embedding(2, 6)),
        depthwise=weight_norm(nn.Conv1d(8, 8, 3, groups=8)),
        fused=Fused(splits=True),
    )
    routes = route_params(param_table(model))
    original, directions = "parametrizations.weight.original", "parametrizations.weight.original1"
    assert routes[f"head.{original}"].reason == reason(Model(head=nn.Linear(6, 50)), "head.weight")
    assert routes[f"segments.{directions}"].reason.startswith("is an embedding table (Embedding)")
    assert routes[f"depthwise.{directions}"].reason.startswith("is a convolution in 8 groups")
    assert [m.logical_shape for m in routes[f"fused.qkv.{original}"].matrices] == [(8, 8)] * 3
    with pytest.raises(ValueError, match="looks fused"):
        route_params(param_table(nn.ModuleDict({"fused": Fused(splits=False)})))


class Stages(nn.Module):
    """Stages that begin with convolutions, of which the first reads pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 8, 3), nn.Conv2d(8, 8, 3)) for channels in (3, 8, 8)
        )
        self.rel_pos_bias = nn.Linear(6, 4, bias=False)
        self.char_head = nn.Linear(8, 30)
        self.ctc_head = nn.Conv1d(8, 30, 1)
        self.wide_head = nn.Conv1d(8, 30, 3)


def test_a_convolution_of_a_block_over_channels_that_only_the_input_has_is_an_input_layer() -> None:
    def model(width: int) -> nn.Module:
        blocks = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Conv1d(8, 8, 3), "read": nn.Conv1d(10, 8, 3)}) for _ in range(2)
        )
        found = nn.ModuleDict({"blocks": blocks, "fc": nn.Linear(8, width)})
        found.config = SimpleNamespace(num_mel_bins=10)
        return found

    assert families(model(12))["blocks.1.read.weight"] == "other"
    assert families(model(10))["blocks.1.read.weight"] == "matrix"  # the linear layer makes as many


def test_input_layers_heads_and_biases_are_found_where_others_put_them() -> None:
    table = param_table(Stages())
    routes = route_params(table)
    assert [param.fqn for param in table if param.reads_input] == ["stages.0.0.weight"]
    others = {param.fqn for param in table if len(param.shape) > 1 and routes[param.fqn].family == "other"}
    assert others == {"stages.0.0.weight", "rel_pos_bias.weight", "char_head.weight", "ctc_head.weight"}
