"""The NumPy conversion of whole trees."""

import hashlib
import json
import pathlib
import re
import types

import ml_dtypes
import numpy as np
import pytest

from laneweave.sync.reference import convert_reference
from laneweave.tests.sync import golden_trees, scaled_manifests

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)
DATA = pathlib.Path(__file__).parent.parent / "data"
PAIRS = scaled_manifests.pairs()


def config(layers, **fields):
  defaults = {
    "num_decoder_layers": layers,
    "scan_layers": True,
    "param_scan_axis": 1,
    "inhomogeneous_layer_cycle_interval": 1,
    "prefuse_moe_weights": False,
    "padded_base_moe_mlp_dim": None,
    "moe_mlp_tp_size": 1,
    "moe_lane_size": 0,
    "base_num_kv_heads": None,
    "kv_tp_size": 1,
    "rollout_tensor_parallelism": -1,
    "rollout_backend": "maxtext",
    "weight_dtype": "float32",
    "keep_dtype": (),
  }
  assert fields.keys() <= defaults.keys()
  return types.SimpleNamespace(**defaults | fields)


def spec(shape, dtype=F32, **extra):
  return types.SimpleNamespace(
    shape=tuple(shape), dtype=np.dtype(dtype), **extra
  )


def full(shape, *values, axes=(1,)):
  """Float32 array whose stacked axes at `axes` hold `values` (flattened)."""
  block = [n for a, n in enumerate(shape) if a not in axes]
  lengths = [shape[a] for a in axes]
  x = np.broadcast_to(
    np.array(values, np.float32).reshape(*lengths, *[1] * len(block)),
    (*lengths, *block),
  )
  return np.ascontiguousarray(np.moveaxis(x, range(len(axes)), axes))


def numbers(out):
  """{name: the one value its array is full of}."""
  for name, x in out.items():
    assert (x == x.flat[0]).all(), name
  return {name: float(x.flat[0]) for name, x in out.items()}


# Whole trees of real models


@pytest.mark.parametrize(
  ("trainer", "rollout"), PAIRS, ids=[path.name[:-8] for _, path in PAIRS]
)
def test_names_shapes_and_dtypes_of_real_trees(trainer, rollout):
  trainer = scaled_manifests.load(trainer)
  rollout = scaled_manifests.load(rollout)
  params = scaled_manifests.small_trainer(trainer)
  want = scaled_manifests.small_rollout(rollout)
  cfg = config(
    trainer["config"]["num_decoder_layers"],
    inhomogeneous_layer_cycle_interval=trainer["config"][
      "inhomogeneous_layer_cycle_interval"
    ],
    prefuse_moe_weights=rollout["config"]["prefuse_moe_weights"],
    moe_mlp_tp_size=rollout["moe_mlp_tp_size"],
    weight_dtype="bfloat16",
  )
  free = convert_reference(params, cfg)
  assert {n: (x.shape, x.dtype.name) for n, x in free.items()} == want
  target = {name: spec(*leaf) for name, leaf in want.items()}
  aimed = convert_reference(params, cfg, target)
  assert aimed.keys() == free.keys()
  for name, x in aimed.items():
    assert x.dtype == free[name].dtype
    assert x.tobytes() == free[name].tobytes(), name


