"""KV heads: which axis of a leaf counts them.

MaxText keeps the key and value projections as `key.kernel` and `value.kernel`,
[embed, kv_heads, head_dim] a layer, with biases [kv_heads, head_dim], or
flattened to [kv_heads * head_dim]; DeepSeek 4 has one `wkv.kernel` for both. A
rollout split in more parts than it has heads is built with as many heads as
parts (`base_num_kv_heads`, `global_num_kv_heads`), those of encoders of images
and sound excepted.
"""

import dataclasses
import re

_KV = re.compile(r"(?:.*\.)?(?:key|value|wkv)\.(kernel|bias)")
_KEY_NORM = "key_norm.scale"
_ENCODER = re.compile(r"(?:^|\.)(?:vision|audio)_encoder\.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
  """KV heads of a leaf.

  Attributes:
    axis: Axis of the block that counts them.
    group: Elements of a head along it; 0: not known.
    count: Number of heads; 0: not known.
  """

  axis: int
  group: int
  count: int


def kernel_beside(name: str) -> str | None:
  """Name of the kernel whose heads a KV bias or a key norm follows, or None."""
  if _is_kv(name, "bias"):
    return name.removesuffix("bias") + "kernel"
  if _is_key_norm(name):
    return name.removesuffix(_KEY_NORM) + "key.kernel"
  return None


def find(
  name: str,
  block_shape: tuple[int, ...],
  kernel_block: tuple[int, ...] | None,
  base_num_kv_heads: int | None,
) -> Heads | None:
  """Where a leaf has its KV heads.

  Args:
    name: The leaf's name.
    block_shape: Its shape for one layer.
    kernel_block: For a bias or a key norm: the shape of its kernel for one
      layer, if known.
    base_num_kv_heads: The model's KV heads; used for flattened heads without a
      kernel that tells, since layers may have a number of their own.

  Returns:
    The heads, or None for a leaf that has none.
  """
  rank = len(block_shape)
  if _is_key_norm(name):
    return _norm_heads(block_shape, kernel_block)
  kernel = _is_kv(name, "kernel")
  if not kernel and not _is_kv(name, "bias"):
    return None
  apart = 3 if kernel else 2
  if rank == apart:
    return Heads(axis=rank - 2, group=1, count=block_shape[rank - 2])
  if rank != apart - 1:
    return None
  axis, width = rank - 1, block_shape[rank - 1]
  if kernel_block is not None and len(kernel_block) == 3:
    count, head_dim = kernel_block[1:]
    if count * head_dim == width:
      return Heads(axis=axis, group=head_dim, count=count)
  if base_num_kv_heads is not None and width % base_num_kv_heads == 0:
    return Heads(
      axis=axis, group=width // base_num_kv_heads, count=base_num_kv_heads
    )
  return Heads(axis=axis, group=0, count=0)


def _is_key_norm(name):
  """Whether a name is that of a norm of the keys."""
  return name.endswith(_KEY_NORM) and _ENCODER.search(name) is None


def _norm_heads(block_shape, kernel_block):
  """Heads of a key norm that is over all heads at once, as Olmo 3's is.

  A norm of single heads, [head_dim], is the same for every head and has none.
  """
  if kernel_block is None or len(kernel_block) != 3:
    return None
  count, head_dim = kernel_block[1:]
  if count == 1 or block_shape != (count * head_dim,):
    return None
  return Heads(axis=0, group=head_dim, count=count)


def _is_kv(name, part):
  """Whether a name is that of a KV kernel or bias of a decoder."""
  found = _KV.fullmatch(name)
  return (
    found is not None
    and found.group(1) == part
    and _ENCODER.search(name) is None
  )


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
