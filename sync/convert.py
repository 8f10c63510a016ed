"""Runs a plan: trainer arrays to rollout arrays on the trainer's devices.

Every entry of a plan becomes one launch that reads its source arrays once and
writes each layer's array once, on the device that holds the shard, with the
fingerprints of what was written. Only where the trainer splits the rebuilt
axis in a way the rollout's layout cannot follow, or splits a stacked axis, are
the sources moved first (`shards.movable`), and the plan's user is told.
"""

import collections.abc
import functools
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np

from laneweave.kernels import call, digest, execute
from laneweave.kernels import layout as layout_lib
from laneweave.sync import fingerprints, shards
from laneweave.sync import plan as plan_lib
from laneweave.sync import tree as tree_lib
from laneweave.sync.config import SyncConfig


@functools.cache
def _program(layout, place, backend, order, printing):
  """Compiles one layout for sources in one place."""

  def local(seed, *sources):
    if place.mesh is None:
      part = layout
    else:
      parts = [place.parts(a) for a in range(len(layout.shape))]
      part = shards.localize(layout, parts)
      assert part is not None, "shards.movable chooses places that localize"
    out = _out_place(layout, place)
    bases = None
    if printing:
      bases = digest.salts(seed, len(part.out_shape))
      if place.mesh is not None:
        bases = bases + jnp.tile(
          shards.first_index(out, part.out_shape), digest.WORDS
        )
    outputs, words = execute.run(
      part, *sources, backend=backend, bases=bases, source_order=order
    )
    keep = jnp.int32(1)
    if place.mesh is not None:
      keep = shards.is_first_replica(out)
    return outputs, tuple((w.astype(jnp.int32) * keep)[None] for w in words)

  if place.mesh is None:
    return jax.jit(local)
  return jax.jit(
    jax.shard_map(
      local,
      mesh=place.mesh,
      in_specs=(
        PartitionSpec(),
        *([shards.to_partition_spec(place.spec)] * layout.operands),
      ),
      out_specs=(
        shards.to_partition_spec(_out_place(layout, place).spec),
        PartitionSpec(place.mesh.axis_names),
      ),
      check_vma=False,
    )
  )


def _out_place(layout, place):
  """Placement of a layout's outputs, given that of its sources."""
  return shards.Placement(
    mesh=place.mesh,
    spec=tuple(
      names for a, names in enumerate(place.spec) if a not in layout.scan_axes
    ),
  )


