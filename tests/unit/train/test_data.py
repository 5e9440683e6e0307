import collections
from pathlib import Path

import pytest
import torch

from layerwise.config.schema import DataConfig
from layerwise.errors import ConfigError
from layerwise.train.data import Batching, Corpus, Loader, load_corpus, sample_position


def corpus_of(num_bytes: int = 5000) -> Corpus:
    text = torch.arange(num_bytes).remainder(251).to(torch.uint8)
    return Corpus(text[:4000], text[4000:], num_files=1, num_skipped=0, digest="")


def loader_of(*, batch_size: int, accumulation: int = 1, world: int = 1, rank: int = 0, seed: int = 0) -> Loader:
    return Loader(corpus_of(), Batching(batch_size, accumulation, world), 16, seed, rank, torch.device("cpu"))


def step_windows(step: int, *, batch_size: int, accumulation: int, world: int) -> list[tuple[int, ...]]:
    """All windows of a step, whoever reads them."""
    windows = []
    for rank in range(world):
        loader = loader_of(batch_size=batch_size, accumulation=accumulation, world=world, rank=rank)
        for micro in range(accumulation):
            windows += [tuple(row.tolist()) for row in loader.train_batch(step, micro).tokens]
    return sorted(windows)


def test_batches_are_a_pure_function_of_their_number() -> None:
    first, second = loader_of(batch_size=4), loader_of(batch_size=4)
    wanted = first.train_batch(7, 0)
    for step in (3, 9, 0):
        second.train_batch(step, 0)
    assert torch.equal(second.train_batch(7, 0).tokens, wanted.tokens)
    assert not torch.equal(second.train_batch(8, 0).tokens, wanted.tokens)
    assert not torch.equal(loader_of(batch_size=4, seed=1).train_batch(7, 0).tokens, wanted.tokens)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "world"), [(12, 1, 1), (4, 3, 1), (3, 1, 4), (2, 2, 3), (1, 3, 4), (6, 1, 2)]
)
def test_a_step_trains_on_the_same_samples_however_they_are_split(
    batch_size: int, accumulation: int, world: int
) -> None:
    for step in (0, 5):
        whole = step_windows(step, batch_size=12, accumulation=1, world=1)
        assert step_windows(step, batch_size=batch_size, accumulation=accumulation, world=world) == whole


def test_targets_are_the_next_bytes() -> None:
    batch = loader_of(batch_size=4).train_batch(0, 0)
    assert batch.tokens.dtype == torch.int64
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert torch.equal((batch.tokens[:, -1] + 1) % 251, batch.targets[:, -1])


def test_positions_cover_the_whole_range_evenly() -> None:
    counts = collections.Counter(sample_position(0, number, 10) for number in range(10_000))
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 1.15 * 1000
    assert min(counts.values()) > 0.85 * 1000


def test_neighbouring_seeds_and_samples_are_unrelated() -> None:
    by_seed = [sample_position(seed, 0, 1 << 20) for seed in range(200)]
    by_number = [sample_position(0, number, 1 << 20) for number in range(200)]
    assert len(set(by_seed)) > 195
    assert len(set(by_number)) > 195
    assert set(by_seed[1:]).isdisjoint(by_number[1:])


def test_a_text_of_exactly_one_window_has_one_position() -> None:
    assert {sample_position(seed, seed, 1) for seed in range(50)} == {0}


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_sequences", [1, 5, 12])
def test_validation_counts_every_window_once_and_runs_every_rank_equally_often(world: int, num_sequences: int) -> None:
    seen: collections.Counter[tuple[int, ...]] = collections.Counter()
    num_batches = set()
    for rank in range(world):
        batches = list(loader_of(batch_size=2, world=world, rank=rank).val_batches(num_sequences))
        num_batches.add(len(batches))
        for batch, weights in batches:
            seen.update(tuple(row.tolist()) for row, weight in zip(batch.tokens, weights, strict=True) if weight == 1.0)
    alone = [
        tuple(row.tolist()) for batch, _ in loader_of(batch_size=64).val_batches(num_sequences) for row in batch.tokens
    ]
    assert seen == collections.Counter(alone)
    assert len(alone) == num_sequences
    assert len(num_batches) == 1


def test_a_folder_is_joined_in_name_order_without_hidden_and_binary_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"B" * 50)
    (tmp_path / "a.txt").write_bytes(b"A" * 50)
    (tmp_path / ".hidden").write_bytes(b"H" * 50)
    (tmp_path / "image.bin").write_bytes(b"\0\1" * 50)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.txt").write_bytes(b"C" * 50)
    corpus = load_corpus(DataConfig(path=str(tmp_path), val_fraction=0.2), seq_len=8)
    text = bytes(torch.cat((corpus.train, corpus.val)).tolist())
    assert text == b"A" * 50 + b"\0" + b"B" * 50 + b"\0" + b"C" * 50 + b"\0"
    assert (corpus.num_files, corpus.num_skipped) == (3, 1)
    assert corpus.val.numel() == int(0.2 * len(text))


def test_a_single_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 4)
    corpus = load_corpus(DataConfig(path=str(file), val_fraction=0.25), seq_len=8)
    assert bytes(corpus.train.tolist()) == bytes(range(256)) * 3
    assert bytes(corpus.val.tolist()) == bytes(range(256))


def test_the_digest_tells_texts_apart(tmp_path: Path) -> None:
    digests = set()
    for name, content in (("a", b"x" * 9000), ("b", b"x" * 8999 + b"y"), ("c", b"x" * 9001)):
        (tmp_path / name).write_bytes(content)
        digests.add(load_corpus(DataConfig(path=str(tmp_path / name)), seq_len=8).digest)
    assert len(digests) == 3


def test_a_folder_of_binaries_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(ConfigError, match="holds no text: all 1 files are binary"):
        load_corpus(DataConfig(path=str(tmp_path)), seq_len=8)


def test_a_folder_with_too_little_text_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0" * 5000)
    (tmp_path / "x.txt").write_bytes(b"few")
    with pytest.raises(ConfigError, match=r"has 4 bytes of text \(1 files were skipped: they are not text\)"):
        load_corpus(DataConfig(path=str(tmp_path)), seq_len=8)


def test_the_default_text_is_the_standard_library() -> None:
    corpus = load_corpus(DataConfig(), seq_len=128)
    assert corpus.train.numel() > 1_000_000
    assert corpus.num_files > 100
    assert b"def " in bytes(corpus.train[:200_000].tolist())
