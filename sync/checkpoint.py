"""Checkpoints: weights by dotted name, from .npz, .safetensors or Orbax.

Shapes and dtypes are known as soon as a checkpoint is opened; values are read
one array at a time, so that a caller can place each on its devices before the
next one is read. Nothing in a file is ever unpickled, executed or extracted to
disk, and a file is refused, in one line, when it is not what it seems.
"""

import abc
import collections.abc
import math
import pathlib
import re
from typing import Self

import jax
import numpy as np

# One part: letters, digits, `_` and `-`. No separators, no `..`, no spaces.
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_LONGEST_NAME = 512
# Where a step's directory keeps the state: itself, or an item of MaxText's or
# of Orbax's own naming.
_ORBAX_ITEMS = ("", "items", "default", "state")
_ORBAX_MARK = "_METADATA"

Shapes = dict[str, jax.ShapeDtypeStruct]


class Checkpoint(abc.ABC):
  """An opened checkpoint.

  Attributes:
    path: Where it is.
    shapes: Shape and dtype of every array by dotted name.
  """

  path: pathlib.Path
  shapes: Shapes

  @abc.abstractmethod
  def read(self, name: str) -> np.ndarray:
    """Reads one array.

    Args:
      name: One of the names in `shapes`.

    Returns:
      The array, in C order and native byte order.

    Raises:
      ValueError: the file is damaged there.
    """

  @abc.abstractmethod
  def close(self) -> None:
    """Closes the file or files; reading is over. Harmless when repeated."""

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *_) -> None:
    self.close()


def open_checkpoint(path: str | pathlib.Path) -> Checkpoint:
  """Opens a checkpoint.

  Args:
    path: A .npz file, a .safetensors file, a directory of .safetensors files
      (with or without an index), or an Orbax directory.

  Returns:
    The checkpoint.

  Raises:
    ValueError: nothing is there, it is of no known kind, damaged, or holds
      names or sizes that no checkpoint of weights has.
    RuntimeError: a package that reads it is not installed.
  """
  path = pathlib.Path(path)
  if not path.exists():
    raise ValueError(f"`--checkpoint` {path}: no such file or directory")
  try:
    return _open(path)
  except OSError as error:
    raise ValueError(
      f"`--checkpoint` {path} cannot be read: {error.strerror or error}"
    ) from None
  except ImportError as error:
    raise RuntimeError(
      f"`--checkpoint` {path} needs a package that cannot be imported"
      f" ({error}); install laneweave[checkpoint]"
    ) from None


def _open(path: pathlib.Path) -> Checkpoint:
  # Formats are imported when they are met: safetensors and Orbax take time to
  # load, and need not be installed.
  if path.is_dir():
    if any(path.glob("*.safetensors*")):
      from laneweave.sync import checkpoint_safetensors

      return checkpoint_safetensors.open_directory(path)
    root = _find_orbax(path)
    if root is not None:
      from laneweave.sync import checkpoint_orbax

      return checkpoint_orbax.open_directory(root)
    raise ValueError(
      f"`--checkpoint` {path} is a directory without .safetensors files and"
      " without an Orbax checkpoint; name the directory that holds one, of one"
      " step"
    )
  if path.suffix == ".npz":
    from laneweave.sync import checkpoint_npz

    return checkpoint_npz.open_file(path)
  if path.suffix == ".safetensors":
    from laneweave.sync import checkpoint_safetensors

    return checkpoint_safetensors.open_files(path, [path])
  raise ValueError(
    f"`--checkpoint` {path} is of no known kind; it must be a .npz file, a"
    " .safetensors file or directory, or an Orbax directory"
  )


def _find_orbax(path: pathlib.Path) -> pathlib.Path | None:
  """The Orbax PyTree directory in a step's directory, or None."""
  roots = (path / item for item in _ORBAX_ITEMS)
  return next((root for root in roots if (root / _ORBAX_MARK).is_file()), None)


def check_leaf(
  path: pathlib.Path,
  name: str,
  shape: collections.abc.Sequence[int],
  taken: collections.abc.Container[str],
) -> None:
  """Refuses names and shapes that no weight has.

  Args:
    path: The checkpoint, for the error.
    name: Name of an array.
    shape: Its shape.
    taken: Names that were there before.

  Raises:
    ValueError: a name that is no dotted path or is there twice, or an empty
      array.
  """
  if len(name) > _LONGEST_NAME or not _NAME.fullmatch(name):
    raise ValueError(
      f"`--checkpoint` {path} has an array named {name[:80]!r}; names are"
      " dotted paths of letters, digits, _ and -"
    )
  if name in taken:
    raise ValueError(f"`--checkpoint` {path} has `{name}` twice")
  if math.prod(shape) == 0:
    raise ValueError(
      f"`--checkpoint` {path}: `{name}` has shape {list(shape)}, which holds"
      " nothing"
    )


def check_size(path: pathlib.Path, needed: int, there: int) -> None:
  """Refuses files that would unpack to far more than weights do.

  Trained weights hardly compress; the bound is generous, so that arrays of
  zeros pass, and small files are not bounded at all.

  Args:
    path: The checkpoint, for the error.
    needed: Bytes of all arrays together.
    there: Bytes of the files.

  Raises:
    ValueError: `needed` is out of proportion.
  """
  if needed > max(64 << 20, 64 * there):
    raise ValueError(
      f"`--checkpoint` {path} holds {there} bytes and claims to unpack to"
      f" {needed}; weights do not compress like that, so it is refused. Save"
      " it uncompressed if it is right"
    )
