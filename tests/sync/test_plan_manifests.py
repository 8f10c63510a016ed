"""Every real tree: exactly the rollout's names, shapes and dtypes."""

import gzip
import json
import pathlib
import subprocess
import sys

import pytest

from laneweave.sync import plan as plan_lib
from laneweave.sync.config import SyncConfig

_FOLDER = pathlib.Path(__file__).parent.parent / "data" / "manifests"
PAIRS = [
  (trainer, rollout)
  for trainer in sorted(_FOLDER.glob("*.trainer.json.gz"))
  for rollout in sorted(
    _FOLDER.glob(trainer.name.replace(".trainer.json.gz", ".rollout*"))
  )
]


def read(path):
  with gzip.open(path) as file:
    return json.load(file)


def without_kinds(manifest):
  leaves = [
    {k: v for k, v in leaf.items() if k != "kind"}
    for leaf in manifest["leaves"]
  ]
  return {**manifest, "leaves": leaves}


def config(trainer, rollout):
  source, target = trainer["config"], rollout["config"]
  return SyncConfig(
    num_decoder_layers=source["num_decoder_layers"],
    param_scan_axis=source["param_scan_axis"],
    inhomogeneous_layer_cycle_interval=source[
      "inhomogeneous_layer_cycle_interval"
    ],
    base_num_kv_heads=source["base_num_kv_heads"],
    prefuse_moe_weights=target["prefuse_moe_weights"],
    padded_base_moe_mlp_dim=target["padded_base_moe_mlp_dim"],
    moe_mlp_tp_size=rollout.get("moe_mlp_tp_size") or 1,
    weight_dtype=target["weight_dtype"],
  )


def test_all_pairs_are_there():
  assert len(PAIRS) == 38


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize(
  ("trainer", "rollout"), PAIRS, ids=lambda p: p.name.split(".json")[0]
)
def test_exact(trainer, rollout, with_target):
  source, target = read(trainer), read(rollout)
  want = {
    leaf["path"]: (tuple(leaf["shape"]), leaf["dtype"])
    for leaf in target["leaves"]
  }
  for tree in (source, without_kinds(source)):
    plan = plan_lib.make_plan(
      tree, config(source, target), target if with_target else None
    )
    got = {n: (x.shape, x.dtype.name) for n, x in plan.outputs().items()}
    assert got == want


def test_a_trillion_parameters_plan_without_a_device():
  """975 leaves of Kimi K2 in little memory; no backend comes up."""
  code = f"""
import gzip, json
from laneweave.sync import memory
from laneweave.sync.config import SyncConfig
from laneweave.sync.plan import make_plan
tree = json.load(gzip.open({str(_FOLDER / "kimi-k2-1t.trainer.json.gz")!r}))
plan = make_plan(tree, SyncConfig(
    num_decoder_layers=61, prefuse_moe_weights=True, moe_mlp_tp_size=8))
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
print(len(plan.outputs()), plan.source_bytes, memory.peak_rss_bytes())
"""
  done = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  leaves, size, peak = done.stdout.split()
  assert int(leaves) == 975
  assert int(size) > 4 * 10**12
  assert int(peak) < 500_000_000
