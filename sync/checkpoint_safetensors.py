"""Checkpoints in the safetensors form: a file, or a directory of files."""

import contextlib
import json
import pathlib

import jax
import ml_dtypes
import numpy as np
import safetensors

from laneweave.sync import checkpoint

_DTYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "F8_E4M3": ml_dtypes.float8_e4m3fn,
  "F8_E5M2": ml_dtypes.float8_e5m2,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U64": np.uint64,
  "U32": np.uint32,
  "U16": np.uint16,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_LARGEST_INDEX = 64 << 20  # Bytes; a million names fit.


class SafetensorsCheckpoint(checkpoint.Checkpoint):
  """One or more .safetensors files."""

  def __init__(self, path: pathlib.Path, files: list[pathlib.Path]):
    """Reads the headers.

    Args:
      path: What was asked for, for errors.
      files: The files.

    Raises:
      ValueError: see `checkpoint.open_checkpoint`.
    """
    self.path = path
    self.shapes = {}
    self._stack = contextlib.ExitStack()
    self._file_of = {}
    with self._stack:
      for file in files:
        self._add(file)
      self._stack = self._stack.pop_all()

  def _add(self, file: pathlib.Path) -> None:
    """Opens a file and takes its arrays' shapes."""
    try:
      opened = self._stack.enter_context(
        safetensors.safe_open(file, framework="numpy")
      )
      names = list(opened.keys())
    except safetensors.SafetensorError as error:
      raise ValueError(
        f"`--checkpoint` {file} is no .safetensors file, or a damaged one:"
        f" {error}"
      ) from None
    for name in names:
      part = opened.get_slice(name)
      shape = tuple(part.get_shape())
      checkpoint.check_leaf(self.path, name, shape, self.shapes)
      if part.get_dtype() not in _DTYPES:
        raise ValueError(
          f"`--checkpoint` {file}: `{name}` has dtype {part.get_dtype()},"
          " which is not known here; save it as float32 or bfloat16"
        )
      self.shapes[name] = jax.ShapeDtypeStruct(
        shape, np.dtype(_DTYPES[part.get_dtype()])
      )
      self._file_of[name] = opened

  def read(self, name: str) -> np.ndarray:
    """See the base class."""
    spec = self.shapes[name]
    if spec.dtype.itemsize == 1 and spec.dtype.kind == "V":
      raise ValueError(
        f"`--checkpoint` {self.path}: `{name}` is {spec.dtype.name}, which is"
        " not read; save it as float32 or bfloat16"
      )
    array = self._file_of[name].get_tensor(name)
    return np.asarray(array, spec.dtype, order="C")

  def close(self) -> None:
    """See the base class."""
    self._file_of = {}
    self._stack.close()


def open_files(
  path: pathlib.Path, files: list[pathlib.Path]
) -> SafetensorsCheckpoint:
  """Opens files as one checkpoint.

  Args:
    path: What was asked for, for errors.
    files: The files.

  Returns:
    The checkpoint.

  Raises:
    ValueError: see `checkpoint.open_checkpoint`.
  """
  return SafetensorsCheckpoint(path, files)


def open_directory(path: pathlib.Path) -> SafetensorsCheckpoint:
  """Opens a directory, by its index where there is one.

  Args:
    path: The directory.

  Returns:
    The checkpoint; with an index, exactly the arrays that the index lists.

  Raises:
    ValueError: see `checkpoint.open_checkpoint`; also more than one index, or
      an index and files that differ.
  """
  indexes = sorted(path.glob("*.safetensors.index.json"))
  if not indexes:
    return SafetensorsCheckpoint(path, sorted(path.glob("*.safetensors")))
  if len(indexes) > 1:
    names = ", ".join(index.name for index in indexes)
    raise ValueError(
      f"`--checkpoint` {path} has {len(indexes)} indexes ({names}); name the"
      " directory of one model"
    )
  file_of = _read_index(indexes[0])
  files = sorted(set(file_of.values()))
  missing = [f for f in files if not (path / f).is_file()]
  if missing:
    raise ValueError(
      f"`--checkpoint` {path} lacks {len(missing)} of the {len(files)} files"
      f" in its index, first {missing[0]}"
    )
  opened = SafetensorsCheckpoint(path, [path / f for f in files])
  differ = sorted(opened.shapes.keys() ^ file_of.keys())
  if differ:
    opened.close()
    raise ValueError(
      f"`--checkpoint` {path}: the index and the files differ in"
      f" {len(differ)} arrays, first `{differ[0]}`"
    )
  return opened


def _read_index(index: pathlib.Path) -> dict[str, str]:
  """File by array name."""
  if index.stat().st_size > _LARGEST_INDEX:
    raise ValueError(
      f"`--checkpoint` {index} is larger than an index can be"
      f" ({_LARGEST_INDEX} bytes)"
    )
  try:
    file_of = json.loads(index.read_bytes())["weight_map"]
    names = list(file_of.values())
  except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
    raise ValueError(
      f"`--checkpoint` {index} is no safetensors index; it needs a"
      " `weight_map` of file names by array name"
    ) from None
  for name in names:
    # A file of the directory itself, never one elsewhere.
    own = isinstance(name, str) and pathlib.PurePath(name).name == name
    if not own or not name.endswith(".safetensors"):
      raise ValueError(
        f"`--checkpoint` {index} names {str(name)[:80]!r}; an index names"
        " .safetensors files of its own directory"
      )
  return file_of
