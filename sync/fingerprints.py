"""Fingerprints of whole arrays, wherever their shards are.

Each device sums over the shard it holds, with the global indices of its
elements; the host adds up the sums of the first replicas. No collective runs.
"""

import collections.abc
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from laneweave.kernels import call, digest, execute
from laneweave.sync import shards

# Arrays fingerprinted by one launch: enough to hide the launch, few enough
# that the program stays small.
_BATCH = 16


def collect(
  words: collections.abc.Sequence[np.ndarray],
) -> np.ndarray:
  """Adds up what the devices summed.

  Args:
    words: Arrays [devices, outputs, 2, lanes] of 32-bit integers, together in
      the order of the outputs.

  Returns:
    uint32 [outputs, 2].
  """
  return np.concatenate(
    [
      digest.combine(np.ascontiguousarray(w)).sum(axis=0, dtype=np.uint32)
      for w in words
    ]
  )


@functools.cache
def _program(place, shape, count, backend, order):
  """Compiles the fingerprints of `count` arrays placed alike."""

  def local(seed, *arrays):
    bases = digest.salts(seed, len(shape))
    keep = jnp.int32(1)
    if place.mesh is not None:
      bases = bases + jnp.tile(
        shards.first_index(place, arrays[0].shape), digest.WORDS
      )
      keep = shards.is_first_replica(place)
    words = [
      execute.fingerprint_words(
        x, bases, backend=backend, source_order=order
      ).astype(jnp.int32)
      for x in arrays
    ]
    return (jnp.concatenate(words) * keep)[None]

  if place.mesh is None:
    return jax.jit(local)
  spec = shards.to_partition_spec(place.spec)
  return jax.jit(
    jax.shard_map(
      local,
      mesh=place.mesh,
      in_specs=(PartitionSpec(), *([spec] * count)),
      out_specs=PartitionSpec(place.mesh.axis_names),
      check_vma=False,
    )
  )


def fingerprint_many(
  arrays: collections.abc.Sequence[jax.Array],
  *,
  seed: np.ndarray | tuple[int, int] | None = None,
  backend: str = "auto",
) -> np.ndarray:
  """Fingerprints of arrays, sharded or not.

  Equal for equal arrays whatever their shardings; launches are batched over
  arrays of equal shape, dtype and sharding.

  Args:
    arrays: Arrays of rank 1 and more.
    seed: Two uint32 values; None: `digest.DEFAULT_SEED`.
    backend: See `execute.BACKENDS`.

  Returns:
    uint32 [arrays, 2].
  """
  seed = np.asarray(digest.DEFAULT_SEED if seed is None else seed, np.uint32)
  groups = {}
  for i, x in enumerate(arrays):
    place = shards.placement(f"array {i}", x)
    platform = next(iter(x.sharding.device_set)).platform
    chosen = execute.resolve_backend(backend, platform)
    key = (place, x.shape, x.dtype, chosen, call.physical_order(x, chosen))
    device = None if place.mesh is not None else next(iter(x.devices()))
    groups.setdefault((key, device), []).append(i)
  pending = []
  for ((place, shape, _, chosen, order), _), members in groups.items():
    for at in range(0, len(members), _BATCH):
      batch = members[at : at + _BATCH]
      run = _program(place, shape, len(batch), chosen, order)
      pending.append((batch, run(seed, *(arrays[i] for i in batch))))
  result = np.zeros((len(arrays), digest.WORDS), np.uint32)
  for batch, words in pending:
    result[batch] = collect([np.asarray(words)])
  return result
