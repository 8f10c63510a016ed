"""Rules from logical axes to mesh axes, and the shardings they give.

The text form, of `--sharding_rules`:

    rules   = rule (";" rule)*
    rule    = [side ":"] item ("," item)*    side: trainer or rollout
    item    = logical "=" [mesh ("+" mesh)*]

`trainer:embed=fsdp;rollout:mlp=tp,kv_heads=` changes three rules and leaves
the defaults of all others. Nothing after `=`: that axis is not sharded. A rule
without a side holds for both. `embed` and `mlp` stand for their families
(`embed_moe`, `mlp_moe`, ...) where a member has no rule. `*` takes the mesh
axes that no other rule used in an array, and gives them to its first axes that
they divide; vectors are left alone.

JAX refuses to place an array unevenly, so a mesh axis is left out where it does
not divide; `Assigned.skipped` says where.
"""

import collections.abc
import dataclasses
import difflib
import math

from laneweave.sync import logical_axes
from laneweave.sync.meshes import MeshSpec

SIDES = ("trainer", "rollout")
REST = "*"

# Mesh axes of MaxText and of the engines, by what they are for. Those that a
# mesh does not have are passed over.
_TENSOR = ("tp", "tensor", "model")
_COMMON = {
  "embed": ("fsdp",),
  "mlp": _TENSOR,
  "heads": _TENSOR,
  "q_heads": _TENSOR,
  "kv_heads": _TENSOR,
  "vocab": _TENSOR,
  "exp": ("ep", "expert"),
}
_DEFAULTS = {"trainer": _COMMON | {REST: ("fsdp",)}, "rollout": _COMMON}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assigned:
  """Mesh axes of every axis of one array.

  Attributes:
    spec: Mesh axes of each array axis, major first.
    skipped: (logical axis, mesh axis) pairs whose rule could not be followed,
      because the mesh axis does not divide what is left of the array axis.
  """

  spec: tuple[tuple[str, ...], ...]
  skipped: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
  """The rules of one side on its mesh.

  Attributes:
    mesh: The mesh.
    axes: Mesh axes by logical axis.
  """

  mesh: MeshSpec
  axes: dict[str, tuple[str, ...]]

  def of(self, axis: str | None) -> tuple[str, ...]:
    """Mesh axes of a logical axis."""
    if axis is None:
      return ()
    if axis in self.axes:
      return self.axes[axis]
    return self.axes.get(logical_axes.family(axis), ())

  def assign(
    self,
    shape: collections.abc.Sequence[int],
    logical: collections.abc.Sequence[str | None],
  ) -> Assigned:
    """Shards one array.

    Args:
      shape: Its shape.
      logical: Logical axis of each of its axes.

    Returns:
      The assignment; no mesh axis is used twice.
    """
    sizes = self.mesh.shape
    spec: list[tuple[str, ...]] = []
    skipped = []
    used: set[str] = set()

    def divides(at, names):
      return shape[at] % math.prod(sizes[n] for n in names) == 0

    for at, axis in enumerate(logical):
      names: tuple[str, ...] = ()
      for name in self.of(axis):
        if name in used or sizes[name] == 1:
          continue
        if divides(at, (*names, name)):
          names = (*names, name)
          used.add(name)
        else:
          skipped.append((axis or "", name))
      spec.append(names)
    block = [a for a, axis in enumerate(logical) if axis != "layers"]
    for name in self.of(REST) if len(block) > 1 else ():
      for at in block:
        if name in used or sizes[name] == 1:
          break
        if not spec[at] and divides(at, (name,)):
          spec[at] = (name,)
          used.add(name)
    return Assigned(spec=tuple(spec), skipped=tuple(skipped))

  def parts(
    self,
    axis: str,
    shape: collections.abc.Sequence[int],
    logical: collections.abc.Sequence[str | None],
  ) -> int:
    """Shards that the rules make of one axis of an array that fits them.

    Args:
      axis: The logical axis; its own size is not looked at.
      shape: The array's shape.
      logical: Logical axes of the array.

    Returns:
      The number.
    """
    at = list(logical).index(axis)
    # Every number divides 0.
    fitting = [0 if a == at else size for a, size in enumerate(shape)]
    spec = self.assign(fitting, logical).spec[at]
    return math.prod(self.mesh.shape[name] for name in spec)


def parse(text: str, meshes: dict[str, MeshSpec]) -> dict[str, Rules]:
  """Reads rules.

  Args:
    text: See the module's docstring.
    meshes: Mesh of each side.

  Returns:
    The rules of each side, defaults included.

  Raises:
    ValueError: text of another form, an unknown side or logical axis, or a
      mesh axis that the side's mesh does not have.
  """
  axes = {
    side: {
      logical: tuple(n for n in names if n in meshes[side].shape)
      for logical, names in _DEFAULTS[side].items()
    }
    for side in SIDES
  }
  for rule in filter(None, (r.strip() for r in text.split(";"))):
    side, colon, items = rule.partition(":")
    sides = (side.strip(),) if colon else SIDES
    if sides[0] not in SIDES:
      raise ValueError(
        f"`--sharding_rules` {rule!r}: {side.strip()!r} is no side; a rule"
        " begins with trainer: or rollout:, or holds for both"
      )
    for item in (items if colon else rule).split(","):
      logical, names = _item(item, rule)
      for one in sides:
        _check_mesh_axes(names, one, meshes[one], rule)
        axes[one][logical] = names
  return {side: Rules(mesh=meshes[side], axes=axes[side]) for side in SIDES}


def _item(item: str, rule: str) -> tuple[str, tuple[str, ...]]:
  """One `logical=mesh+mesh`."""
  logical, equals, right = (part.strip() for part in item.partition("="))
  if not equals or not logical:
    raise ValueError(
      f"`--sharding_rules` {rule!r}: {item.strip()!r} is no"
      " `logical=mesh`; write it like rollout:mlp=tp,embed=fsdp"
    )
  known = (*logical_axes.KNOWN, "layers", REST)
  if logical not in known:
    close = difflib.get_close_matches(logical, known, n=1)
    hint = f" (did you mean `{close[0]}`?)" if close else ""
    raise ValueError(
      f"`--sharding_rules` {rule!r}: `{logical}` is no logical axis{hint};"
      f" known are {', '.join(known)}"
    )
  names = tuple(filter(None, (n.strip() for n in right.split("+"))))
  return logical, names


def _check_mesh_axes(names, side, mesh, rule):
  for name in names:
    if name not in mesh.shape:
      raise ValueError(
        f"`--sharding_rules` {rule!r}: the {side}'s mesh {mesh} has no axis"
        f" `{name}`; begin a rule with trainer: or rollout: to change one side"
      )
    if names.count(name) > 1:
      raise ValueError(
        f"`--sharding_rules` {rule!r} names the mesh axis `{name}` twice"
      )
