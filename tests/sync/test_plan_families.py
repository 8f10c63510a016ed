"""Families of trees: which layers, which axes, which dtypes."""

import itertools
import re

import jax
import numpy as np
import pytest

from laneweave.sync import convert as convert_lib
from laneweave.sync import plan as plan_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.rules import axes


def shape(*dims, dtype="float32"):
  return jax.ShapeDtypeStruct(dims, np.dtype(dtype))


def config(layers, **fields):
  return SyncConfig(
    **{"num_decoder_layers": layers, "weight_dtype": "float32", **fields}
  )


def refused(tree, cfg, target=None) -> str:
  with pytest.raises(plan_lib.PlanError) as caught:
    plan_lib.make_plan(tree, cfg, target)
  return str(caught.value)


def scan(layers, axis, *, param=True):
  """Stacks arrays as MaxText's `create_scanned_layers` does."""
  x = np.stack(layers)
  return np.moveaxis(x, 0, axis) if param and x.ndim > axis else x


# Stacked axes.


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize("block", [(5,), (5, 6), (2, 5, 6), (1,)])
def test_positions_are_those_of_nested_scans(axis, block):
  numbers = np.arange(6.0).reshape(2, 3)
  full = [[np.full(block, n) for n in row] for row in numbers]
  once = scan(full[0], axis)
  twice = scan([scan(row, axis) for row in full], axis)
  for x, want in ((once, numbers[0]), (twice, numbers)):
    count = want.ndim
    at = axes.stacked_positions(len(block), count, axis)
    got = np.moveaxis(x, at, range(count)).reshape(*want.shape, -1)
    assert (got == want[..., None]).all()


def model(axis, blocks=2, local=3, left=2):
  """Blocks of local and global layers, full of their own layer's number."""
  parts = {"norm.scale": (7,), "mlp.wo.kernel": (5, 6), "a.k": (2, 3, 4)}
  number = itertools.count()
  order = [
    [[next(number) for _ in range(local)], next(number)] for _ in range(blocks)
  ]
  rest = [next(number) for _ in range(left)]
  tree = {}
  for name, dims in parts.items():

    def of(n, dims=dims):
      return np.full(dims, n, np.float32)

    inner = [scan([of(n) for n in row[0]], axis) for row in order]
    tree[f"layers.local_layers.{name}"] = scan(inner, axis)
    tree[f"layers.global_layer.{name}"] = scan([of(r[1]) for r in order], axis)
    if left:
      tree[f"layers_remainder.local_layers.{name}"] = scan(
        [of(n) for n in rest], axis
      )
  return tree


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("cycle", "left"), [(4, 0), (4, 2), (1, 0), (1, 2)])
def test_blocks_run_local_layers_first(axis, cycle, left):
  cfg = config(
    8 + left, param_scan_axis=axis, inhomogeneous_layer_cycle_interval=cycle
  )
  got = convert_lib.convert(model(axis, left=left), cfg)
  assert len(got) == 3 * (8 + left)
  for name, x in got.items():
    layer = int(re.match(r"layers_(\d+)\.", name)[1])
    assert (np.asarray(x) == layer).all(), name


def test_blocks_that_do_not_divide():
  text = refused(model(1, left=0), config(9))
  assert "does not divide into blocks" in text
  assert "`layers.local_layers.norm.scale`" in text
  tree = model(1, left=0)
  tree["layers.other.w"] = shape(4, 2, 4)
  assert "`layers.other.w`" in refused(tree, config(8))
  only = {n: x for n, x in model(1).items() if "global" not in n}
  assert "without a `global_layer`" in refused(only, config(10))


