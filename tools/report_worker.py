"""Compiles what it is asked to for one TPU generation: a process of its own.

    python -m laneweave.tools.report_worker --target=v5e --dump=DIR < tasks

Started by `tpu_report` with the target's environment. Standard input is a JSON
array of tasks; for each one line of JSON is written to standard output, so that
what is done is kept when the compiler ends the process.
"""

import json
import pathlib
import sys
from typing import Any

from absl import app, flags

from laneweave.tools import cases, compiled, report_rows, whole_model

_TARGET = flags.DEFINE_string("target", None, "TPU generation.", required=True)
_DUMP = flags.DEFINE_string(
  "dump", None, "Folder that libtpu dumps bundles to.", required=True
)


def run(
  compiler: compiled.Compiler, target: str, task: dict[str, Any]
) -> list[dict[str, Any]]:
  """Does one task.

  Args:
    compiler: For the target.
    target: The target.
    task: `kind` "case" with `cases`, `index`, `fingerprint` and `xla`, or
      `kind` "model" with `name`.

  Returns:
    Rows.
  """
  if task["kind"] == "model":
    return whole_model.rows(compiler, target, task["name"])
  case = cases.SETS[task["cases"]][task["index"]]
  row = report_rows.kernel_row(compiler, target, case, task["fingerprint"])
  if task["xla"]:
    row.update(report_rows.xla_columns(compiler, target, case.layout))
  return [row]


def main(argv: list[str]) -> None:
  """Does all tasks."""
  del argv
  compiler = compiled.Compiler(_TARGET.value, pathlib.Path(_DUMP.value))
  for task in json.load(sys.stdin):
    rows = run(compiler, _TARGET.value, task)
    print(json.dumps(rows), flush=True)


if __name__ == "__main__":
  app.run(main)
