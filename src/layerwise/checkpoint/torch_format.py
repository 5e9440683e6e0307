"""The same checkpoint in the words of torch.distributed.checkpoint, for who reads it without this library. We write them and
never read them: they are a pickle."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from layerwise.checkpoint.manifest import Entry

FILE_NAME = ".metadata"


def metadata_bytes(entries: Mapping[str, Entry]) -> bytes:
    """What torch's reader looks tensors up in."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for key, entry in entries.items():
        chunks = []
        for chunk in entry.chunks:
            offsets = torch.Size(chunk.box.starts)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size(chunk.box.shape)))
            places[MetadataIndex(key, offsets)] = _StorageInfo(chunk.file, chunk.offset, chunk.length)
        properties = TensorProperties(dtype=getattr(torch, entry.dtype))
        tensors[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
    return pickle.dumps(Metadata(tensors, {key: (key,) for key in entries}, places))
