"""Layouts: hand-computed segments and refusals."""

import numpy as np
import pytest

from laneweave.kernels import layout as layout_lib

Z = layout_lib.ZERO


def runs(layout):
  """Segments as (source, start, length)."""
  return [(s.source, s.start, s.length) for s in layout.segments]


def test_F26_gate_then_up_per_shard():
  layout = layout_lib.fuse_layout((4,), np.float32, scan_axes=(), shards=2)
  assert runs(layout) == [(0, 0, 2), (1, 0, 2), (0, 2, 2), (1, 2, 2)]


def test_F29_lane_chunks_padded_in_the_last_one():
  layout = layout_lib.fuse_layout(
    (320,),
    np.float32,
    scan_axes=(),
    shards=2,
    padded_width=512,
    lane_size=128,
  )
  assert runs(layout)[:6] == [
    (0, 0, 128),
    (1, 0, 128),
    (0, 128, 32),
    (Z, 0, 96),
    (1, 128, 32),
    (Z, 0, 96),
  ]


def test_F30_heads_repeat_in_place():
  layout = layout_lib.repeat_layout(
    (16, 2, 4), np.float32, scan_axes=(), axis=1, repeats=4
  )
  heads = [h for _, start, n in runs(layout) for h in range(start, start + n)]
  assert heads == [0, 0, 0, 0, 1, 1, 1, 1]


def test_F31_flattened_bias_repeats_whole_heads():
  layout = layout_lib.repeat_layout(
    (8,), np.float32, scan_axes=(), axis=0, repeats=4, group=4
  )
  order = [i for _, start, n in runs(layout) for i in range(start, start + n)]
  assert order == [0, 1, 2, 3] * 4 + [4, 5, 6, 7] * 4


def test_sizes_are_exact_integers():
  layout = layout_lib.unscan_layout(
    (384, 61, 7168, 2048), "float32", scan_axes=(1,), dtype="bfloat16"
  )
  assert layout.source_bytes == 384 * 61 * 7168 * 2048 * 4
  assert layout.out_bytes == layout.source_bytes // 2
  assert layout.num_outputs == 61


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"scan_axes": (1, 1)}, "`scan_axes`"),
    ({"scan_axes": (5,)}, "`scan_axes`"),
    ({"axis": 0}, "`axis` and `segments` go together"),
    (
      {
        "axis": 0,
        "segments": (layout_lib.Segment(source=0, start=3, length=9),),
      },
      "does not fit",
    ),
    (
      {
        "axis": 7,
        "segments": (layout_lib.Segment(source=0, start=0, length=1),),
      },
      "not an axis of the block",
    ),
  ],
)
def test_malformed_layouts_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    layout_lib.Layout(
      **{
        "shape": (4, 3, 8),
        "scan_axes": (1,),
        "source_dtype": np.dtype("float32"),
        "dtype": np.dtype("float32"),
        **options,
      }
    )


def test_F25_widths_that_do_not_divide_name_the_remedy():
  with pytest.raises(ValueError, match=r"100 .* 8 shard.*`moe_mlp_tp_size`"):
    layout_lib.fuse_layout((4, 100), np.float32, scan_axes=(), shards=8)


def test_F69_a_target_larger_than_the_source_is_zero_outside():
  layout = layout_lib.pad_layout(
    (20, 300), np.float32, scan_axes=(), axis=0, shards=1, padded_width=24
  )
  assert runs(layout) == [(0, 0, 20), (Z, 0, 4)]
