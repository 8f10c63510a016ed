"""Fingerprint of an array: 64 bits that see every element and its place.

The definition, its collision bound and the sources of both are in `digest`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from laneweave.kernels import call, digest, execute


@functools.partial(jax.jit, static_argnames=("backend", "source_order"))
def _words(x, seed, *, backend, source_order):
  return execute.fingerprint_words(
    x, digest.salts(seed, x.ndim), backend=backend, source_order=source_order
  )


def fingerprint(
  x: jax.Array | np.ndarray,
  *,
  seed: tuple[int, int] | np.ndarray | None = None,
  backend: str = "auto",
) -> np.ndarray:
  """Fingerprint of an array on one device.

  Args:
    x: The array, rank 1 or more, elements of 1, 2 or 4 bytes.
    seed: Two uint32 values; None: `digest.DEFAULT_SEED`.
    backend: See `execute.BACKENDS`.

  Returns:
    uint32 [2]; see `digest` for the definition and what it can tell apart.

  Raises:
    TypeError: elements of another size.
    ValueError: rank 0.
  """
  backend = execute.resolve_backend(backend)
  x = jnp.asarray(x)
  if x.ndim < 1:
    raise ValueError("`x` has rank 0; fingerprints take rank 1 and more")
  words = _words(
    x,
    jnp.asarray(digest.DEFAULT_SEED if seed is None else seed, jnp.uint32),
    backend=backend,
    source_order=call.physical_order(x, backend),
  )
  return digest.combine(np.asarray(words))[0]
