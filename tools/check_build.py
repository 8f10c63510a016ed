"""Keeps the BUILD files true to the imports.

    python -m laneweave.tools.check_build [--fix]

Every Python module is in exactly one target of the BUILD file of its folder: a
`py_library` of the module's own name, or a `py_test` for `test_*.py`, whose
`deps` are what the module imports. `--fix` writes the BUILD files anew.
"""

import ast
import collections.abc
import dataclasses
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ("", "kernels", "sync", "tests", "tools")
# Distributions whose import name is another.
_DISTRIBUTIONS = {
  "absl": "absl-py",
  "google": "protobuf",
  "grpc": "grpcio",
  "grpc_tools": "grpcio-tools",
  "ml_dtypes": "ml-dtypes",
  "orbax": "orbax-checkpoint",
  "tpu_sync": "tpu-sync-jax",
  "yaml": "pyyaml",
}
_HEADER = """\
# Written by `make build-files`; `make lint` checks it against the imports.
load("@rules_python//python:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One rule of a BUILD file.

  Attributes:
    rule: "py_library" or "py_test".
    name: Name of the target.
    srcs: Python files, relative to the folder.
    data: Globs of data files.
    deps: Labels, sorted.
  """

  rule: str
  name: str
  srcs: tuple[str, ...]
  data: tuple[str, ...]
  deps: tuple[str, ...]


def folders(root: pathlib.Path) -> list[pathlib.Path]:
  """Folders that hold Python modules and so need a BUILD file."""
  found = {root}
  for top in FOLDERS[1:]:
    found.update(p.parent for p in (root / top).rglob("*.py"))
  return sorted(found)


def imports(text: str) -> set[str]:
  """Modules that a source file imports, wherever in it."""
  found = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      found.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
      found.update(f"{node.module}.{alias.name}" for alias in node.names)
  return found


def label_of(module: str, root: pathlib.Path) -> str | None:
  """The label that provides a module, or None for the standard library."""
  parts = module.split(".")
  if parts[0] == "laneweave":
    for end in range(len(parts), 0, -1):
      path = root.joinpath(*parts[1:end])
      folder = path.parent.relative_to(root).as_posix() if end > 1 else ""
      folder = "" if folder == "." else folder
      if end > 1 and path.with_suffix(".py").is_file():
        return f"//{folder}:{path.name}"
      if (path / "__init__.py").is_file():
        inside = path.relative_to(root).as_posix()
        return f"//{'' if inside == '.' else inside}:__init__"
    return None
  if parts[0] in sys.stdlib_module_names:
    return None
  return f"@pypi//{_DISTRIBUTIONS.get(parts[0], parts[0])}"


def wanted(folder: pathlib.Path, root: pathlib.Path) -> list[Target]:
  """The targets that a folder's modules call for."""
  inside = folder.relative_to(root).as_posix()
  inside = "" if inside == "." else inside
  targets = []
  for path in sorted(folder.glob("*.py")):
    own = f"//{inside}:{path.stem}"
    labels = {
      label_of(module, root)
      for module in imports(path.read_text(encoding="utf-8"))
    }
    is_test = path.name.startswith("test_")
    data = []
    if path.name == "__init__.py" and folder != root:
      data = sorted(
        p.name
        for p in folder.iterdir()
        if p.suffix in (".proto", ".pyi") and p.is_file()
      )
    targets.append(
      Target(
        rule="py_test" if is_test else "py_library",
        name=path.stem,
        srcs=(path.name,),
        data=tuple(data),
        deps=tuple(sorted(labels - {own, None})),
      )
    )
  return targets


def render(targets: collections.abc.Sequence[Target]) -> str:
  """The text of a BUILD file, in buildifier's form."""

  def attribute(name, values):
    if len(values) == 1:
      return f'    {name} = ["{values[0]}"],\n'
    lines = "".join(f'        "{v}",\n' for v in values)
    return f"    {name} = [\n{lines}    ],\n"

  text = _HEADER
  for t in targets:
    text += f'\n{t.rule}(\n    name = "{t.name}",\n'
    text += attribute("srcs", t.srcs)
    if t.data:
      text += attribute("data", t.data)
    if t.deps:
      text += attribute("deps", t.deps)
    text += ")\n"
  return text


def parse(text: str) -> list[Target]:
  """The targets in a BUILD file: calls with literal arguments."""
  targets = []
  for node in ast.parse(text).body:
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
      continue
    if call.func.id not in ("py_library", "py_test"):
      continue
    given = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg}
    targets.append(
      Target(
        rule=call.func.id,
        name=given["name"],
        srcs=tuple(given.get("srcs", ())),
        data=tuple(given.get("data", ())),
        deps=tuple(sorted(given.get("deps", ()))),
      )
    )
  return targets


def problems(root: pathlib.Path = ROOT) -> list[str]:
  """What is wrong with the BUILD files below a folder.

  Args:
    root: The repository.

  Returns:
    One line each.
  """
  found = []
  for folder in folders(root):
    path = folder / "BUILD"
    where = path.relative_to(root).as_posix()
    if not path.is_file():
      found.append(f"{where}: missing")
      continue
    have = {t.name: t for t in parse(path.read_text(encoding="utf-8"))}
    for target in wanted(folder, root):
      mine = have.pop(target.name, None)
      if mine is None or mine.srcs != target.srcs:
        found.append(f"{where}: {target.srcs[0]} is in no target of its name")
        continue
      if mine.rule != target.rule:
        found.append(f"{where}: {target.name} should be a {target.rule}")
      missing = sorted(set(target.deps) - set(mine.deps))
      extra = sorted(set(mine.deps) - set(target.deps))
      if missing:
        found.append(f"{where}: {target.name} imports {', '.join(missing)}")
      if extra:
        found.append(
          f"{where}: {target.name} does not import {', '.join(extra)}"
        )
    found.extend(f"{where}: {name} has no source" for name in sorted(have))
  return found


def fix(root: pathlib.Path = ROOT) -> None:
  """Writes the BUILD files.

  Args:
    root: The repository.
  """
  for folder in folders(root):
    text = render(wanted(folder, root))
    (folder / "BUILD").write_text(text, encoding="utf-8")


def main(argv: list[str]) -> int:
  """Checks, or with `--fix` writes; returns the exit code."""
  if argv == ["--fix"]:
    fix()
  elif argv:
    print("usage: check_build [--fix]", file=sys.stderr)
    return 2
  found = problems()
  for line in found:
    print(line)
  if found:
    print("run `make build-files`", file=sys.stderr)
  return 1 if found else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
