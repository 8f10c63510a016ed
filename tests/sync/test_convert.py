"""Whole models, bit for bit against the NumPy reference."""

import gc
import weakref

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync import convert as convert_lib
from laneweave.sync import fingerprints
from laneweave.sync import plan as plan_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.reference import convert_reference
from laneweave.tests.kernels import bits
from laneweave.tests.sync import fixtures


def check(params, cfg, target=None, source=None):
  """Compares with the reference; `source` where params are placed arrays."""
  got = convert_lib.convert(params, cfg, target)
  want = convert_reference(source or params, cfg, target)
  assert got.keys() == want.keys()
  for name, x in want.items():
    bits.assert_bits_equal(got[name], x)
  return got


def place(weights, mesh, pick):
  """Weights on a mesh; `pick` gives a spec for a name and shape."""
  return {
    name: jax.device_put(x, NamedSharding(mesh, pick(name, x.shape)))
    for name, x in weights.items()
  }


def mesh(**axes):
  devices = np.array(jax.devices()[: int(np.prod(list(axes.values())))])
  return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


@pytest.mark.parametrize("lane", [0, 128])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", fixtures.NAMES)
def test_fixtures(name, tp, lane):
  target = fixtures.rollout(name, tp)
  if target is None:
    target = fixtures.rollout(name, 1)
    tp = 1
  if name == "gpt-oss-tiny" and lane:
    lane = 0  # 96 wide and never padded: there is no chunk of 128 lanes
  cfg = fixtures.config(name, tp, moe_lane_size=lane)
  free = check(fixtures.weights(name), cfg)
  leaves = {
    leaf["path"]: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"])
    for leaf in target["leaves"]
  }
  aimed = convert_lib.convert(fixtures.weights(name), cfg, leaves)
  assert free.keys() == aimed.keys() == leaves.keys()
  for path, x in aimed.items():
    bits.assert_bits_equal(x, free[path])


@pytest.mark.parametrize(
  "name", ["qwen3-dense-tiny", "qwen3-moe-tiny", "qwen3.5-hybrid-tiny"]
)
def test_fixtures_through_the_kernels(name):
  check(
    fixtures.weights(name),
    fixtures.config(name, 1, kernel_backend="interpret"),
  )


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_weight_dtypes(dtype):
  name = "qwen3-moe-tiny"
  check(fixtures.weights(name), fixtures.config(name, 2, weight_dtype=dtype))


@pytest.mark.parametrize("kv", [2, 4, 8])
def test_kv_heads_repeat(kv):
  name = "qwen3-dense-tiny"
  cfg = fixtures.config(name, kv_tp_size=kv)
  got = check(fixtures.weights(name), cfg)
  key = got["decoder.layers_0.self_attention.key.kernel"]
  assert key.shape[1] == max(kv, 2)


def first_axis(name, shape):
  del name
  return P("fsdp") if shape[0] % 4 == 0 else P()


def mlp_axis(name, shape):
  """The trainer splits the experts' mlp axis, and the others by embed."""
  if name.endswith((".wi_0", ".wi_1")):
    return P(None, None, None, "fsdp")
  if name.endswith(".moe_block.wo"):
    return P(None, None, "fsdp")
  return first_axis(name, shape)


def stacked_axis(name, shape):
  """The trainer splits layers over devices."""
  if ".layers." in name and shape[1] % 4 == 0:
    return P(None, "fsdp")
  return P()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("pick", [first_axis, mlp_axis, stacked_axis])
@pytest.mark.parametrize("tp", [1, 2])
def test_sharded_trainers(pick, tp, backend):
  """More and fewer trainer shards than the rollout's, uneven to the lanes."""
  name = "qwen3-moe-tiny"
  weights = fixtures.weights(name)
  cfg = fixtures.config(name, tp, kernel_backend=backend)
  params = place(weights, mesh(fsdp=4), pick)
  check(params, cfg, source=weights)


def test_two_axes_of_a_mesh_on_one_array_axis():
  name = "qwen3-moe-tiny"
  weights = fixtures.weights(name)

  def pick(path, shape):
    if path.endswith((".wi_0", ".wi_1")):
      return P(None, None, None, ("a", "b"))
    return P(("b", "a")) if shape[0] % 4 == 0 else P()

  params = place(weights, mesh(a=2, b=2), pick)
  check(params, fixtures.config(name, 2), source=weights)


