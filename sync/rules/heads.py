"""KV heads: which axis of a leaf counts them.

MaxText keeps the key and value projections as `key.kernel` and `value.kernel`,
[embed, kv_heads, head_dim] a layer, with biases [kv_heads, head_dim], or
flattened to [kv_heads * head_dim].
"""

import re

_KV = re.compile(r"(?:^|\.)(?:key|value)\.(kernel|bias)")


def head_axis(
  name: str, block_shape: tuple[int, ...], base_num_kv_heads: int | None
) -> tuple[int, int] | None:
  """Where a leaf has its KV heads.

  Args:
    name: The leaf's name.
    block_shape: Its shape for one layer.
    base_num_kv_heads: The model's KV heads; used for a flattened bias only,
      since layers may have a number of their own.

  Returns:
    The axis of the block and the elements of a head along it, or None for a
    leaf that has no KV heads.
  """
  found = _KV.search(name)
  if found is None or found.end() != len(name):
    return None
  kernel = found.group(1) == "kernel"
  rank = len(block_shape)
  if rank == (3 if kernel else 2):
    return rank - 2, 1
  if kernel or rank != 1 or base_num_kv_heads is None:
    return None
  head_dim, left = divmod(block_shape[0], base_num_kv_heads)
  return None if left else (0, head_dim)


def repeats(heads: int, shards: int) -> int | None:
  """How often each head is repeated so that every shard has one.

  Args:
    heads: KV heads of the layer.
    shards: Tensor-parallel shards of the heads.

  Returns:
    The number, 1 where there are enough heads; None where heads and shards do
    not divide.
  """
  if shards <= heads:
    return 1 if heads % shards == 0 else None
  return shards // heads if shards % heads == 0 else None
