"""Leaves that keep their dtype on the rollout, whatever `weight_dtype` says.

From the rollout trees of MaxText 0.2.5: these parameters are created with a
dtype of their own, or with that of `dtype_mm`, the encoders' field.
"""

import collections.abc
import dataclasses
import re


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rule:
  """One family's rule.

  Attributes:
    keep: Leaves that keep their dtype.
    marker: Some leaf of the tree must match this for the rule to count, so
      that a norm of the same name in another family is cast.
    but: Leaves that are cast nevertheless; "" for none.
  """

  keep: str
  marker: str
  but: str = ""


_RULES = (
  # GPT-3: the norms before attention, with their biases.
  _Rule(
    keep=r"\.pre_self_attention_norm\.(scale|bias)$",
    marker=r"\.pre_self_attention_norm\.bias$",
  ),
  # GPT-OSS: the norms around attention.
  _Rule(
    keep=r"\.(pre|post)_self_attention_layer_norm\.scale$",
    marker=r"\.GptOss(Attention|Mlp)\.",
  ),
  # Olmo 3: norms after attention and MLP, and none before.
  _Rule(
    keep=r"\.post_(self_attention|mlp)_layer_norm\.scale$",
    marker=r"\.post_mlp_layer_norm\.scale$",
  ),
  # DeepSeek 3.2: parts of the sparse-attention indexer.
  _Rule(
    keep=r"\.self_attention\.indexer\."
    r"(k_norm\.(scale|bias)|weights_proj\.kernel)$",
    marker=r"\.self_attention\.indexer\.",
  ),
  # DeepSeek 4: token-to-expert ids, which bfloat16 would corrupt.
  _Rule(keep=r"\.tid2eid$", marker=r"\.tid2eid$"),
  # Gemma 4's image encoder: its table of positions.
  _Rule(
    keep=r"^vision_encoder\..*\.pos_emb_param$",
    marker=r"^vision_encoder\..*\.vision_entry\.",
  ),
  # Other encoders of images: all but their attention.
  _Rule(
    keep=r"^vision_encoder\.",
    marker=r"^vision_encoder\..*\.(layers|blocks|encoderblock)_\d+\.",
    but=r"\.(query|key|value|out)\.(kernel|bias)$|soft_embedding_norm",
  ),
  # Encoders of sound: their norms.
  _Rule(
    keep=r"^audio_encoder\..*\.(layernorm_post|\w+_layer_norm)\.",
    marker=r"^audio_encoder\.",
  ),
)


def kept(names: collections.abc.Sequence[str]) -> set[str]:
  """Names of the leaves that keep their dtype.

  Args:
    names: All names of the trainer's tree.

  Returns:
    Those that a family's rule keeps.
  """
  found = set()
  for rule in _RULES:
    if any(re.search(rule.marker, name) for name in names):
      found.update(
        name
        for name in names
        if re.search(rule.keep, name)
        and not (rule.but and re.search(rule.but, name))
      )
  return found
