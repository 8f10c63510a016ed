"""Kernels against NumPy over random shapes, axes, shards, lanes and dtypes."""

import hypothesis
from hypothesis import strategies as st

from laneweave import kernels
from laneweave.kernels import reference
from laneweave.tests.kernels import bits

SOURCES = st.sampled_from(["float32", "bfloat16"])
TARGETS = st.sampled_from(["bfloat16", "float32", "float16"])
SEEDS = st.integers(0, 2**31 - 1)
# Interpreted kernels compile for about a second each, so XLA gets the larger
# share of the examples.
LAST = st.integers(1, 140)
BACKENDS = st.sampled_from([*["xla"] * 5, "interpret"])


@st.composite
def shapes(draw, last=LAST):
  """A block shape and a source shape with one or two stacked axes in it."""
  block = draw(st.lists(st.integers(1, 9), min_size=0, max_size=2))
  block = [*block, draw(last)]
  stacked = draw(st.lists(st.integers(1, 4), min_size=0, max_size=2))
  at = draw(st.integers(0, len(block) - (len(stacked) > 0)))
  shape = [*block[:at], *stacked, *block[at:]]
  axes = (None, at, (at, at + 1))[len(stacked)]
  return tuple(block), tuple(shape), axes


def resized(shape, axes, axis, size):
  """A source shape with another size of one axis of its block."""
  stacked = axes if isinstance(axes, tuple) else (axes,)
  kept = [a for a in range(len(shape)) if a not in stacked]
  shape = list(shape)
  shape[kept[axis]] = size
  return tuple(shape)


def compare(got, want):
  assert len(got) == len(want)
  for g, w in zip(got, want, strict=True):
    bits.assert_bits_equal(g, w)


@hypothesis.given(shapes(), SOURCES, TARGETS, SEEDS, BACKENDS)
def test_unscan(case, source, dtype, seed, backend):
  _, shape, axes = case
  x = bits.random(shape, source, seed)
  compare(
    kernels.unscan(x, scan_axis=axes, dtype=dtype, backend=backend),
    reference.unscan(x, scan_axis=axes, dtype=dtype),
  )


@hypothesis.given(
  shapes(last=st.just(1)),
  st.integers(1, 4),
  st.integers(1, 70),
  st.integers(0, 70),
  st.sampled_from([0, 0, 8, 128]),
  SOURCES,
  TARGETS,
  SEEDS,
  BACKENDS,
)
def test_fuse_gate_up(
  case, shards, width, extra, lane, source, dtype, seed, backend
):
  _, shape, axes = case
  padded = width + extra
  if lane:
    padded = -(-padded // lane) * lane
  shape = (*shape[:-1], shards * width)
  gate = bits.random(shape, source, seed)
  up = bits.random(shape, source, seed + 1)
  options = {
    "scan_axis": axes,
    "shards": shards,
    "padded_width": shards * padded,
    "lane_size": lane,
    "dtype": dtype,
  }
  compare(
    kernels.fuse_gate_up(gate, up, backend=backend, **options),
    reference.fuse_gate_up(gate, up, **options),
  )


@hypothesis.given(
  shapes(),
  st.data(),
  st.integers(1, 4),
  st.integers(1, 20),
  st.integers(0, 20),
  SOURCES,
  TARGETS,
  SEEDS,
  BACKENDS,
)
def test_pad_lanes(
  case, data, shards, width, extra, source, dtype, seed, backend
):
  block, shape, axes = case
  axis = data.draw(st.integers(0, len(block) - 1))
  shape = resized(shape, axes, axis, shards * width)
  x = bits.random(shape, source, seed)
  options = {
    "scan_axis": axes,
    "axis": axis,
    "shards": shards,
    "padded_width": shards * (width + extra),
    "dtype": dtype,
  }
  compare(
    kernels.pad_lanes(x, backend=backend, **options),
    reference.pad_lanes(x, **options),
  )


@hypothesis.given(
  shapes(),
  st.data(),
  st.integers(1, 4),
  SOURCES,
  TARGETS,
  SEEDS,
  BACKENDS,
)
def test_repeat_heads(case, data, repeats, source, dtype, seed, backend):
  block, shape, axes = case
  axis = data.draw(st.integers(0, len(block) - 1))
  # As many heads as models have: each is a piece of its own in the program.
  x = bits.random(
    resized(shape, axes, axis, data.draw(st.integers(1, 6))), source, seed
  )
  options = {
    "scan_axis": axes,
    "axis": axis,
    "repeats": repeats,
    "dtype": dtype,
  }
  compare(
    kernels.repeat_heads(x, backend=backend, **options),
    reference.repeat_heads(x, **options),
  )


@hypothesis.given(shapes(), SOURCES, SEEDS, BACKENDS)
def test_fingerprint(case, source, seed, backend):
  x = bits.random(case[1], source, seed)
  got = kernels.fingerprint(x, seed=(seed, 1), backend=backend)
  assert (got == reference.fingerprint(x, seed=(seed, 1))).all()
