"""Layouts: how scanned source arrays become the per-layer arrays of one block.

A layout is the seam between `sync`, which writes layouts from trees and
configurations, and `kernels`, which runs them. It says three things, in this
order of application:

1. which axes of the source are stacked (`scan_axes`): every index along them
   is one output array, the rest of the axes are the *block*;
2. how one axis of the block is put together anew from `segments`, each a run
   of one source's elements along that axis, or of zeros;
3. which dtype the elements are rounded to.

Padding, joining gate and up, weaving them in 128-lane chunks and repeating
heads are all lists of segments, so one kernel engine runs every layout.

Sizes are exact Python integers. Nothing here touches a device.
"""

import collections.abc
import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

ZERO = -1  # `Segment.source` of a run of exact +0.0

# Width of a TPU vector register's lane dimension. The grouped-matmul kernel of
# tpu-inference wants its operands in whole lanes, twice (gate and up), which
# is where the 2 * LANES in MaxText's own padding rule comes from.
LANES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
  """`length` elements along the rebuilt axis, taken from one source.

  Attributes:
    source: Index of the source operand, or `ZERO` for exact +0.0.
    start: First element of the run in the source; 0 for `ZERO`.
    length: Number of elements, at least 1.
  """

  source: int
  start: int
  length: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """One or more equal-shaped sources to the per-layer arrays of one block.

  Invariants:
    len(block_shape) == len(shape) - len(scan_axes)
    out_shape[axis] == sum(s.length for s in segments) when axis is not None
    num_outputs == prod(shape[a] for a in scan_axes)

  Attributes:
    shape: Shape of every source operand, stacked axes included.
    scan_axes: Positions of the stacked axes in `shape`, outermost first: with
      two, output `i * shape[scan_axes[1]] + j` is index i of the first and j
      of the second. Empty: not stacked, one output.
    source_dtype: dtype of every source operand.
    dtype: dtype of the outputs.
    operands: Number of source operands.
    axis: Axis of the block that is rebuilt, or None (copied as it is).
    segments: What the rebuilt axis is made of, in order; empty iff `axis` is
      None.
  """

  shape: tuple[int, ...]
  scan_axes: tuple[int, ...]
  source_dtype: np.dtype
  dtype: np.dtype
  operands: int = 1
  axis: int | None = None
  segments: tuple[Segment, ...] = ()

  def __post_init__(self):
    rank = len(self.shape)
    if len(set(self.scan_axes)) != len(self.scan_axes) or any(
      not 0 <= a < rank for a in self.scan_axes
    ):
      raise ValueError(
        f"`scan_axes` {self.scan_axes} must be different axes of a source of"
        f" shape {self.shape}; count them from 0"
      )
    if (self.axis is None) != (not self.segments):
      raise ValueError("`axis` and `segments` go together: give both or none")
    if self.axis is None:
      if self.operands != 1:
        raise ValueError("a layout without `segments` has one operand")
      return
    if not 0 <= self.axis < len(self.block_shape):
      raise ValueError(
        f"`axis` {self.axis} is not an axis of the block {self.block_shape}"
      )
    size = self.block_shape[self.axis]
    for s in self.segments:
      fits = s.source == ZERO or (
        0 <= s.source < self.operands and 0 <= s.start <= size - s.length
      )
      if s.length < 1 or not fits:
        raise ValueError(
          f"{s} does not fit {self.operands} operand(s) of {size} elements"
          f" on axis {self.axis}"
        )

  @property
  def block_shape(self) -> tuple[int, ...]:
    """The source's shape without its stacked axes."""
    return tuple(d for a, d in enumerate(self.shape) if a not in self.scan_axes)

  @property
  def out_shape(self) -> tuple[int, ...]:
    """Shape of each output."""
    shape = list(self.block_shape)
    if self.axis is not None:
      shape[self.axis] = sum(s.length for s in self.segments)
    return tuple(shape)

  @property
  def num_outputs(self) -> int:
    """Number of outputs: the product of the stacked axes, 1 without any."""
    return math.prod(self.shape[a] for a in self.scan_axes)

  @property
  def source_axis(self) -> int | None:
    """The rebuilt axis counted on the source, or None."""
    if self.axis is None:
      return None
    return [a for a in range(len(self.shape)) if a not in self.scan_axes][
      self.axis
    ]

  @property
  def source_bytes(self) -> int:
    """Bytes of all source operands together."""
    count = self.operands * math.prod(self.shape)
    return count * self.source_dtype.itemsize

  @property
  def out_bytes(self) -> int:
    """Bytes of all outputs together."""
    count = self.num_outputs * math.prod(self.out_shape)
    return count * self.dtype.itemsize


