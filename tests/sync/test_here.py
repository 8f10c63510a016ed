"""Both sides in this process: weights that are wrong are found."""

import dataclasses
import io

from absl import flags as absl_flags
from absl.testing import flagsaver
import numpy as np
import pytest

from laneweave.sync import (
  convert,
  display,
  flags,
  here,
  progress,
  report,
  round_weights,
  verify,
)
from laneweave.tests.sync import commands


@pytest.fixture
def options(tmp_path):
  with flagsaver.flagsaver():
    parsed = absl_flags.FLAGS(["laneweave-sync", "--transport=local"])
    yield dataclasses.replace(
      flags.read(parsed),
      checkpoint=commands.checkpoint(tmp_path),
      kernel_backend="xla",
      rounds=2,
      timeout_s=20.0,
    )


def run(options):
  """Runs both sides; returns the last line's fields and the state."""
  state = progress.Run()
  with display.Board(state, io.StringIO()) as board:
    here.run(("trainer", "rollout"), options, board, state)
  return report.line(state, options), state


def test_a_good_run_is_ok_and_lists_what_stays_behind(options):
  fields, state = run(options)
  assert (fields["status"], fields["rounds"]) == ("ok", 2)
  assert fields["reference_mismatches"] == 0
  assert state.plan["dropped"][0][0] == "step"


def test_one_wrong_bit_is_a_difference_from_the_reference(monkeypatch, options):
  def flipped(x, number):
    y = in_numpy(x, number)
    if x.shape == (16, 2, 8):
      y.view(np.uint32)[3, 1, 5] ^= 1 << 20
    return y

  in_numpy = round_weights.in_numpy
  monkeypatch.setattr(round_weights, "in_numpy", flipped)
  fields, _ = run(options)
  assert fields["status"] == "failed"
  assert fields["reference_mismatches"] == 1
  assert "`decoder.layers_1.mlp.wo.kernel`" in fields["error"]


def test_a_wrong_fingerprint_keeps_the_old_version(monkeypatch, options):
  def wrong(manifest, arrays, **_):
    del arrays
    return () if manifest.version == 1 else ("a.b",)

  monkeypatch.setattr(verify, "mismatched", wrong)
  fields, _ = run(options)
  assert (fields["status"], fields["rounds"]) == ("failed", 1)
  assert fields["serving_version"] == 1
  assert fields["mismatched_tensors"] == 1
  assert [r["outcome"] for r in fields["per_round"]] == ["published", "aborted"]


def test_in_debug_mode_the_parameter_that_fails_is_named(monkeypatch, options):
  def failing(self, entry, *rest):
    if entry.sources[0].endswith("wo.kernel"):
      raise RuntimeError("out of memory")
    return launch(self, entry, *rest)

  launch = convert.Converter._launch
  monkeypatch.setattr(convert.Converter, "_launch", failing)
  fields, _ = run(dataclasses.replace(options, weight_sync_debug=True))
  assert report.exit_code(fields) == 1
  assert "out of memory" in fields["error"]
  assert "`decoder.layers.mlp.wo.kernel` failed" in fields["error"]


def test_kernels_of_another_platform_are_an_input_error(options):
  fields, _ = run(dataclasses.replace(options, kernel_backend="mosaic"))
  assert report.exit_code(fields) == 2
  assert "`--kernel_backend=mosaic`" in fields["error"]


def test_without_verification_nothing_is_claimed(options):
  fields, _ = run(dataclasses.replace(options, verify="off"))
  assert fields["status"] == "ok"
  assert fields["mismatched_tensors"] is None
  assert fields["reference_mismatches"] is None


def test_a_mesh_larger_than_the_machine_is_an_input_error(options):
  mesh = flags.meshes.parse("fsdp=32", "rollout_mesh")
  fields, _ = run(dataclasses.replace(options, rollout_mesh=mesh))
  assert report.exit_code(fields) == 2
  assert "`--rollout_mesh` fsdp=32 needs 32 devices" in fields["error"]
