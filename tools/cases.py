"""Layouts that kernels are compiled and measured with.

`SMALL` has every operation, physical case and dtype pair at sizes that compile
in a second; `REAL` has the shapes of published models: Qwen3-30B-A3B (48
layers, 128 experts), a 36-layer dense model, DeepSeek 3 and GPT-OSS.
"""

import dataclasses

from laneweave.kernels import layout as layout_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """One layout to compile or run.

  Attributes:
    op: Name of the public kernel.
    name: What is special about it.
    layout: The layout.
  """

  op: str
  name: str
  layout: layout_lib.Layout


def _unscan(name, shape, source="float32", dtype="bfloat16", scan=(1,)):
  return Case(
    op="unscan",
    name=name,
    layout=layout_lib.unscan_layout(shape, source, scan_axes=scan, dtype=dtype),
  )


def _fuse(name, shape, shards, padded, lane=0, source="float32"):
  return Case(
    op="fuse_gate_up",
    name=name,
    layout=layout_lib.fuse_layout(
      shape,
      source,
      scan_axes=(1,),
      shards=shards,
      padded_width=padded,
      lane_size=lane,
      dtype="bfloat16",
    ),
  )


def _pad(name, shape, shards, padded, axis=-2, source="float32"):
  return Case(
    op="pad_lanes",
    name=name,
    layout=layout_lib.pad_layout(
      shape,
      source,
      scan_axes=(1,),
      axis=axis,
      shards=shards,
      padded_width=padded,
      dtype="bfloat16",
    ),
  )


def _repeat(name, shape, repeats, axis=-2, source="float32"):
  return Case(
    op="repeat_heads",
    name=name,
    layout=layout_lib.repeat_layout(
      shape,
      source,
      scan_axes=(1,),
      axis=axis,
      repeats=repeats,
      dtype="bfloat16",
    ),
  )


SMALL = (
  _unscan("layer axis major", (256, 6, 384)),
  _unscan("layer axis second minor", (128, 8, 256)),
  _unscan("layer axis minor", (4, 10)),
  _unscan("outside the tile", (2, 4, 64, 256)),
  _unscan("vectors", (256, 6)),
  _unscan("per head", (128, 8, 2, 128)),
  _unscan("two stacked axes", (64, 2, 3, 256), scan=(1, 2)),
  _unscan("not stacked", (384, 256), scan=()),
  _unscan("odd sizes", (7, 2, 129)),
  _unscan("bf16 to bf16", (128, 8, 256), "bfloat16", "bfloat16"),
  _unscan("f32 to f32", (128, 8, 256), "float32", "float32"),
  _unscan("f32 to f16", (128, 8, 256), "float32", "float16"),
  _unscan("bf16 to f32", (128, 8, 256), "bfloat16", "float32"),
  _unscan("bf16 to f16", (128, 8, 256), "bfloat16", "float16"),
  _fuse("concatenated", (2, 4, 32, 256), 1, 256),
  _fuse("2 shards padded", (2, 4, 32, 384), 2, 512),
  _fuse("woven", (2, 4, 32, 320), 2, 512, lane=128),
  _fuse("narrow shard", (2, 4, 128, 96), 1, 128),
  _fuse("from bf16", (2, 4, 32, 384), 2, 512, source="bfloat16"),
  _pad("wo", (2, 4, 192, 256), 2, 256),
  _pad("wo from bf16", (2, 4, 192, 256), 2, 256, source="bfloat16"),
  _repeat("kv kernel", (64, 4, 2, 128), 4),
  _repeat("kv bias", (2, 4, 128), 2),
)


def _both(make, name, *args, **kwargs):
  """The same from float32 and from bfloat16."""
  return (
    make(name, *args, **kwargs),
    make(f"{name}, bf16", *args, source="bfloat16", **kwargs),
  )


_EXPERTS = (4, 48, 2048, 768)

REAL = (
  # What every layer has. Whether the layer axis is inside a tile in HBM goes by
  # whether it is a multiple of 8.
  *_both(_unscan, "mlp 36 layers", (4096, 36, 3072)),
  *_both(_unscan, "mlp 48 layers", (2048, 48, 3072)),
  *_both(_unscan, "wi_0", _EXPERTS),
  *_both(_unscan, "wo", (4, 48, 768, 2048)),
  *_both(_unscan, "out", (4, 48, 128, 2048)),
  *_both(_unscan, "query", (2048, 48, 4, 128)),
  *_both(_unscan, "router gate", (2048, 48, 128)),
  *_both(_unscan, "norm", (2048, 48)),
  *_both(_unscan, "embedding", (18992, 2048), scan=()),
  # Numbers of layers.
  _unscan("1 layer", (2048, 1, 3072)),
  _unscan("2 layers", (2048, 2, 3072)),
  _unscan("12 layers", (2048, 12, 3072)),
  _unscan("61 layers", (2048, 61, 3072)),
  _unscan("64 layers", (2048, 64, 3072)),
  _unscan("94 layers", (2048, 94, 3072)),
  _unscan("94 layers, bf16", (2048, 94, 3072), "bfloat16"),
  # Vectors, several stacked axes, convolutions.
  _unscan("bias of experts", (128, 18, 2880)),
  _unscan("two stacked axes", (2048, 12, 3, 12288), scan=(1, 2)),
  _unscan("convolution", (4, 10, 1, 8192)),
  # Widths of the last axis.
  _unscan("1 wide", (2048, 10, 1)),
  _unscan("64 wide", (2048, 48, 64)),
  _unscan("96 wide", (16, 48, 2048, 96)),
  _unscan("192 wide", (1536, 61, 16, 192)),
  _unscan("576 wide", (7168, 58, 576)),
  _unscan("704 wide", (16, 5, 2816, 704)),
  _unscan("2880 wide", (8, 18, 2880, 2880)),
  # Gate and up: joined per shard, padded, woven.
  *_both(_fuse, "1 shard", _EXPERTS, 1, 768),
  *_both(_fuse, "1 shard woven", _EXPERTS, 1, 768, lane=128),
  *_both(_fuse, "2 shards of 384", _EXPERTS, 2, 768),
  *_both(_fuse, "2 shards 384 to 512", _EXPERTS, 2, 1024),
  _fuse("4 shards 192 to 256", _EXPERTS, 4, 1024),
  *_both(_fuse, "8 shards 96 to 128", _EXPERTS, 8, 1024),
  *_both(_fuse, "8 shards woven", _EXPERTS, 8, 1024, lane=128),
  _fuse("8 shards 96 to 256", _EXPERTS, 8, 2048),
  _fuse("16 shards 48 to 128", _EXPERTS, 16, 2048),
  *_both(_fuse, "local shard 96", (16, 48, 2048, 96), 1, 128),
  # The other matrix of the experts.
  *_both(_pad, "wo 8 shards", (4, 48, 768, 2048), 8, 1024),
  *_both(_pad, "wo local shard 96", (16, 48, 96, 2048), 1, 128),
  # Heads of keys and values.
  *_both(_repeat, "key twice", (2048, 48, 4, 128), 2),
  _repeat("key 4 times", (2048, 48, 2, 128), 4),
  _repeat("key 8 times", (2048, 48, 1, 128), 8),
  # More than XLA's all-layer form fits into the smallest HBM.
  _fuse("16 experts, 8 shards", (16, 48, 2048, 768), 8, 1024),
)

SETS = {"small": SMALL, "real": REAL}
