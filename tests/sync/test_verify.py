"""What verification finds, and that it finds nothing else."""

import jax
import numpy as np
import pytest

from laneweave.sync import fingerprints, session, verify
from laneweave.sync.transport import variables
from laneweave.tests.kernels import bits
from laneweave.tests.sync import small_model


def manifest_of(arrays, **changes):
  """A manifest whose fingerprints are of these arrays."""
  names = list(arrays)
  words = fingerprints.fingerprint_many(list(arrays.values()), seed=(1, 2))
  prints = dict(zip(names, words, strict=True))
  prints.update(changes)
  return session.RoundManifest(
    session="s",
    round_id=1,
    version=1,
    seed=(1, 2),
    variables=variables.variables_of(arrays),
    fingerprints={k: v for k, v in prints.items() if v is not None},
  )


def test_verification_names_what_is_wrong():
  arrays = {
    "a": jax.numpy.arange(6.0),
    "b": jax.numpy.full((2, 2), 0.009),
    "c": jax.numpy.array([1.0, np.nan, np.inf]),
  }
  manifest = manifest_of(arrays)
  # F62: a NaN that was sent is no mismatch, and is counted apart.
  assert verify.mismatched(manifest, arrays) == ()
  assert verify.health(arrays) == {"c": (1, 1)}
  # F60: zeros are not small values.
  zeroed = {**arrays, "b": jax.numpy.zeros((2, 2))}
  assert verify.mismatched(manifest, zeroed) == ("b",)
  # F62: NaN at the target alone.
  spoilt = {**arrays, "a": arrays["a"].at[2].set(np.nan)}
  assert verify.mismatched(manifest, spoilt) == ("a",)
  # F57: a value moved between two tensors.
  moved = {**arrays, "a": arrays["a"].at[0].set(0.009)}
  moved["b"] = arrays["b"].at[0, 0].set(0.0)
  assert verify.mismatched(manifest, moved) == ("a", "b")
  # An array that is missing, of another shape, or without a fingerprint.
  assert verify.mismatched(manifest, {"a": arrays["a"]}) == ("b", "c")
  reshaped = {**arrays, "b": arrays["b"].reshape(4)}
  assert verify.mismatched(manifest, reshaped) == ("b",)
  assert verify.mismatched(manifest_of(arrays, c=None), arrays) == ("c",)


def test_F58_one_stale_vector_in_a_large_model():
  """Digests are per tensor: a sum over all would round the change away."""
  big = jax.numpy.full((64, 64), 3226.0)
  vector = jax.numpy.full((4,), 0.1)
  manifest = manifest_of({"big": big, "norm": vector})
  stale = {"big": big, "norm": jax.numpy.full((4,), 0.2)}
  assert verify.mismatched(manifest, stale) == ("norm",)


def test_F57_swapped_shards_and_signs():
  """Sums of absolute values show none of these."""
  x = jax.numpy.arange(8.0)
  manifest = manifest_of({"x": x})
  shards = np.asarray(x).reshape(4, 2)
  for wrong in (
    shards[[1, 0, 2, 3]],
    shards[[0, 1, 3, 2]],
    shards[[1, 0, 3, 2]],
    -shards,
    shards[:, ::-1],
  ):
    arrived = jax.numpy.asarray(wrong.reshape(8))
    assert verify.mismatched(manifest, {"x": arrived}) == ("x",)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_single_bit_counts(dtype):
  x = bits.random((5, 3), dtype, seed=3)
  manifest = manifest_of({"x": jax.numpy.asarray(x)})
  width = x.dtype.itemsize * 8
  for at in range(x.size):
    damaged = x.copy()
    bits.bits(damaged).reshape(-1)[at] ^= 1 << (at % width)
    arrived = {"x": jax.numpy.asarray(damaged)}
    assert verify.mismatched(manifest, arrived) == ("x",)


def test_shardings_do_not_matter_and_places_do():
  target = small_model.target()
  values = {
    name: bits.random(x.shape, "bfloat16", seed=i)
    for i, (name, x) in enumerate(target.items())
  }
  whole = {name: jax.numpy.asarray(v) for name, v in values.items()}
  manifest = manifest_of(whole)
  placed = {
    name: jax.device_put(v, target[name].sharding) for name, v in values.items()
  }
  verify.warm_up({**placed, "shape only": target["head.kernel"]})
  assert verify.mismatched(manifest, placed) == ()
  # One shard of one array holds its neighbour's bytes.
  name = "layers_1.w.kernel"
  pieces = [np.asarray(s.data) for s in placed[name].addressable_shards]
  swapped = jax.make_array_from_single_device_arrays(
    placed[name].shape,
    placed[name].sharding,
    [
      jax.device_put(pieces[i], s.device)
      for i, s in zip(
        [1, 0, 2, 3], placed[name].addressable_shards, strict=True
      )
    ],
  )
  assert verify.mismatched(manifest, {**placed, name: swapped}) == (name,)


def test_a_fingerprint_of_another_seed_matches_nothing():
  arrays = {"x": jax.numpy.arange(8.0)}
  old = manifest_of(arrays)
  again = session.RoundManifest(**{**vars(old), "seed": (3, 4)})
  assert verify.mismatched(again, arrays) == ("x",)