def expected_number(model, name):
  """What `small_trainer` put into the layer called `name`."""
  found = re.search(r"\.((?:dense_|moe_)?layers)_(\d+)\.", name)
  if not found:
    return 0
  n = int(found[2])
  slot, outer, inner = {
    "gpt-oss": (n % 2, n // 2, 0),
    "llama4": (n % 4, n // 4, 0),
    "olmo3": (n % 4, n // 4, 0),
    "qwen3.5": (n % 4, n // 4, 0),
    "gemma3": (n % 6, n // 6, 0) if n < 60 else (n - 60, 0, 0),
    "qwen3-next": (0, n // 4, n % 4) if n % 4 < 3 else (9, n // 4, 0),
    "gemma4": (0, n // 6, n % 6) if n % 6 < 5 else (9, n // 6, 0),
    "deepseek4": (n, 0, 0) if n < 3 else ((n - 3) % 2, (n - 3) // 2, 0),
  }.get(model, (0, n, 0))
  return 10000 * slot + 100 * outer + inner


ONE_EACH = [
  (trainer, rollout)
  for trainer, rollout in PAIRS
  if ".tp" not in rollout.name or ".tp1." in rollout.name
]


@pytest.mark.parametrize(
  ("trainer", "rollout"),
  ONE_EACH,
  ids=[path.name.split("-")[0] for path, _ in ONE_EACH],
)
def test_F01_F03_layer_order_of_real_trees(trainer, rollout):
  model = re.match(r"qwen3-next|gpt-oss|[^-]+", trainer.name)[0]
  trainer = scaled_manifests.load(trainer)
  rollout = scaled_manifests.load(rollout)
  cfg = config(
    trainer["config"]["num_decoder_layers"],
    inhomogeneous_layer_cycle_interval=trainer["config"][
      "inhomogeneous_layer_cycle_interval"
    ],
    prefuse_moe_weights=rollout["config"]["prefuse_moe_weights"],
  )
  out = convert_reference(scaled_manifests.small_trainer(trainer), cfg)
  for name, x in out.items():
    want = expected_number(model, name)
    assert x.flat[0] == want, name
    assert ((x == want) | (x == 0)).all(), name


@pytest.mark.parametrize("case", golden_trees.CASES)
def test_agrees_with_maxtext_bit_for_bit(case):
  _, layers, cycle, shards, kv_tp_size = golden_trees.CASES[case]
  out = convert_reference(
    golden_trees.arrays(case),
    config(
      layers,
      inhomogeneous_layer_cycle_interval=cycle,
      prefuse_moe_weights=True,
      moe_mlp_tp_size=shards,
      kv_tp_size=kv_tp_size,
      weight_dtype="bfloat16",
    ),
  )
  digests = {
    name: hashlib.sha256(
      f"{x.dtype.name}{list(x.shape)}".encode() + x.tobytes()
    ).hexdigest()[:16]
    for name, x in out.items()
  }
  want = json.loads((DATA / "maxtext_converted.json").read_text())
  assert digests == want[case]


# Layer order


def test_F01_cycle_of_four():
  params = {
    f"decoder.layers.layer_{s}.mlp.kernel": full(
      (8, 3, 5), *(100 * s + np.arange(3))
    )
    for s in range(4)
  }
  cfg = config(12, inhomogeneous_layer_cycle_interval=4)
  out = convert_reference(params, cfg)
  assert list(out) == [f"decoder.layers_{n}.mlp.kernel" for n in range(12)]
  assert all(x.shape == (8, 5) for x in out.values())
  got = numbers(out)
  assert got["decoder.layers_6.mlp.kernel"] == 201
  assert got["decoder.layers_9.mlp.kernel"] == 102


def test_F02_missing_cycle_level_is_named():
  params = {
    f"decoder.layers.layer_{s}.mlp.kernel": full((8, 3, 5), 0, 0, 0)
    for s in range(4)
  }
  params["decoder.layers.mlp.kernel"] = full((8, 3, 5), 0, 0, 0)
  cfg = config(12, inhomogeneous_layer_cycle_interval=4)
  with pytest.raises(
    ValueError, match=r"`decoder\.layers\.mlp\.kernel`.*`layer_<slot>`"
  ):
    convert_reference(params, cfg)
  with pytest.raises(ValueError, match=r"`layer_<slot>`"):
    convert_reference({"layers.w": full((8, 3, 5), 0, 0, 0)}, cfg)


def test_F03_remainder_follows_the_scanned_blocks():
  params = {
    f"layers.layers_{s}.w": full((4, 2, 6), s, 3 + s) for s in range(3)
  } | {"layers_remainder.layers_0.w": full((4, 6), 6, axes=())}
  target = {"layers": {n: {"w": spec((4, 6))} for n in range(6)}}
  target["layers"]["6"] = {"w": spec((4, 6))}
  out = convert_reference(params, config(7), target)
  assert numbers(out) == {f"layers_{n}.w": n for n in range(7)}


@pytest.mark.parametrize("count", [np.zeros(5, np.uint32), np.uint32(0)])
def test_F04_random_state_has_no_vote(count):
  params = {
    "layers": {
      "kernel": full((8, 5, 4), *range(5)),
      "rngs": {"params": {"count": count, "key": np.zeros((5, 2), np.uint32)}},
    }
  }
  out = convert_reference(params, config(5))
  assert numbers(out) == {f"layers_{n}.kernel": n for n in range(5)}


def test_F05_unscanned_layers_in_any_order():
  params = {
    f"layers_{n}.w": np.full((4, 4), n, np.float32) for n in (11, *range(11))
  }
  target = {f"layers_{n}.w": spec((4, 4)) for n in reversed(range(12))}
  for scan_layers in (True, False):
    out = convert_reference(params, config(12, scan_layers=scan_layers), target)
    assert list(numbers(out).items()) == [
      (f"layers_{n}.w", n) for n in range(12)
    ]


def test_local_layers_come_before_the_global_one():
  params = {
    "decoder.scanned_blocks.local_layers.w": full(
      (4, 2, 3), 0, 1, 2, 4, 5, 6, axes=(1, 2)
    ),
    "decoder.scanned_blocks.global_layer.w": full((4, 2), 3, 7),
    "decoder.layers_remainder.local_layers.w": full((4, 2), 8, 9),
  }
  out = convert_reference(params, config(10))
  assert numbers(out) == {f"decoder.layers_{n}.w": n for n in range(10)}


def test_blocks_of_a_global_layer_alone():
  params = {"layers.global_layer.w": full((4, 2), 0, 1)}
  out = convert_reference(params, config(2))
  assert numbers(out) == {"layers_0.w": 0, "layers_1.w": 1}


def test_equal_stacked_axes_are_not_confused():
  x = np.arange(9, dtype=np.float32).reshape(1, 3, 3)
  params = {
    "layers.local_layers.layer_scalar": x,
    "layers.global_layer.layer_scalar": full((1, 3), 100, 101, 102),
  }
  out = convert_reference(params, config(12))
  assert numbers(out) == {
    f"layers_{n}.layer_scalar": want
    for n, want in enumerate([0, 1, 2, 100, 3, 4, 5, 101, 6, 7, 8, 102])
  }


def test_unstacked_layers_come_first():
  params = {
    f"decoder.layers_{n}.w": full((4,), n, axes=()) for n in range(3)
  } | {
    "decoder.scanned_blocks.layers_0.w": full((4, 2), 3, 5),
    "decoder.scanned_blocks.layers_1.w": full((4, 2), 4, 6),
  }
  out = convert_reference(params, config(7))
  assert numbers(out) == {f"decoder.layers_{n}.w": n for n in range(7)}


def test_dense_and_expert_segments_count_on_their_own():
  params = {
    "decoder.dense_layers.w": full((4, 2), 0, 1),
    "decoder.moe_layers.w": full((4, 3), 10, 11, 12),
  }
  out = convert_reference(params, config(5))
  assert numbers(out) == {
    "decoder.dense_layers_0.w": 0,
    "decoder.dense_layers_1.w": 1,
    "decoder.moe_layers_0.w": 10,
    "decoder.moe_layers_1.w": 11,
    "decoder.moe_layers_2.w": 12,
  }


@pytest.mark.parametrize(
  ("axis", "kernel", "vector", "double", "double_vector"),
  [
    (0, (0,), (0,), (0, 1), (0, 1)),
    (1, (1,), (1,), (1, 2), (1, 2)),
    # A scan leaves its axis in front when the array has no axis 2.
    (2, (2,), (0,), (2, 3), (2, 0)),
  ],
)
def test_stacked_axis_follows_param_scan_axis(
  axis, kernel, vector, double, double_vector
):
  def insert(block, axes, lengths):
    shape = list(block)
    for a, n in sorted(zip(axes, lengths, strict=True)):
      shape.insert(a, n)
    return tuple(shape)

  values = np.arange(6)
  params = {
    "layers.local_layers.kernel": full(
      insert((4, 5), double, (2, 3)), *values, axes=double
    ),
    "layers.local_layers.scale": full(
      insert((4,), double_vector, (2, 3)), *values, axes=double_vector
    ),
    "layers.global_layer.kernel": full(
      insert((4, 5), kernel, (2,)), 10, 11, axes=kernel
    ),
    "layers.global_layer.scale": full(
      insert((4,), vector, (2,)), 10, 11, axes=vector
    ),
  }
  out = convert_reference(params, config(8, param_scan_axis=axis))
  got = numbers(out)
  for last, shape in (("kernel", (4, 5)), ("scale", (4,))):
    names = [f"layers_{n}.{last}" for n in range(8)]
    assert [got[name] for name in names] == [0, 1, 2, 10, 3, 4, 5, 11]
    assert {out[name].shape for name in names} == {shape}


def test_router_bias_is_stacked_in_front():
  bias = "decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"
  # As many layers as experts: only the rule can tell.
  params = {
    bias: np.arange(9, dtype=np.float32).reshape(3, 3),
    "decoder.moe_layers.norm.scale": full((4, 3), 0, 1, 2),
  }
  out = convert_reference(params, config(3))
  name = "decoder.moe_layers_1.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"
  assert out[name].tolist() == [3, 4, 5]


def test_router_bias_that_is_a_parameter_is_stacked_as_one():
  params = {
    "layers.GptOssMlp.gate.bias": np.arange(9, dtype=np.float32).reshape(3, 3)
  }
  out = convert_reference(params, config(3))
  assert out["layers_1.GptOssMlp.gate.bias"].tolist() == [1, 4, 7]


class Variable:
  """Looks like an nnx variable."""

  def __init__(self, value):
    self.value = value


class Param(Variable):
  pass


class RngState(Variable):
  pass


class MoEBiasVar(Variable):
  pass


def test_variable_types_decide_where_there_are_any():
  square = np.arange(9, dtype=np.float32).reshape(3, 3)
  params = {
    "layers": {
      "a": {"gate": {"bias": Param(square)}},
      "b": {"odd": MoEBiasVar(square)},
      "noise": RngState(np.zeros((3, 2), np.float32)),
    }
  }
  out = convert_reference(params, config(3))
  assert out["layers_1.a.gate.bias"].tolist() == [1, 4, 7]
  assert out["layers_1.b.odd"].tolist() == [3, 4, 5]
  assert len(out) == 6


# Names


@pytest.mark.parametrize("wrap", [("base",), ("model",), ("model", "model")])
def test_F08_wrapper_roots_are_removed(wrap):
  def wrapped(leaf):
    tree = {"decoder": {"layers_0": {"norm": {"scale": leaf}}}}
    for root in reversed(wrap):
      tree = {root: tree}
    return tree

  x = np.ones((4, 4), np.float32)
  source = {"base": {"decoder": {"layers_0": {"norm": {"scale": x}}}}}
  out = convert_reference(source, config(1), wrapped(spec((4, 4))))
  assert list(out) == ["decoder.layers_0.norm.scale"]
  assert list(convert_reference(wrapped(x), config(1))) == list(out)


def test_F08_two_roots_with_different_content_are_refused():
  x = np.ones((4, 4), np.float32)
  same = {"base": {"w": x}, "model": {"w": x}}
  assert list(convert_reference(same, config(1))) == ["w"]
  with pytest.raises(ValueError, match=r"base.*model"):
    convert_reference({"base": {"w": x}, "model": {"w": x + 1}}, config(1))


def test_keys_may_be_dotted_or_tuples_and_end_in_value():
  x = np.ones((4, 2), np.float32)
  want = ["decoder.layers_0.norm.scale", "decoder.layers_1.norm.scale"]
  for tree in (
    {"decoder.layers.norm.scale": x},
    {("decoder", "layers", "norm", "scale"): x},
    {"decoder": {"layers.norm": {"scale": {"value": x}}}},
    {"decoder": {"layers": {"norm": {"scale": Param(x)}}}},
  ):
    assert list(convert_reference(tree, config(2))) == want


class Pure:
  """Gives itself away as a plain dict, as nnx states do."""

  def __init__(self, tree):
    self.tree = tree

  def to_pure_dict(self):
    return self.tree


class NewVariable:
  def __init__(self, value):
    self._value = value

  def get_value(self):
    return self._value


def test_states_lists_and_variables_of_any_age_are_read():
  x = np.ones(2, np.float32)
  tree = Pure({"decoder": {"parts": [NewVariable(x), {"w": x}]}})
  assert list(convert_reference(tree, config(1))) == [
    "decoder.parts.0",
    "decoder.parts.1.w",
  ]


def test_one_name_twice_is_refused():
  x = np.ones((2, 2), np.float32)
  cfg = config(2, scan_layers=False)
  with pytest.raises(ValueError, match=r"`layers_1\.w` is in the tree twice"):
    convert_reference({"layers_1": {"w": x}, "layers": {1: {"w": x}}}, cfg)


def test_one_output_with_two_sources_is_refused():
  params = expert(8) | {"layers.moe.wi": np.ones((2, 1, 8, 16), np.float32)}
  with pytest.raises(ValueError, match=r"`layers_0\.moe\.wi` has 2 sources"):
    convert_reference(params, config(1, prefuse_moe_weights=True))


def test_a_projection_called_value_keeps_its_name():
  x = np.ones((4, 4), np.float32)
  out = convert_reference({"attn": {"key": x, "value": x}}, config(1))
  assert list(out) == ["attn.key", "attn.value"]


def test_F09_integers_are_left_out():
  params = {
    "A": np.full((4, 4), 1, np.float32),
    "B_count": np.full((4, 4), 2, np.int32),
    "C": np.full((4, 4), 3, np.float32),
  }
  target = {"A": spec((4, 4)), "C": spec((4, 4))}
  assert numbers(convert_reference(params, config(1), target)) == {
    "A": 1,
    "C": 3,
  }


def test_F12_missing_layers_are_named():
  params = {"layers.w": full((4, 2), 0, 1)}
  target = {f"layers_{n}.w": spec((4,)) for n in range(3)}
  with pytest.raises(ValueError, match=r"1 of 3 target leaves.*layers_2\.w"):
    convert_reference(params, config(2), target)


def test_F13_source_without_target_is_named():
  params = {"layers_0.a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
  with pytest.raises(ValueError, match=r"no target \(b\)"):
    convert_reference(params, config(1), {"layers_0.a": spec((2,))})


@pytest.mark.parametrize(
  "params", [{}, {"cache": {"k": np.ones(2, np.float32)}}, {"n": np.int8(3)}]
)
def test_F14_F17_nothing_to_convert_is_an_error(params):
  with pytest.raises(ValueError, match="no floating-point array"):
    convert_reference(params, config(1), {"a": spec((2,))})


def test_F16_caches_are_left_out_by_whole_path_part():
  x = np.ones((4, 4), np.float32)
  layer = {
    "attn": {"k": x, "cache_proj": x, "kv_cache_norm_scale": x},
    "cache": {"key": x},
    "cached_prefill_key": x,
    "kv_cache": {"v": x},
    "KVCache_0": {"v": x},
    "rngs": {"params": {"noise": x}},
    "intermediates": {"y": x},
  }
  out = convert_reference({"layers_0": layer}, config(1))
  assert list(out) == [
    "layers_0.attn.cache_proj",
    "layers_0.attn.k",
    "layers_0.attn.kv_cache_norm_scale",
  ]


def test_leaves_called_like_containers_and_wrappers_keep_their_names():
  x = np.ones((2, 2), np.float32)
  for name in ("layers", "value", "key.kernel"):
    assert list(convert_reference({name: x}, config(2))) == [name]


def test_complex_arrays_are_no_weights():
  params = {"w": np.ones(2, np.float32), "c": np.ones(2, np.complex64)}
  assert list(convert_reference(params, config(1))) == ["w"]


def test_F18_all_floating_types_are_weights():
  params = {
    name: np.ones(4, name) for name in ("float32", "float16", "float8_e4m3fn")
  } | {"bfloat16": np.ones(4, BF16)}
  out = convert_reference(params, config(1, keep_dtype=("*",)))
  assert {name: x.dtype.name for name, x in out.items()} == {
    name: name for name in params
  }


# Trees that do not fit

W = full((4, 2, 3), 0, 1)


@pytest.mark.parametrize(
  ("params", "cfg", "message"),
  [
    ({"layers.w": W}, config(3), r"`layers\.w`.*lengths \[3\]"),
    ({"layers.w": np.ones(2, np.float32)}, config(2), r"`layers\.w`.*\[2\]"),
    ({"layers.w": W}, config(2, scan_layers=False), "`scan_layers` is False"),
    ({"layers.w": W}, config(2, rollout_backend="vllm_torchax"), "torchax"),
    (
      {f"layers.layer_{s}.w": W for s in range(3)},
      config(6, inhomogeneous_layer_cycle_interval=2),
      r"`layers\.layer_2\.w` is in slot 2",
    ),
    (
      {f"layers.layer_{s}.w": W for s in range(2)},
      config(5, inhomogeneous_layer_cycle_interval=2),
      "5 do not divide into stacked blocks of 2",
    ),
    (
      {"layers.layer_0.w": W, "layers.layer_2.w": W},
      config(6),
      r"only slots \[0, 2\]",
    ),
    (
      {"layers.local_layers.w": full((4, 2, 3), *range(6), axes=(1, 2))},
      config(8, inhomogeneous_layer_cycle_interval=4),
      "hold 3 layers",
    ),
    (
      {"layers.w": W, "scanned_blocks.w": W},
      config(4),
      "layers, scanned_blocks",
    ),
    (
      {"layers_1.w": W, "scanned_blocks.w": W},
      config(3),
      "are not the first ones",
    ),
    (
      {"dense_layers.w": W, "moe_layers.w": W},
      config(5),
      "'dense_layers': 2, 'moe_layers': 2",
    ),
    (
      {"moe_layers.a": W, "moe_layers.b": W, "moe_layers.c": W[:, :1]},
      config(2),
      r"`moe_layers\.c`.*1 on its stacked axis",
    ),
    (
      {"moe_layers.MoeBlock_0.gate.bias": W},
      config(4),
      "no leaf tells how many layers",
    ),
    (
      {"moe_layers.a": W, "moe_layers.s": np.ones(2, np.float32)},
      config(2),
      r"`moe_layers\.s`.*nothing is left",
    ),
    (
      {"decoder.moe_layers_3_14.w": W},
      config(2),
      "`moe_layers_3_14` is no known container",
    ),
    ({"layers.m.wi_0": W}, config(2), r"`layers\.m\.wi_0` without"),
    ({"layers.m.wi_1": W}, config(2), r"`layers\.m\.wi_1` without"),
    (
      {"layers_0.w": W, "layers.w": full((4, 1), 0)},
      config(1),
      "do not divide",
    ),
  ],
)
def test_trees_that_do_not_fit_are_refused(params, cfg, message):
  with pytest.raises(ValueError, match=message):
    convert_reference(params, cfg)


def test_F80_shapes_that_differ_are_named():
  params = {"w": np.ones((7, 5), np.float32)}
  with pytest.raises(ValueError, match=r"`w`.*\[7, 5\].*\[5, 7\]"):
    convert_reference(params, config(1), {"w": spec((5, 7))})
  with pytest.raises(ValueError, match=r"`w`.*\[7, 5\].*\[7, 5, 1\]"):
    convert_reference(params, config(1), {"w": spec((7, 5, 1))})


# dtypes


def test_F36_F61_weights_are_rounded_to_weight_dtype():
  x = np.array([1, 1 + 2**-9, np.nan, -0.0], np.float32)
  for given in ("bfloat16", "bf16", BF16, ml_dtypes.bfloat16):
    out = convert_reference({"w": x}, config(1, weight_dtype=given))["w"]
    assert out.dtype == BF16
    assert out.view(np.uint16).tolist() == [0x3F80, 0x3F80, 0x7FC0, 0x8000]


def test_F35_keep_dtype_matches_source_or_target_names():
  bias = np.array([1, 1 + 2**-10], np.float32)
  tree = {"layers.gate.bias": np.stack([bias, bias], 1), "layers.w": W}
  for pattern in ("*.gate.bias", "layers_?.gate.*", "layers.gate.bias"):
    out = convert_reference(
      tree, config(2, weight_dtype="bfloat16", keep_dtype=(pattern,))
    )
    assert out["layers_1.gate.bias"].tobytes() == bias.tobytes()
    assert out["layers_1.w"].dtype == BF16


def test_names_alone_do_not_keep_a_dtype():
  params = {
    "layers.shared_expert_gate.kernel": full((4, 2, 1), 0, 1),
    "layers.router.kernel": full((4, 2, 1), 0, 1),
    "layers.post_self_attention_layer_norm.scale": full((4, 2), 0, 1),
  }
  out = convert_reference(params, config(2, weight_dtype="bfloat16"))
  assert {x.dtype for x in out.values()} == {BF16}


@pytest.mark.parametrize(
  ("marker", "kept"),
  [
    (
      "GptOssMlp.gate.bias",
      {
        "pre_self_attention_layer_norm.scale",
        "post_self_attention_layer_norm.scale",
      },
    ),
    (
      "post_mlp_layer_norm.scale",
      {"post_mlp_layer_norm.scale", "post_self_attention_layer_norm.scale"},
    ),
    (
      "pre_self_attention_norm.bias",
      {"pre_self_attention_norm.bias", "pre_self_attention_norm.scale"},
    ),
    (
      "self_attention.indexer.weights_proj.kernel",
      {
        "self_attention.indexer.weights_proj.kernel",
        "self_attention.indexer.k_norm.bias",
      },
    ),
    ("mlp.MoeBlock_0.tid2eid", {"mlp.MoeBlock_0.tid2eid"}),
  ],
)
def test_families_keep_the_leaves_their_models_build_as_float32(marker, kept):
  others = (
    "pre_self_attention_layer_norm.scale",
    "post_self_attention_layer_norm.scale",
    "pre_self_attention_norm.scale",
    "self_attention.csa_compressor.indexer.weights_proj.kernel",
    "self_attention.indexer.k_norm.bias",
    "mlp.wo.kernel",
  )
  params = {f"layers_0.{n}": np.ones(2, np.float32) for n in (marker, *others)}
  params["decoder_norm.scale"] = np.ones(2, np.float32)
  out = convert_reference(params, config(1, weight_dtype="bfloat16"))
  assert {n for n, x in out.items() if x.dtype == F32} == {
    f"layers_0.{n}" for n in kept
  }


def test_target_decides_dtypes():
  params = {"a": np.ones(2, np.float32), "b": np.ones(2, BF16)}
  target = {"a": spec((2,), np.float16), "b": spec((2,), F32)}
  out = convert_reference(params, config(1, keep_dtype=("*",)), target)
  assert [x.dtype.name for x in out.values()] == ["float16", "float32"]


# Experts


def expert(width, layers=1, embed=8, experts=2, seed=0):
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return rng.standard_normal(shape).astype(np.float32)

  return {
    "layers.moe.wi_0": normal(experts, layers, embed, width),
    "layers.moe.wi_1": normal(experts, layers, embed, width),
    "layers.moe.wo": normal(experts, layers, width, embed),
  }


@pytest.mark.parametrize(
  ("width", "shards", "padded"),
  [
    (512, 4, 1024),
    (512, 8, 2048),
    (704, 4, 1024),
    (768, 1, 768),
    (1536, 4, 2048),
  ],
)
def test_F22_two_lane_rule(width, shards, padded):
  cfg = config(1, prefuse_moe_weights=True, moe_mlp_tp_size=shards)
  out = convert_reference(expert(width, embed=2), cfg)
  assert out["layers_0.moe.wi"].shape == (2, 2, 2 * padded)
  assert out["layers_0.moe.wo"].shape == (2, padded, 2)
  # Experts that are not fused are left as wide as they are.
  cfg.prefuse_moe_weights = False
  out = convert_reference(expert(width, embed=2), cfg)
  assert out["layers_0.moe.wi_0"].shape == (2, 2, width)


def test_F22_target_decides_the_width():
  cfg = config(1, moe_mlp_tp_size=4, padded_base_moe_mlp_dim=4096)
  target = {
    "layers_0.moe.wi": spec((2, 8, 2048)),
    "layers_0.moe.wo": spec((2, 1024, 8)),
  }
  out = convert_reference(expert(704), cfg, target)
  assert not out["layers_0.moe.wo"].reshape(2, 4, 256, 8)[:, :, 176:].any()


def test_widths_of_one_target_expert_must_agree():
  target = {
    "layers_0.moe.wi": spec((2, 8, 2048)),
    "layers_0.moe.wo": spec((2, 512, 8)),
  }
  with pytest.raises(ValueError, match="'wi': 1024, 'wo': 512"):
    convert_reference(expert(512), config(1), target)


def test_F25_width_that_does_not_divide_names_the_leaf():
  cfg = config(1, prefuse_moe_weights=True, moe_mlp_tp_size=8)
  with pytest.raises(
    ValueError, match=r"`layers_0\.moe\.wi`.*width 100 .*8 shards"
  ):
    convert_reference(expert(100), cfg)


def test_trainer_that_is_already_padded_is_only_fused():
  tree = expert(1024, layers=2)
  cfg = config(
    2,
    prefuse_moe_weights=True,
    moe_mlp_tp_size=2,
    padded_base_moe_mlp_dim=1024,
  )
  out = convert_reference(tree, cfg)
  gate, up = tree["layers.moe.wi_0"][:, 1], tree["layers.moe.wi_1"][:, 1]
  want = [gate[..., :512], up[..., :512], gate[..., 512:], up[..., 512:]]
  np.testing.assert_array_equal(
    out["layers_1.moe.wi"], np.concatenate(want, axis=-1)
  )
  np.testing.assert_array_equal(
    out["layers_1.moe.wo"], tree["layers.moe.wo"][:, 1]
  )


def test_odd_widths_of_fused_experts_are_refused():
  params = {"layers_0.moe.wi": np.ones((2, 8, 7), np.float32)}
  cfg = config(1, prefuse_moe_weights=True)
  with pytest.raises(ValueError, match="7 columns are no gate and up"):
    convert_reference(params, cfg)
  target = {
    "layers_0.moe.wi": spec((2, 8, 1025)),
    "layers_0.moe.wo": spec((2, 512, 8)),
  }
  with pytest.raises(ValueError, match=r"`layers_0\.moe\.wi` has .*1025"):
    convert_reference(expert(512), config(1), target)


def test_other_axes_of_a_target_may_be_sharded():
  mesh = types.SimpleNamespace(shape={"a": 2})
  tree = expert(4)
  for axes in ((), ("a",), ("a", None, None)):
    sharding = types.SimpleNamespace(mesh=mesh, spec=axes)
    target = {
      "layers_0.moe.wi": spec((2, 8, 12), sharding=sharding),
      "layers_0.moe.wo": spec((2, 6, 8), sharding=sharding),
    }
    out = convert_reference(tree, config(1), target)
    np.testing.assert_array_equal(
      out["layers_0.moe.wi"][..., :4], tree["layers.moe.wi_0"][:, 0]
    )


def test_two_shards_are_sharded():
  for fields in ({"moe_mlp_tp_size": 2}, {"rollout_tensor_parallelism": 2}):
    cfg = config(1, prefuse_moe_weights=True, **fields)
    out = convert_reference(expert(4), cfg)
    assert out["layers_0.moe.wo"].shape == (2, 512, 8)
    assert out["layers_0.moe.wo"][:, 256:258].all()


def test_target_that_shards_one_expert_in_two_ways_is_refused():
  mesh = types.SimpleNamespace(shape={"a": 2, "b": 4})

  def sharded(shape, *axes):
    sharding = types.SimpleNamespace(mesh=mesh, spec=axes)
    return spec(shape, sharding=sharding)

  target = {
    "layers_0.moe.wi": sharded((2, 8, 1024), None, None, "a"),
    "layers_0.moe.wo": sharded((2, 512, 8), None, "b"),
  }
  with pytest.raises(ValueError, match=r"\[2, 4\] ways"):
    convert_reference(expert(512), config(1), target)
  # An unsharded axis does not count, and the configuration settles it.
  target["layers_0.moe.wo"] = sharded((2, 512, 8), None, None)
  want = convert_reference(expert(512), config(1, moe_mlp_tp_size=2), target)
  got = convert_reference(expert(512), config(1), target)
  assert all(x.tobytes() == want[name].tobytes() for name, x in got.items())


def test_an_expert_without_an_expert_axis():
  tree = {
    "layers_0.moe.wi_0": np.ones((8, 4), np.float32),
    "layers_0.moe.wi_1": np.ones((8, 4), np.float32),
    "layers_0.moe.wo": np.ones((4, 8), np.float32),
  }
  target = {
    "layers_0.moe.wi": spec((8, 12)),
    "layers_0.moe.wo": spec((6, 8)),
  }
  out = convert_reference(tree, config(1), target)
  assert (
    out["layers_0.moe.wi"].any(axis=0).tolist()
    == ([True] * 4 + [False] * 2) * 2
  )
  assert out["layers_0.moe.wo"].any(axis=1).tolist() == [True] * 4 + [False] * 2
  target["layers_0.moe.wo"] = spec((6,))
  with pytest.raises(ValueError, match=r"`layers_0\.moe\.wo` has shape \[6\]"):
    convert_reference(tree, config(1), target)


def test_shared_experts_and_dense_layers_are_left_alone():
  tree = {
    f"layers.shared_experts.{name}.kernel": full((6, 2, 6), 0, 1)
    for name in ("wi_0", "wi_1", "wo")
  } | expert(6, layers=2)
  out = convert_reference(tree, config(2, prefuse_moe_weights=True))
  for name in ("wi_0", "wi_1", "wo"):
    assert out[f"layers_1.shared_experts.{name}.kernel"].shape == (6, 6)


def test_trainer_that_fuses_is_taken_apart_first():
  tree = expert(8, layers=1)
  fused = {
    "layers.moe.wi": np.concatenate(
      [tree["layers.moe.wi_0"], tree["layers.moe.wi_1"]], axis=-1
    ),
    "layers.moe.wo": tree["layers.moe.wo"],
  }
  cfg = config(
    1, prefuse_moe_weights=True, moe_mlp_tp_size=2, padded_base_moe_mlp_dim=16
  )
  want = convert_reference(tree, cfg)
  got = convert_reference(fused, cfg)
  for name, x in want.items():
    np.testing.assert_array_equal(got[name], x)


@pytest.mark.parametrize("field", ["moe_mlp_tp_size", "sharding", "tp"])
def test_shards_come_from_the_configuration_or_the_target(field):
  wi, wo = spec((2, 8, 1024)), spec((2, 512, 8))
  cfg = config(1)
  if field == "sharding":
    mesh = types.SimpleNamespace(shape={"fsdp": 2, "tp": 2, "x": 3})
    wi.sharding = types.SimpleNamespace(
      mesh=mesh, spec=("x", None, ("fsdp", "tp"))
    )
    wo.sharding = types.SimpleNamespace(mesh=mesh, spec=("x", ("tp", "fsdp")))
  elif field == "tp":
    cfg.rollout_tensor_parallelism = 4
  else:
    cfg.moe_mlp_tp_size = 4
  out = convert_reference(
    expert(256), cfg, {"layers_0.moe.wi": wi, "layers_0.moe.wo": wo}
  )
  rows = out["layers_0.moe.wo"].any(axis=(0, 2)).reshape(4, 128)
  assert rows[:, :64].all()
  assert not rows[:, 64:].any()


def silu(x):
  return x / (1 + np.exp(-x))


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("lane_size", [0, 128])
def test_F21_sharded_expert_computes_what_the_whole_one_does(
  lane_size, with_target
):
  tree = expert(640, layers=2, embed=8, experts=1)
  cfg = config(
    2, prefuse_moe_weights=True, moe_mlp_tp_size=4, moe_lane_size=lane_size
  )
  target = None
  if with_target:
    target = {
      f"layers_{n}.moe.{last}": spec(shape)
      for n in range(2)
      for last, shape in (("wi", (1, 8, 2048)), ("wo", (1, 1024, 8)))
    }
  out = convert_reference(tree, cfg, target)
  x = np.random.default_rng(9).standard_normal((3, 8))
  for n in range(2):
    gate, up, wo = (w[0, n].astype(np.float64) for w in tree.values())
    want = (silu(x @ gate) * (x @ up)) @ wo
    total = np.zeros_like(want)
    for wi_shard, wo_shard in zip(
      np.split(out[f"layers_{n}.moe.wi"][0], 4, axis=1),
      np.split(out[f"layers_{n}.moe.wo"][0], 4, axis=0),
      strict=True,
    ):
      if lane_size:
        by_lane = wi_shard.reshape(8, 2, 2, 128)
        g, u = (
          by_lane[:, :, 0].reshape(8, 256),
          by_lane[:, :, 1].reshape(8, 256),
        )
      else:
        g, u = wi_shard[:, :256], wi_shard[:, 256:]
      total += (silu(x @ g) * (x @ u)) @ wo_shard
    np.testing.assert_allclose(total, want, rtol=1e-9)


def gpt_oss(width=6):
  tree = expert(width)
  return {name.replace("moe", "GptOssMlp"): x for name, x in tree.items()} | {
    f"layers.GptOssMlp.wi_{i}_bias": full((2, 1, width), i) for i in range(2)
  }


def test_experts_with_biases_are_fused_and_never_padded():
  cfg = config(1, prefuse_moe_weights=True, moe_mlp_tp_size=2)
  out = convert_reference(gpt_oss(), cfg)
  assert {name.rpartition(".")[2]: x.shape for name, x in out.items()} == {
    "wi": (2, 8, 12),
    "wi_0_bias": (2, 6),
    "wi_1_bias": (2, 6),
    "wo": (2, 6, 8),
  }


def test_padded_target_beside_unpadded_biases_is_refused():
  target = {
    "layers_0.GptOssMlp.wi": spec((2, 8, 512)),
    "layers_0.GptOssMlp.wi_0_bias": spec((2, 6)),
    "layers_0.GptOssMlp.wi_1_bias": spec((2, 6)),
    "layers_0.GptOssMlp.wo": spec((2, 256, 8)),
  }
  with pytest.raises(ValueError, match="biases are never padded"):
    convert_reference(gpt_oss(), config(1), target)


# KV heads


def attention(kv_heads, query_heads=4, head_dim=3, module="layers.attn"):
  heads = np.arange(kv_heads, dtype=np.float32)
  return {
    f"{module}.query.kernel": full((5, 1, query_heads, head_dim), 7),
    f"{module}.key.kernel": np.broadcast_to(
      heads[:, None], (5, 1, kv_heads, head_dim)
    ),
    f"{module}.value.bias": np.broadcast_to(
      heads[:, None, None], (kv_heads, 1, head_dim)
    ),
    f"{module}.key_norm.scale": full((head_dim, 1), 8),
  }


def test_F30_F31_kernels_and_biases_repeat_together():
  out = convert_reference(attention(2), config(1, kv_tp_size=8))
  key, bias = out["layers_0.attn.key.kernel"], out["layers_0.attn.value.bias"]
  assert key.shape == (5, 8, 3)
  assert key[4, :, 2].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
  assert bias.shape == (8, 3)
  assert bias[:, 2].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
  assert out["layers_0.attn.query.kernel"].shape == (5, 4, 3)
  assert out["layers_0.attn.key_norm.scale"].shape == (3,)


def test_every_layer_follows_its_own_head_count():
  tree = attention(2, module="layers.layer_0.attn") | attention(
    8, module="layers.layer_1.attn"
  )
  cfg = config(2, kv_tp_size=4, base_num_kv_heads=8)
  out = convert_reference(tree, cfg)
  assert out["layers_0.attn.key.kernel"].shape == (5, 4, 3)
  assert out["layers_1.attn.key.kernel"].shape == (5, 8, 3)


def test_target_decides_how_often_heads_repeat():
  tree = attention(2)
  target = {
    name: spec(x.shape)
    for name, x in convert_reference(tree, config(1, kv_tp_size=4)).items()
  }
  out = convert_reference(tree, config(1, kv_tp_size=16), target)
  assert out["layers_0.attn.key.kernel"][0, :, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(("heads", "tp"), [(3, 8), (8, 12), (12, 8)])
def test_F32_heads_that_do_not_divide_are_refused(heads, tp):
  with pytest.raises(
    ValueError, match=rf"`layers_0\.attn\.\S+`.*{heads} KV heads.*{tp}"
  ):
    convert_reference(attention(heads), config(1, kv_tp_size=tp))


def test_F31_a_flat_bias_repeats_by_heads():
  tree = attention(2, head_dim=4) | {
    "layers.attn.key.bias": np.arange(8, dtype=np.float32)[:, None]
  }
  out = convert_reference(tree, config(1, kv_tp_size=8))
  want = [0, 1, 2, 3] * 4 + [4, 5, 6, 7] * 4
  assert out["layers_0.attn.key.bias"].tolist() == want


def test_target_heads_that_are_no_multiple_are_refused():
  name = "layers_0.attn.key.kernel"
  params = {"layers.attn.key.kernel": np.ones((5, 1, 2, 3), np.float32)}
  for shape in ((5, 3, 3), (5, 1, 3), (5, 6)):
    with pytest.raises(ValueError, match=rf"`{name}`.*2 KV heads"):
      convert_reference(params, config(1), {name: spec(shape)})
  with pytest.raises(ValueError, match=r"\[5, 4, 3\] where .*\[5, 4, 6\]"):
    convert_reference(params, config(1), {name: spec((5, 4, 6))})


def test_joint_projections_are_not_repeated():
  params = {"layers.attn.qkv_proj.kernel": np.ones((5, 1, 8, 3), np.float32)}
  for tp in (1, 2):
    out = convert_reference(
      params, config(1, base_num_kv_heads=2, kv_tp_size=tp)
    )
    assert out["layers_0.attn.qkv_proj.kernel"].shape == (5, 8, 3)
  with pytest.raises(ValueError, match=r"qkv_proj.*2 KV heads.*`kv_tp_size` 4"):
    convert_reference(params, config(1, base_num_kv_heads=2, kv_tp_size=4))


def test_only_kv_heads_are_repeated_for_a_target():
  params = {"layers.norm.scale": full((4, 1), 1)}
  with pytest.raises(ValueError, match=r"\[4\] where the target has \[8\]"):
    convert_reference(params, config(1), {"layers_0.norm.scale": spec((8,))})


def test_a_scale_over_all_heads_repeats_with_them():
  tree = attention(2) | {
    "layers.attn.query_norm.scale": full((12, 1), 1),
    "layers.attn.key_norm.scale": np.arange(6, dtype=np.float32)[:, None],
  }
  out = convert_reference(tree, config(1, kv_tp_size=4))
  scale = out["layers_0.attn.key_norm.scale"]
  assert scale.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]
  assert out["layers_0.attn.query_norm.scale"].shape == (12,)


def test_one_kv_head_and_a_scale_over_all_query_heads():
  tree = attention(1, query_heads=2)
  tree["layers.attn.query_norm.scale"] = full((6, 1), 1)
  out = convert_reference(tree, config(1, kv_tp_size=2))
  assert out["layers_0.attn.key_norm.scale"].shape == (6,)
  # With scales of one head the same key scales belong to one head.
  tree["layers.attn.query_norm.scale"] = full((3, 1), 1)
  out = convert_reference(tree, config(1, kv_tp_size=2))
  assert out["layers_0.attn.key_norm.scale"].shape == (3,)


def test_vision_towers_keep_their_heads():
  name = "vision_encoder.layers_0.attn.key.kernel"
  params = {name: np.ones((4, 2, 3), np.float32)}
  out = convert_reference(params, config(1, kv_tp_size=8))
  assert out[name].shape == (4, 2, 3)


# Results


def test_results_share_no_memory_with_the_source():
  x = np.ones((4, 2), np.float32)
  out = convert_reference({"layers.w": x, "v": x}, config(2))
  for array in out.values():
    assert not np.shares_memory(array, x)
