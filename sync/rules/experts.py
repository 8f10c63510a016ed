"""Routed experts: which leaves they are, and their width on the rollout.

In MaxText a routed expert's `wi_0`, `wi_1`, `wi` and `wo` are leaves of their
own; those of dense and shared MLPs end in `.kernel` and are neither joined nor
padded. A GPT-OSS block has biases beside them (`wi_0_bias`): it is joined, but
never padded, since its biases stay as wide as they are.
"""

import collections.abc

from laneweave.kernels import layout as layout_lib
from laneweave.sync.config import SyncConfig

GATE, UP, FUSED, DOWN = "wi_0", "wi_1", "wi", "wo"


def split_name(name: str) -> tuple[str, str]:
  """A name's parent with its dot, and its last part."""
  at = name.rfind(".") + 1
  return name[:at], name[at:]


def role(name: str, block_shape: tuple[int, ...]) -> str | None:
  """Which part of a routed expert a leaf is.

  Args:
    name: The leaf's name.
    block_shape: Shape of one layer's array.

  Returns:
    `GATE`, `UP`, `FUSED`, `DOWN`, or None for anything else: a `wi` of odd
    width, which cannot be gate and up, too.
  """
  _, last = split_name(name)
  fits = {
    GATE: True,
    UP: True,
    FUSED: block_shape[-1] % 2 == 0,
    DOWN: len(block_shape) > 1,
  }
  return last if fits.get(last, False) else None


def mlp_axis(part: str, block_rank: int) -> int:
  """Axis of the block along which an expert is as wide as its MLP."""
  return block_rank - (2 if part == DOWN else 1)


def has_bias(name: str, names: collections.abc.Container[str]) -> bool:
  """Whether the expert block of a leaf has biases, and so cannot be padded."""
  parent, _ = split_name(name)
  return any(parent + part + "_bias" in names for part in (GATE, FUSED))


def two_lane_width(width: int, shards: int) -> int:
  """MaxText's own rule for the padded width of gate, over all shards.

  The grouped-matmul kernel wants a multiple of two times the lanes on every
  shard. From `compute_padded_moe_mlp_dim` of MaxText 0.2.5.

  Args:
    width: Width of one of gate and up.
    shards: Tensor-parallel shards of it.

  Returns:
    The padded width.
  """
  least = 2 * layout_lib.LANES * shards
  if (width // shards) % (2 * layout_lib.LANES) == 0 and width % shards == 0:
    return width
  return -(-width // least) * least


def padded_width(width: int, shards: int, biased: bool, cfg: SyncConfig) -> int:
  """Padded expert width where no target tells it.

  Args:
    width: Width of one of gate and up.
    shards: Tensor-parallel shards of it.
    biased: Whether the experts have biases.
    cfg: `padded_base_moe_mlp_dim` and `prefuse_moe_weights` are read.

  Returns:
    The width over all shards.

  Raises:
    ValueError: a width that does not divide, or that would shrink.
  """
  padded = cfg.padded_base_moe_mlp_dim
  if padded is None:
    if not cfg.prefuse_moe_weights or biased:
      return width
    if width % shards:
      raise ValueError(
        f"width {width} does not divide by {shards} shards; change"
        " `moe_mlp_tp_size`"
      )
    return two_lane_width(width, shards)
  if padded < width:
    raise ValueError(
      f"`padded_base_moe_mlp_dim` {padded} is narrower than the expert"
      f" width {width}; padding cannot shrink"
    )
  return padded
