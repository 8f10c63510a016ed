"""What a whole sync's answer is, in plain NumPy.

`convert_reference` takes every stacked leaf apart into layers, then treats
each layer's array on its own: which name, which width, which heads, which
dtype. It shares no code with `plan` and `convert`, so that the two can be
held against each other bit for bit. Slow, one leaf at a time, on the host.
"""

import collections
import fnmatch
import math
import re
from typing import Any

import ml_dtypes
import numpy as np

from laneweave.kernels import reference as kernels
from laneweave.sync import reference_names as names_lib

# The two-lane rule: a shard of the experts' MLP axis is a multiple of this.
_TWO_LANES = 2 * 128

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
        "DeepSeek 3.2",
        r".*\.self_attention\.indexer\.weights_proj\.kernel",
        r".*\.self_attention\.indexer\.(weights_proj\.kernel|k_norm\.\w+)",
    ),
    ("DeepSeek 4", r".*\.tid2eid", r".*\.tid2eid"),
)


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
  source = names_lib.weights(params, integer_layers=not cfg.scan_layers)
  if not source:
    raise ValueError("`params` holds no floating-point array of rank >= 1")
  wanted = None
  if target is not None:
    wanted = {
        name: leaf.value
        for name, leaf in names_lib.weights(target, integer_layers=True).items()
    }
  return _Conversion(source, cfg, wanted).run()


