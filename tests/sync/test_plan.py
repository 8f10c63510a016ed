"""What a plan makes of a tree, and what it refuses."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync import convert as convert_lib
from laneweave.sync import plan as plan_lib
from laneweave.sync.config import SyncConfig
from laneweave.tests.kernels import bits


def shape(*dims, dtype="float32"):
  return jax.ShapeDtypeStruct(dims, np.dtype(dtype))


def full(dims, value):
  return np.full(dims, value, np.float32)


def config(layers, **fields):
  return SyncConfig(
    **{"num_decoder_layers": layers, "weight_dtype": "float32", **fields}
  )


def refused(tree, cfg, target=None) -> str:
  with pytest.raises(plan_lib.PlanError) as caught:
    plan_lib.make_plan(tree, cfg, target)
  return str(caught.value)


# Order of layers.


def test_F01_a_cycle_interleaves_its_slots():
  tree = {}
  for slot in range(4):
    x = np.empty((8, 3, 5), np.float32)
    for repeat in range(3):
      x[:, repeat] = 100 * slot + repeat
    tree[f"decoder.layers.layer_{slot}.mlp.kernel"] = x
  got = convert_lib.convert(
    tree, config(12, inhomogeneous_layer_cycle_interval=4)
  )
  assert len(got) == 12
  for layer in range(12):
    x = np.asarray(got[f"decoder.layers_{layer}.mlp.kernel"])
    assert x.shape == (8, 5)
    assert (x == 100 * (layer % 4) + layer // 4).all()


def test_F02_a_key_without_its_slot_level():
  tree = {
    f"decoder.layers.layer_{s}.mlp.kernel": shape(8, 3, 5) for s in range(4)
  }
  tree["decoder.layers.mlp.kernel"] = shape(8, 3, 5)
  text = refused(tree, config(12, inhomogeneous_layer_cycle_interval=4))
  assert "`decoder.layers.mlp.kernel`" in text
  assert "`layer_<slot>`" in text


def test_F03_a_remainder_follows_the_repeats_and_integer_layers_match():
  tree = {
    "layers": {},
    "layers_remainder": {"layers_0": {"w": full((4, 6), 6)}},
  }
  for slot in range(3):
    x = np.stack([full((4, 6), slot), full((4, 6), 3 + slot)], axis=1)
    tree["layers"][f"layers_{slot}"] = {"w": x}
  for key in (int, str):
    target = {"layers": {key(i): {"w": shape(4, 6)} for i in range(7)}}
    got = convert_lib.convert(tree, config(7), target)
    assert len(got) == 7
    for layer in range(7):
      assert (np.asarray(got[f"layers_{layer}.w"]) == layer).all()


@pytest.mark.parametrize("count", [(5,), ()])
def test_F04_rng_leaves_neither_vote_nor_appear(count):
  tree = {
    "layers.w.kernel": shape(8, 5, 4),
    "layers.rngs.params.count": shape(*count, dtype="uint32"),
    "layers.rngs.params.key": jax.eval_shape(
      lambda: jax.random.split(jax.random.key(0), 5)
    ),
  }
  plan = plan_lib.make_plan(tree, config(5))
  assert list(plan.outputs()) == [f"layers_{i}.w.kernel" for i in range(5)]
  assert {name for name, _ in plan.dropped} == {
    "layers.rngs.params.count",
    "layers.rngs.params.key",
  }


def test_F05_layers_pair_by_number_and_are_listed_in_order():
  rng = np.random.default_rng(1)
  order = rng.permutation(12)
  tree = {f"layers_{i}.w": full((4, 4), i) for i in order}
  target = {f"layers_{i}.w": shape(4, 4) for i in reversed(range(12))}
  cfg = config(12, scan_layers=False)
  plan = plan_lib.make_plan(tree, cfg, target)
  assert list(plan.outputs()) == [f"layers_{i}.w" for i in range(12)]
  for name, x in convert_lib.convert(tree, cfg, target).items():
    assert (np.asarray(x) == int(name.split("_")[1][:-2])).all()


def test_F06_equal_axes_need_a_declared_one():
  x = np.arange(4 * 4 * 8, dtype=np.float32).reshape(4, 4, 8)
  got = convert_lib.convert({"layers.w": x}, config(4))
  bits.assert_bits_equal(got["layers_2.w"], x[:, 2])
  text = refused({"layers.w": x}, config(4, param_scan_axis=None))
  assert "[0, 1]" in text
  assert "`param_scan_axis`" in text


def test_an_undeclared_axis_is_found_where_one_fits():
  x = np.arange(60, dtype=np.float32).reshape(4, 3, 5)
  got = convert_lib.convert({"layers.w": x}, config(3, param_scan_axis=None))
  bits.assert_bits_equal(got["layers_1.w"], x[:, 1])


def test_F07_stacks_of_some_layers_are_segments_with_their_own_numbers():
  tree = {
    "dense_layers.mlp.kernel": np.stack([full((4, 6), i) for i in (0, 1)], 1),
    "moe_layers.mlp.kernel": np.stack([full((4, 6), i) for i in (7, 8, 9)], 1),
  }
  got = convert_lib.convert(tree, config(5))
  assert [float(np.asarray(x)[0, 0]) for x in got.values()] == [0, 1, 7, 8, 9]
  names = list(got)
  assert names[0] == "dense_layers_0.mlp.kernel"
  assert names[2] == "moe_layers_0.mlp.kernel"
  # A stack whose length differs from the layers it must hold is refused.
  assert "expected 4" in refused(tree, config(6))


@pytest.mark.parametrize(
  ("layers", "dims", "cycle", "message"),
  [
    (12, (8, 4, 5), 4, "has 4 layers on axis 1, expected 3"),
    (10, (8, 3, 5), 4, "is not 0 + a multiple of the cycle 4"),
  ],
)
def test_lengths_of_a_cycle(layers, dims, cycle, message):
  tree = {f"layers.layer_{s}.w": shape(*dims) for s in range(cycle)}
  text = refused(tree, config(layers, inhomogeneous_layer_cycle_interval=cycle))
  assert message in text
  assert "`layers.layer_0.w`" in text


def test_a_slot_beyond_the_cycle():
  tree = {f"layers.layer_{s}.w": shape(8, 3, 5) for s in (0, 1, 2, 3, 4)}
  text = refused(tree, config(12, inhomogeneous_layer_cycle_interval=4))
  assert "`layers.layer_4.w`" in text
  assert "slots 0 to 3" in text


def test_wrong_length_on_the_stacked_axis():
  text = refused({"layers.w": shape(8, 5, 4)}, config(6))
  assert (
    "`layers.w` float32[8, 5, 4]: has 5 layers on axis 1, expected 6" in text
  )


def test_a_layers_scalar_cannot_be_synced():
  text = refused({"layers.w": shape(8, 5, 4), "layers.s": shape(5)}, config(5))
  assert "`layers.s` float32[5]: has no axis besides its stacked ones" in text


# Names.


def test_F08_roots_are_stripped_and_kept_apart():
  w = full((4, 4), 1)
  tree = {"base": {"decoder": {"layers_0": {"mlp": {"wo": w}}}}}
  cfg = config(1, scan_layers=False)
  for root in ({"model": 1}, {"model": {"model": 1}}):
    leaf = {"decoder": {"layers_0": {"mlp": {"wo": shape(4, 4)}}}}
    target = {"model": leaf if root["model"] == 1 else {"model": leaf}}
    assert list(plan_lib.make_plan(tree, cfg, target).outputs()) == [
      "decoder.layers_0.mlp.wo"
    ]
  both = {"base": {"w": w}, "model": {"w": w + 1}}
  with pytest.raises(ValueError, match="roots base, model with different"):
    plan_lib.make_plan(both, cfg)


def test_F09_integers_are_source_only_and_order_is_agreed():
  tree = {
    "C": full((4, 4), 3),
    "B_count": np.full((4, 4), 2, np.int32),
    "A": full((4, 4), 1),
  }
  target = {"A": shape(4, 4), "C": shape(4, 4)}
  plan = plan_lib.make_plan(tree, config(1), target)
  assert list(plan.outputs()) == ["A", "C"]
  assert [name for name, _ in plan.dropped] == ["B_count"]
  got = convert_lib.convert(tree, config(1), target)
  assert (np.asarray(got["C"]) == 3).all()


def test_F10_F11_names_without_a_counterpart_are_named():
  tree = {"layers.self_attention.linear_qgkv.kernel": shape(4, 2, 6)}
  target = {
    f"language_model.layers_{i}.self_attention.linear_qkv.kernel": shape(4, 6)
    for i in range(2)
  }
  text = refused(tree, config(2), target)
  assert "`layers.self_attention.linear_qgkv.kernel`" in text
  assert "`language_model.layers_0.self_attention.linear_qkv.kernel`" in text


# Nothing is lost and nothing keeps its old value.


def layer_tree(layers, params=4):
  return {f"layers.p{i}.kernel": shape(4, layers, 6) for i in range(params)}


def layer_target(layers, params=4):
  return {
    f"layers_{n}.p{i}.kernel": shape(4, 6)
    for n in range(layers)
    for i in range(params)
  }


def test_F12_target_layers_without_a_source():
  text = refused(layer_tree(2), config(2), layer_target(3))
  assert "8 of 12 target leaves matched" in text
  assert "`layers_2.p0.kernel`" in text


def test_source_layers_without_a_target():
  text = refused(layer_tree(3), config(3), layer_target(2))
  assert "`layers.p0.kernel`" in text
  assert "`layers_2.p0.kernel`" in text


def test_F13_an_extra_source_leaf():
  tree = layer_tree(2)
  tree["layers.mlp.extra.kernel"] = shape(4, 2, 6)
  text = refused(tree, config(2), layer_target(2))
  assert "1 trainer leaves have no target" in text
  assert "`layers.mlp.extra.kernel`" in text


@pytest.mark.parametrize(
  "tree", [{}, {"layers.cache.key": shape(4, 2, 6)}, {"n": np.int32(3)}]
)
def test_F14_nothing_to_move(tree):
  with pytest.raises(ValueError, match="nothing to move"):
    plan_lib.make_plan(tree, config(2), layer_target(1))


# What is bound.


def test_F15_both_forms_of_rng_keys_are_dropped():
  tree = {
    "w.kernel": np.zeros((8, 128), "bfloat16"),
    "new": jax.random.key(0),
    "old": jax.random.PRNGKey(0),
  }
  plan = plan_lib.make_plan(tree, config(1))
  assert list(plan.outputs()) == ["w.kernel"]
  assert {name for name, _ in plan.dropped} == {"new", "old"}


def test_F16_caches_are_left_out_by_whole_path_parts():
  target = {
    "layers_0": {
      "attn": {"k": shape(4, 4)},
      "cache": {"key": shape(4, 4), "cached_prefill_key": shape(4, 4)},
    },
    "cache_proj": {"kernel": shape(4, 4)},
    "kv_cache_norm_scale": shape(4),
  }
  source = {
    "layers_0.attn.k": shape(4, 4),
    "cache_proj.kernel": shape(4, 4),
    "kv_cache_norm_scale": shape(4),
  }
  plan = plan_lib.make_plan(source, config(1, scan_layers=False), target)
  assert len(plan.outputs()) == 3


def test_F17_trees_without_floating_leaves():
  tree = {"a": np.zeros((4, 4), np.int8), "b": np.zeros(3, np.int32)}
  with pytest.raises(ValueError, match=r"0 of 2 leaves .*`a` int8\[4, 4\]"):
    plan_lib.make_plan(tree, config(1))


@pytest.mark.parametrize(
  "dtype", ["bfloat16", "float32", "float16", "float8_e4m3fn"]
)
def test_F18_all_floating_dtypes_are_weights(dtype):
  tree = {"w": shape(4, 4, dtype=dtype)}
  plan = plan_lib.make_plan(tree, config(1, weight_dtype=dtype))
  assert plan.outputs()["w"].dtype.name == dtype


# Padding of experts.


def experts(width, layers=1, embed=16, count=2):
  return {
    "layers.moe.wi_0": shape(count, layers, embed, width),
    "layers.moe.wi_1": shape(count, layers, embed, width),
    "layers.moe.wo": shape(count, layers, width, embed),
  }


@pytest.mark.parametrize(
  ("width", "tp", "padded"),
  [
    (512, 4, 1024),
    (512, 8, 2048),
    (704, 4, 1024),
    (768, 1, 768),
    (1536, 4, 2048),
  ],
)
def test_F22_the_two_lane_rule(width, tp, padded):
  cfg = config(1, prefuse_moe_weights=True, moe_mlp_tp_size=tp)
  plan = plan_lib.make_plan(experts(width), cfg)
  outputs = plan.outputs()
  assert outputs["layers_0.moe.wi"].shape[-1] == 2 * padded
  assert outputs["layers_0.moe.wo"].shape[-2] == padded
  assert bool(plan.warnings) == (padded > 1.5 * width)
  if plan.warnings:
    added = 2 * 16 * (padded - width) * 4
    assert any(f"{2 * added} bytes" in w for w in plan.warnings)


@pytest.mark.parametrize(
  ("width", "tp", "padded"), [(512, 4, 512), (768, 8, 1024), (1536, 4, 1536)]
)
def test_F22_the_one_lane_rule_by_a_target(width, tp, padded):
  target = {
    "layers_0.moe.wi": shape(2, 16, 2 * padded),
    "layers_0.moe.wo": shape(2, padded, 16),
  }
  cfg = config(1, moe_mlp_tp_size=tp)
  plan = plan_lib.make_plan(experts(width), cfg, target)
  assert plan.outputs()["layers_0.moe.wo"].shape[-2] == padded


def test_F19_padding_goes_into_every_shard():
  tree = {
    name: np.ones(x.shape, np.float32) for name, x in experts(768).items()
  }
  cfg = config(1, padded_base_moe_mlp_dim=1024, moe_mlp_tp_size=8)
  got = convert_lib.convert(tree, cfg)
  wi = np.asarray(got["layers_0.moe.wi_0"])
  assert (wi.reshape(2, 16, 8, 128).sum(-1) == 96).all()


def test_F20_wo_is_padded_by_a_target_and_never_repeated():
  tree = {
    name: np.ones(x.shape, np.float32) for name, x in experts(704).items()
  }
  target = {
    "layers_0.moe.wi": shape(2, 16, 2048),
    "layers_0.moe.wo": shape(2, 1024, 16),
  }
  got = convert_lib.convert(tree, config(1, moe_mlp_tp_size=4), target)
  rows = np.asarray(got["layers_0.moe.wo"])[0, :, 0].reshape(4, 256)
  assert (rows[:, :176] == 1).all()
  assert (rows[:, 176:] == 0).all()


def test_F25_widths_that_do_not_divide():
  cfg = config(1, prefuse_moe_weights=True, moe_mlp_tp_size=8)
  text = refused(experts(100), cfg)
  assert "`layers.moe.wi_0`" in text
  assert "100 does not divide by 8 shards" in text
  plan = plan_lib.make_plan(experts(1856), cfg)
  assert plan.outputs()["layers_0.moe.wo"].shape[-2] == 2048


def test_the_targets_own_sharding_gives_the_shards():
  devices = np.array(jax.devices()[:2])
  sharding = NamedSharding(Mesh(devices, ("tp",)), P(None, None, "tp"))
  down = NamedSharding(Mesh(devices, ("tp",)), P(None, "tp"))
  target = {
    "layers_0.moe.wi": jax.ShapeDtypeStruct(
      (2, 16, 512), np.float32, sharding=sharding
    ),
    "layers_0.moe.wo": jax.ShapeDtypeStruct(
      (2, 256, 16), np.float32, sharding=down
    ),
  }
  rng = np.random.default_rng(2)
  tree = {n: rng.random(x.shape, np.float32) for n, x in experts(192).items()}
  got = convert_lib.convert(tree, config(1), target)
  want = convert_lib.convert(tree, config(1, moe_mlp_tp_size=2), target)
  for name, x in want.items():
    bits.assert_bits_equal(got[name], x)


def test_a_gate_without_its_up():
  tree = experts(256)
  del tree["layers.moe.wi_1"]
  cfg = config(1, prefuse_moe_weights=True)
  text = refused(tree, cfg)
  assert "`layers.moe.wi_0`" in text
  assert "no `wi_1`" in text


def test_shared_experts_are_neither_joined_nor_padded():
  tree = experts(256)
  for part in ("wi_0", "wi_1"):
    tree[f"layers.shared_experts.{part}.kernel"] = shape(16, 1, 100)
  cfg = config(1, prefuse_moe_weights=True)
  outputs = plan_lib.make_plan(tree, cfg).outputs()
  assert outputs["layers_0.shared_experts.wi_0.kernel"].shape == (16, 100)


def test_a_trainer_built_padded_is_only_joined():
  cfg = config(
    1,
    prefuse_moe_weights=True,
    padded_base_moe_mlp_dim=512,
    moe_mlp_tp_size=2,
  )
  plan = plan_lib.make_plan(experts(512), cfg)
  assert plan.outputs()["layers_0.moe.wi"].shape[-1] == 1024
  assert not plan.warnings


def test_F23_a_joined_source_is_padded_in_both_halves():
  x = np.arange(1, 13, dtype=np.float32).reshape(1, 1, 1, 12)
  tree = {
    "layers.moe.wi": x,
    "layers.moe.wo": np.ones((1, 1, 6, 4), np.float32),
  }
  target = {
    "layers_0.moe.wi": shape(1, 1, 16),
    "layers_0.moe.wo": shape(1, 8, 4),
  }
  got = convert_lib.convert(tree, config(1), target)
  want = [1, 2, 3, 4, 5, 6, 0, 0, 7, 8, 9, 10, 11, 12, 0, 0]
  assert np.asarray(got["layers_0.moe.wi"]).ravel().tolist() == want


def test_experts_with_biases_are_never_padded():
  tree = experts(96)
  tree["layers.moe.wi_0_bias"] = shape(2, 1, 96)
  tree["layers.moe.wi_1_bias"] = shape(2, 1, 96)
  cfg = config(1, prefuse_moe_weights=True)
  outputs = plan_lib.make_plan(tree, cfg).outputs()
  assert outputs["layers_0.moe.wi"].shape[-1] == 192
  target = {name: shape(*x.shape) for name, x in outputs.items()}
  target["layers_0.moe.wi"] = shape(2, 16, 512)
  target["layers_0.moe.wo"] = shape(2, 256, 16)
  assert "biases beside it stay 96 wide" in refused(tree, cfg, target)


# KV heads.


def attention(heads, dim=4):
  return {
    "layers.attn.key.kernel": shape(16, 1, heads, dim),
    "layers.attn.key.bias": shape(heads, 1, dim),
    "layers.attn.key_norm.scale": shape(dim, 1),
  }


def test_F30_heads_and_their_biases_repeat_in_place():
  tree = {}
  for name, x in attention(2).items():
    axis = x.shape.index(2) if 2 in x.shape else None
    if axis is None:
      tree[name] = np.zeros(x.shape, np.float32)
    else:
      order = np.arange(2, dtype=np.float32)
      dims = [1] * len(x.shape)
      dims[axis] = 2
      tree[name] = np.broadcast_to(order.reshape(dims), x.shape).copy()
  got = convert_lib.convert(tree, config(1, kv_tp_size=8))
  want = [0, 0, 0, 0, 1, 1, 1, 1]
  assert np.asarray(got["layers_0.attn.key.kernel"])[3, :, 1].tolist() == want
  assert np.asarray(got["layers_0.attn.key.bias"])[:, 2].tolist() == want
  assert got["layers_0.attn.key_norm.scale"].shape == (4,)


def test_F31_a_flattened_bias_repeats_by_heads():
  tree = {"layers.attn.key.bias": np.arange(8, dtype=np.float32)[:, None]}
  cfg = config(1, base_num_kv_heads=2)
  target = {"layers_0.attn.key.bias": shape(32)}
  got = convert_lib.convert(tree, cfg, target)
  want = [0, 1, 2, 3] * 4 + [4, 5, 6, 7] * 4
  assert np.asarray(got["layers_0.attn.key.bias"]).tolist() == want


def test_a_key_norm_over_all_heads_repeats_with_them():
  """Olmo 3 norms all keys at once; other models norm every head by itself."""
  scale = np.arange(8, dtype=np.float32)[:, None]
  tree = {
    "layers.attn.key.kernel": full((16, 1, 2, 4), 1),
    "layers.attn.key_norm.scale": scale,
  }
  cfg = config(1, kv_tp_size=4)
  got = convert_lib.convert(tree, cfg)
  want = [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7, 4, 5, 6, 7]
  assert np.asarray(got["layers_0.attn.key_norm.scale"]).tolist() == want
  target = {name: shape(*x.shape) for name, x in got.items()}
  aimed = convert_lib.convert(tree, config(1), target)
  assert np.asarray(aimed["layers_0.attn.key_norm.scale"]).tolist() == want
  tree["layers.attn.key_norm.scale"] = scale[:4]
  got = convert_lib.convert(tree, cfg)
  assert got["layers_0.attn.key_norm.scale"].shape == (4,)


@pytest.mark.parametrize(("heads", "tp"), [(3, 8), (8, 12), (6, 4)])
def test_F32_heads_that_do_not_divide(heads, tp):
  text = refused(attention(heads), config(1, kv_tp_size=tp))
  assert "`layers.attn.key.kernel`" in text
  assert f"{heads} KV heads and `kv_tp_size` {tp}" in text


def test_with_a_target_only_heads_repeat():
  tree = attention(2)
  target = {
    "layers_0.attn.key.kernel": shape(16, 8, 4),
    "layers_0.attn.key.bias": shape(8, 4),
    "layers_0.attn.key_norm.scale": shape(8),
  }
  text = refused(tree, config(1), target)
  assert "`layers.attn.key_norm.scale`" in text
  assert "only KV heads are repeated" in text


# dtypes, ranks and sizes.


def test_F35_a_kept_leaf_arrives_bit_equal():
  bias = np.array([1, 1 + 2**-10], np.float32)
  tree = {"router.bias": bias, "w.kernel": full((2, 2), 0.5)}
  cfg = SyncConfig(num_decoder_layers=1, keep_dtype=("*.bias",))
  got = convert_lib.convert(tree, cfg)
  bits.assert_bits_equal(got["router.bias"], bias)
  assert got["w.kernel"].dtype.name == "bfloat16"


def test_names_do_not_decide_dtypes():
  tree = {"layers.shared_expert_gate.kernel": shape(4, 1, 1)}
  plan = plan_lib.make_plan(tree, SyncConfig(num_decoder_layers=1))
  (out,) = plan.outputs().values()
  assert out.dtype.name == "bfloat16"


def test_F36_the_declared_dtype_is_what_is_moved():
  plan = plan_lib.make_plan(
    {"w": shape(1024, 1024)}, SyncConfig(num_decoder_layers=1)
  )
  assert plan.out_bytes == 2_097_152


def test_F37_dtypes_without_a_cast_between_them():
  tree = {"w": shape(8, 128, dtype="float8_e4m3fn")}
  text = refused(tree, config(1), {"w": shape(8, 128)})
  assert "float8_e4m3fn" in text
  assert "float32" in text
  plan = plan_lib.make_plan(
    {"w": shape(8, 128)}, config(1), {"w": shape(8, 128, dtype="bfloat16")}
  )
  assert plan.outputs()["w"].dtype.name == "bfloat16"


def test_F38_F39_sizes_are_exact():
  plan = plan_lib.make_plan(
    {
      "a": shape(262144, 5376, dtype="bfloat16"),
      "b": shape(2**30 + 2048, dtype="bfloat16"),
    },
    config(1, weight_dtype="bfloat16"),
  )
  assert plan.source_bytes == 2_818_572_288 + 2**31 + 4096
  three = plan_lib.make_plan(
    {n: shape(2**30, dtype="bfloat16") for n in "abc"},
    config(1, weight_dtype="bfloat16"),
  )
  assert three.out_bytes == 6_442_450_944


@pytest.mark.parametrize("dims", [(5, 7), (7, 6)])
def test_F80_other_shapes_are_refused_by_name(dims):
  tree = {"w": shape(7, 5, dtype="bfloat16")}
  text = refused(tree, config(1), {"w": shape(*dims, dtype="bfloat16")})
  assert "`w` bfloat16[7, 5]" in text
  assert str(list(dims)) in text


def test_ranks_that_differ():
  text = refused({"w": shape(7, 5)}, config(1), {"w": shape(7)})
  assert "rank 2" in text
  assert "rank 1" in text


def test_several_problems_come_together():
  tree = {"layers.a": shape(4, 3, 5), "layers.b": shape(4, 2, 5)}
  text = refused(tree, config(5))
  assert "2 problems in all" in text.splitlines()[0]
  assert "`layers.a`" in text
  assert "`layers.b`" in text


def test_a_plan_is_made_for_its_target():
  """A plan without a target is not used for one with it."""
  tree = experts(192)
  cfg = config(1, prefuse_moe_weights=True)
  free = plan_lib.make_plan(tree, cfg).outputs()
  target = {
    "layers_0.moe.wi": shape(2, 16, 1024),
    "layers_0.moe.wo": shape(2, 512, 16),
  }
  aimed = plan_lib.make_plan(tree, cfg, target).outputs()
  assert free["layers_0.moe.wi"].shape != aimed["layers_0.moe.wi"].shape
