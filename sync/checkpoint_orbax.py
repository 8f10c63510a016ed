"""Checkpoints in Orbax's form: a directory, as MaxText writes it.

Of a training state only the weights are read: what is under `params`, or else
`model`, where there is such a level beside others. Needs the extra
`laneweave[checkpoint]`.
"""

import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from laneweave.sync import checkpoint

_WEIGHTS = ("params", "model")


class OrbaxCheckpoint(checkpoint.Checkpoint):
  """An Orbax PyTree directory."""

  def __init__(self, path: pathlib.Path, checkpointer: Any, tree: Any):
    """Takes shapes from the metadata.

    Args:
      path: The directory.
      checkpointer: An Orbax checkpointer; closed with the checkpoint.
      tree: Nested metadata of the state.

    Raises:
      ValueError: see `checkpoint.open_checkpoint`.
    """
    self.path = path
    self.shapes = {}
    self._checkpointer = checkpointer
    self._keys = {}
    for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
      name = ".".join(_part(key) for key in keys)
      shape = tuple(getattr(leaf, "shape", None) or ())
      dtype = getattr(leaf, "dtype", None)
      if dtype is None:
        continue  # A string or an empty node: not an array, never a weight.
      checkpoint.check_leaf(path, name, shape, self.shapes)
      self.shapes[name] = jax.ShapeDtypeStruct(shape, np.dtype(dtype))
      self._keys[name] = keys

  def read(self, name: str) -> np.ndarray:
    """See the base class."""
    spec = self.shapes[name]
    wanted: Any = ocp.RestoreArgs(restore_type=np.ndarray)
    item: Any = spec
    for key in reversed(self._keys[name]):
      if not isinstance(key, jax.tree_util.DictKey):
        raise ValueError(
          f"`--checkpoint` {self.path}: `{name}` lies in a list, where no"
          " weights are expected"
        )
      wanted, item = {key.key: wanted}, {key.key: item}
    try:
      tree = self._checkpointer.restore(
        self.path.absolute(),
        args=ocp.args.PyTreeRestore(
          item=item, restore_args=wanted, partial_restore=True
        ),
      )
    except (ValueError, KeyError, OSError) as error:
      raise _damaged(self.path, f"`{name}`: {error}") from None
    return np.asarray(jax.tree.leaves(tree)[0], spec.dtype, order="C")

  def close(self) -> None:
    """See the base class."""
    self._checkpointer.close()


def _part(key: Any) -> str:
  """One part of a name."""
  for attribute in ("key", "name", "idx"):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)


def _damaged(path: pathlib.Path, error) -> ValueError:
  detail = " ".join(str(error).split())[:300]
  return ValueError(f"`--checkpoint` {path} cannot be read by Orbax: {detail}")


def open_directory(path: pathlib.Path) -> OrbaxCheckpoint:
  """Opens an Orbax PyTree directory.

  Args:
    path: The directory that holds `_METADATA`.

  Returns:
    The checkpoint.

  Raises:
    ValueError: see `checkpoint.open_checkpoint`.
  """
  checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
  try:
    try:
      metadata = checkpointer.metadata(path.absolute())
      tree = metadata.item_metadata.tree
    except (
      ValueError,
      KeyError,
      TypeError,
      AttributeError,
      OSError,
    ) as error:
      raise _damaged(path, error) from None
    level = next((k for k in _WEIGHTS if k in tree), None)
    if level is not None:
      tree = {level: tree[level]}
    return OrbaxCheckpoint(path, checkpointer, tree)
  except BaseException:
    checkpointer.close()
    raise
