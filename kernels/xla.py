"""Layouts as plain array code, for CPU hosts and for comparison.

What XLA makes of this on TPU is the baseline the kernels are measured against;
on CPU it is the fast path, since Pallas only interprets there.
"""

import itertools

import jax
import jax.numpy as jnp

from laneweave.kernels import cast
from laneweave.kernels import layout as layout_lib


def relayout(
  layout: layout_lib.Layout, *sources: jax.Array
) -> tuple[jax.Array, ...]:
  """Runs a layout.

  Args:
    layout: The layout.
    *sources: `layout.operands` arrays of `layout.shape`.

  Returns:
    `layout.num_outputs` arrays of `layout.out_shape`.
  """
  outputs = []
  stacked = [range(layout.shape[a]) for a in layout.scan_axes]
  for index in itertools.product(*stacked):
    at = dict(zip(layout.scan_axes, index, strict=True))
    select = tuple(at.get(a, slice(None)) for a in range(len(layout.shape)))
    blocks = [cast.round_to(x[select], layout.dtype) for x in sources]
    outputs.append(_rebuild(layout, blocks))
  return tuple(outputs)


def _rebuild(layout, blocks):
  """One output from the cast blocks of its sources."""
  if layout.axis is None:
    return blocks[0]
  pieces = []
  for s in layout.segments:
    if s.source == layout_lib.ZERO:
      shape = list(layout.block_shape)
      shape[layout.axis] = s.length
      pieces.append(jnp.zeros(shape, layout.dtype))
    else:
      pieces.append(
        jax.lax.slice_in_dim(
          blocks[s.source], s.start, s.start + s.length, axis=layout.axis
        )
      )
  return jnp.concatenate(pieces, axis=layout.axis)