class _Conversion:
  """One conversion: the trees, the configuration and where leaves go."""

  def __init__(self, source, cfg, wanted):
    self.source = source
    self.cfg = cfg
    self.wanted = wanted
    self.places = names_lib.places(source, cfg)
    # Shape of one layer's array, by its name before gate and up are joined.
    self.shapes = {}
    for name, place in self.places.items():
      stacked = place.scan_axis
      stacked = stacked if isinstance(stacked, tuple) else (stacked,)
      shape = tuple(
          length
          for axis, length in enumerate(source[name].value.shape)
          if axis not in stacked
      )
      self.shapes.update(dict.fromkeys(place.targets, shape))

  def run(self):
    outputs = self._outputs()
    self._check_names({name for group in outputs.values() for name in group})
    result = {}
    for sources, group in outputs.items():
      layers = [
          kernels.unscan(
              np.asarray(self.source[name].value),
              scan_axis=self.places[name].scan_axis,
          )
          for name in sources
      ]
      for name, *arrays in zip(group, *layers, strict=True):
        try:
          result[name] = self._finish(name, sources, arrays)
        except ValueError as e:
          raise ValueError(f"`{name}` from `{', '.join(sources)}`: {e}") from e
    return {name: result[name] for name in sorted(result, key=_numeric)}

  def _outputs(self):
    """{source names: names of the layers made from them, in stacked order}."""
    outputs = {}
    for name, place in self.places.items():
      module, _, last = name.rpartition(".")
      if last in ("wi_0", "wi_1"):
        for half in ("wi_0", "wi_1"):
          if _join(module, half) not in self.source:
            raise ValueError(f"`{name}` without `{_join(module, half)}`")
        fused = tuple(
            _join(layer.rpartition(".")[0], "wi") for layer in place.targets
        )
        if self._is_fused(fused):
          if last == "wi_0":
            outputs[name, _join(module, "wi_1")] = fused
          continue
      outputs[(name,)] = place.targets
    counts = collections.Counter(n for group in outputs.values() for n in group)
    for name, count in counts.items():
      if count > 1:
        raise ValueError(f"`{name}` has {count} sources")
    return outputs

  def _is_fused(self, fused):
    if self.wanted is None:
      return self.cfg.prefuse_moe_weights
    return any(name in self.wanted for name in fused)

  def _check_names(self, made):
    if self.wanted is None:
      return
    missing = sorted(set(self.wanted) - made, key=_numeric)
    extra = sorted(made - set(self.wanted), key=_numeric)
    if missing or extra:
      raise ValueError(
          f"{len(missing)} target leaves without a source"
          f" ({', '.join(missing[:8])}) and {len(extra)} source leaves without"
          f" a target ({', '.join(extra[:8])})"
      )

  def _finish(self, name, sources, arrays):
    """One layer's array as the rollout holds it."""
    module, _, last = name.rpartition(".")
    dtype = self._dtype(name, sources)
    if last in ("wi", "wi_0", "wi_1", "wo"):
      if last == "wi" and len(arrays) == 1:
        # A trainer that fuses holds all of gate, then all of up.
        if arrays[0].shape[-1] % 2:
          raise ValueError(f"{arrays[0].shape[-1]} columns are no gate and up")
        arrays = np.split(arrays[0], 2, axis=-1)
      axis = -2 if last == "wo" else -1
      width = self._padded_width(module, arrays[0].shape[axis])
      shards = self._shards(module)
      if last == "wi":
        (out,) = kernels.fuse_gate_up(
            *arrays,
            scan_axis=None,
            shards=shards,
            padded_width=width,
            lane_size=self.cfg.moe_lane_size,
            dtype=dtype,
        )
      elif width == arrays[0].shape[axis]:
        out = kernels.cast(arrays[0], dtype)
      else:
        (out,) = kernels.pad_lanes(
            arrays[0],
            scan_axis=None,
            axis=axis,
            shards=shards,
            padded_width=width,
            dtype=dtype,
        )
    else:
      (array,) = arrays
      heads = self._kv_heads(name)
      if heads is None:
        out = kernels.cast(array, dtype)
      else:
        repeats = self._repeats(name, heads)
        # Vectors of [heads * head_dim] are taken apart into their heads.
        flat = array.ndim == 1
        (out,) = kernels.repeat_heads(
            array.reshape(heads, -1) if flat else array,
            scan_axis=None,
            axis=-2,
            repeats=repeats,
            dtype=dtype,
        )
        out = out.reshape(-1) if flat else out
    if self.wanted is not None and out.shape != self._shape(name):
      raise ValueError(
          f"shape {list(out.shape)}, but the target has {self._shape(name)}"
      )
    return out

  def _shape(self, name):
    return tuple(self.wanted[name].shape)

  def _dtype(self, name, sources):
    """dtype of an output."""
    if self.wanted is not None:
      return np.dtype(self.wanted[name].dtype)
    own = np.dtype(self.source[sources[0]].value.dtype)
    for _, family, kept in _KEPT:
      known = any(re.fullmatch(family, other) for other in self.source)
      if known and re.fullmatch(kept, name):
        return own
    for pattern in self.cfg.keep_dtype:
      if any(fnmatch.fnmatchcase(n, pattern) for n in (name, *sources)):
        return own
    short = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
    named = self.cfg.weight_dtype
    if isinstance(named, str):
      named = short.get(named, named)
      return np.dtype(getattr(ml_dtypes, named, named))
    return np.dtype(named)

  def _padded_width(self, module, width):
    """Total width of an expert's MLP axis, once padded."""
    widths = {}
    if self.wanted is None:
      widths["configuration"] = self._configured_width(module, width)
    for last, axis, per in (
        ("wi", -1, 2),
        ("wi_0", -1, 1),
        ("wi_1", -1, 1),
        ("wo", -2, 1),
    ):
      name = _join(module, last)
      if name in (self.wanted or {}):
        shape = self._shape(name)
        if len(shape) < 2 or shape[axis] % per:
          raise ValueError(f"target `{name}` has shape {list(shape)}")
        widths[name] = shape[axis] // per
    if len(set(widths.values())) != 1:
      raise ValueError(f"target widths of one expert differ: {widths}")
    (padded,) = set(widths.values())
    if padded != width and self._has_expert_bias(module):
      raise ValueError(
          f"experts with biases are never padded, but width {width} is to be"
          f" {padded}; ask for {width}"
      )
    return padded

  def _configured_width(self, module, width):
    if self.cfg.padded_base_moe_mlp_dim is not None:
      return self.cfg.padded_base_moe_mlp_dim
    if not self.cfg.prefuse_moe_weights or self._has_expert_bias(module):
      return width
    shards = self._shards(module)
    if width // shards % _TWO_LANES == 0:
      return width
    return math.ceil(width / (_TWO_LANES * shards)) * _TWO_LANES * shards

  def _has_expert_bias(self, module):
    """Whether an expert has biases of its own, which stay as wide as it is."""
    return any(
        _join(module, last) in self.shapes
        for last in ("wi_0_bias", "wi_1_bias", "wo_bias")
    )

  def _shards(self, module):
    """Shards of an expert's MLP axis on the rollout side."""
    if self.cfg.moe_mlp_tp_size > 1:
      return self.cfg.moe_mlp_tp_size
    if self.cfg.rollout_tensor_parallelism > 1:
      return self.cfg.rollout_tensor_parallelism
    counts = {1}
    for last, axis in (("wi", -1), ("wi_0", -1), ("wi_1", -1), ("wo", -2)):
      if _join(module, last) in (self.wanted or {}):
        counts.add(_axis_shards(self.wanted[_join(module, last)], axis))
    if len(counts) > 2:
      raise ValueError(f"target shards one expert in {sorted(counts)} ways")
    return max(counts)

  def _kv_heads(self, name):
    """KV heads in one layer's array; None where there are none."""
    parts = name.split(".")
    if parts[0] in ("vision_encoder", "audio_encoder"):
      return None
    module = ".".join(parts[:-2])
    if parts[-2:-1] in (["key"], ["value"]) and parts[-1] in ("kernel", "bias"):
      kernel = self.shapes.get(_join(module, parts[-2], "kernel"))
      shape = self.shapes[name]
      return shape[-2] if len(shape) > 1 else kernel and kernel[-2]
    if parts[-2:] == ["key_norm", "scale"]:
      # Olmo 3 normalises over all heads at once: its scales are as long as all
      # heads together, the queries' tell so also where there is one KV head.
      query = self.shapes.get(_join(module, "query.kernel"), ())
      query_norm = self.shapes.get(_join(module, "query_norm.scale"))
      if len(query) == 3 and query[1] > 1 and query_norm == (
          query[1] * query[2],
      ):
        return self.shapes[name][0] // query[2]
    return None

  def _repeats(self, name, heads):
    """How often each KV head is to be there."""
    if self.wanted is not None:
      shape, own = self._shape(name), self.shapes[name]
      at = -2 if len(own) > 1 else -1
      if len(shape) != len(own) or shape[at] % own[at] or not shape[at]:
        raise ValueError(
            f"`{name}`: {heads} KV heads, shape {list(own)}, do not divide the"
            f" target's {list(shape)}"
        )
      return shape[at] // own[at]
    tp = self.cfg.kv_tp_size
    if heads >= tp:
      return 1
    if tp % heads:
      raise ValueError(f"{heads} KV heads do not divide `kv_tp_size` {tp}")
    return tp // heads


def _axis_shards(leaf, axis):
  """Shards of one axis of a leaf with a NamedSharding, else 1."""
  sharding = getattr(leaf, "sharding", None)
  spec = tuple(getattr(sharding, "spec", None) or ())
  axis %= len(leaf.shape)
  if axis >= len(spec) or spec[axis] is None:
    return 1
  entry = spec[axis] if isinstance(spec[axis], tuple) else (spec[axis],)
  return math.prod(sharding.mesh.shape[mesh_axis] for mesh_axis in entry)


def _numeric(name):
  """Sort key that puts layers_10 after layers_9."""
  return [
      (int(piece), "") if piece.isdigit() else (-1, piece)
      for piece in re.split(r"(\d+)", name)
  ]


def _join(*parts):
  return ".".join(part for part in parts if part)
