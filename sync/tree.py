"""Trees of parameters under canonical names.

A canonical name is the dotted path of a leaf without the wrapper roots that
all leaves share and without a trailing `.value`. What is not a weight is set
aside and named: the transport must not bind it.
"""

import collections
import collections.abc
import re
from typing import Any

import jax
import jax.numpy as jnp

ROOTS = ("base", "model", "params")

# Whole path parts that name state which is not a weight. A weight whose name
# merely begins like one of them (`cache_proj`) is a weight.
_STATE_PART = re.compile(
  r"cache|caches|kv_caches?|cached_\w+|KVCache_\d+|rngs?|intermediates"
)
# Variable types of flax.nnx that hold such state, by name: flax itself is only
# there when the caller's tree comes from it.
_STATE_KINDS = ("RngState", "Cache", "Intermediate", "OptState")
_INTEGER_LAYER = re.compile(r"(^|\.)layers\.(\d+)(?=\.)")


def flatten(tree: Any, *, integer_layers: bool = False) -> dict[str, Any]:
  """Leaves by canonical name, in the tree's own order.

  Args:
    tree: Nested mapping or sequence, or flat with dotted or tuple keys, of
      arrays, shapes or nnx variables; nnx states and frozen dicts too.
    integer_layers: `layers.6` names layer 6 and becomes `layers_6`, as in
      rollout trees that keep their layers in a list.

  Returns:
    Leaves, nnx variables still wrapped, by name.

  Raises:
    ValueError: two leaves of one name, or wrapper roots with different
      content.
  """
  found: dict[tuple[str, ...], Any] = {}
  for path, leaf in _walk(tree, ()):
    if path in found:
      raise ValueError(f"`{'.'.join(path)}` is in the tree twice")
    found[path] = leaf
  found = _strip_roots(found)
  siblings = collections.Counter(path[:-1] for path in found)
  named = {}
  for path, leaf in found.items():
    if len(path) > 1 and path[-1] == "value" and siblings[path[:-1]] == 1:
      path = path[:-1]
    name = ".".join(path)
    if integer_layers:
      name = number_layers(name)
    if name in named:
      raise ValueError(f"`{name}` is in the tree twice")
    named[name] = leaf
  return named


def number_layers(name: str) -> str:
  """A name whose layer is an item of a list, `layers.6`, as `layers_6`."""
  return _INTEGER_LAYER.sub(r"\1layers_\2", name)


def _walk(node, path):
  """Yields (path, leaf) for every leaf of a tree."""
  if not hasattr(node, "items") and hasattr(node, "to_pure_dict"):
    node = node.to_pure_dict()
  if isinstance(node, collections.abc.Mapping) or (
    hasattr(node, "items") and not hasattr(node, "dtype")
  ):
    for key, child in node.items():
      keys = key if isinstance(key, tuple) else (key,)
      parts = [part for k in keys for part in str(k).split(".")]
      yield from _walk(child, (*path, *parts))
  elif isinstance(node, (list, tuple)):
    for i, child in enumerate(node):
      yield from _walk(child, (*path, str(i)))
  else:
    yield path, node


def _strip_roots(found):
  """Drops leading wrapper levels, as long as every weight is under one.

  Caches and RNG state beside a wrapper, which are never synced, do not count.
  """
  while True:
    roots = dict.fromkeys(
      path[0]
      for path in found
      if not any(_STATE_PART.fullmatch(part) for part in path)
    )
    if not roots or not set(roots) <= set(ROOTS):
      return found
    if any(len(path) == 1 and path[0] in roots for path in found):
      return found
    trees = {root: {} for root in sorted(roots)}
    beside = {}
    for path, leaf in found.items():
      trees.get(path[0], beside)[path[1:] if path[0] in trees else path] = leaf
    first, *others = trees.values()
    for other in others:
      same = other.keys() == first.keys() and all(
        other[path] is first[path] for path in first
      )
      if not same:
        raise ValueError(
          f"the tree has the roots {', '.join(trees)} with different"
          " content; pass the one that is meant"
        )
    found = first | beside


def variable_kinds(leaf: Any) -> frozenset[str]:
  """Names of the nnx variable types of a leaf; empty for anything else."""
  kind = getattr(leaf, "type", None)
  kind = kind if isinstance(kind, type) else type(leaf)
  names = frozenset(base.__name__ for base in kind.__mro__)
  return names if "Variable" in names else frozenset()


def unwrap(leaf: Any) -> Any:
  """The array inside an nnx variable or a Linen box; else the leaf itself."""
  if variable_kinds(leaf):
    get = getattr(leaf, "get_value", None)
    return get() if callable(get) else leaf.value
  unbox = getattr(leaf, "unbox", None)
  return unbox() if callable(unbox) else leaf


def why_not_weight(name: str, leaf: Any) -> str | None:
  """Why a leaf is not synced, or None when it is a weight.

  Args:
    name: Its canonical name.
    leaf: The leaf, wrapped or not.

  Returns:
    The reason.
  """
  part = next((p for p in name.split(".") if _STATE_PART.fullmatch(p)), None)
  if part is not None:
    return f"`{part}` names cache, RNG or intermediate state"
  kind = next((k for k in _STATE_KINDS if k in variable_kinds(leaf)), None)
  if kind is not None:
    return f"a variable of type {kind}"
  value = unwrap(leaf)
  dtype = getattr(value, "dtype", None)
  if dtype is None or not hasattr(value, "shape"):
    return f"a {type(value).__name__}, not an array"
  if not jnp.issubdtype(dtype, jnp.floating):
    return f"dtype {dtype} is not floating-point"
  if not value.shape:
    return "rank 0"
  return None


def split_leaves(
  flat: dict[str, Any],
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
  """Separates weights from everything else.

  Args:
    flat: Leaves by canonical name, as `flatten` gives them.

  Returns:
    Weights by name, unwrapped; and (name, reason) of every other leaf.

  Raises:
    ValueError: there is no weight; the first leaves are named.
  """
  weights, dropped = {}, []
  for name, leaf in flat.items():
    reason = why_not_weight(name, leaf)
    if reason is None:
      weights[name] = unwrap(leaf)
    else:
      dropped.append((name, reason))
  if not weights:
    raise ValueError(
      f"0 of {len(flat)} leaves can be synced, so there is nothing to move: "
      + (
        "; ".join(f"`{n}` {describe(flat[n])}: {r}" for n, r in dropped[:3])
        or "the tree is empty"
      )
    )
  return weights, dropped


def describe(leaf: Any) -> str:
  """Dtype and shape of a leaf, for messages."""
  value = unwrap(leaf)
  dtype = getattr(value, "dtype", None)
  if dtype is None:
    return type(value).__name__
  return f"{jnp.dtype(dtype).name if not _is_key(dtype) else dtype}" + str(
    list(getattr(value, "shape", ()))
  )


def _is_key(dtype) -> bool:
  return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def natural(name: str) -> tuple[Any, ...]:
  """Sort key that orders `layers_2` before `layers_10`."""
  return tuple(
    (0, int(part)) if part.isdigit() else (1, part)
    for part in re.split(r"(\d+)", name)
  )
