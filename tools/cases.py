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

REAL = (
  _unscan("mlp 36 layers", (4096, 36, 3072)),
  _unscan("mlp 48 layers", (2048, 48, 3072)),
  _unscan("wi_0", (4, 48, 2048, 768)),
  _unscan("norm", (2048, 48)),
  _unscan("router gate", (2048, 48, 128)),
  _unscan("query", (2048, 48, 4, 128)),
  _unscan("embedding", (18992, 2048), scan=()),
  _fuse("1 shard", (4, 48, 2048, 768), 1, 768),
  _fuse("2 shards 384 to 512", (4, 48, 2048, 768), 2, 1024),
  _fuse("8 shards 96 to 128", (4, 48, 2048, 768), 8, 1024),
  _fuse("8 shards woven", (4, 48, 2048, 768), 8, 1024, lane=128),
  _fuse("local shard 96", (16, 48, 2048, 96), 1, 128),
  _pad("wo 8 shards", (4, 48, 768, 2048), 8, 1024),
  _repeat("key twice", (2048, 48, 4, 128), 2),
)

SETS = {"small": SMALL, "real": REAL}
