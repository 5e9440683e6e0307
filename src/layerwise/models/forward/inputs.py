"""Inputs for models that say in a config what they take: enough to follow their forward, of no meaning."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_TOKENS, _BATCH = 12, 2
_SMALL = 96
"""Pixels of an image that may be small."""
_SAMPLES = 16_000
"""A second of sound."""


def configs_of(model: nn.Module) -> Iterator[Any]:
    """The model's config and those within it, outermost first."""
    waiting, seen = [getattr(model, "config", None)], set()
    while waiting:
        config = waiting.pop(0)
        if config is None or id(config) in seen or not hasattr(config, "to_dict"):
            continue
        seen.add(id(config))
        yield config
        waiting.extend(vars(config).values())


def example_inputs(model: nn.Module) -> dict[str, Any]:
    """Keyword arguments for the forward of a model with a config; empty if it takes nothing that is known here."""
    takes = inspect.signature(model.forward).parameters
    found: dict[str, Any] = {}
    if "grid_thw" in takes and "hidden_states" in takes:
        return _patches(model)
    if "input_ids" in takes:
        found["input_ids"] = _ids(model, _TOKENS)
    elif "inputs" in takes and "input_ids" not in takes and _setting(model, "vocab_size"):
        found["inputs"] = _ids(model, _TOKENS)
    if "pixel_values" in takes and "aspect_ratio_ids" in takes:
        found.update(_tiles(model))
    elif "pixel_values" in takes and ("input_ids" not in found or _has_two_towers(model)):
        found["pixel_values"] = _images(model)
    for name in ("input_features", "input_values"):
        if name in takes and "input_ids" not in found:
            found[name] = _sound(model, name)
    for name in ("decoder_input_ids", "decoder_inputs"):
        if name in takes and bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False)):
            found[name] = _ids(model, _TOKENS // 2)
    if "bbox" in takes and "input_ids" in found:
        found["bbox"] = torch.zeros(_BATCH, _TOKENS, 4, dtype=torch.long, device="cpu")
    for name in ("use_cache", "output_router_logits"):
        if name in takes:
            found[name] = False
    return found


def _setting(model: nn.Module, *wanted: str) -> Any:
    for config in configs_of(model):
        for name in wanted:
            found = getattr(config, name, None)
            if found is not None:
                return found
    return None


def _ids(model: nn.Module, count: int) -> Tensor:
    """Different tokens, none of them with a meaning of its own as far as one can know."""
    vocabulary = _setting(model, "vocab_size") or 100
    vocabulary = vocabulary if isinstance(vocabulary, int) else 100
    ids = torch.arange(3, 3 + _BATCH * count, device="cpu") % max(1, min(vocabulary, 100) - 1)
    return ids.reshape(_BATCH, count)


def _has_two_towers(model: nn.Module) -> bool:
    """Images beside text, and not among its tokens."""
    names = ("image_token_id", "image_token_index")
    has_both = all(hasattr(getattr(model, "config", None), name) for name in ("text_config", "vision_config"))
    return has_both and not any(
        getattr(config, name, None) is not None for config in configs_of(model) for name in names
    )


def _images(model: nn.Module) -> Tensor:
    size = _setting(model, "image_size", "img_size", "input_size") or 224
    if isinstance(size, int) and _setting(model, "patch_size") is None:
        size = min(size, _SMALL)  # convolutions take any size
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = _setting(model, "num_channels", "in_channels", "in_chans") or 3
    frames = _setting(model, "num_frames")
    shape = (_BATCH, channels, height, width)
    if isinstance(frames, int):
        shape = (_BATCH, frames, channels, height, width)  # type: ignore[assignment]
    return torch.zeros(shape, device="cpu")


def _tiles(model: nn.Module) -> dict[str, Any]:
    """One image for each text, cut into tiles."""
    tiles = int(_setting(model, "max_num_tiles") or 1)
    image = _images(model)
    return {
        "pixel_values": image[:, None, None].expand(-1, 1, tiles, -1, -1, -1),
        "aspect_ratio_ids": torch.ones(_BATCH, 1, dtype=torch.long, device="cpu"),
        "aspect_ratio_mask": torch.ones(_BATCH, 1, tiles, dtype=torch.long, device="cpu"),
    }


def _patches(model: nn.Module) -> dict[str, Any]:
    """Images that were cut into patches before, with how many there are in time, height and width."""
    side, channels = _setting(model, "patch_size") or 14, _setting(model, "in_channels", "in_chans") or 3
    length = channels * (_setting(model, "temporal_patch_size") or 1) * side * side
    grid = torch.tensor([[1, 4, 4]], device="cpu")
    return {"hidden_states": torch.zeros(16, length, device="cpu"), "grid_thw": grid}


def _sound(model: nn.Module, name: str) -> Tensor:
    """Samples, or a spectrogram where the config says how many bins it has."""
    bins = _setting(model, "num_mel_bins", "input_feat_per_channel", "feature_size")
    if name == "input_values" and not isinstance(bins, int):
        return torch.zeros(1, _SAMPLES, device="cpu")
    positions = _setting(model, "max_source_positions") or 100
    if _setting(model, "max_length") and name == "input_values":  # spectrograms as images
        return torch.zeros(1, int(_setting(model, "max_length")), int(bins or 80), device="cpu")
    if hasattr(getattr(model, "config", None), "encoder_layers") and not _setting(model, "input_feat_per_channel"):
        return torch.zeros(1, int(bins or 80), 2 * int(positions), device="cpu")
    return torch.zeros(1, 100, int(bins or 80), device="cpu")
