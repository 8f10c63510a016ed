"""BUILD files: true to the imports, and the check notices when not."""

import pytest

from laneweave.tools import build_files, check_build

SETUP = """
[options]
install_requires =
  numpy>=2
  ml-dtypes
[options.extras_require]
checkpoint =
  PyYAML; python_version > "3"
test =
  pytest
"""
FILES = {
  "setup.cfg": SETUP,
  "__init__.py": "from laneweave import kernels\n",
  "kernels/__init__.py": "from laneweave.kernels.a import f\n",
  "kernels/a.py": "import math\nimport numpy as np\n\n\ndef f():\n  import yaml\n",
  "kernels/b.py": "from laneweave.kernels import a, f\n",
  "kernels/data/table.txt": "",
  "tests/__init__.py": "",
  "tests/run_pytest.py": "import pytest\n",
  "tests/conftest.py": "import os\n",
  "tests/kernels/test_a.py": "import ml_dtypes.x\nfrom laneweave import kernels\n",
}


@pytest.fixture
def tree(tmp_path):
  """A small repository with BUILD files in order."""
  for name, text in FILES.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(text)
  check_build.fix(tmp_path)
  return tmp_path


def target(root, label):
  folder, _, name = label.removeprefix("//").partition(":")
  text = (root / folder / "BUILD").read_text()
  (found,) = [t for t in build_files.parse(text, folder) if t.name == name]
  return found


def test_the_repository_is_in_order():
  assert check_build.problems() == []


def test_what_is_written_mirrors_the_imports(tree):
  assert check_build.problems(tree) == []
  assert target(tree, "//:laneweave").deps == {"//kernels:kernels"}
  assert target(tree, "//kernels:a").deps == {"@pypi//numpy", "@pypi//pyyaml"}
  # `f` is no module, so the package that defines it provides it.
  assert target(tree, "//kernels:b").deps == {
    "//kernels:a",
    "//kernels:kernels",
  }
  test = target(tree, "//tests/kernels:test_a")
  assert test.rule == "py_test"
  assert test.srcs == ("tests/kernels/test_a.py", "tests/run_pytest.py")
  assert test.deps == {
    "//kernels:kernels",
    "//tests:conftest",
    "@pypi//ml_dtypes",
    "@pypi//pytest",
  }


def test_writing_again_changes_nothing(tree):
  before = {p: p.read_text() for p in tree.rglob("BUILD")}
  assert len(before) == 4
  check_build.fix(tree)
  assert {p: p.read_text() for p in tree.rglob("BUILD")} == before


@pytest.mark.parametrize(
  ("file", "text", "problem"),
  [
    ("kernels/c.py", "", "kernels/c.py: in no target"),
    (
      "kernels/b.py",
      "import ml_dtypes\nfrom laneweave.kernels import a, f\n",
      "//kernels:b: deps lack @pypi//ml_dtypes",
    ),
    (
      "kernels/a.py",
      "import numpy",
      "//kernels:a: deps have @pypi//pyyaml unused",
    ),
    (
      "kernels/b.py",
      "from . import a, f\nFILE = __file__, 'data'\n",
      "//kernels:b: data lack //kernels:data",
    ),
  ],
)
def test_a_changed_source_is_noticed(tree, file, text, problem):
  (tree / file).write_text(text)
  assert check_build.problems(tree) == [problem]
  check_build.fix(tree)
  assert check_build.problems(tree) == []


@pytest.mark.parametrize(
  ("old", "new", "problem"),
  [
    (
      '["b.py"]',
      '["b.py", "gone.py"]',
      "//kernels:b: srcs have kernels/gone.py",
    ),
    ('":a"', '":z"', "//kernels:b: deps lack //kernels:a"),
    ("py_library(", "py_test(", "//kernels:a: is a py_test, not a py_library"),
    ('name = "b"', 'name = "a"', "//kernels:a: defined more than once"),
  ],
)
def test_a_changed_target_is_noticed(tree, old, new, problem):
  path = tree / "kernels/BUILD"
  text = path.read_text()
  assert old in text
  path.write_text(text.replace(old, new))
  assert any(p.startswith(problem) for p in check_build.problems(tree))


def test_a_target_without_a_source_is_noticed(tree):
  (tree / "kernels/b.py").unlink()
  assert check_build.problems(tree) == ["//kernels:b: has no source"]


def test_a_missing_file_is_noticed(tree):
  (tree / "kernels/BUILD").unlink()
  assert "kernels/a.py: in no target" in check_build.problems(tree)


def test_a_circle_is_noticed_and_may_be_one_target(tree):
  (tree / "kernels/a.py").write_text("from laneweave.kernels import b\n")
  check_build.fix(tree)
  (problem,) = check_build.problems(tree)
  assert "a circle of imports" in problem
  assert "//kernels:a" in problem
  path = tree / "kernels/BUILD"
  path.write_text(
    """py_library(
    name = "kernels",
    srcs = ["__init__.py", "a.py", "b.py"],
    tags = ["manual"],
)
"""
  )
  check_build.fix(tree)
  assert check_build.problems(tree) == []
  assert target(tree, "//kernels:kernels").extra == (("tags", ["manual"]),)


@pytest.mark.parametrize(
  ("text", "problem"),
  [
    ("import torch\n", "a.py:1: imports `torch`; setup.cfg does not require"),
    (
      "from laneweave.kernel import b\n",
      "a.py:1: imports `laneweave.kernel.b`, which no file here provides",
    ),
  ],
)
def test_an_import_that_nothing_provides(tree, text, problem):
  (tree / "kernels/a.py").write_text(text)
  with pytest.raises(build_files.BuildError, match=problem):
    check_build.problems(tree)


@pytest.mark.parametrize(
  "text",
  [
    "x = 1\n",
    "py_library(name = NAME)\n",
    "py_library(\n",
    "py_library(**x)\n",
  ],
)
def test_a_build_file_that_cannot_be_read(text):
  with pytest.raises(build_files.BuildError, match=r"^kernels/BUILD:\d: "):
    build_files.parse(text, "kernels")
