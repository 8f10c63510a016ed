"""The NumPy reference against answers worked out by hand."""

import inspect

import ml_dtypes
import numpy as np
import pytest

from laneweave.kernels import reference

BF16 = np.dtype(ml_dtypes.bfloat16)


def bits(x):
  return x.view(f"u{x.dtype.itemsize}")


def stacked(*blocks, axis=1):
  return np.stack([np.asarray(b, np.float32) for b in blocks], axis=axis)


# unscan


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_unscan_takes_the_stacked_axis_apart(axis):
  blocks = [np.full((2, 3), i, np.float32) for i in range(4)]
  out = reference.unscan(np.stack(blocks, axis=axis), scan_axis=axis)
  assert len(out) == 4
  for got, want in zip(out, blocks, strict=True):
    np.testing.assert_array_equal(got, want)


def test_unscan_of_two_axes_has_the_outer_one_first():
  # [embed 2, blocks 2, locals 3]
  x = np.array([[[0, 1, 2], [10, 11, 12]], [[20, 21, 22], [30, 31, 32]]])
  out = reference.unscan(x.astype(np.float32), scan_axis=(1, 2))
  assert [o.tolist() for o in out] == [
    [0, 20],
    [1, 21],
    [2, 22],
    [10, 30],
    [11, 31],
    [12, 32],
  ]
  swapped = reference.unscan(x.astype(np.float32), scan_axis=(2, 1))
  assert [o.tolist() for o in swapped] == [
    [0, 20],
    [10, 30],
    [1, 21],
    [11, 31],
    [2, 22],
    [12, 32],
  ]


def test_unscan_without_stacked_axis_is_one_block():
  x = np.arange(6, dtype=np.float32).reshape(2, 3)
  (out,) = reference.unscan(x, scan_axis=None)
  np.testing.assert_array_equal(out, x)


def test_F06_unscan_slices_the_declared_axis():
  x = np.arange(4 * 4 * 8, dtype=np.float32).reshape(4, 4, 8)
  out = reference.unscan(x, scan_axis=1)
  np.testing.assert_array_equal(out[2], x[:, 2, :])
  assert not np.array_equal(out[2], x[2])


def test_results_share_no_memory_with_the_source_and_are_contiguous():
  x = np.zeros((2, 3, 4), np.float32)
  for out in reference.unscan(x, scan_axis=1):
    assert not np.shares_memory(out, x)
    assert out.flags.c_contiguous


def test_F75_views_give_what_their_contiguous_copies_give():
  a = np.arange(24, dtype=np.float32).reshape(4, 6)
  one = np.lib.stride_tricks.as_strided(a, (1,), (8,))
  for view in (a.T, a[:, ::2], a[::-1], one):
    copy = np.ascontiguousarray(view)
    (out,) = reference.unscan(view, scan_axis=None)
    assert out.tobytes() == copy.tobytes()
    np.testing.assert_array_equal(
      reference.fingerprint(view), reference.fingerprint(copy)
    )


@pytest.mark.parametrize("scan_axis", [3, -4, (1, 1), (0, 5)])
def test_unscan_refuses_an_axis_that_is_not_there(scan_axis):
  with pytest.raises(ValueError, match="scan_axis"):
    reference.unscan(np.zeros((2, 3, 4)), scan_axis=scan_axis)


# fuse_gate_up


def test_F23_padding_goes_to_the_end_of_each_half():
  gate = stacked([[1, 2, 3, 4, 5, 6]])
  (out,) = reference.fuse_gate_up(gate, gate + 10, padded_width=8)
  assert out.tolist() == [
    [1, 2, 3, 4, 5, 6, 0, 0, 11, 12, 13, 14, 15, 16, 0, 0]
  ]


def test_F23_bias_vectors_are_fused_the_same_way():
  gate = stacked([1, 2, 3, 4, 5, 6], axis=0)
  (out,) = reference.fuse_gate_up(gate, -gate, scan_axis=0, padded_width=8)
  assert out.tolist() == [1, 2, 3, 4, 5, 6, 0, 0, -1, -2, -3, -4, -5, -6, 0, 0]


