"""S12, hostile: checkpoints that somebody made to do harm. None of what is in them runs, nothing outside of their folder is read, none
takes long or much memory, and each gets one error that says what is wrong with it, with nothing changed.

Whoever makes such a checkpoint can write any digest that it needs: wherever one would give it away, it has the right one. With sabotage
torch's own reader is given those samples that it can read.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import pickle
import shutil
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import layerwise
from layerwise.checkpoint.manifest import PIECE
from layerwise.errors import CheckpointError
from tests.ranks import RankFailure, run_ranks
from tests.reliability import Outcome, tally
from tests.reliability.training import Training, small

DATA, MANIFEST, FOR_TORCH = "__0_0.distcp", "manifest.json", ".metadata"
WEIGHT, MOMENTUM = "model.layer0.weight", "optimizer.state.layer0.weight.momentum"
MOST_S, MOST_MIB = 1.0, 200.0
"""Processor time and memory that refusing may take."""
MOST_WAIT_S = 20.0
"""Longer than that is no load on the machine: it waits for something."""
TRIES = 3
"""Processor time includes what a host takes from a virtual machine; what a sample costs, it costs every time."""


class Checkpoint:
    """A checkpoint in the hands of somebody who means harm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.outside = folder, folder.parent
        self.body: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())["body"]

    @property
    def canary(self) -> Path:
        """Is there once a payload has run."""
        return self.outside / "canary"

    @property
    def secret(self) -> Path:
        """A file outside."""
        return self.outside / "secret"

    def entry(self, key: str) -> Any:
        return self.body["entries"][key]

    def chunk(self, key: str = WEIGHT) -> Any:
        return self.entry(key)["chunks"][0]

    def put(self, name: str, text: bytes) -> None:
        """A file of any content, with the digest that belongs to it."""
        (self.folder / name).write_bytes(text)
        self.body["files"][name] = [len(text), f"{zlib.crc32(text):08x}"]

    def seal(self) -> None:
        """Write the manifest, with its own digest."""
        self.write(json.dumps(self.body))

    def write(self, body: str) -> None:
        """Write a manifest with any text as its body, and the digest of what that says."""
        sorted_text = json.dumps(json.loads(body), sort_keys=True, separators=(",", ":"))
        self.write_unsealed(body, hashlib.sha256(sorted_text.encode()).hexdigest())

    def write_unsealed(self, body: str, digest: str = "0" * 64) -> None:
        text = f'{{"format": "layerwise checkpoint 1", "digest": "{digest}", "body": {body}}}'
        (self.folder / MANIFEST).write_text(text)


class Payload:
    """Makes the canary when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


Sample = Callable[[Checkpoint], None]
SAMPLES: dict[str, Sample] = {}
FOR_TORCHS_READER: list[str] = []
"""Samples that are of torch's own format as well."""


def sample(name: str, *, torchs: bool = False) -> Callable[[Sample], Sample]:
    def register(make: Sample) -> Sample:
        SAMPLES[name] = make
        if torchs:
            FOR_TORCHS_READER.append(name)
        return make

    return register


# Pickles.

HARMLESS = "a pickle that runs in what is there for torch"
"""Nobody reads that here. All else is as it should be, and is loaded."""


@sample(HARMLESS, torchs=True)
def _pickled_metadata(bad: Checkpoint) -> None:
    bad.put(FOR_TORCH, pickle.dumps(Payload(bad.canary)))
    bad.seal()


@sample("a pickle that runs in an item", torchs=True)
def _pickled_item(bad: Checkpoint) -> None:
    metadata: Metadata = pickle.loads((bad.folder / FOR_TORCH).read_bytes())
    text = (bad.folder / DATA).read_bytes()
    item = io.BytesIO()
    torch.save(Payload(bad.canary), item)
    for index, info in metadata.storage_data.items():
        if index.fqn == WEIGHT:
            info.offset, info.length = len(text), item.tell()
            metadata.storage_data = {type(index)(WEIGHT): info}
            break
    metadata.state_dict_metadata = {WEIGHT: BytesStorageMetadata()}
    bad.put(FOR_TORCH, pickle.dumps(metadata))
    bad.put(DATA, text + item.getvalue())
    bad.chunk()[3:] = [len(text), item.tell(), len(text)]
    bad.entry(WEIGHT)["dtype"] = "object"
    bad.seal()


