"""The order in which XLA for TPU lays an array's axes out in HBM.

XLA picks, for an argument or result whose layout nobody fixed, the order of
axes that pads least, and Mosaic wants its operands row major. A transpose to
the physical order in front of a kernel is a bitcast; leaving it out costs a
copy of the whole array. `tpu_order` predicts the choice; tests compare it with
what the compiler for each generation really chose.
"""

import functools
import itertools
import math

import jax
import numpy as np

LANES = 128
SUBLANES = 8


def sublane_tile(size: int, itemsize: int) -> int:
  """Rows of the tile XLA uses where the second-minor axis has `size` rows.

  Small arrays get compact tiles of a power of two rows; narrow types keep
  whole 32-bit words, so at least `4 / itemsize` rows.
  """
  rows = 1
  while rows < min(size, SUBLANES):
    rows *= 2
  return max(rows, 4 // itemsize)


def padded_bytes(shape: tuple[int, ...], itemsize: int) -> int:
  """Bytes in HBM of a row-major array of rank 2 and more, tiles included."""
  *major, rows, lanes = shape
  tile = sublane_tile(rows, itemsize)
  rows = -(-rows // tile) * tile
  lanes = -(-lanes // LANES) * LANES
  return math.prod(major) * rows * lanes * itemsize


@functools.lru_cache(maxsize=4096)
def tpu_order(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
  """Axes from major to minor, as XLA for TPU would lay them out.

  The least padded order; among equals the one nearest to row major.

  Args:
    shape: The array's (local) shape.
    dtype: Its dtype.

  Returns:
    A permutation of the axes.
  """
  rank = len(shape)
  row_major = tuple(range(rank))
  if rank < 2:
    return row_major
  return min(
    itertools.permutations(row_major),
    key=lambda order: (
      padded_bytes(tuple(shape[a] for a in order), dtype.itemsize),
      order,
    ),
  )


def order_of(x: jax.Array) -> tuple[int, ...]:
  """Axes of a concrete array from major to minor, read off the array.

  Args:
    x: A committed array; a tracer has no layout of its own.

  Returns:
    A permutation of the axes; row major where the backend reports none.
  """
  layout = getattr(x.format, "layout", None)
  order = getattr(layout, "major_to_minor", None)
  return tuple(range(x.ndim)) if order is None else tuple(order)