@pytest.mark.parametrize(
  ("shards", "want"),
  [(1, [0, 1, 2, 3, 10, 11, 12, 13]), (2, [0, 1, 10, 11, 2, 3, 12, 13])],
)
def test_F26_gate_and_up_join_inside_every_shard(shards, want):
  gate = stacked([[0, 1, 2, 3]])
  (out,) = reference.fuse_gate_up(gate, gate + 10, shards=shards)
  assert out.tolist() == [want]


def test_F27_lanes_alternate_inside_every_shard():
  gate = stacked([np.arange(512)])[None, 0]
  (out,) = reference.fuse_gate_up(
    gate, gate + 1000, scan_axis=0, shards=2, lane_size=128
  )
  columns = np.arange(512)
  want = np.concatenate(
    [
      columns[0:128],
      columns[0:128] + 1000,
      columns[128:256],
      columns[128:256] + 1000,
      columns[256:384],
      columns[256:384] + 1000,
      columns[384:512],
      columns[384:512] + 1000,
    ]
  )
  np.testing.assert_array_equal(out.reshape(-1), want)


def test_F27_plain_concatenation_differs_from_the_lanes():
  gate = stacked([np.arange(512)], axis=0)
  (lanes,) = reference.fuse_gate_up(
    gate, gate + 1000, scan_axis=0, shards=2, lane_size=128
  )
  (plain,) = reference.fuse_gate_up(gate, gate + 1000, scan_axis=0, shards=2)
  assert plain.shape == lanes.shape
  assert not np.array_equal(plain, lanes)
  np.testing.assert_array_equal(plain[0, :256], np.arange(256))


def test_F28_gate_comes_first_and_bytes_repeat():
  gate, up = np.ones((3, 2, 4), np.float32), np.full((3, 2, 4), 2, np.float32)
  first = reference.fuse_gate_up(gate, up, shards=2)
  again = reference.fuse_gate_up(gate, up, shards=2)
  assert first[0][0].tolist() == [1, 1, 2, 2, 1, 1, 2, 2]
  assert [a.tobytes() for a in first] == [b.tobytes() for b in again]


def test_F29_padding_ends_up_behind_the_last_chunk_of_each_half():
  gate = stacked([1 + np.arange(320)], axis=0)
  (out,) = reference.fuse_gate_up(
    gate, -gate, scan_axis=0, shards=2, padded_width=512, lane_size=128
  )
  shard = out[0, :512]
  np.testing.assert_array_equal(shard[0:128], 1 + np.arange(0, 128))
  np.testing.assert_array_equal(shard[128:256], -1 - np.arange(0, 128))
  np.testing.assert_array_equal(shard[256:288], 1 + np.arange(128, 160))
  np.testing.assert_array_equal(shard[288:384], np.zeros(96))
  np.testing.assert_array_equal(shard[384:416], -1 - np.arange(128, 160))
  np.testing.assert_array_equal(shard[416:512], np.zeros(96))
  assert out[0, 512] == 161


def test_fuse_gate_up_of_a_doubly_stacked_source():
  gate = np.arange(2 * 2 * 3 * 2, dtype=np.float32).reshape(2, 2, 3, 2)
  out = reference.fuse_gate_up(gate, -gate, scan_axis=(1, 2))
  assert len(out) == 6
  # Block 1, local layer 0 is the fourth.
  np.testing.assert_array_equal(out[3][:, :2], gate[:, 1, 0])
  np.testing.assert_array_equal(out[3][:, 2:], -gate[:, 1, 0])


@pytest.mark.parametrize(
  ("kwargs", "message"),
  [
    ({"shards": 3}, "width 8 does not divide into 3 shards"),
    ({"shards": 2, "padded_width": 13}, "`padded_width` 13"),
    ({"padded_width": 4}, "`padded_width` 4"),
    ({"lane_size": 3}, "8 columns a shard are no multiple of `lane_size` 3"),
    ({"lane_size": -1}, "`lane_size` is -1"),
    ({"shards": 0}, "0 shards"),
  ],
)
def test_fuse_gate_up_refuses_widths_that_do_not_fit(kwargs, message):
  gate = np.zeros((2, 1, 8), np.float32)
  with pytest.raises(ValueError, match=message):
    reference.fuse_gate_up(gate, gate, **kwargs)


