"""Rows of the compile report: one layout on one generation.

A row is a dict whose keys are `COLUMNS`. What could not be compiled is in its
`error`, or, for one of XLA's forms, in the place of that form's ratio.
"""

import math
from typing import Any

import jax.numpy as jnp

from laneweave.kernels import layout as layout_lib
from laneweave.kernels import mosaic, physical
from laneweave.tools import blocks, cases, compiled, targets, xla_forms

# Above this, tile padding alone makes a ratio miss: it is taken against what
# the arrays take in HBM, padding included.
PADDED = 1.02

COLUMNS = (
  "op",
  "case",
  "target",
  "shape",
  "dtypes",
  "fingerprint",
  "min_bytes",
  "kernel_bytes",
  "bytes_ratio",
  "padded_minimum",
  "padded_min_bytes",
  "temp_bytes",
  "copies",
  "vmem_bytes",
  "steps",
  "compute_us_per_step",
  "dma_us_per_step",
  "roofline_fraction",
  "bounding_slot",
  "least_count",
  "launches",
  "xla_ratio",
  "xla_temp_bytes",
  "xla_us",
  "xla_issue_us",
  "xla_launches",
  "xla_layer_ratio",
  "xla_layer_temp_bytes",
  "xla_layer_us",
  "xla_layer_issue_us",
  "xla_layer_launches",
  "error",
)
XLA_COLUMNS = tuple(c for c in COLUMNS if c.startswith("xla_"))
_FAILURES = (RuntimeError, ValueError, NotImplementedError)


def text_of(error: Exception) -> str:
  """What a compiler said, in one line: how much did not fit, if it says so."""
  lines = [line.strip() for line in str(error).splitlines() if line.strip()]
  if not lines:
    return type(error).__name__
  used = [line for line in lines[1:] if "Used" in line or "exceed" in line]
  return " ".join([lines[0], *used[:1]])[:300]


def padded_min_bytes(layout: layout_lib.Layout) -> int:
  """Least bytes in HBM of a layout's arrays, whole tiles.

  Args:
    layout: The layout.

  Returns:
    All sources and all outputs once, each in the order that pads least.
  """
  total = 0
  for shape, dtype, count in (
    (layout.shape, layout.source_dtype, layout.operands),
    (layout.out_shape, layout.dtype, layout.num_outputs),
  ):
    order = physical.tpu_order(shape, dtype)
    ordered = tuple(shape[a] for a in order)
    total += count * blocks.array_bytes(ordered, dtype.itemsize)
  return total


def kernel_row(
  compiler: compiled.Compiler, target: str, case: cases.Case, printing: bool
) -> dict[str, Any]:
  """Compiles one layout's kernel.

  Args:
    compiler: For the target.
    target: A key of `targets.TARGETS`.
    case: The layout.
    printing: With the fingerprint.

  Returns:
    The row; XLA's columns are None.
  """
  layout = case.layout
  row: dict[str, Any] = dict.fromkeys(COLUMNS)
  row.update(
    op=case.op,
    case=case.name,
    target=target,
    shape=list(layout.shape),
    dtypes=[layout.source_dtype.name, layout.dtype.name],
    fingerprint=printing,
    min_bytes=layout.source_bytes + layout.out_bytes,
  )

  def run(bases, *sources):
    return mosaic.relayout(layout, *sources, bases=bases if printing else None)

  source = compiler.shape(layout.shape, layout.source_dtype)
  bases = compiler.shape((2 * len(layout.out_shape),), jnp.uint32)
  try:
    program = compiler.compile(run, bases, *([source] * layout.operands))
  except _FAILURES as error:
    row["error"] = text_of(error)
    return row
  row.update(traffic(program, [layout]))
  row.update(times(program, target))
  return row


def _minimum(layouts: list[layout_lib.Layout]) -> tuple[int, bool]:
  """Bytes a ratio is taken against, and whether tile padding is in them."""
  least = sum(x.source_bytes + x.out_bytes for x in layouts)
  padded = sum(padded_min_bytes(x) for x in layouts)
  return (padded, True) if padded > PADDED * least else (least, False)


def traffic(
  program: compiled.Program, layouts: list[layout_lib.Layout]
) -> dict[str, Any]:
  """Columns of bytes.

  Args:
    program: The compiled kernels.
    layouts: What they run.

  Returns:
    Values by column.
  """
  moved = sum(call.moved_bytes for call in program.calls)
  against, padded = _minimum(layouts)
  return {
    "kernel_bytes": moved,
    "bytes_ratio": moved / against,
    "padded_minimum": padded,
    "padded_min_bytes": sum(padded_min_bytes(x) for x in layouts),
    "temp_bytes": program.temp_bytes,
    "copies": program.copies,
    "vmem_bytes": max(call.vmem_bytes for call in program.calls),
    "launches": len(program.calls),
  }


def times(program: compiled.Program, target: str) -> dict[str, Any]:
  """Columns of the model of time.

  Args:
    program: The compiled kernels.
    target: A key of `targets.TARGETS`.

  Returns:
    Values by column; the slot is that of the kernel that takes longest.
  """
  chip = targets.TARGETS[target].chip
  steps = sum(call.steps for call in program.calls)
  moved = sum(call.moved_bytes for call in program.calls)
  dma = 1e6 * moved / chip.hbm_bytes_per_s
  issue = program.issue_us(chip.clock_hz)
  row: dict[str, Any] = {
    "steps": steps,
    "compute_us_per_step": issue / steps,
    "dma_us_per_step": dma / steps,
    "roofline_fraction": dma / max(dma, issue),
  }
  if program.kernels:
    kernel = max(program.kernels, key=lambda k: k.cycles)
    slot, count = kernel.bounding_slot(target)
    row.update(bounding_slot=slot, least_count=count)
  return row


def xla_columns(
  compiler: compiled.Compiler, target: str, layout: layout_lib.Layout
) -> dict[str, Any]:
  """Compiles XLA's forms of one layout.

  Args:
    compiler: For the target.
    target: A key of `targets.TARGETS`.
    layout: The layout.

  Returns:
    Values of `XLA_COLUMNS`, for all layers together. `*_us` is the larger of
    the time of the bytes moved and the time of issue.
  """
  against, _ = _minimum([layout])
  chip = targets.TARGETS[target].chip
  sources = [compiler.shape(layout.shape, layout.source_dtype)]
  sources *= layout.operands
  index = compiler.shape((), jnp.int32)
  row: dict[str, Any] = {}
  for prefix, function, arguments, times in (
    ("xla", xla_forms.all_layers(layout), sources, 1),
    (
      "xla_layer",
      xla_forms.one_layer(layout),
      [index] * len(layout.scan_axes) + sources,
      math.prod(layout.shape[a] for a in layout.scan_axes),
    ),
  ):
    try:
      program = compiler.compile(function, *arguments)
    except _FAILURES as error:
      row[f"{prefix}_ratio"] = text_of(error)
      continue
    moved = program.moved_bytes * times
    # Everything is read and written at least once: else the counter is wrong.
    if moved < 0.98 * (layout.source_bytes + layout.out_bytes):
      row[f"{prefix}_ratio"] = f"not counted: {moved} bytes are too few"
      continue
    issue = program.issue_us(chip.clock_hz) * times
    row.update(
      {
        f"{prefix}_ratio": moved / against,
        f"{prefix}_temp_bytes": program.temp_bytes,
        f"{prefix}_us": max(1e6 * moved / chip.hbm_bytes_per_s, issue),
        f"{prefix}_issue_us": issue,
        f"{prefix}_launches": program.launches * times,
      }
    )
  return row
