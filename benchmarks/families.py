"""Every model type that transformers can build from its config: what following its forward shows, against what routing says.

    python -m benchmarks.families [--workers=N] [--to=FILE] [TYPE ...]     writes benchmarks/results/families.json

Types are built on the meta device from their default configs, with fewer layers where the config lets them be few. Without
types, all are looked at anew; with some, what was found of the others stays.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import nn

from layerwise.cli.meta import shapes_only
from layerwise.cli.models import hf_class
from layerwise.models.forward.inputs import configs_of
from layerwise.models.forward.parts import trace_model
from layerwise.models.table import param_table
from layerwise.routing.compare import compare
from layerwise.routing.readings import Role
from layerwise.routing.refusals import RefusedError, starred
from layerwise.routing.rules import route_params

RESULT = Path(__file__).parent / "results" / "families.json"
_LIMIT_S = 60
"""Of CPU: what else the machine does decides nothing."""
_FEW = 4
_LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "depth",
    "num_decoder_layers",
)


def model_types() -> list[str]:
    """Types that a model class of transformers belongs to."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_MAPPING_NAMES.keys() | modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys())


def build(model_type: str) -> nn.Module:
    """A model of that type from its default config; with few layers if that can be built."""
    import transformers

    config_class = transformers.CONFIG_MAPPING[model_type]
    for few in (True, False):
        try:
            config = config_class()
            if few:
                _shorten(config)
            _plain(config)
            with shapes_only():
                model: nn.Module = hf_class(model_type, transformers, config)(config)
            return model
        except Exception:
            if not few:
                raise
    raise AssertionError


def _shorten(config: Any) -> None:
    for part in configs_of(_Holder(config)):
        for name in _LAYERS:
            count = getattr(part, name, None)
            if isinstance(count, int) and count > _FEW and not _names_layers(part, count):
                setattr(part, name, _FEW)
                for key, value in list(vars(part).items()):
                    if isinstance(value, list) and len(value) == count:
                        setattr(part, key, value[:_FEW])


def _names_layers(config: Any, count: int) -> bool:
    """Whether a config names some of its layers by number: such a model is not built with fewer."""
    lists = [value for value in vars(config).values() if isinstance(value, list) and value and len(value) != count]
    return any(
        all(type(item) is int and 0 <= item <= count for item in found) and max(found) >= _FEW for found in lists
    )


class _Holder(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def _plain(config: Any) -> None:
    """Eager attention and experts, no caches."""
    for part in configs_of(_Holder(config)):
        part._attn_implementation = "eager"
        part._experts_implementation = "eager"
        part.use_cache = False


def look_at(model_type: str) -> dict[str, Any]:
    """What can be said of a type."""
    started = time.perf_counter()
    try:
        model = build(model_type)
    except Exception as error:
        return {"built": False, "why": f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"}
    found: dict[str, Any] = {
        "built": True,
        "class": type(model).__name__,
        "build_s": round(time.perf_counter() - started, 2),
    }
    table = param_table(model)
    refused: set[str] = set()
    try:
        routes = route_params(table)
    except RefusedError as error:
        refused = {param.fqn for param in error.params}
        routes = route_params(type(table)(tuple(param for param in table if param.fqn not in refused)))
    started = time.perf_counter()
    traced = trace_model(model)
    found["trace_s"] = round(time.perf_counter() - started, 2)
    found["problem"] = traced.problem
    wide = [param for param in table if len(param.shape) >= 2 and param.trainable]
    unseen = {
        param.fqn: traced.readings[param.fqn].why for param in wide if traced.readings[param.fqn].role is Role.UNSEEN
    }
    differ = compare([param for param in wide if param.fqn not in refused], routes, traced.readings)
    found["params"] = len(wide)
    found["right"] = len(wide) - len(unseen.keys() | refused) - len(differ)
    found["refused"] = sorted({starred(fqn) for fqn in refused})
    found["refused_but_seen"] = sorted(
        {f"{starred(fqn)}: {traced.readings[fqn].why}" for fqn in refused if fqn not in unseen}
    )
    found["silent"] = len({starred(item.param.fqn) for item in differ if not item.route.is_fallback})
    found["disagree"] = sorted({f"{starred(item.param.fqn)} {item.param.shape}: {item.sentence}" for item in differ})
    found["unseen"] = sorted({f"{starred(fqn)}: {why}" for fqn, why in unseen.items()})
    return found


def summary_of(types: dict[str, Any]) -> dict[str, Any]:
    """What all types together show."""
    built = {name: found for name, found in types.items() if found.get("class")}
    followed = [found for found in built.values() if not found["problem"]]

    def named(key: str) -> list[str]:
        return [name for name, found in built.items() if found[key]]

    return {
        "types": len(types),
        "built": len(built),
        "followed to the end": len(followed),
        "params": sum(found["params"] for found in built.values()),
        "right": sum(found["right"] for found in built.values()),
        "types with a silent disagreement": named("silent"),
        "types with a disagreement that a fallback shows": [
            name for name in named("disagree") if not built[name]["silent"]
        ],
        "types with refused params": named("refused"),
        "types with params not seen": len(named("unseen")),
    }


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds} s")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _prepare() -> None:
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)


def _found(model_type: str) -> tuple[str, dict[str, Any]]:
    try:
        with _limited(_LIMIT_S), contextlib.redirect_stdout(io.StringIO()):
            return model_type, look_at(model_type)
    except Exception as error:
        return model_type, {"built": True, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    finally:
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("types", nargs="*")
    parser.add_argument("--to", type=Path, default=RESULT)
    parser.add_argument("--workers", type=int, default=1)
    asked = parser.parse_args()
    _prepare()
    import transformers

    results: dict[str, Any] = json.loads(asked.to.read_text())["types"] if asked.types and asked.to.exists() else {}
    with multiprocessing.get_context("spawn").Pool(asked.workers, _prepare) as pool:
        for model_type, found in pool.imap_unordered(_found, asked.types or model_types()):
            results[model_type] = found
            counts = {
                key: value if isinstance(value, int | float | str) else len(value) for key, value in found.items()
            }
            print(model_type, counts, flush=True)
            types = dict(sorted(results.items()))
            document = {
                "transformers": transformers.__version__,
                "torch": torch.__version__,
                "summary": summary_of(types),
                "types": types,
            }
            asked.to.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
