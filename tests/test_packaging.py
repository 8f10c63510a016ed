"""What gets installed: setup.cfg against the folders, and a wheel."""

import configparser
import pathlib
import shutil
import subprocess
import sys
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
TOPS = ("kernels", "sync", "tools")


def setup_cfg():
  parser = configparser.ConfigParser()
  parser.read(ROOT / "setup.cfg", encoding="utf-8")
  return parser


def sources():
  """Modules that are installed, from the root."""
  found = [p for top in TOPS for p in (ROOT / top).rglob("*.py")]
  return sorted(p.relative_to(ROOT).as_posix() for p in found)


def test_setup_cfg_lists_every_folder_of_modules():
  listed = setup_cfg()["options"]["packages"].split()
  folders = {pathlib.PurePosixPath(path).parent for path in sources()}
  wanted = {"laneweave", *(f"laneweave.{'.'.join(f.parts)}" for f in folders)}
  # Of files alone.
  assert wanted == set(listed) - {"laneweave.sync.data"}
  assert sorted(listed) == listed


def test_raiden_is_the_only_exact_pin_and_only_for_its_python():
  extras = dict(setup_cfg()["options.extras_require"])
  assert set(extras) == {"raiden", "checkpoint", "plot", "test", "dev"}
  assert extras["raiden"].strip() == (
    'tpu-sync-jax==0.0.1rc20261023185136; python_version == "3.12"'
  )
  others = setup_cfg()["options"]["install_requires"]
  others += "".join(v for k, v in extras.items() if k != "raiden")
  assert "==" not in others


def test_a_wheel_holds_the_package_and_its_data(tmp_path):
  source = tmp_path / "source"
  source.mkdir()
  for name in ("__init__.py", "py.typed", "setup.cfg", "pyproject.toml"):
    shutil.copy(ROOT / name, source)
  for name in ("README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  for top in (*TOPS, "tests"):
    shutil.copytree(
      ROOT / top, source / top, ignore=shutil.ignore_patterns("__pycache__")
    )
  # Through the backend itself: it needs no network and no configured index.
  code = "import sys; from setuptools import build_meta as b; "
  code += "b.build_wheel(sys.argv[1])"
  subprocess.run(
    [sys.executable, "-c", code, str(tmp_path)],
    cwd=source,
    check=True,
    capture_output=True,
  )
  (wheel,) = tmp_path.glob("laneweave-*.whl")
  with zipfile.ZipFile(wheel) as opened:
    names = set(opened.namelist())
    (entries,) = [n for n in names if n.endswith("/entry_points.txt")]
    assert b"laneweave-sync = laneweave.sync.main:run" in opened.read(entries)
  assert {f"laneweave/{path}" for path in sources()} <= names
  data = {p.name for p in (ROOT / "sync" / "data").iterdir()}
  assert {f"laneweave/sync/data/{name}" for name in data} <= names
  assert {
    "laneweave/__init__.py",
    "laneweave/py.typed",
    "laneweave/sync/control/control.proto",
    "laneweave/sync/control/control_pb2.pyi",
  } <= names
  assert not any("tests" in n or "BUILD" in n for n in names)
  assert any(n.endswith("/licenses/LICENSE") for n in names)
