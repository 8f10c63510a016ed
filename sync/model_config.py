"""MaxText's configuration files, and the two sides' `SyncConfig` made of one.

A file describes the trainer, in MaxText's field names. How the rollout differs
is derived from its mesh and its sharding rules, as MaxText derives it: experts
are fused, and padded for the shards that their mlp axis really has there.
"""

import dataclasses
import difflib
import json
import pathlib
from typing import Any

import jax

from laneweave.sync import logical_axes, plan
from laneweave.sync.config import SyncConfig
from laneweave.sync.sharding_rules import Rules

# Fields without which a tree cannot be read; nothing in the tree gives them
# away for certain, so none is guessed.
_REQUIRED = (
  "num_decoder_layers",
  "scan_layers",
  "param_scan_axis",
  "inhomogeneous_layer_cycle_interval",
)
# MaxText computes the first from the second, which is what its YAML files say.
_INSTEAD = {"num_decoder_layers": "base_num_decoder_layers"}
_OPTIONAL = (
  "prefuse_moe_weights",
  "padded_base_moe_mlp_dim",
  "moe_mlp_tp_size",
  "moe_lane_size",
  "base_num_kv_heads",
  "kv_tp_size",
  "rollout_tensor_parallelism",
  "keep_dtype",
)
# Fields of MaxText that resemble one of ours and are not it.
_OTHERS = (
  "num_kv_heads",
  "base_moe_mlp_dim",
  "base_mlp_dim",
  "moe_mlp_dim",
  "rollout_data_parallelism",
  "rollout_expert_parallelism",
  "first_num_dense_layers",
)
_LARGEST = 16 << 20  # Bytes of a configuration file.


def path_for(checkpoint: pathlib.Path) -> pathlib.Path:
  """Where a checkpoint's configuration is kept: X.config.json beside it.

  Args:
    checkpoint: X, X.npz, X.safetensors, or any of them with `.trainer` before
      the suffix.

  Returns:
    The file; it need not exist.
  """
  stem = checkpoint.name
  for suffix in (".npz", ".safetensors"):
    stem = stem.removesuffix(suffix)
  return checkpoint.absolute().with_name(
    stem.removesuffix(".trainer") + ".config.json"
  )


def load(path: pathlib.Path | None, checkpoint: pathlib.Path) -> dict[str, Any]:
  """Reads the fields of a configuration file.

  Args:
    path: A JSON or YAML file; None: the one beside the checkpoint.
    checkpoint: The checkpoint.

  Returns:
    Fields by name, those that laneweave does not use included.

  Raises:
    ValueError: there is no such file, it is neither JSON nor YAML of fields, or
      required fields are missing or misspelt.
  """
  if path is None:
    path = path_for(checkpoint)
    if not path.is_file():
      raise ValueError(
        f"`--maxtext_config` is not given and there is no {path.name} beside"
        f" `--checkpoint` {checkpoint}; give a JSON or YAML file with at"
        f" least {', '.join(_REQUIRED)}"
      )
  try:
    if path.stat().st_size > _LARGEST:
      raise ValueError(
        f"`--maxtext_config` {path} is larger than a configuration can be"
        f" ({_LARGEST} bytes)"
      )
    text = path.read_text(encoding="utf-8")
  except OSError as error:
    raise ValueError(
      f"`--maxtext_config` {path} cannot be read: {error.strerror or error}"
    ) from None
  except UnicodeDecodeError:
    raise ValueError(f"`--maxtext_config` {path} is not a text file") from None
  fields = _parse(text, path)
  _check_names(fields, path)
  return fields


def _parse(text: str, path: pathlib.Path) -> dict[str, Any]:
  """JSON, or YAML by its safe loader."""
  try:
    if path.suffix == ".json":
      fields = json.loads(text)
    else:
      import yaml

      try:
        fields = yaml.safe_load(text)
      except yaml.YAMLError as error:
        raise ValueError(error) from None
  except (ValueError, RecursionError) as error:
    detail = " ".join(str(error).split())[:200]
    raise ValueError(
      f"`--maxtext_config` {path} is not"
      f" {'JSON' if path.suffix == '.json' else 'YAML'}: {detail}"
    ) from None
  if not isinstance(fields, dict) or not all(
    isinstance(name, str) for name in fields
  ):
    raise ValueError(
      f"`--maxtext_config` {path} must hold MaxText's fields by name, not a"
      f" {type(fields).__name__}"
    )
  return fields


