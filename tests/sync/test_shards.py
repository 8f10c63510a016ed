"""Layouts on meshes: each device's part, and fingerprints of the whole."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.kernels import layout as layout_lib
from laneweave.kernels import reference
from laneweave.sync import fingerprints, shards
from laneweave.tests.kernels import bits


def mesh(**axes):
  """A mesh of the first devices, its axes in the order given."""
  count = int(np.prod(list(axes.values())))
  devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
  return Mesh(devices, tuple(axes))


def fuse(width, shard_count, padded, lane=0):
  return layout_lib.fuse_layout(
    (4, 3, 8, width),
    "float32",
    scan_axes=(1,),
    shards=shard_count,
    padded_width=padded,
    lane_size=lane,
    dtype="bfloat16",
  )


@pytest.mark.parametrize(
  ("parts", "local"),
  [
    (1, True),
    (2, True),  # the trainer splits as the rollout does
    (4, False),  # more: a rollout shard's gate lies on two devices
  ],
)
def test_localize_fused_halves(parts, local):
  layout = fuse(64, 2, 64)
  assert (shards.localize(layout, (1, 1, 1, parts)) is not None) == local


def test_localize_fewer_trainer_shards_than_rollout_shards():
  part = shards.localize(fuse(64, 4, 128), (1, 1, 1, 2))
  assert part.shape == (4, 3, 8, 32)
  assert part.out_shape == (4, 8, 128)
  assert [(s.source, s.start, s.length) for s in part.segments] == [
    (0, 0, 16),
    (layout_lib.ZERO, 0, 16),
    (1, 0, 16),
    (layout_lib.ZERO, 0, 16),
    (0, 16, 16),
    (layout_lib.ZERO, 0, 16),
    (1, 16, 16),
    (layout_lib.ZERO, 0, 16),
  ]


def test_localize_woven_lanes_split_where_chunks_end():
  layout = fuse(512, 1, 512, lane=128)
  assert shards.localize(layout, (1, 1, 1, 4)) is not None
  assert shards.localize(layout, (1, 1, 1, 8)) is None


def test_localize_uneven_against_the_lanes():
  # 96 of 128 lanes per shard: local only for the rollout's own shards.
  layout = fuse(384, 4, 512)
  assert shards.localize(layout, (1, 1, 1, 4)) is not None
  assert shards.localize(fuse(384, 2, 512), (1, 1, 1, 4)) is None


def test_localize_refuses_a_sharded_stack():
  assert shards.localize(fuse(64, 2, 64), (1, 3, 1, 1)) is None


def test_movable_keeps_the_outer_axes_and_moves_the_inner_one():
  layout = fuse(64, 2, 64)
  place = shards.Placement(
    mesh=mesh(fsdp=2, tp=2), spec=((), (), (), ("fsdp", "tp"))
  )
  moved = shards.movable(layout, place)
  assert moved.spec == (("tp",), (), (), ("fsdp",))


def test_movable_replicates_where_no_axis_divides():
  layout = layout_lib.fuse_layout(
    (3, 64), "float32", scan_axes=(), shards=1, padded_width=64
  )
  place = shards.Placement(mesh=mesh(tp=4), spec=((), ("tp",)))
  assert shards.movable(layout, place).spec == ((), ())


def test_a_local_layout_stays_where_it_is():
  place = shards.Placement(mesh=mesh(tp=2), spec=((), (), (), ("tp",)))
  assert shards.movable(fuse(64, 2, 64), place) == place


SPECS = [
  P(),
  P("a"),
  P(None, "a"),
  P("b", "a"),
  P(("a", "b")),
  P(("b", "a"), None),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_fingerprints_are_the_same_for_any_sharding(dtype, backend):
  x = bits.random((16, 24), dtype, seed=1)
  want = reference.fingerprint(x)
  grid = mesh(a=2, b=4)
  arrays = [jax.device_put(x, NamedSharding(grid, s)) for s in SPECS]
  arrays.append(jax.numpy.asarray(x))
  got = fingerprints.fingerprint_many(arrays, backend=backend)
  np.testing.assert_array_equal(got, np.tile(want, (len(arrays), 1)))


def test_fingerprints_see_swapped_devices():
  x = bits.random((8, 4), "float32", seed=2)
  sharding = NamedSharding(mesh(a=4), P("a"))
  pieces = [x[2 * i : 2 * i + 2] for i in (1, 0, 2, 3)]
  swapped = jax.make_array_from_single_device_arrays(
    x.shape,
    sharding,
    [
      jax.device_put(p, d)
      for p, d in zip(pieces, sharding.mesh.devices, strict=True)
    ],
  )
  good = jax.device_put(x, sharding)
  got = fingerprints.fingerprint_many([swapped, good], seed=(5, 6))
  assert (got[0] != got[1]).any()
  np.testing.assert_array_equal(got[1], reference.fingerprint(x, seed=(5, 6)))


def test_many_arrays_keep_their_order():
  arrays = [
    jax.numpy.asarray(bits.random((4, 4 + i % 3), "float32", seed=i))
    for i in range(40)
  ]
  got = fingerprints.fingerprint_many(arrays)
  want = [reference.fingerprint(np.asarray(x)) for x in arrays]
  np.testing.assert_array_equal(got, want)
