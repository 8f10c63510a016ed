"""Where the layers of a trainer's tree go, for the NumPy reference.

Written from the trees themselves and sharing nothing with `plan`, which it is
there to check.

How the trees scan, and what the per-layer names are:

| trainer | rollout |
| --- | --- |
| `layers.X` | `layers_i.X` |
| `layers.layer_S.X`, `layers.layers_S.X` | `layers_{first + i * slots + S}.X` |
| `layers.local_layers.X` | `layers_{first + i * (locals + 1) + j}.X` |
| `layers.global_layer.X` | `layers_{first + i * (locals + 1) + locals}.X` |
| `scanned_blocks` | as `layers` |
| `layers_remainder.layers_S.X` | `layers_{layers before it + S}.X` |
| `layers_remainder.local_layers.X` | `layers_{layers before it + j}.X` |
| `layers_remainder.global_layer.X` | the layer after those |
| `dense_layers.X`, `moe_layers.X` | `dense_layers_i.X`, `moe_layers_i.X` |
| `layers_i.X`, not stacked | the same; `first` is how many of them precede |

A trainable parameter is stacked at `param_scan_axis`, or at 0 when the stacked
array has no such axis; other variables (router biases) always at 0.
"""

import collections
from collections.abc import Iterable, Sequence
import dataclasses
import re
from typing import Any

from laneweave.sync.reference_tree import Leaf

Leaves = dict[str, Leaf]
Paths = dict[str, list[str]]  # Path below a container, by name.

