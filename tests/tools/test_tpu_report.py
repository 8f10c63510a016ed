"""The compile report: its rows, and what it refuses."""

import importlib.util
import json
import subprocess
import sys

import pytest

from laneweave.tools import report_rows

_NEEDS_LIBTPU = pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None,
  reason="libtpu, the TPU compiler, is not installed",
)


def run(*arguments):
  return subprocess.run(
    [sys.executable, "-m", "laneweave.tools.tpu_report", *arguments],
    capture_output=True,
    text=True,
    check=False,
  )


@_NEEDS_LIBTPU
def test_rows_are_one_json_array_alone_on_standard_output():
  done = run(
    "--targets=v5p", "--cases=small", "--filter=second minor", "--json"
  )
  assert done.returncode == 0, done.stderr[-2000:]
  plain, printing = json.loads(done.stdout)
  for row in (plain, printing):
    assert set(report_rows.COLUMNS) <= set(row)
    assert row["error"] is None
    assert row["target"] == "v5p"
    assert row["min_bytes"] == 128 * 8 * 256 * (4 + 2)
    assert row["bytes_ratio"] <= 1.02
    assert row["temp_bytes"] == row["copies"] == 0
    assert row["launches"] >= 1
    longest = max(row["dma_us_per_step"], row["compute_us_per_step"])
    assert row["roofline_fraction"] == pytest.approx(
      row["dma_us_per_step"] / longest
    )
  assert [plain["fingerprint"], printing["fingerprint"]] == [False, True]
  # XLA takes the layers out of the sublanes by a copy: it moves more.
  assert plain["xla_ratio"] > 1.02
  assert plain["xla_temp_bytes"] > 0
  assert printing["xla_ratio"] == plain["xla_ratio"]
  assert "Assumptions" in done.stderr


@pytest.mark.parametrize(
  "flag",
  [
    "--targets=v9",
    "--targets=",
    "--ops=transmogrify",
    "--filter=no such case",
    "--cases=huge",
    "--no_such_flag",
    "stray",
  ],
)
def test_wrong_flags_are_one_line(flag):
  done = run(flag)
  assert done.returncode == 2
  assert done.stdout == ""
  assert len(done.stderr.splitlines()) == 1, done.stderr
