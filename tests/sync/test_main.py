"""The command, as its users run it: in processes of its own."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from laneweave.tests.sync import commands

_TOOLS = pathlib.Path(__file__).parents[2] / "tools"
_FAST = ("--kernel_backend=xla", "--timeout_s=60")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
  return commands.checkpoint(tmp_path_factory.mktemp("small"))


def free_port():
  with socket.create_server(("127.0.0.1", 0)) as server:
    return server.getsockname()[1]


def test_without_flags_the_bundled_checkpoint_moves(tmp_path):
  report = tmp_path / "report.json"
  code, last, out, errors = commands.run(f"--report={report}")
  assert code == 0, errors
  assert errors == ""
  assert last["status"] == "ok"
  assert last["transport"] == "raiden"
  assert (last["rounds"], last["serving_version"]) == (3, 3)
  assert last["tensors"] == 47
  assert last["mismatched_tensors"] == last["reference_mismatches"] == 0
  assert last["streams"] == 8
  assert last["peak_rss_bytes"].keys() == {"trainer", "rollout"}
  for seconds in last["per_round"]:
    assert all(seconds[k] >= 0 for k in ("convert", "d2h", "transfer", "h2d"))
    assert seconds["pause_s"] < seconds["verify"]
  assert [line for line in out.splitlines() if line.startswith("round 3")]
  full = json.loads(report.read_text())
  sizes = {x["name"]: x["shape"] for x in full["leaves"]}
  assert sizes["decoder.layers_3.moe_block.wi"] == [4, 32, 1024]
  assert (
    sum(2 * shape_product(x["shape"]) for x in full["leaves"])
    == last["bytes_per_round"]
  )


def shape_product(shape):
  product = 1
  for size in shape:
    product *= size
  return product


def test_two_shells_do_the_same_as_one(small):
  address = f"--controller_address=127.0.0.1:{free_port()}"
  kernels = "--kernel_backend=interpret"
  flags = (f"--checkpoint={small}", "--rounds=2", address, kernels)
  rollout = commands.start("--role=rollout", *flags)
  trainer = commands.start("--role=trainer", *flags)
  ends = [commands.finish(p) for p in (trainer, rollout)]
  for code, last, _, errors in ends:
    assert code == 0, errors
    assert last["status"] == "ok"
    assert (last["rounds"], last["serving_version"]) == (2, 2)
    assert last["mismatched_tensors"] == 0
  assert ends[0][1]["reference_mismatches"] is None
  assert ends[1][1]["reference_mismatches"] == 0


def test_the_launch_scripts_start_one_side_each(tmp_path):
  command = tmp_path / "laneweave-sync"
  command.write_text('#!/bin/sh\necho "$@"\n')
  command.chmod(0o755)
  environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
  for side in ("trainer", "rollout"):
    script = tmp_path / "tools" / f"run_{side}.sh"
    script.parent.mkdir(exist_ok=True)
    script.write_bytes((_TOOLS / script.name).read_bytes())
    said = subprocess.run(
      ["bash", script, "--rounds=1", "a b"],
      env=environment,
      capture_output=True,
      text=True,
      check=True,
    )
    assert said.stdout == f"--role={side} --rounds=1 a b\n"


def test_local_transport_is_one_process_and_says_so(small):
  code, last, out, errors = commands.run(
    f"--checkpoint={small}", "--transport=local", "--rounds=2", *_FAST
  )
  assert code == 0, errors
  assert (last["status"], last["transport"]) == ("ok", "local")
  assert last["reference_mismatches"] == 0
  assert "one process" in out


@pytest.mark.parametrize(
  ("flags", "said"),
  [
    (["--bogus=1"], "bogus"),
    (["--rounds=x"], "rounds"),
    (["stray"], "stray"),
    (["--report=/gone/report.json"], "`--report`"),
    (["--rollout_mesh=tp=3"], "KV heads"),
    (["--transport=local", "--checkpoint=/gone.npz"], "`--checkpoint`"),
  ],
)
def test_wrong_flags_end_with_one_line_and_code_2(flags, said):
  code, last, out, errors = commands.run(*flags)
  assert code == 2
  assert last["status"] == "error"
  assert said in last["error"]
  assert errors == f"laneweave-sync: {last['error']}\n"
  assert len(out.splitlines()) == 1


def test_help_names_every_flag_and_touches_nothing():
  process = commands.start("--help")
  out, errors = process.communicate(timeout=60)
  assert (process.returncode, errors) == (0, "")
  for flag in ("checkpoint", "rollout_mesh", "verify", "timeout_s"):
    assert f"--{flag}:" in out


def test_starting_up_loads_no_jax():
  code = (
    "import sys; from laneweave.sync import flags, display, launch, main,"
    " report; sys.exit('jax' in sys.modules or 'tpu_sync' in sys.modules)"
  )
  subprocess.run([sys.executable, "-c", code], check=True)
