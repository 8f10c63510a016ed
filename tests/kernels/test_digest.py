"""Fingerprints: equal for any sharding, different for any corruption."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from laneweave import kernels
from laneweave.kernels import digest, reference
from laneweave.tests.kernels import bits


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
  "shape", [(5,), (130,), (3, 5), (40, 256), (16, 4, 32), (2, 3, 17, 8)]
)
def test_equals_the_definition(backend, dtype, shape):
  x = bits.random(shape, dtype, seed=1)
  got = kernels.fingerprint(x, backend=backend)
  np.testing.assert_array_equal(got, reference.fingerprint(x))


def test_one_byte_elements():
  x = bits.random((33, 7), "float8_e4m3fn", seed=2, special=False)
  got = kernels.fingerprint(x, backend="xla")
  np.testing.assert_array_equal(got, reference.fingerprint(x))


def test_the_seed_matters():
  x = bits.random((8, 8), "float32", seed=3)
  assert (kernels.fingerprint(x, seed=(1, 2)) != kernels.fingerprint(x)).all()


def test_shards_add_up():
  x = bits.random((12, 20), "float32", seed=4)
  whole = kernels.fingerprint(x)
  total = np.zeros(2, np.uint32)
  for r, c in [(0, 0), (0, 5), (0, 10), (0, 15)]:
    for rows in (slice(0, 8), slice(8, 12)):
      start = np.array([rows.start, c], np.uint32)
      bases = digest.salts(None, 2) + jnp.asarray(np.tile(start + [r, 0], 2))
      shard = jnp.asarray(x[rows, c : c + 5])
      total += np.asarray(
        digest.fingerprint_block(shard, bases.astype(jnp.uint32))
      )
  np.testing.assert_array_equal(total, whole)


def _swap(x, a, b):
  y = x.copy()
  y[a], y[b] = x[b], x[a]
  return y


def _with(x, fn):
  y = x.copy()
  fn(y)
  return y


def corruptions(x):
  """Every way in which a matrix arrives wrong, by name."""
  half = x.shape[1] // 2
  raw = bits.bits(x)
  sign = raw.dtype.type(1 << (8 * raw.itemsize - 1))

  def flip(*places, mask=sign):
    y = raw.copy()
    for p in places:
      y[p] ^= mask
    return y.view(x.dtype)

  yield "shards swapped", np.concatenate([x[:, half:], x[:, :half]], axis=1)
  yield (
    "tiles swapped",
    _with(x, lambda y: y.__setitem__(slice(8, 16), x[:8]))
    if x.shape[0] < 16
    else np.concatenate([x[8:16], x[:8], x[16:]]),
  )
  yield "rows swapped", _swap(x, 3, 5)
  yield "columns swapped", _swap(x.T, 2, 7).T.copy()
  yield "elements swapped", _swap(x, (1, 2), (4, 9))
  yield "sign flipped", flip((2, 3))
  yield "two signs flipped", flip((2, 3), (5, 1))
  yield "all signs flipped", (raw ^ sign).view(x.dtype)
  for bit in range(8 * raw.itemsize):
    yield f"bit {bit} flipped", flip((6, 6), mask=raw.dtype.type(1 << bit))
  yield "shifted by one row", np.roll(x, 1, axis=0)
  yield "+0.0 for -0.0", _with(x, lambda y: y.__setitem__((0, 0), -0.0))
  yield "block zeroed", _with(x, lambda y: y.__setitem__(slice(4, 8), 0))
  yield "reversed", x[::-1].copy()
  yield "palindrome", np.concatenate([x[:4], x[:4][::-1], x[8:]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_F57_corruptions_are_seen(dtype):
  x = bits.random((16, 32), dtype, seed=5, special=False)
  x[0, 0] = 0.0
  want = reference.fingerprint(x)
  for name, y in corruptions(x):
    assert (kernels.fingerprint(y) != want).any(), name


def test_F57_swapped_shards_and_negated_values():
  x = np.arange(8, dtype=np.float32)
  want = kernels.fingerprint(x)
  for y in (x[[2, 3, 0, 1, 6, 7, 4, 5]], -x):
    assert (kernels.fingerprint(y) != want).any()


def test_bfloat16_values_held_in_float32_permuted_by_powers_of_two():
  x = bits.random((4096,), "bfloat16", seed=6, special=False)
  x = x.astype(np.float32)
  want = reference.fingerprint(x)
  for power in range(12):
    y = np.arange(4096) ^ (1 << power)
    assert (reference.fingerprint(x[y]) != want).any(), power


def test_ten_thousand_random_corruptions():
  """None missed: each is a few changed elements of a small matrix."""
  rng = np.random.default_rng(7)
  base = bits.random((24, 24), "bfloat16", seed=8, special=False)
  batch = np.repeat(bits.bits(base)[None], 10_000, axis=0)
  for y in batch:
    kind = rng.integers(4)
    i, j = rng.integers(24, size=(2, 2))
    if kind == 0:
      y[tuple(i)] ^= np.uint16(1 << rng.integers(16))
    elif kind == 1:
      y[tuple(i)] ^= np.uint16(0x8000)
      y[tuple(j)] ^= np.uint16(0x8000)
    elif kind == 2:
      y[tuple(i)], y[tuple(j)] = y[tuple(j)], y[tuple(i)]
    else:
      y[i[0]], y[j[0]] = y[j[0]].copy(), y[i[0]].copy()
  changed = (batch != bits.bits(base)).any(axis=(1, 2))
  prints = jax.vmap(digest.fingerprint_block, in_axes=(0, None))(
    jnp.asarray(batch.view(ml_dtypes.bfloat16)), digest.salts(None, 2)
  )
  missed = (np.asarray(prints) == reference.fingerprint(base)).all(axis=1)
  assert changed.sum() > 9_000
  assert not (missed & changed).any()
