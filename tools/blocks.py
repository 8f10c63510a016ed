"""Counts what a Pallas kernel fetches from HBM and writes to it.

The grid and the index maps of a traced `pallas_call` say it all: Pallas's
pipeline fetches an input's block before each step whose block index differs
from the step's before, and writes an output's block after each step whose index
differs from the next one's. A block moves as whole HBM tiles, the part of the
last one that hangs over the array's end left out. Arrays that a kernel takes in
place (memory space `ANY`) and moves itself are counted once.
"""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from laneweave.kernels import physical

# Elements of the tile of a one-dimensional array of 1024 or more.
_FLAT_TILE = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operand:
  """What one operand or result of a kernel moves.

  Attributes:
    shape: Shape of the array.
    dtype: Its dtype.
    block_shape: Shape of the block of a step; the array's where the kernel
      moves it itself.
    transfers: Blocks fetched or written.
    moved_bytes: Bytes of them, whole tiles.
    output: Whether it is written.
    block_bytes: Bytes of a block in VMEM, whole tiles.
    buffers: Blocks of it that VMEM holds at once.
    piped: Whether Pallas moves it, block by block.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  block_shape: tuple[int, ...]
  transfers: int
  moved_bytes: int
  output: bool
  block_bytes: int
  buffers: int
  piped: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
  """One `pallas_call`.

  Attributes:
    name: Its name.
    grid: Steps along each dimension of its grid.
    operands: Operands and results, scalars that are prefetched left out.
    scratch_bytes: Bytes of VMEM that it asked for besides its blocks.
  """

  name: str
  grid: tuple[int, ...]
  operands: tuple[Operand, ...]
  scratch_bytes: int

  @property
  def steps(self) -> int:
    """Grid steps."""
    return math.prod(self.grid)

  @property
  def moved_bytes(self) -> int:
    """Bytes read from HBM and written to it."""
    return sum(x.moved_bytes for x in self.operands)

  @property
  def vmem_bytes(self) -> int:
    """Bytes of VMEM of all blocks and scratch."""
    blocks = sum(x.block_bytes * x.buffers for x in self.operands)
    return blocks + self.scratch_bytes


def array_bytes(shape: tuple[int, ...], itemsize: int) -> int:
  """Bytes in HBM of a row-major array, whole tiles.

  Args:
    shape: Any rank.
    itemsize: Bytes an element.

  Returns:
    The bytes.
  """
  if len(shape) >= 2:
    return physical.padded_bytes(shape, itemsize)
  size = math.prod(shape)
  tile = _flat_tile(size, itemsize)
  return -(-size // tile) * tile * itemsize


def _flat_tile(size: int, itemsize: int) -> int:
  """Elements of the tile of a one-dimensional array."""
  tile = physical.LANES * 4 // itemsize
  while tile < min(size, _FLAT_TILE):
    tile *= 2
  return tile


def _tiles(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
  """Indices of an HBM tile along each axis."""
  if not shape:
    return ()
  if len(shape) == 1:
    return (_flat_tile(shape[0], itemsize),)
  rows = physical.sublane_tile(shape[-2], itemsize)
  return (*(1 for _ in shape[:-2]), rows, physical.LANES)


def _starts(mapping: Any, grid: tuple[int, ...], scalars: list) -> np.ndarray:
  """First element of the block of each step: int64 [steps, rank]."""
  if not grid:
    points = np.zeros((1, 0), np.int32)
  else:
    points = np.array(
      list(itertools.product(*map(range, grid))), np.int32
    ).reshape(-1, len(grid))
  rank = len(mapping.block_shape)
  if rank == 0:
    return np.zeros((len(points), 0), np.int64)

  def at(point):
    index = mapping.compute_start_indices_interpret(
      tuple(point[i] for i in range(len(grid))), *scalars
    )
    return jax.numpy.stack([jax.numpy.asarray(i, "int32") for i in index])

  with jax.default_device(jax.devices("cpu")[0]):
    found = jax.jit(jax.vmap(at))(points)
  return np.asarray(found, np.int64)


def _moves(starts: np.ndarray) -> np.ndarray:
  """Steps whose block is another than the step's before: their starts."""
  if not starts.shape[1]:
    return starts[:1]
  changed = np.any(starts[1:] != starts[:-1], axis=1)
  return starts[np.concatenate([[True], changed])]


def _operand(mapping, grid, scalars, *, output: bool) -> Operand:
  """Counts one block mapping."""
  array = mapping.array_aval
  shape, dtype = tuple(array.shape), np.dtype(array.dtype)
  space = str(getattr(mapping.ref_aval, "memory_space", ""))
  if "any" in space.lower() or "hbm" in space.lower():
    return Operand(
      shape=shape,
      dtype=dtype,
      block_shape=shape,
      transfers=1,
      moved_bytes=array_bytes(shape, dtype.itemsize),
      output=output,
      block_bytes=0,
      buffers=0,
      piped=False,
    )
  block = tuple(int(getattr(b, "block_size", 1)) for b in mapping.block_shape)
  moves = _moves(_starts(mapping, grid, scalars))
  moved = np.full(len(moves), dtype.itemsize, np.int64)
  for a, tile in enumerate(_tiles(shape, dtype.itemsize)):
    first = moves[:, a] // tile
    last = -(-np.minimum(moves[:, a] + block[a], shape[a]) // tile)
    moved *= (last - first) * tile
  mode = getattr(mapping, "pipeline_mode", None)
  buffers = getattr(mode, "buffer_count", 2) if math.prod(grid) > 1 else 1
  return Operand(
    shape=shape,
    dtype=dtype,
    block_shape=block,
    transfers=len(moves),
    moved_bytes=int(moved.sum()),
    output=output,
    block_bytes=array_bytes(block, dtype.itemsize),
    buffers=buffers,
    piped=True,
  )


def calls(jaxpr: Any) -> list[Call]:
  """All Pallas kernels of a traced program.

  Args:
    jaxpr: `jax.jit(f).trace(...).jaxpr`.

  Returns:
    One `Call` each, in order.
  """
  found = []
  for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
    if equation.primitive.name == "pallas_call":
      found.append(_call(equation))
      continue
    for value in equation.params.values():
      if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        found.extend(calls(value))
  return found


def _call(equation) -> Call:
  """Counts one equation."""
  mapping = equation.params["grid_mapping"]
  scalars = [
    np.zeros(v.aval.shape, v.aval.dtype)
    for v in equation.invars[: mapping.num_index_operands]
  ]
  grid = tuple(int(d) for d in mapping.grid)
  # Outputs by the dozen are alike, and evaluating an index map takes a while.
  alike: dict[str, Operand] = {}
  operands = []
  for i, m in enumerate(mapping.block_mappings):
    output = i >= mapping.num_inputs
    key = f"{m.index_map_jaxpr} {m} {m.array_aval} {m.ref_aval} {output}"
    if key not in alike:
      alike[key] = _operand(m, grid, scalars, output=output)
    operands.append(alike[key])
  scratch = 0
  for aval in getattr(mapping, "scratch_avals", ()):
    if "vmem" in str(getattr(aval, "memory_space", "")).lower():
      scratch += array_bytes(tuple(aval.shape), np.dtype(aval.dtype).itemsize)
  return Call(
    name=str(equation.params.get("name")),
    grid=grid,
    operands=tuple(operands),
    scratch_bytes=scratch,
  )
