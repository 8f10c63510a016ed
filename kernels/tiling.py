"""Block shapes from a VMEM budget.

A block of a layout covers, for each axis of the block, some of its indices and,
of the stacked axis, a group of layers. This module picks the sizes: arithmetic
only, on named buffers, for the chip the kernel is compiled for.
"""

import collections.abc
import dataclasses
import math

from jax.experimental.pallas import tpu as pltpu

from laneweave.kernels import physical

# Share of VMEM a kernel's buffers may take. The rest is left to Mosaic's own
# scratch (spilled registers, relayouts of unaligned slices), which grows with
# the block.
VMEM_SHARE = 0.5
# VMEM where no TPU is attached or named: that of the smallest generation.
DEFAULT_VMEM_BYTES = 64 << 20
# What one grid step moves: enough that the fixed cost of a step (about 0.35
# us on v5e) vanishes beside its DMAs, little enough that the first fetch and
# the last write, which nothing overlaps, stay a small part of the whole.
STEP_BYTES = 4 << 20


def vmem_budget() -> int:
  """Bytes of VMEM the buffers of one kernel may take together."""
  try:
    capacity = pltpu.get_tpu_info().vmem_capacity_bytes
  except (ValueError, RuntimeError, NotImplementedError):
    capacity = DEFAULT_VMEM_BYTES
  return int(VMEM_SHARE * min(capacity, DEFAULT_VMEM_BYTES))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
  """One array's block in VMEM.

  Attributes:
    axes: For each dimension in physical order: the block axis, or None for a
      stacked axis.
    sizes: Number of indices per step for dimensions whose axis is None.
    itemsize: Bytes per element.
    count: Arrays of this kind (operands, outputs of a group).
  """

  axes: tuple[int | None, ...]
  sizes: tuple[int, ...]
  itemsize: int
  count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
  """Chosen block sizes.

  Attributes:
    sizes: Indices per step of each block axis, counted on the output.
    step_bytes: Padded bytes that all blocks of one step take.
    vmem_bytes: All buffers, double buffered.
  """

  sizes: tuple[int, ...]
  step_bytes: int
  vmem_bytes: int


def block_bytes(
  buffer: Buffer,
  sizes: collections.abc.Sequence[int],
  rebuilt: int | None,
  rebuilt_size: int,
) -> int:
  """Padded bytes of one step's blocks of a buffer's arrays."""
  shape = [
    extent
    if axis is None
    else (rebuilt_size if axis == rebuilt else sizes[axis])
    for axis, extent in zip(buffer.axes, buffer.sizes, strict=True)
  ]
  if len(shape) == 1:
    shape = [1, *shape]
  return buffer.count * physical.padded_bytes(tuple(shape), buffer.itemsize)


def choose(
  out_shape: tuple[int, ...],
  granularity: tuple[int, ...],
  growth_order: tuple[int, ...],
  step_bytes_of: collections.abc.Callable[[tuple[int, ...]], int],
  budget: int,
) -> Tiles | None:
  """Block sizes that fit the budget and move enough per step.

  Args:
    out_shape: Sizes of the block axes.
    granularity: Least number of indices per step for each axis; a size is a
      multiple of it, or the whole axis.
    growth_order: Axes in the order in which blocks are made larger.
    step_bytes_of: Padded bytes of all blocks of one step for given sizes.
    budget: Bytes that twice those may take.

  Returns:
    The sizes, or None when even the smallest blocks do not fit.
  """
  sizes = [min(g, d) for g, d in zip(granularity, out_shape, strict=True)]
  if 2 * step_bytes_of(tuple(sizes)) > budget:
    return None
  target = min(STEP_BYTES, budget // 2)
  for axis in growth_order:
    for size in _candidates(out_shape[axis], granularity[axis]):
      trial = list(sizes)
      trial[axis] = size
      if step_bytes_of(tuple(trial)) <= target:
        sizes = trial
  step = step_bytes_of(tuple(sizes))
  return Tiles(sizes=tuple(sizes), step_bytes=step, vmem_bytes=2 * step)


def _candidates(size: int, granularity: int) -> list[int]:
  """Block sizes to try for an axis, ascending.

  Sizes that divide the axis, so that no block hangs over its end. Only where
  there are none between the granularity and 16 times it (a prime number of
  tiles, an odd axis) are powers of two tried too: the overhang is masked.
  """
  if granularity >= size:
    return [size]
  exact = [
    n for n in range(granularity, size + 1, granularity) if size % n == 0
  ]
  if not any(granularity < n <= 16 * granularity for n in exact):
    n = granularity
    while n < size:
      exact.append(n)
      n *= 2
  return sorted({*exact, size})


def steps(
  out_shape: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[int, ...]:
  """Grid: steps along each axis."""
  return tuple(math.ceil(d / s) for d, s in zip(out_shape, sizes, strict=True))


def compiler_params(tiles_bytes: int) -> pltpu.CompilerParams:
  """Mosaic parameters for a kernel whose buffers take `tiles_bytes`."""
  limit = 2 * tiles_bytes + (24 << 20)
  return pltpu.CompilerParams(vmem_limit_bytes=limit)


__all__ = [
  "Buffer",
  "Tiles",
  "block_bytes",
  "choose",
  "compiler_params",
  "steps",
  "vmem_budget",
]