class Converter:
  """A plan made ready to run every round.

  Compiled programs are kept per layout and placement, so that rounds after the
  first only launch.
  """

  def __init__(self, plan: plan_lib.Plan, cfg: SyncConfig):
    """Keeps the plan.

    Args:
      plan: What to produce from what.
      cfg: The configuration; `kernel_backend` and `weight_sync_debug` are read.
    """
    self.plan = plan
    self._backend = cfg.kernel_backend
    self._debug = cfg.weight_sync_debug

  def run(
    self,
    flat: dict[str, Any],
    seed: np.ndarray | tuple[int, int] | None = None,
  ) -> tuple[dict[str, jax.Array], dict[str, np.ndarray]]:
    """Converts everything.

    Args:
      flat: Source arrays by canonical name; emptied as sources are used up, so
        that arrays nobody else holds are freed as the conversion goes.
      seed: Fingerprint seed; None: `digest.DEFAULT_SEED`.

    Returns:
      Output arrays by name, and their fingerprints, uint32 [2] by name.
    """
    outputs, words = {}, {}
    for piece, summed in self.pieces(flat, seed=seed, printing=True):
      outputs.update(piece)
      words[tuple(piece)] = summed
    prints = {}
    for names, summed in words.items():
      collected = fingerprints.collect([np.asarray(w) for w in summed])
      prints.update(zip(names, collected, strict=True))
    return outputs, prints

  def pieces(
    self,
    flat: dict[str, Any],
    *,
    seed: np.ndarray | tuple[int, int] | None = None,
    printing: bool = False,
  ) -> collections.abc.Iterator[
    tuple[dict[str, jax.Array], tuple[jax.Array, ...]]
  ]:
    """Converts entry by entry.

    Args:
      flat: Source arrays by canonical name; emptied as sources are used up.
      seed: Fingerprint seed; None: `digest.DEFAULT_SEED`.
      printing: Also compute fingerprints.

    Yields:
      The outputs of one entry by name, and what `fingerprints.collect` makes
      their fingerprints of, in the same order.
    """
    seed = np.asarray(digest.DEFAULT_SEED if seed is None else seed, np.uint32)
    left = collections.Counter(
      name for entry in self.plan.entries for name in entry.sources
    )
    for entry in self.plan.entries:
      sources = [flat[name] for name in entry.sources]
      for name in entry.sources:
        left[name] -= 1
        if not left[name]:
          del flat[name]
      outputs, words = self._entry(entry, sources, seed, printing)
      del sources
      yield dict(zip(entry.targets, outputs, strict=True)), words

  def _entry(self, entry, sources, seed, printing):
    """Runs one entry; in debug mode waits for it and names it if it fails."""
    if not self._debug:
      return self._launch(entry, sources, seed, printing)
    name = " + ".join(entry.sources)
    try:
      result = jax.block_until_ready(
        self._launch(entry, sources, seed, printing)
      )
    except Exception as error:
      error.add_note(
        f"weight_sync_debug: `{name}` failed; every parameter before it in"
        " the plan was converted"
      )
      raise
    logging.info("weight_sync_debug: %s -> %s", name, entry.targets[0])
    return result

  def _launch(self, entry, sources, seed, printing):
    """Places the sources of one entry and launches its program."""
    arrays = [jnp.asarray(x) for x in sources]
    layout: layout_lib.Layout = entry.layout
    place = shards.placement(entry.sources[0], arrays[0])
    if place.mesh is not None:
      wanted = shards.movable(layout, place)
      if wanted != place:
        logging.log_first_n(
          logging.WARNING,
          "`%s` %s is sharded as %s, which its rollout layout cannot follow;"
          " it is moved to %s before it is converted, every round",
          1,
          entry.sources[0],
          list(layout.shape),
          place.spec,
          wanted.spec,
        )
      place = wanted
      arrays = [
        x
        if shards.placement(n, x) == place
        else jax.device_put(x, place.sharding())
        for n, x in zip(entry.sources, arrays, strict=True)
      ]
    platform = next(iter(arrays[0].sharding.device_set)).platform
    backend = execute.resolve_backend(self._backend, platform)
    order = call.physical_order(arrays[0], backend)
    run = _program(layout, place, backend, order, printing)
    return run(seed, *arrays)


def convert(
  params: Any, cfg: SyncConfig, target: Any = None
) -> dict[str, jax.Array]:
  """Converts a trainer's tree to the rollout's arrays.

  Args:
    params: Nested or flat tree of arrays (JAX or NumPy), nnx state included.
    cfg: The configuration.
    target: The rollout's tree (arrays or shapes), which then decides shapes,
      dtypes and padding; None: the configuration decides.

  Returns:
    Arrays by canonical name, on the devices of their sources.

  Raises:
    ValueError: the trees do not fit each other or the configuration; see
      `plan.make_plan`.
  """
  outputs = {}
  for piece in convert_streaming(params, cfg, target):
    outputs.update(piece)
  return outputs


def convert_streaming(
  params: Any, cfg: SyncConfig, target: Any = None
) -> collections.abc.Iterator[dict[str, jax.Array]]:
  """Like `convert`, one source parameter (or gate and up pair) at a time.

  The plan is made, and its errors raised, by the call itself. A source is let
  go of before the next piece is made: where the caller keeps no reference to
  `params`, at most the tree and one piece are alive.

  Args:
    params: See `convert`.
    cfg: See `convert`.
    target: See `convert`.

  Returns:
    An iterator over pieces, each a dict of arrays by canonical name.
  """
  weights, _ = tree_lib.split_leaves(tree_lib.flatten(params))
  del params
  converter = Converter(plan_lib.make_plan(weights, cfg, target), cfg)
  return (piece for piece, _ in converter.pieces(weights))
