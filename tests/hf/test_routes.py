"""Every param of every model goes where it should: against the golden tables, which were read line by line, and against
what the module types alone say."""

from __future__ import annotations

import functools

import pytest
from torch import nn

from layerwise.models.table import param_table
from layerwise.routing.rules import Route, route_params
from tests.hf.families import FAMILIES
from tests.hf.models import MODELS, build
from tests.hf.tables import GOLDEN, table_of

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)

# Linear weights that are not orthogonalised, each for the reason given here, by the end of its name.
HEADS = ("lm_head", "proj_out", "cls.predictions.decoder", "cls.seq_relationship", "classifier")
ROUTERS = ("mlp.gate", "mlp.router", "feed_forward.router")


@functools.cache
def model(name: str) -> nn.Module:
    return build(name)


@functools.cache
def routes(name: str) -> dict[str, Route]:
    return route_params(param_table(model(name)))


def weights(name: str, *types: type[nn.Module] | str) -> set[str]:
    """Fqns of the params with two or more dims held by modules of these types, or of classes whose name has the word."""
    words = tuple(word for word in types if isinstance(word, str))
    classes = tuple(word for word in types if isinstance(word, type))
    return {
        f"{prefix}.{local}" if prefix else local
        for prefix, module in model(name).named_modules()
        if isinstance(module, classes) or any(word in type(module).__name__ for word in words)
        for local, param in module.named_parameters(recurse=False)
        if param.ndim >= 2
    }


def shared_names(name: str) -> dict[str, set[str]]:
    """All names of each tensor, by each of its names."""
    by_id: dict[int, set[str]] = {}
    for fqn, param in model(name).named_parameters(remove_duplicate=False):
        by_id.setdefault(id(param), set()).add(fqn)
    return {fqn: names for names in by_id.values() for fqn in names}


@EVERY_MODEL
def test_the_golden_table_holds(name: str) -> None:
    assert table_of(model(name)) == (GOLDEN / f"{name}.txt").read_text(), (
        "python -m tests.hf.update, then read the diff"
    )


def test_every_golden_table_has_its_model() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == {*MODELS, *FAMILIES}


@EVERY_MODEL
def test_no_embedding_norm_bias_or_vector_is_under_a_matrix_rule(name: str) -> None:
    matrices = {fqn for fqn, route in routes(name).items() if route.family == "matrix"}
    shared = shared_names(name)
    under = {alias for fqn in matrices for alias in shared[fqn]}
    assert not under & weights(name, nn.Embedding, nn.LayerNorm, "Norm", "Embeddings")
    assert not {fqn for fqn in under if fqn.endswith("bias") or model(name).get_parameter(fqn).ndim < 2}


@EVERY_MODEL
def test_no_head_or_router_is_under_a_matrix_rule(name: str) -> None:
    ends = tuple(f"{end}.weight" for end in (*HEADS, *ROUTERS))
    found = {fqn for names in shared_names(name).values() for fqn in names if fqn.endswith(ends)}
    kept = {fqn for fqn, route in routes(name).items() if route.family == "matrix"}
    assert not found & kept


@EVERY_MODEL
def test_no_linear_weight_is_missing_from_the_matrix_rule(name: str) -> None:
    ends = tuple(f"{end}.weight" for end in (*HEADS, *ROUTERS))
    shared = shared_names(name)
    linears = {fqn for fqn in weights(name, nn.Linear, "Conv1D") if not any(a.endswith(ends) for a in shared[fqn])}
    experts = {fqn for fqn in weights(name, "Experts") if not fqn.endswith("bias")}
    matrices = {fqn for fqn, route in routes(name).items() if route.family == "matrix"}
    assert linears | experts <= matrices
    assert linears


@EVERY_MODEL
def test_matrices_cover_their_weight_exactly(name: str) -> None:
    for fqn, route in routes(name).items():
        if route.family == "matrix":
            assert sum(matrix.numel for matrix in route.matrices) == model(name).get_parameter(fqn).numel()


@EVERY_MODEL
def test_no_param_with_two_dims_is_left_to_a_fallback(name: str) -> None:
    route_params(param_table(model(name)), strict=True)
