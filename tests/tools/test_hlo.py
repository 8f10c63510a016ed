"""HBM traffic is read off compiled programs as it is."""

import pytest

from laneweave.tools import hlo

_MODULE = """\
HloModule jit_f, entry_computation_layout={(f32[64,8,256]{2,1,0:T(8,128)})->bf16[64,256]{1,0:T(8,128)(2,1)}}

%inner (p.0: f32[64,8,256]) -> f32[64,1,256] {
  %p.0 = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
  ROOT %cut = f32[64,1,256]{2,1,0:T(8,128)} slice(%p.0), slice={[0:64], [3:4], [0:256]}
}

%fused (p.1: f32[64,8,256]) -> bf16[64,256] {
  %p.1 = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
  %taken = f32[64,1,256]{2,1,0:T(8,128)} fusion(%p.1), kind=kLoop, calls=%inner
  ROOT %cast = bf16[64,256]{1,0:T(8,128)(2,1)} convert(%taken)
}

ENTRY %main (x: f32[64,8,256], i: s32[]) -> bf16[64,256] {
  %x = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %clamp = s32[]{:T(128)} clamp(%i, %i, %i)
BODY
}
"""


_IN_PLACE = """\
%update (p.2: f32[64,8,256], p.3: f32[64,1,256]) -> f32[64,8,256] {
  %p.2 = f32[64,8,256]{2,1,0:T(8,128)} parameter(0)
  %p.3 = f32[64,1,256]{2,1,0:T(8,128)} parameter(1)
  %zero = s32[] constant(0)
  ROOT %changed = f32[64,8,256]{2,1,0:T(8,128)} dynamic-update-slice(%p.2, %p.3, %zero, %zero, %zero)
}

ENTRY"""


def module(body):
  return hlo.parse(_MODULE.replace("BODY", body))


def test_a_fusion_reads_only_what_it_slices():
  found = module(
    "  ROOT %f = bf16[64,256]{1,0:T(8,128)(2,1)} fusion(%x), kind=kLoop,"
    " calls=%fused"
  )
  assert hlo.moved_bytes(found) == 64 * 256 * 4 + 64 * 256 * 2
  assert hlo.launches(found) == hlo.copies(found) == 1


def test_an_update_in_place_moves_only_what_it_changes():
  text = _MODULE.replace("ENTRY", _IN_PLACE).replace(
    "BODY",
    "  %row = f32[64,1,256]{2,1,0:T(8,128)} parameter(2)\n"
    "  ROOT %f = f32[64,8,256]{2,1,0:T(8,128)} fusion(%x, %row), kind=kLoop,"
    " calls=%update",
  )
  # The row's single sublane takes a whole tile in the array that holds it.
  assert hlo.moved_bytes(hlo.parse(text)) == 64 * 256 * 4 * (8 + 1)


def test_a_copy_into_vmem_is_read_once_and_written_nowhere():
  found = module(
    "  %c = f32[64,8,256]{2,0,1:T(8,128)S(1)} copy(%x)\n"
    "  ROOT %f = bf16[64,256]{1,0:T(8,128)(2,1)} convert(%c)"
  )
  assert hlo.moved_bytes(found) == 64 * 8 * 256 * 4 + 64 * 256 * 2
  assert hlo.launches(found) == 2


def test_an_asynchronous_copy_counts_both_sides_by_where_they_are():
  found = module(
    "  %s = (f32[64,8,256]{2,1,0:T(8,128)S(1)}, f32[64,8,256]{2,1,0:T(8,128)},"
    " u32[]{:S(2)}) copy-start(%x)\n"
    "  ROOT %d = f32[64,8,256]{2,1,0:T(8,128)S(1)} copy-done(%s)"
  )
  assert hlo.moved_bytes(found) == 64 * 8 * 256 * 4


def test_a_pallas_kernel_and_a_bitcast_are_no_copies():
  found = module(
    "  %t = f32[64,8,256]{2,1,0:T(8,128)} bitcast(%x)\n"
    "  ROOT %k = bf16[64,256]{1,0:T(8,128)(2,1)} custom-call(%t),"
    ' custom_call_target="tpu_custom_call"'
  )
  assert hlo.copies(found) == 0
  assert hlo.launches(found) == 1


@pytest.mark.parametrize(
  ("layout", "copies"),
  [
    ("{2,1,0:T(8,128)S(1)}", 0),  # as it is, into VMEM
    ("{2,0,1:T(8,128)S(1)}", 1),  # relaid on the way
    ("{2,1,0:T(8,128)}", 1),  # HBM to HBM
  ],
)
def test_an_array_brought_into_vmem_as_it_is_is_no_copy(layout, copies):
  found = module(
    f"  %s = (f32[64,8,256]{layout}, f32[64,8,256]{{2,1,0:T(8,128)}},"
    " u32[]{:S(2)}) copy-start(%x)\n"
    f"  ROOT %d = f32[64,8,256]{layout} copy-done(%s)"
  )
  assert hlo.copies(found) == copies


def test_tiles_pad():
  assert hlo.array_bytes("bf16[3,100]{1,0:T(4,128)(2,1)}") == 4 * 128 * 2
  assert hlo.array_bytes("f32[5,100]{0,1:T(8,128)}") == 104 * 128 * 4
  assert hlo.array_bytes("f32[16,128]{1,0:T(8,128)S(1)}") == 0
  assert hlo.array_bytes("s32[]{:T(128)}") == 4
