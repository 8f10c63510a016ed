"""Reads and writes the BUILD files: the few rules that laneweave uses.

A BUILD file here is Python syntax: calls with literal arguments, and `glob`.
"""

import ast
import collections.abc
import dataclasses
import pathlib
from typing import Any

FILE_NAME = "BUILD"
# Starts pytest on one file: py_test runs a file, which pytest's files are not.
RUNNER = "tests/run_pytest.py"
# Rules of Python sources; everything else is written anew from the tree.
PYTHON_RULES = ("py_library", "py_test")

_LOAD = 'load("@rules_python//python:defs.bzl", {})'
# Who may depend on a folder's targets. Nothing outside tests sees tools.
_VISIBLE = {
  "": "//visibility:private",
  "tools": "//tests:__subpackages__",
  "tests": "//tests:__subpackages__",
}
# What embedding projects depend on.
_PUBLIC = ("//:laneweave", "//kernels:kernels", "//sync:sync")
# Written from the tree; any other attribute of a target is kept as it is.
_DERIVED = ("name", "srcs", "deps", "data", "main", "args", "visibility")


class BuildError(ValueError):
  """A BUILD file that cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One py_library or py_test.

  Attributes:
    rule: Name of the rule.
    folder: Folder of its BUILD file, `/` between parts, "" at the root.
    name: Name within the folder.
    srcs: Source files, from the root.
    deps: Labels, in full.
    data: Labels of files that are read at run time, in full.
    extra: Attributes that are not derived from the sources.
  """

  rule: str
  folder: str
  name: str
  srcs: tuple[str, ...]
  deps: frozenset[str] = frozenset()
  data: frozenset[str] = frozenset()
  extra: tuple[tuple[str, Any], ...] = ()

  @property
  def label(self) -> str:
    """The target's label in full."""
    return f"//{self.folder}:{self.name}"


def absolute(label: str, folder: str) -> str:
  """Spells a label in full, as `//folder:name` or `@repository//...`.

  Args:
    label: A label as it stands in a BUILD file.
    folder: The folder of that file.

  Returns:
    The label in full.
  """
  if label.startswith("@"):
    return label
  if not label.startswith("//"):
    return f"//{folder}:{label.removeprefix(':')}"
  if ":" in label:
    return label
  return f"{label}:{label.rsplit('/', 1)[-1]}"


def parse(text: str, folder: str) -> list[Target]:
  """Reads the Python targets of a BUILD file.

  Args:
    text: The file.
    folder: Its folder, from the root.

  Returns:
    The targets in the order of the file.

  Raises:
    BuildError: What stands there is not a call with literal arguments.
  """
  path = str(pathlib.PurePosixPath(folder) / FILE_NAME)
  try:
    module = ast.parse(text)
  except SyntaxError as error:
    raise BuildError(f"{path}:{error.lineno}: {error.msg}") from error
  targets = []
  for statement in module.body:
    match statement:
      case ast.Expr(value=ast.Call(func=ast.Name(id=rule)) as call):
        pass
      case ast.Expr(value=ast.Constant(value=str())):
        continue
      case _:
        raise BuildError(f"{path}:{statement.lineno}: expected a rule")
    if rule in PYTHON_RULES:
      targets.append(_target(rule, folder, _literals(call, path)))
  return targets


def _literals(call: ast.Call, path: str) -> dict[str, Any]:
  try:
    return {k.arg or "**": ast.literal_eval(k.value) for k in call.keywords}
  except ValueError as error:
    raise BuildError(
      f"{path}:{call.lineno}: attributes of Python targets are literals"
    ) from error


def _target(rule: str, folder: str, given: dict[str, Any]) -> Target:
  srcs = [absolute(s, folder) for s in given.get("srcs", ())]
  return Target(
    rule=rule,
    folder=folder,
    name=given.get("name", ""),
    srcs=tuple(s[2:].replace(":", "/").lstrip("/") for s in srcs),
    deps=frozenset(absolute(d, folder) for d in given.get("deps", ())),
    data=frozenset(absolute(d, folder) for d in given.get("data", ())),
    extra=tuple((k, v) for k, v in given.items() if k not in _DERIVED),
  )


def emit(
  folder: str,
  targets: collections.abc.Iterable[Target],
  *,
  has_data: bool = False,
) -> str:
  """Writes a BUILD file, as buildifier would lay it out.

  Args:
    folder: Its folder, from the root.
    targets: The Python targets of that folder.
    has_data: Whether the folder has a folder `data` to offer to targets.

  Returns:
    The text.
  """
  targets = sorted(targets, key=lambda t: (t.rule, t.name))
  rules = sorted({f'"{t.rule}"' for t in targets})
  top = folder.split("/", 1)[0]
  visible = _VISIBLE.get(top, "//:__subpackages__")
  package: list[tuple[str, Any]] = [("default_visibility", [visible])]
  if top == "tests":
    package.insert(0, ("default_testonly", True))
  blocks = [
    "# Written by `make build-files`.",
    _LOAD.format(", ".join(rules)),
    _call("package", package),
  ]
  if folder == str(pathlib.PurePosixPath(RUNNER).parent):
    blocks.append(f'exports_files(["{pathlib.PurePosixPath(RUNNER).name}"])')
  if has_data:
    blocks.append(
      'filegroup(\n    name = "data",\n    srcs = glob(["data/**"]),\n)'
    )
  blocks += [_emit_target(t) for t in targets]
  return "\n\n".join(blocks) + "\n"


def _emit_target(target: Target) -> str:
  labels = [_file_label(s) for s in target.srcs]
  attributes = [("name", target.name), ("srcs", _sorted(labels, target))]
  if target.rule == "py_test":
    attributes.append(("args", [f"$(location {_short(labels[0], target)})"]))
  if target.data:
    attributes.append(("data", _sorted(target.data, target)))
  if target.rule == "py_test":
    attributes.append(("main", _short(_file_label(RUNNER), target)))
  attributes += target.extra
  if target.label in _PUBLIC:
    attributes.append(("visibility", ["//visibility:public"]))
  if target.deps:
    attributes.append(("deps", _sorted(target.deps, target)))
  return _call(target.rule, attributes)


def _file_label(path: str) -> str:
  folder, _, name = path.rpartition("/")
  return f"//{folder}:{name}"


def _short(label: str, target: Target) -> str:
  """Spells a label as the target's own file would: files without a colon."""
  package, _, name = label.partition(":")
  if package == f"//{target.folder}":
    return name if name.endswith(".py") else f":{name}"
  return package if package.endswith(f"/{name}") else label


def _sorted(labels: collections.abc.Iterable[str], target: Target) -> list[str]:
  """Buildifier's order: own targets, then own repository, then others."""
  short = (_short(s, target) for s in labels)
  return sorted(
    short, key=lambda s: (s[0] == "@", s[:2] == "//", s.replace(":", "!"))
  )


def _call(
  rule: str, attributes: collections.abc.Sequence[tuple[str, Any]]
) -> str:
  if rule == "package" and len(attributes) == 1:
    name, value = attributes[0]
    return f"{rule}({name} = {_literal(value)})"
  lines = [f"    {name} = {_literal(value)},\n" for name, value in attributes]
  return f"{rule}(\n{''.join(lines)})"


def _literal(value: Any) -> str:
  if isinstance(value, str):
    return f'"{value}"'
  if isinstance(value, list | tuple):
    if len(value) < 2:
      return f"[{''.join(_literal(v) for v in value)}]"
    inner = "".join(f"        {_literal(v)},\n" for v in value)
    return f"[\n{inner}    ]"
  return repr(value)
