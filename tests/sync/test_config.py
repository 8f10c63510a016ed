"""The configuration: what it accepts, and what it is called in MaxText."""

import dataclasses
import enum
import types

import ml_dtypes
import numpy as np
import pytest

from laneweave.sync.config import SyncConfig


class Dtype(enum.Enum):
  """As MaxText's own enumeration: the value is the name."""

  BF16 = "bfloat16"


@pytest.mark.parametrize(
  ("given", "name"),
  [
    ("bf16", "bfloat16"),
    ("fp32", "float32"),
    ("float16", "float16"),
    (np.float32, "float32"),
    (np.dtype(ml_dtypes.bfloat16), "bfloat16"),
    (Dtype.BF16, "bfloat16"),
  ],
)
def test_dtypes_become_names(given, name):
  cfg = SyncConfig(num_decoder_layers=1, weight_dtype=given)
  assert cfg.weight_dtype == name
  assert cfg.weight_numpy_dtype.name == name


@pytest.mark.parametrize("given", ["int8", "int32", "brain", None, 7])
def test_dtypes_that_are_not_floating(given):
  with pytest.raises(ValueError, match=r"`weight_dtype`.*floating-point"):
    SyncConfig(num_decoder_layers=1, weight_dtype=given)


@pytest.mark.parametrize(
  ("field", "value"),
  [
    ("num_decoder_layers", 0),
    ("num_decoder_layers", 2.5),
    ("num_decoder_layers", True),
    ("param_scan_axis", -1),
    ("inhomogeneous_layer_cycle_interval", 0),
    ("padded_base_moe_mlp_dim", 0),
    ("moe_mlp_tp_size", 0),
    ("moe_lane_size", 64),
    ("base_num_kv_heads", 0),
    ("kv_tp_size", 0),
    ("rollout_tensor_parallelism", -2),
    ("rollout_backend", "torch"),
    ("kernel_backend", "cuda"),
    ("use_raiden_ffi", "yes"),
    ("scan_layers", "yes"),
    ("prefuse_moe_weights", None),
    ("keep_dtype", "*.bias"),
  ],
)
def test_a_wrong_value_names_its_field(field, value):
  with pytest.raises(ValueError, match=f"`{field}`"):
    SyncConfig(**{"num_decoder_layers": 1, field: value})


def test_all_violations_come_in_one_error():
  with pytest.raises(ValueError, match="`kv_tp_size`") as caught:
    SyncConfig(
      num_decoder_layers=0, kv_tp_size=0, moe_lane_size=1, weight_dtype="int8"
    )
  for field in ("num_decoder_layers", "moe_lane_size", "weight_dtype"):
    assert f"`{field}`" in str(caught.value)


@pytest.mark.parametrize(
  ("moe", "rollout", "shards"), [(1, -1, 1), (1, 4, 4), (8, 4, 8), (1, 1, 1)]
)
def test_expert_shards_resolve_in_maxtexts_order(moe, rollout, shards):
  cfg = SyncConfig(
    num_decoder_layers=1,
    moe_mlp_tp_size=moe,
    rollout_tensor_parallelism=rollout,
  )
  assert cfg.resolved_moe_shards == shards


def maxtext(**fields):
  return types.SimpleNamespace(
    **{
      "num_decoder_layers": 4,
      "scan_layers": True,
      "param_scan_axis": 1,
      "inhomogeneous_layer_cycle_interval": 2,
      "prefuse_moe_weights": False,
      "padded_base_moe_mlp_dim": None,
      "moe_mlp_tp_size": 1,
      "base_num_kv_heads": 2,
      "kv_tp_size": 1,
      "rollout_tensor_parallelism": -1,
      "rollout_backend": "maxtext",
      "weight_dtype": Dtype.BF16,
      "use_raiden_ffi": None,
      "weight_sync_debug": False,
      **fields,
    }
  )


def test_a_maxtext_configuration_is_read():
  cfg = SyncConfig.from_maxtext(maxtext(), prefuse_moe_weights=True)
  assert cfg.num_decoder_layers == 4
  assert cfg.inhomogeneous_layer_cycle_interval == 2
  assert cfg.weight_dtype == "bfloat16"
  assert cfg.prefuse_moe_weights


def test_a_missing_attribute_is_named_and_has_no_default():
  config = maxtext()
  del config.param_scan_axis, config.kv_tp_size
  with pytest.raises(ValueError, match="no param_scan_axis, kv_tp_size"):
    SyncConfig.from_maxtext(config)
  cfg = SyncConfig.from_maxtext(config, param_scan_axis=0, kv_tp_size=8)
  assert (cfg.param_scan_axis, cfg.kv_tp_size) == (0, 8)


def test_it_is_a_frozen_value():
  cfg = SyncConfig(num_decoder_layers=1, keep_dtype=["*.bias"])
  assert hash(cfg) == hash(
    SyncConfig(num_decoder_layers=1, keep_dtype=("*.bias",))
  )
  with pytest.raises(dataclasses.FrozenInstanceError):
    cfg.scan_layers = False
