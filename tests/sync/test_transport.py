"""Transports: what they are told, and which one is chosen."""

import builtins
import re

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync.transport import (
  base,
  create,
  preflight,
  raiden_package,
  resolve,
  variables,
)


def described(dims, spec, devices, **axes):
  """The variable of an array on a mesh of these devices."""
  grid = np.array(devices).reshape(tuple(axes.values()))
  sharding = NamedSharding(Mesh(grid, tuple(axes)), spec)
  x = jax.ShapeDtypeStruct(dims, np.float32, sharding=sharding)
  (variable,) = variables.variables_of({"w": x})
  return variable


def test_F40_positions_in_the_mesh_not_device_ids():
  v = described((8, 8), P("y", "x"), jax.devices()[:4], x=2, y=2)
  assert v.mesh_shape == (2, 2)
  assert v.global_shard_indices == (0, 2, 1, 3)
  reordered = jax.devices()[3::-1]
  assert (
    described((8, 8), P("y", "x"), reordered, x=2, y=2).global_shard_indices
    == v.global_shard_indices
  )


def test_F41_replicas_hold_the_same_slice():
  v = described((8, 8), P("x"), jax.devices()[:4], x=2, y=2)
  assert v.global_shard_indices == (0, 0, 1, 1)


def test_F42_two_mesh_axes_on_one_array_axis():
  devices = jax.devices()[:8]
  first = described((16, 4), P(("fsdp", "tensor")), devices, fsdp=2, tensor=4)
  assert first.global_shard_indices == tuple(range(8))
  second = described((16, 4), P(("tensor", "fsdp")), devices, fsdp=2, tensor=4)
  assert second.global_shard_indices == (0, 2, 4, 6, 1, 3, 5, 7)
  assert second.sharding_spec == ("tensor,fsdp", "")


def test_F45_short_specs_are_padded():
  v = described((4, 3, 2), P("x"), jax.devices()[:4], x=4)
  assert v.mesh_shape == (4, 1, 1)
  assert v.sharding_spec == ("x", "", "")


def unit(job, **changes):
  variables = {
    "a": ((8, 4), "float32", 0, (0, 1)),
    "b": ((4,), "bfloat16", 1, (0, 1)),
    **changes,
  }
  return base.WorkUnit(
    job=job,
    replica="0",
    endpoints=("127.0.0.1:1",) * 2,
    control_address="127.0.0.1:2",
    mesh_shape=(2,),
    mesh_axes=("x",),
    linear_staging=True,
    variables=tuple(
      base.Variable(
        name=name,
        ordinal=spec[2],
        shape=spec[0],
        dtype=spec[1],
        mesh_shape=(2, *[1] * (len(spec[0]) - 1)),
        sharding_spec=("x", *[""] * (len(spec[0]) - 1)),
        global_shard_indices=spec[3],
      )
      for name, spec in variables.items()
      if spec is not None
    ),
  )


def test_preflight_of_units_that_agree():
  assert preflight.preflight(unit("trainer"), unit("rollout")) == []


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"b": None}, "`b`"),
    ({"c": ((2,), "float32", 2, (0, 1))}, "`c`"),
    ({"a": ((4, 8), "float32", 0, (0, 1))}, r"float32\[4, 8\]"),
    ({"a": ((8, 4), "bfloat16", 0, (0, 1))}, r"bfloat16\[8, 4\]"),
    (
      {
        "a": ((8, 4), "float32", 1, (0, 1)),
        "b": ((4,), "bfloat16", 0, (0, 1)),
      },
      "ordinal 1",
    ),
    ({"a": ((8, 4), "float32", 0, (0, 0))}, "not tiled exactly once"),
  ],
)
def test_F09_preflight_names_what_does_not_agree(changes, message):
  problems = preflight.preflight(unit("trainer"), unit("rollout", **changes))
  assert problems
  assert any(re.search(message, p) for p in problems)


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


def test_F79_the_error_of_a_missing_package_is_shown(monkeypatch):
  real = builtins.__import__

  def fail(name, *args, **kwargs):
    if name.startswith("tpu_sync"):
      raise ImportError("libfoo.so.1: cannot open shared object file")
    return real(name, *args, **kwargs)

  monkeypatch.setattr(
    raiden_package.importlib, "import_module", lambda name: fail(name)
  )
  with pytest.raises(RuntimeError, match=r"libfoo\.so\.1.*laneweave\[raiden\]"):
    create.resolve_name("raiden", None)
  assert create.resolve_name("local", None) == "local"


def test_unknown_names_are_listed():
  with pytest.raises(ValueError, match="auto, raiden, local"):
    create.resolve_name("nccl", None)
