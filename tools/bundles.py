"""Counts instruction bundles in libtpu's dump of a kernel's final schedule.

A TensorCore issues one VLIW bundle a cycle, so the bundles of a loop's body
times its trips are the cycles a kernel needs at least. It is a model and not a
measurement: stalls and the latency of a DMA are not in it, and both sides of a
branch are, but for what runs in one step only (`pl.when` of the first or the
last one), which is known by the comparison of every grid index it hangs on.

Read off each line are the depth of loops (the number of `>`), the instructions,
and at a loop's end the trips it makes (`loop exit test`). A pipelined grid runs
two more iterations than it has steps, for the first fetch and the last write.
A grid that Mosaic splits over two TensorCores shows in a smaller number of
trips, since the dump is of one core.
"""

import collections
import dataclasses
import math
import pathlib
import re

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*([> ]*)\{")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder [^,]*, (\d+) /\* loop exit test")
_OPCODE = re.compile(r"= *([a-z][\w.]*)")
_PREDICATE = re.compile(
  r"%(p\d+_p\d+) = (scmp\.eq|scmp\.ne|pnand|por|pneg)[\w.]*"
  r" (?:%(p\d+_p\d+)(?:, %(p\d+_p\d+))?|%(s\w+), -?\d+)"
)
_GRID_INDEX = re.compile(
  r"%(s\w+) = (?:sphi|sld)[^;}]*?/\*[^;}]*?iteration index, stage ="
)
_BRANCH = re.compile(r"sbr\.rel \((!?)%(p\d+_p\d+)\) target = \$region(\d+)")
# Bundles after a branch that are issued whether it is taken or not.
_DELAY = 4
_COMMENT = re.compile(r"/\*.*?\*/")
_PIPELINED = "iteration index, stage ="
_EXTRA_TRIPS = 2
_FILE = re.compile(r"^\d+-(?P<kernel>.+)-\d+-final_bundles\.txt$")
# Bundles of the program around its kernels, not of a kernel.
_NO_KERNEL = re.compile(r"^(?:<.*>|TLP|.*schedule-analysis.*)$")

# Instructions of each kind that one bundle holds: the most ever seen in one
# bundle of the kernels here, in libtpu 0.0.52. `xlu` moves data across lanes;
# shuffles of sublanes go through the `alu`.
SLOTS = {
  "v5e": {"load": 3, "store": 1, "alu": 4, "xlu": 2, "scalar": 2},
  "v5p": {"load": 3, "store": 1, "alu": 4, "xlu": 2, "scalar": 2},
  "v6e": {"load": 3, "store": 2, "alu": 4, "xlu": 2, "scalar": 2},
  "tpu7x": {"load": 3, "store": 2, "alu": 4, "xlu": 2, "scalar": 2},
}


def slot_of(opcode: str) -> str:
  """The part of a bundle that an instruction takes."""
  if ".xlu" in opcode:
    return "xlu"
  if opcode.startswith("vld"):
    return "load"
  if opcode.startswith("vst") and not opcode.startswith("vstv"):
    return "store"
  if opcode.startswith("v") and not opcode.startswith("vsync"):
    return "alu"
  return "scalar"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
  """The schedule of one kernel on one TensorCore.

  Attributes:
    name: Name of its instruction in the compiled program.
    bundles: Bundles of every trip of the outermost loop, inner loops times
      their trips; of everything where there is no loop.
    trips: Trips of the outermost loop that do work; 1 without a loop.
    slots: Instructions of each kind among `bundles`.
    once: Bundles in the loop that run in one trip only.
  """

  name: str
  bundles: int
  trips: int
  slots: dict[str, int]
  once: int = 0

  @property
  def cycles(self) -> int:
    """Bundles issued by one TensorCore from the first trip to the last."""
    return self.bundles * self.trips + self.once

  def bounding_slot(self, target: str) -> tuple[str, int]:
    """The kind of instruction that needs most bundles, and how many it needs.

    Args:
      target: A key of `SLOTS`.

    Returns:
      Its name, and the least number of bundles a trip that hold its
      instructions.
    """
    least = {
      slot: math.ceil(self.slots.get(slot, 0) / count)
      for slot, count in SLOTS[target].items()
    }
    slot = max(least, key=lambda name: least[name])
    return slot, least[slot]


