"""Plans: what a sync produces from what, decided from shapes alone.

A plan is made from names, shapes and dtypes; no device is touched and nothing
is allocated, so everything that can be wrong is known before a round starts.
All problems are collected and raised together.
"""

import collections.abc
import dataclasses
import difflib
import math
from typing import Any

import jax

from laneweave.sync import manifest as manifest_lib
from laneweave.sync import tree as tree_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec
from laneweave.sync.rules import containers, stacks
from laneweave.sync.rules.entries import EntryMaker, PlanEntry

_NAMES_SHOWN = 5
_PROBLEMS_SHOWN = 40


class PlanError(ValueError):
  """The trees do not fit each other or the configuration."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """Everything a sync produces.

  Attributes:
    entries: What is run, in the source tree's order.
    dropped: (name, reason) of leaves that are never synced.
    warnings: What is right but costly, or may be meant otherwise.
    source_only: Names of trainer leaves that the target does not have; empty
      unless the plan was made with `strict=False`.
  """

  entries: tuple[PlanEntry, ...]
  dropped: tuple[tuple[str, str], ...]
  warnings: tuple[str, ...]
  source_only: tuple[str, ...] = ()

  def outputs(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every rollout array, layers in numeric order."""
    found = {
      name: entry.layout for entry in self.entries for name in entry.targets
    }
    return {
      name: jax.ShapeDtypeStruct(found[name].out_shape, found[name].dtype)
      for name in manifest_lib.sort_names(found)
    }

  def byte_ranges(self) -> dict[str, tuple[int, int]]:
    """(first byte, bytes) of every output, packed in the order of `outputs`."""
    ranges, at = {}, 0
    for name, x in self.outputs().items():
      size = math.prod(x.shape) * x.dtype.itemsize
      ranges[name] = (at, size)
      at += size
    return ranges

  @property
  def source_bytes(self) -> int:
    """Bytes read from all sources."""
    return sum(entry.layout.source_bytes for entry in self.entries)

  @property
  def out_bytes(self) -> int:
    """Bytes written to all rollout arrays."""
    return sum(entry.layout.out_bytes for entry in self.entries)


def make_plan(
  tree_or_manifest: Any,
  cfg: SyncConfig,
  target: Any = None,
  *,
  strict: bool = True,
) -> Plan:
  """Plans the conversion of a trainer's tree.

  Args:
    tree_or_manifest: The trainer's tree (arrays or shapes, nested or flat), or
      its manifest.
    cfg: The configuration.
    target: The rollout's tree or manifest. It then decides names of joined
      leaves, shapes, dtypes and padding; None: the configuration does.
    strict: Refuse trainer leaves that the target does not have. False: list
      them in the plan's `source_only`, as for an encoder that only the trainer
      has.

  Returns:
    The plan.

  Raises:
    PlanError: all that does not fit, each problem with the leaf's name, shapes
      and remedy.
    ValueError: a tree without weights, or malformed.
  """
  if cfg.rollout_backend != "maxtext":
    raise PlanError(
      f"`rollout_backend` {cfg.rollout_backend!r} has no rules in this version;"
      " use 'maxtext'"
    )
  source = manifest_lib.manifest(tree_or_manifest)
  if not source.leaves:
    raise PlanError(
      "the trainer's tree has no weights, so there is nothing to move"
      f" ({len(source.dropped)} other leaves are never synced)"
    )
  wanted, unwanted = None, {}
  if target is not None:
    found = manifest_lib.manifest(target, integer_layers=True)
    wanted = {tree_lib.number_layers(leaf.name): leaf for leaf in found.leaves}
    unwanted = dict(found.dropped)
  places, problems = stacks.locate(source.leaves, cfg)
  maker = EntryMaker(source.by_name(), places, cfg, wanted)
  entries = []
  for leaf in source.leaves:
    if leaf.name not in places:
      continue
    try:
      entry = maker.make(leaf)
    except ValueError as error:
      problems.append(f"`{leaf.name}` {leaf}: {error}")
      continue
    if entry is not None:
      entries.append(entry)
  problems.extend(_clashes(entries))
  strange = containers.unknown_family(source.leaves, cfg)
  if strange and (wanted is None or (strict and maker.unmatched)):
    problems.insert(0, strange)
  if wanted is not None:
    if maker.unmatched and (strict or not entries):
      problems.append(_lost(maker.unmatched, wanted, unwanted))
    problems.extend(_missing(entries, wanted, cfg))
  if problems:
    raise PlanError(_join(problems))
  return Plan(
    entries=tuple(entries),
    dropped=source.dropped,
    warnings=tuple(maker.warnings),
    source_only=tuple(leaf.name for leaf, _ in maker.unmatched),
  )


def _clashes(entries):
  """Outputs that two sources would write."""
  written: dict[str, str] = {}
  for entry in entries:
    for name in entry.targets:
      if name in written:
        yield (
          f"`{name}` would be written twice, from `{written[name]}` and"
          f" `{entry.sources[0]}`"
        )
      written[name] = entry.sources[0]


def _lost(
  unmatched: collections.abc.Sequence[tuple[LeafSpec, str]],
  wanted: collections.abc.Mapping[str, LeafSpec],
  unwanted: collections.abc.Mapping[str, str],
) -> str:
  """Says which trainer leaves the target does not have, and what it has."""
  names = [leaf.name for leaf, _ in unmatched]
  _, first = unmatched[0]
  if first in unwanted:
    near = f"; the target's `{first}` cannot be written: {unwanted[first]}"
  else:
    found = difflib.get_close_matches(first, wanted, n=2, cutoff=0.5)
    near = f"; nearest to `{first}` in the target: {_names(found) or 'none'}"
  return (
    f"{len(names)} trainer leaves have no target and would be lost:"
    f" {_names(names)}{near}; the rollout's model differs from the trainer's,"
    f" or its names need a rule ({containers.TABLE})"
  )


def _missing(entries, wanted, cfg):
  """Target leaves that nothing writes."""
  written = {name for entry in entries for name in entry.targets}
  missing = [name for name in wanted if name not in written]
  if missing:
    total = len(wanted)
    yield (
      f"{total - len(missing)} of {total} target leaves matched;"
      f" {len(missing)} would keep their old values: {_names(missing)}; check"
      f" `num_decoder_layers` ({cfg.num_decoder_layers}) and that both sides"
      " hold the same model"
    )


def _names(names: collections.abc.Sequence[str]) -> str:
  """The first few names, and how many more."""
  ordered = manifest_lib.sort_names(names)
  shown = ", ".join(f"`{n}`" for n in ordered[:_NAMES_SHOWN])
  more = len(ordered) - _NAMES_SHOWN
  return shown + (f" and {more} more" if more > 0 else "")


def _join(problems: collections.abc.Sequence[str]) -> str:
  """All problems in one message, the first on the first line."""
  if len(problems) == 1:
    return problems[0]
  lines = list(problems[:_PROBLEMS_SHOWN])
  if len(problems) > _PROBLEMS_SHOWN:
    lines.append(f"and {len(problems) - _PROBLEMS_SHOWN} more")
  lines[0] += f" ({len(problems)} problems in all)"
  return "\n".join(lines)
