"""What a whole sync's answer is, in plain NumPy.

`convert_reference` takes every stacked leaf apart into layers, then treats
each layer's array on its own: which name, which width, which heads, which
dtype. It shares no code with `plan` and `convert`, so that the two can be
held against each other bit for bit. Slow, one leaf at a time, on the host.
"""

import collections
from collections.abc import Sequence
import fnmatch
import re
from typing import Any

import ml_dtypes
import numpy as np

from laneweave.kernels import reference as kernels
from laneweave.sync import reference_experts, reference_names, reference_tree

# Leaves that keep their dtype whatever `weight_dtype` says, because the model
# code builds them as float32: family, how a tree of it is known, which leaves.
_KEPT = (
  (
    "GPT-OSS",
    r"(.*\.)?GptOss\w+\..*",
    r".*\.(pre|post)_self_attention_layer_norm\.scale",
  ),
  (
    "Olmo 3",
    r".*\.post_mlp_layer_norm\.scale",
    r".*\.(post_self_attention|post_mlp)_layer_norm\.scale",
  ),
  (
    "GPT-3",
    r".*\.pre_self_attention_norm\.bias",
    r".*\.pre_self_attention_norm\.(scale|bias)",
  ),
  (
    "DeepSeek 3.2",
    r".*\.self_attention\.indexer\.weights_proj\.kernel",
    r".*\.self_attention\.indexer\.(weights_proj\.kernel|k_norm\.\w+)",
  ),
  ("DeepSeek 4", r".*\.tid2eid", r".*\.tid2eid"),
)

_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def convert_reference(
  params: Any, cfg: Any, target: Any = None
) -> dict[str, np.ndarray]:
  """The rollout's weights, as they must be after a sync.

  Args:
    params: The trainer's tree: nested or flat, leaves arrays or nnx variables.
    cfg: A SyncConfig.
    target: The rollout's tree, or its shapes and dtypes; it then decides names,
      shapes, dtypes, widths and heads. None: the configuration does.

  Returns:
    Array by canonical name, layers in numeric order.

  Raises:
    ValueError: the tree, the configuration and the target do not fit together;
      names the leaf.
  """
  if cfg.rollout_backend != "maxtext":
    raise ValueError(
      f"`rollout_backend` is {cfg.rollout_backend!r}; the reference knows"
      " 'maxtext'"
    )
  source = reference_tree.weights(params, integer_layers=not cfg.scan_layers)
  if not source:
    raise ValueError("`params` holds no floating-point array of rank >= 1")
  wanted = None
  if target is not None:
    leaves = reference_tree.weights(target, integer_layers=True)
    wanted = {name: leaf.value for name, leaf in leaves.items()}
  conversion = _Conversion(source, cfg, wanted)
  result = {}
  for sources, names in conversion.outputs().items():
    result.update(conversion.convert(sources, names))
  return {name: result[name] for name in sorted(result, key=_numeric)}