def test_a_model_shorter_than_its_cycle_is_all_remainder():
  tree = {
    f"layers_remainder.layers_{i}.w": np.full((2, 3), i, np.float32)
    for i in range(3)
  }
  got = convert_lib.convert(tree, config(3))
  assert [int(np.asarray(x)[0, 0]) for x in got.values()] == [0, 1, 2]
  assert list(got) == [f"layers_{i}.w" for i in range(3)]
  assert "is not 0 + a multiple" in refused(tree, config(4))
  del tree["layers_remainder.layers_1.w"]
  assert "without a gap" in refused(tree, config(3))


@pytest.mark.parametrize(
  ("dims", "name", "axis"),
  [
    ((3, 5), "moe_layers.MoeBlock_0.gate.bias", 0),
    ((5, 3), "moe_layers.MoeBlock_0.gate.bias", 1),
    ((3, 3), "moe_layers.MoeBlock_0.gate.bias", 0),
    ((3, 3), "moe_layers.GptOssMlp.gate.bias", 1),
    ((3, 3), "moe_layers.MoeBlock_0.gate.scale", 1),
  ],
)
def test_a_routers_bias_is_stacked_on_axis_0(dims, name, axis):
  plan = plan_lib.make_plan({name: shape(*dims)}, config(3))
  assert plan.entries[0].layout.scan_axes == (axis,)


@pytest.mark.parametrize(("kind", "axis"), [("MoEBiasVar", 0), ("Param", 1)])
def test_its_type_decides_where_the_tree_tells_it(kind, axis):
  leaf = {
    "path": "moe_layers.MoeBlock_0.gate.bias",
    "shape": [3, 3],
    "dtype": "float32",
    "kind": kind,
  }
  plan = plan_lib.make_plan({"leaves": [leaf]}, config(3))
  assert plan.entries[0].layout.scan_axes == (axis,)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_experts_may_be_stacked_on_any_axis(axis):
  rng = np.random.default_rng(3)
  gate, up = rng.random((2, 3, 2, 4, 6), np.float32)
  tree = {
    "layers.moe.wi_0": scan(gate, axis),
    "layers.moe.wi_1": scan(up, axis),
  }
  cfg = config(
    3,
    param_scan_axis=axis,
    prefuse_moe_weights=True,
    padded_base_moe_mlp_dim=8,
    moe_mlp_tp_size=2,
  )
  got = convert_lib.convert(tree, cfg)
  for layer in range(3):
    want = np.zeros((2, 4, 2, 2, 4), np.float32)
    for half, x in enumerate((gate[layer], up[layer])):
      want[..., half, :3] = x.reshape(2, 4, 2, 3)
    x = np.asarray(got[f"layers_{layer}.moe.wi"])
    assert (x == want.reshape(2, 4, 16)).all()


def test_unstacked_layers_come_before_the_stack():
  tree = {
    "layers_0.w": np.full((2, 3), 0, np.float32),
    "layers_1.w": np.full((2, 3), 1, np.float32),
    "scanned_blocks.layers_0.w": scan(
      [np.full((2, 3), n, np.float32) for n in (2, 4)], 1
    ),
    "scanned_blocks.layers_1.w": scan(
      [np.full((2, 3), n, np.float32) for n in (3, 5)], 1
    ),
  }
  got = convert_lib.convert(tree, config(6))
  assert len(got) == 6
  for layer in range(6):
    assert (np.asarray(got[f"layers_{layer}.w"]) == layer).all()


def test_segments_must_make_up_the_decoder():
  tree = {
    "dense_layers.w.kernel": shape(4, 2, 5),
    "dense_layers.norm.scale": shape(4, 2),
    "moe_layers.w.kernel": shape(4, 3, 5),
  }
  assert len(plan_lib.make_plan(tree, config(5)).outputs()) == 7
  assert "expected 4" in refused(tree, config(6))
  assert "none are left for `moe_layers`" in refused(tree, config(2))
  tree["dense_layers.norm.scale"] = shape(4, 3)
  assert "`dense_layers.norm.scale`" in refused(tree, config(5))
  text = refused(tree, config(5, param_scan_axis=None))
  assert "set `param_scan_axis`" in text