def test_fingerprints_are_of_what_was_written():
  name = "qwen3-moe-tiny"
  cfg = fixtures.config(name, 2)
  for pick in (first_axis, mlp_axis):
    params = place(fixtures.weights(name), mesh(fsdp=4), pick)
    converter = convert_lib.Converter(plan_lib.make_plan(params, cfg), cfg)
    outputs, prints = converter.run(dict(params), seed=(3, 4))
    assert outputs.keys() == prints.keys()
    want = fingerprints.fingerprint_many(list(outputs.values()), seed=(3, 4))
    np.testing.assert_array_equal(list(prints.values()), want)


def test_F63_streaming_lets_go_of_sources():
  """At most the tree and one piece: sources are gone once they are used."""
  name = "qwen3-dense-tiny"
  cfg = fixtures.config(name)
  alive = []

  def load():
    params = {n: jax.numpy.array(x) for n, x in fixtures.weights(name).items()}
    alive.extend(weakref.ref(x) for x in params.values())
    return params

  pieces = convert_lib.convert_streaming(load(), cfg)
  left = len(alive)
  for _ in pieces:
    gc.collect()
    now = sum(ref() is not None for ref in alive)
    assert now < left or now == 0
    left = now
  assert left == 0


def test_the_source_is_not_changed_or_shared():
  """An output may be written to or donated: it is never the source itself."""
  cfg = SyncConfig(num_decoder_layers=1, weight_dtype="float32")
  x = jax.numpy.arange(8.0)
  params = {"decoder.decoder_norm.scale": x}
  (y,) = convert_lib.convert(params, cfg).values()
  assert y is not x
  assert y.unsafe_buffer_pointer() != x.unsafe_buffer_pointer()
  assert params == {"decoder.decoder_norm.scale": x}


def test_F28_converting_twice_gives_the_same_bytes():
  name = "qwen3-moe-tiny"
  cfg = fixtures.config(name, 2)
  first = convert_lib.convert(fixtures.weights(name), cfg)
  again = convert_lib.convert(fixtures.weights(name), cfg)
  for key, x in first.items():
    bits.assert_bits_equal(x, again[key])


def test_the_debug_barrier_names_the_parameter_that_failed(monkeypatch):
  name = "qwen3-dense-tiny"
  cfg = fixtures.config(name, weight_sync_debug=True)
  convert_lib.convert(fixtures.weights(name), cfg)

  # A device failure cannot be made here; the launch is made to fail instead.
  def fail(self, entry, *args):
    raise RuntimeError("device halted")

  monkeypatch.setattr(convert_lib.Converter, "_launch", fail)
  with pytest.raises(RuntimeError) as caught:
    convert_lib.convert(fixtures.weights(name), cfg)
  first = next(iter(fixtures.weights(name)))
  assert any(f"`{first}` failed" in note for note in caught.value.__notes__)


def test_sum_over_shards_of_experts_is_the_unsharded_expert():
  """The property that gate, up and `wo` are padded and split alike for."""
  name = "qwen3-moe-tiny"
  weights = fixtures.weights(name)
  got = convert_lib.convert(
    weights, fixtures.config(name, 2, weight_dtype="float32")
  )
  prefix = "decoder.layers_1.moe_block."
  wi = np.asarray(got[prefix + "wi"], np.float64)
  wo = np.asarray(got[prefix + "wo"], np.float64)
  source = {
    part: weights["decoder.layers.moe_block." + part][:, 1].astype(np.float64)
    for part in ("wi_0", "wi_1", "wo")
  }
  x = np.random.default_rng(1).standard_normal((3, wi.shape[1]))

  def act(h):
    return h / (1 + np.exp(-h))

  for expert in range(wi.shape[0]):
    total = 0
    for gate_up, down in zip(
      np.split(wi[expert], 2, axis=1),
      np.split(wo[expert], 2, axis=0),
      strict=True,
    ):
      gate, up = np.split(gate_up, 2, axis=1)
      total = total + (act(x @ gate) * (x @ up)) @ down
    whole = (
      act(x @ source["wi_0"][expert]) * (x @ source["wi_1"][expert])
    ) @ source["wo"][expert]
    np.testing.assert_allclose(total, whole, rtol=1e-12, atol=1e-12)
