"""What one device holds of an array, and what a layout is on one device.

A layout is global; `shard_map` runs its local part on every device. That works
where each device already holds everything its part of the output is made of,
which `localize` decides from the segments alone.
"""

import collections.abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from laneweave.kernels import layout as layout_lib

# Mesh axes of each array axis, major first; `()` where it is not sharded.
Spec = tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
  """Where an array lives: a mesh and the mesh axes of each of its axes.

  Attributes:
    mesh: The mesh; None for an array on a single device.
    spec: Mesh axes of each array axis.
  """

  mesh: Mesh | None
  spec: Spec

  def parts(self, axis: int) -> int:
    """Number of shards along an array axis."""
    return axes_size(self.mesh, self.spec[axis])

  def sharding(self) -> NamedSharding:
    """The sharding this stands for."""
    assert self.mesh is not None
    return NamedSharding(self.mesh, to_partition_spec(self.spec))


def axes_size(mesh: Mesh | None, names: tuple[str, ...]) -> int:
  """Number of shards that the named mesh axes make together."""
  return math.prod(mesh.shape[n] for n in names) if mesh is not None else 1


def to_partition_spec(spec: Spec) -> PartitionSpec:
  """The `PartitionSpec` of a normalised spec."""
  return PartitionSpec(
    *(None if not n else n[0] if len(n) == 1 else n for n in spec)
  )


def normalize_spec(spec: PartitionSpec, rank: int) -> Spec:
  """Every array axis with its mesh axes, short specs padded."""
  entries = [
    () if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec
  ]
  return tuple(entries) + ((),) * (rank - len(entries))


def placement(name: str, x: jax.Array) -> Placement:
  """Reads an array's placement.

  Args:
    name: What the error calls the array.
    x: A committed or uncommitted array.

  Returns:
    The placement; mesh None on a single device.

  Raises:
    ValueError: spread over devices by something else than a NamedSharding.
  """
  sharding = x.sharding
  if len(sharding.device_set) == 1:
    return Placement(mesh=None, spec=((),) * x.ndim)
  if not isinstance(sharding, NamedSharding) or not isinstance(
    sharding.mesh, Mesh
  ):
    raise ValueError(
      f"`{name}` {x.dtype.name}{list(x.shape)} is spread over"
      f" {len(sharding.device_set)} devices by a"
      f" {type(sharding).__name__}; place it with a NamedSharding"
    )
  return Placement(
    mesh=sharding.mesh, spec=normalize_spec(sharding.spec, x.ndim)
  )


def localize(
  layout: layout_lib.Layout, parts: collections.abc.Sequence[int]
) -> layout_lib.Layout | None:
  """The layout of one device, where that is the same layout on every device.

  Args:
    layout: The global layout.
    parts: Shards of each source axis.

  Returns:
    The local layout; its outputs are the equal parts, in order, of the global
    outputs. None when a part of the rebuilt axis would need elements that
    other devices hold, or when a stacked axis is sharded.
  """
  if any(parts[a] != 1 for a in layout.scan_axes):
    return None
  shape = tuple(d // p for d, p in zip(layout.shape, parts, strict=True))
  if layout.axis is None or layout.source_axis is None:
    return dataclasses.replace(layout, shape=shape)
  count = parts[layout.source_axis]
  if layout.out_shape[layout.axis] % count:
    return None
  size = layout.block_shape[layout.axis] // count
  width = layout.out_shape[layout.axis] // count
  local = None
  for part in range(count):
    segments = _part(layout.segments, part * width, width, part * size, size)
    if segments is None or (local is not None and segments != local):
      return None
    local = segments
  return dataclasses.replace(layout, shape=shape, segments=local)


def _part(segments, out_start, width, source_start, size):
  """Segments of one part of the output, on the source's same part."""
  part, at = [], 0
  for s in segments:
    low = max(at, out_start)
    high = min(at + s.length, out_start + width)
    at += s.length
    if low >= high:
      continue
    if s.source == layout_lib.ZERO:
      part.append(dataclasses.replace(s, length=high - low))
      continue
    start = s.start + low - (at - s.length) - source_start
    if start < 0 or start + high - low > size:
      return None
    part.append(dataclasses.replace(s, start=start, length=high - low))
  return layout_lib.merge(part)


def movable(layout: layout_lib.Layout, place: Placement) -> Placement:
  """The nearest placement of the source on which a layout is local.

  Mesh axes are taken off a sharded stacked axis, and off the rebuilt axis from
  the innermost on until what is left can be done without neighbours. Each goes
  to the first other axis that it divides, or, if there is none, the array is
  replicated over it.

  Args:
    layout: The global layout.
    place: Where the source is.

  Returns:
    A placement for which `localize` gives a layout; `place` itself if it does.
  """
  spec = list(place.spec)
  homeless = []
  for a in layout.scan_axes:
    homeless.extend(spec[a])
    spec[a] = ()
  axis = layout.source_axis

  def parts():
    return [axes_size(place.mesh, names) for names in spec]

  while localize(layout, parts()) is None:
    assert axis is not None
    homeless.append(spec[axis][-1])
    spec[axis] = spec[axis][:-1]
  for name in homeless:
    for a, size in enumerate(layout.shape):
      if a == axis or a in layout.scan_axes:
        continue
      wanted = axes_size(place.mesh, (*spec[a], name))
      if size % wanted == 0:
        spec[a] = (*spec[a], name)
        break
  return dataclasses.replace(place, spec=tuple(spec))


def first_index(place: Placement, local_shape: tuple[int, ...]) -> jax.Array:
  """Global index of a device's first element; to be called in `shard_map`.

  Args:
    place: Where the array is.
    local_shape: Shape of one shard.

  Returns:
    uint32 [rank].
  """
  starts = []
  for names, size in zip(place.spec, local_shape, strict=True):
    index = jax.lax.axis_index(names) if names else jnp.int32(0)
    starts.append(index.astype(jnp.uint32) * jnp.uint32(size))
  return jnp.stack(starts)


def is_first_replica(place: Placement) -> jax.Array:
  """Whether this device holds the first copy; in `shard_map`: int32 0 or 1."""
  assert place.mesh is not None
  used = {name for names in place.spec for name in names}
  first = jnp.int32(1)
  for name in place.mesh.axis_names:
    if name not in used:
      first = first * (jax.lax.axis_index(name) == 0).astype(jnp.int32)
  return first