def test_missing_slots():
  tree = {f"layers.layer_{s}.w": shape(8, 3, 5) for s in (0, 1, 3)}
  text = refused(tree, config(12, inhomogeneous_layer_cycle_interval=4))
  assert "slots [2] of a cycle of 4" in text


# Trees that are not stacked, and trees of unknown families.


def test_a_tree_that_is_not_stacked_keeps_its_names():
  tree = {"decoder": {"layers": [{"w": shape(2, 3)}, {"w": shape(2, 3)}]}}
  plan = plan_lib.make_plan(tree, config(2, scan_layers=False))
  assert [e.sources for e in plan.entries] == [
    ("decoder.layers.0.w",),
    ("decoder.layers.1.w",),
  ]
  assert list(plan.outputs()) == ["decoder.layers_0.w", "decoder.layers_1.w"]


def test_encoders_are_never_stacked():
  tree = {
    "decoder.layers.w": shape(4, 2, 5),
    "vision_encoder.Encoder_0.layers.0.w": shape(4, 2),
    "vision_encoder.Encoder_0.layers.0.key.kernel": shape(8, 3, 4),
  }
  plan = plan_lib.make_plan(tree, config(2, kv_tp_size=2))
  outputs = plan.outputs()
  assert outputs["vision_encoder.Encoder_0.layers_0.w"].shape == (4, 2)
  # Three heads do not divide by two shards: they are not the decoder's.
  name = "vision_encoder.Encoder_0.layers_0.key.kernel"
  assert outputs[name].shape == (8, 3, 4)


@pytest.mark.parametrize(
  "container",
  [
    "blocks",
    "pipeline_module",
    "layers_outside_pipeline",
    "moe_layers_outside_pipeline",
    "moe_layers_3_7",
    "dense_layers_engram_1",
    "tower",
  ],
)
def test_F11_an_unknown_container_is_named(container):
  tree = {
    "token_embedder.embedding": shape(8, 4),
    f"decoder.{container}.mlp.kernel": shape(4, 3, 5),
    f"decoder.{container}.norm.scale": shape(4, 3),
  }
  text = refused(tree, config(3))
  assert f"`decoder.{container}` (2 leaves)" in text
  assert "1 leaves outside layers" in text
  assert "sync/rules/containers.py" in text


@pytest.mark.parametrize("container", ["layers_outside_pipeline", "my_blocks"])
def test_an_unknown_container_beside_a_known_one(container):
  tree = {
    "decoder.layers.mlp.kernel": shape(4, 3, 5),
    f"decoder.{container}.mlp.kernel": shape(4, 2, 5),
  }
  text = refused(tree, config(3))
  assert f"not recognised are `decoder.{container}` (1 leaves)" in text
  assert "recognised are `decoder.layers` (1 leaves)" in text


def test_an_unknown_container_that_the_target_has_is_no_error():
  tree = {"decoder.tower.mlp.kernel": shape(4, 3, 5)}
  plan = plan_lib.make_plan(tree, config(3), tree)
  assert plan.outputs()["decoder.tower.mlp.kernel"].shape == (4, 3, 5)
  target = {"decoder.tower_0.mlp.kernel": shape(4, 5)}
  text = refused(tree, config(3), target)
  assert "unknown family" in text.splitlines()[0]
  assert "`decoder.tower_0.mlp.kernel`" in text


def test_a_stack_in_a_tree_declared_unstacked():
  tree = {"decoder.layers.mlp.kernel": shape(4, 3, 5)}
  text = refused(tree, config(3, scan_layers=False))
  assert "`decoder.layers` (1 leaves)" in text
  assert "set `scan_layers`" in text


# dtypes.


