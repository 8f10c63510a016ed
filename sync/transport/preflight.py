"""Whether two work units can be joined; before anything is moved.

A unit may have come over a network: nothing in it is taken for granted, and
nothing takes longer than the unit is long.
"""

import collections
import math

import numpy as np

from laneweave.sync.transport import base


def preflight(source: base.WorkUnit, destination: base.WorkUnit) -> list[str]:
  """Compares the two sides and checks each by itself.

  Args:
    source: The trainer's.
    destination: A rollout's.

  Returns:
    Everything that is wrong, each with the array's name.
  """
  problems = []
  for unit in (source, destination):
    problems += _unit_problems(unit)
  ours = {v.name: v for v in source.variables}
  theirs = {v.name: v for v in destination.variables}
  problems += [
    f"`{name}` {ours[name]} is on the trainer and not on the rollout"
    for name in ours
    if name not in theirs
  ]
  problems += [
    f"`{name}` {theirs[name]} is on the rollout and not on the trainer"
    for name in theirs
    if name not in ours
  ]
  for name, a in ours.items():
    b = theirs.get(name)
    if b is None:
      continue
    if (a.shape, a.dtype) != (b.shape, b.dtype):
      problems.append(
        f"`{name}` is {a} ({_bytes(a)}) on the trainer and {b} ({_bytes(b)})"
        " on the rollout"
      )
    if a.ordinal != b.ordinal:
      problems.append(
        f"`{name}` has ordinal {a.ordinal} on the trainer and {b.ordinal} on"
        " the rollout; both must number the same sorted names"
      )
  return problems


def _bytes(v: base.Variable) -> str:
  size = _item_size(v)
  if size is None:
    return "unknown bytes"
  return f"{math.prod(v.shape) * size} bytes"


def _item_size(v: base.Variable) -> int | None:
  try:
    return np.dtype(v.dtype).itemsize
  except TypeError:
    return None


def _unit_problems(unit: base.WorkUnit) -> list[str]:
  """What is wrong with one side by itself."""
  problems = []
  devices = math.prod(unit.mesh_shape)
  if not unit.variables:
    problems.append(f"the {unit.job} has no arrays")
  if devices != len(unit.endpoints):
    problems.append(
      f"the {unit.job} has {len(unit.endpoints)} endpoints for a mesh of"
      f" {list(unit.mesh_shape)}"
    )
  if unit.host_subgrid and not _is_block(unit.host_subgrid, unit.mesh_shape):
    problems.append(
      f"the {unit.job} has hosts of {list(unit.host_subgrid)} devices, which do"
      f" not divide a mesh of {list(unit.mesh_shape)}"
    )
  if [v.ordinal for v in unit.variables] != list(range(len(unit.variables))):
    problems.append(f"the {unit.job}'s ordinals do not count from 0")
  names = collections.Counter(v.name for v in unit.variables)
  problems += [
    f"`{name}` is {count} arrays of the {unit.job}"
    for name, count in names.items()
    if count > 1
  ]
  for v in unit.variables:
    problem = _variable_problem(v, len(unit.endpoints))
    if problem is not None:
      problems.append(f"`{v.name}` {v} of the {unit.job} {problem}")
  return problems


def _is_block(block: tuple[int, ...], mesh: tuple[int, ...]) -> bool:
  return len(block) == len(mesh) and all(
    b > 0 and n % b == 0 for b, n in zip(block, mesh, strict=True)
  )


def _variable_problem(v: base.Variable, endpoints: int) -> str | None:
  """What is wrong with one array by itself."""
  if not v.shape or min(v.shape) < 0 or _item_size(v) is None:
    return "is no array that can be moved"
  if len(v.mesh_shape) != len(v.shape) or min(v.mesh_shape) < 1:
    return f"has {list(v.mesh_shape)} shards, one number an axis is needed"
  if any(d % n for d, n in zip(v.shape, v.mesh_shape, strict=True)):
    return f"does not divide into {list(v.mesh_shape)} shards"
  if len(v.global_shard_indices) != endpoints:
    return (
      f"names slices of {len(v.global_shard_indices)} devices and has"
      f" {endpoints}"
    )
  held = collections.Counter(v.global_shard_indices)
  slices = math.prod(v.mesh_shape)
  if (
    len(held) != slices
    or len(set(held.values())) > 1
    or min(held) != 0
    or max(held) != slices - 1
  ):
    return "is not tiled exactly once per replica by its shards"
  return None
