"""Plans: what a sync produces from what, decided from shapes alone.

A plan is made from names, shapes and dtypes; no device is touched and nothing
is allocated, so everything that can be wrong is known before a round starts.
All problems are collected and raised together.
"""

import collections.abc
import dataclasses
import fnmatch
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from laneweave.kernels import cast
from laneweave.kernels import layout as layout_lib
from laneweave.sync import manifest as manifest_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec, Manifest
from laneweave.sync.rules import containers, dtypes, experts, heads

# Growth by padding from which a tensor's cost is pointed out.
_GROWTH_WARNED = 1.5
_SHOWN = 5


class PlanError(ValueError):
  """The trees do not fit each other or the configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanEntry:
  """One launch: sources that are read once, and what is written.

  Attributes:
    sources: Canonical names of the layout's operands.
    targets: Canonical names of its outputs, in its order.
    layout: How the one becomes the other.
  """

  sources: tuple[str, ...]
  targets: tuple[str, ...]
  layout: layout_lib.Layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Everything a sync produces.

  Attributes:
    entries: What is run, in the source tree's order.
    dropped: (name, reason) of leaves that are never synced.
    warnings: What is right but costly.
  """

  entries: tuple[PlanEntry, ...]
  dropped: tuple[tuple[str, str], ...]
  warnings: tuple[str, ...]

  def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every rollout array, layers in numeric order."""
    found = {
      name: entry.layout for entry in self.entries for name in entry.targets
    }
    return {
      name: jax.ShapeDtypeStruct(found[name].out_shape, found[name].dtype)
      for name in manifest_lib.sort_names(found)
    }

  @property
  def source_bytes(self) -> int:
    """Bytes read from all sources."""
    return sum(entry.layout.source_bytes for entry in self.entries)

  @property
  def out_bytes(self) -> int:
    """Bytes written to all rollout arrays."""
    return sum(entry.layout.out_bytes for entry in self.entries)


def make_plan(
  tree_or_manifest: Any, cfg: SyncConfig, target: Any = None
) -> Plan:
  """Plans the conversion of a trainer's tree.

  Args:
    tree_or_manifest: The trainer's tree (arrays or shapes, nested or flat), or
      its manifest.
    cfg: The configuration.
    target: The rollout's tree or manifest. It then decides names of joined
      leaves, shapes, dtypes and padding; None: the configuration does.

  Returns:
    The plan.

  Raises:
    PlanError: all that does not fit, each problem with the leaf's name, shapes
      and remedy.
    ValueError: a tree without weights, or malformed.
  """
  source = manifest_lib.manifest(tree_or_manifest)
  if not source.leaves:
    raise PlanError(
      "the trainer's tree has no weights, so there is nothing to move"
      f" ({len(source.dropped)} other leaves are never synced)"
    )
  wanted = None
  if target is not None:
    wanted = manifest_lib.manifest(target, integer_layers=True).by_name()
  planner = _Planner(source, cfg, wanted)
  return planner.plan()


class _Planner:
  """One call of `make_plan`."""

  def __init__(
    self,
    source: Manifest,
    cfg: SyncConfig,
    wanted: dict[str, LeafSpec] | None,
  ):
    self._cfg = cfg
    self._source = source
    self._leaves = source.by_name()
    self._wanted = wanted
    self._kept = dtypes.kept(list(self._leaves))
    self._problems: list[str] = []
    self._warnings: list[str] = []
    self._unmatched: list[LeafSpec] = []

  def plan(self) -> Plan:
    """Plans every leaf, then checks that both trees are covered."""
    if self._cfg.rollout_backend != "maxtext":
      raise PlanError(
        f"`rollout_backend` {self._cfg.rollout_backend!r} has no rules in"
        " this version; use 'maxtext'"
      )
    places = containers.locate(self._source.leaves, self._cfg, self._problems)
    entries = []
    for leaf in self._source.leaves:
      place = places.get(leaf.name)
      if place is None:
        continue
      axes = containers.scan_axes(leaf, place.stacked, self._cfg)
      if isinstance(axes, str):
        self._problems.append(axes)
        continue
      try:
        entry = self._entry(leaf, place, axes)
      except ValueError as error:
        self._problems.append(f"`{leaf.name}` {leaf}: {error}")
        continue
      if entry is not None:
        entries.append(entry)
    self._check_covered(entries)
    if self._problems:
      raise PlanError(_join(self._problems))
    return Plan(
      entries=tuple(entries),
      dropped=self._source.dropped,
      warnings=tuple(self._warnings),
    )

  def _entry(self, leaf, place, axes) -> PlanEntry | None:
    """Plans one leaf; None where another leaf's entry covers it."""
    role = experts.role(leaf.name, self._leaves)
    parent, last = experts.split_name(leaf.name)
    if role in (experts.GATE, experts.UP):
      other = experts.UP if role == experts.GATE else experts.GATE
      partner = self._leaves.get(parent + other)
      fused = self._is_fused(place, last)
      if partner is None and fused:
        raise ValueError(
          f"has no `{other}` beside it to be joined with; a rollout that"
          " holds `wi` needs both"
        )
      if fused:
        if role == experts.UP:
          return None
        if (partner.shape, partner.dtype) != (leaf.shape, leaf.dtype):
          raise ValueError(
            f"and `{partner.name}` {partner} must have one shape and dtype to"
            " be joined"
          )
        suffix = place.suffix[: -len(last)] + experts.FUSED
        return self._expert((leaf, partner), place, axes, experts.GATE, suffix)
    if role is not None:
      return self._expert((leaf,), place, axes, role, place.suffix)
    return self._plain(leaf, place, axes)

  def _is_fused(self, place, last) -> bool:
    """Whether the rollout joins gate and up here."""
    if self._wanted is None:
      return self._cfg.prefuse_moe_weights
    names = place.targets(place.suffix[: -len(last)] + experts.FUSED)
    return any(name in self._wanted for name in names)

  def _target(self, leaf, targets) -> tuple[tuple[int, ...], np.dtype] | None:
    """Shape and dtype that the target tree wants, if it has the leaf."""
    wanted = self._wanted or {}
    found = [wanted[n] for n in targets if n in wanted]
    if not found:
      self._unmatched.append(leaf)
      return None
    first = found[0]
    for spec in found:
      if (spec.shape, spec.dtype) != (first.shape, first.dtype):
        raise ValueError(
          f"becomes layers of different kinds, `{first.name}` {first} and"
          f" `{spec.name}` {spec}; layers of one stack must be alike"
        )
    return first.shape, first.dtype

  def _dtype(self, leaf, targets) -> np.dtype:
    """The dtype without a target tree."""
    names = (leaf.name, *targets[:1])
    kept = leaf.name in self._kept or any(
      fnmatch.fnmatchcase(name, pattern)
      for name in names
      for pattern in self._cfg.keep_dtype
    )
    return leaf.dtype if kept else self._cfg.weight_numpy_dtype

  def _plain(self, leaf, place, axes):
    """A leaf that is unscanned and cast, its KV heads repeated."""
    targets = place.targets()
    unscanned = layout_lib.unscan_layout(leaf.shape, leaf.dtype, scan_axes=axes)
    block = unscanned.block_shape
    head = heads.head_axis(leaf.name, block, self._cfg.base_num_kv_heads)
    if self._wanted is None:
      dtype = self._dtype(leaf, targets)
      repeats = 1
      if head is not None:
        count = block[head[0]] // head[1]
        repeats = heads.repeats(count, self._cfg.kv_tp_size)
        if repeats is None:
          raise ValueError(
            f"{count} KV heads and `kv_tp_size` {self._cfg.kv_tp_size} do"
            " not divide; choose a `kv_tp_size` that divides the heads or is"
            " a multiple of them"
          )
    else:
      want = self._target(leaf, targets)
      if want is None:
        return None
      shape, dtype = want
      repeats = self._repeats(block, shape, head, targets[0])
    _check_cast(leaf, dtype, targets[0])
    if repeats == 1:
      layout = dataclasses.replace(unscanned, dtype=dtype)
    else:
      layout = layout_lib.repeat_layout(
        leaf.shape,
        leaf.dtype,
        scan_axes=axes,
        axis=head[0],
        repeats=repeats,
        group=head[1],
        dtype=dtype,
      )
    return self._done((leaf,), targets, layout)

  def _repeats(self, block, shape, head, name) -> int:
    """How often a target's shape repeats the KV heads of a block."""
    if shape == block:
      return 1
    if len(shape) != len(block):
      raise ValueError(
        f"has blocks {list(block)} of rank {len(block)}, but the target"
        f" `{name}` {list(shape)} has rank {len(shape)}; check"
        " `param_scan_axis`"
      )
    differ = [a for a in range(len(block)) if shape[a] != block[a]]
    if head is None or differ != [head[0]]:
      raise ValueError(
        f"has blocks {list(block)}, but the target `{name}` is"
        f" {list(shape)}: axes {differ} differ, and only KV heads are"
        " repeated and only expert widths padded; check the rollout's model"
      )
    axis, group = head
    if shape[axis] % block[axis] or shape[axis] < block[axis]:
      raise ValueError(
        f"{block[axis] // group} KV heads cannot become the"
        f" {shape[axis] // group} of the target `{name}` {list(shape)};"
        " `kv_tp_size` must be a multiple of the heads"
      )
    return shape[axis] // block[axis]

  def _expert(self, leaves, place, axes, role, suffix):
    """A routed expert's leaf: joined, padded, or both."""
    leaf = leaves[0]
    targets = place.targets(suffix)
    block = layout_lib.unscan_layout(
      leaf.shape, leaf.dtype, scan_axes=axes
    ).block_shape
    axis = len(block) - (2 if role == experts.DOWN else 1)
    halves = 2 if role == experts.FUSED or len(leaves) == 2 else 1
    if role == experts.FUSED and block[axis] % 2:
      raise ValueError(f"a joined `wi` has an even width, not {block[axis]}")
    width = block[axis] // (2 if role == experts.FUSED else 1)
    shards = self._cfg.resolved_moe_shards
    if self._wanted is None:
      dtype = self._dtype(leaf, targets)
      padded = self._padded_width(leaf, width, shards)
    else:
      want = self._target(leaf, targets)
      if want is None:
        return None
      shape, dtype = want
      if shards == 1:
        shards = self._target_shards(targets, axis)
      padded = self._target_width(block, shape, axis, halves, targets[0])
    _check_cast(leaf, dtype, targets[0])
    if padded != width and experts.has_bias(leaf.name, self._leaves):
      raise ValueError(
        f"width {width} cannot be padded to {padded}: the expert biases"
        f" beside it stay {width} wide, and a model with both does not run;"
        " leave `padded_base_moe_mlp_dim` unset and build the rollout"
        " unpadded"
      )
    options = {"scan_axes": axes, "shards": shards, "dtype": dtype}
    if len(leaves) == 2:
      layout = layout_lib.fuse_layout(
        leaf.shape,
        leaf.dtype,
        padded_width=padded,
        lane_size=self._cfg.moe_lane_size,
        **options,
      )
    elif role == experts.FUSED:
      layout = layout_lib.refuse_layout(
        leaf.shape,
        leaf.dtype,
        padded_width=padded,
        lane_size=self._cfg.moe_lane_size,
        **options,
      )
    elif padded != width:
      layout = layout_lib.pad_layout(
        leaf.shape, leaf.dtype, axis=axis, padded_width=padded, **options
      )
    else:
      layout = layout_lib.unscan_layout(
        leaf.shape, leaf.dtype, scan_axes=axes, dtype=dtype
      )
    self._warn_growth(leaf, width, padded, layout)
    return self._done(leaves, targets, layout)

  def _padded_width(self, leaf, width, shards) -> int:
    """Padded expert width without a target tree."""
    padded = self._cfg.padded_base_moe_mlp_dim
    if padded is None:
      if not self._cfg.prefuse_moe_weights or experts.has_bias(
        leaf.name, self._leaves
      ):
        return width
      if width % shards:
        raise ValueError(
          f"width {width} does not divide by {shards} shards; change"
          " `moe_mlp_tp_size`"
        )
      return experts.two_lane_width(width, shards)
    if padded < width:
      raise ValueError(
        f"`padded_base_moe_mlp_dim` {padded} is narrower than the expert"
        f" width {width}; padding cannot shrink"
      )
    return padded

  def _target_width(self, block, shape, axis, halves, name) -> int:
    """Padded expert width that a target's shape asks for."""
    same = len(shape) == len(block) and all(
      shape[a] == block[a] for a in range(len(block)) if a != axis
    )
    if not same or shape[axis] % halves:
      raise ValueError(
        f"has blocks {list(block)}, but the target `{name}` is"
        f" {list(shape)}; only axis {axis} may differ, by padding"
        + (" and joining" if halves == 2 else "")
      )
    return shape[axis] // halves

  def _target_shards(self, targets, axis) -> int:
    """Shards of an axis in the target's own sharding, 1 without one."""
    sharding = self._wanted[
      next(name for name in targets if name in self._wanted)
    ].sharding
    if sharding is None:
      return 1
    spec = (*sharding.spec, *([None] * (axis + 1)))[axis]
    names = () if spec is None else (spec,) if isinstance(spec, str) else spec
    return int(np.prod([sharding.mesh.shape[n] for n in names], dtype=np.int64))

  def _warn_growth(self, leaf, width, padded, layout):
    if padded > _GROWTH_WARNED * width:
      added = layout.out_bytes - layout.out_bytes * width // padded
      self._warnings.append(
        f"`{leaf.name}` {leaf} grows {padded / width:.2f} times by padding"
        f" {width} to {padded}: {added} bytes of zeros are written, sent and"
        " kept; fewer `moe_mlp_tp_size` shards need less"
      )

  def _done(self, leaves, targets, layout):
    """An entry; with a target tree, only if it wants every output."""
    if self._wanted is not None:
      absent = [n for n in targets if n not in self._wanted]
      if absent:
        raise ValueError(
          f"{len(absent)} of its {len(targets)} layers are not in the"
          f" target, first `{absent[0]}`; the rollout has fewer layers, or"
          " names them otherwise"
        )
    return PlanEntry(
      sources=tuple(leaf.name for leaf in leaves),
      targets=targets,
      layout=layout,
    )

  def _check_covered(self, entries):
    """Every source leaf is used and every target leaf is written."""
    written: dict[str, str] = {}
    for entry in entries:
      for name in entry.targets:
        if name in written:
          self._problems.append(
            f"`{name}` would be written twice, from `{written[name]}` and"
            f" `{entry.sources[0]}`"
          )
        written[name] = entry.sources[0]
    if self._wanted is None:
      return
    if self._unmatched:
      names = [leaf.name for leaf in self._unmatched]
      self._problems.append(
        f"{len(names)} trainer leaves have no target and would be lost:"
        f" {_names(names)}; the rollout's model differs from the trainer's,"
        " or names them otherwise"
      )
    missing = [n for n in self._wanted if n not in written]
    if missing and not self._problems:
      # With other problems their own leaves are missing too, and named there.
      self._problems.append(self._missing(missing))
    elif missing:
      self._problems.append(
        f"{len(self._wanted) - len(missing)} of {len(self._wanted)} target"
        f" leaves matched; without a source: {_names(missing)}"
      )

  def _missing(self, missing):
    total = len(self._wanted or {})
    return (
      f"{total - len(missing)} of {total} target leaves matched;"
      f" {len(missing)} would keep their old values:"
      f" {_names(missing)}; check `num_decoder_layers`"
      f" ({self._cfg.num_decoder_layers}) and that both sides hold the same"
      " model"
    )


def _check_cast(leaf, dtype, name):
  """Refuses dtypes that no kernel rounds between."""
  if not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
      f"the target `{name}` has dtype {dtype.name}, which is not floating-point"
    )
  try:
    cast.check_cast(leaf.dtype, dtype, "source")
  except TypeError as error:
    raise ValueError(f"target `{name}`: {error}") from None


def _names(names: collections.abc.Sequence[str]) -> str:
  """The first few names, and how many more."""
  ordered = manifest_lib.sort_names(names)
  shown = ", ".join(f"`{n}`" for n in ordered[:_SHOWN])
  more = len(ordered) - _SHOWN
  return shown + (f" and {more} more" if more > 0 else "")


def _join(problems: collections.abc.Sequence[str]) -> str:
  """All problems in one message, the first on the first line."""
  if len(problems) == 1:
    return problems[0]
  limit = 40
  lines = list(problems[:limit])
  if len(problems) > limit:
    lines.append(f"and {len(problems) - limit} more")
  lines[0] += f" ({len(problems)} problems in all)"
  return "\n".join(lines)
