"""Saving: every rank writes its share of the tensors into a folder that nobody takes for a checkpoint yet; the first rank says
what is in it, and gives it its name. In the background the same is done by a thread, with a copy of what there was to write."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from layerwise._version import __version__
from layerwise.checkpoint import torch_format
from layerwise.checkpoint.contents import Contents, Part
from layerwise.checkpoint.disk import (
    check_free,
    check_room,
    facts_of,
    make_partial,
    none_left,
    partial_of,
    sync_folder,
    write_files,
)
from layerwise.checkpoint.files import DataFile
from layerwise.checkpoint.manifest import FILE_NAME, Chunk, Entry, FileFacts, Manifest, most_nbytes
from layerwise.checkpoint.own import PLACES, OwnBuffers
from layerwise.checkpoint.plain import check_extra, to_plain
from layerwise.checkpoint.rates import options_of
from layerwise.comm.errands import Errand
from layerwise.comm.groups import Groups, derive_together, share
from layerwise.engine.engine import Engine
from layerwise.errors import CheckpointError, listed, warn
from layerwise.memory.copies import Copies
from layerwise.models.names import named_modules
from layerwise.models.tracing import never_traced
from layerwise.optim.optimizer import Optimizer
from layerwise.routing.geometry import Box

EXTRA, RNG = "extra", "rng"
_MOST_NBYTES = 16 << 20
"""Bytes of the largest item: as much memory as one tensor at a time takes on its way to disk."""


class Written(NamedTuple):
    """What one rank has written."""

    entries: dict[str, Entry]
    files: dict[str, FileFacts]


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written, or has been, as `layerwise.save` returns it.

    Args:
        path: its folder.
    """

    path: Path
    _errand: Errand | None
    """Who writes it; None where that was done on the spot."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._errand is None or self._errand.is_done

    @property
    def has_failed(self) -> bool:
        """Whether it has ended in an error, which `wait()` raises."""
        return self._errand is not None and self._errand.has_failed

    def wait(self) -> Path:
        """Return when it is on disk, on every rank; raise if it cannot be."""
        if self._errand is not None:
            self._errand.wait()
        return self.path


def save(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    background: bool = False,
) -> Saving:
    """Write a checkpoint: weights, masters, optimizer state, step, options, random number generators, and what is in `extra`.
    Call it on every rank, with a path in a folder that all of them share.

    A folder of that name is there when all of it is on disk, and not before. A path that is taken is refused.

    Args:
        path: the folder to make.
        model: the `DataParallel`, or the model that the optimizer was built with.
        optimizer: its optimizer. None writes weights alone.
        extra: what else belongs to it, by name: plain values and tensors, the same on every rank, or objects with a
            `state_dict()`, such as a scheduler.
        background: return once this rank's share has been copied to memory of the host, and have a thread write it while
            training goes on. What goes wrong then is warned of at once, and raised by `wait()` of what this returns or by the
            next save. A second save waits for the first; a process that ends does so when it is written.
    """
    return save_and_then(path, model, optimizer, extra, lambda: None, background=background)


@never_traced
@torch.no_grad()
def save_and_then(
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    then: Callable[[], None],
    *,
    before: Callable[[], None] = lambda: None,
    background: bool,
) -> Saving:
    """`save`, and what the first rank does once it is certain that there is something to write, and once it has its name."""
    contents = Contents.of(model, optimizer)
    engine, optimizer = contents.engine, contents.optimizer
    groups, target = engine.groups, Path(path).absolute()  # a thread writes it, whatever the folder is by then
    engine.finish_errands()
    if optimizer is not None:
        optimizer.bring_up_to_date()
    else:
        engine.publisher.ensure_all()
    _warn_of_left_out(engine)
    beside: dict[str, Tensor] = {}
    # Of what is beside tensors the first rank's is written, which must be everybody's.
    about = derive_together(
        groups, "extra values", lambda: _about(contents, extra, beside), lambda about: {EXTRA: about[EXTRA]}
    )

    own = OwnBuffers.of(contents)
    about[PLACES] = own.places
    on_first(groups, before)

    beside = beside if groups.rank == 0 else {}

    # What another process writes under the same name is not of this save.
    def needs() -> dict[str, Any]:
        nbytes = contents.nbytes + sum(part.tensor.nbytes for part in own.parts)
        return {"number": secrets.token_hex(8), "nbytes": nbytes + sum(tensor.nbytes for tensor in beside.values())}

    told: list[Any] = share(groups, needs)
    number = told[0]["number"]
    begun: list[Path] = []

    def prepare() -> Share:
        check_free(target)
        if groups.rank == 0:
            begun.append(make_partial(target))
            check_room(begun[0], sum(theirs["nbytes"] for theirs in told))
        return Share.of(contents, own.parts, beside, number, copied=background)

    with none_left(begun):
        written = derive_together(groups, "checkpoints", prepare, lambda _: {"background": background})

    def finish() -> None:
        _finish(about, groups.world, target, number)
        then()

    def write(groups: Groups) -> None:
        with none_left(begun):
            _together(groups, lambda: _write_share(written, groups.rank, partial_of(target)))
            on_first(groups, finish)

    def write_aside(groups: Groups) -> None:
        try:
            write(groups)
        except Exception as error:
            warn(f"saving {target} in the background failed: {error}", aloud=groups.rank == 0)
            raise

    if background:
        return Saving(target, engine.errands.begin(write_aside))
    write(groups)
    return Saving(target, None)


def _warn_of_left_out(engine: Engine) -> None:
    """Say what of a module's state is in no checkpoint of ours."""
    names = [
        name or type(module).__name__
        for chunk in engine.chunks
        for name, module in named_modules(chunk)
        if type(module).get_extra_state is not nn.Module.get_extra_state
    ]
    if names:
        warn(
            f"get_extra_state() of {listed(names)} is not in the checkpoint, which has params, buffers and optimizer state: pass it in "
            "extra=, and give it back after load().",
            aloud=engine.groups.rank == 0,
        )


