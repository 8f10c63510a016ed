"""Whether a rollout takes what it is offered."""

import collections.abc
from typing import Any

import jax

from laneweave.sync import manifest as manifest_lib
from laneweave.sync import rounds
from laneweave.sync.transport import base, variables


def abstract(
  target: collections.abc.Mapping[str, Any],
) -> dict[str, jax.ShapeDtypeStruct]:
  """Shape, dtype and sharding of every leaf, in the order of ordinals.

  Args:
    target: Arrays, or shapes with shardings, by canonical name.

  Returns:
    The same without arrays.

  Raises:
    ValueError: no leaves, or leaves without a sharding.
  """
  bare = [n for n, x in target.items() if getattr(x, "sharding", None) is None]
  if bare or not target:
    raise ValueError(
      "`target` must name at least one array, each with a sharding"
      + (f"; {len(bare)} have none, first `{bare[0]}`" if bare else "")
    )
  return {
    name: jax.ShapeDtypeStruct(
      target[name].shape,
      target[name].dtype,
      sharding=variables.without_trailing_none(
        target[name].sharding, len(target[name].shape)
      ),
    )
    for name in manifest_lib.sort_names(target)
  }


def refuse_stale(
  manifest: rounds.RoundManifest,
  *,
  session: str,
  last: rounds.RoundManifest | None,
  served: int | None,
) -> None:
  """Refuses a round that is not the next one.

  Args:
    manifest: The round's manifest.
    session: The session that the rollout has joined.
    last: The last round of the session that it knows.
    served: The version that it serves.

  Raises:
    rounds.RoundError: naming both rounds.
  """
  if manifest.session != session:
    raise rounds.RoundError(
      f"{manifest} is of session {manifest.session!r}, and this rollout has"
      f" joined {session!r}"
    )
  if last is not None and manifest.round_id <= last.round_id:
    raise rounds.RoundError(
      f"{manifest} is not newer than {last}, which this rollout knows already"
    )
  # A trainer that came back may bring again what it brought before.
  is_first = last is None
  if served is not None and manifest.version < served + (not is_first):
    raise rounds.RoundError(
      f"{manifest} is not newer than version {served}, which is being served"
    )


def check_fit(
  manifest: rounds.RoundManifest,
  described: collections.abc.Sequence[base.Variable],
  *,
  verify: bool,
) -> None:
  """Checks that a manifest is of this rollout's arrays.

  Args:
    manifest: The round's manifest.
    described: The rollout's arrays.
    verify: Whether the rollout is going to check fingerprints.

  Raises:
    base.MismatchError: with everything that does not fit.
  """
  problems = []
  offered = {v.name: v for v in manifest.variables}
  ours = {v.name: v for v in described}
  for name in manifest_lib.sort_names(offered.keys() | ours.keys()):
    there, here = offered.get(name), ours.get(name)
    if there is None or here is None:
      side = "rollout" if there is None else "trainer"
      problems.append(f"`{name}` {there or here} is on the {side} only")
    elif (there.shape, there.dtype, there.ordinal) != (
      here.shape,
      here.dtype,
      here.ordinal,
    ):
      problems.append(
        f"`{name}` is {there} with ordinal {there.ordinal} on the trainer"
        f" and {here} with ordinal {here.ordinal} on the rollout"
      )
  if verify and not manifest.fingerprints:
    problems.append(
      "the trainer took no fingerprints and this rollout checks them; both"
      " need the same `verify`"
    )
  if problems:
    raise base.MismatchError(f"{manifest} and this rollout", problems)