class _Conversion:
  """One conversion: the trees, the configuration and where leaves go."""

  def __init__(
    self,
    source: dict[str, reference_tree.Leaf],
    cfg: Any,
    wanted: dict[str, Any] | None,
  ) -> None:
    self.source = source
    self.cfg = cfg
    self.wanted = wanted
    self.places = reference_names.places(source, cfg)
    # Shape of one layer's array, by its name before gate and up are joined.
    self.shapes = {}
    for name, place in self.places.items():
      axes = place.scan_axis
      axes = axes if isinstance(axes, tuple) else (axes,)
      shape = tuple(
        length
        for axis, length in enumerate(source[name].value.shape)
        if axis not in axes
      )
      self.shapes.update(dict.fromkeys(place.targets, shape))
    self.experts = reference_experts.Experts(set(self.shapes), cfg, wanted)
    self.kept = [
      kept
      for _, family, kept in _KEPT
      if any(re.fullmatch(family, name) for name in source)
    ]

  def outputs(self) -> dict[tuple[str, ...], tuple[str, ...]]:
    """Names of the layers made from each source, or from gate and up.

    Returns:
      {source names: output names in stacked order}.

    Raises:
      ValueError: a gate without its up, an output with two sources, or names
        that are not the target's.
    """
    outputs = {}
    for name, place in self.places.items():
      module, _, last = name.rpartition(".")
      if last in ("wi_0", "wi_1"):
        for half in (_join(module, "wi_0"), _join(module, "wi_1")):
          if half not in self.source:
            raise ValueError(f"`{name}` without `{half}`")
        fused = tuple(
          _join(layer.rpartition(".")[0], "wi") for layer in place.targets
        )
        if self._is_fused(fused):
          if last == "wi_0":
            outputs[name, _join(module, "wi_1")] = fused
          continue
      outputs[(name,)] = place.targets
    made = collections.Counter(n for names in outputs.values() for n in names)
    for name, count in made.items():
      if count > 1:
        raise ValueError(f"`{name}` has {count} sources")
    if self.wanted is not None:
      missing = sorted(self.wanted.keys() - made.keys(), key=_numeric)
      extra = sorted(made.keys() - self.wanted.keys(), key=_numeric)
      if missing or extra:
        raise ValueError(
          f"{len(missing)} of {len(self.wanted)} target leaves have no source"
          f" ({', '.join(missing[:8])}) and {len(extra)} converted leaves have"
          f" no target ({', '.join(extra[:8])})"
        )
    return outputs

  def convert(
    self, sources: tuple[str, ...], names: tuple[str, ...]
  ) -> dict[str, np.ndarray]:
    """The layers made from one source, or from gate and up."""
    layers = [
      kernels.unscan(
        np.asarray(self.source[name].value),
        scan_axis=self.places[name].scan_axis,
      )
      for name in sources
    ]
    result = {}
    for name, *arrays in zip(names, *layers, strict=True):
      dtype = self._dtype(name, sources)
      try:
        if name.rpartition(".")[2] in reference_experts.NAMES:
          out = self._expert(name, arrays, dtype)
        else:
          out = self._other(name, arrays[0], dtype)
        self._check_shape(name, out)
      except ValueError as e:
        raise ValueError(f"`{name}` from `{', '.join(sources)}`: {e}") from e
      result[name] = out
    return result

  def _is_fused(self, fused: tuple[str, ...]) -> bool:
    if self.wanted is None:
      return self.cfg.prefuse_moe_weights
    return any(name in self.wanted for name in fused)

  def _check_shape(self, name: str, out: np.ndarray) -> None:
    if self.wanted is not None and out.shape != tuple(self.wanted[name].shape):
      raise ValueError(
        f"shape {list(out.shape)} where the target has"
        f" {list(self.wanted[name].shape)}"
      )

  def _dtype(self, name: str, sources: tuple[str, ...]) -> np.dtype:
    if self.wanted is not None:
      return np.dtype(self.wanted[name].dtype)
    own = np.dtype(self.source[sources[0]].value.dtype)
    if any(re.fullmatch(kept, name) for kept in self.kept):
      return own
    for pattern in self.cfg.keep_dtype:
      if any(fnmatch.fnmatchcase(n, pattern) for n in (name, *sources)):
        return own
    dtype = self.cfg.weight_dtype
    if isinstance(dtype, str):
      dtype = _SHORT_DTYPES.get(dtype, dtype)
      dtype = getattr(ml_dtypes, dtype, dtype)
    return np.dtype(dtype)

  def _expert(
    self, name: str, arrays: Sequence[np.ndarray], dtype: np.dtype
  ) -> np.ndarray:
    """One layer's `wi`, `wi_0`, `wi_1` or `wo`."""
    module, _, last = name.rpartition(".")
    axis = reference_experts.mlp_axis(last)
    if last == "wi" and len(arrays) == 1:
      # A trainer that fuses holds all of gate, then all of up.
      if arrays[0].shape[-1] % 2:
        raise ValueError(f"{arrays[0].shape[-1]} columns are no gate and up")
      arrays = np.split(arrays[0], 2, axis=-1)
    width = arrays[0].shape[axis]
    padded_width = self.experts.padded_width(module, width)
    if last == "wi":
      gate, up = arrays
      (out,) = kernels.fuse_gate_up(
        gate,
        up,
        scan_axis=None,
        shards=self.experts.shards(module),
        padded_width=padded_width,
        lane_size=self.cfg.moe_lane_size,
        dtype=dtype,
      )
    elif padded_width != width:
      (out,) = kernels.pad_lanes(
        arrays[0],
        scan_axis=None,
        axis=axis,
        shards=self.experts.shards(module),
        padded_width=padded_width,
        dtype=dtype,
      )
    else:
      out = kernels.cast(arrays[0], dtype)
    return out

  def _other(self, name: str, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """One layer's array that belongs to no routed expert."""
    heads = self._kv_heads(name)
    if heads is None:
      return kernels.cast(array, dtype)
    # Vectors of [heads * head_dim] are taken apart into their heads.
    by_head = array.reshape(heads, -1) if array.ndim == 1 else array
    (out,) = kernels.repeat_heads(
      by_head,
      scan_axis=None,
      axis=-2,
      repeats=self._repeats(name, heads),
      dtype=dtype,
    )
    return out.reshape(-1) if array.ndim == 1 else out

  def _kv_heads(self, name: str) -> int | None:
    """KV heads in one layer's array; None where there are none."""
    shape = self.shapes[name]
    parts = name.split(".")
    if parts[0] in ("vision_encoder", "audio_encoder") or len(parts) < 2:
      return None
    module, projection, last = ".".join(parts[:-2]), parts[-2], parts[-1]
    if projection == "qkv_proj" and self.wanted is None:
      own, tp = self.cfg.base_num_kv_heads, self.cfg.kv_tp_size
      if own is not None and own < tp:
        raise ValueError(
          f"{own} KV heads lie in one projection with the query heads and"
          f" are not repeated for `kv_tp_size` {tp}"
        )
    # DeepSeek 4 projects keys and values jointly: `wkv`, one compressed head.
    if projection in ("key", "value", "wkv") and last in ("kernel", "bias"):
      if len(shape) > 1:
        return shape[-2]
      kernel = self.shapes.get(_join(module, projection, "kernel"), ())
      return kernel[-2] if len(kernel) > 1 else None
    if projection == "key_norm" and last == "scale":
      # Olmo 3 normalises all heads at once, with one scale a column of all
      # heads. The queries' scales tell, also where there is one KV head.
      query = self.shapes.get(_join(module, "query.kernel"), ())
      scales = self.shapes.get(_join(module, "query_norm.scale"), ())
      if len(query) == 3 and query[1] > 1 and scales == (query[1] * query[2],):
        return shape[0] // query[2]
    return None

  def _repeats(self, name: str, heads: int) -> int:
    """How often the rollout holds each of a leaf's own KV heads."""
    if self.wanted is None:
      tp = self.cfg.kv_tp_size
      if max(heads, tp) % min(heads, tp):
        raise ValueError(f"{heads} KV heads do not divide `kv_tp_size` {tp}")
      return max(tp // heads, 1)
    own, shape = self.shapes[name], tuple(self.wanted[name].shape)
    axis = -2 if len(own) > 1 else -1
    if len(shape) != len(own) or not shape[axis] or shape[axis] % own[axis]:
      raise ValueError(
        f"{heads} KV heads, shape {list(own)}, do not divide the target's"
        f" {list(shape)}"
      )
    return shape[axis] // own[axis]


def _numeric(name: str) -> list[tuple[int, str]]:
  """Sort key that puts layers_10 after layers_9."""
  return [
    (int(piece), "") if piece.isdigit() else (-1, piece)
    for piece in re.split(r"(\d+)", name)
  ]


def _join(*parts: str) -> str:
  return ".".join(part for part in parts if part)
