"""The layout of one leaf, from the rules and from what a target tree wants."""

import dataclasses
import math

import numpy as np

from laneweave.kernels import layout as layout_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec
from laneweave.sync.rules import experts
from laneweave.sync.rules.heads import Heads
from laneweave.sync.rules.heads import repeats as heads_repeats


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
  """A source leaf and how it is stacked.

  Attributes:
    leaf: The leaf.
    axes: Its stacked axes, outermost first.
  """

  leaf: LeafSpec
  axes: tuple[int, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of one layer's array."""
    return tuple(d for a, d in enumerate(self.leaf.shape) if a not in self.axes)


def free_repeats(heads: Heads | None, cfg: SyncConfig) -> int:
  """How often KV heads are repeated where no target tells it.

  Args:
    heads: The leaf's KV heads.
    cfg: `kv_tp_size` is read.

  Returns:
    The number.

  Raises:
    ValueError: heads and shards that do not divide, or heads not known.
  """
  if heads is None or cfg.kv_tp_size == 1:
    return 1
  if not heads.count:
    raise ValueError(
      "keeps its KV heads flattened, and how many they are is not known; set"
      " `base_num_kv_heads`"
    )
  found = heads_repeats(heads.count, cfg.kv_tp_size)
  if found is None:
    raise ValueError(
      f"{heads.count} KV heads and `kv_tp_size` {cfg.kv_tp_size} do not divide;"
      " choose a `kv_tp_size` that divides the heads or is a multiple of them"
    )
  return found


def target_repeats(block: Block, want: LeafSpec, heads: Heads | None) -> int:
  """How often a target's shape repeats the KV heads of a block.

  Args:
    block: The source.
    want: A target leaf.
    heads: The source's KV heads.

  Returns:
    The number.

  Raises:
    ValueError: the target differs in anything else than its KV heads.
  """
  have, shape = block.shape, want.shape
  if shape == have:
    return 1
  size = math.prod(have) * block.leaf.dtype.itemsize
  if len(shape) != len(have):
    raise ValueError(
      f"has blocks {list(have)} of rank {len(have)}, but the target"
      f" `{want.name}` {want} has rank {len(shape)}; check `param_scan_axis`"
    )
  what = (
    f"has blocks {list(have)} ({size} bytes), but the target `{want.name}` is"
    f" {want} ({want.size_bytes} bytes)"
  )
  differ = [a for a in range(len(have)) if shape[a] != have[a]]
  if heads is None or differ != [heads.axis]:
    raise ValueError(
      f"{what}: axes {differ} differ, and only KV heads are repeated and only"
      " expert widths padded; check the rollout's model"
    )
  if not heads.count:
    raise ValueError(
      f"{what}: its KV heads are flattened, and how many they are is not"
      " known; set `base_num_kv_heads`"
    )
  if shape[heads.axis] % have[heads.axis]:
    raise ValueError(
      f"{heads.count} KV heads cannot become the"
      f" {shape[heads.axis] / heads.group:g} of the target `{want.name}`"
      f" {list(shape)}; the rollout's heads must be a multiple of them"
    )
  return shape[heads.axis] // have[heads.axis]


def plain(
  block: Block, heads: Heads | None, repeats: int, dtype: np.dtype
) -> layout_lib.Layout:
  """A leaf that is unscanned and cast, its KV heads repeated."""
  leaf = block.leaf
  if repeats == 1 or heads is None:
    return layout_lib.unscan_layout(
      leaf.shape, leaf.dtype, scan_axes=block.axes, dtype=dtype
    )
  return layout_lib.repeat_layout(
    leaf.shape,
    leaf.dtype,
    scan_axes=block.axes,
    axis=heads.axis,
    repeats=repeats,
    group=heads.group,
    dtype=dtype,
  )


def target_width(
  block: Block, want: LeafSpec, part: str, *, joined: bool
) -> int:
  """Padded expert width that a target's shape asks for.

  Args:
    block: The source.
    want: A target leaf.
    part: Which part of an expert the source is.
    joined: Whether the target holds gate and up.

  Returns:
    Width of one of gate and up, over all shards.

  Raises:
    ValueError: the target differs in anything else than its width.
  """
  have, shape = block.shape, want.shape
  axis = experts.mlp_axis(part, len(have))
  same = len(shape) == len(have) and all(
    shape[a] == have[a] for a in range(len(have)) if a != axis
  )
  halves = 2 if joined else 1
  if not same or shape[axis] % halves:
    raise ValueError(
      f"has blocks {list(have)}, but the target `{want.name}` is"
      f" {list(shape)} ({want.size_bytes} bytes); only axis {axis} may differ,"
      " by padding" + (" and joining" if joined else "")
    )
  return shape[axis] // halves


def expert(
  block: Block,
  part: str,
  *,
  pair: bool,
  width: int,
  padded: int,
  shards: int,
  lane_size: int,
  dtype: np.dtype,
) -> layout_lib.Layout:
  """A routed expert's leaf: joined, padded, or both.

  Args:
    block: The source; of a pair, the gate.
    part: Which part of an expert it is.
    pair: Gate and up are joined.
    width: Width of one of gate and up.
    padded: Its width on the rollout, over all shards.
    shards: Tensor-parallel shards of it.
    lane_size: `moe_lane_size`.
    dtype: dtype of the outputs.

  Returns:
    The layout.

  Raises:
    ValueError: widths that do not divide.
  """
  shape, source_dtype = block.shape, block.leaf.dtype
  rejoined = part == experts.FUSED and (
    padded != width or shards > 1 or lane_size > 0
  )
  if pair or rejoined:
    build = layout_lib.fuse_layout if pair else layout_lib.refuse_layout
    one = build(
      shape,
      source_dtype,
      scan_axes=(),
      shards=shards,
      padded_width=padded,
      lane_size=lane_size,
      dtype=dtype,
    )
  elif padded != width:
    one = layout_lib.pad_layout(
      shape,
      source_dtype,
      scan_axes=(),
      axis=experts.mlp_axis(part, len(shape)),
      shards=shards,
      padded_width=padded,
      dtype=dtype,
    )
  else:
    one = layout_lib.unscan_layout(
      shape, source_dtype, scan_axes=(), dtype=dtype
    )
  # The builders want the mlp axis last or count it from the end; a stacked
  # axis may be anywhere, so it is put back afterwards.
  return dataclasses.replace(one, shape=block.leaf.shape, scan_axes=block.axes)