@pytest.mark.parametrize(
  ("marker", "kept", "cast"),
  [
    (
      "layers_0.GptOssAttention.sinks",
      "layers_0.pre_self_attention_layer_norm.scale",
      "layers_0.GptOssMlp.gate.bias",
    ),
    (
      "layers_0.post_mlp_layer_norm.scale",
      "layers_0.post_self_attention_layer_norm.scale",
      "layers_0.attention.key_norm.scale",
    ),
    (
      "layers_0.pre_self_attention_norm.bias",
      "layers_0.pre_self_attention_norm.scale",
      "layers_0.mlp.mlp_layer_norm.scale",
    ),
    (
      "layers_0.self_attention.indexer.k_norm.bias",
      "layers_0.self_attention.indexer.weights_proj.kernel",
      "layers_0.self_attention.indexer.wk.kernel",
    ),
    (
      "layers_0.mlp.MoeBlock_0.tid2eid",
      "layers_0.mlp.MoeBlock_0.tid2eid",
      "layers_0.mlp.MoeBlock_0.gate.kernel",
    ),
    (
      "vision_encoder.E_0.vision_entry.input_projection.kernel",
      "vision_encoder.E_0.vision_entry.pos_emb_param",
      "vision_encoder.E_0.layer_0.mlp.wo.kernel",
    ),
    (
      "vision_encoder.E_0.blocks_0.attn.attn.key.kernel",
      "vision_encoder.E_0.blocks_0.ln1.scale",
      "vision_encoder.E_0.blocks_0.attn.attn.out.bias",
    ),
    (
      "audio_encoder.E_0.conv2d1.kernel",
      "audio_encoder.E_0.layers_0.input_layer_norm.bias",
      "audio_encoder.E_0.layers_0.AudioMLP.wi.kernel",
    ),
  ],
)
def test_leaves_that_their_family_keeps(marker, kept, cast):
  cfg = config(1, weight_dtype="bfloat16")

  def dtypes(*names):
    plan = plan_lib.make_plan({n: shape(8, 8) for n in names}, cfg)
    return {n: x.dtype.name for n, x in plan.outputs().items()}

  found = dtypes(marker, kept, cast)
  assert found[kept] == "float32"
  assert found[cast] == "bfloat16"
  if kept != marker and "encoder" not in marker:
    # The same name in another family follows `weight_dtype`.
    other = kept.replace("self_attention.indexer", "csa_compressor.indexer")
    assert dtypes(other, "layers_0.mlp.wo.kernel")[other] == "bfloat16"


def test_F35_patterns_name_the_source_or_every_layer():
  tree = {"layers.a.bias": shape(4, 2), "layers.b.bias": shape(4, 2)}

  def kept(*patterns):
    cfg = config(2, weight_dtype="bfloat16", keep_dtype=patterns)
    outputs = plan_lib.make_plan(tree, cfg).outputs()
    return {n for n, x in outputs.items() if x.dtype.name == "float32"}

  both = {"layers_0.a.bias", "layers_1.a.bias"}
  assert kept() == set()
  assert kept("layers.a.*") == both
  assert kept("layers_*.a.bias") == both
  assert kept("*.bias") == both | {"layers_0.b.bias", "layers_1.b.bias"}
  cfg = config(2, weight_dtype="bfloat16", keep_dtype=("layers_1.a.bias",))
  text = refused(tree, cfg)
  assert "names 1 of its 2 layers" in text
  assert "`layers_1.a.bias`" in text


def test_F37_a_target_decides_against_a_kept_dtype_and_says_so():
  cfg = config(1, keep_dtype=("w",))
  target = {"w": shape(8, 128, dtype="bfloat16")}
  plan = plan_lib.make_plan({"w": shape(8, 128)}, cfg, target)
  assert plan.outputs()["w"].dtype.name == "bfloat16"
  (warning,) = plan.warnings
  assert "`w` float32[8, 128]" in warning
  assert "bfloat16 (2 bytes an element, not 4)" in warning


