"""The NumPy fingerprint against its definition in Python integers."""

import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest

from laneweave.kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)
MASK = 2**32 - 1
SEED = (0x243F6A88, 0x85A308D3)


def mix(x):
  x ^= x >> 16
  x = x * 0x7FEB352D & MASK
  x ^= x >> 15
  x = x * 0x846CA68B & MASK
  return x ^ x >> 16


def by_definition(x, seed=SEED, origin=None):
  """One element at a time; `origin` is the global index of element 0."""
  origin = (0,) * x.ndim if origin is None else origin
  bits = x.view(f"u{x.dtype.itemsize}")
  words = []
  for w in range(2):
    total = 0
    for index in itertools.product(*(range(n) for n in x.shape)):
      b = int(bits[index])
      if x.dtype.itemsize == 4:
        t = (b ^ b >> 16) * 0x7FEB352D & MASK
        m = t ^ t >> 15
      else:
        m = b ^ b >> 8
      weight = 1
      for k in range(x.ndim):
        axis = x.ndim - 1 - k
        salt = mix(seed[w] + 0x9E3779B9 * (k + 1) & MASK)
        j = index[axis] + origin[axis]
        weight = weight * (mix(j + salt & MASK) | 1) & MASK
      total = total + m * weight & MASK
    words.append(total)
  return words


def random_array(shape, dtype, seed=0):
  rng = np.random.default_rng(seed)
  size = np.dtype(dtype).itemsize
  raw = rng.integers(0, 256, (*shape, size), np.uint8)
  return np.ascontiguousarray(raw).view(dtype)[..., 0]


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
@pytest.mark.parametrize(
  "dtype", [np.float32, BF16, np.float16, ml_dtypes.float8_e4m3fn, np.int32]
)
def test_agrees_with_the_definition(shape, dtype):
  x = random_array(shape, dtype)
  assert reference.fingerprint(x).tolist() == by_definition(x)
  seed = np.array([1, MASK], np.uint32)
  got = reference.fingerprint(x, seed=seed)
  assert got.dtype == np.uint32
  assert got.tolist() == by_definition(x, (1, MASK))


def test_known_values():
  # Worked out once with `by_definition`; they must never change, since the
  # two sides of a sync may run different releases.
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  assert reference.fingerprint(x).tolist() == KNOWN_FLOAT32
  assert reference.fingerprint(x.astype(BF16)).tolist() == KNOWN_BFLOAT16


KNOWN_FLOAT32 = [339422873, 2702608949]
KNOWN_BFLOAT16 = [2423480955, 2863215607]


def test_F57_swaps_and_signs_are_seen():
  x = np.arange(8, dtype=np.float32)
  swapped = x[[2, 3, 0, 1, 6, 7, 4, 5]]
  prints = [reference.fingerprint(a).tolist() for a in (x, swapped, -x)]
  assert len({tuple(p) for p in prints}) == 3
  # All eight values changed sign, and 0.0 became -0.0.
  only_zero = x.copy()
  only_zero[0] = -0.0
  assert reference.fingerprint(only_zero).tolist() != prints[0]


def test_F57_a_value_moved_to_another_tensor_is_seen():
  a, b = np.array([1, 2, 3], np.float32), np.array([4, 5, 6], np.float32)
  before = reference.fingerprint_many([a, b])
  a[1], b[1] = b[1], a[1]
  after = reference.fingerprint_many([a, b])
  assert (before != after).any(axis=1).tolist() == [True, True]


def test_F58_one_last_bit_in_a_large_tensor_is_seen():
  x = np.full((64, 1000), 3.25, np.float32)
  before = reference.fingerprint(x)
  x[40, 999] = np.nextafter(x[40, 999], np.float32(4))
  assert reference.fingerprint(x).tolist() != before.tolist()


def test_F60_zeros_have_the_fingerprint_zero_and_others_have_not():
  assert reference.fingerprint(np.zeros((3, 4), BF16)).tolist() == [0, 0]
  x = np.full((3, 4), 0.009, np.float32)
  assert all(reference.fingerprint(x))


def test_fingerprints_of_shards_add_up():
  x = random_array((4, 6), np.float32)
  words = np.zeros(2, np.uint32)
  for i, j in itertools.product(range(2), range(3)):
    shard = np.ascontiguousarray(x[2 * i : 2 * i + 2, 2 * j : 2 * j + 2])
    words += np.array(by_definition(shard, origin=(2 * i, 2 * j)), np.uint32)
  np.testing.assert_array_equal(words, reference.fingerprint(x))


def test_shape_is_part_of_it():
  x = np.arange(1, 7, dtype=np.float32)
  prints = [
    reference.fingerprint(x.reshape(shape)).tolist()
    for shape in ((6,), (2, 3), (3, 2), (1, 2, 3))
  ]
  assert len({tuple(p) for p in prints}) == 4


def test_chunks_do_not_show(monkeypatch):
  x = random_array((5, 7, 11), np.float32)
  want = reference.fingerprint(x)
  from laneweave.kernels import reference_fingerprint

  for elements in (1, 12, 30):
    monkeypatch.setattr(reference_fingerprint, "_CHUNK_ELEMENTS", elements)
    np.testing.assert_array_equal(reference.fingerprint(x), want)


def test_no_overflow_warning_and_empty_arrays():
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    reference.fingerprint(random_array((9,), np.float32))
    assert reference.fingerprint(np.zeros((0, 3), BF16)).tolist() == [0, 0]
    assert reference.fingerprint(np.zeros((3, 0), BF16)).tolist() == [0, 0]
    assert reference.fingerprint_many([]).shape == (0, 2)


def test_fingerprint_many_is_one_row_an_array():
  arrays = [random_array((3, i), np.float32, i) for i in (1, 2, 5)]
  out = reference.fingerprint_many(arrays, seed=(5, 6))
  assert out.dtype == np.uint32
  want = [reference.fingerprint(x, seed=(5, 6)).tolist() for x in arrays]
  assert out.tolist() == want


def test_refuses_rank_0_and_8_byte_elements():
  with pytest.raises(ValueError, match="rank 0"):
    reference.fingerprint(np.float32(1))
  with pytest.raises(ValueError, match="float64"):
    reference.fingerprint(np.zeros(3))
