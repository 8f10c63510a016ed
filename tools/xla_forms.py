"""What a layout is without a kernel: the plain forms XLA is measured with.

Two forms, both written as a user of jnp would. One program for all layers has
one launch for XLA to optimise over; one program per layer, its index traced so
that it compiles once, is the strongest plain form known for most layouts, and
needs a launch a layer.
"""

import collections.abc

import jax

from laneweave.kernels import layout as layout_lib
from laneweave.kernels import xla


def all_layers(
  layout: layout_lib.Layout,
) -> collections.abc.Callable[..., tuple[jax.Array, ...]]:
  """All outputs in one program.

  Args:
    layout: The layout.

  Returns:
    A function of the sources, to be jitted.
  """
  return lambda *sources: xla.relayout(layout, *sources)


def one_layer(
  layout: layout_lib.Layout,
) -> collections.abc.Callable[..., jax.Array]:
  """One output a program.

  Args:
    layout: The layout.

  Returns:
    A function of the index along each stacked axis (int32 scalars) and the
    sources, to be jitted.
  """
  block = layout_lib.Layout(
    shape=layout.block_shape,
    scan_axes=(),
    source_dtype=layout.source_dtype,
    dtype=layout.dtype,
    operands=layout.operands,
    axis=layout.axis,
    segments=layout.segments,
  )

  def run(*args):
    indices, sources = (
      args[: len(layout.scan_axes)],
      args[len(layout.scan_axes) :],
    )
    at = dict(zip(layout.scan_axes, indices, strict=True))
    picked = []
    for x in sources:
      # From the last axis on, so that the others keep their numbers.
      for axis, index in sorted(at.items(), reverse=True):
        x = jax.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)
      picked.append(x)
    return xla.relayout(block, *picked)[0]

  return run


__all__ = ["all_layers", "one_layer"]