class _Conditions:
  """Which predicates say that grid indices have certain values."""

  def __init__(self):
    # Grid indices that have a certain value when a predicate is true, or when
    # it is false.
    self._indices: set[str] = set()
    self._true: dict[str, frozenset[str]] = {}
    self._false: dict[str, frozenset[str]] = {}

  def note(self, line: str) -> None:
    """Takes in the predicates that a line defines."""
    self._indices.update(_GRID_INDEX.findall(line))
    for name, kind, a, b, compared in _PREDICATE.findall(line):
      # A later definition of the same name is another value.
      self._true.pop(name, None)
      self._false.pop(name, None)
      if compared and compared not in self._indices:
        continue
      if kind == "scmp.eq":
        self._true[name] = frozenset([compared])
      elif kind == "scmp.ne":
        self._false[name] = frozenset([compared])
      elif kind == "pneg" and a in self._true:
        self._false[name] = self._true[a]
      elif kind == "pneg" and a in self._false:
        self._true[name] = self._false[a]
      elif kind == "pnand" and a in self._true and b in self._true:
        self._false[name] = self._true[a] | self._true[b]
      elif kind == "por" and a in self._false and b in self._false:
        self._false[name] = self._false[a] | self._false[b]

  def skipped(self, line: str) -> tuple[int, str] | None:
    """A branch around a region: grid indices it hangs on, and its end."""
    found = _BRANCH.search(line)
    if found is None:
      return None
    negated, name, region = found.groups()
    needs = (self._true if negated else self._false).get(name)
    return None if needs is None else (len(needs), region)


def read(name: str, text: str, dimensions: int = 1) -> Kernel:
  """Reads one kernel's final bundles.

  Args:
    name: The kernel's name.
    text: Contents of its `final_bundles` file.
    dimensions: Dimensions of its grid of more than one step.

  Returns:
    The kernel.
  """
  # Counts at each depth of loops, of the loops that are open.
  levels = [collections.Counter[str]()]
  exits: dict[int, int] = {}
  body, trips, once = collections.Counter[str](), 0, 0
  pipelined = _PIPELINED in text
  conditions = _Conditions()
  rare, delay = None, 0

  def close(depth, everything=False):
    nonlocal trips
    # Empty bundles inside a loop lack its mark: only a loop whose exit test
    # was passed ends.
    while len(levels) > depth + 1 and (everything or len(levels) - 1 in exits):
      inner = levels.pop()
      times = exits.pop(len(levels), 1)
      if len(levels) == 1:
        work = times - _EXTRA_TRIPS if pipelined else times
        # Loops one after the other: as one loop of the first one's trips.
        trips = trips or max(1, work)
        for slot, count in inner.items():
          body[slot] += count * max(1, work) // trips
      for slot, count in inner.items():
        levels[-1][slot] += count * times

  for line in text.splitlines():
    found = _BUNDLE.match(line)
    if found is None:
      continue
    depth = found.group(1).count(">")
    close(depth)
    while len(levels) < depth + 1:
      levels.append(collections.Counter())
    depth = len(levels) - 1
    if rare is not None and rare.search(line):
      rare = None
    delay -= 1
    conditions.note(line)
    if rare is not None and delay < 0 and depth == 1:
      once += 1
      continue
    branch = conditions.skipped(line) if depth == 1 and rare is None else None
    if branch is not None and branch[0] >= max(1, dimensions):
      rare = re.compile(rf"Start(?:/End empty)? region {branch[1]}\b")
      delay = _DELAY
    levels[depth]["bundle"] += 1
    for part in _COMMENT.sub("", line).split(";;"):
      opcode = _OPCODE.search(part)
      if opcode:
        levels[depth][slot_of(opcode.group(1))] += 1
    end = _EXIT.search(line)
    if end:
      exits[depth] = int(end.group(1))
  close(0, everything=True)
  counts = body if trips else levels[0]
  slots = {slot: counts[slot] for slot in sorted(counts) if slot != "bundle"}
  return Kernel(
    name=name,
    bundles=counts["bundle"],
    trips=trips or 1,
    slots=slots,
    once=once,
  )


def collect(folder: pathlib.Path, dimensions: int = 1) -> list[Kernel]:
  """Reads the kernels dumped to a folder, and empties it.

  Args:
    folder: The folder that libtpu dumps to.
    dimensions: Dimensions of more than one step of the kernels' grids.

  Returns:
    Pallas's and XLA's kernels of all programs compiled since the last call.
  """
  kernels = []
  for path in sorted(folder.iterdir()):
    found = _FILE.match(path.name)
    if found and not _NO_KERNEL.match(found.group("kernel")):
      kernels.append(
        read(
          found.group("kernel"), path.read_text(errors="replace"), dimensions
        )
      )
    path.unlink()
  return kernels
