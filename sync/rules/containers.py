"""Where a trainer keeps its layers, and what the rollout calls them.

Read off the trees of MaxText 0.2.5's decoders with `scan_layers=True`:

| in the trainer's name | stacked axes | rollout layer |
| --- | --- | --- |
| `layers.X` | layers | i |
| `layers.layer_<s>.X`, `layers.layers_<s>.X`, `layers.<s>.X` | repeats | i * cycle + s |
| `layers_remainder.layers_<s>.X` | none | repeats * cycle + s |
| `layers.local_layers.X` | blocks, local layers | i * (n + 1) + j |
| `layers.global_layer.X` | blocks | i * (n + 1) + n |
| `dense_layers.X`, `moe_layers.X` | layers | `dense_layers_i`, `moe_layers_i` |
| anything else, `layers_<i>.X` too | none | the same name |

`scanned_blocks` stands for `layers` in some families; its first layer is the
one after the unstacked `layers_<i>` beside it (DeepSeek 4). In a block the
local layers run first and the global layer last.
"""

import collections.abc
import dataclasses
import re

from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec

_STACKS = ("layers", "scanned_blocks")
_SEGMENTS = ("dense_layers", "moe_layers")
_REMAINDER = "layers_remainder"
_LOCAL, _GLOBAL = "local_layers", "global_layer"
_SLOT = re.compile(r"(?:layers?_)?(\d+)")
_LAYER = re.compile(r"layers_(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Which layers a leaf holds.

  Attributes:
    prefix: Name before the layer level, dotted, with its dot; "" without one.
    suffix: Name after it, dotted, with its dot.
    container: Rollout name of the layer level without its number, or None
      where the leaf is not in a layer that is renamed.
    layers: Layer numbers, in the order of the stacked axes.
    stacked: Length of each stacked axis.
  """

  prefix: str
  suffix: str
  container: str | None
  layers: tuple[int, ...]
  stacked: tuple[int, ...]

  def targets(self, suffix: str | None = None) -> tuple[str, ...]:
    """Rollout names, one a layer; with another suffix than the leaf's own."""
    suffix = self.suffix if suffix is None else suffix
    if self.container is None:
      return (self.prefix + suffix,)
    return tuple(
      f"{self.prefix}{self.container}_{n}{suffix}" for n in self.layers
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
  """A name taken apart at its container."""

  leaf: LeafSpec
  prefix: str
  container: str | None
  rest: tuple[str, ...]


def locate(
  leaves: collections.abc.Sequence[LeafSpec],
  cfg: SyncConfig,
  problems: list[str],
) -> dict[str, Place]:
  """Finds the layers of every leaf.

  Args:
    leaves: The trainer's weights.
    cfg: Layer count, cycle and scan axis are read.
    problems: Messages are added for leaves that no rule takes.

  Returns:
    Places by name of the leaves that a rule took.
  """
  splits = [_split(leaf, cfg) for leaf in leaves]
  places = {}
  groups: dict[tuple[str, str], list[_Split]] = {}
  for s in splits:
    if s.container is None:
      places[s.leaf.name] = Place(
        prefix="", suffix=s.leaf.name, container=None, layers=(), stacked=()
      )
    else:
      kind = "segment" if s.container in _SEGMENTS else "stack"
      groups.setdefault((s.prefix, kind), []).append(s)
  names = [leaf.name for leaf in leaves]
  for (prefix, kind), members in groups.items():
    if kind == "segment":
      places.update(_segments(members, cfg, problems))
    else:
      offset = _offset(prefix, names) if _is_blocks(members) else 0
      places.update(_stack(members, cfg, offset, problems))
  return places


def _split(leaf, cfg):
  parts = leaf.name.split(".")
  known = (*_STACKS, *_SEGMENTS, _REMAINDER)
  at = next((i for i, p in enumerate(parts[:-1]) if p in known), None)
  if at is None or not cfg.scan_layers:
    return _Split(leaf=leaf, prefix="", container=None, rest=())
  prefix = "".join(p + "." for p in parts[:at])
  return _Split(
    leaf=leaf,
    prefix=prefix,
    container=parts[at],
    rest=tuple(parts[at + 1 :]),
  )


def _is_blocks(members):
  return any(s.container == "scanned_blocks" for s in members)


def _offset(prefix, names):
  """Number of unstacked `layers_<i>` in front of a stack."""
  numbers = set()
  for name in names:
    if name.startswith(prefix):
      found = _LAYER.match(name[len(prefix) :])
      if found:
        numbers.add(int(found.group(1)))
  return max(numbers) + 1 if numbers else 0


def _suffix(parts):
  return "".join("." + p for p in parts)


def scan_axes(
  leaf: LeafSpec, stacked: tuple[int, ...], cfg: SyncConfig
) -> tuple[int, ...] | str:
  """The axes of a leaf on which its layers are stacked.

  Args:
    leaf: The leaf.
    stacked: Lengths that the stacked axes must have.
    cfg: `param_scan_axis` is read. MaxText moves the stacked axis there, or to
      the last place of an array too short; a second one follows the first. The
      exception is a router's bias that is no `nnx.Param` (`MoEBiasVar`): it is
      stacked on axis 0.

  Returns:
    The axes, or what is wrong with the leaf.
  """
  count = len(stacked)
  if not count:
    return ()
  rank = len(leaf.shape) - count
  if rank < 1:
    return (
      f"`{leaf.name}` {leaf} has no axis besides its stacked ones; a layer's"
      " scalar cannot be synced, store it with shape [1]"
    )
  if cfg.param_scan_axis is None:
    fits = [a for a in range(rank + 1) if leaf.shape[a : a + count] == stacked]
    if len(fits) != 1:
      return (
        f"`{leaf.name}` {leaf} has {len(fits)} axes that can be the stacked"
        f" one ({fits}) for {stacked} layers; set `param_scan_axis`"
      )
    first = fits[0]
  else:
    first = min(cfg.param_scan_axis, rank)
    if _is_router_bias(leaf) and (
      leaf.kind == "MoEBiasVar"
      or (leaf.kind is None and leaf.shape[:count] == stacked)
    ):
      first = 0
  axes = tuple(range(first, first + count))
  for axis, length in zip(axes, stacked, strict=True):
    if leaf.shape[axis] != length:
      return (
        f"`{leaf.name}` {leaf} has {leaf.shape[axis]} layers on axis {axis},"
        f" expected {length}; check `num_decoder_layers`"
        f" ({cfg.num_decoder_layers}), `inhomogeneous_layer_cycle_interval`"
        f" ({cfg.inhomogeneous_layer_cycle_interval}) and `param_scan_axis`"
        f" ({cfg.param_scan_axis})"
      )
  return axes


def _is_router_bias(leaf):
  """A bias beside a router's kernel, and not GPT-OSS's, which is a Param."""
  return leaf.name.endswith(".gate.bias") and "GptOssMlp" not in leaf.name


def _length(leaf, cfg):
  """Length of a leaf's first stacked axis, for families that tell no other."""
  axis = min(cfg.param_scan_axis or 0, max(len(leaf.shape) - 1, 0))
  return leaf.shape[axis]


def _segments(members, cfg, problems):
  """`dense_layers` and `moe_layers`: together they are the whole decoder."""
  total = cfg.num_decoder_layers
  kinds = {s.container for s in members}
  if len(kinds) == 1:
    lengths = dict.fromkeys(kinds, total)
  else:
    # Dense layers are few and come first; a kernel tells their number.
    dense = [s.leaf for s in members if s.container == "dense_layers"]
    first = max(dense, key=lambda leaf: len(leaf.shape))
    count = _length(first, cfg)
    lengths = {"dense_layers": count, "moe_layers": total - count}
    if not 0 < count < total:
      problems.append(
        f"`{first.name}` {first} has {count} dense layers of"
        f" `num_decoder_layers` {total}: none are left for `moe_layers`"
      )
      return {}
  return {
    s.leaf.name: Place(
      prefix=s.prefix,
      suffix=_suffix(s.rest),
      container=s.container,
      layers=tuple(range(lengths[s.container])),
      stacked=(lengths[s.container],),
    )
    for s in members
  }


def _stack(members, cfg, offset, problems):
  """One scanned decoder: homogeneous, in slots, or in local/global blocks."""
  remainder = [s for s in members if s.container == _REMAINDER]
  scanned = [s for s in members if s.container != _REMAINDER]
  heads = {s.rest[0] for s in scanned}
  if heads & {_LOCAL, _GLOBAL}:
    return _blocks(scanned + remainder, cfg, offset, problems)
  slotted = [s for s in scanned if _slot(s) is not None]
  cycle = cfg.inhomogeneous_layer_cycle_interval
  if not slotted and cycle == 1 and not remainder:
    count = cfg.num_decoder_layers - offset
    return {
      s.leaf.name: _place(s, s.rest, range(offset, offset + count), (count,))
      for s in scanned
    }
  if (slotted and len(slotted) < len(scanned)) or (cycle > 1 and not slotted):
    for s in scanned:
      if _slot(s) is None:
        problems.append(
          f"`{s.leaf.name}` {s.leaf} has no `layer_<slot>` level under"
          f" `{s.container}`, but the layers come in a cycle of"
          f" {max(cycle, len({_slot(t) for t in slotted}))}; set"
          " `inhomogeneous_layer_cycle_interval` to 1 if they do not"
        )
    return {}
  return _slots(scanned, remainder, cfg, offset, problems)


def _slot(split):
  """The slot number of a name, or None."""
  found = _SLOT.fullmatch(split.rest[0]) if len(split.rest) > 1 else None
  return int(found.group(1)) if found else None


def _place(split, rest, layers, stacked):
  return Place(
    prefix=split.prefix,
    suffix=_suffix(rest),
    container="layers",
    layers=tuple(layers),
    stacked=stacked,
  )


def _slots(scanned, remainder, cfg, offset, problems):
  """A cycle of layers, each slot stacked over the repeats of the cycle."""
  slots = {_slot(s) for s in scanned}
  cycle = cfg.inhomogeneous_layer_cycle_interval
  if cycle == 1:
    # Gemma 3 and Gemma 4 leave the field at 1: the slots tell.
    cycle = len(slots)
  for s in scanned:
    if _slot(s) >= cycle:
      problems.append(
        f"`{s.leaf.name}` {s.leaf} is in slot {_slot(s)}, but a cycle of"
        f" {cycle} has slots 0 to {cycle - 1}; check"
        " `inhomogeneous_layer_cycle_interval`"
      )
  missing = sorted(set(range(cycle)) - slots)
  if missing and slots <= set(range(cycle)):
    problems.append(
      f"slots {missing} of a cycle of {cycle} are not in the tree"
      f" (`{scanned[0].leaf.name}` is); check"
      " `inhomogeneous_layer_cycle_interval`"
    )
  left = {_slot(s) for s in remainder}
  if None in left or left != set(range(len(left))):
    problems.append(
      f"`{_REMAINDER}` must hold `layers_0` and on without a gap, found"
      f" {sorted(s.rest[0] for s in remainder)[:4]}"
    )
    return {}
  total = cfg.num_decoder_layers - offset - len(left)
  repeats = total // cycle
  if total % cycle or repeats < 1:
    problems.append(
      f"`num_decoder_layers` {cfg.num_decoder_layers} is not"
      f" {offset} + a multiple of the cycle {cycle} + {len(left)} in"
      f" `{_REMAINDER}` (`{scanned[0].leaf.name}` {scanned[0].leaf})"
    )
    return {}
  if problems:
    return {}
  places = {}
  for s in scanned:
    layers = range(offset + _slot(s), offset + total, cycle)
    places[s.leaf.name] = _place(s, s.rest[1:], layers, (repeats,))
  for s in remainder:
    layer = offset + total + _slot(s)
    places[s.leaf.name] = _place(s, s.rest[1:], (layer,), ())
  return places


def _blocks(members, cfg, offset, problems):
  """Blocks of local layers, stacked twice, and one global layer at the end."""
  total = cfg.num_decoder_layers - offset
  cycle = cfg.inhomogeneous_layer_cycle_interval
  last = [s for s in members if s.rest[0] == _GLOBAL]
  if cycle == 1:
    if not last:
      problems.append(
        f"`{members[0].leaf.name}` is in blocks of `{_LOCAL}` without a"
        f" `{_GLOBAL}`; their length cannot be told, set"
        " `inhomogeneous_layer_cycle_interval`"
      )
      return {}
    tallest = max((s.leaf for s in last), key=lambda leaf: len(leaf.shape))
    blocks = _length(tallest, cfg)
    cycle = total // blocks if total % blocks == 0 else 0
  blocks = total // cycle if cycle else 0
  if cycle < 2 or total % cycle:
    problems.append(
      f"`num_decoder_layers` {cfg.num_decoder_layers} does not divide into"
      f" blocks like that of `{members[0].leaf.name}` {members[0].leaf};"
      " check `inhomogeneous_layer_cycle_interval`"
    )
    return {}
  places = {}
  for s in members:
    starts = range(offset, offset + total, cycle)
    if s.rest[0] == _GLOBAL:
      layers = [start + cycle - 1 for start in starts]
      stacked = (blocks,)
    elif s.rest[0] == _LOCAL:
      layers = [start + j for start in starts for j in range(cycle - 1)]
      stacked = (blocks, cycle - 1)
    else:
      problems.append(
        f"`{s.leaf.name}` {s.leaf} is neither in `{_LOCAL}` nor in"
        f" `{_GLOBAL}`, as the other leaves of `{s.container}` are"
      )
      continue
    places[s.leaf.name] = _place(s, s.rest[1:], layers, stacked)
  return places
