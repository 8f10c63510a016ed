"""Both ends of a transport and a controller, over sockets on loopback."""

import contextlib
import secrets

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from laneweave.sync.transport import create, preflight, raiden_native
from laneweave.tests.kernels import bits

TIMEOUT_S = 20


def mesh(devices, **axes):
  return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def first_four(**axes):
  return mesh(jax.devices()[:4], **axes)


def last_four(**axes):
  return mesh(jax.devices()[4:8], **axes)


def arrays_of(cases, grid, side):
  """Random arrays for the trainer, shapes for a rollout."""
  made = {}
  for i, (dims, dtype, *specs) in enumerate(cases):
    sharding = NamedSharding(grid, specs[side])
    if side == 0:
      value = bits.random(dims, dtype, seed=i)
      made[f"v{i:02d}"] = jax.device_put(value, sharding)
    else:
      made[f"v{i:02d}"] = jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
  return made


class Ends:
  """A trainer's end, rollouts' ends and the controller."""

  def __init__(self, rollouts=1, source="raiden", target="raiden", **options):
    options = {"parallelism": 2, "bind_ip": "127.0.0.1", **options}
    self.source = create.endpoint(source, job="trainer", replica="0", **options)
    self.rollouts = [
      create.endpoint(target, job="rollout", replica=str(i), **options)
      for i in range(rollouts)
    ]
    self.controller = raiden_native.NativeController(parallelism=2)

  def move(self, timeout_s=TIMEOUT_S):
    units = [self.source.work_unit(), *(r.work_unit() for r in self.rollouts)]
    for unit in units:
      self.controller.register(unit)
      assert preflight.preflight(units[0], unit) == []
    self.controller.transfer(
      units[0],
      units[1:],
      uuid=secrets.randbits(62) + 1,
      request=secrets.token_hex(8),
      timeout_s=timeout_s,
    )

  def sync(self, source, *targets):
    """One whole transfer; gives what arrived on each rollout."""
    self.source.bind(source)
    for rollout, target in zip(self.rollouts, targets, strict=True):
      rollout.bind(rollout.allocate(target))
    self.source.stage()
    self.move()
    return [rollout.load() for rollout in self.rollouts]

  def close(self):
    for end in (self.source, *self.rollouts, self.controller):
      end.close()


@contextlib.contextmanager
def ends(rollouts=1, source="raiden", target="raiden", **options):
  made = Ends(rollouts, source, target, **options)
  try:
    yield made
  finally:
    made.close()


def assert_arrived(source, arrived):
  """Every shard of every array holds the bits of its slice."""
  assert arrived.keys() == source.keys()
  for name, x in source.items():
    whole = np.asarray(x)
    for shard in arrived[name].addressable_shards:
      bits.assert_bits_equal(np.asarray(shard.data), whole[shard.index])


# Shape, dtype, spec on the trainer (fsdp=4), spec on the rollout
# (fsdp=2, tp=2).
CASES = [
  ((8,), "float32", P("fsdp"), P()),  # replicated four times
  ((8,), "bfloat16", P(), P("tp")),
  ((12,), "float16", P("fsdp"), P(("tp", "fsdp"))),  # F43 with 4 and 4
  ((8, 8), "float32", P("fsdp"), P("tp", "fsdp")),  # F40
  ((8, 8), "float16", P("fsdp"), P("fsdp")),  # F41
  ((16, 4), "bfloat16", P("fsdp"), P(("fsdp", "tp"))),  # F42
  ((16, 4), "float32", P(None, "fsdp"), P(("tp", "fsdp"))),  # F42
  ((8, 128), "float32", P("fsdp"), P(None, "tp")),  # F44 and below
  ((16, 128), "float32", P("fsdp"), P("tp", "fsdp")),
  ((8, 256), "bfloat16", P("fsdp"), P("tp", "fsdp")),
  ((4,), "float32", P("fsdp"), P("tp")),
  # Whole (8, 128) tiles on both sides: what `skip_tiling` would permute.
  ((64, 512), "float32", P("fsdp"), P("tp", "fsdp")),
  ((64, 512), "bfloat16", P("fsdp"), P("tp", "fsdp")),
  ((8, 16), "float8_e4m3fn", P("fsdp"), P(None, "tp")),
  ((4, 8, 6), "bfloat16", P("fsdp"), P(None, "fsdp", "tp")),
  ((4, 6, 8, 10), "float32", P(None, None, "fsdp"), P("tp", None, "fsdp")),
  ((12, 5), "float32", P("fsdp"), P("fsdp")),
]
