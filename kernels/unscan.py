"""Taking a scanned array apart: one array per layer, cast on the way."""

import jax
import numpy as np

from laneweave.kernels import call
from laneweave.kernels import layout as layout_lib


def unscan(
  x: jax.Array | np.ndarray,
  *,
  scan_axis: int | tuple[int, ...] | None = 1,
  dtype=None,
  backend: str = "auto",
) -> tuple[jax.Array, ...]:
  """One array per index of the stacked axis.

  Args:
    x: Source, rank 1 or more with its stacked axes, e.g. [embed, layers, mlp].
    scan_axis: The stacked axis; two of them outermost first, where blocks of
      layers are stacked; None: not stacked, only cast.
    dtype: Output dtype; None keeps the source's.
    backend: See `execute.BACKENDS`.

  Returns:
    As many arrays as there are layers, each of `x`'s shape without the stacked
    axes.

  Raises:
    ValueError: an axis that `x` does not have.
    TypeError: a cast that is not supported.
  """
  axes = call.scan_axes("x", x, scan_axis)
  layout = layout_lib.unscan_layout(
    x.shape, x.dtype, scan_axes=axes, dtype=dtype
  )
  return call.call(layout, x, backend=backend)