def test_fuse_gate_up_refuses_a_pair_that_differs():
  gate = np.zeros((2, 1, 8), np.float32)
  with pytest.raises(ValueError, match=r"\[2, 1, 6\]"):
    reference.fuse_gate_up(gate, gate[..., :6])
  with pytest.raises(ValueError, match="bfloat16"):
    reference.fuse_gate_up(gate, gate.astype(BF16))


# pad_lanes


def test_F19_every_shard_is_padded_at_its_own_end():
  x = np.ones((2, 1, 16, 768), np.float32)
  (out,) = reference.pad_lanes(x, axis=-1, shards=8, padded_width=1024)
  assert out.shape == (2, 16, 1024)
  sums = out.reshape(2, 16, 8, 128).sum(-1)
  np.testing.assert_array_equal(sums, np.full((2, 16, 8), 96))


def test_F20_rows_of_wo_are_padded_inside_the_shards():
  x = np.ones((2, 1, 704, 16), np.float32)
  (out,) = reference.pad_lanes(x, axis=1, shards=4, padded_width=1024)
  zero_rows = np.flatnonzero(~out.any(axis=(0, 2)))
  want = np.concatenate([s * 256 + np.arange(176, 256) for s in range(4)])
  np.testing.assert_array_equal(zero_rows, want)
  assert out.sum() == x.sum()


def test_F25_width_that_does_not_divide_is_refused():
  with pytest.raises(ValueError, match="width 100 does not divide into 8"):
    reference.pad_lanes(np.zeros((100, 1, 1)), shards=8, padded_width=2048)


def test_F25_232_a_shard_are_padded_to_256():
  x = np.ones((1, 1856, 2), np.float32)
  (out,) = reference.pad_lanes(
    x, scan_axis=0, axis=0, shards=8, padded_width=2048
  )
  assert out.shape == (2048, 2)
  assert out.reshape(8, 256, 2).sum((1, 2)).tolist() == [464] * 8


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_F24_padding_is_positive_zero(dtype):
  x = np.full((2, 1, 6), -1, np.float32)
  (out,) = reference.pad_lanes(x, axis=-1, padded_width=8, dtype=dtype)
  assert bits(out)[:, 6:].tolist() == [[0, 0], [0, 0]]
  assert out.dtype == dtype


def test_F69_padding_beyond_the_source_is_zero_and_the_inside_equal():
  x = np.arange(20 * 3, dtype=np.float32).reshape(1, 20, 3) + 1
  (out,) = reference.pad_lanes(x, scan_axis=0, axis=0, padded_width=56)
  np.testing.assert_array_equal(out[:20], x[0])
  assert not out[20:].any()


def test_pad_lanes_to_the_same_width_changes_nothing():
  x = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
  (out,) = reference.pad_lanes(x, axis=-1, shards=2, padded_width=4)
  np.testing.assert_array_equal(out, x[:, 0])


# The sharded expert


def silu(x):
  return x / (1 + np.exp(-x))


