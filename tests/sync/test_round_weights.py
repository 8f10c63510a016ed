"""Weights of a round: the same bits in NumPy and on devices."""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import ml_dtypes
import numpy as np
import pytest

from laneweave.sync import round_weights

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def bits(x):
  return np.ascontiguousarray(x).view(f"uint{x.dtype.itemsize * 8}")


def every_kind(dtype):
  """Numbers of all sizes, and everything that is none."""
  integer = np.dtype(f"uint{np.dtype(dtype).itemsize * 8}")
  rng = np.random.default_rng(0)
  values = rng.integers(0, np.iinfo(integer).max, 4096, dtype=integer)
  values[:4] = [0, 1, np.iinfo(integer).max, 1 << (integer.itemsize * 8 - 1)]
  return values.view(dtype).reshape(8, -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
def test_devices_and_numpy_agree_bit_for_bit(dtype):
  x = every_kind(dtype)
  mesh = Mesh(np.array(jax.devices()), ("x",))
  sharding = NamedSharding(mesh, PartitionSpec("x"))
  arrays = {"w": jax.device_put(x.copy(), sharding)}
  for before, after in ((1, 2), (2, 5), (5, 1)):
    arrays = round_weights.step(arrays, before, after)
    assert arrays["w"].sharding.is_equivalent_to(sharding, x.ndim)
    expected = round_weights.in_numpy(x, after)
    np.testing.assert_array_equal(bits(np.asarray(arrays["w"])), bits(expected))


def test_the_first_round_is_the_checkpoint_itself():
  x = every_kind(np.float32)
  np.testing.assert_array_equal(bits(round_weights.in_numpy(x, 1)), bits(x))


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda d: np.dtype(d).name)
def test_ordinary_numbers_change_and_others_do_not(dtype):
  x = every_kind(dtype)
  y = round_weights.in_numpy(x, 2)
  info = ml_dtypes.finfo(dtype)
  with np.errstate(invalid="ignore"):
    wide = x.astype(np.float64)
  ordinary = np.isfinite(wide) & (np.abs(wide) >= float(info.smallest_normal))
  np.testing.assert_array_equal(bits(x) != bits(y), ordinary)
  assert np.isfinite(y[ordinary].astype(np.float64)).all()


def test_neighbouring_rounds_differ_after_the_cast_to_bfloat16():
  x = np.full(4, 1.25, np.float32)
  rounds = [
    bits(round_weights.in_numpy(x, r).astype(ml_dtypes.bfloat16))[0]
    for r in range(1, 130)
  ]
  assert len(set(rounds[:128])) == 128
  assert rounds[128] == rounds[0]