def _dtypes(dtype, source_dtype) -> dict[str, Any]:
  source = jnp.dtype(source_dtype)
  return {
    "source_dtype": source,
    "dtype": source if dtype is None else jnp.dtype(dtype),
  }


def merge(segments: collections.abc.Iterable[Segment]) -> tuple[Segment, ...]:
  """Joins neighbouring segments that continue each other; drops empty ones."""
  merged: list[Segment] = []
  for s in segments:
    if s.length == 0:
      continue
    last = merged[-1] if merged else None
    if (
      last is not None
      and last.source == s.source
      and (s.source == ZERO or last.start + last.length == s.start)
    ):
      merged[-1] = dataclasses.replace(last, length=last.length + s.length)
    else:
      merged.append(s)
  return tuple(merged)


def _chunks(source: int, start: int, length: int, width: int, lane_size: int):
  """[start, start+length) padded to `width`, cut in `lane_size` chunks."""
  step = lane_size or width
  for at in range(0, width, step):
    real = max(0, min(length - at, step))
    yield (
      Segment(source=source, start=start + at if real else 0, length=real),
      Segment(source=ZERO, start=0, length=step - real),
    )


def unscan_layout(
  shape: tuple[int, ...],
  source_dtype,
  *,
  scan_axes: tuple[int, ...],
  dtype=None,
) -> Layout:
  """One output per index of the stacked axes, cast, otherwise unchanged.

  Args:
    shape: Source shape, stacked axes included.
    source_dtype: Source dtype.
    scan_axes: Stacked axes, outermost first; empty: only the cast.
    dtype: Output dtype; None keeps the source's.

  Returns:
    The layout.
  """
  return Layout(
    shape=tuple(shape), scan_axes=scan_axes, **_dtypes(dtype, source_dtype)
  )


def fuse_layout(
  shape: tuple[int, ...],
  source_dtype,
  *,
  scan_axes: tuple[int, ...],
  shards: int,
  padded_width: int | None = None,
  lane_size: int = 0,
  dtype=None,
) -> Layout:
  """Gate (operand 0) and up (operand 1) joined along the last block axis.

  Each of `shards` equal parts is padded with zeros to `padded_width / shards`
  and written gate then up (`lane_size` 0) or alternating in chunks of
  `lane_size` lanes, gate first. This is the layout of MaxText 0.2.5's
  `_interleave_moe_weights`, whose two forms the grouped-matmul kernels expect.

  Args:
    shape: Shape of gate and of up, stacked axes included; last axis `mlp`.
    source_dtype: dtype of both.
    scan_axes: Stacked axes, outermost first.
    shards: Tensor-parallel shards of the mlp axis on the rollout side.
    padded_width: Padded width of one of gate and up over all shards; None: the
      source's width.
    lane_size: 0 or a number of lanes, usually 128.
    dtype: Output dtype; None keeps the source's.

  Returns:
    The layout; its outputs are `2 * padded_width` wide.

  Raises:
    ValueError: widths that do not divide, or that `lane_size` does not divide.
  """
  width = _last_block_axis(shape, scan_axes)[1]
  padded = width if padded_width is None else padded_width
  per, per_padded = _shard_widths("mlp", width, padded, shards, shape)
  if lane_size and per_padded % lane_size:
    raise ValueError(
      f"`moe_lane_size` {lane_size} does not divide a shard's width"
      f" {per_padded} ({padded} over {shards} shards, source {shape}); pad"
      " to a multiple of it or set `moe_lane_size` to 0"
    )
  segments = []
  for shard in range(shards):
    gate = _chunks(0, shard * per, per, per_padded, lane_size)
    up = _chunks(1, shard * per, per, per_padded, lane_size)
    for pair in zip(gate, up, strict=True):
      segments.extend(pair[0] + pair[1])
  return Layout(
    shape=tuple(shape),
    scan_axes=scan_axes,
    operands=2,
    axis=len(shape) - len(scan_axes) - 1,
    segments=merge(segments),
    **_dtypes(dtype, source_dtype),
  )


