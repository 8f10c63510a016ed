"""Runs a layout on a backend."""

import jax
import jax.numpy as jnp

from laneweave.kernels import cast, digest, mosaic, xla
from laneweave.kernels import layout as layout_lib

BACKENDS = ("auto", "mosaic", "interpret", "xla")


def resolve_backend(backend: str, platform: str | None = None) -> str:
  """Turns "auto" into a backend.

  Args:
    backend: One of `BACKENDS`.
    platform: Platform of the devices the arrays live on; None: the default
      backend's.

  Returns:
    "mosaic", "interpret" or "xla".

  Raises:
    ValueError: no such backend.
  """
  if backend not in BACKENDS:
    raise ValueError(
      f"`kernel_backend` {backend!r} is not one of {', '.join(BACKENDS)}"
    )
  if backend != "auto":
    return backend
  platform = jax.default_backend() if platform is None else platform
  return "mosaic" if platform == "tpu" else "xla"


def run(
  layout: layout_lib.Layout,
  *sources: jax.Array,
  backend: str,
  bases: jax.Array | None = None,
  source_order: tuple[int, ...] | None = None,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """Runs a layout; to be called under `jax.jit`.

  Args:
    layout: The layout.
    *sources: `layout.operands` arrays of `layout.shape`.
    backend: "mosaic", "interpret" or "xla".
    bases: uint32 [2 * rank of the output], see `digest.salts`, or None.
    source_order: Physical order of the sources, major to minor; None: what
      XLA for TPU chooses.

  Returns:
    `layout.num_outputs` arrays of `layout.out_shape`; and, with `bases`,
    arrays of 32-bit integers [outputs, 2, lanes], together in the order of the
    outputs, that `combine` turns into fingerprints, else nothing.

  Raises:
    TypeError: a cast that is not supported.
    ValueError: sources that are not of the layout's shape and dtype.
  """
  cast.check_cast(layout.source_dtype, layout.dtype, "source")
  for x in sources:
    if x.shape != layout.shape or x.dtype != layout.source_dtype:
      raise ValueError(
        f"source {x.dtype.name}{list(x.shape)} is not of the layout's"
        f" {layout.source_dtype.name}{list(layout.shape)}"
      )
  if len(sources) != layout.operands:
    raise ValueError(
      f"the layout takes {layout.operands} source(s), got {len(sources)}"
    )
  if backend != "xla":
    return mosaic.relayout(
      layout,
      *sources,
      bases=bases,
      source_order=source_order,
      interpret=backend == "interpret",
    )
  outputs = xla.relayout(layout, *sources)
  if bases is None:
    return outputs, ()
  # The fingerprint is of what was written: without the barrier XLA would
  # compute every output twice.
  written = jax.lax.optimization_barrier(outputs)
  words = [digest.fingerprint_block(x, bases) for x in written]
  return written, (jnp.stack(words)[..., None],)


def fingerprint_words(
  x: jax.Array,
  bases: jax.Array,
  *,
  backend: str,
  source_order: tuple[int, ...] | None = None,
) -> jax.Array:
  """Fingerprints one shard without writing it; to be called under `jax.jit`.

  Args:
    x: The shard, rank 1 or more.
    bases: uint32 [2 * rank], see `digest.salts`.
    backend: "mosaic", "interpret" or "xla".
    source_order: Physical order of `x`.

  Returns:
    32-bit integers [1, 2, lanes] for `combine`.
  """
  if backend == "xla":
    return digest.fingerprint_block(x, bases)[None, :, None]
  layout = layout_lib.unscan_layout(x.shape, x.dtype, scan_axes=())
  _, words = mosaic.relayout(
    layout,
    x,
    bases=bases,
    source_order=source_order,
    out_order=source_order,
    interpret=backend == "interpret",
    emit=False,
  )
  return words[0]
