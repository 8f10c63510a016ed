"""Widths and shards of routed experts, for the NumPy reference.

A routed expert's arrays are called `wi_0` (gate), `wi_1` (up), `wi` (both) and
`wo`, with nothing after; shared experts and dense layers end in `.kernel` and
are none of this module's business.

The MLP axis is padded inside every tensor-parallel shard, so that a shard of
the padded expert computes what the same shard of the unpadded one did. With a
target its shapes say how wide; without one `padded_base_moe_mlp_dim` does, or
the two-lane rule: a shard is a multiple of 2 * 128. Experts with biases of
their own (GPT-OSS) are never padded, since their biases would not be.
"""

import math
from typing import Any

NAMES = ("wi", "wi_0", "wi_1", "wo")

_TWO_LANES = 2 * 128
_BIASES = ("wi_0_bias", "wi_1_bias", "wo_bias")


def mlp_axis(last: str) -> int:
  """The MLP axis of one layer's array, by the last part of its name."""
  return -2 if last == "wo" else -1


class Experts:
  """The experts of a rollout.

  `module` below is the name of one layer's expert: `decoder.layers_3.moe_block`
  has `decoder.layers_3.moe_block.wo`.
  """

  def __init__(
    self, names: set[str], cfg: Any, wanted: dict[str, Any] | None
  ) -> None:
    """Experts of a model.

    Args:
      names: Names of all layers' arrays on the trainer's side.
      cfg: A SyncConfig.
      wanted: The target's leaves by name, or None.
    """
    self._names = names
    self._cfg = cfg
    self._wanted = {} if wanted is None else wanted
    self._has_target = wanted is not None

  def padded_width(self, module: str, width: int) -> int:
    """Length of the MLP axis over all shards, once padded.

    Args:
      module: The expert.
      width: Its length on the trainer's side.

    Returns:
      The padded length, `width` where nothing is padded.

    Raises:
      ValueError: the target's arrays of this expert disagree, or an expert with
        biases is to be padded.
    """
    if self._has_target:
      padded = self._target_width(module)
    else:
      padded = self._configured_width(module, width)
    if padded != width and self._has_bias(module):
      raise ValueError(
        f"experts with biases are never padded: their biases stay {width}"
        f" wide, but `{module}` is to be {padded} wide; ask for {width}"
      )
    return padded

  def shards(self, module: str) -> int:
    """Shards of the MLP axis on the rollout's side."""
    if self._cfg.moe_mlp_tp_size > 1:
      return self._cfg.moe_mlp_tp_size
    if self._cfg.rollout_tensor_parallelism > 1:
      return self._cfg.rollout_tensor_parallelism
    counts = {
      _axis_shards(leaf, mlp_axis(last))
      for last, leaf in self._target_leaves(module).items()
    } - {1}
    if len(counts) > 1:
      raise ValueError(
        f"the target shards `{module}` {sorted(counts)} ways at once; shard"
        " its arrays alike, or set `moe_mlp_tp_size`"
      )
    return counts.pop() if counts else 1

  def _target_leaves(self, module: str) -> dict[str, Any]:
    leaves = {last: self._wanted.get(f"{module}.{last}") for last in NAMES}
    return {last: leaf for last, leaf in leaves.items() if leaf is not None}

  def _target_width(self, module: str) -> int:
    widths = {}
    for last, leaf in self._target_leaves(module).items():
      shape = tuple(leaf.shape)
      if len(shape) < 2 or (last == "wi" and shape[-1] % 2):
        raise ValueError(f"target `{module}.{last}` has shape {list(shape)}")
      widths[last] = shape[mlp_axis(last)] // (2 if last == "wi" else 1)
    if len(set(widths.values())) != 1:
      raise ValueError(f"the target's widths of `{module}` differ: {widths}")
    return next(iter(widths.values()))

  def _configured_width(self, module: str, width: int) -> int:
    if self._cfg.padded_base_moe_mlp_dim is not None:
      return self._cfg.padded_base_moe_mlp_dim
    if not self._cfg.prefuse_moe_weights or self._has_bias(module):
      return width
    step = _TWO_LANES * self.shards(module)
    return math.ceil(width / step) * step

  def _has_bias(self, module: str) -> bool:
    return any(f"{module}.{last}" in self._names for last in _BIASES)


def _axis_shards(leaf: Any, axis: int) -> int:
  """Shards of one axis of a leaf with a NamedSharding, else 1."""
  sharding = getattr(leaf, "sharding", None)
  if sharding is None or not hasattr(sharding, "spec"):
    return 1
  spec = tuple(sharding.spec)
  axis %= len(leaf.shape)
  if axis >= len(spec) or spec[axis] is None:
    return 1
  entry = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
  return math.prod(sharding.mesh.shape[mesh_axis] for mesh_axis in entry)
