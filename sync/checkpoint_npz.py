"""Checkpoints in NumPy's .npz form: a zip archive of .npy files.

bfloat16 arrays written by `np.savez` come back as two-byte voids, since the
.npy header has no name for them; they are read as bfloat16, the only two-byte
float that NumPy does not know itself. One-byte voids could be any of several
float8 types, and are refused.
"""

import pathlib
import zipfile
import zlib

import jax
import ml_dtypes
import numpy as np

from laneweave.sync import checkpoint

# What damaged or hostile archives raise, in zipfile, zlib and NumPy.
_DAMAGE = (
  zipfile.BadZipFile,
  zlib.error,
  EOFError,
  ValueError,
  NotImplementedError,
  RuntimeError,  # An encrypted member.
)
_SUFFIX = ".npy"


class NpzCheckpoint(checkpoint.Checkpoint):
  """A .npz file."""

  def __init__(self, path: pathlib.Path, archive: zipfile.ZipFile):
    """Reads the headers.

    Args:
      path: The file.
      archive: The file opened as an archive; closed with the checkpoint.

    Raises:
      ValueError: see `checkpoint.open_checkpoint`.
    """
    self.path = path
    self.shapes = {}
    self._archive = archive
    members = archive.infolist()
    checkpoint.check_size(
      path, sum(m.file_size for m in members), path.stat().st_size
    )
    for member in members:
      name = member.filename.removesuffix(_SUFFIX)
      spec = self._header(member)
      checkpoint.check_leaf(path, name, spec.shape, self.shapes)
      self.shapes[name] = spec

  def _header(self, member: zipfile.ZipInfo) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one member."""
    if not member.filename.endswith(_SUFFIX) or member.compress_type not in (
      zipfile.ZIP_STORED,
      zipfile.ZIP_DEFLATED,
    ):
      raise ValueError(
        f"`--checkpoint` {self.path} is an archive with"
        f" {member.filename[:80]!r} in it, which is no .npy file as `np.savez`"
        " writes it"
      )
    try:
      with self._archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read = {
          (1, 0): np.lib.format.read_array_header_1_0,
          (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, _, dtype = read(file)
        body = member.file_size - file.tell()
    except (*_DAMAGE, KeyError) as error:
      raise self._damaged(member.filename, error) from None
    dtype = self._dtype(member.filename, dtype)
    spec = jax.ShapeDtypeStruct(shape, dtype)
    if spec.size * dtype.itemsize != body:
      raise self._damaged(
        member.filename,
        f"{dtype.name}{list(shape)} does not fill its {body} bytes",
      )
    return spec

  def _dtype(self, filename: str, dtype: np.dtype) -> np.dtype:
    """The dtype that the header means."""
    if dtype == np.dtype("V2"):
      return np.dtype(ml_dtypes.bfloat16)
    if dtype.hasobject or dtype.kind not in "biufc":
      raise ValueError(
        f"`--checkpoint` {self.path}: {filename!r} has dtype {dtype}, from"
        " which no numbers can be read back; save it as float32 or bfloat16,"
        " or as .safetensors, which keeps every dtype"
      )
    return dtype.newbyteorder("=")

  def _damaged(self, filename: str, error) -> ValueError:
    detail = " ".join(str(error).split())[:200]
    return ValueError(
      f"`--checkpoint` {self.path} is damaged: {filename!r}: {detail}"
    )

  def read(self, name: str) -> np.ndarray:
    """See the base class."""
    spec = self.shapes[name]
    try:
      with self._archive.open(name + _SUFFIX) as file:
        array = np.lib.format.read_array(file, allow_pickle=False)
        file.read(1)  # At the end of the member its checksum is checked.
    except _DAMAGE as error:
      raise self._damaged(name + _SUFFIX, error) from None
    if array.dtype.kind == "V":
      return np.asarray(array, order="C").view(spec.dtype)
    return np.asarray(array, spec.dtype, order="C")

  def close(self) -> None:
    """See the base class."""
    self._archive.close()


def open_file(path: pathlib.Path) -> NpzCheckpoint:
  """Opens a .npz file.

  Args:
    path: The file.

  Returns:
    The checkpoint.

  Raises:
    ValueError: see `checkpoint.open_checkpoint`.
  """
  try:
    archive = zipfile.ZipFile(path)
  except _DAMAGE as error:
    detail = " ".join(str(error).split())
    raise ValueError(
      f"`--checkpoint` {path} is no .npz file, or a truncated one: {detail}"
    ) from None
  try:
    return NpzCheckpoint(path, archive)
  except BaseException:
    archive.close()
    raise
