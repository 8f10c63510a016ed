"""What both sides make of the flags and the checkpoint, before any device."""

import collections.abc
import contextlib
import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding
import numpy as np

from laneweave.sync import (
  checkpoint,
  flags,
  logical_axes,
  model_config,
  sharding_rules,
  shards,
  tree,
)
from laneweave.sync import plan as plan_lib
from laneweave.sync.config import SyncConfig


class InputError(ValueError):
  """Flags, a configuration or a checkpoint that cannot be used."""


@contextlib.contextmanager
def blames_input() -> collections.abc.Iterator[None]:
  """What goes wrong inside is the flags' or the input's fault."""
  try:
    yield
  except (ValueError, RuntimeError) as error:
    raise InputError(str(error)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """The conversion of a checkpoint for the two meshes.

  Attributes:
    options: The flags' values.
    opened: The checkpoint; closed by whoever made the setup.
    originals: The checkpoint's own name of every leaf, by canonical name.
    cfg: The sync's configuration.
    plan: The conversion.
    remarks: What looks odd in the configuration.
  """

  options: flags.Options
  opened: checkpoint.Checkpoint
  originals: dict[str, str]
  cfg: SyncConfig
  plan: plan_lib.Plan
  remarks: tuple[str, ...]

  def read(self, name: str) -> np.ndarray:
    """A leaf of the checkpoint, by canonical name."""
    return self.opened.read(self.originals[name])

  def place(self, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Reads the weights and puts them on the trainer's mesh, one by one."""
    return {
      name: jax.block_until_ready(
        jax.device_put(
          self.read(name),
          NamedSharding(mesh, shards.to_partition_spec(found.spec)),
        )
      )
      for name, _, found in self._trainer_arrays()
    }

  def target(self, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Shapes and shardings of the rollout's arrays on its mesh."""
    outputs = self.plan.outputs()
    return {
      name: jax.ShapeDtypeStruct(
        shape,
        outputs[name].dtype,
        sharding=NamedSharding(mesh, shards.to_partition_spec(found.spec)),
      )
      for name, shape, found in self._rollout_arrays()
    }

  def _trainer_arrays(self):
    """Yields (name, shape, assignment) of every source."""
    rules = self.options.rules["trainer"]
    for entry in self.plan.entries:
      shape, scan_axes = entry.layout.shape, entry.layout.scan_axes
      for name in entry.sources:
        logical = logical_axes.of_stacked(name, len(shape), scan_axes)
        yield name, shape, rules.assign(shape, logical)

  def _rollout_arrays(self):
    """Yields (name, shape, assignment) of every output."""
    rules = self.options.rules["rollout"]
    for name, x in self.plan.outputs().items():
      logical = logical_axes.of_block(name, len(x.shape))
      yield name, x.shape, rules.assign(x.shape, logical)

  def summary(self) -> dict[str, Any]:
    """Fields of the plan event, see `progress`."""
    outputs = self.plan.outputs()
    notes = [*self.remarks, *self.plan.warnings]
    notes += _sharding_notes("trainer", self.options, self._trainer_arrays())
    notes += _sharding_notes("rollout", self.options, self._rollout_arrays())
    if self.plan.dropped:
      notes.append(
        f"{len(self.plan.dropped)} leaves are not weights and stay behind,"
        " first `{}`: {}".format(*self.plan.dropped[0])
      )
    return {
      "tensors": len(outputs),
      "bytes": self.plan.out_bytes,
      "notes": notes,
      "dropped": [list(pair) for pair in self.plan.dropped],
      "leaves": [
        {
          "name": name,
          "shape": list(shape),
          "dtype": outputs[name].dtype.name,
          "sharding": ["+".join(names) for names in found.spec],
        }
        for name, shape, found in self._rollout_arrays()
      ],
    }


def _sharding_notes(side, options, arrays) -> list[str]:
  """Rules that could not be followed, and mesh axes that split nothing."""
  rules: sharding_rules.Rules = options.rules[side]
  skipped: dict[tuple[str, str], list[str]] = {}
  used = set()
  for name, shape, found in arrays:
    used.update(n for names in found.spec for n in names)
    for pair in found.skipped:
      skipped.setdefault(pair, []).append(f"`{name}` {list(shape)}")
  notes = [
    f"{side}: mesh axis {axis}={rules.mesh.shape[axis]} does not divide the"
    f" axis {logical} of {len(names)} arrays, which are whole along it there;"
    f" first {names[0]}"
    for (logical, axis), names in skipped.items()
  ]
  notes += [
    f"{side}: mesh axis {axis}={size} splits no array, so that each is held"
    " by all its devices; see --sharding_rules"
    for axis, size in rules.mesh.axes
    if axis not in used and size > 1
  ]
  return notes


def set_up(options: flags.Options, side: str) -> Setup:
  """Opens the checkpoint and plans the conversion.

  Args:
    options: The flags' values.
    side: "trainer" or "rollout".

  Returns:
    The setup; its checkpoint is open.

  Raises:
    InputError: the flags or the input cannot be used.
  """
  with blames_input():
    opened = checkpoint.open_checkpoint(options.checkpoint)
    try:
      return _set_up(options, side, opened)
    except BaseException:
      opened.close()
      raise


def _check_widths(flat) -> None:
  """Refuses numbers that JAX would make narrower without a word."""
  for name, x in flat.items():
    if x.dtype == np.float64:
      raise ValueError(
        f"`{name}` is float64{list(x.shape)}, which JAX does not keep; save it"
        " as float32"
      )


def _set_up(options, side, opened) -> Setup:
  flat = tree.flatten(opened.shapes)
  _check_widths(flat)
  # `flatten` keeps the leaves and their order.
  originals = dict(zip(flat, opened.shapes, strict=True))
  fields = model_config.load(options.maxtext_config, options.checkpoint)
  cfg, remarks = model_config.derive(
    fields,
    flat,
    options.rules["rollout"],
    moe_lane_size=options.moe_lane_size,
    weight_dtype=options.weight_dtype,
    rollout_backend=options.rollout_backend,
    kernel_backend=options.kernel_backend,
    weight_sync_debug=options.weight_sync_debug,
    use_raiden_ffi=options.ffi(side),
  )
  return Setup(
    options=options,
    opened=opened,
    originals=originals,
    cfg=cfg,
    plan=plan_lib.make_plan(flat, cfg),
    remarks=remarks,
  )