def _together(groups: Groups, do: Callable[[], None]) -> None:
    """Done by all ranks; an error of one is an error of all, and nobody goes on before all are done."""
    derive_together(groups, "checkpoints", do, lambda _: {})


def on_first(groups: Groups, do: Callable[[], None]) -> None:
    """Done by the first rank, while the others wait; its error is one of all."""
    _together(groups, lambda: do() if groups.rank == 0 else None)


def _about(contents: Contents, extra: Mapping[str, Any] | None, beside: dict[str, Tensor]) -> dict[str, Any]:
    """What is said beside tensors; those that `extra` has go to `beside`."""
    engine, optimizer = contents.engine, contents.optimizer
    scaler = None if optimizer is None else optimizer.stepper.scaler
    check_extra(extra)
    given = {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in (extra or {}).items()
    }
    nowhere: dict[str, Tensor] = {}
    return {
        "step": engine.count.steps,
        "world": engine.groups.world,
        "layout": engine.plan.layout_label,
        "plan": engine.plan.digest,
        "layerwise": __version__,
        "torch": str(torch.__version__),
        "loss_scale": None if scaler is None else to_plain(scaler.state_dict(), "loss_scale", nowhere),
        "has_optimizer": optimizer is not None,
        EXTRA: to_plain(given, EXTRA, beside),
    }


class Share(NamedTuple):
    """What one rank writes."""

    parts: Iterable[Part]
    params: Mapping[str, tuple[Any, ...]]
    options: Mapping[str, Any]
    number: str
    """Of the save, the same on every rank."""

    @classmethod
    def of(
        cls, contents: Contents, own: Iterable[Part], beside: Mapping[str, Tensor], number: str, *, copied: bool
    ) -> Share:
        """As it is now; `copied` is what later steps do not change."""
        parts: Iterable[Part] = _parts(contents, own, beside)
        if copied:
            parts = _copied(parts, contents.engine.copies)
        params = {name: tuple(said) for name, said in contents.facts().items()}
        return cls(parts, params, options_of(contents), number)


def _write_share(share: Share, rank: int, partial: Path) -> None:
    """This rank's data file, and what is in it, for the first rank to read."""
    if not partial.is_dir():
        raise CheckpointError(
            f"{partial} is not there on rank {rank}, and rank 0 has made it: expected a path in a folder that all ranks share."
        )
    written = write_parts(share.parts, partial / f"__{rank}_0.distcp")
    facts = {
        "manifest": Manifest(written.entries, written.files, {"step": 0}).to_body(),
        "params": share.params,
        "options": share.options,
        "save": share.number,
    }
    # Nobody needs it on disk: it is gone before the checkpoint has its name.
    (partial / _share_name(rank)).write_text(json.dumps(facts))


def _share_name(rank: int) -> str:
    return f"share_{rank}.json"


def _parts(contents: Contents, own: Iterable[Part], beside: Mapping[str, Tensor]) -> Iterator[Part]:
    """What this rank writes."""
    yield from (part for part in contents.parts() if part.is_mine)
    yield from own
    groups, device = contents.engine.groups, contents.engine.storage.device
    generators = {f"{RNG}.{groups.rank}.cpu": torch.get_rng_state()}
    if device.type == "cuda":
        generators[f"{RNG}.{groups.rank}.cuda"] = torch.cuda.get_rng_state(device)
    for key, tensor in {**generators, **beside}.items():
        shape = tuple(tensor.shape)
        yield Part(key, shape, Box.whole(shape), tensor, True)


