"""What the report says a kernel moves is what it fetches and writes.

The TPU interpreter copies each block between HBM and VMEM by itself; its copies
are recorded here and counted anew, in tiles, apart from the report's own
arithmetic.
"""

import collections
import math

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp
import numpy as np
import pytest

from laneweave.kernels import layout as layout_lib
from laneweave.kernels import mosaic
from laneweave.tools import blocks

_LAYOUTS = {
  "layer axis major": layout_lib.unscan_layout(
    (256, 6, 384), "float32", scan_axes=(1,), dtype="bfloat16"
  ),
  "layer axis second minor": layout_lib.unscan_layout(
    (128, 8, 256), "float32", scan_axes=(1,), dtype="bfloat16"
  ),
  "layers in groups": layout_lib.unscan_layout(
    (64, 32, 256), "bfloat16", scan_axes=(1,)
  ),
  "an overhang": layout_lib.unscan_layout(
    (2, 3, 136, 384), "float32", scan_axes=(1,), dtype="bfloat16"
  ),
  "vectors": layout_lib.unscan_layout(
    (2048, 6), "float32", scan_axes=(1,), dtype="bfloat16"
  ),
  "two stacked axes": layout_lib.unscan_layout(
    (64, 2, 3, 256), "float32", scan_axes=(1, 2), dtype="bfloat16"
  ),
  "gate and up": layout_lib.fuse_layout(
    (2, 4, 64, 320),
    "float32",
    scan_axes=(1,),
    shards=2,
    padded_width=512,
    dtype="bfloat16",
  ),
  "wo": layout_lib.pad_layout(
    (2, 4, 192, 256),
    "bfloat16",
    scan_axes=(1,),
    axis=-2,
    shards=2,
    padded_width=256,
  ),
  "heads": layout_lib.repeat_layout(
    (64, 4, 2, 128),
    "float32",
    scan_axes=(1,),
    axis=-2,
    repeats=4,
    dtype="bfloat16",
  ),
}


def _rows_of_a_tile(shape, itemsize):
  """XLA's tile: 8 sublanes of 32 bits, fewer where the array has fewer."""
  least = 4 // itemsize
  return max(least, min(8, 2 ** math.ceil(math.log2(max(1, shape[-2])))))


def _tile(shape, itemsize):
  if len(shape) == 1:
    lanes = 128 * 4 // itemsize
    return [min(1024, max(lanes, 2 ** math.ceil(math.log2(shape[0]))))]
  rows = _rows_of_a_tile(shape, itemsize)
  return [1] * (len(shape) - 2) + [rows, 128]


class Recorder:
  """Stands between the interpreter and its HBM."""

  def __init__(self, monkeypatch, shapes):
    # The interpreter pads arrays to whole blocks; the chip's are not.
    self._shapes = shapes
    self.transfers = collections.Counter()
    self.bytes = collections.Counter()
    for name in ("get", "store"):
      original = getattr(interpret_pallas_call, name)
      monkeypatch.setattr(interpret_pallas_call, name, self._wrap(original))

  def _wrap(self, original):
    def recorded(*args, **kwargs):
      name = kwargs.get("input_name") or kwargs.get("output_name")
      if name is not None:
        result = original(*args, **kwargs)
        value = args[6] if "output_name" in kwargs else result[1]
        self._note(name, args[5][0], np.asarray(value).dtype.itemsize)
        return result
      return original(*args, **kwargs)

    return recorded

  def _note(self, name, indexer, itemsize):
    shape = self._shapes[name]
    size = itemsize
    tile = _tile(shape, itemsize)
    for index, extent, t in zip(indexer.indices, shape, tile, strict=True):
      start = int(getattr(index, "start", index))
      stop = min(start + int(getattr(index, "size", 1)), extent)
      size *= len({i // t for i in range(start, stop)}) * t
    self.transfers[name] += 1
    self.bytes[name] += size


@pytest.mark.parametrize(
  ("name", "printing"),
  [(name, False) for name in _LAYOUTS]
  + [("layers in groups", True), ("gate and up", True)],
)
def test_counted_blocks_are_those_that_move(name, printing, monkeypatch):
  layout = _LAYOUTS[name]
  bases = jnp.arange(2 * len(layout.out_shape), dtype=jnp.uint32)

  def run(*sources):
    return mosaic.relayout(
      layout,
      *sources,
      bases=bases if printing else None,
      interpret=pltpu.InterpretParams(),
      # Small, so that there are steps to count.
      budget=1 << 18,
    )

  sources = [jnp.ones(layout.shape, layout.source_dtype)] * layout.operands
  counted = blocks.calls(jax.jit(run).trace(*sources).jaxpr)
  shapes = {
    f"refs[{i + printing}]": x.shape
    for call in counted
    for i, x in enumerate(call.operands)
  }
  recorder = Recorder(monkeypatch, shapes)
  jax.block_until_ready(run(*sources))
  assert sum(recorder.transfers.values()) > 0
  operands = [x for call in counted for x in call.operands]
  assert sum(x.transfers for x in operands) == sum(recorder.transfers.values())
  assert sum(x.moved_bytes for x in operands) == sum(recorder.bytes.values())


def test_a_block_fetched_again_is_counted_again():
  from jax.experimental import pallas as pl

  def kernel(x, o):
    o[...] = x[...]

  def run(x):
    return pl.pallas_call(
      kernel,
      grid=(2, 3),
      in_specs=[pl.BlockSpec((8, 128), lambda i, j: (j, 0))],
      out_specs=pl.BlockSpec((8, 128), lambda i, j: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
    )(x)

  x = jax.ShapeDtypeStruct((24, 128), jnp.float32)
  (call,) = blocks.calls(jax.jit(run).trace(x).jaxpr)
  read, written = call.operands
  assert read.transfers == 6  # three blocks, twice
  assert written.transfers == 2  # each held while j goes by
  assert call.moved_bytes == (6 + 2) * 8 * 128 * 4


def test_a_prefetched_index_selects_a_block():
  from jax.experimental import pallas as pl

  def kernel(index, x, o):
    del index
    o[...] = x[0]

  def run(index, x):
    return pl.pallas_call(
      kernel,
      grid_spec=pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(2,),
        in_specs=[pl.BlockSpec((1, 8, 128), lambda i, n: (n[0], i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i, n: (i, 0)),
      ),
      out_shape=jax.ShapeDtypeStruct((16, 128), jnp.float32),
    )(index, x)

  index = jax.ShapeDtypeStruct((1,), jnp.int32)
  x = jax.ShapeDtypeStruct((5, 16, 128), jnp.float32)
  (call,) = blocks.calls(jax.jit(run).trace(index, x).jaxpr)
  # One of the five layers, and its copy.
  assert call.moved_bytes == 2 * 16 * 128 * 4
