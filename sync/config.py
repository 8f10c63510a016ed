"""What a sync needs to know, under MaxText's own field names."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from laneweave.kernels import execute

ROLLOUT_BACKENDS = ("maxtext", "vllm_torchax")
_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_FROM_MAXTEXT = (
  "num_decoder_layers",
  "scan_layers",
  "param_scan_axis",
  "inhomogeneous_layer_cycle_interval",
  "prefuse_moe_weights",
  "padded_base_moe_mlp_dim",
  "moe_mlp_tp_size",
  "base_num_kv_heads",
  "kv_tp_size",
  "rollout_tensor_parallelism",
  "rollout_backend",
  "weight_dtype",
  "use_raiden_ffi",
  "weight_sync_debug",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncConfig:
  """Configuration of a sync; field names are MaxText's.

  The first four fields describe the trainer, the others the rollout.

  Attributes:
    num_decoder_layers: Layers of the decoder.
    scan_layers: The trainer stacks its layers in scanned arrays.
    param_scan_axis: Axis of a parameter on which layers are stacked; vectors
      too short for it are stacked on their last axis. None: found from the
      lengths, refused where two axes fit.
    inhomogeneous_layer_cycle_interval: Layers of a scanned block, each under a
      `layer_<slot>` level of its own, when greater than 1.
    prefuse_moe_weights: The rollout holds expert gate and up in one `wi`.
    padded_base_moe_mlp_dim: Padded expert width on the rollout, one of gate
      and up, over all shards; None with `prefuse_moe_weights`: the next
      multiple of 2 * 128 lanes per shard.
    moe_mlp_tp_size: Tensor-parallel shards of the expert mlp axis.
    moe_lane_size: 0: gate then up per shard; 128: alternating in chunks of 128
      lanes.
    base_num_kv_heads: KV heads of the model; needed where a bias keeps heads
      and head_dim in one axis.
    kv_tp_size: Tensor-parallel shards of the KV heads; heads are repeated
      until each shard has one.
    rollout_tensor_parallelism: Tensor-parallel size of the rollout, -1: not
      given. Counts as `moe_mlp_tp_size` where that is 1, as in MaxText.
    rollout_backend: "maxtext" or "vllm_torchax".
    weight_dtype: dtype of the rollout's weights.
    keep_dtype: Patterns (`fnmatch`) of names that keep the source's dtype.
    use_raiden_ffi: True, False, or None: decided at run time.
    weight_sync_debug: Wait after each source parameter and name one that
      fails.
    kernel_backend: "auto", "mosaic", "interpret" or "xla".
  """

  num_decoder_layers: int
  scan_layers: bool = True
  param_scan_axis: int | None = 1
  inhomogeneous_layer_cycle_interval: int = 1
  prefuse_moe_weights: bool = False
  padded_base_moe_mlp_dim: int | None = None
  moe_mlp_tp_size: int = 1
  moe_lane_size: int = 0
  base_num_kv_heads: int | None = None
  kv_tp_size: int = 1
  rollout_tensor_parallelism: int = -1
  rollout_backend: str = "maxtext"
  weight_dtype: str = "bfloat16"
  keep_dtype: tuple[str, ...] = ()
  use_raiden_ffi: bool | None = None
  weight_sync_debug: bool = False
  kernel_backend: str = "auto"

  def __post_init__(self):
    problems = []

    def at_least(field: str, least: int, optional: bool = False):
      value = getattr(self, field)
      if optional and value is None:
        return
      if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        problems.append(f"`{field}` {value!r} is not a whole number")
      elif value < least:
        problems.append(f"`{field}` {value} must be at least {least}")

    at_least("num_decoder_layers", 1)
    at_least("param_scan_axis", 0, optional=True)
    at_least("inhomogeneous_layer_cycle_interval", 1)
    at_least("padded_base_moe_mlp_dim", 1, optional=True)
    at_least("moe_mlp_tp_size", 1)
    at_least("base_num_kv_heads", 1, optional=True)
    at_least("kv_tp_size", 1)
    at_least("rollout_tensor_parallelism", -1)
    for field in ("scan_layers", "prefuse_moe_weights", "weight_sync_debug"):
      if not isinstance(getattr(self, field), (bool, np.bool_)):
        problems.append(f"`{field}` {getattr(self, field)!r} must be a bool")
    if self.moe_lane_size not in (0, 128):
      problems.append(
        f"`moe_lane_size` {self.moe_lane_size!r} must be 0 (gate then up per"
        " shard) or 128 (chunks of 128 lanes)"
      )
    if self.rollout_backend not in ROLLOUT_BACKENDS:
      problems.append(
        f"`rollout_backend` {self.rollout_backend!r} is not one of"
        f" {', '.join(ROLLOUT_BACKENDS)}"
      )
    if self.kernel_backend not in execute.BACKENDS:
      problems.append(
        f"`kernel_backend` {self.kernel_backend!r} is not one of"
        f" {', '.join(execute.BACKENDS)}"
      )
    if self.use_raiden_ffi not in (None, True, False):
      problems.append(
        f"`use_raiden_ffi` {self.use_raiden_ffi!r} must be None, True or False"
      )
    if isinstance(self.keep_dtype, str):
      problems.append(
        f"`keep_dtype` {self.keep_dtype!r} must be a tuple of patterns"
      )
    else:
      object.__setattr__(self, "keep_dtype", tuple(self.keep_dtype))
    try:
      object.__setattr__(self, "weight_dtype", dtype_name(self.weight_dtype))
    except ValueError as error:
      problems.append(f"`weight_dtype` {error}")
    if problems:
      raise ValueError("; ".join(problems))

  @classmethod
  def from_maxtext(cls, config: Any, **overrides: Any) -> "SyncConfig":
    """Reads a MaxText configuration.

    Args:
      config: An object with MaxText's typed attributes.
      **overrides: Fields to set otherwise, and those MaxText does not have.

    Returns:
      The configuration.

    Raises:
      ValueError: attributes that `config` does not have, all of them named.
    """
    wanted = [f for f in _FROM_MAXTEXT if f not in overrides]
    missing = [f for f in wanted if not hasattr(config, f)]
    if missing:
      raise ValueError(
        f"the MaxText configuration has no {', '.join(missing)}; pass a"
        " complete one (maxtext 0.2.5 has every field), or the missing fields"
        " as overrides"
      )
    return cls(**{f: getattr(config, f) for f in wanted}, **overrides)

  @property
  def weight_numpy_dtype(self) -> np.dtype:
    """`weight_dtype` as a dtype."""
    return jnp.dtype(self.weight_dtype)

  @property
  def resolved_moe_shards(self) -> int:
    """Shards of the expert mlp axis: MaxText's own order of fields."""
    if self.moe_mlp_tp_size > 1:
      return self.moe_mlp_tp_size
    return max(1, self.rollout_tensor_parallelism)


def dtype_name(dtype: Any) -> str:
  """The name of a floating-point dtype.

  Args:
    dtype: A name ("bf16" and "fp32" too), a dtype, or an enum whose value is
      one, as MaxText's.

  Returns:
    Its NumPy name.

  Raises:
    ValueError: not a floating-point dtype.
  """
  value = getattr(dtype, "value", dtype)
  value = _ALIASES.get(value, value) if isinstance(value, str) else value
  try:
    found = None if value is None else jnp.dtype(value)
  except TypeError:
    found = None
  if found is None or not jnp.issubdtype(found, jnp.floating):
    raise ValueError(
      f"{dtype!r} is not a floating-point dtype, such as bfloat16 or float32"
    )
  return found.name
