"""What a transport is told of arrays, and whether two sides agree."""

import dataclasses
import re

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync.transport import base, preflight, variables


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


def test_F45_short_specs_are_padded_and_trailing_none_is_dropped():
  v = described((4, 3, 2), P("x"), jax.devices()[:4], x=4)
  assert v.mesh_shape == (4, 1, 1)
  assert v.sharding_spec == ("x", "", "")
  sharding = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
  for spec, kept in ((P("x", None), P("x")), (P(None, "x"), P(None, "x"))):
    longer = sharding.update(spec=spec)
    assert variables.without_trailing_none(longer, 1).spec == kept
  with pytest.raises(base.MismatchError, match=r"`w` .* spec for more axes"):
    variables.variables_of(
      {"w": Leaf((8,), sharding.update(spec=P(None, "x")))}
    )


@dataclasses.dataclass
class Leaf:
  """What JAX itself would refuse to describe."""

  shape: tuple
  sharding: object
  dtype: object = np.dtype("float32")


def test_F47_an_uneven_split_is_refused_with_key_length_and_axis():
  sharding = NamedSharding(
    Mesh(np.array(jax.devices()[:4]), ("fsdp",)), P(None, "fsdp")
  )
  with pytest.raises(
    ValueError, match=r"`w` .*10 elements along axis 1, .*fsdp split into 4"
  ):
    variables.variables_of({"w": Leaf((8, 10), sharding)})


def test_F48_arrays_on_another_mesh_are_named():
  def leaf(devices):
    sharding = NamedSharding(Mesh(np.array(devices), ("x",)), P("x"))
    return jax.ShapeDtypeStruct((8,), np.float32, sharding=sharding)

  first, second = jax.devices()[:4], jax.devices()[4:8]
  arrays = {"a": leaf(first), "b": leaf(second), "c": leaf(first[::-1])}
  with pytest.raises(base.MismatchError) as raised:
    variables.variables_of(arrays)
  assert [p.split()[0] for p in raised.value.problems] == ["`b`", "`c`"]
  assert "`b` float32[8] lies on devices [4, 5, 6, 7]" in str(raised.value)


def test_what_cannot_be_moved_is_refused_all_at_once():
  alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  arrays = {
    "scalar": Leaf((), alone),
    "good": Leaf((4,), alone),
    "odd": Leaf((4,), None),
  }
  with pytest.raises(base.MismatchError, match=r"2 problem.*`scalar`.*`odd`"):
    variables.variables_of(arrays)


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
    ({"a": ((8, 4), "float32", 0, (0, 2))}, "not tiled exactly once"),
    ({"a": ((8, 4), "float32", 0, (0, 1, 1))}, "names slices of 3 devices"),
    ({"a": ((7, 4), "float32", 0, (0, 1))}, "does not divide"),
    ({"a": ((8, 4), "no such dtype", 0, (0, 1))}, "no array that can be"),
    ({"a": ((8, 4), "float32", 7, (0, 1))}, "do not count from 0"),
  ],
)
def test_F09_preflight_names_what_does_not_agree(changes, message):
  problems = preflight.preflight(unit("trainer"), unit("rollout", **changes))
  assert problems
  assert any(re.search(message, p) for p in problems)


def test_F80_sizes_in_bytes_are_told():
  problems = preflight.preflight(
    unit("trainer", a=((7, 5), "bfloat16", 0, (0, 0))),
    unit("rollout", a=((7, 5), "float32", 0, (0, 0))),
  )
  assert any("70 bytes" in p and "140 bytes" in p for p in problems)


def test_F09_every_problem_is_in_one_list():
  problems = preflight.preflight(
    unit("trainer", c=((2,), "float32", 2, (0, 1))),
    unit(
      "rollout",
      a=((8, 4), "float16", 0, (0, 1)),
      b=((4,), "bfloat16", 1, (1, 1)),
    ),
  )
  assert len(problems) == 3
  with pytest.raises(ValueError, match=r"x: 3 problem.*`b`.*`c`.*`a`"):
    raise base.MismatchError("x", problems)


def test_preflight_of_a_hostile_unit_is_quick():
  """A mesh of 2**60 shards is refused without being counted."""
  good = unit("rollout")
  huge = dataclasses.replace(
    good.variables[0], shape=(2**60, 4), mesh_shape=(2**60, 1)
  )
  bad = dataclasses.replace(good, variables=(huge, good.variables[1]))
  assert preflight.preflight(unit("trainer"), bad)
