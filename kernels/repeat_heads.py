"""Repeating KV heads, so that every tensor-parallel shard holds one."""

import jax
import numpy as np

from laneweave.kernels import call
from laneweave.kernels import layout as layout_lib


def repeat_heads(
  x: jax.Array | np.ndarray,
  *,
  scan_axis: int | tuple[int, ...] | None = 1,
  axis: int = -2,
  repeats: int,
  group: int = 1,
  dtype=None,
  backend: str = "auto",
) -> tuple[jax.Array, ...]:
  """Each layer with every head repeated in place: 0 0 1 1, never 0 1 0 1.

  Args:
    x: Source, e.g. [embed, layers, kv_heads, head_dim], or a bias
      [kv_heads, layers, head_dim].
    scan_axis: The stacked axis or axes; None: not stacked.
    axis: Axis of the heads, counted on a layer's array.
    repeats: Copies of each head, at least 1.
    group: Elements of one head along `axis`: head_dim where a bias keeps heads
      and head_dim flattened in one axis, else 1.
    dtype: Output dtype; None keeps the source's.
    backend: See `execute.BACKENDS`.

  Returns:
    One array per layer.

  Raises:
    ValueError: `repeats` below 1, or an axis that `group` does not divide.
    TypeError: a cast that is not supported.
  """
  axes = call.scan_axes("x", x, scan_axis)
  layout = layout_lib.repeat_layout(
    x.shape,
    x.dtype,
    scan_axes=axes,
    axis=axis,
    repeats=repeats,
    group=group,
    dtype=dtype,
  )
  return call.call(layout, x, backend=backend)
