"""The lock file: stable releases with hashes, and no trace of a machine."""

import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
LOCK = ROOT / "requirements.lock.txt"
HASH = "    --hash=sha256:" + "0" * 64 + "\n"


def check(folder, text, resolved=None):
  """Runs the check with a resolver that answers `resolved`."""
  uv = folder / "uv"
  uv.write_text(
    "#!/bin/sh\n"
    'while [ "$1" != "--output-file" ]; do shift; done\n'
    f'cp "{folder}/resolved" "$2"\n'
  )
  uv.chmod(0o755)
  lock = folder / "lock.txt"
  lock.write_text(text)
  (folder / "resolved").write_text(text if resolved is None else resolved)
  return subprocess.run(
    ["/bin/bash", str(ROOT / "tools" / "lock.sh"), "--check", str(lock)],
    env={"PATH": f"{folder}:/usr/bin:/bin"},
    capture_output=True,
    text=True,
    check=False,
  )


def test_every_requirement_of_the_lock_has_a_hash():
  entries = re.split(r"\n(?=\S)", LOCK.read_text().strip())
  assert len(entries) > 40
  for entry in entries:
    assert re.match(
      r"[a-z0-9.-]+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\\n)?)+$", entry
    )


def test_the_lock_passes_when_it_is_what_is_resolved(tmp_path):
  done = check(tmp_path, LOCK.read_text())
  assert done.returncode == 0, done.stderr
  assert "is current" in done.stdout


def test_a_lock_that_is_not_current(tmp_path):
  done = check(tmp_path, f"jax==0.12 \\\n{HASH}", f"jax==0.13 \\\n{HASH}")
  assert done.returncode == 1
  assert "+jax==0.13" in done.stdout
  assert "run `make lock`" in done.stderr


@pytest.mark.parametrize(
  ("line", "message"),
  [
    ("protobuf==7.37.0rc1", "pre-release"),
    ("jax==0.13.0.dev20260101", "pre-release"),
    ("rich==15.0b2", "pre-release"),
    ("--index-url https://example.com/simple", "names an index"),
    ("-e /home/me/laneweave", "names an index"),
    ("laneweave @ file:///home/me/laneweave", "names an index"),
  ],
)
def test_what_a_lock_must_not_name(tmp_path, line, message):
  done = check(tmp_path, f"{line} \\\n{HASH}")
  assert done.returncode == 1
  assert message in done.stderr
