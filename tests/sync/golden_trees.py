"""Small trees for which MaxText's own converter is right.

Values come from integer arithmetic, so they are the same on every machine.
"""

import math

import numpy as np

VOCAB, EMBED, EXPERTS, MLP = 24, 16, 2, 192
QUERY_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def values(name, shape):
  """float32 in [-1, 1) from the name and the element's position."""
  salt = sum(ord(c) * 31**i % 2**32 for i, c in enumerate(name))
  index = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(salt)
  x = (index * np.uint64(2654435761)) % np.uint64(2**32)
  return (x / 2**31 - 1).astype(np.float32).reshape(shape)


def stacked(length, block):
  """`block` {name: shape} with a stacked axis at position 1."""
  return {name: (s[0], length, *s[1:]) for name, s in block.items()}


def attention():
  return {
    "query.kernel": (EMBED, QUERY_HEADS, HEAD_DIM),
    "key.kernel": (EMBED, KV_HEADS, HEAD_DIM),
    "value.kernel": (EMBED, KV_HEADS, HEAD_DIM),
    "out.kernel": (QUERY_HEADS, HEAD_DIM, EMBED),
    "query_norm.scale": (HEAD_DIM,),
    "key_norm.scale": (HEAD_DIM,),
  }


def experts(prefix):
  return {
    f"{prefix}.gate.kernel": (EMBED, EXPERTS),
    f"{prefix}.wi_0": (EXPERTS, EMBED, MLP),
    f"{prefix}.wi_1": (EXPERTS, EMBED, MLP),
    f"{prefix}.wo": (EXPERTS, MLP, EMBED),
  }


def under(prefix, tree):
  return {f"{prefix}.{name}": shape for name, shape in tree.items()}


def ends():
  return {
    "token_embedder.embedding": (VOCAB, EMBED),
    "decoder.decoder_norm.scale": (EMBED,),
    "decoder.logits_dense.kernel": (EMBED, VOCAB),
  }


def dense_tree():
  """Qwen3: one stacked axis of three layers."""
  block = under("self_attention", attention())
  block["pre_self_attention_layer_norm.scale"] = (EMBED,)
  block["mlp.wi_0.kernel"] = (EMBED, MLP)
  block["mlp.wo.kernel"] = (MLP, EMBED)
  return ends() | under("decoder.layers", stacked(3, block))


def moe_tree():
  """Qwen3-MoE: one stacked axis of three layers."""
  block = under("self_attention", attention()) | experts("moe_block")
  return ends() | under("decoder.layers", stacked(3, block))


def cycle_tree():
  """Qwen3.5: a cycle of four, linear attention three times, repeated twice."""
  tree = ends()
  for slot in range(4):
    block = experts("mlp.routed_experts")
    block["mlp.shared_expert.wo.kernel"] = (MLP, EMBED)
    block["mlp.shared_expert_gate.kernel"] = (EMBED, 1)
    if slot == 3:
      block |= under("attention.attention", attention())
    else:
      block["attention.A_log"] = (QUERY_HEADS,)
      block["attention.conv1d.kernel"] = (4, 1, EMBED)
    tree |= under(f"decoder.layers.layer_{slot}", stacked(2, block))
  return tree


# name: (tree, layers, cycle, shards of the experts, KV shards)
CASES = {
  "dense": (dense_tree, 3, 1, 1, 1),
  "dense-kv8": (dense_tree, 3, 1, 1, 8),
  "moe-1": (moe_tree, 3, 1, 1, 1),
  "moe-2": (moe_tree, 3, 1, 2, 4),
  "cycle-1": (cycle_tree, 8, 4, 1, 1),
  "cycle-2": (cycle_tree, 8, 4, 2, 4),
}


def arrays(case):
  tree = CASES[case][0]()
  return {name: values(name, shape) for name, shape in tree.items()}
