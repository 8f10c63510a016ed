"""MaxText's configuration files, and what is derived for the rollout."""

import json

import jax
import jax.numpy as jnp
import pytest

from laneweave.sync import meshes, model_config, sharding_rules
from laneweave.tests.sync import fixtures

FIELDS = {
  "num_decoder_layers": 2,
  "scan_layers": True,
  "param_scan_axis": 1,
  "inhomogeneous_layer_cycle_interval": 1,
}


def load(tmp_path, fields, name="c.json"):
  path = tmp_path / name
  path.write_text(fields if isinstance(fields, str) else json.dumps(fields))
  return model_config.load(path, tmp_path / "x.npz")


def rules(mesh, text=""):
  spec = meshes.parse(mesh, "rollout_mesh")
  parsed = sharding_rules.parse(text, {"trainer": spec, "rollout": spec})
  return parsed["rollout"]


def shapes(name):
  return {
    k: jax.ShapeDtypeStruct(x.shape, x.dtype)
    for k, x in fixtures.weights(name).items()
  }


def derive(name, mesh, text="", fields=None, **overrides):
  return model_config.derive(
    {**fixtures.trainer_config(name), **(fields or {})},
    shapes(name),
    rules(mesh, text),
    **overrides,
  )


def test_json_and_yaml_are_read(tmp_path):
  assert load(tmp_path, FIELDS) == FIELDS
  text = "\n".join(f"{k}: {json.dumps(v)}" for k, v in FIELDS.items())
  assert load(tmp_path, text, "c.yml") == FIELDS


@pytest.mark.parametrize(
  ("checkpoint", "config"),
  [
    ("m.trainer.npz", "m.config.json"),
    ("m.npz", "m.config.json"),
    ("m.safetensors", "m.config.json"),
    ("m", "m.config.json"),
  ],
)
def test_the_file_beside_the_checkpoint_is_found(tmp_path, checkpoint, config):
  (tmp_path / config).write_text(json.dumps(FIELDS))
  assert model_config.load(None, tmp_path / checkpoint) == FIELDS


def test_without_a_file_the_fields_it_needs_are_named(tmp_path):
  with pytest.raises(ValueError, match=r"no m\.config\.json beside") as caught:
    model_config.load(None, tmp_path / "m.npz")
  for field in FIELDS:
    assert field in str(caught.value)


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_missing_field_is_named(tmp_path, field):
  fields = {k: v for k, v in FIELDS.items() if k != field}
  with pytest.raises(ValueError, match=f"has no `{field}`"):
    load(tmp_path, fields)


def test_a_misspelt_field_is_not_ignored(tmp_path):
  with pytest.raises(ValueError, match="has `base_num_kv_head`, probably for"):
    load(tmp_path, {**FIELDS, "base_num_kv_head": 4})


def test_maxtexts_yaml_gives_the_base_number_of_layers(tmp_path):
  fields = {**FIELDS, "base_num_decoder_layers": 6}
  del fields["num_decoder_layers"]
  found = load(tmp_path, fields)
  cfg, _ = model_config.derive(
    found | {"param_scan_axis": 1}, shapes("qwen3-dense-tiny"), rules("tp=1")
  )
  assert cfg.num_decoder_layers == 6


@pytest.mark.parametrize(
  ("text", "name"),
  [
    ("{", "c.json"),
    ("[]", "c.json"),
    ("3", "c.yml"),
    ("a: [", "c.yml"),
    ("1: 2", "c.yml"),
    ("!!python/object/apply:os.system [id]", "c.yml"),
  ],
)
def test_what_is_no_configuration_is_refused_in_one_line(tmp_path, text, name):
  with pytest.raises(ValueError, match="`--maxtext_config`") as caught:
    load(tmp_path, text, name)
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("mesh", "text", "shards", "kv"),
  [
    ("fsdp=4", "", 1, 1),
    ("fsdp=2,tp=2", "", 2, 2),
    ("tp=4", "", 4, 4),
    ("tp=2", "mlp_moe=", 1, 2),
    ("tp=2", "exp=tp", 1, 2),
    ("tp=2", "kv_heads=", 2, 1),
    ("fsdp=2,tp=2", "embed=,mlp=tp+fsdp", 4, 2),
  ],
)
def test_shards_are_those_of_the_rollouts_mesh(mesh, text, shards, kv):
  cfg, remarks = derive("qwen3-moe-tiny", mesh, text)
  assert (cfg.moe_mlp_tp_size, cfg.kv_tp_size) == (shards, kv)
  assert cfg.prefuse_moe_weights
  assert not remarks


def test_a_dense_model_is_not_fused():
  cfg, _ = derive("qwen3-dense-tiny", "tp=2")
  assert not cfg.prefuse_moe_weights
  assert cfg.moe_mlp_tp_size == 1


def test_the_trainers_dtype_is_not_the_rollouts():
  assert fixtures.trainer_config("qwen3-moe-tiny")["weight_dtype"] == "float32"
  cfg, _ = derive("qwen3-moe-tiny", "tp=2", weight_dtype="bfloat16")
  assert cfg.weight_numpy_dtype == jnp.bfloat16


def test_a_multiple_of_the_meshs_shards_is_pointed_out():
  fields = {"moe_mlp_tp_size": 4}
  cfg, remarks = derive("qwen3-moe-tiny", "tp=2", fields=fields)
  assert cfg.moe_mlp_tp_size == 4
  assert "each device holds 2 shards" in remarks[0]


def test_shards_that_a_device_would_hold_a_part_of_are_refused():
  with pytest.raises(ValueError, match="hold a part of a shard"):
    derive("qwen3-moe-tiny", "tp=4", fields={"moe_mlp_tp_size": 2})


@pytest.mark.parametrize(
  "fields",
  [{"scan_layers": "yes"}, {"keep_dtype": "*"}, {"num_decoder_layers": "6"}],
)
def test_values_of_another_type_are_refused(fields):
  with pytest.raises(ValueError, match=next(iter(fields))):
    derive("qwen3-dense-tiny", "tp=1", fields=fields)