def _copied(parts: Iterable[Part], copies: Copies) -> list[Part]:
    """The same in memory that nobody else writes."""
    copies.begin()
    found = [
        part._replace(box=box, tensor=copies.add(tensor))
        for part in parts
        for box, tensor in _pieces(part.box, part.tensor)
    ]
    copies.finish()
    return found


def write_parts(parts: Iterable[Part], path: Path) -> Written:
    """Write parts of tensors into a data file."""
    file = DataFile(path)
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    chunks: dict[str, list[Chunk]] = {}
    try:
        for part in parts:
            kinds[part.key] = part.shape, part.dtype
            for box, tensor in _pieces(part.box, part.tensor):
                chunks.setdefault(part.key, []).append(Chunk(box, path.name, *file.add(tensor)))
        entries = {key: Entry(*kind, tuple(chunks[key])) for key, kind in kinds.items()}
        return Written(entries, {path.name: file.close()})
    except BaseException:
        file.drop()
        raise


def _pieces(box: Box, tensor: Tensor) -> Iterator[tuple[Box, Tensor]]:
    """A box in parts that are not too large."""
    if tensor.nbytes <= _MOST_NBYTES:
        yield box, tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    size = tensor.shape[dim]
    length = max(1, size * _MOST_NBYTES // tensor.nbytes)
    for start in range(0, size, length):
        stop = min(start + length, size)
        first = box.starts[dim]
        part = Box(
            (*box.starts[:dim], first + start, *box.starts[dim + 1 :]),
            (*box.stops[:dim], first + stop, *box.stops[dim + 1 :]),
        )
        yield from _pieces(part, tensor.narrow(dim, start, stop - start))


def _finish(about: Mapping[str, Any], world: int, target: Path, number: str) -> None:
    """Put together what ranks have written, make sure that nothing is missing, and give it its name."""
    partial = partial_of(target)
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    chunks: dict[str, list[Chunk]] = {}
    files: dict[str, FileFacts] = {}
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for rank in range(world):
        left = partial / _share_name(rank)
        if not left.exists():
            raise CheckpointError(
                f"{left} is not there: rank {rank} has written nothing, or another process has taken it away. Save again, one run under a "
                "name."
            )
        facts = json.loads(left.read_bytes())
        if facts.get("save") != number:
            raise CheckpointError(
                f"{partial} has what another process wrote there while rank {rank} of this one did: expected one run to save under a "
                "name. Stop the other one, and save again."
            )
        theirs = Manifest.from_body(facts["manifest"], str(left))
        for key, entry in theirs.entries.items():
            shape, dtype = kinds.setdefault(key, (entry.shape, entry.dtype))
            if (shape, dtype) != (entry.shape, entry.dtype):
                raise CheckpointError(
                    f"{key!r} is {shape} {dtype} on some ranks and {entry.shape} {entry.dtype} on others: two params have one "
                    "name. Name them apart; those of a pipeline stage by their number in the model."
                )
            chunks.setdefault(key, []).extend(entry.chunks)
        files.update(theirs.files)
        params.update(facts["params"])
        options = {**facts["options"], **options}
        left.unlink()
    entries = {key: Entry(*kind, tuple(chunks[key])) for key, kind in kinds.items()}
    told = {**about, "params": params, "options": list(options.values())}
    commit(Manifest(entries, files, told), target)


def commit(manifest: Manifest, target: Path) -> None:
    """Say what is in a folder whose data files are on disk, and give it its name."""
    partial = partial_of(target)
    metadata = torch_format.metadata_bytes(manifest.entries)
    files = {**manifest.files, torch_format.FILE_NAME: facts_of(metadata)}
    manifest = Manifest(manifest.entries, files, manifest.about)
    manifest.check("what ranks have written")
    text = manifest.to_bytes()
    if len(text) > (most := most_nbytes(sum(facts.nbytes for facts in files.values()))):
        raise CheckpointError(
            f"{partial / FILE_NAME} would have {len(text)} bytes, expected {most} at most: what is in extra is too much for plain "
            "values. Put it into tensors."
        )
    write_files(partial, {torch_format.FILE_NAME: metadata, FILE_NAME: text})
    sync_folder(partial)
    os.rename(partial, target)
    try:
        sync_folder(target.parent)
    except OSError as error:  # it has its name
        warn(f"{target} is written, and the system does not say that its name is on disk: {error}.")
