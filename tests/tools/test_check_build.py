"""BUILD files: true to the imports, and the check notices when not."""

import pytest

from laneweave.tools import check_build


@pytest.fixture
def tree(tmp_path):
  """A small repository with BUILD files in order."""
  files = {
    "__init__.py": "",
    "kernels/__init__.py": "from laneweave.kernels import a\n",
    "kernels/a.py": "import math\nimport numpy as np\n",
    "kernels/b.py": "from laneweave.kernels import a\nimport yaml\n",
    "tests/__init__.py": "",
    "tests/test_a.py": "from laneweave.kernels.a import np\n",
  }
  for name, text in files.items():
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
  check_build.fix(tmp_path)
  return tmp_path


def test_the_repository_is_in_order():
  assert check_build.problems() == []


def test_what_is_written_is_right(tree):
  assert check_build.problems(tree) == []
  (target,) = [
    t
    for t in check_build.parse((tree / "kernels/BUILD").read_text())
    if t.name == "b"
  ]
  assert target.deps == ("//kernels:a", "@pypi//pyyaml")
  (test,) = [
    t
    for t in check_build.parse((tree / "tests/BUILD").read_text())
    if t.name == "test_a"
  ]
  assert test.rule == "py_test"
  assert test.deps == ("//kernels:a",)


@pytest.mark.parametrize(
  ("file", "text", "problem"),
  [
    ("kernels/c.py", "", "kernels/BUILD: c.py is in no target of its name"),
    (
      "kernels/a.py",
      "import jax\nimport numpy\n",
      "kernels/BUILD: a imports @pypi//jax",
    ),
    (
      "kernels/b.py",
      "import yaml\n",
      "kernels/BUILD: b does not import //kernels:a",
    ),
  ],
)
def test_a_change_is_noticed(tree, file, text, problem):
  (tree / file).write_text(text)
  assert problem in check_build.problems(tree)


def test_a_target_without_a_source_is_noticed(tree):
  (tree / "kernels/a.py").unlink()
  assert "kernels/BUILD: a has no source" in check_build.problems(tree)


def test_a_missing_file_is_noticed(tree):
  (tree / "kernels/BUILD").unlink()
  assert "kernels/BUILD: missing" in check_build.problems(tree)
