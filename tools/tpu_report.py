"""What the TPU compiler makes of every kernel, with no TPU attached.

    python -m laneweave.tools.tpu_report [--targets=v5e,v5p,v6e,tpu7x]
      [--ops=unscan,...] [--filter=TEXT] [--cases=real] [--json]

compiles each kernel, with and without the fingerprint, and XLA's forms of the
same layout, for each generation, and prints a row each: bytes fetched and
written, temporaries, copies, and a model of time from bundles and bandwidth.
Nothing runs. With --json standard output is one array of rows and nothing else;
progress and the assumptions go to standard error.

Exit code 0: the report was made, whatever it says. 2: wrong flags.
"""

import collections.abc
import json
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, NoReturn

from absl import app, flags

from laneweave.tools import (
  bundles,
  cases,
  report_rows,
  report_summary,
  targets,
  whole_model,
)

_TARGETS = flags.DEFINE_list(
  "targets", list(targets.TARGETS), "TPU generations to compile for."
)
_OPS = flags.DEFINE_list(
  "ops", [], "Operations to compile, `whole_model` among them; all of them."
)
_FILTER = flags.DEFINE_string(
  "filter", "", "Only cases whose name contains this."
)
_CASES = flags.DEFINE_enum(
  "cases",
  "real",
  sorted(cases.SETS),
  "real: sizes of published models; small: every case in a second each.",
)
_XLA = flags.DEFINE_boolean(
  "xla", True, "Compile XLA's forms too; most of the time goes there."
)
_WHOLE_MODEL = flags.DEFINE_boolean(
  "whole_model",
  True,
  "Compile whole models too, where --cases is real and no --filter excludes"
  " them.",
)
_JSON = flags.DEFINE_boolean("json", False, "One JSON array of rows.")

_WHOLE = "whole_model"
_TAIL = 2000
_HELP = """Assumptions: nothing is run or measured. Bytes are counted from grids,
blocks and HLO; times are modelled: DMA time is bytes over HBM bandwidth, issue
time is bundles over clock, stalls left out.
"""


def assumptions(names: collections.abc.Iterable[str]) -> str:
  """The figures that times rest on, and where they are from."""
  lines = [_HELP.rstrip()]
  for name in names:
    chip = targets.TARGETS[name].chip
    slots = ", ".join(f"{n} {s}" for s, n in bundles.SLOTS[name].items())
    lines.append(
      f"  {name}: HBM {chip.hbm_bytes_per_s / 1e9:.0f} GB/s,"
      f" {chip.cores} core(s) at {chip.clock_hz / 1e9:.2f} GHz, a bundle a"
      f" cycle of {slots}"
    )
  lines.append(
    "  Sources: bandwidth, Google's published figures (cloud.google.com/tpu/"
    "docs; a TPU7x device is half a chip); clocks of v5e and v5p from published"
    " peak FLOP/s, of v6e and tpu7x estimates; slots, the most seen in one"
    " bundle. A v5p device has two cores; a grid dimension marked parallel is"
    " split over them, which shows in the trips of the dumped schedule."
  )
  return "\n".join(lines)


def _check() -> None:
  """Raises on flags that name nothing."""
  known = [*sorted({c.op for c in cases.REAL}), _WHOLE]
  for flag, values, allowed in (
    ("targets", _TARGETS.value, list(targets.TARGETS)),
    ("ops", _OPS.value, known),
  ):
    wrong = [v for v in values if v not in allowed]
    if wrong or (flag == "targets" and not values):
      raise ValueError(
        f"`--{flag}` {','.join(values)!r} has {wrong or 'nothing'}; choose"
        f" from {','.join(allowed)}"
      )
  if not _tasks():
    raise ValueError(
      f"`--filter` {_FILTER.value!r} leaves no case; see tools/cases.py for"
      " their names"
    )


def _tasks() -> list[dict[str, Any]]:
  """What to compile for each target."""
  tasks: list[dict[str, Any]] = []
  for index, case in enumerate(cases.SETS[_CASES.value]):
    if _OPS.value and case.op not in _OPS.value:
      continue
    if _FILTER.value not in case.name:
      continue
    tasks.extend(
      {
        "kind": "case",
        "cases": _CASES.value,
        "index": index,
        "fingerprint": printing,
        # The same for both rows: XLA's forms compute no fingerprint.
        "xla": _XLA.value and not printing,
        "what": f"{case.op} {case.name}",
      }
      for printing in (False, True)
    )
  chosen = _WHOLE in _OPS.value or not _OPS.value
  if chosen and _WHOLE_MODEL.value and _CASES.value == "real":
    tasks.extend(
      {"kind": "model", "name": name, "what": f"{_WHOLE} {name}"}
      for name in whole_model.MODELS
      if _FILTER.value in name
    )
  return tasks


def _failed(task: dict[str, Any], target: str, said: str) -> dict[str, Any]:
  """The row of a task whose process ended."""
  row: dict[str, Any] = dict.fromkeys(report_rows.COLUMNS)
  row.update(target=target, error=said, case=task["what"], op=_WHOLE)
  row.update(min_bytes=0, shape=[], dtypes=[], fingerprint=False)
  if task["kind"] == "case":
    case = cases.SETS[task["cases"]][task["index"]]
    layout = case.layout
    row.update(
      op=case.op,
      case=case.name,
      shape=list(layout.shape),
      dtypes=[layout.source_dtype.name, layout.dtype.name],
      fingerprint=task["fingerprint"],
      min_bytes=layout.source_bytes + layout.out_bytes,
    )
  return row


