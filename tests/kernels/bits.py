"""Bits of arrays, and arrays whose bits show a wrong order or a wrong cast."""

import ml_dtypes
import numpy as np

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}

# Zeros, infinities, NaNs with payloads, denormals, the largest finite value,
# and values that lie exactly between two bfloat16 or float16 numbers.
SPECIAL = np.array(
    [
        0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345,
        0x7F800001, 0x7FA00000, 0x00000001, 0x80400000, 0x7F7FFFFF, 0x3F808000,
        0x3F818000, 0x3F801000, 0x3F803000, 0x477FE000, 0x477FF000, 0x33000000,
        0x33000001, 0x387FC000, 0x38800000, 0x387FE000, 0xB3800000, 0x35A00000,
    ],
    np.uint32,
).view(np.float32)  # fmt: skip


def bits(x) -> np.ndarray:
  """The array's bits as unsigned integers: NaN equals itself, 0.0 not -0.0."""
  x = np.asarray(x)
  return x.view(_UNSIGNED[x.dtype.itemsize])


def assert_bits_equal(got, want) -> None:
  """Equal in dtype, shape and every bit."""
  got, want = np.asarray(got), np.asarray(want)
  assert got.dtype == want.dtype
  assert got.shape == want.shape
  np.testing.assert_array_equal(bits(got), bits(want))


def random(shape, dtype, seed: int, special: bool = True) -> np.ndarray:
  """Random values with special ones mixed in."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, dtype=np.float32)
  if special:
    where = rng.random(shape) < 0.1
    x[where] = rng.choice(SPECIAL, size=int(where.sum()))
  dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
  if dtype == np.float32:
    return x
  with np.errstate(all="ignore"):
    return x.astype(dtype)