def test_a_target_that_cannot_be_written_says_why():
  target = {"w": shape(4, 4, dtype="int8"), "v": shape(4, 4)}
  tree = {"w": shape(4, 4), "v": shape(4, 4)}
  text = refused(tree, config(1), target)
  assert "the target's `w` cannot be written: dtype int8" in text


# KV heads.


def test_F31_a_flattened_bias_takes_its_heads_from_its_kernel():
  tree = {
    "layers.a.key.kernel": shape(16, 1, 2, 4),
    "layers.a.key.bias": np.arange(8, dtype=np.float32)[:, None],
  }
  plan = plan_lib.make_plan(tree, config(1, kv_tp_size=8))
  assert plan.outputs()["layers_0.a.key.bias"].shape == (32,)
  del tree["layers.a.key.kernel"]
  text = refused(tree, config(1, kv_tp_size=8))
  assert "`layers.a.key.bias`" in text
  assert "set `base_num_kv_heads`" in text
  target = {"layers_0.a.key.bias": shape(32)}
  assert "set `base_num_kv_heads`" in refused(tree, config(1), target)
  assert len(plan_lib.make_plan(tree, config(1)).outputs()) == 1


def test_F32_a_target_whose_heads_are_no_multiple():
  tree = {"layers.a.key.kernel": shape(16, 1, 3, 4)}
  for heads in (8, 2):
    target = {"layers_0.a.key.kernel": shape(16, heads, 4)}
    text = refused(tree, config(1), target)
    assert f"3 KV heads cannot become the {heads} of the target" in text


def test_deepseek_4_has_one_kernel_for_keys_and_values():
  tree = {
    "layers.a.wkv.kernel": shape(16, 1, 1, 4),
    "layers.a.wkv_a.kernel": shape(16, 1, 4),
  }
  outputs = plan_lib.make_plan(tree, config(1, kv_tp_size=8)).outputs()
  assert outputs["layers_0.a.wkv.kernel"].shape == (16, 8, 4)
  assert outputs["layers_0.a.wkv_a.kernel"].shape == (16, 4)


def test_layers_with_heads_of_their_own():
  """Gemma 4: the configuration's number is that of the local layers."""
  tree = {
    "layers_0.a.key.kernel": shape(16, 8, 4),
    "layers_1.a.key.kernel": shape(16, 2, 4),
  }
  cfg = config(2, scan_layers=False, kv_tp_size=8, base_num_kv_heads=8)
  outputs = plan_lib.make_plan(tree, cfg).outputs()
  assert [x.shape[1] for x in outputs.values()] == [8, 8]


# Experts.


def experts(width, **more):
  return {
    "layers.moe.wi_0": shape(2, 1, 16, width),
    "layers.moe.wi_1": shape(2, 1, 16, width),
    "layers.moe.wo": shape(2, 1, width, 16),
    **more,
  }


def test_one_of_gate_and_up_alone():
  for missing in ("wi_0", "wi_1"):
    tree = experts(256)
    del tree[f"layers.moe.{missing}"]
    for fused in (True, False):
      text = refused(tree, config(1, prefuse_moe_weights=fused))
      assert f"has no `{missing}` beside it" in text


def test_gate_and_up_that_differ():
  tree = experts(256)
  tree["layers.moe.wi_1"] = shape(2, 1, 16, 128)
  text = refused(tree, config(1, prefuse_moe_weights=True))
  assert "`layers.moe.wi_1` float32[2, 1, 16, 128]" in text


def test_F20_padding_apart_goes_into_all_three():
  cfg = config(1, padded_base_moe_mlp_dim=1024, moe_mlp_tp_size=4)
  outputs = plan_lib.make_plan(experts(704), cfg).outputs()
  assert {n.split(".")[-1]: x.shape for n, x in outputs.items()} == {
    "wi_0": (2, 16, 1024),
    "wi_1": (2, 16, 1024),
    "wo": (2, 1024, 16),
  }


