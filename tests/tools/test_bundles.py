"""Bundles are counted by loop, and loops by their trips."""

import pytest

from laneweave.tools import bundles

# The form of libtpu 0.0.52's final_bundles: address, mark, loop depth,
# instructions; two steps more than the grid has; an inner loop of four trips;
# an empty bundle without its mark inside the loop.
_DUMP = """\
= control target key start
LH: loop header
= control target key end

     0   :  { %s1_s0 = smov.u32 1 /* materialized constant */ }
   0x1 LB: > { %s2_s0 = sphi 0 /* iteration index, stage = 0 */ }
   0x2   : > { %5 = vst [vmem:[%s1] sm:$0xff] /*vst_source=*/%v1_v0  ;;  %v2_v0 = vld [vmem:[%s1] sm:$0xff] }
   0x3   :  {} /* End region 26 */
   0x4 LB: >> { %v3_v0 = vadd.s32 %v1_v0, %v2_v0  ;;  %v4_v0 = vmul.u32 %v1_v0, %v2_v0  ;;  %9 = vrot.lane.b32.xlu0 %v1_v0, 4 }
   0x5   : >> { %p1_p0 = scmp.ge.s32.totalorder %s3_s0, 4 /* loop exit test */ }
   0x6   : > { %v5_v0 = vstv %s1_s0 }
   0x7   : > { %p2_p0 = scmp.ge.s32.totalorder %s4_s0, 66 /* loop exit test */ }
   0x8   :  { %12 = sbr.rel (!%p2_p0) target = $region2 }
   0x9   :  { %13 = vsyncpa [#allocation4], 1 }
"""


def test_loops_are_multiplied_by_their_trips():
  kernel = bundles.read("k", _DUMP)
  assert kernel.trips == 64
  assert kernel.bundles == 5 + 4 * 2
  assert kernel.cycles == 64 * 13
  assert kernel.slots == {
    "alu": 1 + 4 * 2,
    "load": 1,
    "scalar": 2 + 4,
    "store": 1,
    "xlu": 4,
  }


def test_the_bounding_slot_needs_most_bundles():
  kernel = bundles.Kernel(
    name="k", bundles=20, trips=1, slots={"alu": 17, "load": 9, "store": 4}
  )
  assert kernel.bounding_slot("v5p") == ("alu", 5)
  busy = bundles.Kernel(name="k", bundles=20, trips=1, slots={"store": 7})
  assert busy.bounding_slot("v5p") == ("store", 7)
  # Two stores a bundle there.
  assert busy.bounding_slot("v6e") == ("store", 4)


_ONCE = """\
   0x1 LB: > { %s1_s0 = sphi 0, %s9_s0 /* iteration index, stage = 0 */ }
   0x2   : > { %p1_p0 = scmp.eq.s32.totalorder COMPARED, 0 }
   0x3   : > { %7 = sbr.rel (!%p1_p0) target = $region40 }
   0x4   : > { %v1_v0 = vmov 0 }
   0x5   : > { %v2_v0 = vmov 0 }
   0x6   : > { %v3_v0 = vmov 0 }
   0x7   : > { %v4_v0 = vmov 0 }
   0x8   : > { %v5_v0 = vmov 0 }
   0x9   : > { %v6_v0 = vmov 0 }
   0xa PF: > { %v7_v0 = vmov 0 } /* Start/End empty region 40 */
   0xb   : > { %p2_p0 = scmp.ge.s32.totalorder %s9_s0, 12 /* loop exit test */ }
   0xc   :  { %8 = sbr.rel (!%p2_p0) target = $region2 }
"""


@pytest.mark.parametrize(
  ("compared", "dimensions", "once"),
  [
    ("%s1_s0", 1, 2),  # after the four bundles that are issued anyhow
    ("%s1_s0", 2, 0),  # holds in every step of the other dimension
    ("%s5_s0", 1, 0),  # something else than a grid index
  ],
)
def test_what_runs_in_one_step_is_no_part_of_the_others(
  compared, dimensions, once
):
  text = _ONCE.replace("COMPARED", compared)
  kernel = bundles.read("k", text, dimensions)
  assert kernel.once == once
  assert kernel.bundles == 11 - once
  assert kernel.cycles == 10 * (11 - once) + once


def test_without_a_loop_everything_counts_once():
  text = "\n".join(
    f"  {i:#x}   :  {{ %v{i}_v0 = vadd.s32 %v0_v0, 1 }}" for i in range(1, 6)
  )
  kernel = bundles.read("k", text)
  assert (kernel.bundles, kernel.trips) == (5, 1)
  assert kernel.slots == {"alu": 5}


def test_only_kernels_are_collected_and_the_folder_is_emptied(tmp_path):
  for name in (
    "12-laneweave_relayout.1-01-final_bundles.txt",
    "12-laneweave_relayout.1-00-schedule-analysis_final_bundles.txt",
    "12-TLP-01-final_bundles.txt",
    "12-<late-finalization>-01-final_bundles.txt",
    "12-TLP-hlo.txt",
  ):
    (tmp_path / name).write_text(_DUMP)
  assert [k.name for k in bundles.collect(tmp_path)] == ["laneweave_relayout.1"]
  assert not list(tmp_path.iterdir())
