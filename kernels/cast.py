"""Rounding between the floating-point types a sync meets.

Round to nearest, ties to even. NaN stays NaN, infinities and -0.0 are kept.
A NaN rounded to float16 becomes the quiet NaN 0x7e00 with its sign, on every
backend: XLA and NumPy keep different payload bits, and a rollout must not
depend on which of the two made its weights. A NaN rounded to bfloat16 is
0x7fc0 with its sign in XLA and in ml_dtypes alike.
"""

import jax
import jax.numpy as jnp
import numpy as np

SOURCES = (jnp.dtype("float32"), jnp.dtype("bfloat16"))
TARGETS = (*SOURCES, jnp.dtype("float16"))


def check_cast(source_dtype: np.dtype, dtype: np.dtype, what: str) -> None:
  """Refuses a pair of dtypes that no backend rounds between.

  Args:
    source_dtype: dtype of the source.
    dtype: dtype wanted.
    what: What the error calls the array.

  Raises:
    TypeError: the pair is not supported.
  """
  same = source_dtype == dtype and source_dtype.itemsize <= 4
  if same or (source_dtype in SOURCES and dtype in TARGETS):
    return
  raise TypeError(
    f"`{what}` cannot be cast from {source_dtype.name} to {dtype.name}:"
    " supported are float32 and bfloat16 to bfloat16, float32 and float16,"
    " and any floating dtype of up to 4 bytes to itself"
  )


def round_to(x: jax.Array, dtype: np.dtype) -> jax.Array:
  """`x` rounded to `dtype`, as plain array code.

  Args:
    x: Array of any shape, float32 or bfloat16.
    dtype: dtype of the result.

  Returns:
    Array of `x`'s shape.
  """
  if x.dtype == dtype:
    return x
  y = x.astype(dtype)
  if dtype != jnp.float16:
    return y
  bits = jax.lax.bitcast_convert_type(y, jnp.uint16)
  quiet = (bits & np.uint16(0x8000)) | np.uint16(0x7E00)
  return jax.lax.bitcast_convert_type(
    jnp.where(jnp.isnan(x), quiet, bits), dtype
  )


def float16_bits(x: jax.Array) -> jax.Array:
  """float16 bit patterns of float32 `x`, by 32-bit integer arithmetic.

  For kernels: Mosaic does not pack float16 vectors on any generation up to
  TPU7x ("failed to legalize xir.pack_subelements"), so the bits are made in
  int32 registers.

  Args:
    x: float32 array of any shape.

  Returns:
    int32 array of `x`'s shape, the bits in its low half.
  """
  b = jax.lax.bitcast_convert_type(x, jnp.int32)
  magnitude = b & 0x7FFFFFFF
  sign = jax.lax.shift_right_logical(b, 16) & 0x8000
  # Normal float16: rebias the exponent (127 - 15) and round 13 bits away.
  odd = jax.lax.shift_right_logical(magnitude, 13) & 1
  normal = jax.lax.shift_right_logical(
    magnitude - ((127 - 15) << 23) + 0xFFF + odd, 13
  )
  # Subnormal float16: adding 0.5 aligns the last float16 bit with the last
  # float32 bit, so the hardware's own rounding does the work.
  aligned = jax.lax.bitcast_convert_type(magnitude, jnp.float32) + 0.5
  subnormal = jax.lax.bitcast_convert_type(aligned, jnp.int32) - 0x3F000000
  tiny = magnitude < (113 << 23)
  bits = jnp.where(tiny, subnormal, normal)
  # 65520 and above round to infinity; the carry out of `normal` gives exactly
  # that from 65520 to the first value whose exponent would overflow the field.
  bits = jnp.where(magnitude >= 0x47800000, 0x7C00, bits)
  bits = jnp.where(magnitude > 0x7F800000, 0x7E00, bits)
  return bits | sign
