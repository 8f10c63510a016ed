"""Logical axis names of parameters, found from their names and ranks.

A checkpoint does not record the logical axes its model code declared, so they
are looked up here: the last parts of the canonical name and the rank without
stacked axes decide. The names are MaxText's. A leaf that is in no row of the
table has unnamed axes, which no rule but `*` shards.
"""

import re

# Last parts of the name; then, by rank, the axes. None: an axis without name.
_TABLE: tuple[tuple[str, tuple[tuple[str | None, ...], ...]], ...] = (
  (r"embedding", (("vocab", "embed_vocab"),)),
  (r"logits_dense\.kernel", (("embed_vocab", "vocab"),)),
  # Attention.
  (r"query\.kernel", (("embed_attn", "q_heads", "kv"),)),
  (r"query\.bias", (("q_heads", "kv"),)),
  (
    r"(key|value|wkv)\.kernel",
    (("embed_attn", "kv_heads", "kv_head_dim"),),
  ),
  (r"(key|value)\.bias", (("kv_heads", "kv_head_dim"),)),
  (r"out\.kernel", (("heads", "kv", "embed_attn"), ("mlp", "embed_attn"))),
  (r"out\.bias", (("embed_attn",),)),
  # Latent attention.
  (r"wq_a\.kernel", (("embed_attn", "q_lora"),)),
  (r"wq_b\.kernel", (("q_lora", "q_heads", "kv"),)),
  (r"wkv_a\.kernel", (("embed_attn", "kv_lora"),)),
  (r"wkv_b\.kernel", (("kv_lora", "kv_heads", "kv_head_dim"),)),
  (r"o_a_proj\.kernel", (("o_groups", None, "o_lora"),)),
  (r"o_b_proj\.kernel", (("o_lora", "embed_attn"),)),
  (r"(wk|kv_proj|gate_proj)\.kernel", (("embed_attn", "kv"),)),
  (r"weights_proj\.kernel", (("embed_attn", None),)),
  # Linear attention.
  (r"in_proj_\w+\.kernel", (("embed_attn", "gdn_head"),)),
  (r"out_proj\.kernel", (("gdn_head", "embed_attn"),)),
  # Experts, routed (rank 3) and dense or shared.
  (r"(wi|wi_0|wi_1)", (("exp", "embed_moe", "mlp_moe"),)),
  (r"wo", (("exp", "mlp_moe", "embed_moe"),)),
  (r"wi_[01]_bias", (("exp", "activation_mlp"),)),
  (r"wi_bias", (("exp", "activation_mlp"),)),
  (r"wo_bias", (("exp", "activation_embed"),)),
  (r"wi_[01]\.kernel", (("embed", "mlp"),)),
  (r"wo\.kernel", (("mlp", "embed"),)),
  (r"per_expert_scale", (("exp",),)),
  (r"pre_forward_scale_\d+", (("embed",),)),
  (r"(gate|shared_expert_gate)\.kernel", (("embed", None),)),
  (r"(hc_fn|(pre|post|res)_alpha)", (("activation_embed", None),)),
  (r"scale", (("norm",),)),
)

_ROWS = tuple(
  (re.compile(rf"(?:.*\.)?{pattern}"), {len(axes): axes for axes in choices})
  for pattern, choices in _TABLE
)

# A rule for the family holds for each member that has no rule of its own.
_FAMILY = {
  "embed_attn": "embed",
  "embed_vocab": "embed",
  "embed_moe": "embed",
  "activation_embed": "embed",
  "mlp_moe": "mlp",
  "activation_mlp": "mlp",
}

KNOWN = tuple(
  sorted(
    {a for _, c in _TABLE for axes in c for a in axes if a is not None}
    | set(_FAMILY.values())
  )
)


def of_block(name: str, rank: int) -> tuple[str | None, ...]:
  """Logical axes of a parameter of one layer.

  Args:
    name: Canonical dotted name, of the trainer or of the rollout.
    rank: Its rank without stacked axes.

  Returns:
    One name for each axis; None where nothing is known.
  """
  for pattern, choices in _ROWS:
    if pattern.fullmatch(name) and rank in choices:
      return choices[rank]
  return (None,) * rank


def of_stacked(
  name: str, rank: int, scan_axes: tuple[int, ...]
) -> tuple[str | None, ...]:
  """Logical axes of a parameter with stacked axes.

  Args:
    name: Canonical dotted name.
    rank: Its rank, stacked axes included.
    scan_axes: Positions of the stacked axes.

  Returns:
    One name for each axis; the stacked ones are `layers`.
  """
  block = iter(of_block(name, rank - len(scan_axes)))
  return tuple("layers" if a in scan_axes else next(block) for a in range(rank))


def family(axis: str) -> str:
  """The axis whose rule stands in where `axis` has none; often itself."""
  return _FAMILY.get(axis, axis)
