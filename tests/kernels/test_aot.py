"""The real TPU compiler takes every kernel, on every generation."""

import json
import subprocess
import sys

import pytest

from laneweave.tools import targets


@pytest.mark.parametrize("target", sorted(targets.TARGETS))
def test_compiles_without_temporaries_or_copies(target):
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "laneweave.tools.tpu_compile",
      f"--target={target}",
    ],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  rows = json.loads(done.stdout)
  assert len(rows) > 40
  bad = [
    row for row in rows if "error" in row or row["temp_bytes"] or row["copies"]
  ]
  assert not bad, bad
