"""Layouts as one Pallas TPU kernel: unscan, rebuild, cast and fingerprint.

One grid step fetches a box of each source that spans a group of layers and
writes, for every layer of the group, the matching box of its output: each
element is read once and written once, and nothing else is allocated in HBM.

Which physical case a stacked axis is depends on the order in which XLA keeps
the source (`physical.tpu_order`):

* outside the two minor dimensions: whole tiles move, no vector work but the
  cast;
* second minor: a layer's rows are taken out of the sublanes of each tile;
* minor: a layer is a column of lanes. XLA chooses this order only for arrays
  that are small or whose other axes would pad more.

The rebuilt axis is always whole within a block, so padding and weaving never
cross a step. A transpose of the two minor dimensions, where source and output
lie differently (a narrow shard's source keeps its last axis off the lanes, its
padded output does not), happens in registers. Any other difference of order is
left to XLA, which copies.

None of this is differentiable; taking a gradient raises JAX's own error.
"""

import dataclasses
import functools
import itertools
import math

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np

from laneweave.kernels import cast, digest, physical, tiling
from laneweave.kernels import layout as layout_lib

_FLOAT16 = jnp.dtype("float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
  """A layout together with the physical orders of its arrays.

  Attributes:
    layout: The layout.
    source_order: Source axes, major to minor, as the kernel takes them.
    out_order: Block axes, major to minor, as the kernel writes them.
    swap: The source's two minor block axes are exchanged in registers.
  """

  layout: layout_lib.Layout
  source_order: tuple[int, ...]
  out_order: tuple[int, ...]
  swap: bool

  @property
  def source_axes(self) -> tuple[int | None, ...]:
    """For each source dimension in order: its block axis, None if stacked."""
    block = [
      a for a in range(len(self.layout.shape)) if a not in self.layout.scan_axes
    ]
    return tuple(
      None if a in self.layout.scan_axes else block.index(a)
      for a in self.source_order
    )


def geometry(
  layout: layout_lib.Layout,
  source_order: tuple[int, ...] | None = None,
  out_order: tuple[int, ...] | None = None,
) -> Geometry:
  """Settles the physical orders a kernel works in.

  Args:
    layout: The layout.
    source_order: Order of the source in HBM; None: what XLA for TPU chooses.
    out_order: Order of the outputs in HBM; None: what XLA for TPU chooses.

  Returns:
    The geometry.
  """
  if source_order is None:
    source_order = physical.tpu_order(layout.shape, layout.source_dtype)
  if out_order is None:
    out_order = physical.tpu_order(layout.out_shape, layout.dtype)
  found = Geometry(
    layout=layout, source_order=source_order, out_order=out_order, swap=False
  )
  kept = tuple(a for a in found.source_axes if a is not None)
  if kept == out_order:
    return found
  swapped = (*out_order[:-2], out_order[-1], out_order[-2])
  minor = found.source_axes[-2:]
  if kept == swapped and None not in minor:
    return dataclasses.replace(found, swap=True)
  block = [a for a in range(len(layout.shape)) if a not in layout.scan_axes]
  return dataclasses.replace(
    found,
    source_order=(*layout.scan_axes, *(block[a] for a in out_order)),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Blocking:
  """How a geometry is cut into grid steps and calls.

  Attributes:
    group: Indices of the outermost stacked axis per call; 0 without one.
    sizes: Indices per step of each block axis, counted on the output.
    grid: Steps along each block axis in `out_order`.
    vmem_bytes: Bytes of all double-buffered blocks.
  """

  group: int
  sizes: tuple[int, ...]
  grid: tuple[int, ...]
  vmem_bytes: int


def blocking(geo: Geometry, budget: int) -> Blocking:
  """Chooses layers per call and indices per step under a VMEM budget.

  Args:
    geo: The geometry.
    budget: Bytes of VMEM for all blocks.

  Returns:
    The blocking.

  Raises:
    ValueError: not even one layer's smallest block fits.
  """
  layout = geo.layout
  rank = len(layout.out_shape)
  rebuilt = layout.axis
  whole = 0 if rebuilt is None else layout.block_shape[rebuilt]
  granularity = _granularity(geo)
  # Long runs in HBM first: the minor axis, then outward.
  growth = tuple(a for a in reversed(geo.out_order) if a != rebuilt)
  outer = layout.shape[layout.scan_axes[0]] if layout.scan_axes else 1
  inner = layout.num_outputs // outer
  for group in _groups(geo, outer):

    def step_bytes(sizes, group=group):
      extents = [
        0
        if axis is not None
        else (group if a == layout.scan_axes[0] else layout.shape[a])
        for a, axis in zip(geo.source_order, geo.source_axes, strict=True)
      ]
      source = tiling.Buffer(
        axes=geo.source_axes,
        sizes=tuple(extents),
        itemsize=layout.source_dtype.itemsize,
        count=layout.operands,
      )
      out = tiling.Buffer(
        axes=geo.out_order,
        sizes=(0,) * rank,
        itemsize=layout.dtype.itemsize,
        count=group * inner,
      )
      return tiling.block_bytes(
        source, sizes, rebuilt, whole
      ) + tiling.block_bytes(
        out,
        sizes,
        rebuilt,
        0 if rebuilt is None else layout.out_shape[rebuilt],
      )

    tiles = tiling.choose(
      layout.out_shape, granularity, growth, step_bytes, budget
    )
    if tiles is not None:
      grid = tiling.steps(layout.out_shape, tiles.sizes)
      return Blocking(
        group=group,
        sizes=tiles.sizes,
        grid=tuple(grid[a] for a in geo.out_order),
        vmem_bytes=tiles.vmem_bytes,
      )
  raise ValueError(
    f"a source of shape {layout.shape} has no block that fits"
    f" {budget} bytes of VMEM: axis {layout.source_axis} is rebuilt and must"
    " be whole within a block; shard that axis on the trainer"
  )


def _granularity(geo: Geometry) -> tuple[int, ...]:
  """Least indices per step of each block axis: whole tiles on both sides."""
  layout = geo.layout
  narrow = min(layout.source_dtype.itemsize, layout.dtype.itemsize)
  rows = physical.SUBLANES * 4 // narrow
  least = [1] * len(layout.out_shape)
  for axes in (geo.source_axes, geo.out_order):
    for axis, unit in zip(axes[:-3:-1], (physical.LANES, rows), strict=False):
      if axis is not None:
        least[axis] = max(least[axis], unit)
  if len(layout.out_shape) == 1:
    # A one-dimensional array is tiled by 1024 elements, 32-bit words of
    # narrow types four tiles at a time.
    least[0] = 1024 * 4 // narrow
  if layout.axis is not None:
    least[layout.axis] = layout.out_shape[layout.axis]
  return tuple(
    g if layout.out_shape[a] % g == 0 or layout.out_shape[a] > g else d
    for a, (g, d) in enumerate(zip(least, layout.out_shape, strict=True))
  )


def _groups(geo: Geometry, outer: int) -> list[int]:
  """Sizes of layer groups to try, largest first."""
  layout = geo.layout
  if not layout.scan_axes:
    return [1]
  position = geo.source_order.index(layout.scan_axes[0]) - len(layout.shape)
  unit = {
    -1: physical.LANES,
    -2: physical.SUBLANES * 4 // layout.source_dtype.itemsize,
  }.get(position, 1)
  sizes = {outer}
  size = -(-outer // 2 // unit) * unit
  while unit <= size < outer:
    sizes.add(size)
    if size == unit:
      break
    size = max(unit, -(-size // 2 // unit) * unit)
  return sorted(sizes, reverse=True)


def relayout(
  layout: layout_lib.Layout,
  *sources: jax.Array,
  bases: jax.Array | None = None,
  source_order: tuple[int, ...] | None = None,
  out_order: tuple[int, ...] | None = None,
  interpret: object = False,
  budget: int | None = None,
  emit: bool = True,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """Runs a layout as Pallas TPU kernels.

  Args:
    layout: The layout.
    *sources: `layout.operands` arrays of `layout.shape`.
    bases: uint32 [2 * rank of the output] for the fingerprints
      (`digest.salts` plus the shard's first global index), or None.
    source_order: See `geometry`.
    out_order: See `geometry`.
    interpret: False, True or `pltpu.InterpretParams`.
    budget: Bytes of VMEM for the blocks; None: the chip's.
    emit: Write the outputs; False: read for the fingerprints only.

  Returns:
    `layout.num_outputs` arrays of `layout.out_shape` (none without `emit`),
    and with `bases` arrays of int32 [layers, 2, lanes], one a call and
    together in the order of the outputs, whose wrapping sum over the last axis
    is each output's fingerprint.
  """
  geo = geometry(layout, source_order, out_order)
  cut = blocking(geo, tiling.vmem_budget() if budget is None else budget)
  operands = [_vector_bits(jnp.transpose(x, geo.source_order)) for x in sources]
  outer = layout.shape[layout.scan_axes[0]] if layout.scan_axes else 1
  outputs, prints = [], []
  for start in range(0, outer, cut.group):
    layers = min(cut.group, outer - start)
    outs, words = _call(
      geo, cut, operands, bases, start, layers, interpret, emit
    )
    outputs.extend(outs)
    prints.extend(words)
  inverse = tuple(np.argsort(geo.out_order))
  outputs = [jnp.transpose(x, inverse) for x in outputs]
  if outputs and outputs[0].dtype != layout.dtype:
    outputs = [jax.lax.bitcast_convert_type(x, layout.dtype) for x in outputs]
  return tuple(outputs), tuple(prints)


def _vector_bits(x):
  """A float16 vector as uint16: Mosaic cannot view one as bits in place."""
  if x.ndim == 1 and x.dtype == _FLOAT16:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)
  return x


def _call(geo, cut, operands, bases, start, layers, interpret, emit):
  """One pallas_call: `layers` indices of the outer stacked axis from `start`."""
  layout = geo.layout
  inner = layout.num_outputs // (
    layout.shape[layout.scan_axes[0]] if layout.scan_axes else 1
  )
  count = layers * inner
  position = {a: i for i, a in enumerate(geo.out_order)}

  source_block: list[int] = []
  source_index: list[int | None] = []  # None: the grid's own index
  for a, axis in zip(geo.source_order, geo.source_axes, strict=True):
    if axis is None:
      outermost = a == layout.scan_axes[0]
      source_block.append(cut.group if outermost else layout.shape[a])
      source_index.append(start // cut.group if outermost else 0)
    else:
      whole = axis == layout.axis
      source_block.append(
        layout.block_shape[axis] if whole else cut.sizes[axis]
      )
      source_index.append(None if not whole else 0)
  source_grid = [
    0 if axis is None else position[axis] for axis in geo.source_axes
  ]

  def source_map(*args):
    grid = args[: len(cut.grid)]
    return tuple(
      grid[g] if index is None else index
      for index, g in zip(source_index, source_grid, strict=True)
    )

  def out_map(*args):
    return args[: len(cut.grid)]

  in_specs = [pl.BlockSpec(tuple(source_block), source_map) for _ in operands]
  out_block = tuple(cut.sizes[a] for a in geo.out_order)
  out_shape = tuple(layout.out_shape[a] for a in geo.out_order)
  outs = count if emit else 0
  out_specs = [pl.BlockSpec(out_block, out_map) for _ in range(outs)]
  out_dtype = layout.dtype
  if out_dtype == _FLOAT16 and len(out_shape) == 1:
    out_dtype = jnp.dtype(jnp.uint16)
  out_shapes = [jax.ShapeDtypeStruct(out_shape, out_dtype)] * outs
  scratch, prefetch = [], []
  lanes = out_block[-1]
  if lanes % physical.LANES == 0:
    lanes = physical.LANES
  if bases is not None:
    prefetch = [bases]
    # Whole lanes, so that XLA has one way of laying the array out.
    wide = -(-lanes // physical.LANES) * physical.LANES
    out_specs.append(
      pl.BlockSpec((count, digest.WORDS, wide), lambda *_: (0, 0, 0))
    )
    out_shapes.append(
      jax.ShapeDtypeStruct((count, digest.WORDS, wide), jnp.int32)
    )
    scratch = [
      pltpu.VMEM((count, digest.WORDS, _acc_rows(geo, cut), lanes), jnp.int32)
    ]
  results = pl.pallas_call(
    functools.partial(_kernel, geo, cut, count, len(operands), outs),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=len(prefetch),
      grid=cut.grid,
      in_specs=in_specs,
      out_specs=out_specs,
      scratch_shapes=scratch,
    ),
    out_shape=out_shapes,
    interpret=interpret,
    compiler_params=tiling.compiler_params(cut.vmem_bytes),
    name="laneweave_relayout",
  )(*prefetch, *operands)
  return results[:outs], results[outs:]


def _acc_rows(geo, cut):
  """Sublanes of a fingerprint accumulator."""
  if len(geo.out_order) < 2:
    return 1
  rows = cut.sizes[geo.out_order[-2]]
  return physical.SUBLANES if rows % physical.SUBLANES == 0 else 1


def _kernel(geo, cut, count, operands, emitted, *refs):
  """Kernel body; refs: [bases], sources, outputs, [words, accumulator]."""
  printing = len(refs) != operands + emitted
  bases_ref = refs[0] if printing else None
  refs = refs[1:] if printing else refs
  sources, outs = refs[:operands], refs[operands : operands + emitted]
  layout = geo.layout
  inner_shape = [layout.shape[a] for a in layout.scan_axes[1:]]
  if printing:
    words_ref, acc_ref = refs[operands + emitted :]
    weights = _axis_weights(geo, cut, bases_ref)
    first = functools.reduce(
      jnp.logical_and, [pl.program_id(i) == 0 for i in range(len(cut.grid))]
    )

    @pl.when(first)
    def _():
      acc_ref[...] = jnp.zeros(acc_ref.shape, acc_ref.dtype)

  for n in range(count):
    index = (n,)
    if inner_shape:
      index = (
        n // math.prod(inner_shape),
        *np.unravel_index(n % math.prod(inner_shape), inner_shape),
      )
    at = dict(zip(layout.scan_axes, map(int, index), strict=False))
    with jax.named_scope("rebuild"):
      block = _rebuild(geo, [_layer(geo, ref, at) for ref in sources])
    if emitted:
      ref = outs[n]
      if ref.dtype == _FLOAT16:
        ref = ref.bitcast(jnp.uint16)
      ref[...] = block.reshape(ref.shape)
    if printing:
      with jax.named_scope("fingerprint"):
        _accumulate(layout, block, weights, acc_ref, n)
  if printing:
    last = functools.reduce(
      jnp.logical_and,
      [pl.program_id(i) == size - 1 for i, size in enumerate(cut.grid)],
    )

    @pl.when(last)
    def _():
      if acc_ref.shape[-1] < words_ref.shape[-1]:
        words_ref[...] = jnp.zeros(words_ref.shape, words_ref.dtype)
      for n, w in itertools.product(range(count), range(digest.WORDS)):
        words_ref[n, w : w + 1, : acc_ref.shape[-1]] = jnp.sum(
          acc_ref[n, w], axis=0, keepdims=True, dtype=jnp.int32
        )


def _layer(geo, ref, at):
  """One layer's box of a source, at least two-dimensional."""
  index = tuple(
    slice(None) if axis is not None else at[a]
    for a, axis in zip(geo.source_order, geo.source_axes, strict=True)
  )
  if ref.dtype == _FLOAT16:
    # The whole box at once: the interpreter does not index a bitcast ref.
    block = ref.bitcast(jnp.uint16)[...][index]
  else:
    block = ref[index]
  return block.reshape(1, -1) if block.ndim < 2 else block


def _rebuild(geo, blocks):
  """The output's box from the boxes of its sources, in the output's dtype.

  float16 is carried as its bits, uint16, from load to store: Mosaic moves
  float16 through memory but has no register of it.
  """
  layout = geo.layout
  axis = None
  if layout.axis is not None:
    axis = geo.out_order.index(layout.axis) - len(geo.out_order)
  exact = layout.source_dtype == layout.dtype
  aligned = axis is None or axis < -2 or _aligned(layout, axis)
  if (geo.swap or not aligned) and layout.source_dtype.itemsize < 4:
    # Shuffles inside packed words: done on 32-bit values. Bits are carried as
    # integers where the dtype stays, so that no NaN is touched.
    blocks = [
      _widen_bits(b) if exact else b.astype(jnp.float32) for b in blocks
    ]
  if geo.swap:
    blocks = [jnp.swapaxes(b, -1, -2) for b in blocks]
  block = blocks[0]
  if axis is not None:
    block = jnp.concatenate(
      [_piece(blocks, s, axis) for s in layout.segments], axis=axis
    )
  if exact:
    return _narrow_bits(block, layout.dtype)
  if layout.dtype == _FLOAT16:
    bits = cast.float16_bits(block.astype(jnp.float32))
    return bits.astype(jnp.uint16)
  return block.astype(layout.dtype)


def _aligned(layout, axis):
  """Whether every segment starts and ends on whole tiles of both sides."""
  narrow = min(layout.source_dtype.itemsize, layout.dtype.itemsize)
  unit = physical.LANES if axis == -1 else physical.SUBLANES * 4 // narrow
  return all(
    s.start % unit == 0 and s.length % unit == 0 for s in layout.segments
  )


def _piece(blocks, segment, axis):
  """One segment's elements."""
  like = blocks[0]
  if segment.source == layout_lib.ZERO:
    shape = list(like.shape)
    shape[axis] = segment.length
    return jnp.zeros(shape, like.dtype)
  return jax.lax.slice_in_dim(
    blocks[segment.source],
    segment.start,
    segment.start + segment.length,
    axis=like.ndim + axis,
  )


def _widen_bits(x):
  """Bits of a 16-bit (or 8-bit) array, zero-extended to int32."""
  unsigned = jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8
  return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.int32)


def _narrow_bits(bits, dtype):
  """The inverse of `_widen_bits`; what was not widened is returned as is."""
  if bits.dtype != jnp.int32 or dtype.itemsize == 4:
    return bits
  if dtype == _FLOAT16:
    return bits.astype(jnp.uint16)
  unsigned = jnp.uint16 if dtype.itemsize == 2 else jnp.uint8
  return jax.lax.bitcast_convert_type(bits.astype(unsigned), dtype)


def _axis_weights(geo, cut, bases_ref):
  """For each word and block axis, the weights of this step's indices.

  An index past the end of an axis, in the overhang of its last block, weighs
  nothing.
  """
  layout = geo.layout
  rank = len(geo.out_order)
  weights = []
  for w in range(digest.WORDS):
    row = []
    for i, a in enumerate(geo.out_order):
      size = cut.sizes[a]
      shape = [1] * max(rank, 2)
      shape[i - rank] = size
      local = jax.lax.broadcasted_iota(
        jnp.int32, tuple(shape), len(shape) + i - rank
      )
      local = local + pl.program_id(i) * size
      weight = digest.axis_weight(
        local.astype(jnp.uint32),
        bases_ref[w * rank + a],
      )
      if layout.out_shape[a] % size:
        weight = jnp.where(local < layout.out_shape[a], weight, jnp.uint32(0))
      row.append(weight)
    weights.append(row)
  return weights


def _accumulate(layout, block, weights, acc_ref, n):
  """Adds one output box to its two words."""
  itemsize = layout.dtype.itemsize
  if itemsize == 4:
    bits = jax.lax.bitcast_convert_type(block, jnp.uint32)
  elif layout.dtype == _FLOAT16:
    bits = block.astype(jnp.uint32)
  else:
    bits = _widen_bits(block).astype(jnp.uint32)
  mixed = digest.mix_bits(bits, itemsize)
  for w in range(digest.WORDS):
    total = mixed
    *major, last = weights[w]
    for weight in major:
      total = total * weight.reshape(weight.shape[-total.ndim :])
      if total.ndim > 2:
        total = functools.reduce(
          jnp.add, [total[i] for i in range(total.shape[0])]
        )
    total = jax.lax.bitcast_convert_type(
      _fold(
        _fold_rows(total, acc_ref.shape[-2]) * last.reshape(1, -1),
        acc_ref.shape[-1],
      ),
      jnp.int32,
    )
    acc_ref[n, w] = acc_ref[n, w] + total


def _fold_rows(x, rows):
  """Sums a [r, c] array to [rows, c]."""
  if x.shape[0] == rows:
    return x
  if rows == 1:
    signed = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(
      jnp.sum(signed, axis=0, keepdims=True, dtype=jnp.int32), jnp.uint32
    )
  return functools.reduce(
    jnp.add,
    [jax.lax.slice_in_dim(x, i, i + rows) for i in range(0, x.shape[0], rows)],
  )


def _fold(x, lanes):
  """Sums a [r, c] array to [r, lanes]."""
  if x.shape[1] == lanes:
    return x
  return functools.reduce(
    jnp.add,
    [
      jax.lax.slice_in_dim(x, i, i + lanes, axis=1)
      for i in range(0, x.shape[1], lanes)
    ],
  )
