"""The small checkpoints of tests/data/fixtures and their configurations."""

import functools
import json
import pathlib

import numpy as np

from laneweave.sync.config import SyncConfig

_FOLDER = pathlib.Path(__file__).parent.parent / "data" / "fixtures"
NAMES = sorted(
  p.name.removesuffix(".trainer.npz") for p in _FOLDER.glob("*.trainer.npz")
)


@functools.cache
def weights(name: str) -> dict[str, np.ndarray]:
  """The trainer's weights by dotted path."""
  with np.load(_FOLDER / f"{name}.trainer.npz") as file:
    return {key: file[key] for key in file.files}


def trainer_config(name: str) -> dict:
  """MaxText's configuration fields."""
  return json.loads((_FOLDER / f"{name}.config.json").read_text())


def rollout(name: str, tp: int) -> dict | None:
  """The rollout's manifest for `tp` shards of the expert mlp axis, if any."""
  path = _FOLDER / f"{name}.rollout.tp{tp}.json"
  return json.loads(path.read_text()) if path.exists() else None


def config(name: str, tp: int = 1, **fields) -> SyncConfig:
  """The sync configuration of a fixture."""
  trainer = trainer_config(name)
  target = (rollout(name, tp) or {"config": trainer})["config"]
  return SyncConfig(
    **{
      "num_decoder_layers": trainer["num_decoder_layers"],
      "param_scan_axis": trainer["param_scan_axis"],
      "inhomogeneous_layer_cycle_interval": trainer[
        "inhomogeneous_layer_cycle_interval"
      ],
      "base_num_kv_heads": trainer["base_num_kv_heads"],
      "prefuse_moe_weights": target["prefuse_moe_weights"],
      "padded_base_moe_mlp_dim": target["padded_base_moe_mlp_dim"],
      "moe_mlp_tp_size": tp,
      **fields,
    }
  )
