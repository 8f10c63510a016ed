"""Events to state, state to table, JSON line and report."""

import dataclasses
import io
import json

from absl import flags as absl_flags
import pytest

from laneweave.sync import display, flags, progress, report

PLAN = {
  "kind": "plan",
  "mesh": "fsdp=4",
  "platform": "cpu (cpu)",
  "transport": "raiden",
  "tensors": 2,
  "bytes": 1000,
  "notes": ["n1", "n2", "n3", "n4", "n5"],
  "dropped": [["step", "rank 0"]],
  "leaves": [],
}


@pytest.fixture
def options():
  if not absl_flags.FLAGS.is_parsed():
    absl_flags.FLAGS(["test"])
  return dataclasses.replace(flags.read(["test"]), rounds=2)


def ended(side, number, seconds, outcome="published", mismatched=()):
  return {
    "side": side,
    "kind": "round",
    "round": number,
    "version": number,
    "outcome": outcome,
    "seconds": seconds,
    "mismatched": list(mismatched),
    "reason": "" if outcome == "published" else "fingerprints differ",
  }


def run_of(events):
  run = progress.Run()
  for event in events:
    run.apply(event)
  return run


def good_events():
  yield {"side": "trainer", **PLAN}
  yield {"side": "trainer", "kind": "listening", "address": "h:1"}
  yield {"side": "rollout", **PLAN}
  for number in (1, 2):
    phase = {"round": number, "phase": "convert"}
    yield {"side": "trainer", "kind": "phase", **phase}
    yield ended("trainer", number, {"convert": 0.5, "d2h": 0.25})
    yield ended("rollout", number, {"verify": 0.125, "pause_s": 1e-6})
  yield {
    "side": "rollout",
    "kind": "reference",
    "tensors": 2,
    "mismatched": [],
  }
  for side in ("trainer", "rollout"):
    yield {
      "side": side,
      "kind": "done",
      "serving_version": 2,
      "peak_rss_bytes": 10,
    }


def test_a_good_run_is_ok(options):
  fields = report.line(run_of(good_events()), options)
  assert report.exit_code(fields) == 0
  per_round = fields.pop("per_round")
  assert fields == {
    "status": "ok",
    "transport": "raiden",
    "rounds": 2,
    "tensors": 2,
    "bytes_per_round": 1000,
    "mismatched_tensors": 0,
    "reference_mismatches": 0,
    "serving_version": 2,
    "streams": options.parallelism,
    "verify": "reference",
    "peak_rss_bytes": {"trainer": 10, "rollout": 10},
  }
  assert per_round[1] == {
    "round": 2,
    "version": 2,
    "outcome": "published",
    "convert": 0.5,
    "d2h": 0.25,
    "transfer": None,
    "h2d": None,
    "verify": 0.125,
    "publish": None,
    "pause_s": 1e-6,
  }


def test_a_missing_round_is_a_failure(options):
  more = dataclasses.replace(options, rounds=3)
  fields = report.line(run_of(good_events()), more)
  assert report.exit_code(fields) == 1
  assert fields["error"] == "2 of 3 rounds were published"


def test_an_aborted_round_is_a_failure(options):
  bad = ended("trainer", 2, {}, "aborted", ["a.b"])
  fields = report.line(run_of([*good_events(), bad]), options)
  assert report.exit_code(fields) == 1
  assert fields["mismatched_tensors"] == 1
  assert "fingerprints differ" in fields["error"]


def test_a_difference_from_the_reference_is_a_failure(options):
  bad = {
    "side": "rollout",
    "kind": "reference",
    "tensors": 2,
    "mismatched": ["a.b"],
  }
  fields = report.line(run_of([*good_events(), bad]), options)
  assert report.exit_code(fields) == 1
  assert fields["reference_mismatches"] == 1
  assert "`a.b`" in fields["error"]


def test_a_wrong_input_goes_before_what_follows_from_it(options):
  run = progress.Run()
  run.fail("trainer", "the process was killed by SIGTERM")
  run.fail("rollout", "no such file", is_input=True)
  fields = report.line(run, options)
  assert report.exit_code(fields) == 2
  assert fields["error"] == "no such file"


def test_what_was_not_checked_is_not_said_to_match(options):
  off = dataclasses.replace(options, verify="off")
  run = run_of(e for e in good_events() if e["kind"] != "reference")
  fields = report.line(run, off)
  assert fields["mismatched_tensors"] is None
  assert fields["reference_mismatches"] is None


def test_the_report_is_json_and_replaces_the_old_one(options, tmp_path):
  path = tmp_path / "report.json"
  path.write_text("old")
  report.check_writable(path)
  assert path.read_text() == "old"
  report.write(path, report.full(run_of(good_events()), options))
  data = json.loads(path.read_text())
  assert data["dropped"] == [["step", "rank 0"]]
  assert data["flags"]["rounds"] == 2
  assert data["sharding_rules"]["rollout"]["mlp"] == ["tp"]
  assert list(tmp_path.iterdir()) == [path]


def test_a_report_that_cannot_be_written_is_found_early(tmp_path):
  for path in (tmp_path, tmp_path / "gone" / "report.json"):
    with pytest.raises(ValueError, match="`--report`"):
      report.check_writable(path)


def test_plain_output_is_one_line_a_round_and_a_table():
  out = io.StringIO()
  run = progress.Run()
  with display.Board(run, out) as board:
    for event in good_events():
      run.apply(event)
      board.show(event)
  board.summary()
  text = out.getvalue()
  lines = text.splitlines()
  assert "\x1b" not in text
  assert sum(line.startswith("round 1: version 1 published") for line in lines)
  assert sum(line.startswith("round 2") for line in lines) == 1
  assert "and 1 more notes, see --report" in lines
  assert max(map(len, lines)) <= 100
  assert any(line.split()[:2] == ["1", "500.0"] for line in lines)


def test_long_runs_show_their_first_and_last_rounds():
  run = run_of(ended("trainer", n, {"convert": 1.0}) for n in range(1, 101))
  out = io.StringIO()
  display.Board(run, out).summary()
  rows = [
    line.split()[0] for line in out.getvalue().splitlines() if line.strip()
  ]
  assert rows[-13:] == ["...", *map(str, range(89, 101))]
