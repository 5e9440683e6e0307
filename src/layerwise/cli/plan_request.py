"""What a user of `layerwise plan` asked for, and what is wrong with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from layerwise.config.rules import TpMode
from layerwise.dtypes import DType
from layerwise.errors import ConfigError, Problem
from layerwise.layout.cost import DEFAULT_HARDWARE, Hardware
from layerwise.layout.placing import MeshSizes
from layerwise.layout.storage import Reducer, resolve_layout

_MOST_RANKS = 1_000_000
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What the user asked for."""

    model: str
    world: int | None = None
    """None: what the sizes of the mesh come to."""
    expert_parallel: int = 1
    fsdp: int = 1
    replicate: int = 1
    tensor_parallel: int = 1
    layout: str = _ALL
    param_dtype: DType | None = None
    """None: what the model says, bf16 for presets."""
    quantize: str | None = None
    """The recipe by which weights are kept as codes; None: as a config of the trainer has it."""
    skip: tuple[str, ...] = ()
    grad_dtype: DType = DType.FP32
    bucket_mib: float | None = None
    rule: str = "muon"
    tp_mode: TpMode = "auto"
    reducer: Reducer = "collective"
    shard_grads: bool = False
    hardware: Hardware = DEFAULT_HARDWARE
    as_json: bool = False

    @property
    def sizes(self) -> MeshSizes | None:
        """The mesh over which torch cuts the model, if it does."""
        sizes = MeshSizes(self.replicate, self.fsdp, self.tensor_parallel, self.expert_parallel)
        return sizes if sizes.world != 1 else None

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.sizes.world if self.sizes is not None else self.world or 0

    @property
    def local_experts(self) -> int:
        """Over how many ranks the table of params has its experts spread already. torch's params are whole ones."""
        return self.expert_parallel if self.sizes is None else 1


def checked_layouts(request: PlanRequest) -> list[str] | None:
    """The layouts to compare, None for the usual ones; one `ConfigError` has everything that is wrong with the flags."""
    problems = [*_rank_problems(request)]
    if request.skip and request.quantize is None:
        problems.append(Problem("--skip", "is for --quantize: expected both or none of them."))
    positive = {
        "--bucket-mib": request.bucket_mib,
        "--tflops": request.hardware.ns_tflops,
        "--link-gb-s": request.hardware.link_gb_s,
    }
    for flag, value in positive.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            problems.append(Problem(flag, f"expected a positive number, got {value:g}."))
    layouts = [word.strip() for word in request.layout.split(",")]
    for layout in layouts if request.layout != _ALL else ():
        try:
            resolve_layout(layout)
        except ValueError as error:
            problems.append(Problem("--layout", str(error)))
    if problems:
        raise ConfigError(problems)
    return None if request.layout == _ALL else list(dict.fromkeys(layouts))


def _rank_problems(request: PlanRequest) -> Iterator[Problem]:
    """What is wrong with the number of ranks and how they are arranged."""
    sizes = {"--fsdp": request.fsdp, "--replicate": request.replicate, "--tp": request.tensor_parallel}
    small = [Problem(flag, f"expected at least 1, got {size}.") for flag, size in sizes.items() if size < 1]
    if small:
        yield from small
        return
    mesh = request.sizes
    if mesh is None and request.world is None:
        yield Problem(
            "--world", "expected a number of ranks. Or say how torch cuts the model: --fsdp, --replicate, --tp."
        )
        return
    if not 1 <= request.ranks <= _MOST_RANKS:
        yield Problem("--world", f"expected a number of ranks from 1 to {_MOST_RANKS}, got {request.ranks}.")
        return
    if request.tp_mode == "blockwise" and request.tensor_parallel == 1:
        yield Problem(
            "--tp-mode", "blockwise is for matrices that tensor parallelism has cut: expected --tp of 2 or more."
        )
    if mesh is None:
        if request.expert_parallel < 1 or request.ranks % request.expert_parallel:
            what = (
                f"expected a number that divides the {request.ranks} ranks of --world, got {request.expert_parallel}."
            )
            yield Problem("--ep", what)
        return
    if request.world is not None and request.world != mesh.world:
        yield Problem("--world", f"expected {mesh.world}, the ranks of the mesh, got {request.world}. Leave it out.")
    if mesh.ep < 1 or mesh.fsdp * mesh.tp % mesh.ep:
        yield Problem("--ep", f"expected a divisor of --fsdp {mesh.fsdp} times --tp {mesh.tp}, got {mesh.ep}.")
    if request.quantize is not None:
        yield Problem(
            "--quantize", "DTensor params cannot be quantised: plan it for layerwise.DataParallel, with --world."
        )
    ours = {
        "--layout": request.layout != _ALL,
        "--bucket-mib": request.bucket_mib is not None,
        "--reducer": request.reducer != "collective",
        "--shard-grads": request.shard_grads,
    }
    for flag in (flag for flag, is_set in ours.items() if is_set):
        yield Problem(
            flag, "is for layerwise.DataParallel: fully_shard() stores and reduces in its own way. Leave it out."
        )
