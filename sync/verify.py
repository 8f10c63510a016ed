"""Whether what arrived is what was sent, and in its place."""

import collections.abc
from typing import Any

import jax
import numpy as np

from laneweave.sync import fingerprints, rounds


def mismatched(
  manifest: rounds.RoundManifest,
  arrays: collections.abc.Mapping[str, jax.Array],
  *,
  backend: str = "auto",
) -> tuple[str, ...]:
  """Names of the arrays that are not what the manifest says.

  Every name of the manifest is checked: one without an array, or without a
  fingerprint, or of another shape or dtype, counts as mismatched.

  Args:
    manifest: The round's manifest.
    arrays: What arrived, on the devices.
    backend: See `kernels.execute.BACKENDS`.

  Returns:
    Names, in the manifest's order.
  """
  good = [
    v.name
    for v in manifest.variables
    if v.name in arrays
    and v.name in manifest.fingerprints
    and tuple(arrays[v.name].shape) == v.shape
    and arrays[v.name].dtype.name == v.dtype
  ]
  found = fingerprints.fingerprint_many(
    [arrays[name] for name in good], seed=manifest.seed, backend=backend
  )
  matched = {
    name
    for name, words in zip(good, found, strict=True)
    if np.array_equal(words, manifest.fingerprints[name])
  }
  return tuple(v.name for v in manifest.variables if v.name not in matched)


def warm_up(
  arrays: collections.abc.Mapping[str, Any], *, backend: str = "auto"
) -> None:
  """Compiles what `mismatched` runs, so that no round waits for it.

  Args:
    arrays: Arrays like those that are going to arrive; shapes without arrays
      are left out.
    backend: See `kernels.execute.BACKENDS`.
  """
  fingerprints.fingerprint_many(
    [x for x in arrays.values() if isinstance(x, jax.Array)], backend=backend
  )


def health(
  arrays: collections.abc.Mapping[str, jax.Array],
) -> dict[str, tuple[int, int]]:
  """Counts what is not a finite number, per array that has any.

  A NaN that was sent is transferred faithfully and is no mismatch; whether the
  weights are healthy is a question of its own.

  Args:
    arrays: Arrays by name.

  Returns:
    (NaNs, infinities) by name.
  """
  found = {}
  for name, x in arrays.items():
    nans = int(jax.numpy.isnan(x).sum())
    infinities = int(jax.numpy.isinf(x).sum())
    if nans or infinities:
      found[name] = (nans, infinities)
  return found
