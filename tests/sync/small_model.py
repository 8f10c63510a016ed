"""A model of three layers whose weights depend on its version."""

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from laneweave.tests.kernels import bits

LAYERS = 3
_SHAPES = {
  "layers.w.kernel": (16, LAYERS, 24),
  "layers.norm.scale": (16, LAYERS),
  "head.kernel": (8, 16),
}


def mesh(shape, names, first=0):
  """A mesh of consecutive devices."""
  count = int(np.prod(shape))
  devices = np.array(jax.devices()[first : first + count])
  return Mesh(devices.reshape(shape), names)


def params(version, seed=1):
  """A trainer's tree, mesh fsdp=4."""
  grid = mesh((4,), ("fsdp",))
  rng = np.random.default_rng(seed + version)
  return {
    name: jax.device_put(
      rng.standard_normal(dims, dtype=np.float32),
      NamedSharding(grid, P("fsdp")),
    )
    for name, dims in _SHAPES.items()
  }


def target(first=4):
  """The rollout's arrays, mesh fsdp=2, tp=2, on other devices."""
  grid = mesh((2, 2), ("fsdp", "tp"), first)

  def leaf(dims, spec):
    return jax.ShapeDtypeStruct(
      dims, jax.numpy.bfloat16, sharding=NamedSharding(grid, spec)
    )

  found = {"head.kernel": leaf((8, 16), P("tp", "fsdp"))}
  for i in range(LAYERS):
    found[f"layers_{i}.w.kernel"] = leaf((16, 24), P("fsdp", "tp"))
    found[f"layers_{i}.norm.scale"] = leaf((16,), P(("tp", "fsdp")))
  return found


def check_serves(rollout, version):
  """A rollout serves exactly a version."""
  served, arrays = rollout.snapshot()
  assert served == version
  source = params(version)
  assert len(arrays) == 1 + 2 * LAYERS
  for i in range(LAYERS):
    for leaf in ("w.kernel", "norm.scale"):
      want = np.asarray(source[f"layers.{leaf}"])[:, i].astype("bfloat16")
      bits.assert_bits_equal(arrays[f"layers_{i}.{leaf}"], want)
  want = np.asarray(source["head.kernel"]).astype("bfloat16")
  bits.assert_bits_equal(arrays["head.kernel"], want)
