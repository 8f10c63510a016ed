"""The weights of a tree under canonical names, for the NumPy reference.

Shares nothing with `tree`, which it is there to check.
"""

import collections
from collections.abc import Iterator
import dataclasses
import re
from typing import Any

import ml_dtypes
import numpy as np

_ROOTS = ("base", "model", "params")
_NOT_WEIGHT_PART = re.compile(
  r"(.*_)?caches?|cached_.*|KVCache_\d+|(.*_)?rngs?|intermediates"
)
_NOT_WEIGHT_KINDS = ("RngState", "Cache", "Intermediate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
  """One weight as found in a tree."""

  value: Any  # Anything with a shape and a dtype.
  trainable: bool | None  # Is it an nnx.Param; None: the tree does not say.


def weights(tree: Any, *, integer_layers: bool) -> dict[str, Leaf]:
  """The weights of a tree under their canonical names.

  Args:
    tree: Nested or flat, keys dotted strings, tuples or integers, leaves
      arrays, shapes or nnx variables.
    integer_layers: `layers.6` means layer 6 (and not slot 6 of a cycle).

  Returns:
    Leaf by name; what is not floating, has rank 0, or is named as a cache or
    RNG state is left out.

  Raises:
    ValueError: two wrapper roots with different content, or one name twice.
  """
  found = _without_roots(dict(_walk(tree, ())))
  children = collections.Counter(path[:-1] for path in found)
  leaves = {}
  for path, value in found.items():
    if path[-1] == "value" and len(path) > 1 and children[path[:-1]] == 1:
      path = path[:-1]
    name = ".".join(path)
    if integer_layers:
      name = re.sub(r"(^|\.)layers\.(\d+)(?=\.|$)", r"\1layers_\2", name)
    kinds = _variable_kinds(value)
    value = _unwrap(value)
    if any(_NOT_WEIGHT_PART.fullmatch(part) for part in path):
      continue
    if any(kind in kinds for kind in _NOT_WEIGHT_KINDS):
      continue
    if not _is_floating(value) or len(value.shape) == 0:
      continue
    if name in leaves:
      raise ValueError(f"`{name}` is in the tree twice")
    leaves[name] = Leaf(
      value=value, trainable="Param" in kinds if kinds else None
    )
  return leaves


def _walk(
  node: Any, path: tuple[str, ...]
) -> Iterator[tuple[tuple[str, ...], Any]]:
  """(path, leaf) for every leaf below `node`."""
  if hasattr(node, "to_pure_dict") and not hasattr(node, "items"):
    node = node.to_pure_dict()
  if hasattr(node, "items") and not hasattr(node, "dtype"):
    for key, child in node.items():
      keys = key if isinstance(key, tuple) else (key,)
      below = [part for k in keys for part in str(k).split(".")]
      yield from _walk(child, (*path, *below))
  elif isinstance(node, (list, tuple)):
    for i, child in enumerate(node):
      yield from _walk(child, (*path, str(i)))
  else:
    yield path, node


def _without_roots(
  found: dict[tuple[str, ...], Any],
) -> dict[tuple[str, ...], Any]:
  """Paths without the wrapper levels that all of them share."""
  while found and all(path[1:] for path in found):
    roots = {path[0] for path in found}
    if not roots <= set(_ROOTS):
      break
    below = {}
    for path, value in found.items():
      below.setdefault(path[0], {})[path[1:]] = value
    first, *others = below.values()
    for other in others:
      if first.keys() != other.keys() or any(
        first[path] is not other[path] for path in first
      ):
        raise ValueError(
          f"the tree has roots {sorted(roots)} with different content;"
          " pass one of them"
        )
    found = first
  return found


def _variable_kinds(leaf: Any) -> set[str]:
  """Names of the nnx variable types a leaf is of; empty for a plain one."""
  kind = getattr(leaf, "type", None)
  kind = kind if isinstance(kind, type) else type(leaf)
  names = {base.__name__ for base in kind.__mro__}
  return names if "Variable" in names else set()


def _unwrap(leaf: Any) -> Any:
  """The array in a variable or in a box with a `value`."""
  if callable(getattr(leaf, "get_value", None)):
    return leaf.get_value()
  return getattr(leaf, "value", leaf)


def _is_floating(value: Any) -> bool:
  """Whether a leaf has a floating-point dtype, narrow ones included."""
  try:
    dtype = np.dtype(value.dtype)
    ml_dtypes.finfo(dtype)
  except (AttributeError, TypeError, ValueError):
    return False
  return dtype.kind != "c" and hasattr(value, "shape")
