"""Leaves that keep their dtype on the rollout, whatever `weight_dtype` says.

From the rollout trees of MaxText 0.2.5: these parameters are created with a
dtype of their own. Each row: a pattern of leaves to keep, and a pattern that
some leaf of the tree must match for the row to count, so that a norm of the
same name in another family follows `weight_dtype`.
"""

import collections.abc
import re

_KEPT = (
  # GPT-OSS: the norms around attention.
  (
    r"\.(pre|post)_self_attention_layer_norm\.scale$",
    r"\.GptOssAttention\.",
  ),
  # Olmo 3: norms after attention and MLP, and none before.
  (
    r"\.post_(self_attention|mlp)_layer_norm\.scale$",
    r"\.post_mlp_layer_norm\.scale$",
  ),
  # DeepSeek 3.2: parts of the sparse-attention indexer.
  (
    r"\.indexer\.(k_norm\.(scale|bias)|weights_proj\.kernel)$",
    r"\.indexer\.k_norm\.bias$",
  ),
  # DeepSeek 4: token-to-expert ids, which bfloat16 would corrupt.
  (r"\.tid2eid$", r"\.tid2eid$"),
)


def kept(names: collections.abc.Sequence[str]) -> set[str]:
  """Names of the leaves that keep their dtype.

  Args:
    names: All names of the trainer's tree.

  Returns:
    Those that a family's rule keeps.
  """
  found = set()
  for keep, marker in _KEPT:
    if any(re.search(marker, name) for name in names):
      found.update(name for name in names if re.search(keep, name))
  return found
