"""What the public kernels share: axes, jit, one device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from laneweave.kernels import execute, physical
from laneweave.kernels import layout as layout_lib


def scan_axes(
  name: str, x: jax.Array | np.ndarray, axis: int | tuple[int, ...] | None
) -> tuple[int, ...]:
  """Stacked axes as a tuple of non-negative numbers.

  Args:
    name: What errors call the array.
    x: The array.
    axis: One axis, several outermost first, or None for none.

  Returns:
    The axes.

  Raises:
    ValueError: an axis that `x` does not have, or none left besides them.
  """
  axes = () if axis is None else (axis,) if isinstance(axis, int) else axis
  rank = len(x.shape)
  if any(not -rank <= a < rank for a in axes) or rank <= len(axes):
    raise ValueError(
      f"`scan_axis` {axis} does not leave a block of `{name}`, whose shape"
      f" is {list(x.shape)}"
    )
  return tuple(a % rank for a in axes)


@functools.partial(
  jax.jit, static_argnames=("layout", "backend", "source_order")
)
def _run(layout, *sources, backend, source_order):
  return execute.run(
    layout, *sources, backend=backend, source_order=source_order
  )[0]


def physical_order(x: jax.Array, backend: str) -> tuple[int, ...] | None:
  """Order a kernel takes `x` in: its own on TPU, else the predicted one."""
  on_tpu = backend == "mosaic" and not isinstance(x, jax.core.Tracer)
  return physical.order_of(x) if on_tpu else None


def call(
  layout: layout_lib.Layout, *sources: jax.Array | np.ndarray, backend: str
) -> tuple[jax.Array, ...]:
  """Runs a layout on the sources' device, compiled once per layout."""
  backend = execute.resolve_backend(backend)
  arrays = [jnp.asarray(x) for x in sources]
  order = physical_order(arrays[0], backend)
  return _run(layout, *arrays, backend=backend, source_order=order)
