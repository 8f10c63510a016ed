"""Keeps the BUILD files true to the imports.

    python -m laneweave.tools.check_build [--fix]

Every .py file is in a target, every target depends on just what its sources
import, and no target depends on itself through others. Modules of laneweave
are labels of this workspace, other people's are `@pypi//name`, where name is a
distribution that setup.cfg asks for. `--fix` writes the BUILD files.
"""

import collections.abc
import graphlib
import pathlib
import sys

from laneweave.tools import build_files
from laneweave.tools.build_files import Target
from laneweave.tools.source_tree import PACKAGE, SourceTree

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read(tree: SourceTree) -> list[Target]:
  """Reads the targets of every BUILD file there is.

  Args:
    tree: The repository.

  Returns:
    The targets.
  """
  targets = []
  for folder in tree.folders():
    path = tree.root / folder / build_files.FILE_NAME
    if path.is_file():
      targets += build_files.parse(path.read_text(encoding="utf-8"), folder)
  return targets


def mirror(
  tree: SourceTree, present: collections.abc.Sequence[Target]
) -> list[Target]:
  """Says what the targets should be.

  Args:
    tree: The repository.
    present: Targets there are. Their names, grouping of sources and attributes
      that do not follow from the sources are kept.

  Returns:
    Targets that cover every source, with the right dependencies.
  """
  kept, owner = [], {}
  for target in present:
    srcs = [s for s in target.srcs if s in tree.files and s not in owner]
    if len(srcs) > 1:
      # pytest's runner is a source of every test, and a target of its own.
      srcs = [s for s in srcs if s != build_files.RUNNER]
    if srcs:
      kept.append((target.folder, target.name, srcs, target.extra))
      owner.update(dict.fromkeys(srcs, target.label))
  for path in tree.files:
    if path in owner:
      continue
    folder, _, name = path.removesuffix(".py").rpartition("/")
    if name == "__init__":
      name = folder.rpartition("/")[2] or PACKAGE
    kept.append((folder, name, [path], ()))
    owner[path] = f"//{folder}:{name}"
  return [_mirror_one(tree, owner, *fields) for fields in kept]


def _mirror_one(tree, owner, folder, name, srcs, extra) -> Target:
  label = f"//{folder}:{name}"
  deps, data = set(), set()
  is_test = any("/test_" in path for path in srcs)
  if is_test:
    srcs = [*srcs, build_files.RUNNER]
    deps.update(owner[path] for path in tree.conftests(folder))
  for path in srcs:
    needs = tree.needs(path)
    deps.update(owner[p] for p in needs.sources)
    deps.update(f"@pypi//{d}" for d in needs.distributions)
    data.update(f"//{f}:data" for f in needs.data_folders)
  return Target(
    rule="py_test" if is_test else "py_library",
    folder=folder,
    name=name,
    srcs=tuple(srcs),
    deps=frozenset(deps - {label}),
    data=frozenset(data),
    extra=extra,
  )


def differences(
  present: collections.abc.Sequence[Target],
  wanted: collections.abc.Sequence[Target],
) -> list[str]:
  """Compares what there is with what should be.

  Args:
    present: Targets there are.
    wanted: Targets that mirror the imports.

  Returns:
    One line a difference; none if there is none.
  """
  lines = []
  have = {}
  for target in present:
    if target.label in have:
      lines.append(f"{target.label}: defined more than once")
    have[target.label] = target
  for target in wanted:
    found = have.pop(target.label, None)
    if found is None:
      lines.append(f"{target.srcs[0]}: in no target")
      continue
    if found.rule != target.rule:
      lines.append(f"{target.label}: is a {found.rule}, not a {target.rule}")
    for what in ("srcs", "deps", "data"):
      missing = set(getattr(target, what)) - set(getattr(found, what))
      spare = set(getattr(found, what)) - set(getattr(target, what))
      lines += [f"{target.label}: {what} lack {m}" for m in sorted(missing)]
      lines += [
        f"{target.label}: {what} have {s} unused" for s in sorted(spare)
      ]
  lines += [f"{label}: has no source" for label in have]
  return lines + _circle(wanted)


def _circle(targets: collections.abc.Sequence[Target]) -> list[str]:
  try:
    graphlib.TopologicalSorter({t.label: t.deps for t in targets}).prepare()
  except graphlib.CycleError as error:
    # In this list, each label is imported by the one after it.
    circle = " -> ".join(reversed(error.args[1]))
    return [f"{circle}: a circle of imports; move what they share to a module"]
  return []


def fix(root: pathlib.Path = ROOT) -> None:
  """Writes the BUILD files.

  Args:
    root: The repository.

  Raises:
    BuildError: An import that nothing provides.
  """
  tree = SourceTree(root)
  wanted = mirror(tree, read(tree))
  for folder in tree.folders():
    text = build_files.emit(
      folder,
      [t for t in wanted if t.folder == folder],
      has_data=tree.has_data(folder),
    )
    path = root / folder / build_files.FILE_NAME
    path.write_text(text, encoding="utf-8")


def problems(root: pathlib.Path = ROOT) -> list[str]:
  """What is wrong with the BUILD files of a repository.

  Args:
    root: The repository.

  Returns:
    One line each.

  Raises:
    BuildError: A BUILD file that cannot be read, or an import that nothing
      provides.
  """
  tree = SourceTree(root)
  present = read(tree)
  return differences(present, mirror(tree, present))


def main(argv: list[str]) -> int:
  """Checks, or with `--fix` writes; returns the exit code."""
  if argv not in ([], ["--fix"]):
    print("usage: check_build [--fix]", file=sys.stderr)
    return 2
  try:
    if argv:
      fix()
    found = problems()
  except build_files.BuildError as error:
    found = [str(error)]
  for line in found:
    print(line)
  if found and not argv:
    print("`make build-files` writes the BUILD files anew", file=sys.stderr)
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
