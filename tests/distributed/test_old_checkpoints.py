"""Checkpoints that earlier versions wrote load for good: weights, masters, momenta and the step have the bits that their ranks held,
on other numbers of ranks, in other layouts and under torch's wrappers. tests/golden/checkpoints/README.md has the formats.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import layerwise
from tests.golden.checkpoints import write as golden
from tests.ranks import raised, run_ranks

UNREADABLE = "01_sha256_sums"
"""This version refuses it: the format was replaced before the first release, and kept its name."""
FORMATS = ("02_before_begun", "03_before_own_buffers", "04_own_buffers")
"""Folders of tests/golden/checkpoints, oldest first. The last one has the format that this version writes."""
WITHOUT_OWN_BUFFERS = FORMATS[:2]
OWN = "own.1.model.seen"
"""Key of the only buffer that differs between ranks."""
WORLDS = (1, 2, 3)
LAYOUTS, TORCHS = ("flat", "padded"), ("fsdp2", "ddp")
WRAPPERS = (*LAYOUTS, *TORCHS)
FILES = (".metadata", "__0_0.distcp", "manifest.json")
"""Files of a checkpoint of one rank."""
SAVED = [f"{name}/{kind}" for name in FORMATS for kind in golden.WORLDS]


class Case(NamedTuple):
    """A checkpoint, what it is loaded into, and where the loaded run is saved again."""

    folder: str
    saved: str
    """Format and kind: `04_own_buffers/one_rank`."""
    wrapper: str
    again: str

    @property
    def kind(self) -> str:
        return self.saved.rpartition("/")[2]

    def expected(self) -> dict[str, Any]:
        """The step, rates and fingerprints of tensors by key. Before ranks saved buffers of their own, the buffer of one rank was
        saved for all, and that of this model was the second rank's."""
        expected: dict[str, Any] = json.loads(Path(self.folder, f"{self.saved}.json").read_text())
        tensors = expected["tensors"]
        if self.saved.partition("/")[0] in WITHOUT_OWN_BUFFERS and OWN in tensors:
            tensors["model.seen"] = tensors.pop(OWN)
        return expected


class Outcome(NamedTuple):
    """What one rank found after loading, and a fingerprint of its weights after one more step."""

    differences: list[str]
    after_a_step: list[list[Any]]


