"""What `layerwise inspect MODEL` may name, and how it becomes a module of shapes without memory.

A trainer config, a Hugging Face `config.json` (or its folder, or the name of a model type), or `module:function`.
Everything is built on the meta device and nothing is downloaded.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerwise.cli.exits import announce_torch
from layerwise.config.load import shipped_configs
from layerwise.config.resolve import resolve_model
from layerwise.config.schema import TrainConfig
from layerwise.dtypes import DType
from layerwise.errors import ConfigError, Problem, did_you_mean

if TYPE_CHECKING:
    from torch import nn

_HF_MAPPINGS = (
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_FOR_CTC_MAPPING_NAMES",
    "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "MODEL_MAPPING_NAMES",
)
"""Where to look for a class when a config names none. Causal language models come late: encoders and encoder-decoders
are listed there too, as the half of them that could be used that way."""


class MissingPackage(Exception):
    """A package that this model needs is not installed; the message says how to get it."""


class ModelKind(Enum):
    """How a MODEL is to be read."""

    TRAINER = "trainer config"
    HF_CONFIG = "Hugging Face config"
    HF_TYPE = "Hugging Face model type"
    FUNCTION = "module:function"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A MODEL that was looked at, but not built."""

    word: str
    """As it was typed; empty for the trainer's defaults."""
    kind: ModelKind
    path: str = ""
    """The file, for a Hugging Face config."""


def find_model(word: str | None) -> ModelSource:
    """What the user means by `word`; opens files, imports nothing."""
    if word is None or word.endswith(".toml") or (word in shipped_configs() and not os.path.exists(word)):
        return ModelSource(word or "", ModelKind.TRAINER)
    if os.path.isdir(word):
        return _in_folder(word)
    if word.endswith(".json") or os.path.isfile(word):
        kind = ModelKind.HF_CONFIG if _names_model_type(word) else ModelKind.TRAINER
        return ModelSource(word, kind, word)
    if ":" in word:
        return ModelSource(word, ModelKind.FUNCTION)
    if "/" in word or os.sep in word:
        what = "there is no such file. A model of the Hugging Face hub is read from its config.json, and nothing is "
        raise ConfigError([Problem(word, f"{what}downloaded: save that file and give its path.")])
    return ModelSource(word, ModelKind.HF_TYPE)


def _in_folder(folder: str) -> ModelSource:
    path = os.path.join(folder, "config.json")
    if not os.path.isfile(path):
        what = "is a folder without a config.json: expected a config file, a model type or module:function."
        raise ConfigError([Problem(folder, what)])
    return ModelSource(folder, ModelKind.HF_CONFIG if _names_model_type(path) else ModelKind.TRAINER, path)


