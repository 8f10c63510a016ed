"""The conversion of a whole model on one chip, compiled as one program.

The chip's shapes are those of a trainer that lays the experts over all chips,
and everything else, sharded over as many, along its embedding axis (or the
first that they divide). What convert_streaming takes is reckoned from the same
layouts compiled one by one: the tree, less the sources that are used up, plus
the piece at hand and its temporaries.
"""

import collections
import dataclasses
import gzip
import json
import pathlib
from typing import Any

from laneweave.kernels import layout as layout_lib
from laneweave.kernels import mosaic
from laneweave.sync import plan as plan_lib
from laneweave.sync import shards
from laneweave.sync.config import SyncConfig
from laneweave.tools import compiled, report_rows

_MANIFESTS = pathlib.Path(__file__).parent.parent / "tests/data/manifests"
_FAILURES = (RuntimeError, ValueError, NotImplementedError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
  """A model and the number of chips that its trainer spreads it over.

  Attributes:
    manifest: Stem of its manifests.
    chips: Chips; the experts lie over all of them.
    tensor_parallelism: Shards of an expert's mlp axis on the rollout.
  """

  manifest: str
  chips: int
  tensor_parallelism: int


MODELS = {
  "qwen3-30b-a3b": Model(
    manifest="qwen3-30b-a3b", chips=8, tensor_parallelism=1
  ),
  "deepseek3-671b": Model(
    manifest="deepseek3-671b", chips=64, tensor_parallelism=8
  ),
  "kimi-k2-1t": Model(manifest="kimi-k2-1t", chips=128, tensor_parallelism=8),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """One entry of a plan on one chip.

  Attributes:
    sources: Names of its sources.
    layout: The chip's part of its layout.
  """

  sources: tuple[str, ...]
  layout: layout_lib.Layout


def _load(name: str) -> dict[str, Any]:
  with gzip.open(_MANIFESTS / f"{name}.json.gz") as file:
    return json.load(file)


def parts(model: Model) -> list[Part]:
  """What one chip converts.

  Args:
    model: The model.

  Returns:
    One part for each entry of the plan.
  """
  source = _load(f"{model.manifest}.trainer")
  target = _load(f"{model.manifest}.rollout.tp{model.tensor_parallelism}")
  described = source["config"]
  plan = plan_lib.make_plan(
    source,
    SyncConfig(
      num_decoder_layers=described["num_decoder_layers"],
      param_scan_axis=described["param_scan_axis"],
      inhomogeneous_layer_cycle_interval=described[
        "inhomogeneous_layer_cycle_interval"
      ],
      base_num_kv_heads=described["base_num_kv_heads"],
      prefuse_moe_weights=True,
      padded_base_moe_mlp_dim=target["config"]["padded_base_moe_mlp_dim"],
      moe_mlp_tp_size=model.tensor_parallelism,
      weight_dtype="bfloat16",
    ),
    target,
  )
  axes = {leaf["path"]: leaf.get("axes") or [] for leaf in source["leaves"]}
  return [
    Part(
      sources=tuple(entry.sources),
      layout=_local(entry.layout, axes[entry.sources[0]], model.chips),
    )
    for entry in plan.entries
  ]


def _local(
  layout: layout_lib.Layout, axes: list[str | None], chips: int
) -> layout_lib.Layout:
  """One chip's part of a layout; all of it where nothing divides."""
  rank = len(layout.shape)
  names = [*axes, *([None] * rank)][:rank]
  order = sorted(
    range(rank),
    key=lambda a: (
      names[a] != "exp",
      not str(names[a]).startswith("embed"),
      a,
    ),
  )
  for axis in order:
    if layout.shape[axis] % chips:
      continue
    counts = [chips if a == axis else 1 for a in range(rank)]
    local = shards.localize(layout, counts)
    if local is not None:
      return local
  return layout


def rows(
  compiler: compiled.Compiler, target: str, name: str
) -> list[dict[str, Any]]:
  """Compiles a model's whole conversion for one target.

  Args:
    compiler: For the target.
    target: A key of `targets.TARGETS`.
    name: A key of `MODELS`.

  Returns:
    Two rows: all in one program, and `convert_streaming`.
  """
  model = MODELS[name]
  found = parts(model)
  return [
    _at_once(compiler, target, model, found),
    _streaming(compiler, target, model, found),
  ]


def _row(op: str, target: str, model: Model, found: list[Part]):
  """What both rows begin with."""
  tree = sum(part.layout.source_bytes for part in found)
  out = sum(part.layout.out_bytes for part in found)
  row: dict[str, Any] = dict.fromkeys(report_rows.COLUMNS)
  row.update(
    op=op,
    case=f"{model.manifest} over {model.chips} chips",
    target=target,
    shape=[],
    dtypes=["float32", "bfloat16"],
    fingerprint=False,
    min_bytes=tree + out,
    tree_bytes=tree,
    out_bytes=out,
  )
  return row


def _convert(layouts, sources):
  """Runs layouts one after the other."""
  left = list(sources)
  outputs = []
  for layout in layouts:
    mine = [left.pop(0) for _ in range(layout.operands)]
    outputs.extend(mosaic.relayout(layout, *mine)[0])
  return outputs


def _arguments(compiler, layouts):
  return [
    compiler.shape(layout.shape, layout.source_dtype)
    for layout in layouts
    for _ in range(layout.operands)
  ]


def _at_once(compiler, target, model, found) -> dict[str, Any]:
  """Everything in one program."""
  row = _row("whole_model", target, model, found)
  layouts = [part.layout for part in found]
  try:
    program = compiler.compile(
      lambda *sources: _convert(layouts, sources),
      *_arguments(compiler, layouts),
    )
  except _FAILURES as error:
    row["error"] = report_rows.text_of(error)
    return row
  row.update(report_rows.traffic(program, layouts))
  row.update(report_rows.times(program, target))
  row["temp_fraction"] = program.temp_bytes / row["out_bytes"]
  return row


def _streaming(compiler, target, model, found) -> dict[str, Any]:
  """One program a piece, sources let go of as they are used up."""
  row = _row("convert_streaming", target, model, found)
  programs: dict[layout_lib.Layout, compiled.Program] = {}
  for part in found:
    if part.layout in programs:
      continue
    try:
      programs[part.layout] = compiler.compile(
        lambda *sources, layout=part.layout: _convert([layout], sources),
        *_arguments(compiler, [part.layout]),
      )
    except _FAILURES as error:
      row["error"] = f"{part.sources[0]}: {report_rows.text_of(error)}"
      return row
  used = collections.Counter(n for part in found for n in part.sources)
  alive = row["tree_bytes"]
  peak = 0
  for part in found:
    temp = programs[part.layout].temp_bytes
    peak = max(peak, alive + part.layout.out_bytes + temp)
    for name in part.sources:
      used[name] -= 1
      if not used[name]:
        alive -= part.layout.source_bytes // part.layout.operands
  every = [programs[part.layout] for part in found]
  largest = max(part.layout.out_bytes for part in found)
  row.update(
    kernel_bytes=sum(c.moved_bytes for p in every for c in p.calls),
    temp_bytes=max(p.temp_bytes for p in every),
    copies=sum(p.copies for p in every),
    launches=sum(len(p.calls) for p in every),
    peak_bytes=peak,
    largest_piece_bytes=largest,
    peak_within_bound=peak <= row["tree_bytes"] + largest,
  )
  row["bytes_ratio"] = row["kernel_bytes"] / row["min_bytes"]
  row["temp_fraction"] = row["temp_bytes"] / row["out_bytes"]
  return row
