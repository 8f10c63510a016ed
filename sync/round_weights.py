"""Weights that change each round, the same bits on a device and in NumPy.

A trainer would change its weights by training. Here each round flips some of
the upper mantissa bits of every number: round 1 leaves the checkpoint as it
is, and every later round has its own pattern until they repeat. Sign and
exponent stay, as do zeros, denormals, infinities and NaN, so that no rounding
mode or flush-to-zero setting can make two machines differ.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_MOST_BITS = 7  # Mantissa bits of bfloat16: what is flipped outlives the cast.
_STRIDE = 37  # Odd, so that a cycle of rounds meets every pattern.


def _fields(dtype: Any) -> tuple[np.dtype, int, int, int]:
  """Integer dtype of the bits; bits to flip; their shift; exponent mask."""
  info = jnp.finfo(dtype)
  width = np.dtype(dtype).itemsize * 8
  count = min(info.nmant, _MOST_BITS)
  exponent = ((1 << info.nexp) - 1) << info.nmant
  return np.dtype(f"uint{width}"), count, info.nmant - count, exponent


def pattern(dtype: Any, round_: int) -> int:
  """Bits that a round flips in a number.

  Args:
    dtype: A floating-point dtype.
    round_: The round, from 1.

  Returns:
    The bits, as an integer of the dtype's width.
  """
  _, count, shift, _ = _fields(dtype)
  return ((round_ - 1) * _STRIDE % (1 << count)) << shift


def in_numpy(x: np.ndarray, round_: int) -> np.ndarray:
  """A round's weights.

  Args:
    x: The checkpoint's.
    round_: The round, from 1.

  Returns:
    A new array.
  """
  integer, _, _, mask = _fields(x.dtype)
  bits = np.ascontiguousarray(x).view(integer)
  exponent = bits & integer.type(mask)
  ordinary = (exponent != 0) & (exponent != integer.type(mask))
  flip = np.where(ordinary, integer.type(pattern(x.dtype, round_)), 0)
  return (bits ^ flip.astype(integer)).view(x.dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _flip(arrays, flips):
  def one(x, flip):
    integer, _, _, mask = _fields(x.dtype)
    bits = jax.lax.bitcast_convert_type(x, integer)
    exponent = bits & integer.type(mask)
    ordinary = (exponent != 0) & (exponent != integer.type(mask))
    flipped = jnp.where(ordinary, bits ^ flip, bits)
    return jax.lax.bitcast_convert_type(flipped, x.dtype)

  return jax.tree.map(one, arrays, flips)


def step(
  arrays: dict[str, jax.Array], before: int, after: int
) -> dict[str, jax.Array]:
  """Turns one round's weights into another's, in place on their devices.

  Args:
    arrays: Weights of round `before`, by name; given up.
    before: The round they are of, from 1; the checkpoint itself is round 1.
    after: The round that is wanted.

  Returns:
    Weights of round `after`, placed as they were.
  """
  if pattern(jnp.float32, before) == pattern(jnp.float32, after):
    return arrays
  flips = {
    name: _fields(x.dtype)[0].type(
      pattern(x.dtype, before) ^ pattern(x.dtype, after)
    )
    for name, x in arrays.items()
  }
  return _flip(arrays, flips)
