"""Whatever ends a run: an exit code, a last line, nobody left behind."""

import signal

import psutil
import pytest

from laneweave.tests.sync import commands


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  return commands.checkpoint(tmp_path_factory.mktemp("small"))


@pytest.fixture
def running(small):
  """A run that is in its second round or later, and would go on for long."""
  process = commands.start(
    f"--checkpoint={small}",
    "--rounds=100000",
    "--kernel_backend=xla",
    "--timeout_s=10",
  )
  try:
    commands.read_until(process, "round 1:")
    yield process
  finally:
    process.kill()
    process.communicate()


@pytest.mark.parametrize("role", ["trainer", "rollout"])
def test_a_killed_side_ends_the_run(running, role):
  both = psutil.Process(running.pid).children()
  commands.side(running, role).send_signal(signal.SIGKILL)
  code, last, _, errors = commands.finish(running, 60)
  assert code == 1
  assert last["status"] == "failed"
  assert f"{role}: the process was killed by SIGKILL" in errors
  assert last["serving_version"] >= 1
  commands.wait_gone(both)


def test_a_side_that_hangs_ends_the_run(running):
  both = psutil.Process(running.pid).children()
  commands.side(running, "rollout").send_signal(signal.SIGSTOP)
  code, last, _, _ = commands.finish(running, 90)
  assert (code, last["status"]) == (1, "failed")
  assert "rollout 0" in last["error"]
  commands.wait_gone(both)


def test_an_interrupted_launcher_ends_both_sides(running):
  both = psutil.Process(running.pid).children()
  running.send_signal(signal.SIGTERM)
  code, last, _, _ = commands.finish(running, 30)
  assert (code, last["status"]) == (1, "failed")
  assert "interrupted" in last["error"]
  commands.wait_gone(both)


def test_a_killed_launcher_leaves_nobody_behind(running):
  both = psutil.Process(running.pid).children()
  assert len(both) == 2
  running.kill()
  commands.wait_gone(both)
