"""Which transport is chosen, and what an absent one says."""

import importlib
import subprocess
import sys

import pytest

from laneweave.sync.transport import create, raiden_package, resolve

# (use_raiden_ffi, proxy, native importable, FFI importable, RAIDEN_USE_FFI)
# and the transport, whether it is staged on the host, or the error.
TABLE = [
  ((None, True, True, True, None), ("raiden_ffi", False)),
  ((True, True, True, True, None), ("raiden_ffi", False)),
  ((True, True, False, True, None), ("raiden_ffi", False)),
  ((None, True, True, False, None), "proxy arrays"),
  ((True, True, True, False, None), "proxy arrays"),
  ((False, True, True, True, None), ("raiden", True)),
  ((False, True, True, False, None), "proxy arrays"),
  ((False, True, False, True, None), "cannot be imported"),
  ((None, False, True, True, None), ("raiden", False)),
  ((None, False, True, False, None), ("raiden", False)),
  ((False, False, True, True, None), ("raiden", False)),
  ((None, False, False, True, None), "--transport=local"),
  ((True, False, True, True, None), ("raiden_ffi", False)),
  ((True, False, True, False, None), "asks for Raiden's FFI"),
  ((None, False, True, True, "1"), ("raiden_ffi", False)),
  ((None, False, True, True, "Yes"), ("raiden_ffi", False)),
  ((None, True, True, True, "false"), ("raiden", True)),
  ((None, False, True, True, "no"), ("raiden", False)),
  ((False, False, True, True, "1"), ("raiden", False)),
  ((True, False, True, True, "0"), ("raiden_ffi", False)),
  ((None, False, True, True, "maybe"), "RAIDEN_USE_FFI"),
]


@pytest.mark.parametrize(("row", "result"), TABLE)
def test_resolution(row, result):
  ffi, proxy, native, has_ffi, environment = row
  options = {
    "is_proxy": proxy,
    "native_error": None if native else "No module named tpu_sync",
    "ffi_error": None if has_ffi else "No module named tpu_sync",
    "environment": environment,
  }
  if isinstance(result, str):
    with pytest.raises((RuntimeError, ValueError), match=result):
      resolve.resolve_transport(ffi, **options)
  else:
    choice = resolve.resolve_transport(ffi, **options)
    assert (choice.name, choice.host_staging) == result
    assert not (choice.name == "raiden" and proxy and not choice.host_staging)


def fail_imports(monkeypatch, errors):
  """Makes the import of some packages fail; the errors are given by name."""
  real = importlib.import_module

  def fail(name, *args):
    if error := errors.get(name.partition(".")[0]):
      raise error
    return real(name, *args)

  monkeypatch.setattr(raiden_package.importlib, "import_module", fail)


def test_F79_the_error_of_a_missing_package_is_shown(monkeypatch):
  fail_imports(
    monkeypatch,
    {
      "tpu_sync": ImportError("libfoo.so.1: cannot open shared object file"),
      "tpu_raiden": ModuleNotFoundError("No module named 'tpu_raiden'"),
    },
  )
  with pytest.raises(
    RuntimeError, match=r"libfoo\.so\.1.*tpu_raiden.*laneweave\[raiden\]"
  ):
    create.resolve_name("raiden", None)
  with pytest.raises(RuntimeError, match=r"FFI.*libfoo\.so\.1"):
    create.resolve_name("auto", True)
  assert create.resolve_name("local", None) == "local"


def test_F79_either_name_of_the_package_will_do(monkeypatch):
  fail_imports(
    monkeypatch, {"tpu_sync": ModuleNotFoundError("No module named tpu_sync")}
  )
  monkeypatch.setitem(sys.modules, f"tpu_raiden.{raiden_package.NATIVE}", sys)
  assert raiden_package.load(raiden_package.NATIVE) is sys
  assert raiden_package.import_error(raiden_package.NATIVE) is None


def test_F79_the_package_imports_without_the_transport():
  code = (
    "import sys\n"
    "sys.modules['tpu_sync'] = sys.modules['tpu_raiden'] = None\n"
    "import laneweave\n"
    "from laneweave.sync import session\n"
    "from laneweave.sync.transport import create\n"
    "print(create.resolve_name('local', None))\n"
  )
  said = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  assert said.stdout == "local\n"


def test_the_environment_counts_where_nothing_is_asked_for(monkeypatch):
  monkeypatch.setenv("RAIDEN_USE_FFI", "1")
  assert create.resolve_name("auto", None) == "raiden_ffi"
  assert create.resolve_name("auto", False) == "raiden"
  monkeypatch.setenv("RAIDEN_USE_FFI", "0")
  assert create.resolve_name("auto", None) == "raiden"
  monkeypatch.setenv("JAX_PLATFORMS", "cpu, proxy")
  with pytest.raises(RuntimeError, match="proxy arrays"):
    create.resolve_name("auto", None)
  assert create.resolve_name("auto", True) == "raiden_ffi"


def test_ffi_is_not_asked_of_what_does_without_raiden():
  with pytest.raises(ValueError, match=r"`use_raiden_ffi`.*'local'"):
    create.resolve_name("local", True)


def test_unknown_names_are_listed():
  with pytest.raises(ValueError, match="auto, raiden, local"):
    create.resolve_name("nccl", None)