class Training:
    """A model with other values than the checkpoint's, its optimizer and its scheduler."""

    def __init__(self, kind: str, wrapper: str) -> None:
        self.kind, self.wrapper = kind, wrapper
        self.module: nn.Module = golden.filled("value before loading", golden.dtype_of(kind))
        self.model: nn.Module = self.module
        if wrapper == "fsdp2":
            fully_shard(self.module)
        elif wrapper == "ddp":
            self.model = DistributedDataParallel(self.module)
        else:
            self.model = layerwise.DataParallel(self.module, layout=wrapper, bucket_mib=0.001)
        scale = {"loss_scale": layerwise.LossScale(initial=1.0)} if kind == "one_rank" else {}
        self.optimizer = layerwise.Optimizer(self.model, **{**golden.options_of(kind), **scale})
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1, gamma=0.5)

    def load(self, path: Path) -> Any:
        missing = ["seen"] if self.kind == "two_stages" else []
        return layerwise.load(path, self.model, self.optimizer, extra={"scheduler": self.scheduler}, missing=missing)

    def step(self) -> None:
        """One step with the same gradients on every rank."""
        golden.backward(self.model, self.optimizer, self.kind, golden.STEPS, 0)
        self.optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        """Whole params and this rank's buffers by key. Call it on every rank."""
        named = (*self.module.named_parameters(), *self.module.named_buffers())
        return {f"model.{name}": whole(tensor.detach()) for name, tensor in named}

    def state(self) -> dict[str, Tensor]:
        """Whole tensors of the optimizer's state by key, on the first rank. Call it on every rank."""
        by_param: Iterator[tuple[str, Mapping[str, Any]]]
        if self.wrapper == "fsdp2":
            by_param = ((name, self.optimizer.state[param]) for name, param in self.module.named_parameters())
        else:
            self.optimizer.consolidate_state_dict()
            packed: dict[str, Any] = self.optimizer.state_dict()
            names = (name for group in packed["param_groups"] for name in group["fqns"])
            by_param = ((name, packed["state"].get(number, {})) for number, name in enumerate(names))
        return {
            f"optimizer.state.{name}.{kind}": whole(tensor)
            for name, entry in by_param
            for kind, tensor in entry.items()
            if kind != "step"
        }


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_all(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    """Load checkpoints one after the other on this rank. Every rank calls it."""
    warnings.simplefilter("ignore")
    return [load_one(rank, world, case) for case in cases]


def load_one(rank: int, world: int, case: Case) -> Outcome:
    expected, training = case.expected(), Training(case.kind, case.wrapper)
    loaded = training.load(Path(case.folder, case.saved))
    found = list(differences({**training.weights(), **training.state()}, expected["tensors"], rank, world, case))
    told = {
        "step": (loaded.step, expected["step"]),
        "lr": ({group["name"]: group["lr"] for group in training.optimizer.param_groups}, expected["lr"]),
        "scheduler": (training.scheduler.last_epoch, golden.STEPS),
        "epoch": (loaded.extra["epoch"], 3),
        "pair": (loaded.extra["pair"], (1, 2.5)),
    }
    if case.kind == "one_rank":
        told["cursor"] = (loaded.extra["cursor"].tolist(), [0, 1, 2])
    layerwise.save(case.again, training.model, training.optimizer)
    training.step()
    stats = training.optimizer.stats
    scale = golden.LOSS_SCALE if case.kind == "one_rank" else 1.0
    told["a step"] = ((stats.step, stats.skipped, stats.loss_scale), (expected["step"] + 1, False, scale))
    found += [f"{name} is {mine}, expected {theirs}" for name, (mine, theirs) in told.items() if mine != theirs]
    after = [golden.fingerprint(tensor) for key, tensor in training.weights().items() if key != "model.seen"]
    return Outcome(found, after)


def differences(
    tensors: Mapping[str, Tensor], expected: Mapping[str, list[Any]], rank: int, world: int, case: Case
) -> Iterator[str]:
    """Tensors whose bits are not those that the ranks held which wrote the checkpoint, and tensors that are not there."""
    wanted = {key for key in expected if not key.startswith("own.") and not key.endswith(".master")}
    if rank == 0:
        yield from (f"{key} is not there" for key in sorted(wanted - tensors.keys()))
    for key, tensor in tensors.items():
        if key == "model.seen" and case.kind == "two_stages":
            continue
        # Ranks go on with buffers of their own where as many ranks wrote them.
        own = f"own.{rank}.{key}"
        theirs = expected.get(own if own in expected and world == 2 else key)
        if golden.fingerprint(tensor) != theirs:
            yield f"{key} on rank {rank} of {world} has other bits"


def bits_on_disk(path: str, expected: Mapping[str, list[Any]]) -> list[str]:
    """Differences of a checkpoint from expected values, read by torch alone, which knows nothing of our files. Masters are among them."""
    tensors = {
        key: torch.empty(shape, dtype=getattr(torch, dtype))
        for key, (dtype, shape, _, _) in expected.items()
        if not key.startswith("own.")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return [f"{key} on disk" for key, tensor in tensors.items() if golden.fingerprint(tensor) != expected[key]]


def check(folder: Path, wrappers: Callable[[int, int], Sequence[str]]) -> None:
    """Load every checkpoint on every number of ranks, into the wrappers that are named for its number and the number of ranks. The step after
    it has the same bits on every number of ranks and in every wrapper."""
    steps: dict[str, list[Any]] = {}
    for world in WORLDS:
        cases = [
            Case(str(golden.FOLDER), saved, wrapper, str(folder / f"{world}_{number}_{wrapper}"))
            for number, saved in enumerate(SAVED)
            for wrapper in wrappers(number, world)
        ]
        for case, *outcomes in zip(cases, *run_ranks(world, load_all, cases), strict=True):
            where = f"{case.saved} on {world} ranks in {case.wrapper}"
            found = [text for outcome in outcomes for text in outcome.differences]
            assert found + bits_on_disk(case.again, case.expected()["tensors"]) == [], where
            for outcome in outcomes:
                assert outcome.after_a_step == steps.setdefault(case.saved, outcome.after_a_step), where


def test_a_checkpoint_of_every_format_loads_to_the_bit_and_trains_on(tmp_path: Path) -> None:
    """On 1, 2 and 3 ranks; each checkpoint goes into `flat`, into `padded` and into one of torch's wrappers on one of these."""
    kinds = [(*LAYOUTS, torchs) for torchs in TORCHS]
    check(tmp_path, lambda number, world: [kinds[number % 2][(number + world) % 3]])


@pytest.mark.slow
def test_a_checkpoint_of_every_format_loads_into_every_wrapper_on_every_number_of_ranks(tmp_path: Path) -> None:
    check(tmp_path, lambda number, world: WRAPPERS)


# ------------------------------------------------------------------------------------------------ the folder itself


def structure(path: Path) -> dict[str, Any]:
    """What a manifest has, without the values: what another format would change."""
    manifest = json.loads((path / "manifest.json").read_text())
    body = manifest["body"]
    about = body["about"]
    return {
        "format": manifest["format"],
        "keys": [sorted(manifest), sorted(body), sorted(about)],
        "entries": {key: (sorted(entry), entry["shape"], entry["dtype"]) for key, entry in body["entries"].items()},
        "values per chunk": {len(chunk) for entry in body["entries"].values() for chunk in entry["chunks"]},
        "values per param": {len(values) for values in about["params"].values()},
        "values per file": {name: (len(values), len(values[1])) for name, values in body["files"].items()},
    }


def save_again(rank: int, world: int, saved: str, again: str) -> None:
    warnings.simplefilter("ignore")
    training = Training("two_ranks", "flat")
    training.load(Path(saved))
    extra = {"scheduler": training.scheduler, "epoch": 3, "pair": (1, 2.5)}
    layerwise.save(again, training.model, training.optimizer, extra=extra)


def test_the_newest_folder_has_the_format_that_this_version_writes(tmp_path: Path) -> None:
    saved = golden.FOLDER / FORMATS[-1] / "two_ranks"
    run_ranks(2, save_again, str(saved), str(tmp_path / "again"))
    assert structure(tmp_path / "again") == structure(saved), "see tests/golden/checkpoints/README.md, A new format"
    older = [structure(golden.FOLDER / name / "two_ranks") for name in FORMATS[:-1]]
    assert structure(saved) not in older


def test_every_folder_is_loaded_and_small() -> None:
    folders = sorted(path for path in golden.FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__")
    assert [path.name for path in folders] == [UNREADABLE, *FORMATS]
    saved = [path for folder in folders for path in folder.iterdir() if path.is_dir()]
    assert len(saved) == 1 + len(SAVED)
    sizes = {str(path): sum(file.stat().st_size for file in path.iterdir()) for path in saved}
    assert {path: size for path, size in sizes.items() if size > 60_000} == {}


# ------------------------------------------------------------------------------------------------ controls: what must be seen


def refuse(rank: int, world: int, paths: list[str]) -> list[tuple[str, bool]]:
    """What a load of each checkpoint raises, and whether model and optimizer are as they were before."""
    warnings.simplefilter("ignore")
    training = Training("one_rank", "flat")

    def now() -> list[Any]:
        tensors = {**training.weights(), **training.state()}
        rates = [group["lr"] for group in training.optimizer.param_groups]
        return [rates, training.scheduler.last_epoch, {key: golden.fingerprint(one) for key, one in tensors.items()}]

    before, found = now(), []
    for path in paths:
        found.append((raised(partial(training.load, Path(path))), now() == before))
    return found


def test_one_flipped_bit_of_any_file_is_refused(tmp_path: Path) -> None:
    damaged = [tmp_path / name / str(n) / file for name in FORMATS for n, file in enumerate(FILES)]
    for path in damaged:
        shutil.copytree(golden.FOLDER / path.relative_to(tmp_path).parts[0] / "one_rank", path.parent)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    for of_rank in run_ranks(2, refuse, [str(path.parent) for path in damaged]):
        for path, (text, is_unchanged) in zip(damaged, of_rank, strict=True):
            assert text.startswith("CheckpointError"), text
            assert path.name in text
            assert is_unchanged, path


def test_sums_of_before_the_first_release_are_refused() -> None:
    for of_rank in run_ranks(2, refuse, [str(golden.FOLDER / UNREADABLE / "one_rank")]):
        for text, is_unchanged in of_rank:
            assert text.startswith("CheckpointError"), text
            assert "has no sum of 8 hexadecimal digits" in text
            assert is_unchanged


def test_values_that_differ_from_the_expected_ones_are_seen(tmp_path: Path) -> None:
    """Changes one expected value of each kind, and finds each of them reported."""
    saved = f"{FORMATS[-1]}/one_rank"
    shutil.copytree(golden.FOLDER / saved, tmp_path / saved)
    values = json.loads((golden.FOLDER / f"{saved}.json").read_text())
    loaded = ["model.embed.weight", "model.seen", "optimizer.state.blocks.1.qkv.weight.momentum"]
    loaded += [f"optimizer.state.embed.weight.{kind}" for kind in ("exp_avg", "exp_avg_sq")]
    master = "optimizer.state.blocks.0.out.weight.master"
    for key in (*loaded, master):
        digest = values["tensors"][key][2]
        values["tensors"][key][2] = digest[:-1] + ("0" if digest[-1] != "0" else "1")
    values["lr"]["matrix"] *= 2
    (tmp_path / f"{saved}.json").write_text(golden.as_text(values))
    cases = [Case(str(tmp_path), saved, wrapper, str(tmp_path / wrapper)) for wrapper in WRAPPERS]
    for case, outcome in zip(cases, run_ranks(1, load_all, cases)[0], strict=True):
        for key in loaded:
            assert f"{key} on rank 0 of 1 has other bits" in outcome.differences, case
        assert any(text.startswith("lr is ") for text in outcome.differences)
        assert f"{master} on disk" in bits_on_disk(case.again, values["tensors"])
