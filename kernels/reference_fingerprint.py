"""What an array's fingerprint is, in plain NumPy.

Written from the definition alone. An element's bits are mixed within 32 bits;
its weight is a product of one odd factor per axis, made from its global index
there and the seed. Zero bits contribute nothing, and the fingerprints of the
shards of an array, each at its own global indices, add up to the array's.
"""

from collections.abc import Sequence
import math

import numpy as np

Seed = Sequence[int] | np.ndarray | None

DEFAULT_SEED = (0x243F6A88, 0x85A308D3)

# Elements held as uint32 at one time, 16 MiB of them.
_CHUNK_ELEMENTS = 1 << 22


def fingerprint(
  x: np.ndarray, *, seed: Seed = None, backend: str = "auto"
) -> np.ndarray:
  """64 bits that depend on every element's bits and on its global index.

  Word w is the sum over all elements, modulo 2**32, of the element's mixed
  bits times its weight W_w: the product over the axes k, counted from the last
  one, of A_{w,k}(index along that axis). A sum over elements with such weights
  is taken axis by axis, the last axis first.

  Args:
    x: Array of rank 1 or more with elements of 1, 2 or 4 bytes.
    seed: Two unsigned 32-bit integers; None: `DEFAULT_SEED`.
    backend: Ignored.

  Returns:
    uint32 [2].

  Raises:
    ValueError: rank 0, or elements of another size.
  """
  del backend
  x = np.asarray(x)
  if x.ndim == 0:
    raise ValueError("`x` has rank 0; a fingerprint needs rank 1 or more")
  if x.dtype.itemsize not in (1, 2, 4):
    raise ValueError(
      f"`x` has elements of {x.dtype.itemsize} bytes ({x.dtype});"
      " fingerprints take 1, 2 or 4"
    )
  seed = DEFAULT_SEED if seed is None else seed
  rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
  step = max(1, _CHUNK_ELEMENTS // max(1, x.shape[-1]))
  words = np.zeros(2, np.uint32)
  for w in range(2):
    factors = [
      _index_factors(length, int(seed[w]), k)
      for k, length in enumerate(reversed(x.shape))
    ]
    sums = np.empty(rows.shape[0], np.uint32)
    for start in range(0, rows.shape[0], step):
      m = _mixed_bits(rows[start : start + step])
      sums[start : start + step] = np.sum(
        m * factors[0], axis=-1, dtype=np.uint32
      )
    sums = sums.reshape(x.shape[:-1])
    for factor in factors[1:]:
      sums = np.sum(sums * factor, axis=-1, dtype=np.uint32)
    words[w] = sums
  return words


def fingerprint_many(
  arrays: Sequence[np.ndarray], *, seed: Seed = None, backend: str = "auto"
) -> np.ndarray:
  """Fingerprints of several arrays, uint32 [arrays, 2].

  Args:
    arrays: As `fingerprint` takes them.
    seed: As in `fingerprint`.
    backend: Ignored.

  Returns:
    Row i is the fingerprint of array i.
  """
  del backend
  words = [fingerprint(x, seed=seed) for x in arrays]
  return np.array(words, np.uint32).reshape(len(words), 2)


def _mix(x: np.ndarray) -> np.ndarray:
  """A bijection of uint32 in which every input bit reaches every output bit."""
  x = x ^ (x >> np.uint32(16))
  x = x * np.uint32(0x7FEB352D)
  x = x ^ (x >> np.uint32(15))
  x = x * np.uint32(0x846CA68B)
  return x ^ (x >> np.uint32(16))


def _index_factors(length: int, seed: int, k: int) -> np.ndarray:
  """The odd factors of every index along axis `k`, counted from the last."""
  # An array of one element, since NumPy wraps those without a warning.
  start = (seed + 0x9E3779B9 * (k + 1)) % 2**32
  salt = _mix(np.array([start], np.uint32))
  return _mix(np.arange(length, dtype=np.uint32) + salt) | np.uint32(1)


def _mixed_bits(x: np.ndarray) -> np.ndarray:
  """The bits of every element, mixed within 32 bits; zero stays zero."""
  x = np.ascontiguousarray(x)
  b = x.view(f"u{x.dtype.itemsize}").astype(np.uint32)
  if x.dtype.itemsize < 4:
    return b ^ (b >> np.uint32(8))
  b = (b ^ (b >> np.uint32(16))) * np.uint32(0x7FEB352D)
  return b ^ (b >> np.uint32(15))