@sample("a pickle for a manifest")
def _pickled_manifest(bad: Checkpoint) -> None:
    (bad.folder / MANIFEST).write_bytes(pickle.dumps(Payload(bad.canary)))


@sample("a pickle for a whole data file")
def _pickled_data(bad: Checkpoint) -> None:
    bad.put(DATA, pickle.dumps(Payload(bad.canary)))
    bad.seal()


@sample("a pickle for the elements of random numbers")
def _pickled_generator(bad: Checkpoint) -> None:
    text = pickle.dumps(Payload(bad.canary))
    data = bytearray((bad.folder / DATA).read_bytes())
    at = bad.chunk("rng.0.cpu")[5]
    data[at : at + len(text)] = text
    data[at + 8 : at + 16] = struct.pack("<q", 2**40)
    bad.put(DATA, bytes(data))
    bad.seal()


# Files somewhere else.


def _elsewhere(bad: Checkpoint, name: str) -> None:
    bad.body["files"][name] = [bad.secret.stat().st_size, f"{zlib.crc32(bad.secret.read_bytes()):08x}"]
    bad.chunk()[2] = name
    bad.seal()


@sample("a file one folder up", torchs=True)
def _parent(bad: Checkpoint) -> None:
    metadata: Metadata = pickle.loads((bad.folder / FOR_TORCH).read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../secret"
    bad.put(FOR_TORCH, pickle.dumps(metadata))
    _elsewhere(bad, "../secret")


@sample("a file by its absolute path")
def _absolute(bad: Checkpoint) -> None:
    _elsewhere(bad, str(bad.secret))


@sample("a file one folder up and back")
def _around(bad: Checkpoint) -> None:
    _elsewhere(bad, f"./../{bad.folder.name}/../secret")


@sample("a file whose name has a zero in it")
def _zero(bad: Checkpoint) -> None:
    _elsewhere(bad, "secret\0.distcp")


@sample("a file of the name ..")
def _dots(bad: Checkpoint) -> None:
    _elsewhere(bad, "..")


@sample("a file whose name is a megabyte")
def _long_name(bad: Checkpoint) -> None:
    _elsewhere(bad, "x" * (1 << 20))


@sample("a data file that is a link")
def _link(bad: Checkpoint) -> None:
    shutil.move(bad.folder / DATA, bad.secret)
    os.symlink(bad.secret, bad.folder / DATA)


@sample("a data file that is a link to one beside it")
def _link_beside(bad: Checkpoint) -> None:
    shutil.move(bad.folder / DATA, bad.folder / "other")
    os.symlink("other", bad.folder / DATA)


@sample("a manifest that is a link")
def _linked_manifest(bad: Checkpoint) -> None:
    shutil.move(bad.folder / MANIFEST, bad.secret)
    os.symlink(bad.secret, bad.folder / MANIFEST)


@sample("a file for torch that is a link to /dev/zero")
def _endless(bad: Checkpoint) -> None:
    (bad.folder / FOR_TORCH).unlink()
    os.symlink("/dev/zero", bad.folder / FOR_TORCH)


@sample("a data file that is a pipe")
def _pipe(bad: Checkpoint) -> None:
    (bad.folder / DATA).unlink()
    os.mkfifo(bad.folder / DATA)


@sample("a manifest that is a pipe")
def _piped_manifest(bad: Checkpoint) -> None:
    (bad.folder / MANIFEST).unlink()
    os.mkfifo(bad.folder / MANIFEST)


@sample("a data file that is a folder")
def _folder(bad: Checkpoint) -> None:
    (bad.folder / DATA).unlink()
    (bad.folder / DATA).mkdir()


# Sizes.


def _hole_of(nbytes: int) -> list[Any]:
    """What is said of a file that nobody has the time to read."""
    return [nbytes, "0" * 8 * -(-nbytes // PIECE)]


@sample("a file of which the manifest says that it is huge")
def _huge_file(bad: Checkpoint) -> None:
    bad.body["files"][DATA] = _hole_of(1 << 40)
    bad.seal()


@sample("a data file that is a hole of a terabyte")
def _hole(bad: Checkpoint) -> None:
    os.truncate(bad.folder / DATA, 1 << 40)
    bad.body["files"][DATA] = _hole_of(1 << 40)
    bad.seal()


@sample("a weight that is a hole of a terabyte")
def _huge_weight(bad: Checkpoint) -> None:
    size = (bad.folder / DATA).stat().st_size
    os.truncate(bad.folder / DATA, size + (1 << 40))
    bad.body["files"][DATA] = _hole_of(size + (1 << 40))
    bad.entry(WEIGHT)["shape"] = [1 << 19, 1 << 19]
    bad.chunk()[:] = [[0, 0], [1 << 19, 1 << 19], DATA, size, 1 << 40, size]
    bad.seal()


@sample("a huge shape over a small file")
def _huge_shape(bad: Checkpoint) -> None:
    bad.entry(WEIGHT)["shape"] = [1 << 20, 1 << 20]
    bad.chunk()[1] = [1 << 20, 1 << 20]
    bad.seal()


@sample("sizes whose product is past 64 bits")
def _overflow(bad: Checkpoint) -> None:
    bad.entry(WEIGHT)["shape"] = [1 << 32, 1 << 32]
    bad.chunk()[1] = [1 << 32, 1 << 32]
    bad.seal()


def _put_extra(bad: Checkpoint, entry: dict[str, Any], names: int = 1) -> None:
    bad.body["entries"]["extra.x"] = entry
    bad.body["about"]["extra"] = {f"x{number}": {"$": "tensor", "key": "extra.x"} for number in range(names)}
    bad.seal()


@sample("no elements, of sizes whose product is past 64 bits")
def _empty_overflow(bad: Checkpoint) -> None:
    _put_extra(bad, {"shape": [1 << 40, 1 << 40, 0], "dtype": "float32", "chunks": []})


@sample("a thousand dims")
def _dims(bad: Checkpoint) -> None:
    bad.entry(WEIGHT)["shape"] = [1] * 1000
    bad.seal()


@sample("one item that is a thousand chunks of a large tensor")
def _same_item(bad: Checkpoint) -> None:
    rows, offset, length, data = (1 << 14), *bad.chunk("rng.0.cpu")[3:]
    chunks = [[[number * 4096], [4096], DATA, offset, length, data] for number in range(rows)]
    _put_extra(bad, {"shape": [rows * 4096], "dtype": "uint8", "chunks": chunks})


@sample("a tensor that is named very often")
def _many_names(bad: Checkpoint) -> None:
    entry = {"shape": [4096], "dtype": "uint8", "chunks": [[[0], [4096], *bad.chunk("rng.0.cpu")[2:]]]}
    del bad.body["entries"]["rng.0.cpu"]
    _put_extra(bad, entry, names=15_000)


@sample("chunks that cross, to be compared each with each")
def _crossing(bad: Checkpoint) -> None:
    # Every column is cut in two, each at another row.
    count = 2000
    text = (bad.folder / DATA).read_bytes()
    at, chunks = len(text), []
    for column in range(count):
        for start, stop in ((0, column + 1), (column + 1, count + 1)):
            chunks.append([[start, column], [stop - start, 1], DATA, at, stop - start, at])
            at += stop - start
    bad.put(DATA, text + bytes(at - len(text)))
    _put_extra(bad, {"shape": [count + 1, count], "dtype": "uint8", "chunks": chunks})


# Places.


@sample("a chunk beyond the end of its file")
def _beyond(bad: Checkpoint) -> None:
    bad.chunk()[3] = bad.chunk()[5] = 1 << 40
    bad.seal()


@sample("a chunk before the beginning")
def _before(bad: Checkpoint) -> None:
    bad.chunk()[5] = -64
    bad.seal()


@sample("a chunk that reaches beyond its tensor")
def _outgrown(bad: Checkpoint) -> None:
    bad.chunk()[0] = [1 << 30, 0]
    bad.seal()


@sample("a chunk twice")
def _twice(bad: Checkpoint) -> None:
    bad.entry(WEIGHT)["chunks"].append(list(bad.chunk()))
    bad.seal()


@sample("a chunk twice, and as many elements missing")
def _twice_for_another(bad: Checkpoint) -> None:
    offset, length, data = bad.chunk()[3:]
    half = [[0, 0], [3, 4], DATA, offset, length, data]
    bad.entry(WEIGHT)["chunks"] = [half, [*half[:3], offset + length, 4096, offset + length]]
    bad.seal()


@sample("a chunk that is missing")
def _missing_chunk(bad: Checkpoint) -> None:
    bad.entry(WEIGHT)["chunks"] = []
    bad.seal()


@sample("state of another shape")
def _other_state(bad: Checkpoint) -> None:
    bad.entry(MOMENTUM)["shape"] = [24]
    chunk = bad.chunk(MOMENTUM)
    bad.entry(MOMENTUM)["chunks"] = [[[0], [24], *chunk[2:]]]
    bad.seal()


@sample("state that is not there")
def _no_state(bad: Checkpoint) -> None:
    key = next(key for key in bad.body["entries"] if ".row_moment." in key or ".second_moment." in key)
    del bad.body["entries"][key]
    bad.seal()


@sample("a weight of complex numbers")
def _complex(bad: Checkpoint) -> None:
    offset, length, data = bad.chunk("rng.0.cpu")[3:]
    del bad.body["entries"]["rng.0.cpu"]
    bad.body["entries"][WEIGHT] = {
        "shape": [6, 4],
        "dtype": "complex64",
        "chunks": [[[0, 0], [6, 4], DATA, offset, length, data]],
    }
    bad.body["entries"].pop("optimizer.state.layer0.weight.master", None)
    bad.seal()


# JSON.


@sample("JSON that is nested a million deep")
def _deep(bad: Checkpoint) -> None:
    bad.write_unsealed("[" * 1_000_000)


@sample("JSON that is nested a little less deep than can be read")
def _rather_deep(bad: Checkpoint) -> None:
    bad.body["about"]["extra"] = {"x": None}
    body = json.dumps(bad.body)
    for depth in (900, 700, 500):
        bad.write(body.replace('"x": null', '"x": ' + "[" * depth + "]" * depth))


@sample("a manifest of many small lists")
def _lists(bad: Checkpoint) -> None:
    bad.write_unsealed("[" + "[]," * (10 << 20) + "[]]")


@sample("extra values that are as many small lists as may be")
def _extra_lists(bad: Checkpoint) -> None:
    bad.body["about"]["extra"] = [[]] * ((1 << 20) // 4)
    bad.seal()


@sample("a manifest that is a hole of a gigabyte")
def _hollow_manifest(bad: Checkpoint) -> None:
    os.truncate(bad.folder / MANIFEST, 1 << 30)


@sample("a count of a million digits")
def _digits(bad: Checkpoint) -> None:
    bad.write_unsealed(json.dumps(bad.body).replace('"step": 1', '"step": ' + "9" * 1_000_000))


@sample("a count that is NaN")
def _nan(bad: Checkpoint) -> None:
    bad.body["about"]["step"] = math.nan
    bad.seal()


@sample("a count that is true")
def _true(bad: Checkpoint) -> None:
    bad.chunk()[3] = True
    bad.seal()


@sample("a key twice")
def _twice_a_key(bad: Checkpoint) -> None:
    bad.write(json.dumps(bad.body)[:-1] + ', "about": {"step": 1}}')


@sample("names for text that is not text")
def _surrogate(bad: Checkpoint) -> None:
    bad.body["entries"]["model.\udfff\x1b[31m"] = bad.body["entries"].pop(WEIGHT)
    bad.seal()


# Types, wherever something is said.

PLACES: dict[str, tuple[str, ...]] = {
    "entries": ("entries",),
    "files": ("files",),
    "about": ("about",),
    "step": ("about", "step"),
    "params": ("about", "params"),
    "what is said of a param": ("about", "params", "layer0.weight"),
    "options": ("about", "options"),
    "extra": ("about", "extra"),
    "loss scale": ("about", "loss_scale"),
    "an entry": ("entries", WEIGHT),
    "a shape": ("entries", WEIGHT, "shape"),
    "a dtype": ("entries", WEIGHT, "dtype"),
    "chunks": ("entries", WEIGHT, "chunks"),
    "a file": ("files", DATA),
}
WRONG: dict[str, Any] = {
    "a number": -7,
    "text": "harm",
    "a list": [["a", 1], None],
    "by name": {"a": {"b": []}},
    "null": None,
    "a value of no kind": {"$": "harm"},
    "empty": {},
}
FINE = ("extra, by name", "extra, empty", "loss scale, null")
"""There these are as good as any."""


def _put(bad: Checkpoint, place: tuple[str, ...], value: Any) -> None:
    where = bad.body
    for key in place[:-1]:
        where = where[key]
    where[place[-1]] = value
    bad.seal()


for _what, _place in PLACES.items():
    for _kind, _value in WRONG.items():
        if f"{_what}, {_kind}" not in FINE:
            SAMPLES[f"{_what}, {_kind}"] = partial(_put, place=_place, value=_value)


# The judge.

LOADED = "was loaded"
TOOK = "took processors for"

_opened: list[str] = []


def _watch(folder: Path) -> None:
    """From now on, in this process, write down what is opened outside of a folder."""
    inside = f"{os.path.realpath(folder)}/"

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str) and not args[0].startswith("/proc/self/"):
            # A link that is not followed is not opened.
            followed = not isinstance(args[2], int) or not args[2] & os.O_NOFOLLOW
            path = os.path.realpath(args[0]) if followed else os.path.abspath(args[0])
            if not f"{path}/".startswith(inside):
                _opened.append(args[0])

    sys.addaudithook(hook)


class Cost:
    """What something takes: processor time, time, and memory beyond what there was."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self._rss, self._cpu, self._wall = _status("VmRSS"), time.process_time(), time.monotonic()

    def complaints(self) -> Iterator[str]:
        if (cpu := time.process_time() - self._cpu) > MOST_S:
            yield f"{TOOK} {cpu:.2f} s"
        if (wall := time.monotonic() - self._wall) > MOST_WAIT_S:
            yield f"waited {wall:.1f} s"
        if (more := _status("VmHWM") - self._rss) > MOST_MIB:
            yield f"took {more:.0f} MiB"


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def judge(rank: int, world: int, folder: str, names: list[str], torchs_own: bool) -> dict[str, str]:
    """What is wrong with how each sample was met."""
    training = small()
    training.step(rank, 0)
    whole, live = Path(folder, "whole"), Path(folder, "samples", "checkpoint")
    layerwise.save(whole, training.model, training.optimizer)
    layerwise.load(whole, training.model, training.optimizer)  # whatever is imported on the way is now
    saved = training.hash()
    training.step(rank, 1)
    before = training.hash()
    if torchs_own:
        list(_load_with_torch(whole))  # imports, too
    _watch(live)

    def met(name: str) -> list[str]:
        shutil.rmtree(live.parent, ignore_errors=True)
        shutil.copytree(whole, live)
        bad = Checkpoint(live)
        bad.secret.write_bytes(b"secret" * 1000)
        SAMPLES[name](bad)
        _opened.clear()
        cost = Cost()
        complaints = list(_load_with_torch(live) if torchs_own else _load(live, training))
        complaints += cost.complaints()
        complaints += ["ran what is in it"] if bad.canary.exists() else []
        complaints += [f"opened {path}" for path in _opened]
        if name == HARMLESS and not torchs_own:
            complaints = [text for text in complaints if text != LOADED]
            complaints += ["is not what was saved"] if training.hash() != saved else []
            training.step(rank, 1)
        return complaints + (["changed what was live"] if training.hash() != before else [])

    answers = {}
    for name in names:
        for _ in range(TRIES):
            complaints = met(name)
            if not any(text.startswith(TOOK) for text in complaints):
                break
        answers[name] = "; ".join(complaints)
    layerwise.load(whole, training.model, training.optimizer)
    answers["no harm meant"] = "" if training.hash() == saved else "it does not bring back what was saved"
    return answers


def _load(live: Path, training: Training) -> Iterator[str]:
    try:
        layerwise.load(live, training.model, training.optimizer)
        yield LOADED
    except CheckpointError as error:
        text = str(error)
        if len(text) > 2000 or not text.replace("\n", "").isprintable():
            yield f"has {len(text)} characters of error, or some that are none: {text[:100]!r}"
    except Exception as error:
        yield f"{type(error).__name__}: {str(error)[:200]}"


def _load_with_torch(live: Path) -> Iterator[str]:
    """What torch's own reader does; errors of it do not count."""
    for value in (torch.zeros(6, 4), "an object"):
        try:
            with redirect_stderr(io.StringIO()), warnings.catch_warnings(record=True):
                dcp.load({WEIGHT: value}, checkpoint_id=live, no_dist=True)
        except BaseException:
            continue
    yield from ()


def run(*, quick: bool = False, sabotage: bool = False) -> Outcome:
    """Every sample; with sabotage those that torch's own reader can read, with that."""
    typed = [name for name in SAMPLES if name.partition(",")[0] in PLACES]
    names = [name for name in SAMPLES if name not in typed] + (typed[::5] if quick else typed)
    with tempfile.TemporaryDirectory() as folder:
        try:
            (answers,) = run_ranks(1, judge, folder, FOR_TORCHS_READER if sabotage else names, sabotage)
        except RankFailure as failure:
            return tally({"all of them": str(failure)[-300:]})
    return tally(answers)
