"""Manifests: what a tree holds, without holding it."""

import collections.abc
import dataclasses
import gzip
import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from laneweave.sync import tree as tree_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSpec:
  """One weight.

  Attributes:
    name: Canonical name.
    shape: Global shape.
    dtype: dtype.
    sharding: Its sharding, or None where it is not known.
    kind: Name of its nnx variable type, or None where the tree does not say.
  """

  name: str
  shape: tuple[int, ...]
  dtype: np.dtype
  sharding: Any = None
  kind: str | None = None

  @property
  def size_bytes(self) -> int:
    """Bytes of the whole array, an exact integer."""
    return math.prod(self.shape) * self.dtype.itemsize

  def __str__(self) -> str:
    return f"{self.dtype.name}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
  """The weights of a tree, and what else was in it.

  Attributes:
    leaves: Weights in the tree's own order.
    dropped: (name, reason) of leaves that are never synced.
  """

  leaves: tuple[LeafSpec, ...]
  dropped: tuple[tuple[str, str], ...] = ()

  def by_name(self) -> dict[str, LeafSpec]:
    """Weights by name."""
    return {leaf.name: leaf for leaf in self.leaves}

  def to_json(self) -> str:
    """JSON text that `from_json` reads; shardings are not written."""
    leaves = [
      {
        "path": leaf.name,
        "shape": list(leaf.shape),
        "dtype": leaf.dtype.name,
        **({"kind": leaf.kind} if leaf.kind else {}),
      }
      for leaf in self.leaves
    ]
    return json.dumps({"leaves": leaves}, indent=1)

  @classmethod
  def from_json(cls, text: str | bytes) -> "Manifest":
    """Reads `to_json`'s form: `leaves` of `path`, `shape` and `dtype`.

    Args:
      text: JSON text.

    Returns:
      The manifest.

    Raises:
      ValueError: text of another form; the first offending leaf is named.
    """
    try:
      data = json.loads(text)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
      raise ValueError(f"a manifest must be JSON: {error}") from None
    return cls.from_data(data)

  @classmethod
  def from_data(cls, data: Any) -> "Manifest":
    """Like `from_json`, from what the JSON text says."""
    leaves = data.get("leaves") if isinstance(data, dict) else None
    if not isinstance(leaves, list):
      raise ValueError('a manifest is a JSON object with a list "leaves"')
    specs: dict[str, LeafSpec] = {}
    for i, leaf in enumerate(leaves):
      try:
        spec = _spec(leaf)
      except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
          f"leaf {i} of the manifest needs a `path`, a `shape` of whole"
          f" numbers and a `dtype`: {error}"
        ) from None
      if spec.name in specs:
        raise ValueError(f"`{spec.name}` is in the manifest twice")
      specs[spec.name] = spec
    found, dropped = {}, []
    for name, spec in tree_lib.flatten(specs).items():
      reason = tree_lib.why_not_weight(name, spec)
      if reason is None:
        found[name] = dataclasses.replace(spec, name=name)
      else:
        dropped.append((name, reason))
    return cls(leaves=tuple(found.values()), dropped=tuple(dropped))

  @classmethod
  def load(cls, path: str | pathlib.Path) -> "Manifest":
    """Reads a .json or .json.gz file.

    Args:
      path: The file.

    Returns:
      The manifest.

    Raises:
      ValueError: not a manifest, or larger than one can be.
    """
    path = pathlib.Path(path)
    limit = 64 << 20
    opener = gzip.open if path.suffix == ".gz" else open
    try:
      with opener(path, "rb") as file:
        text = file.read(limit + 1)
    except (gzip.BadGzipFile, EOFError) as error:
      raise ValueError(f"`{path}` is not a gzip file: {error}") from None
    if len(text) > limit:
      raise ValueError(f"`{path}` holds more than {limit >> 20} MB of JSON")
    return cls.from_json(text)


def _spec(leaf) -> LeafSpec:
  """One leaf of a manifest's JSON."""
  shape = tuple(leaf["shape"])
  if any(isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in shape):
    raise ValueError(f"`shape` {list(shape)}")
  name = leaf["path"]
  if (
    not isinstance(name, str)
    or not name
    or any(not part for part in name.split("."))
  ):
    raise ValueError(f"`path` {name!r}")
  return LeafSpec(
    name=name,
    shape=shape,
    dtype=jnp.dtype(leaf["dtype"]),
    kind=leaf.get("kind"),
  )


def manifest(tree: Any, *, integer_layers: bool = False) -> Manifest:
  """The manifest of a live tree.

  Args:
    tree: See `tree.flatten`; a manifest or its JSON data is taken as it is.
    integer_layers: See `tree.flatten`.

  Returns:
    The manifest; nothing is allocated and no device is touched.

  Raises:
    ValueError: there is no weight in the tree.
  """
  if isinstance(tree, Manifest):
    return tree
  if isinstance(tree, dict) and isinstance(tree.get("leaves"), list):
    return Manifest.from_data(tree)
  flat = tree_lib.flatten(tree, integer_layers=integer_layers)
  weights, dropped = tree_lib.split_leaves(flat)
  leaves = []
  for name, x in weights.items():
    kinds = tree_lib.variable_kinds(flat[name])
    kind = None
    if kinds:
      variable = getattr(flat[name], "type", None)
      kind = (
        variable if isinstance(variable, type) else type(flat[name])
      ).__name__
    sharding = getattr(x, "sharding", None)
    leaves.append(
      LeafSpec(
        name=name,
        shape=tuple(int(d) for d in x.shape),
        dtype=jnp.dtype(x.dtype),
        sharding=sharding if isinstance(sharding, NamedSharding) else None,
        kind=kind,
      )
    )
  return Manifest(leaves=tuple(leaves), dropped=tuple(dropped))


def sort_names(names: collections.abc.Iterable[str]) -> list[str]:
  """The order both sides number their variables in: layers by number."""
  return sorted(names, key=tree_lib.natural)
