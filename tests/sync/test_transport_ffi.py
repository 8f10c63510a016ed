"""Raiden's FFI on CPU devices: custom calls, staging and sockets are real."""

import jax
import pytest

from laneweave.tests.sync.ends import (
  CASES,
  arrays_of,
  assert_arrived,
  ends,
  mesh,
)

PAIRS = [
  ("raiden_ffi", "raiden_ffi"),
  ("raiden_ffi", "raiden"),
  ("raiden", "raiden_ffi"),
]


@pytest.mark.parametrize(("source_end", "target_end"), PAIRS)
@pytest.mark.parametrize(
  "order", [[0, 1, 2, 3], [3, 1, 2, 0]], ids=["ids in order", "reordered"]
)
def test_all_kinds_of_arrays_between_all_ends(source_end, target_end, order):
  rollout_mesh = mesh([jax.devices()[4 + i] for i in order], fsdp=2, tp=2)
  trainer_mesh = mesh([jax.devices()[i] for i in order], fsdp=4)
  source = arrays_of(CASES, trainer_mesh, 0)
  with ends(source=source_end, target=target_end) as e:
    for _ in range(2):
      (arrived,) = e.sync(source, arrays_of(CASES, rollout_mesh, 1))
      assert_arrived(source, arrived)
