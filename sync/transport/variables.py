"""Arrays as a transport sees them: which device holds which slice.

A device is numbered by its position in the mesh, never by its id: meshes
reorder devices for topology.
"""

import collections.abc
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from laneweave.sync import shards
from laneweave.sync.transport import base


def mesh_devices(sharding: Any) -> list[Any] | None:
  """Devices in mesh order; None for a sharding that has no such order."""
  if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
    return list(sharding.mesh.devices.flat)
  devices = list(getattr(sharding, "device_set", ()))
  return devices if len(devices) == 1 else None


def without_trailing_none(sharding: Any, rank: int) -> Any:
  """A sharding whose spec does not name axes that the array lacks.

  Args:
    sharding: Any sharding.
    rank: Rank of the array.

  Returns:
    The same sharding, with surplus Nones cut off the end of its spec.
  """
  if not isinstance(sharding, NamedSharding):
    return sharding
  spec = list(sharding.spec)
  while len(spec) > rank and spec[-1] is None:
    spec.pop()
  return sharding.update(spec=PartitionSpec(*spec))


def variables_of(
  arrays: collections.abc.Mapping[str, Any],
) -> tuple[base.Variable, ...]:
  """Describes arrays; ordinals follow the mapping's order.

  Args:
    arrays: Arrays, or shapes with shardings, by name.

  Returns:
    One variable an array.

  Raises:
    base.MismatchError: arrays that are split unevenly, lie on another mesh
      than the first, or have a sharding without a mesh.
  """
  problems, variables = [], []
  first, mesh = None, None
  for ordinal, (name, x) in enumerate(arrays.items()):
    devices = mesh_devices(x.sharding)
    problem = _problem(x, devices)
    if problem is None and mesh is None:
      first, mesh = name, devices
    if problem is None and devices != mesh:
      problem = (
        f"lies on {_ids(devices)}, but `{first}` on {_ids(mesh)};"
        " all arrays of a side must be on one mesh"
      )
    if problem is not None:
      problems.append(f"`{name}` {x.dtype.name}{list(x.shape)} {problem}")
    else:
      variables.append(_variable(name, ordinal, x, devices))
  if problems:
    raise base.MismatchError("arrays that cannot be transferred", problems)
  return tuple(variables)


def _ids(devices):
  return f"devices {[d.id for d in devices]}"


def _problem(x, devices) -> str | None:
  """Why an array cannot be described."""
  rank = len(x.shape)
  if rank == 0:
    return "has rank 0; only arrays of rank 1 and more are moved"
  if devices is None:
    return (
      f"has a {type(x.sharding).__name__}, which has no mesh order; place it"
      " with a NamedSharding"
    )
  mesh = getattr(x.sharding, "mesh", None)
  if not isinstance(mesh, Mesh):
    return None
  if len(x.sharding.spec) > rank:
    return f"has rank {rank} and a spec for more axes, {x.sharding.spec}"
  spec = shards.normalize_spec(x.sharding.spec, rank)
  for axis, (names, size) in enumerate(zip(spec, x.shape, strict=True)):
    parts = shards.axes_size(mesh, names)
    if size % parts:
      return (
        f"has {size} elements along axis {axis}, which mesh axes"
        f" {', '.join(names)} split into {parts}; choose a sharding that"
        " divides it"
      )
  return None


def _variable(name, ordinal, x, devices):
  local = x.sharding.shard_shape(x.shape)
  grid = tuple(d // n if n else 1 for d, n in zip(x.shape, local, strict=True))
  held = x.sharding.devices_indices_map(x.shape)
  places = [
    [
      (s.start or 0) // n if n else 0
      for s, n in zip(held[device], local, strict=True)
    ]
    for device in devices
  ]
  indices = np.asarray(np.ravel_multi_index(np.array(places).T, grid))
  return base.Variable(
    name=name,
    ordinal=ordinal,
    shape=tuple(x.shape),
    dtype=x.dtype.name,
    mesh_shape=grid,
    sharding_spec=_spec(x.sharding, len(x.shape)),
    global_shard_indices=tuple(indices.tolist()),
  )


def _spec(sharding: jax.sharding.Sharding, rank: int) -> tuple[str, ...]:
  if not isinstance(sharding, NamedSharding):
    return ("",) * rank
  return tuple(
    ",".join(names) for names in shards.normalize_spec(sharding.spec, rank)
  )
