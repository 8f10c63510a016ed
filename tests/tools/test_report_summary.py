"""What counts as a miss, and what as a win."""

import pytest

from laneweave.tools import report_rows, report_summary


def row(**changes):
  made = dict.fromkeys(report_rows.COLUMNS)
  made.update(
    op="unscan",
    case="mlp",
    target="v5p",
    fingerprint=False,
    min_bytes=8 << 20,
    kernel_bytes=8 << 20,
    bytes_ratio=1.0,
    padded_minimum=False,
    padded_min_bytes=8 << 20,
    temp_bytes=0,
    copies=0,
    steps=4,
    launches=1,
    dma_us_per_step=1.0,
    compute_us_per_step=0.5,
    roofline_fraction=1.0,
    bounding_slot="alu",
    least_count=300,
    xla_ratio=1.5,
    xla_temp_bytes=5,
    xla_us=6.0,
    xla_issue_us=2.0,
    xla_launches=2,
    xla_layer_ratio=1.0,
    xla_layer_temp_bytes=0,
    xla_layer_us=4.01,
    xla_layer_issue_us=4.0,
    xla_layer_launches=48,
  )
  made.update(changes)
  return made


def test_the_strongest_form_is_the_one_of_least_time():
  assert report_summary.strongest(row()) == "xla_layer"
  assert report_summary.strongest(row(xla_layer_us=7.0)) == "xla"
  assert report_summary.strongest(row(xla_us=None, xla_layer_us=None)) is None


def test_verdicts_are_against_that_form():
  assert report_summary.compare(row()) == {
    "bytes": "tie",
    "temporaries": "tie",
    "issue": "win",
    "launches": "win",
    "time": "tie",
  }
  slower = report_summary.compare(row(compute_us_per_step=2.0))
  assert slower["time"] == slower["issue"] == "lose"


def test_out_of_memory_is_the_kernels_win():
  verdicts = report_summary.compare(
    row(
      xla_ratio="RESOURCE_EXHAUSTED",
      xla_us=None,
      xla_layer_ratio="RESOURCE_EXHAUSTED",
      xla_layer_us=None,
    )
  )
  assert set(verdicts.values()) == {"win"}


def test_a_good_row_misses_nothing():
  assert report_summary.misses(row()) == []


@pytest.mark.parametrize(
  ("changes", "word"),
  [
    ({"bytes_ratio": 1.03}, "bytes_ratio"),
    ({"temp_bytes": 1}, "temp_bytes"),
    ({"copies": 1}, "copies"),
    ({"roofline_fraction": 0.94}, "alu slot needs at least 300"),
    ({"compute_us_per_step": 2.0}, "slower than XLA"),
    ({"error": "no"}, "does not compile"),
    ({"temp_fraction": 0.01}, "temporaries"),
    ({"peak_within_bound": False, "peak_bytes": 5}, "peak_bytes"),
  ],
)
def test_misses_are_named(changes, word):
  (found,) = report_summary.misses(row(**changes))
  assert word in found


def test_time_below_a_megabyte_is_no_miss():
  small = row(min_bytes=1 << 20, roofline_fraction=0.1)
  assert report_summary.misses(small) == []


def test_the_table_counts_rows_above_a_megabyte():
  lines = report_summary.table([row(), row(), row(min_bytes=5)])
  assert lines[-1].split() == [
    "unscan",
    "v5p",
    "0/2/0",
    "0/2/0",
    "2/0/0",
    "2/0/0",
    "0/2/0",
  ]
  assert report_summary.table([row(error="no")]) == []
