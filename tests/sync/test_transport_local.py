"""The transport of one process: `jax.device_put` between two meshes."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync.transport import base, local, preflight
from laneweave.tests.kernels import bits
from laneweave.tests.sync import small_model


@pytest.fixture
def ends():
  source = local.LocalEndpoint(job="trainer", replica="0")
  rollouts = [
    local.LocalEndpoint(job="rollout", replica=str(i)) for i in range(2)
  ]
  yield source, rollouts
  for end in (source, *rollouts):
    end.close()


def arrays(dtype="bfloat16"):
  grid = small_model.mesh((4,), ("fsdp",))
  return {
    name: jax.device_put(
      bits.random(dims, dtype, seed=i), NamedSharding(grid, P("fsdp"))
    )
    for i, (name, dims) in enumerate([("a", (8, 4)), ("b", (16,))])
  }


def target(shape, names, dtype="bfloat16"):
  grid = small_model.mesh(shape, names, first=4)
  return {
    name: jax.ShapeDtypeStruct(
      dims, dtype, sharding=NamedSharding(grid, P(names[-1]))
    )
    for name, dims in [("a", (8, 4)), ("b", (16,))]
  }


def move(source, rollouts):
  controller = local.LocalController()
  units = [source.work_unit(), *(r.work_unit() for r in rollouts)]
  for unit in units:
    controller.register(unit)
    assert preflight.preflight(units[0], unit) == []
  controller.transfer(
    units[0], units[1:], uuid=1, request="request-1", timeout_s=1
  )


def test_two_rollouts_with_different_meshes(ends):
  source, rollouts = ends
  sent = arrays()
  source.bind(sent)
  for rollout, (shape, names) in zip(
    rollouts, [((2, 2), ("fsdp", "tp")), ((4,), ("tp",))], strict=True
  ):
    rollout.bind(rollout.allocate(target(shape, names)))
  source.stage()
  move(source, rollouts)
  for rollout in rollouts:
    arrived = rollout.load()
    assert arrived.keys() == sent.keys()
    for name, x in sent.items():
      bits.assert_bits_equal(arrived[name], x)
      want = {s.device for s in arrived[name].addressable_shards}
      assert want <= set(jax.devices()[4:])


def test_what_arrived_shares_no_memory_with_what_was_sent(ends):
  source, (rollout, _) = ends
  sent = arrays()
  # The same devices and shardings: a copy all the same.
  source.bind(sent)
  rollout.bind(
    {
      name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
      for name, x in sent.items()
    }
  )
  move(source, [rollout])
  want = {name: np.asarray(x).copy() for name, x in sent.items()}
  arrived = rollout.load()
  for name, x in sent.items():
    theirs = {s.data.unsafe_buffer_pointer() for s in x.addressable_shards}
    ours = {
      s.data.unsafe_buffer_pointer() for s in arrived[name].addressable_shards
    }
    assert not ours & theirs
    x.delete()
    bits.assert_bits_equal(arrived[name], want[name])


def test_arrays_that_were_released_fail_the_transfer(ends):
  source, (rollout, _) = ends
  source.bind(arrays())
  rollout.bind(rollout.allocate(target((4,), ("tp",))))
  source.release()
  with pytest.raises(base.TransportError, match="request-1 failed"):
    move(source, [rollout])


def test_an_end_that_is_closed_or_elsewhere(ends):
  source, (rollout, _) = ends
  source.bind(arrays())
  rollout.bind(rollout.allocate(target((4,), ("tp",))))
  rollout.close()
  rollout.close()
  with pytest.raises(base.TransportError, match="is not in this process"):
    move(source, [rollout])


def test_nothing_bound(ends):
  with pytest.raises(base.TransportError, match="nothing is bound yet"):
    ends[0].work_unit()
