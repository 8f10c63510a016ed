"""What every kernel's answer is, in plain NumPy.

The same signatures as the kernels, written the obvious way and sharing no
code with them: a stacked axis is moved to the front and indexed, shards are
`np.split`, padding is `np.pad`, heads are `np.repeat`. Arrays in, arrays out;
`backend` is accepted so that a call can be pointed at either, and ignored.

A *block* is one layer's array: the source without its stacked axis or axes.
Results are fresh C-ordered arrays that share no memory with the source.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from laneweave.kernels.reference_fingerprint import (
  fingerprint,
  fingerprint_many,
)

__all__ = [
  "cast",
  "fingerprint",
  "fingerprint_many",
  "fuse_gate_up",
  "pad_lanes",
  "repeat_heads",
  "unscan",
]

_FLOAT32 = np.dtype(np.float32)
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT16 = np.dtype(np.float16)


def cast(
  x: np.ndarray,
  dtype: npt.DTypeLike | None = None,
  *,
  backend: str = "auto",
) -> np.ndarray:
  """`x` rounded to `dtype`: to nearest, ties to even.

  NaN stays NaN, infinities and -0.0 are kept. A NaN becomes 0x7fc0 in bfloat16
  and 0x7e00 in float16, each with its sign.

  Args:
    x: Array of any shape.
    dtype: dtype of the result; None or `x`'s own: bits unchanged.
    backend: Ignored.

  Returns:
    A new C-ordered array of `x`'s shape.

  Raises:
    ValueError: not (float32 or bfloat16) to (bfloat16, float32 or float16).
  """
  del backend
  x = np.asarray(x)
  dtype = x.dtype if dtype is None else np.dtype(dtype)
  if dtype == x.dtype:
    return np.array(x, order="C")
  if x.dtype not in (_FLOAT32, _BFLOAT16) or dtype not in (
    _FLOAT32,
    _BFLOAT16,
    _FLOAT16,
  ):
    raise ValueError(
      f"`dtype`: no cast from {x.dtype} to {dtype}; float32 and bfloat16 go"
      " to bfloat16, float32 and float16, others only to themselves"
    )
  with np.errstate(over="ignore", invalid="ignore"):
    # By way of float32, which holds every bfloat16 exactly.
    y = x.astype(np.float32).astype(dtype, order="C")
  if dtype == _FLOAT16:
    sign = np.where(np.signbit(x), np.uint16(0x8000), np.uint16(0))
    bits = np.where(np.isnan(x), sign | np.uint16(0x7E00), y.view(np.uint16))
    y = bits.view(np.float16)
  return y


def unscan(
  x: np.ndarray,
  *,
  scan_axis: int | tuple[int, int] | None = 1,
  dtype: npt.DTypeLike | None = None,
  backend: str = "auto",
) -> tuple[np.ndarray, ...]:
  """One array per layer of a stacked array.

  Args:
    x: Stacked array.
    scan_axis: Position of the stacked axis; two positions, outermost first,
      for a doubly stacked array; None for an array that is not stacked.
    dtype: dtype of the results; None: `x`'s own.
    backend: Ignored.

  Returns:
    The blocks in stacked order: index of the outermost stacked axis first.

  Raises:
    ValueError: `scan_axis` names no axis of `x`, or one axis twice.
  """
  del backend
  return tuple(cast(block, dtype) for block in _blocks(x, scan_axis))


def fuse_gate_up(
  gate: np.ndarray,
  up: np.ndarray,
  *,
  scan_axis: int | tuple[int, int] | None = 1,
  shards: int = 1,
  padded_width: int | None = None,
  lane_size: int = 0,
  dtype: npt.DTypeLike | None = None,
  backend: str = "auto",
) -> tuple[np.ndarray, ...]:
  """Gate and up projections joined along the last axis, shard by shard.

  Every shard's gate and up are padded with zeros at their own end. Then, with
  `lane_size` 0, a shard is its gate followed by its up; otherwise chunks of
  `lane_size` columns of gate and up alternate inside the shard.

  Args:
    gate: [..., mlp] with stacked axes.
    up: As `gate`.
    scan_axis: As in `unscan`.
    shards: Shards of the mlp axis.
    padded_width: Width of gate, and of up, over all shards once padded; None:
      as it is.
    lane_size: Columns in one chunk, or 0 for plain concatenation.
    dtype: dtype of the results; None: the sources' own.
    backend: Ignored.

  Returns:
    One array per layer, [..., 2 * padded_width].

  Raises:
    ValueError: gate and up differ in shape or dtype, widths do not divide by
      the shards, or a padded shard is no multiple of `lane_size`.
  """
  del backend
  gate, up = np.asarray(gate), np.asarray(up)
  if gate.shape != up.shape or gate.dtype != up.dtype:
    raise ValueError(
      f"`up` is {up.dtype}{list(up.shape)} but `gate` is"
      f" {gate.dtype}{list(gate.shape)}; they must match"
    )
  if lane_size < 0:
    raise ValueError(f"`lane_size` is {lane_size}; it is 0 or a chunk width")
  fused = []
  for g, u in zip(
    _blocks(gate, scan_axis), _blocks(up, scan_axis), strict=True
  ):
    pieces = []
    for g_shard, u_shard in zip(
      _padded_shards(g, -1, shards, padded_width, "gate"),
      _padded_shards(u, -1, shards, padded_width, "up"),
      strict=True,
    ):
      if lane_size == 0:
        pieces += [g_shard, u_shard]
        continue
      width = g_shard.shape[-1]
      if width % lane_size:
        raise ValueError(
          f"`padded_width`: {width} columns a shard are no multiple of"
          f" `lane_size` {lane_size}; pad to one, or use `lane_size` 0"
        )
      chunks = width // lane_size
      for g_chunk, u_chunk in zip(
        np.split(g_shard, chunks, axis=-1),
        np.split(u_shard, chunks, axis=-1),
        strict=True,
      ):
        pieces += [g_chunk, u_chunk]
    fused.append(cast(np.concatenate(pieces, axis=-1), dtype))
  return tuple(fused)


def pad_lanes(
  x: np.ndarray,
  *,
  scan_axis: int | tuple[int, int] | None = 1,
  axis: int = -2,
  shards: int = 1,
  padded_width: int,
  dtype: npt.DTypeLike | None = None,
  backend: str = "auto",
) -> tuple[np.ndarray, ...]:
  """One axis padded with zeros at the end of every one of its shards.

  Args:
    x: Stacked array, e.g. `wo` [experts, layers, mlp, embed].
    scan_axis: As in `unscan`.
    axis: The axis to pad, counted on the block.
    shards: Shards of that axis.
    padded_width: Its length over all shards once padded.
    dtype: dtype of the results; None: `x`'s own.
    backend: Ignored.

  Returns:
    One array per layer.

  Raises:
    ValueError: no such axis, a length that does not divide by the shards, or
      `padded_width` below the length.
  """
  del backend
  return tuple(
    cast(
      np.concatenate(
        _padded_shards(block, axis, shards, padded_width, "x"), axis=axis
      ),
      dtype,
    )
    for block in _blocks(x, scan_axis)
  )


def repeat_heads(
  x: np.ndarray,
  *,
  scan_axis: int | tuple[int, int] | None = 1,
  axis: int = -2,
  repeats: int,
  dtype: npt.DTypeLike | None = None,
  backend: str = "auto",
) -> tuple[np.ndarray, ...]:
  """Every head `repeats` times, its copies side by side.

  Args:
    x: Stacked array, e.g. a key kernel [embed, layers, kv_heads, head_dim].
    scan_axis: As in `unscan`.
    axis: The axis of heads, counted on the block.
    repeats: Copies of each head.
    dtype: dtype of the results; None: `x`'s own.
    backend: Ignored.

  Returns:
    One array per layer; source head h is heads h * repeats to
    h * repeats + repeats - 1.

  Raises:
    ValueError: no such axis, or `repeats` below 1.
  """
  del backend
  if repeats < 1:
    raise ValueError(f"`repeats` is {repeats}; it must be 1 or more")
  return tuple(
    cast(np.repeat(block, repeats, axis=_axis(block, axis, "axis")), dtype)
    for block in _blocks(x, scan_axis)
  )


def _axis(x: np.ndarray, axis: int, what: str) -> int:
  """`axis` counted from the front, or an error that names it `what`."""
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(
      f"`{what}` {axis} is no axis of an array of shape {list(x.shape)}"
    )
  return axis % x.ndim


def _blocks(
  x: np.ndarray, scan_axis: int | tuple[int, int] | None
) -> list[np.ndarray]:
  """The per-layer views of `x`, in stacked order."""
  x = np.asarray(x)
  if scan_axis is None:
    return [x]
  if isinstance(scan_axis, tuple):
    outer, inner = (_axis(x, axis, "scan_axis") for axis in scan_axis)
    if outer == inner:
      raise ValueError(f"`scan_axis` {scan_axis} names one axis twice")
    x = np.moveaxis(x, (outer, inner), (0, 1))
    return [x[i, j] for i in range(x.shape[0]) for j in range(x.shape[1])]
  x = np.moveaxis(x, _axis(x, scan_axis, "scan_axis"), 0)
  return [x[i] for i in range(x.shape[0])]


def _padded_shards(
  block: np.ndarray,
  axis: int,
  shards: int,
  padded_width: int | None,
  what: str,
) -> list[np.ndarray]:
  """The shards of one axis, each with zeros at its end."""
  axis = _axis(block, axis, "axis")
  width: int = block.shape[axis]
  padded = width if padded_width is None else padded_width
  if shards < 1 or width % shards:
    raise ValueError(
      f"`{what}`: width {width} does not divide into {shards} shards"
    )
  if padded < width or padded % shards:
    raise ValueError(
      f"`padded_width` {padded} must be at least the width {width} of"
      f" `{what}` and divide into {shards} shards"
    )
  pad = [(0, 0)] * block.ndim
  pad[axis] = (0, (padded - width) // shards)
  return [np.pad(shard, pad) for shard in np.split(block, shards, axis=axis)]
