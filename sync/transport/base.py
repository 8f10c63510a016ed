"""What a transport is, and the plain data that both ends exchange."""

import collections.abc
import dataclasses
import math
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding
import numpy as np


class TransportError(RuntimeError):
  """A transfer failed, timed out, or cannot be set up."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
  """One array as a transport sees it.

  Attributes:
    name: Canonical name.
    ordinal: Place in the sorted list of names that both sides agree on.
    shape: Global shape.
    dtype: dtype name.
    mesh_shape: Shards along each axis.
    sharding_spec: Mesh axes along each axis, joined by commas; "" for none.
    global_shard_indices: For each device in mesh order, which slice it holds,
      counted row-major over the grid of shards.
  """

  name: str
  ordinal: int
  shape: tuple[int, ...]
  dtype: str
  mesh_shape: tuple[int, ...]
  sharding_spec: tuple[str, ...]
  global_shard_indices: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkUnit:
  """One side of a transfer.

  Attributes:
    job: "trainer" or "rollout".
    replica: Replica of the job.
    endpoints: Data address ("host:port") of each device, in mesh order.
    control_address: Address of the synchronizer's listener.
    mesh_shape: Sizes of the mesh axes.
    mesh_axes: Names of the mesh axes.
    linear_staging: Staging buffers are linear rather than in device tiles,
      as they are on CPU; the transfer must then not move whole tiles.
    variables: The arrays, by ordinal.
  """

  job: str
  replica: str
  endpoints: tuple[str, ...]
  control_address: str
  mesh_shape: tuple[int, ...]
  mesh_axes: tuple[str, ...]
  linear_staging: bool
  variables: tuple[Variable, ...]


class Endpoint(Protocol):
  """One side's persistent end of a transport."""

  def bind(self, arrays: collections.abc.Mapping[str, jax.Array]) -> None:
    """Takes this round's arrays; names, shapes and shardings never change."""

  def work_unit(self) -> WorkUnit:
    """What the other side needs to know."""
    ...

  def stage(self) -> None:
    """Copies the bound arrays to host staging buffers; returns when done."""

  def load(self) -> dict[str, jax.Array]:
    """Copies staging buffers to the devices; returns the arrays, all there."""
    ...

  def release(self) -> None:
    """Lets go of the bound arrays."""

  def close(self) -> None:
    """Frees everything; idempotent."""


class Controller(Protocol):
  """Runs transfers between registered work units."""

  def register(self, unit: WorkUnit) -> None:
    """Makes a work unit known; idempotent for an unchanged one."""

  def transfer(
    self,
    source: WorkUnit,
    destinations: collections.abc.Sequence[WorkUnit],
    *,
    uuid: int,
    request: str,
    timeout_s: float,
  ) -> None:
    """Moves all variables; returns when every byte is in the staging buffers.

    Raises:
      TransportError: the transfer failed or did not end in time.
    """

  def close(self) -> None:
    """Frees everything; idempotent."""


def variables_of(
  arrays: collections.abc.Mapping[str, jax.Array],
) -> tuple[Variable, ...]:
  """Describes arrays; ordinals follow the mapping's order.

  Args:
    arrays: Arrays, or shapes with shardings, by name.

  Returns:
    One variable an array.

  Raises:
    TransportError: an array without a sharding a transport understands.
  """
  return tuple(
    _variable(name, ordinal, x)
    for ordinal, (name, x) in enumerate(arrays.items())
  )


def _variable(name, ordinal, x):
  sharding = x.sharding
  local = sharding.shard_shape(x.shape)
  grid = tuple(
    math.ceil(d / n) if n else 1 for d, n in zip(x.shape, local, strict=True)
  )
  if any(d != g * n for d, g, n in zip(x.shape, grid, local, strict=True)):
    raise TransportError(
      f"`{name}` {list(x.shape)} is split unevenly into shards of"
      f" {list(local)}; choose a sharding that divides it"
    )
  held = sharding.devices_indices_map(x.shape)
  indices = []
  for device in mesh_devices(sharding):
    place = [
      (s.start or 0) // n for s, n in zip(held[device], local, strict=True)
    ]
    indices.append(int(np.ravel_multi_index(place, grid)))
  return Variable(
    name=name,
    ordinal=ordinal,
    shape=tuple(x.shape),
    dtype=x.dtype.name,
    mesh_shape=grid,
    sharding_spec=_spec(sharding, len(x.shape)),
    global_shard_indices=tuple(indices),
  )


def mesh_devices(sharding: jax.sharding.Sharding) -> list[Any]:
  """Devices in mesh order: position, never id, numbers a device."""
  if isinstance(sharding, NamedSharding):
    return list(sharding.mesh.devices.flat)
  devices = list(sharding.device_set)
  if len(devices) != 1:
    raise TransportError(
      f"a {type(sharding).__name__} over {len(devices)} devices has no mesh"
      " order; use a NamedSharding"
    )
  return devices


def _spec(sharding, rank):
  spec = sharding.spec if isinstance(sharding, NamedSharding) else ()
  names = [
    "" if e is None else e if isinstance(e, str) else ",".join(e) for e in spec
  ]
  return tuple(names + [""] * (rank - len(names)))


def preflight(source: WorkUnit, destination: WorkUnit) -> list[str]:
  """Whether two work units can be joined; before anything is moved.

  Args:
    source: The trainer's.
    destination: A rollout's.

  Returns:
    Everything that does not agree, each with the variable's name.
  """
  problems = []
  ours = {v.name: v for v in source.variables}
  theirs = {v.name: v for v in destination.variables}
  if missing := sorted(ours.keys() - theirs.keys()):
    problems.append(
      f"{len(missing)} of the trainer's arrays are not on the rollout, first"
      f" `{missing[0]}`"
    )
  if missing := sorted(theirs.keys() - ours.keys()):
    problems.append(
      f"{len(missing)} of the rollout's arrays are not on the trainer, first"
      f" `{missing[0]}`"
    )
  for name in ours.keys() & theirs.keys():
    a, b = ours[name], theirs[name]
    if (a.shape, a.dtype, a.ordinal) != (b.shape, b.dtype, b.ordinal):
      problems.append(
        f"`{name}` is {a.dtype}{list(a.shape)} with ordinal {a.ordinal} on"
        f" the trainer and {b.dtype}{list(b.shape)} with ordinal"
        f" {b.ordinal} on the rollout"
      )
  for unit in (source, destination):
    for v in unit.variables:
      slices = set(v.global_shard_indices)
      copies = len(v.global_shard_indices) // max(len(slices), 1)
      counts = {v.global_shard_indices.count(i) for i in slices}
      if slices != set(range(math.prod(v.mesh_shape))) or counts != {copies}:
        problems.append(
          f"`{v.name}`: the shards of the {unit.job} do not tile"
          f" {list(v.shape)} once per replica"
        )
  return sorted(problems)
