"""The Python sources of a repository and what each of them needs."""

import ast
import collections.abc
import configparser
import dataclasses
import os
import pathlib
import re
import sys

from laneweave.tools.build_files import BuildError

PACKAGE = "laneweave"
# Distributions that are not named after what they let one import.
_DISTRIBUTIONS = {
  "absl": "absl_py",
  "google.protobuf": "protobuf",
  "grpc": "grpcio",
  "grpc_tools": "grpcio_tools",
  "orbax": "orbax_checkpoint",
  "tpu_sync": "tpu_sync_jax",
  "yaml": "pyyaml",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needs:
  """What one source needs to run.

  Attributes:
    sources: Sources of the repository that it imports.
    distributions: Distributions that it imports from, as Bazel spells them.
    data_folders: Folders whose `data` it reads.
  """

  sources: frozenset[str]
  distributions: frozenset[str]
  data_folders: frozenset[str]


class SourceTree:
  """The sources of one repository, whose root is the package.

  Attributes:
    root: The repository.
    files: All .py files, from the root, `/` between parts.
  """

  def __init__(self, root: pathlib.Path):
    self.root = root
    self.files = sorted(_python_files(root))
    self._modules = {_module(f): f for f in self.files}
    self._declared = _declared(root / "setup.cfg")

  def folders(self) -> list[str]:
    """Folders that hold sources, "" for the root."""
    return sorted({_folder(f) for f in self.files})

  def has_data(self, folder: str) -> bool:
    """Whether a folder has a `data` of files to read at run time."""
    return (self.root / folder / "data").is_dir()

  def conftests(self, folder: str) -> list[str]:
    """The files of settings that pytest reads before the tests of a folder."""
    above = [folder, *map(str, pathlib.PurePosixPath(folder).parents)]
    return [
      f"{a}/conftest.py" for a in above if f"{a}/conftest.py" in self.files
    ]

  def needs(self, path: str) -> Needs:
    """Says what a source needs.

    Args:
      path: The source.

    Returns:
      Its imports, wherever in it they are, and its data.

    Raises:
      BuildError: It imports what neither the repository, Python nor setup.cfg
        provides.
    """
    text = (self.root / path).read_text(encoding="utf-8")
    module = ast.parse(text, path)
    sources, distributions = set(), set()
    for line, name in _imports(module, path):
      top = name.split(".", 1)[0]
      where = f"{path}:{line}: imports `{name}`"
      if top == PACKAGE:
        sources.add(self._source(name, where))
      elif top not in sys.stdlib_module_names:
        distributions.add(self._distribution(name, where))
    return Needs(
      sources=frozenset(sources - {path}),
      distributions=frozenset(distributions),
      data_folders=frozenset(self._data_folders(module, path)),
    )

  def _source(self, name: str, where: str) -> str:
    for candidate in (name, name.rpartition(".")[0]):
      if candidate in self._modules:
        return self._modules[candidate]
    raise BuildError(f"{where}, which no file here provides")

  def _distribution(self, name: str, where: str) -> str:
    top, _, rest = name.partition(".")
    second = f"{top}.{rest.split('.', 1)[0]}"
    found = _DISTRIBUTIONS.get(second) or _DISTRIBUTIONS.get(top) or top.lower()
    if found not in self._declared:
      raise BuildError(f"{where}; setup.cfg does not require `{found}`")
    return found

  def _data_folders(
    self, module: ast.Module, path: str
  ) -> collections.abc.Iterator[str]:
    """Yields the nearest `data` for a source with both __file__ and "data"."""
    words = {n.id for n in ast.walk(module) if isinstance(n, ast.Name)}
    words |= {
      n.value
      for n in ast.walk(module)
      if isinstance(n, ast.Constant) and isinstance(n.value, str)
    }
    if {"__file__", "data"} <= words:
      above = map(str, pathlib.PurePosixPath(path).parents[:-1])
      yield from [f for f in above if self.has_data(f)][:1]


def _python_files(root: pathlib.Path) -> collections.abc.Iterator[str]:
  for folder, folders, names in os.walk(root):
    folders[:] = [f for f in folders if not f.startswith((".", "__"))]
    here = pathlib.Path(folder).relative_to(root)
    yield from ((here / n).as_posix() for n in names if n.endswith(".py"))


def _folder(path: str) -> str:
  return path.rpartition("/")[0]


def _module(path: str) -> str:
  parts = [PACKAGE, *path.removesuffix(".py").split("/")]
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _declared(config: pathlib.Path) -> frozenset[str]:
  parser = configparser.ConfigParser()
  parser.read(config, encoding="utf-8")
  lists = [parser.get("options", "install_requires", fallback="")]
  if parser.has_section("options.extras_require"):
    lists += parser["options.extras_require"].values()
  names = re.findall(r"^\s*([A-Za-z0-9][\w.-]*)", "\n".join(lists), re.M)
  return frozenset(re.sub(r"[-_.]+", "_", n).lower() for n in names)


def _imports(
  module: ast.Module, path: str
) -> collections.abc.Iterator[tuple[int, str]]:
  """Yields line and dotted name; a name from a module as `module.name`."""
  package = _module(path).split(".")
  if not path.endswith("__init__.py"):
    package.pop()
  for node in ast.walk(module):
    if isinstance(node, ast.Import):
      yield from ((node.lineno, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      above = package[: len(package) + 1 - node.level] if node.level else []
      base = ".".join([*above, *filter(None, [node.module])])
      yield from ((node.lineno, f"{base}.{a.name}") for a in node.names)
