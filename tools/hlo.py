"""Counts HBM traffic and launches in the text of a compiled TPU program.

`cost_analysis()` will not do: it knows nothing of a Pallas kernel, counts
buffers that XLA placed in VMEM, and counts a fused cast's operand at the size
after the cast. So the text is read: which arrays every instruction of the
entry computation takes from HBM and writes to it, tile padding included. A
fusion reads of an operand only the slices it takes, also through fusions
within it; an array whose layout says `S(1)` is in VMEM and moves nothing.

A Pallas call is counted as its operands and results once; what it really
fetches is counted from its grid and blocks (`blocks`).
"""

import dataclasses
import math
import re

KERNEL = 'custom_call_target="tpu_custom_call"'

_ITEMSIZE = {
  "pred": 1,
  "s8": 1,
  "u8": 1,
  "f16": 2,
  "bf16": 2,
  "s16": 2,
  "u16": 2,
  "f32": 4,
  "s32": 4,
  "u32": 4,
}
_ARRAY = re.compile(
  r"\b(" + "|".join(_ITEMSIZE) + r")\[([\d,]*)\](?:\{([^}]*)\})?"
)
_HEAD = re.compile(r"^(ENTRY )?(%[\w.\-]+) \(.*\{\s*$")
_LINE = re.compile(r"^\s*(ROOT )?(%[\w.\-]+) = ")
_CALLS = re.compile(r"calls=(%[\w.\-]+)")
_SLICE = re.compile(r"slice=\{([^}]*)\}")
_TILE = re.compile(r"T\(([\d,]+)\)")
# What only names bytes that are there already, or waits for another's DMA.
_FREE = {
  "after-all",
  "bitcast",
  "constant",
  "copy-done",
  "dynamic-slice-done",
  "get-tuple-element",
  "parameter",
  "partition-id",
  "slice-done",
  "tuple",
}
_STARTS = {"copy-start", "slice-start", "dynamic-slice-start"}
# What passes every element of its operand on, inside a fusion.
_VIEWS = {
  "bitcast",
  "bitcast-convert",
  "convert",
  "copy",
  "reshape",
  "transpose",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
  """One line of a computation.

  Attributes:
    type: Text of the result's type, layouts included.
    opcode: The operation.
    operands: Names of the operands; of a parameter, its number.
    rest: Text after the operands: attributes, metadata.
    root: Whether it is the computation's result.
  """

  type: str
  opcode: str
  operands: tuple[str, ...]
  rest: str
  root: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Module:
  """A compiled program.

  Attributes:
    computations: Instructions by name, in order, of every computation.
    entry: Name of the entry computation.
  """

  computations: dict[str, dict[str, Instruction]]
  entry: str

  @property
  def top(self) -> dict[str, Instruction]:
    """Instructions of the entry computation."""
    return self.computations[self.entry]


def array_bytes(type_text: str, *, vmem: bool = False) -> int:
  """Bytes of all arrays of a type, padded to whole tiles.

  Args:
    type_text: An HLO type, such as `bf16[64,100]{1,0:T(8,128)(2,1)}`.
    vmem: Count those that XLA placed in VMEM too.

  Returns:
    The bytes.
  """
  total = 0
  for dtype, dims, layout in _ARRAY.findall(type_text):
    if "S(1)" in layout and not vmem:
      continue
    shape = [int(d) for d in dims.split(",") if d]
    order = [int(a) for a in layout.partition(":")[0].split(",") if a]
    minor_first = [shape[a] for a in order] if order else shape[::-1]
    tile = _TILE.search(layout)
    if tile:
      sizes = [int(t) for t in tile.group(1).split(",")][::-1]
      for i, t in enumerate(sizes[: len(minor_first)]):
        minor_first[i] = -(-minor_first[i] // t) * t
    total += math.prod(minor_first) * _ITEMSIZE[dtype]
  return total


def _elements(type_text: str) -> int:
  return sum(
    math.prod(int(d) for d in dims.split(",") if d)
    for _, dims, _ in _ARRAY.findall(type_text)
  )


def _closing(text: str, at: int) -> int:
  """Index of the bracket that closes the one at `at`."""
  depth = 0
  for i in range(at, len(text)):
    depth += (text[i] == "(") - (text[i] == ")")
    if depth == 0:
      return i
  raise ValueError(f"no closing bracket in {text[at : at + 80]!r}")


def parse(text: str) -> Module:
  """Reads a compiled program.

  Args:
    text: `Compiled.as_text()`.

  Returns:
    The module.

  Raises:
    ValueError: text without an entry computation.
  """
  computations: dict[str, dict[str, Instruction]] = {}
  entry, current = "", None
  for line in text.splitlines():
    head = _HEAD.match(line)
    if head:
      current = computations.setdefault(head.group(2), {})
      entry = head.group(2) if head.group(1) else entry
      continue
    found = _LINE.match(line) if current is not None else None
    if found is None or current is None:
      continue
    rest = line[found.end() :]
    end = _closing(rest, 0) + 1 if rest[0] == "(" else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode = rest[: rest.index("(")]
    end = _closing(rest, len(opcode))
    inside = rest[len(opcode) + 1 : end]
    current[found.group(2)] = Instruction(
      type=kind,
      opcode=opcode,
      operands=(inside,)
      if opcode == "parameter"
      else tuple(re.findall(r"%[\w.\-]+", inside)),
      rest=rest[end + 1 :],
      root=bool(found.group(1)),
    )
  if not entry:
    raise ValueError("the text has no entry computation")
  return Module(computations=computations, entry=entry)


def _moves(x: Instruction) -> bool:
  """Whether an instruction of the entry computation is a kernel or a DMA.

  Arithmetic on single scalars, such as the clamping of a traced index, is not.
  """
  if x.opcode in _FREE or "ConcatBitcast" in x.rest:
    return False
  return any(dims for _, dims, _ in _ARRAY.findall(x.type))


def launches(module: Module) -> int:
  """Kernels that the program starts: Pallas's and XLA's own."""
  return sum(map(_moves, module.top.values()))


def copies(module: Module) -> int:
  """Instructions besides Pallas kernels that read or write HBM.

  A relayout, cast, slice or padding before or after a kernel, whatever XLA
  calls it. Small arrays that XLA brings into VMEM ahead of a kernel, or takes
  out of it afterwards, as they are, are not counted: HBM is read or written
  once, as it would be by the kernel.
  """
  top = module.top
  return sum(
    any(array_bytes(t) for t in _types(top, x))
    for x in top.values()
    if _moves(x) and KERNEL not in x.rest and not _prefetches(top, x)
  )


def _prefetches(top: dict[str, Instruction], x: Instruction) -> bool:
  """Whether an instruction only moves an array between HBM and VMEM."""
  if x.opcode not in ("copy", "copy-start"):
    return False
  target = _ARRAY.search(x.type)
  source = _ARRAY.search(top[x.operands[0]].type)
  assert target, x
  assert source, x
  there, here = target.group(0), source.group(0)
  return there != here and there.replace("S(1)", "") == here.replace("S(1)", "")


def _types(top, x: Instruction) -> list[str]:
  """Types of an instruction's result and operands."""
  return [x.type, *(top[o].type for o in x.operands if o in top)]


def moved_bytes(module: Module) -> int:
  """Bytes that the program reads from HBM and writes to it."""
  return sum(_traffic(module, x) for x in module.top.values() if _moves(x))


def _traffic(module: Module, x: Instruction) -> int:
  """Bytes one instruction of the entry computation reads and writes."""
  top = module.top
  if x.opcode in _STARTS:
    return _start_traffic(x)
  written = array_bytes(x.type)
  if x.opcode in ("slice", "dynamic-slice"):
    source = top[x.operands[0]].type if x.operands else ""
    in_hbm = bool(array_bytes(source))
    return written + (array_bytes(x.type, vmem=True) if in_hbm else 0)
  if x.opcode == "dynamic-update-slice":
    update = top[x.operands[1]].type if x.operands[1] in top else ""
    return 2 * array_bytes(update)
  if x.opcode != "fusion":
    return written + sum(
      array_bytes(top[o].type) for o in x.operands if o in top
    )
  called = _CALLS.search(x.rest)
  assert called, x
  body = module.computations[called.group(1)]
  updated = _updates(module, body)
  moved = 0
  for at, found in enumerate(_ARRAY.finditer(x.type)):
    size = array_bytes(found.group(0))
    if at in updated:
      size = size * updated[at][1] // max(1, _elements(found.group(0)))
    moved += size
  in_place = {parameter for parameter, _ in updated.values()}
  for at, operand in enumerate(x.operands):
    full = array_bytes(top[operand].type) if operand in top else 0
    name = _parameter(body, at)
    if not full or name in in_place:
      continue
    slices: dict[str, int] = {}
    whole = any(_reads(module, body, name, slices))
    each = full / max(1, _elements(top[operand].type))
    part = int(sum(slices.values()) * each)
    moved += full if whole or not slices else min(full, part)
  return moved


def _updates(
  module: Module, body: dict[str, Instruction]
) -> dict[int, tuple[str, int]]:
  """Results of a fused computation that change a part of an operand in place.

  XLA shares the buffer of such a result with the operand (where it cannot, it
  has put a copy in front), so only the part is written and nothing is read.

  Args:
    module: The program.
    body: The computation.

  Returns:
    By number of the result: the name of the operand's parameter ("" for a
    buffer that is new) and the elements written.
  """
  root = next(name for name, x in body.items() if x.root)
  results = body[root].operands if body[root].opcode == "tuple" else (root,)
  found = {}
  for number, name in enumerate(results):
    name = _behind_bitcasts(body, name)
    x = body[name]
    if x.opcode == "dynamic-update-slice":
      target = _behind_bitcasts(body, x.operands[0])
      elements = _elements(body[x.operands[1]].type)
    elif x.opcode == "fusion":
      called = _CALLS.search(x.rest)
      assert called, x
      inner = module.computations[called.group(1)]
      below = _updates(module, inner).get(0)
      if below is None:
        continue
      parameter, elements = below
      number_below = inner[parameter].operands[0] if parameter else ""
      target = (
        _behind_bitcasts(body, x.operands[int(number_below)])
        if number_below
        else name
      )
    else:
      continue
    is_parameter = body[target].opcode == "parameter"
    found[number] = (target if is_parameter else "", elements)
  return found


def _behind_bitcasts(body: dict[str, Instruction], name: str) -> str:
  """The value that a value is another view of."""
  while body[name].opcode == "bitcast":
    name = body[name].operands[0]
  return name


def _start_traffic(x: Instruction) -> int:
  """An asynchronous copy: (destination, source, ...) or the other way."""
  parts = [m.group(0) for m in _ARRAY.finditer(x.type)]
  first, second = parts[:2]
  target, source = (
    (first, second) if x.opcode == "copy-start" else (second, first)
  )
  size = array_bytes(target, vmem=True)
  return array_bytes(target) + (0 if "S(1)" in source else size)


def _parameter(body: dict[str, Instruction], number: int) -> str:
  return next(
    name
    for name, x in body.items()
    if x.opcode == "parameter" and x.operands == (str(number),)
  )


def _reads(
  module: Module,
  body: dict[str, Instruction],
  name: str,
  slices: dict[str, int],
) -> tuple[bool, bool]:
  """What a fused computation takes of one of its values.

  Args:
    module: The program.
    body: The computation.
    name: The value.
    slices: Filled with the elements of each different slice taken.

  Returns:
    Whether something other than slices needs it, and whether all of it
    reaches the result.
  """
  whole, through = False, body[name].root
  todo, seen = [name], {name}
  while todo:
    value = todo.pop()
    for user, x in body.items():
      if value not in x.operands or x.opcode == "parameter":
        continue
      follow = x.opcode in _VIEWS
      if x.opcode in ("slice", "dynamic-slice") and x.operands[0] == value:
        limits = _SLICE.search(x.rest)
        key = limits.group(1) if limits else ",".join(x.operands[1:])
        slices[key] = _elements(x.type)
      elif x.opcode == "fusion":
        called = _CALLS.search(x.rest)
        assert called, x
        inner = module.computations[called.group(1)]
        for at, operand in enumerate(x.operands):
          if operand == value:
            all_of_it, on = _reads(module, inner, _parameter(inner, at), slices)
            whole, follow = whole or all_of_it, follow or on
      elif not follow:
        whole = True
      if follow:
        through = through or x.root
        if user not in seen:
          seen.add(user)
          todo.append(user)
  return whole, through
