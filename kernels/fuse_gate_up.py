"""Joining the expert gate and up projections, per shard or woven in lanes."""

import jax
import numpy as np

from laneweave.kernels import call
from laneweave.kernels import layout as layout_lib


def fuse_gate_up(
  gate: jax.Array | np.ndarray,
  up: jax.Array | np.ndarray,
  *,
  scan_axis: int | tuple[int, ...] | None = 1,
  shards: int = 1,
  padded_width: int | None = None,
  lane_size: int = 0,
  dtype=None,
  backend: str = "auto",
) -> tuple[jax.Array, ...]:
  """Gate and up of each layer in one array, joined along the last axis.

  Args:
    gate: MaxText's `wi_0`, e.g. [experts, layers, embed, mlp].
    up: MaxText's `wi_1`, of the same shape and dtype.
    scan_axis: The stacked axis or axes; None: not stacked.
    shards: Tensor-parallel shards of the mlp axis on the rollout side; each is
      padded by itself and holds its own gate and up.
    padded_width: Width of one of gate and up after padding, over all shards;
      None: not padded.
    lane_size: 0: a shard is its gate then its up (what the grouped-matmul
      kernel of tpu-inference takes, since it interleaves lanes itself); 128:
      gate and up alternate in chunks of 128 lanes.
    dtype: Output dtype; None keeps the source's.
    backend: See `execute.BACKENDS`.

  Returns:
    One array per layer, `2 * padded_width` wide.

  Raises:
    ValueError: shapes that differ, or widths that do not divide.
    TypeError: a cast that is not supported.
  """
  if gate.shape != up.shape or gate.dtype != up.dtype:
    raise ValueError(
      f"`gate` {gate.dtype}{list(gate.shape)} and `up`"
      f" {up.dtype}{list(up.shape)} must have the same shape and dtype"
    )
  axes = call.scan_axes("gate", gate, scan_axis)
  layout = layout_lib.fuse_layout(
    gate.shape,
    gate.dtype,
    scan_axes=axes,
    shards=shards,
    padded_width=padded_width,
    lane_size=lane_size,
    dtype=dtype,
  )
  return call.call(layout, gate, up, backend=backend)
