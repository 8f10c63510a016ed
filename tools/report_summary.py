"""Where a kernel wins against XLA's strongest form, where it ties, where not."""

import collections.abc
from typing import Any

# Rows below this are too small for a time to mean anything.
LARGE_BYTES = 1 << 20
# Closer than this is a tie.
MARGIN = 0.02

MEASURES = ("bytes", "temporaries", "issue", "launches", "time")


def strongest(row: dict[str, Any]) -> str | None:
  """The XLA form that the model of time gives least.

  Args:
    row: A row of the report.

  Returns:
    "xla" or "xla_layer"; None when neither compiled or none was asked for.
  """
  forms = [f for f in ("xla", "xla_layer") if row.get(f"{f}_us") is not None]
  return min(forms, key=lambda f: row[f"{f}_us"]) if forms else None


def _verdict(kernel: float, other: float) -> str:
  if kernel < other * (1 - MARGIN):
    return "win"
  return "lose" if kernel > other * (1 + MARGIN) else "tie"


def compare(row: dict[str, Any]) -> dict[str, str] | None:
  """Compares one row's kernel with XLA's strongest form.

  Args:
    row: A row of the report.

  Returns:
    "win", "tie" or "lose" by measure; None without a form to compare with.
    Where the forms did not fit the chip, the kernel wins everything.
  """
  if row.get("error") or row.get("compute_us_per_step") is None:
    return None
  form = strongest(row)
  if form is None:
    return (
      dict.fromkeys(MEASURES, "win")
      if isinstance(row.get("xla_ratio"), str)
      else None
    )
  against = (
    row["padded_min_bytes"] if row["padded_minimum"] else row["min_bytes"]
  )
  issue = row["compute_us_per_step"] * row["steps"]
  dma = row["dma_us_per_step"] * row["steps"]
  return {
    "bytes": _verdict(row["kernel_bytes"], row[f"{form}_ratio"] * against),
    "temporaries": _verdict(row["temp_bytes"], row[f"{form}_temp_bytes"]),
    "issue": _verdict(issue, row[f"{form}_issue_us"]),
    "launches": _verdict(row["launches"], row[f"{form}_launches"]),
    "time": _verdict(max(issue, dma), row[f"{form}_us"]),
  }


def misses(row: dict[str, Any]) -> list[str]:
  """What a row should show and does not.

  Args:
    row: A row of the report.

  Returns:
    One short text each.
  """
  if row.get("error"):
    return [f"does not compile: {row['error']}"]
  found = []
  if (row.get("bytes_ratio") or 0) > 1.02:
    found.append(f"bytes_ratio {row['bytes_ratio']:.3f}")
  # A whole model may take temporaries of up to 1% of what it makes.
  if row.get("temp_fraction") is not None:
    if row["temp_fraction"] >= 0.01:
      found.append(f"temporaries {100 * row['temp_fraction']:.1f}% of output")
  elif row.get("temp_bytes"):
    found.append(f"temp_bytes {row['temp_bytes']}")
  if row.get("copies"):
    found.append(f"copies {row['copies']}")
  if row.get("peak_within_bound") is False:
    found.append(f"peak_bytes {row['peak_bytes']}")
  if row["min_bytes"] <= LARGE_BYTES:
    return found
  roof = row.get("roofline_fraction")
  if roof is not None and roof < 0.95:
    found.append(
      f"roofline_fraction {roof:.2f} ({row['bounding_slot']} slot needs at"
      f" least {row['least_count']} bundles a step)"
    )
  verdicts = compare(row) or {}
  if verdicts.get("time") == "lose":
    found.append("slower than XLA")
  return found


def table(rows: collections.abc.Sequence[dict[str, Any]]) -> list[str]:
  """The table at the report's end.

  Args:
    rows: Rows of kernels, with XLA's columns.

  Returns:
    Lines: for each operation and target, how many rows above 1 MiB win, tie
    and lose by each measure.
  """
  counts: dict[tuple[str, str], dict[str, list[int]]] = {}
  for row in rows:
    verdicts = compare(row) if row["min_bytes"] > LARGE_BYTES else None
    if verdicts is None:
      continue
    by = counts.setdefault(
      (row["op"], row["target"]), {m: [0, 0, 0] for m in MEASURES}
    )
    for measure, verdict in verdicts.items():
      by[measure][("win", "tie", "lose").index(verdict)] += 1
  if not counts:
    return []
  lines = [
    "Against XLA's strongest form, rows above 1 MiB: win/tie/lose",
    f"{'op':14}{'target':8}" + "".join(f"{m:>14}" for m in MEASURES),
  ]
  for (op, target), by in sorted(counts.items()):
    cells = ["/".join(map(str, by[m])) for m in MEASURES]
    lines.append(f"{op:14}{target:8}" + "".join(f"{c:>14}" for c in cells))
  return lines