def refuse_layout(
  shape: tuple[int, ...],
  source_dtype,
  *,
  scan_axes: tuple[int, ...],
  shards: int,
  padded_width: int | None = None,
  lane_size: int = 0,
  dtype=None,
) -> Layout:
  """A joined [gate | up] taken apart and joined anew per shard.

  For trainers that hold `wi` themselves: MaxText 0.2.5's model code splits it
  in two halves, gate first, whatever its sharding.

  Args:
    shape: Shape of `wi`, stacked axes included; last axis 2 * `mlp`.
    source_dtype: Its dtype.
    scan_axes: Stacked axes, outermost first.
    shards: See `fuse_layout`.
    padded_width: See `fuse_layout`.
    lane_size: See `fuse_layout`.
    dtype: Output dtype; None keeps the source's.

  Returns:
    The layout, of one operand.

  Raises:
    ValueError: an odd width, and see `fuse_layout`.
  """
  last, joined = _last_block_axis(shape, scan_axes)
  if joined % 2:
    raise ValueError(
      f"a joined gate and up of shape {tuple(shape)} must be of even width"
    )
  width = joined // 2
  apart = fuse_layout(
    (*shape[:last], width, *shape[last + 1 :]),
    source_dtype,
    scan_axes=scan_axes,
    shards=shards,
    padded_width=padded_width,
    lane_size=lane_size,
    dtype=dtype,
  )
  segments = merge(
    s
    if s.source == ZERO
    else Segment(source=0, start=s.source * width + s.start, length=s.length)
    for s in apart.segments
  )
  unchanged = len(segments) == 1
  return Layout(
    shape=tuple(shape),
    scan_axes=scan_axes,
    axis=None if unchanged else apart.axis,
    segments=() if unchanged else segments,
    **_dtypes(dtype, source_dtype),
  )


def pad_layout(
  shape: tuple[int, ...],
  source_dtype,
  *,
  scan_axes: tuple[int, ...],
  axis: int,
  shards: int,
  padded_width: int,
  dtype=None,
) -> Layout:
  """Zero padding at the end of each of `shards` equal parts of a block axis.

  `wo` is padded inside the same shards as gate and up, so that shard s of it
  multiplies what shard s of them produced.

  Args:
    shape: Source shape, stacked axes included.
    source_dtype: Source dtype.
    scan_axes: Stacked axes, outermost first.
    axis: Block axis to pad, from 0, or negative from the end.
    shards: Parts that are padded one by one.
    padded_width: Size of the axis after padding, over all shards.
    dtype: Output dtype; None keeps the source's.

  Returns:
    The layout.

  Raises:
    ValueError: widths that do not divide, or a padding that would shrink.
  """
  block = [d for a, d in enumerate(shape) if a not in scan_axes]
  axis = axis % len(block)
  per, per_padded = _shard_widths(
    f"axis {axis}", block[axis], padded_width, shards, shape
  )
  segments = []
  for shard in range(shards):
    for pair in _chunks(0, shard * per, per, per_padded, 0):
      segments.extend(pair)
  return Layout(
    shape=tuple(shape),
    scan_axes=scan_axes,
    axis=axis,
    segments=merge(segments),
    **_dtypes(dtype, source_dtype),
  )


def repeat_layout(
  shape: tuple[int, ...],
  source_dtype,
  *,
  scan_axes: tuple[int, ...],
  axis: int,
  repeats: int,
  group: int = 1,
  dtype=None,
) -> Layout:
  """Each head repeated `repeats` times in place: 0 0 1 1, never 0 1 0 1.

  Args:
    shape: Source shape, stacked axes included.
    source_dtype: Source dtype.
    scan_axes: Stacked axes, outermost first.
    axis: Block axis of the heads, from 0, or negative from the end.
    repeats: Copies of each head, at least 1.
    group: Elements of a head along `axis`: 1 where the axis counts heads,
      head_dim where a bias has heads and head_dim flattened in one axis.
    dtype: Output dtype; None keeps the source's.

  Returns:
    The layout.

  Raises:
    ValueError: `repeats` below 1 or an axis that `group` does not divide.
  """
  block = [d for a, d in enumerate(shape) if a not in scan_axes]
  axis = axis % len(block)
  if repeats < 1 or group < 1 or block[axis] % group:
    raise ValueError(
      f"`repeats` {repeats} and `group` {group} do not fit axis {axis} of a"
      f" source of shape {tuple(shape)}; `group` must divide the axis"
    )
  segments = [
    Segment(source=0, start=head, length=group)
    for head in range(0, block[axis], group)
    for _ in range(repeats)
  ]
  return Layout(
    shape=tuple(shape),
    scan_axes=scan_axes,
    axis=axis,
    segments=merge(segments),
    **_dtypes(dtype, source_dtype),
  )


def _last_block_axis(shape, scan_axes) -> tuple[int, int]:
  """The last axis that is not stacked, and its size."""
  last = max(a for a in range(len(shape)) if a not in scan_axes)
  return last, shape[last]


def _shard_widths(what, width, padded, shards, shape) -> tuple[int, int]:
  """Width of one shard before and after padding."""
  if shards < 1 or width % shards or padded % shards or padded < width:
    raise ValueError(
      f"{what} width {width} cannot be padded to {padded} in {shards}"
      f" shard(s) (source {tuple(shape)}): both must divide by the shards"
      " and padding cannot shrink; change `moe_mlp_tp_size` or"
      " `padded_base_moe_mlp_dim`"
    )
  return width // shards, padded // shards