@pytest.mark.parametrize("lane_size", [0, 128])
@pytest.mark.parametrize(
  ("width", "shards", "padded"),
  [(512, 4, 1024), (640, 4, 1024), (192, 1, 256), (768, 2, 1024)],
)
def test_F21_F24_sum_over_shards_is_the_unsharded_expert(
  width, shards, padded, lane_size
):
  rng = np.random.default_rng(width + shards)
  tokens, embed = 3, 8
  x = rng.standard_normal((tokens, embed))
  gate, up = rng.standard_normal((2, 1, embed, width))
  wo = rng.standard_normal((1, width, embed))
  want = (silu(x @ gate[0]) * (x @ up[0])) @ wo[0]

  (fused,) = reference.fuse_gate_up(
    gate,
    up,
    scan_axis=0,
    shards=shards,
    padded_width=padded,
    lane_size=lane_size,
  )
  (down,) = reference.pad_lanes(
    wo, scan_axis=0, shards=shards, padded_width=padded
  )
  total = np.zeros_like(want)
  for fused_shard, down_shard in zip(
    np.split(fused, shards, axis=1), np.split(down, shards, axis=0), strict=True
  ):
    if lane_size:
      # [embed, chunks, gate or up, lane] back into its two halves.
      chunks = fused_shard.reshape(embed, -1, 2, lane_size)
      g = chunks[:, :, 0].reshape(embed, -1)
      u = chunks[:, :, 1].reshape(embed, -1)
    else:
      g, u = np.split(fused_shard, 2, axis=1)
    total += (silu(x @ g) * (x @ u)) @ down_shard
  np.testing.assert_allclose(total, want, rtol=1e-12, atol=1e-12)


def test_F21_padding_wo_at_its_end_only_would_be_wrong():
  # What the test above must be able to see.
  rng = np.random.default_rng(0)
  wo = rng.standard_normal((1, 512, 8))
  (inside,) = reference.pad_lanes(wo, scan_axis=0, shards=4, padded_width=1024)
  (at_end,) = reference.pad_lanes(wo, scan_axis=0, padded_width=1024)
  assert not np.array_equal(inside, at_end)


# repeat_heads


def test_F30_copies_of_a_head_lie_side_by_side():
  k = np.broadcast_to(
    np.arange(2, dtype=np.float32)[None, None, :, None], (16, 1, 2, 4)
  )
  (out,) = reference.repeat_heads(k, repeats=4)
  assert out.shape == (16, 8, 4)
  assert out[0, :, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_F31_biases_repeat_by_heads():
  bias = np.arange(8, dtype=np.float32).reshape(2, 1, 4)
  (out,) = reference.repeat_heads(bias, repeats=4)
  assert out.reshape(-1).tolist() == [0, 1, 2, 3] * 4 + [4, 5, 6, 7] * 4


def test_repeat_heads_once_changes_nothing():
  x = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
  (out,) = reference.repeat_heads(x, scan_axis=0, repeats=1)
  np.testing.assert_array_equal(out, x[0])
  with pytest.raises(ValueError, match="`repeats` is 0"):
    reference.repeat_heads(x, scan_axis=0, repeats=0)
  with pytest.raises(ValueError, match="`axis` 5"):
    reference.repeat_heads(x, scan_axis=0, axis=5, repeats=2)


# cast


def f32(*patterns):
  return np.array(patterns, np.uint32).view(np.float32)


@pytest.mark.parametrize(
  ("source", "want"),
  [
    (0x3F808000, 0x3F80),  # A tie, to the even pattern below.
    (0x3F818000, 0x3F82),  # A tie, to the even pattern above.
    (0x3F808001, 0x3F81),
    (0x3F807FFF, 0x3F80),
    (0x7F7FFFFF, 0x7F80),  # The largest float32 rounds to infinity.
    (0x7F800000, 0x7F80),
    (0xFF800000, 0xFF80),
    (0x80000000, 0x8000),
    (0x00000001, 0x0000),
    (0x00018000, 0x0002),
    (0x7FC00000, 0x7FC0),
    (0xFFC00000, 0xFFC0),
    (0x7F800001, 0x7FC0),  # Truncating would turn this NaN into infinity.
    (0xFFFFFFFF, 0xFFC0),
  ],
)
def test_cast_to_bfloat16(source, want):
  assert bits(reference.cast(f32(source), BF16)).tolist() == [want]


@pytest.mark.parametrize(
  ("source", "want"),
  [
    (0x3F801000, 0x3C00),  # A tie, to the even pattern below.
    (0x3F803000, 0x3C02),  # A tie, to the even pattern above.
    (0x477FE000, 0x7BFF),  # 65504
    (0x477FEFFF, 0x7BFF),
    (0x477FF000, 0x7C00),  # 65520 rounds to infinity.
    (0x7F800000, 0x7C00),
    (0xFF800000, 0xFC00),
    (0x80000000, 0x8000),
    (0x33800000, 0x0001),  # The smallest subnormal, 2**-24.
    (0x33000000, 0x0000),  # Half of it, a tie.
    (0x33000001, 0x0001),
    (0x387FC000, 0x03FF),  # The largest subnormal.
    (0x7F800001, 0x7E00),
    (0xFFFFFFFF, 0xFE00),
  ],
)
def test_cast_to_float16(source, want):
  assert bits(reference.cast(f32(source), np.float16)).tolist() == [want]


def test_cast_from_bfloat16_is_exact_and_keeps_nan_payloads():
  x = np.arange(1 << 16, dtype=np.uint16).view(BF16)
  out = reference.cast(x, np.float32)
  want = np.arange(1 << 16, dtype=np.uint32) << 16
  np.testing.assert_array_equal(out.view(np.uint32), want)


def test_cast_from_bfloat16_to_float16():
  x = np.array([0x3F80, 0x7F80, 0x8000, 0xFFFF, 0x4780], np.uint16).view(BF16)
  out = reference.cast(x, np.float16)
  assert bits(out).tolist() == [0x3C00, 0x7C00, 0x8000, 0xFE00, 0x7C00]


@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16])
def test_F62_cast_to_the_same_dtype_keeps_every_bit(dtype):
  size = np.dtype(dtype).itemsize
  patterns = {2: [0x7FFF, 0xFFC1, 0x8000], 4: [0x7F800001, 0xFFFFFFFF, 1 << 31]}
  x = np.array(patterns[size], f"u{size}").view(dtype)
  out = reference.cast(x, dtype)
  assert bits(out).tolist() == patterns[size]
  assert not np.shares_memory(out, x)