def _check_names(fields: dict[str, Any], path: pathlib.Path) -> None:
  """Every required field is there, and none of ours is misspelt."""
  problems = []
  ours = (*_REQUIRED, *_INSTEAD.values(), *_OPTIONAL)
  strange = [n for n in fields if n not in ours and n not in _OTHERS]
  for name in (*_REQUIRED, *_OPTIONAL):
    if name in fields or _INSTEAD.get(name) in fields:
      continue
    close = difflib.get_close_matches(name, strange, n=1, cutoff=0.9)
    if close:
      problems.append(f"has `{close[0]}`, probably for `{name}`")
    elif name in _REQUIRED:
      problems.append(f"has no `{name}`")
  if problems:
    raise ValueError(
      f"`--maxtext_config` {path} {' and '.join(problems)}; it needs"
      f" {', '.join(_REQUIRED)} as MaxText spells them"
    )


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
  """What of a file goes into a `SyncConfig` as it is."""
  found = {}
  for name in (*_REQUIRED, *_OPTIONAL):
    source = name if name in fields else _INSTEAD.get(name, name)
    if fields.get(source) is not None:
      found[name] = fields[source]
  for name in ("scan_layers", "prefuse_moe_weights"):
    if not isinstance(found.get(name, False), bool):
      raise ValueError(
        f"`--maxtext_config`: `{name}` is {found[name]!r}, not true or false"
      )
  keep = found.get("keep_dtype", [])
  if not isinstance(keep, list) or not all(isinstance(k, str) for k in keep):
    raise ValueError(
      f"`--maxtext_config`: `keep_dtype` is {keep!r}, not a list of patterns"
    )
  return found


def derive(
  fields: dict[str, Any],
  shapes: dict[str, jax.ShapeDtypeStruct],
  rollout: Rules,
  **overrides: Any,
) -> tuple[SyncConfig, tuple[str, ...]]:
  """The configuration of a sync to a rollout's mesh.

  Args:
    fields: The trainer's fields, from `load`.
    shapes: The trainer's weights.
    rollout: The rollout's mesh and rules.
    **overrides: `SyncConfig` fields that flags set; None: not set.

  Returns:
    The configuration, and remarks on what in it looks odd.

  Raises:
    ValueError: fields that contradict each other, the tree or the mesh.
  """
  values = _fields(fields)
  values.update({k: v for k, v in overrides.items() if v is not None})
  # Routed experts are bare `wi_0` arrays; dense layers have `wi_0.kernel`.
  routed = any(n.rpartition(".")[2] == "wi_0" for n in shapes)
  values["prefuse_moe_weights"] = routed
  cfg = SyncConfig(**values)
  # What the rollout's arrays are like but for shards and repeated heads.
  outputs = plan.make_plan(
    shapes,
    dataclasses.replace(
      cfg, moe_mlp_tp_size=1, rollout_tensor_parallelism=-1, kv_tp_size=1
    ),
  ).outputs()
  shards, remarks = cfg.resolved_moe_shards, []
  split = _parts("mlp_moe", outputs, rollout)
  if split is not None:
    if shards == 1:
      shards = split
    elif shards % split:
      raise ValueError(
        f"`moe_mlp_tp_size` is {shards} in the configuration, but the rollout"
        f" mesh {rollout.mesh} splits the experts' mlp axis in {split}, so"
        " that a device would hold a part of a shard; let `moe_mlp_tp_size`"
        " be a multiple, or change `--sharding_rules=rollout:mlp_moe=...`"
      )
    elif shards != split:
      remarks.append(
        f"`moe_mlp_tp_size` is {shards} in the configuration and the rollout"
        f" mesh {rollout.mesh} splits the experts' mlp axis in {split}: each"
        f" device holds {shards // split} shards, gate and up of each"
      )
  kv = cfg.kv_tp_size
  if kv == 1:
    kv = _parts("kv_heads", outputs, rollout) or 1
  cfg = dataclasses.replace(cfg, moe_mlp_tp_size=shards, kv_tp_size=kv)
  return cfg, tuple(remarks)


def _parts(
  axis: str, outputs: dict[str, jax.ShapeDtypeStruct], rollout: Rules
) -> int | None:
  """Shards of a logical axis on the rollout; None where no array has it."""
  found: dict[int, str] = {}
  for name, x in outputs.items():
    logical = logical_axes.of_block(name, len(x.shape))
    if axis in logical:
      found.setdefault(rollout.parts(axis, x.shape, logical), name)
  if len(found) > 1:
    listed = ", ".join(f"`{name}` in {n}" for n, name in found.items())
    raise ValueError(
      f"`--sharding_rules` split the axis `{axis}` of the rollout"
      f" differently: {listed}; every array must agree, so that one layout"
      " serves all"
    )
  return next(iter(found), None)
