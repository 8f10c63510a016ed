"""Routed experts: which leaves they are, and their width on the rollout.

In MaxText a routed expert's `wi_0`, `wi_1`, `wi` and `wo` are leaves of their
own; those of dense and shared MLPs end in `.kernel` and are neither joined nor
padded. A GPT-OSS block has biases beside them (`wi_0_bias`): it is joined, but
never padded, since its biases stay as wide as they are.
"""

import collections.abc

from laneweave.kernels import layout as layout_lib

GATE, UP, FUSED, DOWN = "wi_0", "wi_1", "wi", "wo"


def split_name(name: str) -> tuple[str, str]:
  """A name's parent with its dot, and its last part."""
  at = name.rfind(".") + 1
  return name[:at], name[at:]


def role(name: str, names: collections.abc.Container[str]) -> str | None:
  """Which part of a routed expert a leaf is.

  Args:
    name: The leaf's name.
    names: All names of its tree.

  Returns:
    `GATE`, `UP`, `FUSED`, `DOWN`, or None for anything else.
  """
  parent, last = split_name(name)
  if last in (GATE, UP, FUSED):
    return last
  if last == DOWN and (parent + GATE in names or parent + FUSED in names):
    return last
  return None


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


def one_lane_width(width: int, shards: int) -> int:
  """The next multiple of whole lanes on every shard, over all shards."""
  per = -(-width // shards)
  return -(-per // layout_lib.LANES) * layout_lib.LANES * shards
