"""DeviceMesh of the user's: which dims it has, which ranks sit where, and whether these are all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

MESH_DIMS = ("pp", "dp", "ep")


def default_world() -> int:
    """How many ranks the default process group has; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_coverage(mesh: object) -> None:
    """Raise if a mesh has some of the ranks only: then some of them only may be here, and others would be waited for."""
    if isinstance(mesh, DeviceMesh) and sorted(mesh.mesh.flatten().tolist()) != list(range(default_world())):
        raise ValueError(
            f"mesh has the ranks {mesh.mesh.flatten().tolist()}, the process group {default_world()} ranks: expected every "
            "rank once. Build the mesh over all of them."
        )


def check_mesh(mesh: object) -> None:
    """Raise unless a mesh (or None) arranges all ranks along dims we know."""
    if mesh is None:
        return
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"mesh must be a torch DeviceMesh, got {type(mesh).__name__}. Leave it out for data parallelism."
        )
    names = mesh.mesh_dim_names
    if names is None or not set(names) <= set(MESH_DIMS):
        raise ValueError(
            f"mesh has the dims {names}: expected names out of {', '.join(map(repr, MESH_DIMS))}. Dense params are copied "
            "over dp and ep, expert params over dp, and pp is for pipeline stages; give mesh_dim_names to init_device_mesh()."
        )
    check_coverage(mesh)
    along = names.index("pp") if "pp" in names else None
    for stage in (mesh.mesh,) if along is None else mesh.mesh.unbind(along):
        ranks = stage.flatten().tolist()
        if ranks != sorted(ranks):
            raise ValueError(
                f"mesh has the ranks {ranks} in one stage: expected them in ascending order, so that places on different "
                "stages correspond. Build it with init_device_mesh()."
            )


def describe_mesh(mesh: DeviceMesh | None) -> dict[str, object] | None:
    """A mesh as data: its dims in order, and who sits where."""
    return (
        None
        if mesh is None
        else {
            "dims": [list(pair) for pair in zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)],
            "ranks": mesh.mesh.tolist(),
        }
    )


def num_stages(mesh: DeviceMesh | None) -> int:
    """How many pipeline stages a mesh has."""
    names = () if mesh is None else mesh.mesh_dim_names or ()
    return int(mesh.mesh.shape[names.index("pp")]) if mesh is not None and "pp" in names else 1


def places_of(mesh: DeviceMesh, dims: Sequence[str]) -> dict[int, dict[str, int]]:
    """The place of every rank along each of these dims."""
    names = mesh.mesh_dim_names or ()
    return {
        int(mesh.mesh[at]): {dim: place for dim, place in zip(names, at, strict=True) if dim in dims}
        for at in product(*map(range, mesh.mesh.shape))
    }


def stages_of(mesh: DeviceMesh) -> tuple[tuple[int, ...], ...]:
    """The ranks of every pipeline stage of a mesh, in ascending order."""
    return ranks_by(places_of(mesh, ("pp",)), ("pp",))


def ranks_by(places: Mapping[int, Mapping[str, int]], dims: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks that sit at the same place along these dims, set by set, each in order of rank."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in sorted(places.items()):
        found.setdefault(tuple(place.get(dim, 0) for dim in dims), []).append(rank)
    return tuple(tuple(found[key]) for key in sorted(found))