_MAIN = ("layers", "scanned_blocks")
_SEGMENTS = ("dense_layers", "moe_layers")
_REMAINDER = "layers_remainder"
_UNSTACKED = re.compile(r"(layers|dense_layers|moe_layers)_\d+")
_LOOKS_SCANNED = re.compile(r".*(layers|blocks|stage|pipeline).*")
_SLOT = re.compile(r"(?:layers?_)?(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
  """Where one source leaf goes."""

  scan_axis: int | tuple[int, int] | None  # As `kernels.reference.unscan`.
  targets: tuple[str, ...]  # Names of its blocks, in stacked order.


def places(leaves: Leaves, cfg: Any) -> dict[str, Place]:
  """Where every source leaf goes.

  Args:
    leaves: The trainer's weights.
    cfg: A SyncConfig.

  Returns:
    Place by source name.

  Raises:
    ValueError: a tree of no known family, or a leaf that does not fit.
  """
  result = {}
  stacks = collections.defaultdict(dict)
  for name in leaves:
    found = _container(name)
    if found is None:
      result[name] = Place(scan_axis=None, targets=(name,))
    elif not cfg.scan_layers:
      raise ValueError(
        f"`{name}` lies in a stacked container, but `scan_layers` is False"
      )
    else:
      prefix, container, rest = found
      stacks[prefix].setdefault(container, {})[name] = rest
  for prefix, members in stacks.items():
    main = [container for container in _MAIN if container in members]
    segments = [container for container in _SEGMENTS if container in members]
    if segments and len(segments) == len(members):
      result.update(_segment_places(prefix, members, leaves, cfg))
    elif len(main) <= 1 and not segments:
      tail = members.get(_REMAINDER, {})
      main = members[main[0]] if main else {}
      result.update(_stack_places(prefix, main, tail, leaves, cfg))
    else:
      raise ValueError(
        f"`{prefix}` holds {', '.join(sorted(members))}, which no known"
        " family of trees holds together"
      )
  return result


def _container(name: str) -> tuple[str, str, list[str]] | None:
  """Prefix, stacked container and rest of a name; None if it is in none."""
  parts = name.split(".")
  for i, part in enumerate(parts):
    if _UNSTACKED.fullmatch(part):
      return None
    if part in (*_MAIN, *_SEGMENTS, _REMAINDER) and parts[i + 1 :]:
      return ".".join(parts[:i]), part, parts[i + 1 :]
    if i and parts[i - 1] == "decoder" and _LOOKS_SCANNED.fullmatch(part):
      raise ValueError(
        f"`{name}`: `{part}` is no known container of layers; known are"
        f" {', '.join((*_MAIN, *_SEGMENTS, _REMAINDER))}"
      )
  return None


def _segment_places(
  prefix: str, members: dict[str, Paths], leaves: Leaves, cfg: Any
) -> dict[str, Place]:
  """Places in `dense_layers` and `moe_layers`, each stacked on its own."""
  lengths = {
    segment: _common_length(inside, 1, leaves, cfg)
    for segment, inside in members.items()
  }
  if sum(lengths.values()) != cfg.num_decoder_layers:
    raise ValueError(
      f"`num_decoder_layers` is {cfg.num_decoder_layers}, but `{prefix}`"
      f" holds {lengths}"
    )
  result = {}
  for segment, inside in members.items():
    for name, rest in inside.items():
      result[name] = Place(
        scan_axis=_scan_axis(name, leaves[name], cfg, (lengths[segment],)),
        targets=tuple(
          _join(prefix, f"{segment}_{i}", *rest)
          for i in range(lengths[segment])
        ),
      )
  return result


def _stack_places(
  prefix: str, main: Paths, tail: Paths, leaves: Leaves, cfg: Any
) -> dict[str, Place]:
  """Places in one stack of layers and in the remainder that follows it."""
  first = _unstacked_before(prefix, leaves)
  size, in_block = _block(main, 1, leaves, cfg) if main else (1, {})
  tail_size, in_tail = _block(tail, 0, leaves, cfg) if tail else (0, {})
  scanned = cfg.num_decoder_layers - first - tail_size
  if scanned < 0 or scanned % size or bool(scanned) != bool(main):
    raise ValueError(
      f"`num_decoder_layers` is {cfg.num_decoder_layers}: `{prefix}` has"
      f" {first} unstacked layers and {tail_size} in a remainder, and the"
      f" other {scanned} do not divide into stacked blocks of {size}; check"
      " `num_decoder_layers` and `inhomogeneous_layer_cycle_interval`"
    )
  result = {}
  for name, (positions, stacked, rest) in in_block.items():
    lengths = (scanned // size, *([len(positions)] if stacked else []))
    result[name] = Place(
      scan_axis=_scan_axis(name, leaves[name], cfg, lengths),
      targets=tuple(
        _join(prefix, f"layers_{first + i * size + p}", *rest)
        for i in range(scanned // size)
        for p in positions
      ),
    )
  for name, (positions, stacked, rest) in in_tail.items():
    lengths = (len(positions),) if stacked else ()
    result[name] = Place(
      scan_axis=_scan_axis(name, leaves[name], cfg, lengths),
      targets=tuple(
        _join(prefix, f"layers_{first + scanned + p}", *rest) for p in positions
      ),
    )
  return result


def _block(
  members: Paths, depth: int, leaves: Leaves, cfg: Any
) -> tuple[int, dict[str, tuple[Sequence[int], bool, list[str]]]]:
  """How one block of layers is made up.

  Args:
    members: Path below the container, by name.
    depth: Stacked axes of a whole block: 1, or 0 in a remainder.
    leaves: All weights.
    cfg: A SyncConfig.

  Returns:
    (layers in a block, {name: (positions of its layers in the block, are
    those positions one more stacked axis, path below the layer)}).
  """
  # A remainder is a part of a cycle, so the configured length says nothing.
  cycle = cfg.inhomogeneous_layer_cycle_interval if depth else 1
  first_parts = {rest[0] for rest in members.values()}
  if first_parts <= {"local_layers", "global_layer"}:
    inner = [n for n, rest in members.items() if rest[0] == "local_layers"]
    local = _common_length(inner, depth + 1, leaves, cfg) if inner else 0
    size = local + ("global_layer" in first_parts)
    if cycle not in (1, size):
      raise ValueError(
        f"`inhomogeneous_layer_cycle_interval` is {cycle}, but the blocks of"
        f" `{next(iter(members))}` hold {size} layers"
      )
    return size, {
      name: (
        (range(local), True, rest[1:])
        if rest[0] == "local_layers"
        else ([local], False, rest[1:])
      )
      for name, rest in members.items()
    }
  slots = {
    part: int(m[1]) for part in first_parts if (m := _SLOT.fullmatch(part))
  }
  if depth and not slots and cycle == 1:
    return 1, {name: ([0], False, rest) for name, rest in members.items()}
  size = cycle if cycle > 1 else max(slots.values(), default=0) + 1
  for name, rest in members.items():
    if rest[0] not in slots:
      raise ValueError(
        f"`{name}` has no `layer_<slot>` level where its block has {size}"
        " layers"
      )
    if slots[rest[0]] >= size:
      raise ValueError(
        f"`{name}` is in slot {slots[rest[0]]}, but"
        f" `inhomogeneous_layer_cycle_interval` is {size}"
      )
  if set(slots.values()) != set(range(size)):
    raise ValueError(
      f"`{next(iter(members))}`: of a block of {size} layers only slots"
      f" {sorted(slots.values())} are there"
    )
  return size, {
    name: ([slots[rest[0]]], False, rest[1:]) for name, rest in members.items()
  }


def _unstacked_before(prefix: str, leaves: Leaves) -> int:
  """How many unstacked layers precede the stacked ones."""
  pattern = re.compile(re.escape(_join(prefix, "layers_")) + r"(\d+)\..*")
  numbers = {int(m[1]) for name in leaves if (m := pattern.fullmatch(name))}
  if numbers != set(range(len(numbers))):
    raise ValueError(
      f"`{_join(prefix, 'layers_<n>')}`: unstacked layers {sorted(numbers)}"
      " beside stacked ones are not the first ones"
    )
  return len(numbers)


def _axis_choices(
  name: str, leaf: Leaf, cfg: Any, depth: int
) -> list[tuple[int, ...]]:
  """Where the stacked axes can be, outermost first, the likeliest first."""
  variable = tuple(range(depth))
  # Scans stack at 0 and move that axis to `param_scan_axis` if the array has
  # one; with two scans the inner axis is in its place before the outer comes.
  rank, axis = len(leaf.value.shape), cfg.param_scan_axis
  parameter = (axis if rank > axis else 0,)
  if depth == 2:
    inner = axis if rank - 1 > axis else 0
    outer = parameter[0]
    parameter = (outer, inner + 1 if inner >= outer else inner)
  if leaf.trainable is not None:
    return [parameter if leaf.trainable else variable]
  # DeepSeek and Kimi keep these two in variables of their own types. Without
  # the types a look-alike parameter is told apart by where the length fits.
  if name.endswith((".MoeBlock_0.gate.bias", ".tid2eid")):
    return [variable, parameter]
  return [parameter]


def _scan_axis(
  name: str, leaf: Leaf, cfg: Any, lengths: tuple[int, ...]
) -> int | tuple[int, int] | None:
  """The stacked axes of a leaf that has to have these lengths there."""
  if not lengths:
    return None
  shape = leaf.value.shape
  if len(shape) <= len(lengths):
    raise ValueError(
      f"`{name}` has shape {list(shape)}: nothing is left of it without its"
      f" {len(lengths)} stacked axes"
    )
  choices = _axis_choices(name, leaf, cfg, len(lengths))
  for axes in choices:
    if tuple(shape[axis] for axis in axes) == lengths:
      return (axes[0], axes[1]) if len(axes) == 2 else axes[0]
  raise ValueError(
    f"`{name}` has shape {list(shape)}: stacked axes {list(choices[0])} should"
    f" have lengths {list(lengths)}; check `param_scan_axis`,"
    " `num_decoder_layers` and `inhomogeneous_layer_cycle_interval`"
  )


def _common_length(
  names: Iterable[str], depth: int, leaves: Leaves, cfg: Any
) -> int:
  """Length of the innermost of `depth` stacked axes, the same in all."""
  lengths = {}
  for name in names:
    shape = leaves[name].value.shape
    choices = _axis_choices(name, leaves[name], cfg, depth)
    if len(choices) == 1 and len(shape) > depth:
      lengths[name] = shape[choices[0][-1]]
  counts = collections.Counter(lengths.values()).most_common()
  if not counts:
    raise ValueError(f"`{next(iter(names))}`: no leaf tells how many layers")
  for name, length in lengths.items():
    if length != counts[0][0]:
      raise ValueError(
        f"`{name}` has shape {list(leaves[name].value.shape)}: {length} on its"
        f" stacked axis, where the leaves beside it have {counts[0][0]}"
      )
  return counts[0][0]


def _join(*parts: str) -> str:
  return ".".join(part for part in parts if part)
