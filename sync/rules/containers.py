"""Where a trainer keeps its layers, and what the rollout calls them.

Read off the trees of MaxText 0.2.5's decoders with `scan_layers=True`; with n
local layers in a block:

| in the trainer's name | stacked axes | rollout layer |
| --- | --- | --- |
| `layers.X` | layers | i |
| `layers.layer_<s>.X`, `.layers_<s>.X`, `.<s>.X` | repeats | i * cycle + s |
| `layers.local_layers.X` | blocks, local layers | i * (n + 1) + j |
| `layers.global_layer.X` | blocks | i * (n + 1) + n |
| `layers_remainder.layers_<s>.X` | none | behind all repeats |
| `layers_remainder.local_layers.X` | local layers | behind all blocks |
| `dense_layers.X`, `moe_layers.X` | layers | `dense_layers_i`, `moe_layers_i` |
| anything else, `layers_<i>.X` too | none | the same name |

`scanned_blocks` stands for `layers` in some families. The first stacked layer
is the one after the unstacked `layers_<i>` beside the stack (DeepSeek 4). In a
block the local layers run first and the global layer last. Encoders of images
and sound are never stacked.
"""

import collections.abc
import dataclasses
import re

from laneweave.sync import tree as tree_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec

STACKS = ("layers", "scanned_blocks")
SEGMENTS = ("dense_layers", "moe_layers")
REMAINDER = "layers_remainder"

