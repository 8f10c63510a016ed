"""Finding a CPython 3.12: what runs counts, not what is on PATH."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "tools" / "find_python.sh"

pytestmark = pytest.mark.skipif(
  sys.version_info[:2] != (3, 12),
  reason="the interpreter that runs the tests is the one that is found",
)


def executable(folder, name, text):
  path = folder / name
  path.write_text(text)
  path.chmod(0o755)
  return path


def run(folder, **environment):
  return subprocess.run(
    ["/bin/bash", str(SCRIPT)],
    env={
      "PATH": f"{folder}:/bin",
      "HOME": str(folder),
      **environment,
    },
    capture_output=True,
    text=True,
    check=False,
  )


WORKING = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"


def same(done):
  return os.path.realpath(done.stdout.strip()) == os.path.realpath(
    sys.executable
  )


def test_a_shim_that_does_not_run_does_not_count(tmp_path):
  executable(tmp_path, "python3.12", SHIM)
  executable(tmp_path, "python3", WORKING)
  done = run(tmp_path)
  assert done.returncode == 0
  assert same(done)


def test_another_version_does_not_count(tmp_path):
  """A Python that runs but is 3.13, or another implementation."""
  fake = "#!{python}\nimport sys\n{change}\nexec(sys.argv[2])\n"
  for name, change in (
    ("python3.12", "sys.implementation.name = 'pypy'"),
    ("python3", "sys.version_info = (3, 13, 1)"),
  ):
    executable(
      tmp_path, name, fake.format(python=sys.executable, change=change)
    )
  done = run(tmp_path)
  assert done.returncode == 1
  executable(tmp_path, "python3", fake.format(python=sys.executable, change=""))
  assert same(run(tmp_path))


def test_uv_is_asked_last(tmp_path):
  executable(tmp_path, "python3", SHIM)
  mine = executable(tmp_path, "mine", WORKING)
  executable(
    tmp_path, "uv", f'#!/bin/sh\n[ "$*" = "python find 3.12" ] && echo {mine}\n'
  )
  assert same(run(tmp_path))


def test_a_variable_that_is_wrong_is_said(tmp_path):
  mine = executable(tmp_path, "mine", SHIM)
  executable(tmp_path, "python3", WORKING)
  done = run(tmp_path, PYTHON=str(mine))
  assert same(done)
  assert f"PYTHON={mine} is not a CPython 3.12" in done.stderr


def test_the_variable_comes_first(tmp_path):
  executable(tmp_path, "python3.12", SHIM)
  mine = executable(tmp_path, "mine", WORKING)
  assert same(run(tmp_path, PYTHON=str(mine)))


def test_pyenv_versions_are_looked_at(tmp_path):
  executable(tmp_path, "python3.12", SHIM)
  executable(tmp_path, "python3", SHIM)
  folder = tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin"
  folder.mkdir(parents=True)
  executable(folder, "python", WORKING)
  assert same(run(tmp_path))


def test_pyenv_is_found_from_its_shims_with_another_home(tmp_path):
  shims = tmp_path / "pyenv" / "shims"
  versions = tmp_path / "pyenv" / "versions" / "3.12.9" / "bin"
  for folder in (shims, versions):
    folder.mkdir(parents=True)
  executable(shims, "python3.12", SHIM)
  executable(shims, "python3", SHIM)
  executable(versions, "python", WORKING)
  assert same(run(shims, HOME=str(tmp_path / "nobody")))


def test_none_is_said_in_one_line(tmp_path):
  executable(tmp_path, "python3.12", SHIM)
  executable(tmp_path, "python3", SHIM)
  done = run(tmp_path)
  assert done.returncode == 1
  assert done.stdout == ""
  assert len(done.stderr.strip().splitlines()) == 1
  assert "install one" in done.stderr