def _names_model_type(path: str) -> bool:
    """Whether a file is a Hugging Face config. One that cannot be read is left to the loader, who says why."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, Mapping) and "model_type" in document


def build_model(source: ModelSource, config: TrainConfig) -> nn.Module:
    """The module that `source` stands for, on the meta device. A `ConfigError` names what is wrong with it, a
    `MissingPackage` what is not installed."""
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")  # nothing here uses it
    announce_torch()
    from layerwise.cli.meta import shapes_only  # the first import of torch

    # What libraries and user code print is not our result, which alone belongs on stdout.
    with redirect_stdout(sys.stderr), shapes_only():
        match source.kind:
            case ModelKind.TRAINER:
                return _trainer_model(config)
            case ModelKind.HF_CONFIG:
                return _hf_model(source, _read_hf_config(source.path))
            case ModelKind.HF_TYPE:
                return _hf_model(source, {"model_type": source.word})
            case ModelKind.FUNCTION:
                return _from_function(source.word)


def _trainer_model(config: TrainConfig) -> nn.Module:
    from layerwise.models.table import torch_dtype
    from layerwise.train.model import GPT

    return GPT(resolve_model(config.model)).to(torch_dtype(DType(config.train.precision)))


# -- Hugging Face ----------------------------------------------------------------------------------


def _read_hf_config(path: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return document


def _hf_model(source: ModelSource, document: Mapping[str, Any]) -> nn.Module:
    os.environ["HF_HUB_OFFLINE"] = "1"  # some configs name a pretrained part; its shapes are known without its weights
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingPackage(
            f"{source.word!r} is read as a {source.kind.value}, which needs transformers ({error}). "
            "Run: pip install 'layerwise[hf]'"
        ) from None
    model_type = document["model_type"]
    known = transformers.CONFIG_MAPPING
    if not isinstance(model_type, str) or model_type not in known:
        raise ConfigError(
            [
                Problem(
                    source.word,
                    f"transformers {transformers.__version__} has no model type {model_type!r}."
                    + did_you_mean(str(model_type), known.keys()),
                )
            ]
        )
    bare = " (from the defaults of its config, which may be broken: give a real config.json)"
    whose = bare if source.kind is ModelKind.HF_TYPE else ""
    with _blamed_on(source.word, f"transformers cannot build a {model_type!r} from it{whose}"):
        config = known[model_type].from_dict(dict(document))
        config._attn_implementation = "eager"  # the one that needs no other package; params are the same
        model: nn.Module = hf_class(source.word, transformers, config)(config)
        return model.to(config.dtype) if config.dtype is not None else model


def hf_class(word: str, transformers: Any, config: Any) -> Callable[[Any], Any]:
    """The class that the config names, or the one that a model of this type usually is."""
    named = config.architectures or []
    if named:
        found: Callable[[Any], Any] | None = getattr(transformers, str(named[0]), None)
        if found is None:
            what = f"its architecture {named[0]!r} is not in transformers {transformers.__version__}."
            raise ConfigError([Problem(word, what)])
        return found
    modeling_auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for mapping in _HF_MAPPINGS:
        names = getattr(modeling_auto, mapping).get(config.model_type)
        if names is not None:
            chosen: Callable[[Any], Any] = getattr(transformers, names if isinstance(names, str) else names[0])
            return chosen
    raise ConfigError([Problem(word, f"transformers has no model class for the type {config.model_type!r}.")])


# -- module:function -------------------------------------------------------------------------------


def _from_function(word: str) -> nn.Module:
    from torch import nn

    module_name, _, attribute = word.partition(":")
    if not module_name or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        what = "expected module:function, such as my_package.models:build."
        raise ConfigError([Problem(word, what)])
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does; the installed command starts without it
    with _blamed_on(word, f"module {module_name!r} cannot be imported", is_users_code=True):
        found: Any = importlib.import_module(module_name)
    for name in attribute.split("."):
        if not hasattr(found, name):
            public = [known for known in vars(found) if not known.startswith("_")] if hasattr(found, "__dict__") else []
            raise ConfigError([Problem(word, f"{module_name!r} has no {attribute!r}.{did_you_mean(name, public)}")])
        found = getattr(found, name)
    if not callable(found):
        what = f"{attribute!r} is a {type(found).__name__}: expected a function that returns an nn.Module."
        raise ConfigError([Problem(word, what)])
    with _blamed_on(word, f"{attribute}() raised", is_users_code=True):
        built = found()
    if not isinstance(built, nn.Module):
        what = f"{attribute}() returned {type(built).__name__}: expected an nn.Module."
        raise ConfigError([Problem(word, what)])
    return built


def functions_inputs(word: str, module: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs for a module of the user's: those of its own method `example_inputs()`, or of a function of that name beside
    the one that built it."""
    beside = sys.modules.get(word.partition(":")[0])
    made = getattr(module, "example_inputs", None) or getattr(beside, "example_inputs", None)
    if not callable(made):
        what = "has no example_inputs(): expected a method of the module, or a function beside it, that returns a tensor, a tuple or a dict."
        raise ConfigError([Problem(word, f"{what} Its forward cannot be followed without.")])
    with _blamed_on(word, "example_inputs() raised", is_users_code=True):
        found = made()
    if isinstance(found, Mapping):
        return (), dict(found)
    return tuple(found) if isinstance(found, tuple | list) else (found,), {}


@contextmanager
def _blamed_on(word: str, what: str, *, is_users_code: bool = False) -> Iterator[None]:
    """Turn whatever foreign code raises into one message that names MODEL. An import that fails is the user's to mend in
    the user's own code, and a matter of the environment in a library."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        words = " ".join(str(error).split()).removesuffix(".")  # one line, however its author broke it
        if isinstance(error, ImportError) and not is_users_code:
            raise MissingPackage(f"{word}: {what}: {words}.") from error
        found = f"{type(error).__name__}: {words}" if words else type(error).__name__
        line = _line_of(error) if is_users_code else ""
        raise ConfigError([Problem(word, f"{what}: {found}{line}.")]) from error


def _line_of(error: BaseException) -> str:
    """Where the user's code failed, for someone who will not see the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if frame.filename not in (__file__, importlib.__file__)]
    theirs = [frame for frame in foreign if not frame.filename.startswith("<")]
    return f" ({os.path.basename(theirs[-1].filename)}, line {theirs[-1].lineno})" if theirs else ""