def compile_for(
  target: str, tasks: list[dict[str, Any]]
) -> collections.abc.Iterator[dict[str, Any]]:
  """Does tasks in a process of the target's own.

  Args:
    target: A key of `targets.TARGETS`.
    tasks: What `report_worker` takes.

  Yields:
    Rows. A task that ends its process (the compiler aborts on some programs)
    is a row with what it said, and the next process goes on after it.
  """
  left = list(tasks)
  started = time.monotonic()
  while left:
    with (
      tempfile.TemporaryDirectory(prefix="laneweave-report-") as dump,
      tempfile.TemporaryFile("w+") as said,
      subprocess.Popen(
        [
          sys.executable,
          "-m",
          "laneweave.tools.report_worker",
          f"--target={target}",
          f"--dump={dump}",
        ],
        env=targets.environment(targets.TARGETS[target], dump),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        text=True,
      ) as worker,
    ):
      assert worker.stdin is not None
      assert worker.stdout is not None
      try:
        worker.stdin.write(json.dumps(left))
        worker.stdin.close()
        while left:
          line = worker.stdout.readline()
          if not line:
            break
          task = left.pop(0)
          passed = time.monotonic() - started
          print(
            f"{target} {len(tasks) - len(left)}/{len(tasks)} {passed:.0f} s"
            f" {task['what']}",
            file=sys.stderr,
            flush=True,
          )
          yield from json.loads(line)
      finally:
        if left and worker.poll() is None:
          worker.kill()
      code = worker.wait()
      if left:
        said.seek(0)
        tail = " ".join(said.read()[-_TAIL:].split())
        yield _failed(
          left.pop(0), target, f"compiler ended with code {code}: {tail}"
        )


def _share_xla(rows: list[dict[str, Any]]) -> None:
  """Gives the rows with the fingerprint XLA's figures without it."""
  plain: dict[tuple[str, str], dict[str, Any]] = {}
  for row in rows:
    key = row["op"], row["case"]
    if not row["fingerprint"]:
      plain[key] = row
    elif key in plain:
      row.update({c: plain[key].get(c) for c in report_rows.XLA_COLUMNS})


def _cell(value: Any) -> str:
  """One value of the text table."""
  if value is None:
    return "-"
  if isinstance(value, bool):
    return "yes" if value else "no"
  if isinstance(value, float):
    return f"{value:.3f}" if value < 1000 else f"{value:.0f}"
  if isinstance(value, list):
    return ",".join(map(str, value)) or "-"
  return str(value).replace("\n", " ")


def text_table(rows: list[dict[str, Any]]) -> str:
  """All rows, a line each, columns aligned; long texts at the end of a line."""
  columns = [c for c in report_rows.COLUMNS if c != "error"]
  for key in (key for row in rows for key in row):
    if key not in columns and key != "error":
      columns.append(key)
  lines = [columns]
  notes = []
  for row in rows:
    cells = []
    for column in columns:
      cell = _cell(row.get(column))
      if len(cell) > 40:
        notes.append(f"[{len(notes) + 1}] {cell}")
        cell = f"[{len(notes)}]"
      cells.append(cell)
    if row.get("error"):
      notes.append(f"[{len(notes) + 1}] {row['error']}")
      cells[-1] = f"does not compile [{len(notes)}]"
    lines.append(cells)
  widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
  text = [
    "  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip()
    for line in lines
  ]
  return "\n".join([*text, *notes])


def _end(number: int, frame: Any) -> NoReturn:
  """Ends by way of `finally`, so that no process or folder is left."""
  del frame
  sys.exit(128 + number)


def main(argv: list[str]) -> None:
  """Makes the report."""
  signal.signal(signal.SIGTERM, _end)
  if argv[1:]:
    print(f"tpu_report: unknown argument {argv[1]!r}", file=sys.stderr)
    sys.exit(2)
  try:
    _check()
  except ValueError as error:
    print(f"tpu_report: {error}", file=sys.stderr)
    sys.exit(2)
  started = time.monotonic()
  stated = assumptions(_TARGETS.value)
  print(stated, file=sys.stderr if _JSON.value else sys.stdout, flush=True)
  rows = []
  for target in _TARGETS.value:
    found = list(compile_for(target, _tasks()))
    _share_xla(found)
    rows.extend(found)
  if _JSON.value:
    print(json.dumps(rows, indent=1))
    return
  print(text_table(rows))
  missed = [(row, report_summary.misses(row)) for row in rows]
  print(f"\n{sum(bool(m) for _, m in missed)} of {len(rows)} rows miss:")
  for row, found in missed:
    if found:
      printed = " with fingerprint" if row["fingerprint"] else ""
      print(
        f"  {row['target']} {row['op']} {row['case']}{printed}:"
        f" {'; '.join(found)}"
      )
  print()
  print("\n".join(report_summary.table(rows)))
  print(f"\n{len(rows)} rows in {time.monotonic() - started:.0f} s")


def _parse(argv: list[str]) -> list[str]:
  """Parses flags; a wrong one is one line and exit code 2."""
  try:
    return (
      app.parse_flags_with_usage(argv)
      if _asks_help(argv)
      else flags.FLAGS(argv)
    )
  except flags.Error as error:
    print(f"tpu_report: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)


def _asks_help(argv: list[str]) -> bool:
  return any(a.lstrip("-").startswith(("help", "?")) for a in argv[1:])


if __name__ == "__main__":
  app.run(main, flags_parser=_parse)