def test_F35_a_small_bias_survives_only_in_float32():
  bias = np.array([1, 1 + 2**-10], np.float32)
  assert int(np.argmax(reference.cast(bias))) == 1
  rounded = reference.cast(bias, BF16)
  assert rounded[0] == rounded[1]


def test_F61_every_function_casts_as_cast_does():
  rng = np.random.default_rng(1)
  x = rng.standard_normal((4, 3, 6, 8)).astype(np.float32)
  want = reference.cast(x, BF16)
  for i, out in enumerate(reference.unscan(x, dtype=BF16)):
    assert out.tobytes() == want[:, i].tobytes()
  for i, out in enumerate(reference.repeat_heads(x, repeats=2, dtype=BF16)):
    assert out[:, ::2].tobytes() == want[:, i].tobytes()
  for i, out in enumerate(reference.pad_lanes(x, padded_width=6, dtype=BF16)):
    assert out.tobytes() == want[:, i].tobytes()
  for i, out in enumerate(reference.fuse_gate_up(x, x, dtype=BF16)):
    assert out[..., :8].tobytes() == want[:, i].tobytes()
    assert out[..., 8:].tobytes() == want[:, i].tobytes()


@pytest.mark.parametrize(
  ("source", "target"),
  [
    (np.int32, np.float32),
    (np.float64, np.float32),
    (np.float16, np.float32),
    (np.float32, np.float64),
    (ml_dtypes.float8_e4m3fn, BF16),
  ],
)
def test_cast_refuses_other_pairs(source, target):
  with pytest.raises(ValueError, match="no cast from"):
    reference.cast(np.zeros(3, source), target)


def test_backend_is_accepted_everywhere():
  x = np.ones((2, 1, 4), np.float32)
  reference.unscan(x, backend="xla")
  reference.fuse_gate_up(x, x, backend="xla")
  reference.pad_lanes(x, padded_width=2, backend="xla")
  reference.repeat_heads(x, repeats=2, backend="xla")
  reference.cast(x, BF16, backend="xla")
  reference.fingerprint(x, backend="xla")
  reference.fingerprint_many([x], backend="xla")
  for name in reference.__all__:
    assert "backend" in inspect.signature(getattr(reference, name)).parameters
