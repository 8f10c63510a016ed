"""Raiden's native synchronizer over real sockets on loopback."""

import gc
import time

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import psutil
import pytest

from laneweave.sync.transport import base
from laneweave.tests.sync.ends import (
  CASES,
  TIMEOUT_S,
  arrays_of,
  assert_arrived,
  ends,
  first_four,
  last_four,
  mesh,
)


@pytest.mark.parametrize(
  "order", [[0, 1, 2, 3], [3, 1, 2, 0]], ids=["ids in order", "reordered"]
)
def test_F44_F49_all_kinds_of_arrays_from_fsdp_to_fsdp_and_tp(order):
  rollout_mesh = mesh([jax.devices()[4 + i] for i in order], fsdp=2, tp=2)
  source = arrays_of(CASES, first_four(fsdp=4), 0)
  with ends() as e:
    (arrived,) = e.sync(source, arrays_of(CASES, rollout_mesh, 1))
    assert_arrived(source, arrived)


def test_F43_four_shards_of_three_to_three_of_four():
  source = {
    "v": jax.device_put(
      np.arange(12, dtype=np.float32),
      NamedSharding(first_four(fsdp=4), P("fsdp")),
    )
  }
  sharding = NamedSharding(mesh(jax.devices()[4:7], tp=3), P("tp"))
  target = {"v": jax.ShapeDtypeStruct((12,), np.float32, sharding=sharding)}
  with ends() as e:
    (arrived,) = e.sync(source, target)
    assert_arrived(source, arrived)


def test_F46_changed_shapes_get_a_new_plan_and_the_same_ones_do_not():
  with ends() as e:
    plans = e.controller._controller.get_plan_cache_size
    kept = []
    # Of equal size in bytes the second time: Raiden itself sees no change.
    for dims, spec in [
      ((8, 128), P("tp")),
      ((16, 64), P(None, "tp")),
      ((16, 64), P(None, "tp")),
      ((16, 128), P(None, "tp")),
    ]:
      case = [(dims, "float32", P("fsdp"), spec)]
      source = arrays_of(case, first_four(fsdp=4), 0)
      (arrived,) = e.sync(source, arrays_of(case, last_four(fsdp=2, tp=2), 1))
      assert_arrived(source, arrived)
      kept.append(e.controller._controller._plan_cache.copy())
      assert plans() == 1
    schedules = [next(iter(k.values())) for k in kept]
    assert schedules[1] is schedules[2]
    assert schedules[0] is not schedules[1] is not schedules[3]


def test_three_rollouts_with_different_meshes():
  case = [((16, 64), "bfloat16", P("fsdp"), P("tp", "fsdp"))] * 4
  source = arrays_of(case, first_four(fsdp=4), 0)
  grids = [
    last_four(fsdp=2, tp=2),
    mesh(jax.devices()[4:6], fsdp=1, tp=2),
    mesh(jax.devices()[6:7], fsdp=1, tp=1),
  ]
  with ends(rollouts=3) as e:
    for _ in range(2):
      targets = [arrays_of(case, grid, 1) for grid in grids]
      for arrived in e.sync(source, *targets):
        assert_arrived(source, arrived)


def test_staging_arrays_share_no_memory():
  """Equal zeros of equal shape, replicas among them, have own buffers."""
  case = [
    ((64,), "float32", P(), P()),
    ((64,), "float32", P(), P()),
    ((64,), "float32", P(), P("tp")),
  ]
  with ends() as e:
    target = arrays_of(case, last_four(fsdp=2, tp=2), 1)
    sets = [e.rollouts[0].allocate(target) for _ in range(2)]
    pointers = [
      shard.data.unsafe_buffer_pointer()
      for arrays in sets
      for x in arrays.values()
      for shard in x.addressable_shards
    ]
    assert len(set(pointers)) == len(pointers) == 24


def test_F66_the_endpoint_keeps_what_is_bound():
  case = [((64, 64), "float32", P("fsdp"), P("tp"))]
  source = arrays_of(case, first_four(fsdp=4), 0)
  want = {name: np.asarray(x).copy() for name, x in source.items()}
  with ends() as e:
    e.rollouts[0].bind(
      e.rollouts[0].allocate(arrays_of(case, last_four(fsdp=2, tp=2), 1))
    )
    e.source.bind(source)
    del source
    gc.collect()
    e.source.stage()
    e.move()
    assert_arrived(want, e.rollouts[0].load())


def test_released_arrays_are_freed_and_staging_stays():
  """Raiden holds bound memory until other arrays take its place."""
  # Two of one kind, so that the placeholder is half of what is freed.
  case = [((50_000_000,), "float32", P(), P())] * 2
  grid = mesh(jax.devices()[:1], fsdp=1, tp=1)
  resident = psutil.Process().memory_info
  with ends() as e:
    arrays = e.source.allocate(arrays_of(case, grid, 1))
    e.source.bind(arrays)
    e.source.stage()
    before = resident().rss
    del arrays
    e.source.release()
    gc.collect()
    assert before - resident().rss > 150e6
    e.source.release()
    with pytest.raises(base.TransportError, match="nothing is bound"):
      e.source.stage()


def test_what_was_staged_can_be_moved_after_release():
  case = [((16, 64), "float32", P("fsdp"), P("tp"))]
  source = arrays_of(case, first_four(fsdp=4), 0)
  with ends() as e:
    e.rollouts[0].bind(
      e.rollouts[0].allocate(arrays_of(case, last_four(fsdp=2, tp=2), 1))
    )
    e.source.bind(source)
    e.source.stage()
    e.source.release()
    e.move()
    assert_arrived(source, e.rollouts[0].load())


def test_a_rollout_that_is_gone_fails_the_transfer_at_once():
  case = [((16, 64), "float32", P("fsdp"), P("tp"))]
  source = arrays_of(case, first_four(fsdp=4), 0)
  target = arrays_of(case, last_four(fsdp=2, tp=2), 1)
  with ends(rollouts=2) as e:
    e.sync(source, target, target)
    units = [e.source.work_unit(), *(r.work_unit() for r in e.rollouts)]
    e.rollouts[1].close()
    start = time.monotonic()
    with pytest.raises(base.TransportError, match=r"request-1 failed"):
      e.controller.transfer(
        units[0], units[1:], uuid=7, request="request-1", timeout_s=TIMEOUT_S
      )
    assert time.monotonic() - start < TIMEOUT_S / 2
    # The next one, without it, works.
    e.rollouts.pop()
    (arrived,) = e.sync(source, target)
    assert_arrived(source, arrived)


def test_an_unknown_rollout_is_refused():
  case = [((16, 64), "float32", P("fsdp"), P("tp"))]
  with ends() as e:
    e.source.bind(arrays_of(case, first_four(fsdp=4), 0))
    e.rollouts[0].bind(
      e.rollouts[0].allocate(arrays_of(case, last_four(fsdp=2, tp=2), 1))
    )
    e.controller.register(e.source.work_unit())
    with pytest.raises(base.TransportError, match="not registered"):
      e.controller.transfer(
        e.source.work_unit(),
        [e.rollouts[0].work_unit()],
        uuid=8,
        request="request-2",
        timeout_s=TIMEOUT_S,
      )


def test_nothing_bound():
  with ends() as e:
    with pytest.raises(base.TransportError, match="nothing is bound yet"):
      e.source.work_unit()
    with pytest.raises(base.TransportError, match=r"bind\(\) before d2h"):
      e.source.stage()
    e.source.release()
    e.source.close()
    e.source.close()
