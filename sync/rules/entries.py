"""What one leaf of a trainer becomes: an entry of the plan."""

import collections.abc
import dataclasses
import fnmatch
import math

import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from laneweave.kernels import cast
from laneweave.kernels import layout as layout_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec
from laneweave.sync.rules import axes, dtypes, experts, heads, layouts
from laneweave.sync.rules.containers import Place
from laneweave.sync.rules.layouts import Block

# Growth by padding from which a tensor's cost is pointed out.
_GROWTH_WARNED = 1.5


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


class EntryMaker:
  """Makes the entries of one plan.

  Attributes:
    warnings: What is right but costly, or may be meant otherwise.
    unmatched: Leaves that the target does not have, with their first names.
  """

  def __init__(
    self,
    leaves: collections.abc.Mapping[str, LeafSpec],
    places: collections.abc.Mapping[str, Place],
    cfg: SyncConfig,
    wanted: collections.abc.Mapping[str, LeafSpec] | None,
  ):
    """Keeps the trees.

    Args:
      leaves: The trainer's weights by name.
      places: Where they go.
      cfg: The configuration.
      wanted: The rollout's weights by name, or None.
    """
    self.warnings: list[str] = []
    self.unmatched: list[tuple[LeafSpec, str]] = []
    self._leaves = leaves
    self._places = places
    self._cfg = cfg
    self._wanted = wanted
    self._kept = dtypes.kept(list(leaves))

  def make(self, leaf: LeafSpec) -> PlanEntry | None:
    """The entry of a leaf.

    Args:
      leaf: A leaf that has a place.

    Returns:
      Its entry; None where another leaf's entry covers it, or the target does
      not have it.

    Raises:
      ValueError: it does not fit; the leaf itself is not named.
    """
    place = self._places[leaf.name]
    block = Block(
      leaf=leaf, axes=axes.scan_axes(leaf, place.stacked, self._cfg)
    )
    part = experts.role(leaf.name, block.shape)
    if part is None:
      return self._plain(block, place)
    partner = None
    suffix = place.suffix
    if part in (experts.GATE, experts.UP):
      other = self._partner(leaf, part)
      if self._is_joined(place):
        if part == experts.UP:
          return None
        partner = other
        suffix = suffix[: -len(part)] + experts.FUSED
    return self._expert(block, place, part, partner, suffix)

  def _is_joined(self, place):
    """Whether the rollout joins gate and up here."""
    if self._wanted is None:
      return self._cfg.prefuse_moe_weights
    parent, _ = experts.split_name(place.suffix)
    names = place.targets(parent + experts.FUSED)
    return any(name in self._wanted for name in names)

  def _partner(self, leaf, part):
    """The other one of gate and up."""
    parent, _ = experts.split_name(leaf.name)
    other = experts.UP if part == experts.GATE else experts.GATE
    partner = self._leaves.get(parent + other)
    if partner is None:
      raise ValueError(
        f"has no `{other}` beside it; an expert has both, joined or not"
      )
    if (partner.shape, partner.dtype) != (leaf.shape, leaf.dtype):
      raise ValueError(
        f"and `{partner.name}` {partner} must have one shape and dtype"
      )
    return partner

  def _plain(self, block, place):
    """A leaf that is unscanned and cast, its KV heads repeated."""
    leaf, targets = block.leaf, place.targets()
    found = heads.find(
      leaf.name,
      block.shape,
      self._kernel_block(leaf.name),
      self._cfg.base_num_kv_heads,
    )
    if self._wanted is None:
      dtype = self._dtype(leaf, targets)
      repeats = layouts.free_repeats(found, self._cfg)
    else:
      want = self._target(leaf, targets)
      if want is None:
        return None
      dtype = want.dtype
      repeats = layouts.target_repeats(block, want, found)
    _check_cast(leaf, dtype, targets[0])
    layout = layouts.plain(block, found, repeats, dtype)
    return PlanEntry(sources=(leaf.name,), targets=targets, layout=layout)

  def _kernel_block(self, name):
    """For a KV bias, the shape of its kernel for one layer, if it fits."""
    beside = heads.kernel_beside(name)
    kernel = self._leaves.get(beside) if beside else None
    place = self._places.get(beside) if beside else None
    if kernel is None or place is None:
      return None
    try:
      stacked = axes.scan_axes(kernel, place.stacked, self._cfg)
    except ValueError:
      return None  # Said of the kernel itself.
    return Block(leaf=kernel, axes=stacked).shape

  def _expert(self, block, place, part, partner, suffix):
    """A routed expert's leaf: joined, padded, or both."""
    leaf, targets = block.leaf, place.targets(suffix)
    width = block.shape[experts.mlp_axis(part, len(block.shape))]
    joined = partner is not None or part == experts.FUSED
    width //= 2 if part == experts.FUSED else 1
    biased = experts.has_bias(leaf.name, self._leaves)
    shards = self._cfg.resolved_moe_shards
    if self._wanted is None:
      dtype = self._dtype(leaf, targets)
      padded = experts.padded_width(width, shards, biased, self._cfg)
    else:
      want = self._target(leaf, targets)
      if want is None:
        return None
      dtype = want.dtype
      padded = layouts.target_width(block, want, part, joined=joined)
      if shards == 1:
        shards = self._target_shards(place, part, leaf, width, padded)
    _check_cast(leaf, dtype, targets[0])
    if padded != width and biased:
      raise ValueError(
        f"width {width} cannot be padded to {padded}: the expert biases beside"
        f" it stay {width} wide, and a model with both does not run; leave"
        " `padded_base_moe_mlp_dim` unset and build the rollout unpadded"
      )
    layout = layouts.expert(
      block,
      part,
      pair=partner is not None,
      width=width,
      padded=padded,
      shards=shards,
      lane_size=self._cfg.moe_lane_size,
      dtype=dtype,
    )
    if padded > _GROWTH_WARNED * width:
      added = layout.out_bytes - layout.out_bytes * width // padded
      self.warnings.append(
        f"`{leaf.name}` {leaf} grows {padded / width:.2f} times by padding"
        f" {width} to {padded}: {added} bytes of zeros are written, sent and"
        " kept; fewer `moe_mlp_tp_size` shards need less"
      )
    sources = (leaf.name,) if partner is None else (leaf.name, partner.name)
    return PlanEntry(sources=sources, targets=targets, layout=layout)

  def _target_shards(self, place, part, leaf, width, padded):
    """Shards of an expert's mlp axis in the target's own shardings.

    `wo` is padded inside the shards of gate and up, so theirs count for it.
    """
    parent, _ = experts.split_name(place.suffix)
    for other in dict.fromkeys((experts.FUSED, experts.GATE, part)):
      for name in place.targets(parent + other):
        spec = self._wanted.get(name)
        if spec is not None and isinstance(spec.sharding, NamedSharding):
          axis = experts.mlp_axis(other, len(spec.shape))
          return _axis_shards(spec.sharding, axis)
    if padded not in (width, experts.two_lane_width(width, 1)):
      self.warnings.append(
        f"`{leaf.name}` {leaf} is padded from {width} to {padded} as one"
        " shard, since neither `moe_mlp_tp_size` nor a sharding of the target"
        " says otherwise; set `moe_mlp_tp_size` if the rollout splits its"
        " experts"
      )
    return 1

  def _target(self, leaf, targets) -> LeafSpec | None:
    """A leaf of the target that stands for all, if the target has any."""
    found = [self._wanted[n] for n in targets if n in self._wanted]
    if not found:
      self.unmatched.append((leaf, targets[0]))
      return None
    first = found[0]
    for spec in found:
      if (spec.shape, spec.dtype) != (first.shape, first.dtype):
        raise ValueError(
          f"becomes layers of different kinds, `{first.name}` {first} and"
          f" `{spec.name}` {spec}; layers of one stack must be alike"
        )
    if len(found) < len(targets):
      absent = [n for n in targets if n not in self._wanted]
      raise ValueError(
        f"{len(absent)} of its {len(targets)} layers are not in the target,"
        f" first `{absent[0]}`; the rollout has fewer layers, or names them"
        " otherwise"
      )
    if first.dtype != leaf.dtype and self._is_kept(leaf, targets):
      self.warnings.append(
        f"`{leaf.name}` {leaf} matches `keep_dtype`, but the target"
        f" `{first.name}` is {first.dtype.name} ({first.dtype.itemsize} bytes"
        f" an element, not {leaf.dtype.itemsize}); the target decides"
      )
    return first

  def _is_kept(self, leaf, targets):
    """Whether `keep_dtype` names a leaf: as it is, or every one of its layers."""

    def named(name):
      return any(
        fnmatch.fnmatchcase(name, pattern) for pattern in self._cfg.keep_dtype
      )

    if named(leaf.name):
      return True
    found = [name for name in targets if named(name)]
    if found and len(found) < len(targets):
      raise ValueError(
        f"`keep_dtype` names {len(found)} of its {len(targets)} layers, first"
        f" `{found[0]}`; layers of one stack have one dtype, name all or none"
      )
    return bool(found)

  def _dtype(self, leaf, targets) -> np.dtype:
    """The dtype without a target tree."""
    if leaf.name in self._kept or self._is_kept(leaf, targets):
      return leaf.dtype
    return self._cfg.weight_numpy_dtype


def _axis_shards(sharding: NamedSharding, axis: int) -> int:
  """Number of shards along an axis."""
  spec = sharding.spec[axis] if axis < len(sharding.spec) else None
  names = () if spec is None else (spec,) if isinstance(spec, str) else spec
  return math.prod(sharding.mesh.shape[name] for name in names)


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
