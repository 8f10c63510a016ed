"""The real TPU compiler takes every kernel, on every generation."""

import importlib.util
import json
import subprocess
import sys

import pytest

from laneweave.tools import cases, report_summary, targets


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu, the TPU compiler, is not installed",
)
@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_compiles_without_temporaries_or_copies(target):
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "laneweave.tools.tpu_report",
      f"--targets={target}",
      "--cases=small",
      "--noxla",
      "--json",
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads(done.stdout)
  assert len(rows) == 2 * len(cases.SMALL)
  bad = [
    row for row in rows if row["error"] or row["temp_bytes"] or row["copies"]
  ]
  assert not bad, [(row["case"], report_summary.misses(row)) for row in bad]
