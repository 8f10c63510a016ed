"""How a container's layers are numbered, family by family.

The families and their numbering are in the table of `containers`.
"""

import collections.abc
import re

from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec
from laneweave.sync.rules import axes, containers
from laneweave.sync.rules.containers import Group, Member, Place

_LOCAL, _GLOBAL = "local_layers", "global_layer"
_SLOT = re.compile(r"(?:layers?_)?(\d+)")


class StackError(ValueError):
  """What does not fit in a container; `args` holds a sentence for each."""


def locate(
  leaves: collections.abc.Sequence[LeafSpec], cfg: SyncConfig
) -> tuple[dict[str, Place], list[str]]:
  """Finds the layers of every leaf.

  Args:
    leaves: The trainer's weights.
    cfg: Layer count, cycle and scan axis are read.

  Returns:
    Places by name of the leaves that a rule took, and what is wrong with the
    others.
  """
  groups, places = containers.split(leaves, cfg)
  problems = []
  for group in groups:
    try:
      if group.segments:
        places.update(_segments(group.members, cfg))
      else:
        places.update(_stack(group, cfg))
    except ValueError as error:
      problems.extend(error.args)
  return places, problems


def _segments(members, cfg):
  """`dense_layers` and `moe_layers`: together they are the whole decoder."""
  total = cfg.num_decoder_layers
  kinds = {m.container for m in members}
  lengths = dict.fromkeys(kinds, total)
  if len(kinds) > 1:
    # Their number is in no field of the configuration, but in every leaf.
    dense = _tallest(m for m in members if m.container == "dense_layers")
    count = axes.first_length(dense, 1, cfg)
    if not 0 < count < total:
      raise StackError(
        f"`{dense.name}` {dense} has {count} dense layers of"
        f" `num_decoder_layers` {total}: none are left for `moe_layers`"
      )
    lengths = {"dense_layers": count, "moe_layers": total - count}
  return {
    m.leaf.name: m.place(
      m.rest,
      range(lengths[m.container]),
      (lengths[m.container],),
      container=m.container,
    )
    for m in members
  }


def _tallest(members) -> LeafSpec:
  """The leaf with most axes: a matrix tells a stack's length best."""
  return max((m.leaf for m in members), key=lambda leaf: len(leaf.shape))


def _stack(group: Group, cfg: SyncConfig) -> dict[str, Place]:
  """One scanned decoder: homogeneous, in slots, or in local/global blocks."""
  members, offset = group.members, group.offset
  scanned = [m for m in members if m.container != containers.REMAINDER]
  if {m.rest[0] for m in members} & {_LOCAL, _GLOBAL}:
    return _blocks(members, cfg, offset)
  slotted = [m for m in scanned if _slot(m) is not None]
  cycle = cfg.inhomogeneous_layer_cycle_interval
  if len(scanned) == len(members) and not slotted and cycle == 1:
    count = cfg.num_decoder_layers - offset
    layers = range(offset, offset + count)
    return {m.leaf.name: m.place(m.rest, layers, (count,)) for m in scanned}
  if len(slotted) < len(scanned):
    cycle = max(cycle, len({_slot(m) for m in slotted}))
    raise StackError(
      *(
        f"`{m.leaf.name}` {m.leaf} has no `layer_<slot>` level under"
        f" `{m.container}`, but the layers come in a cycle of {cycle}; set"
        " `inhomogeneous_layer_cycle_interval` to 1 if they do not"
        for m in scanned
        if _slot(m) is None
      )
    )
  remainder = [m for m in members if m.container == containers.REMAINDER]
  return _slots(scanned, remainder, cfg, offset)


def _slot(member: Member) -> int | None:
  """The slot number of a name, or None."""
  if len(member.rest) < 2:
    return None
  found = _SLOT.fullmatch(member.rest[0])
  return int(found.group(1)) if found else None


