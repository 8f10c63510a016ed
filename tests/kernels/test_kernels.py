"""Every public kernel on every backend, bit for bit against NumPy."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from laneweave import kernels
from laneweave.kernels import digest, execute, mosaic, reference
from laneweave.kernels import layout as layout_lib
from laneweave.tests.kernels import bits

PAIRS = [
  ("float32", "bfloat16"),
  ("float32", "float32"),
  ("float32", "float16"),
  ("bfloat16", "bfloat16"),
  ("bfloat16", "float32"),
  ("bfloat16", "float16"),
]
BACKENDS = ["xla", "interpret"]


def check(name, *sources, **options):
  """Compares a kernel with the reference of the same name."""
  backend = options.pop("backend")
  got = getattr(kernels, name)(*sources, backend=backend, **options)
  want = getattr(reference, name)(*sources, **options)
  assert len(got) == len(want)
  for g, w in zip(got, want, strict=True):
    bits.assert_bits_equal(g, w)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_unscan_casts(backend, pair):
  x = bits.random((16, 8, 256), pair[0], seed=1)
  check("unscan", x, scan_axis=1, dtype=pair[1], backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["float32", "float16"])
def test_float16_vectors(backend, source):
  x = bits.random((130,), source, seed=11)
  check("unscan", x, scan_axis=None, dtype="float16", backend=backend)


# One shape for each physical case of the stacked axis, and off-by-one sizes.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
  ("shape", "axis"),
  [
    ((2, 3, 16, 128), 1),  # outside the two minor dimensions
    ((24, 8, 128), 1),  # second minor: 8 layers
    ((24, 5, 128), 1),  # made major by XLA: 5 layers do not fill a tile
    ((4, 10), 1),  # minor
    ((256, 6), 1),  # vectors
    ((6, 40), 0),  # a router's bias, stacked first
    ((8, 3, 2, 32), 1),  # per head
    ((9, 2, 3, 130), (1, 2)),  # two stacked axes
    ((1, 5, 5), (1, 2)),  # two equal stacked axes
    ((7, 2, 129), 1),
    ((1, 4, 1), 1),
    ((33, 200), None),
    ((129,), None),
  ],
)
def test_unscan_shapes(backend, shape, axis):
  x = bits.random(shape, "float32", seed=2)
  check("unscan", x, scan_axis=axis, dtype="bfloat16", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("width", "shards", "padded", "lane"),
  [(6, 1, 8, 0), (192, 2, 256, 0), (320, 2, 512, 128), (512, 1, 512, 128)],
)
def test_fuse_gate_up(backend, source, width, shards, padded, lane):
  gate = bits.random((2, 3, 16, width), source, seed=3)
  up = bits.random((2, 3, 16, width), source, seed=4)
  check(
    "fuse_gate_up",
    gate,
    up,
    shards=shards,
    padded_width=padded,
    lane_size=lane,
    dtype="bfloat16",
    backend=backend,
  )


@pytest.mark.parametrize("backend", BACKENDS)
def test_fuse_gate_up_with_the_stacked_axis_last(backend):
  gate = bits.random((2, 16, 96, 3), "float32", seed=12)
  up = bits.random((2, 16, 96, 3), "float32", seed=13)
  options = {"scan_axis": 3, "shards": 2, "padded_width": 256}
  check("fuse_gate_up", gate, up, backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("source", ["float32", "bfloat16"])
@pytest.mark.parametrize(
  ("width", "shards", "padded"), [(192, 2, 256), (6, 3, 24), (16, 1, 16)]
)
def test_pad_lanes(backend, source, width, shards, padded):
  x = bits.random((2, 3, width, 48), source, seed=5)
  check(
    "pad_lanes",
    x,
    axis=-2,
    shards=shards,
    padded_width=padded,
    dtype="bfloat16",
    backend=backend,
  )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
  ("shape", "axis"), [((16, 3, 2, 32), -2), ((2, 3, 32), 0)]
)
@pytest.mark.parametrize("repeats", [1, 4])
def test_repeat_heads(backend, shape, axis, repeats):
  x = bits.random(shape, "float32", seed=6)
  check(
    "repeat_heads",
    x,
    axis=axis,
    repeats=repeats,
    dtype="bfloat16",
    backend=backend,
  )


LAYOUTS = {
  "unscan": layout_lib.unscan_layout(
    (48, 3, 256), "float32", scan_axes=(1,), dtype="bfloat16"
  ),
  "fuse": layout_lib.fuse_layout(
    (2, 3, 16, 96),
    "float32",
    scan_axes=(1,),
    shards=2,
    padded_width=256,
    dtype="bfloat16",
  ),
  "pad": layout_lib.pad_layout(
    (2, 3, 24, 128),
    "float32",
    scan_axes=(1,),
    axis=-2,
    shards=3,
    padded_width=48,
    dtype="bfloat16",
  ),
}


@functools.cache
def poisoned(name, order):
  """A layout run by the TPU interpreter on memory full of NaN."""
  layout = LAYOUTS[name]
  params = pltpu.InterpretParams(
    uninitialized_memory="nan",
    detect_races=True,
    random_seed=7,
    dma_execution_mode=order,
  )
  sources = [
    bits.random(layout.shape, "float32", seed=8 + i)
    for i in range(layout.operands)
  ]
  return sources, mosaic.relayout(
    layout,
    *map(jnp.asarray, sources),
    bases=digest.salts(None, len(layout.out_shape)),
    interpret=params,
    # Small enough that the grid has many steps.
    budget=256 << 10,
  )


@pytest.mark.parametrize("order", ["eager", "on_wait"])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_padding_is_written_over_nan(name, order):
  layout = LAYOUTS[name]
  sources, (outputs, _) = poisoned(name, order)
  want, _ = execute.run(
    layout, *map(jnp.asarray, sources), backend="xla", bases=None
  )
  for g, w in zip(outputs, want, strict=True):
    bits.assert_bits_equal(g, w)


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_fingerprints_come_with_the_pass(name):
  _, (outputs, words) = poisoned(name, "eager")
  prints = digest.combine(np.concatenate([np.asarray(w) for w in words]))
  for got, x in zip(prints, outputs, strict=True):
    np.testing.assert_array_equal(got, reference.fingerprint(np.asarray(x)))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_row_major_orders_agree(name):
  """The physical order of operands and results changes no value."""
  layout = LAYOUTS[name]
  sources = [
    jnp.asarray(bits.random(layout.shape, "float32", seed=9 + i))
    for i in range(layout.operands)
  ]
  got, _ = mosaic.relayout(
    layout,
    *sources,
    source_order=tuple(range(len(layout.shape))),
    out_order=tuple(range(len(layout.out_shape))),
    interpret=True,
  )
  want, _ = execute.run(layout, *sources, backend="xla")
  for g, w in zip(got, want, strict=True):
    bits.assert_bits_equal(g, w)


def test_layers_that_do_not_fit_vmem_go_in_groups():
  layout = LAYOUTS["unscan"]
  x = jnp.asarray(bits.random(layout.shape, "float32", seed=10))
  geo = mosaic.geometry(layout)
  budget = 64 << 10
  assert mosaic.blocking(geo, budget).group < 3
  got, words = mosaic.relayout(
    layout,
    x,
    bases=digest.salts(None, 2),
    interpret=True,
    budget=budget,
  )
  assert len(words) > 1
  want, _ = execute.run(layout, x, backend="xla")
  for g, w in zip(got, want, strict=True):
    bits.assert_bits_equal(g, w)


def test_a_block_that_cannot_fit_is_refused_by_name():
  with pytest.raises(ValueError, match="axis 3 is rebuilt and must be whole"):
    mosaic.blocking(mosaic.geometry(LAYOUTS["fuse"]), 1 << 10)


def test_gradients_are_not_defined():
  x = jnp.ones((8, 2, 128))
  with pytest.raises(Exception, match=r"[Dd]ifferentiat|not implemented|JVP"):
    jax.grad(lambda x: kernels.unscan(x, backend="interpret")[0].sum())(x)


def test_lowering_is_deterministic():
  """Two lowerings of the same layout are the same: the compile cache holds."""
  layout = LAYOUTS["fuse"]
  x = jax.ShapeDtypeStruct(layout.shape, layout.source_dtype)

  def text():
    run = jax.jit(lambda a, b: mosaic.relayout(layout, a, b, interpret=True))
    return run.lower(x, x).as_text()

  assert text() == text()


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsupported_casts_are_refused(backend):
  with pytest.raises(TypeError, match="cannot be cast from int32"):
    kernels.unscan(
      np.zeros((4, 2, 8), np.int32), dtype="bfloat16", backend=backend
    )


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (lambda x: kernels.unscan(x, scan_axis=3), "`scan_axis` 3"),
    (lambda x: kernels.unscan(x, scan_axis=(0, 1, 2)), "leave a block"),
    (lambda x: kernels.fuse_gate_up(x, x[:2]), "same shape and dtype"),
    (lambda x: kernels.fuse_gate_up(x, x, shards=3), "`moe_mlp_tp_size`"),
    (
      lambda x: kernels.fuse_gate_up(x, x, lane_size=128),
      "`moe_lane_size` 128 does not divide",
    ),
    (
      lambda x: kernels.pad_lanes(x, axis=-1, padded_width=8),
      "cannot shrink",
    ),
    (lambda x: kernels.repeat_heads(x, repeats=0), "`repeats` 0"),
    (lambda x: kernels.unscan(x, backend="cuda"), "`kernel_backend` 'cuda'"),
    (lambda x: kernels.fingerprint(np.float32(1)), "rank 0"),
  ],
)
def test_bad_arguments(call, message):
  with pytest.raises(ValueError, match=message):
    call(np.zeros((4, 2, 16), np.float32))
