"""Text as bytes, and a loader that is a pure function.

The corpus is one tensor of bytes; files are joined with a NUL, which text does not contain. Its last part is kept for
validation. Training sample number n starts at a position that depends on the seed and on n alone. A step's samples are
numbered from `step * global_batch` and dealt out to microbatches and ranks in order, so a step trains on the same
samples however they are split, and a run can be continued from its step number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from layerwise.config.schema import DataConfig
from layerwise.config.validate import corpus_files, split_point
from layerwise.errors import ConfigError, Problem

_SEPARATOR = b"\0"
_SNIFFED_BYTES = 8192  # a NUL this early means that a file of a folder is not text; the same guess as git's and grep's
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True)
class Corpus:
    """The text of a run."""

    train: Tensor  # 1D, uint8
    val: Tensor  # 1D, uint8
    num_files: int
    num_skipped: int
    """Files of the folder that hold something other than text."""
    digest: str
    """Fingerprint of the bytes, for metrics and for comparing ranks."""


def load_corpus(data: DataConfig, seq_len: int) -> Corpus:
    """Read the text and cut it in two; every part must hold one window of `seq_len` bytes and its target."""
    tokens, num_files, num_skipped = _read_tokens(data.path)
    cut = split_point(tokens.numel(), data.val_fraction)
    corpus = Corpus(tokens[:cut], tokens[cut:], num_files, num_skipped, _fingerprint(tokens))
    if min(corpus.train.numel(), corpus.val.numel()) < seq_len + 1:
        skipped = f" ({num_skipped} files were skipped: they are not text)" if num_skipped else ""
        found = f"{data.path!r} has {tokens.numel()} bytes of text{skipped}"
        raise ConfigError([Problem("data.path", f"{found}: both parts must hold {seq_len + 1} or more.")])
    return corpus


def _read_tokens(path: str) -> tuple[Tensor, int, int]:
    """The bytes (1D, uint8), how many files they come from, and how many were skipped."""
    if path and Path(path).is_file():
        size = Path(path).stat().st_size
        # Mapped, not read: ranks of one machine share the pages, and only what is sampled is ever loaded.
        return torch.from_file(path, shared=False, size=size, dtype=torch.uint8), 1, 0
    joined = bytearray()
    num_files = num_skipped = 0
    for file in corpus_files(path):
        content = file.read_bytes()
        if _SEPARATOR in content[:_SNIFFED_BYTES]:
            num_skipped += 1
            continue
        num_files += 1
        joined += content + _SEPARATOR
    if not joined:
        raise ConfigError([Problem("data.path", f"{path!r} holds no text: all {num_skipped} files are binary.")])
    return torch.frombuffer(joined, dtype=torch.uint8), num_files, num_skipped


def _fingerprint(tokens: Tensor, num_blocks: int = 256, block: int = 4096) -> str:
    """A hash of the length and of evenly spaced blocks: the same cost for any size of corpus."""
    hasher = hashlib.sha256(str(tokens.numel()).encode())
    last = max(0, tokens.numel() - block)
    for index in range(num_blocks):
        start = last * index // max(1, num_blocks - 1)
        hasher.update(bytes(tokens[start : start + block].tolist()))
    return hasher.hexdigest()[:16]


def sample_position(seed: int, number: int, num_positions: int) -> int:
    """Where training sample `number` starts: splitmix64 of seed and number, scaled to the range. No state, no torch."""
    state = (seed * 0x9E3779B97F4A7C15 + number * 0xD1342543DE82EF95 + 0x2545F4914F6CDD1D) & _MASK64
    for multiplier in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        state = ((state ^ (state >> 30)) * multiplier) & _MASK64
    return ((state ^ (state >> 31)) * num_positions) >> 64


@dataclass(frozen=True, slots=True)
class Batching:
    """How one step's samples are dealt out."""

    batch_size: int
    """Sequences per rank and microbatch."""
    accumulation: int
    world: int
    """Ranks that read samples of their own. Ranks of one pipeline count as one: they read the same."""
    moved: int = 0
    """Samples that were read before, beyond those of as many steps of this size: a run that goes on with other batches goes
    on with the sample after the last."""

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.accumulation * self.world

    def samples_before(self, step: int) -> int:
        """How many samples have been read when a step begins."""
        return self.moved + step * self.global_batch

    def going_on(self, step: int, samples: int) -> Batching:
        """The same batches, of which the first at this step comes after so many samples."""
        return replace(self, moved=samples - step * self.global_batch)

    def sample_numbers(self, step: int, micro: int, rank: int) -> range:
        """The samples of one microbatch on one rank."""
        first = self.samples_before(step) + (micro * self.world + rank) * self.batch_size
        return range(first, first + self.batch_size)


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of text and, for every position, the byte that comes next."""

    tokens: Tensor  # (B, T), int64
    targets: Tensor  # (B, T), int64


def _batch_at(text: Tensor, starts: list[int], seq_len: int, device: torch.device) -> Batch:
    windows = torch.stack([text[start : start + seq_len + 1] for start in starts])
    if device.type == "cuda":  # from memory that the device reads by itself: the host goes on
        windows = windows.pin_memory()
    windows = windows.to(device, non_blocking=True).to(torch.int64)
    return Batch(windows[:, :-1], windows[:, 1:])


@dataclass(frozen=True, slots=True)
class Loader:
    """Batches of one rank, by number."""

    corpus: Corpus
    batching: Batching
    seq_len: int
    seed: int
    rank: int
    device: torch.device

    def train_batch(self, step: int, micro: int) -> Batch:
        """Microbatch `micro` of step `step`."""
        num_positions = self.corpus.train.numel() - self.seq_len
        numbers = self.batching.sample_numbers(step, micro, self.rank)
        starts = [sample_position(self.seed, number, num_positions) for number in numbers]
        return _batch_at(self.corpus.train, starts, self.seq_len, self.device)

    def val_batches(self, num_sequences: int) -> Iterator[tuple[Batch, Tensor]]:
        """This rank's share of `num_sequences` evenly spaced windows, each with a weight of 1 or 0.

        The weights count every window once over all ranks. Where ranks do not divide the windows, the last one is read
        again with weight 0, so that every rank runs the model equally often: a forward may hold a collective.
        """
        last_start = self.corpus.val.numel() - self.seq_len - 1
        starts = [last_start * index // max(1, num_sequences - 1) for index in range(num_sequences)]
        share = -(-num_sequences // self.batching.world)
        mine = [self.rank + turn * self.batching.world for turn in range(share)]
        for first in range(0, share, self.batching.batch_size):
            indices = mine[first : first + self.batching.batch_size]
            weights = torch.tensor([float(index < num_sequences) for index in indices], device=self.device)
            chosen = [starts[min(index, num_sequences - 1)] for index in indices]
            yield _batch_at(self.corpus.val, chosen, self.seq_len, self.device), weights
