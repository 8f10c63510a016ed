"""Which host each device of a mesh belongs to, and its slot there.

Raiden stages per host: a host's synchronizer has one slot a device. Hosts are
found from the devices themselves: under Pathways one client process addresses
all devices, so neither the process nor `mesh.local_mesh` tells hosts apart.
"""

import collections
import dataclasses
import math
from typing import Any

from jax.sharding import Mesh
import numpy as np

from laneweave.sync.transport import base

# What names a device's host, where a backend has it.
_HOST_ATTRIBUTES = ("process_index", "task_id", "logical_task", "slice_index")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hosts:
  """Places of a mesh's devices.

  Attributes:
    per_host: Devices of each host.
    subgrid: Shape of the block of the mesh that one host holds; None where all
      devices are one host's.
    places: (host, slot) of each device, by position in the mesh.
  """

  per_host: int
  subgrid: tuple[int, ...] | None
  places: tuple[tuple[int, int], ...]


def host_of(device: Any) -> tuple[Any, ...]:
  """What a device has in common with those of its host only."""
  return tuple(getattr(device, name, None) for name in _HOST_ATTRIBUTES)


def find(mesh: Mesh) -> Hosts:
  """Finds the hosts of a mesh.

  Raiden's planner knows hosts as equal blocks of the mesh, numbered row-major,
  with slots row-major in the block. Other arrangements are refused: they would
  move the wrong shards.

  Args:
    mesh: The mesh.

  Returns:
    The hosts.

  Raises:
    base.MismatchError: hosts hold different numbers of devices, or devices
      that are no block of the mesh.
  """
  keys = np.empty(mesh.devices.shape, object)
  for at, device in np.ndenumerate(mesh.devices):
    keys[at] = host_of(device)
  members = collections.defaultdict(list)
  for at in np.ndindex(*keys.shape):
    members[keys[at]].append(at)
  counts = {len(m) for m in members.values()}
  if len(counts) > 1:
    raise base.MismatchError(
      "hosts of the mesh",
      [f"host {key} has {len(m)} of its devices" for key, m in members.items()],
    )
  if len(members) == 1:
    places = [(0, slot) for slot in range(keys.size)]
    return Hosts(per_host=keys.size, subgrid=None, places=tuple(places))
  # The block is as large as the box around the first host's devices.
  first = np.array(members[keys.flat[0]])
  block = tuple(int(n) for n in first.max(0) - first.min(0) + 1)
  divides = all(
    n % b == 0 for n, b in zip(mesh.devices.shape, block, strict=True)
  )
  problems = []
  for key, at in members.items():
    corners = {tuple(c // b for c, b in zip(a, block, strict=True)) for a in at}
    if not divides or len(at) != math.prod(block) or len(corners) != 1:
      problems.append(f"host {key} has the positions {at}, no block of {block}")
  if problems:
    raise base.MismatchError(
      f"hosts of the mesh {dict(mesh.shape)} must each hold one block of it;"
      " order the mesh's devices by host",
      problems,
    )
  grid = tuple(n // b for n, b in zip(mesh.devices.shape, block, strict=True))
  places = tuple(
    (
      int(
        np.ravel_multi_index(
          tuple(c // b for c, b in zip(at, block, strict=True)), grid
        )
      ),
      int(
        np.ravel_multi_index(
          tuple(c % b for c, b in zip(at, block, strict=True)), block
        )
      ),
    )
    for at in np.ndindex(*keys.shape)
  )
  return Hosts(per_host=math.prod(block), subgrid=block, places=places)