_CONTAINERS = (*STACKS, *SEGMENTS, REMAINDER)
_ENCODER = re.compile(r"(vision|audio)_encoder")
_NUMBERED = re.compile(r"(?:dense_|moe_)?layers_(\d+)")
_LAYER = re.compile(r"layers_(\d+)")
# Parts that by their name hold layers, in a way that no rule here knows.
_LOOKS_STACKED = re.compile(
  r"(.+_)?(layers|blocks|stages|stack|pipeline)(_.*[^\d_].*|_\d+_\d+)?"
)
# Modules of a decoder that are there once.
_ONCE = re.compile(
  r"token_embedder|position_embedder|per_layer_embedder|decoder_norm"
  r"|logits_dense|hc_head|mtp_block|(vision|audio)_encoder"
)
TABLE = "sync/rules/containers.py"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Which layers a leaf holds.

  Attributes:
    prefix: Name before the layer level, dotted, with its dot; "" without one.
    suffix: Name after it, dotted, with its dot.
    container: Rollout name of the layer level without its number, or None
      where the leaf is not in a layer that is renamed.
    layers: Layer numbers, in the order of the stacked axes.
    stacked: Length of each stacked axis, outermost first.
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
class Member:
  """A leaf of a container.

  Attributes:
    leaf: The leaf.
    prefix: Its name before the container, with its dot.
    container: The container.
    rest: Parts of its name after the container.
  """

  leaf: LeafSpec
  prefix: str
  container: str
  rest: tuple[str, ...]

  def place(
    self,
    rest: tuple[str, ...],
    layers: collections.abc.Iterable[int],
    stacked: tuple[int, ...],
    container: str = "layers",
  ) -> Place:
    """The place of this leaf; `rest` is what of its name is kept."""
    return Place(
      prefix=self.prefix,
      suffix="".join("." + part for part in rest),
      container=container,
      layers=tuple(layers),
      stacked=stacked,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Group:
  """The leaves of one decoder's containers.

  Attributes:
    members: They.
    segments: Whether the containers are `dense_layers` and `moe_layers`.
    offset: Number of unstacked layers in front of the stack.
  """

  members: tuple[Member, ...]
  segments: bool
  offset: int


def split(
  leaves: collections.abc.Sequence[LeafSpec], cfg: SyncConfig
) -> tuple[list[Group], dict[str, Place]]:
  """Sorts leaves by the containers they are in.

  Args:
    leaves: The trainer's weights.
    cfg: `scan_layers` is read.

  Returns:
    Groups of stacked leaves, and places by name of all other leaves.
  """
  grouped: dict[tuple[str, bool], list[Member]] = {}
  places = {}
  for leaf in leaves:
    member = _member(leaf) if cfg.scan_layers else None
    if member is None:
      places[leaf.name] = Place(
        prefix="",
        suffix=tree_lib.number_layers(leaf.name),
        container=None,
        layers=(),
        stacked=(),
      )
      continue
    key = (member.prefix, member.container in SEGMENTS)
    grouped.setdefault(key, []).append(member)
  names = [leaf.name for leaf in leaves]
  groups = [
    Group(
      members=tuple(members),
      segments=segments,
      offset=0 if segments else _offset(prefix, names),
    )
    for (prefix, segments), members in grouped.items()
  ]
  return groups, places


def unknown_family(
  leaves: collections.abc.Sequence[LeafSpec], cfg: SyncConfig
) -> str | None:
  """What of a tree's names no rule takes, in a sentence.

  Args:
    leaves: The trainer's weights.
    cfg: `scan_layers` is read.

  Returns:
    What was recognised and what was not; None when there is nothing to say.
  """
  once, numbered, stacked, strange, others = [], [], {}, {}, {}
  for leaf in leaves:
    parts = leaf.name.split(".")[:-1]
    at = _container(parts)
    before = parts if at is None else parts[:at]
    odd = _odd(before, cfg.scan_layers)
    if any(_ENCODER.fullmatch(part) for part in parts):
      once.append(leaf)
    elif odd is not None:
      name = ".".join(parts[: odd + 1])
      strange.setdefault(name, []).append(leaf)
    elif at is not None:
      stacked.setdefault(".".join(parts[: at + 1]), []).append(leaf)
    elif any(_NUMBERED.fullmatch(part) for part in parts):
      numbered.append(leaf)
    elif len(parts) < 2 or any(_ONCE.fullmatch(part) for part in parts):
      once.append(leaf)
    else:
      others.setdefault(".".join(parts[:2]), []).append(leaf)
  if not cfg.scan_layers:
    strange |= {
      name: found
      for name, found in stacked.items()
      if not all(_is_listed(leaf.name) for leaf in found)
    }
    if not strange:
      return None
    advice = "set `scan_layers` if these layers are stacked"
  else:
    if not stacked and not numbered:
      strange |= others
    if not strange:
      return None
    advice = (
      "unset `scan_layers` if these layers are not stacked, or add a rule to"
      f" {TABLE}"
    )
  first = next(iter(strange.values()))[0]
  known = [
    f"`{name}` ({len(found)} leaves)"
    for name, found in stacked.items()
    if name not in strange
  ]
  if numbered:
    known.append(f"{len(numbered)} leaves of unstacked `layers_<i>`")
  if once:
    known.append(f"{len(once)} leaves outside layers")
  return (
    f"`{first.name}` {first} belongs to an unknown family of tree: not"
    " recognised are "
    + ", ".join(f"`{name}` ({len(f)} leaves)" for name, f in strange.items())
    + f"; recognised are {', '.join(known) or 'none'}; {advice}"
  )


def _member(leaf):
  """A leaf of a container, or None."""
  parts = leaf.name.split(".")
  at = _container(parts[:-1])
  if at is None:
    return None
  return Member(
    leaf=leaf,
    prefix="".join(part + "." for part in parts[:at]),
    container=parts[at],
    rest=tuple(parts[at + 1 :]),
  )


def _container(parts):
  """Index of the container in a path, or None; an encoder has none."""
  for i, part in enumerate(parts):
    if _ENCODER.fullmatch(part):
      return None
    if part in _CONTAINERS:
      return i
  return None


def _odd(parts, scanned):
  """Index of a part that holds layers in a way no rule knows, or None."""
  if not scanned:
    return None
  for i, part in enumerate(parts):
    if _LOOKS_STACKED.fullmatch(part) and not _NUMBERED.fullmatch(part):
      return i
  return None


def _is_listed(name):
  """Whether a name's layer is an item of a list, `layers.6`."""
  return tree_lib.number_layers(name) != name


def _offset(prefix, names):
  """Number of unstacked `layers_<i>` in front of a stack."""
  numbers = set()
  for name in names:
    if name.startswith(prefix):
      found = _LAYER.match(name[len(prefix) :])
      if found:
        numbers.add(int(found.group(1)))
  return max(numbers) + 1 if numbers else 0