def test_padding_cannot_shrink():
  cfg = config(1, prefuse_moe_weights=True, padded_base_moe_mlp_dim=512)
  assert "narrower than the expert width 704" in refused(experts(704), cfg)


def test_F22_padding_by_an_unknown_number_of_shards_is_pointed_out():
  target = {
    "layers_0.moe.wi": shape(2, 16, 2048),
    "layers_0.moe.wo": shape(2, 1024, 16),
  }
  plan = plan_lib.make_plan(experts(704), config(1), target)
  assert any("as one shard" in text for text in plan.warnings)
  plan = plan_lib.make_plan(experts(704), config(1, moe_mlp_tp_size=4), target)
  assert not plan.warnings


def test_a_target_joins_by_having_wi():
  cfg = config(1, prefuse_moe_weights=True)
  target = {n.replace("layers", "layers_0"): x for n, x in experts(256).items()}
  target = {n: shape(2, *x.shape[2:]) for n, x in target.items()}
  outputs = plan_lib.make_plan(experts(256), cfg, target).outputs()
  assert set(outputs) == set(target)


# Coverage.


def test_F13_a_lenient_plan_lists_what_only_the_trainer_has():
  tree = {"a.kernel": shape(4, 4), "b.extra.kernel": shape(4, 4)}
  target = {"a.kernel": shape(4, 4)}
  assert "`b.extra.kernel`" in refused(tree, config(1), target)
  plan = plan_lib.make_plan(tree, config(1), target, strict=False)
  assert plan.source_only == ("b.extra.kernel",)
  assert list(plan.outputs()) == ["a.kernel"]
  # A target's leaf must always have a source.
  with pytest.raises(plan_lib.PlanError, match=r"would keep their old values"):
    plan_lib.make_plan(tree, config(1), target | {"c": shape(4)}, strict=False)


def test_F10_the_nearest_names_are_shown():
  tree = {"layers.w.kernel": shape(4, 2, 6)}
  target = {
    f"language_model.layers.{i}.w.kernel": shape(4, 6) for i in range(2)
  }
  text = refused(tree, config(2), target)
  assert "nearest to `layers_0.w.kernel` in the target" in text
  assert "`language_model.layers_0.w.kernel`" in text


def test_F80_both_sizes_are_in_the_message():
  tree = {"w": shape(7, 5, dtype="bfloat16")}
  text = refused(tree, config(1), {"w": shape(5, 7, dtype="bfloat16")})
  assert "(70 bytes)" in text
  # Another dtype of the same shape is cast, and declared at its own size.
  plan = plan_lib.make_plan(tree, config(1), {"w": shape(7, 5)})
  assert plan.byte_ranges() == {"w": (0, 140)}


def test_F39_ranges_do_not_overlap_beyond_4_gib():
  tree = {n: shape(2**30, dtype="bfloat16") for n in "abc"}
  plan = plan_lib.make_plan(tree, config(1, weight_dtype="bfloat16"))
  assert plan.byte_ranges() == {
    "a": (0, 2**31),
    "b": (2**31, 2**31),
    "c": (2**32, 2**31),
  }
  assert plan.out_bytes == 6_442_450_944


def test_two_sources_of_one_output():
  tree = {
    "layers.w": shape(4, 2, 6),
    "layers_1.w": shape(4, 6),
    "layers_0.w": shape(4, 6),
  }
  # The stack would be layers 2 and 3 of four.
  assert len(plan_lib.make_plan(tree, config(4)).outputs()) == 4
  tree = {"layers.0.w": shape(4, 6), "layers_0.w": shape(4, 6)}
  text = refused(tree, config(1, scan_layers=False))
  assert "`layers_0.w` would be written twice" in text


def test_the_other_backend_has_no_rules_yet():
  cfg = config(1, rollout_backend="vllm_torchax")
  assert "`rollout_backend` 'vllm_torchax'" in refused({"w": shape(4)}, cfg)
