"""Runs `laneweave-sync` in processes of its own, on a checkpoint of four arrays."""

import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import psutil

_FIELDS = {
  "num_decoder_layers": 2,
  "scan_layers": True,
  "param_scan_axis": 1,
  "inhomogeneous_layer_cycle_interval": 1,
}
_SHAPES = {
  "token_embedder.embedding": (16, 8),
  "decoder.layers.mlp.wo.kernel": (16, 2, 8),
  "decoder.layers.self_attention.key.kernel": (8, 2, 1, 4),
  "decoder.layers.post_norm.scale": (8, 2),
}


def checkpoint(folder: pathlib.Path) -> pathlib.Path:
  """Writes a small checkpoint and its configuration."""
  rng = np.random.default_rng(0)
  weights = {k: rng.standard_normal(s, np.float32) for k, s in _SHAPES.items()}
  np.savez(folder / "small.npz", step=np.int32(7), **weights)
  (folder / "small.config.json").write_text(json.dumps(_FIELDS))
  return folder / "small.npz"


def start(*arguments: str) -> subprocess.Popen:
  """Starts the command; its output is read by `finish`."""
  # Not the test's own eight devices: the command chooses its number itself.
  environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
  return subprocess.Popen(
    [sys.executable, "-m", "laneweave.sync.main", *arguments],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=environment,
  )


def finish(process: subprocess.Popen, timeout_s: float = 120):
  """Waits for the end: exit code, last line as JSON, all output, errors."""
  out, errors = process.communicate(timeout=timeout_s)
  return process.returncode, json.loads(out.splitlines()[-1]), out, errors


def run(*arguments: str):
  """Runs the command to its end, see `finish`."""
  return finish(start(*arguments))


def read_until(process: subprocess.Popen, beginning: str) -> str:
  """Reads output up to a line that begins like this."""
  for line in process.stdout:
    if line.startswith(beginning):
      return line
  raise AssertionError(f"no line begins with {beginning!r}")


def side(process: subprocess.Popen, role: str) -> psutil.Process:
  """The process of one role that a launcher started."""
  for child in psutil.Process(process.pid).children():
    if f"--role={role}" in child.cmdline():
      return child
  raise AssertionError(f"there is no {role}")


def wait_gone(processes: list[psutil.Process], timeout_s: float = 20) -> None:
  """Fails if any of these is still there after a while."""
  end = time.monotonic() + timeout_s
  while any(p.is_running() and p.status() != "zombie" for p in processes):
    assert time.monotonic() < end, f"left behind: {processes}"
    time.sleep(0.1)