def _slots(scanned, remainder, cfg, offset):
  """A cycle of layers, each slot stacked over the repeats of the cycle."""
  slots = {_slot(m) for m in scanned}
  cycle = cfg.inhomogeneous_layer_cycle_interval
  if cycle == 1:
    # Gemma 3 and DeepSeek 4 leave the field at 1: the slots tell.
    cycle = max(1, len(slots))
  _check_slots(scanned, slots, cycle)
  left = {_slot(m) for m in remainder}
  if None in left or left != set(range(len(left))):
    raise StackError(
      f"`{remainder[0].leaf.name}` is in a `{containers.REMAINDER}` that must"
      " hold `layers_0` and on without a gap, found"
      f" {sorted({m.rest[0] for m in remainder})[:4]}"
    )
  total = cfg.num_decoder_layers - offset - len(left)
  repeats = total // cycle
  if total % cycle or (repeats > 0) != bool(scanned) or total < 0:
    first = (scanned or remainder)[0].leaf
    raise StackError(
      f"`num_decoder_layers` {cfg.num_decoder_layers} is not {offset} + a"
      f" multiple of the cycle {cycle} + {len(left)} in"
      f" `{containers.REMAINDER}` (`{first.name}` {first})"
    )
  places = {}
  for m in scanned:
    layers = range(offset + _slot(m), offset + total, cycle)
    places[m.leaf.name] = m.place(m.rest[1:], layers, (repeats,))
  for m in remainder:
    layer = offset + total + _slot(m)
    places[m.leaf.name] = m.place(m.rest[1:], (layer,), ())
  return places


def _check_slots(scanned, slots, cycle):
  """Refuses slots that a cycle does not have, and slots that are missing."""
  field = "check `inhomogeneous_layer_cycle_interval`"
  beyond = [m for m in scanned if _slot(m) >= cycle]
  if beyond:
    raise StackError(
      *(
        f"`{m.leaf.name}` {m.leaf} is in slot {_slot(m)}, but a cycle of"
        f" {cycle} has slots 0 to {cycle - 1}; {field}"
        for m in beyond
      )
    )
  missing = sorted(set(range(cycle)) - slots)
  if missing and scanned:
    raise StackError(
      f"slots {missing} of a cycle of {cycle} are not in the tree"
      f" (`{scanned[0].leaf.name}` is); {field}"
    )


def _blocks(members, cfg, offset):
  """Blocks of local layers, stacked twice, and one global layer at the end."""
  odd = [m for m in members if m.rest[0] not in (_LOCAL, _GLOBAL)]
  if odd:
    raise StackError(
      *(
        f"`{m.leaf.name}` {m.leaf} is neither in `{_LOCAL}` nor in"
        f" `{_GLOBAL}`, as other leaves of `{m.container}` are"
        for m in odd
      )
    )
  scanned = [m for m in members if m.container != containers.REMAINDER]
  remainder = [m for m in members if m.container == containers.REMAINDER]
  local = [m for m in remainder if m.rest[0] == _LOCAL]
  rest_local = axes.first_length(_tallest(local), 1, cfg) if local else 0
  total = cfg.num_decoder_layers - offset
  total -= rest_local + (len(local) < len(remainder))
  cycle = _block_length(scanned, cfg, total)
  blocks = total // cycle if cycle else 0
  if cycle < 2 or total % cycle or (blocks > 0) != bool(scanned) or total < 0:
    first = members[0].leaf
    raise StackError(
      f"`num_decoder_layers` {cfg.num_decoder_layers} does not divide into"
      f" blocks like that of `{first.name}` {first}; check"
      " `inhomogeneous_layer_cycle_interval`"
    )
  places = {}
  for m in members:
    if m.container == containers.REMAINDER:
      start, stacked = offset + total, ()
      layers = [start + rest_local]
      if m.rest[0] == _LOCAL:
        layers, stacked = range(start, start + rest_local), (rest_local,)
    else:
      starts = range(offset, offset + total, cycle)
      layers = [start + cycle - 1 for start in starts]
      stacked = (blocks,)
      if m.rest[0] == _LOCAL:
        layers = [start + j for start in starts for j in range(cycle - 1)]
        stacked = (blocks, cycle - 1)
    places[m.leaf.name] = m.place(m.rest[1:], layers, stacked)
  return places


def _block_length(scanned, cfg, total):
  """Layers of one block; 0 if the blocks do not divide the layers."""
  cycle = cfg.inhomogeneous_layer_cycle_interval
  if cycle > 1 or not scanned:
    return max(cycle, 2)
  last = [m for m in scanned if m.rest[0] == _GLOBAL]
  if not last:
    raise StackError(
      f"`{scanned[0].leaf.name}` is in blocks of `{_LOCAL}` without a"
      f" `{_GLOBAL}`; their length cannot be told, set"
      " `inhomogeneous_layer_cycle_interval`"
    )
  # Gemma 4 leaves the field at 1: the stack of global layers tells.
  blocks = axes.first_length(_tallest(last), 1, cfg)
  return total // blocks if total % blocks == 0 else 0
