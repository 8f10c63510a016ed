"""Zero padding inside each shard of an axis."""

import jax
import numpy as np

from laneweave.kernels import call
from laneweave.kernels import layout as layout_lib


def pad_lanes(
  x: jax.Array | np.ndarray,
  *,
  scan_axis: int | tuple[int, ...] | None = 1,
  axis: int = -2,
  shards: int = 1,
  padded_width: int,
  dtype=None,
  backend: str = "auto",
) -> tuple[jax.Array, ...]:
  """Each layer with exact +0.0 at the end of every shard of one axis.

  `wo` takes its padding inside the same shards as gate and up, so that the sum
  over shards of each shard's expert equals the unsharded expert.

  Args:
    x: Source, e.g. `wo` [experts, layers, mlp, embed].
    scan_axis: The stacked axis or axes; None: not stacked.
    axis: Axis to pad, counted on a layer's array.
    shards: Equal parts of the axis that are padded one by one.
    padded_width: Size of the axis after padding, over all shards.
    dtype: Output dtype; None keeps the source's.
    backend: See `execute.BACKENDS`.

  Returns:
    One array per layer.

  Raises:
    ValueError: widths that do not divide, or a padding that would shrink.
    TypeError: a cast that is not supported.
  """
  axes = call.scan_axes("x", x, scan_axis)
  layout = layout_lib.pad_layout(
    x.shape,
    x.dtype,
    scan_axes=axes,
    axis=axis,
    shards=shards,
    padded_width=padded_width,
    dtype=dtype,
  )
  return call.call(layout, x, backend=backend)
