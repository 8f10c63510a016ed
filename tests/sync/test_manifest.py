"""Manifests of trees and files."""

import gzip
import json
import pathlib

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync.manifest import LeafSpec, Manifest, manifest
from laneweave.tests.sync.variables import MoEBiasVar, Param

_FOLDER = pathlib.Path(__file__).parent.parent / "data" / "manifests"


def test_a_live_tree():
  mesh = Mesh(np.array(jax.devices()[:2]), ("tp",))
  sharding = NamedSharding(mesh, P(None, "tp"))
  found = manifest(
    {
      "base": {
        "w": Param(np.zeros((4, 6), np.float32)),
        "b": MoEBiasVar(np.zeros(3, "bfloat16")),
        "s": jax.ShapeDtypeStruct((2, 4), np.float32, sharding=sharding),
        "step": np.int32(3),
      }
    }
  )
  assert [(x.name, x.shape, x.dtype.name, x.kind) for x in found.leaves] == [
    ("w", (4, 6), "float32", "Param"),
    ("b", (3,), "bfloat16", "MoEBiasVar"),
    ("s", (2, 4), "float32", None),
  ]
  assert found.by_name()["s"].sharding == sharding
  assert found.by_name()["w"].sharding is None
  assert found.dropped == (("step", "dtype int32 is not floating-point"),)


def test_arrays_on_one_device_have_no_sharding():
  found = manifest({"w": jax.numpy.zeros(4)})
  assert found.leaves[0].sharding is None


def test_text_and_back():
  found = manifest({"w": np.zeros((4, 6), np.float32)})
  assert Manifest.from_json(found.to_json()) == found
  assert manifest(found) is found
  assert manifest(json.loads(found.to_json())) == found


def test_every_real_file_reads():
  files = sorted(_FOLDER.glob("*.json.gz"))
  assert len(files) > 50
  for path in files:
    data = json.loads(gzip.decompress(path.read_bytes()))
    found = Manifest.load(path)
    assert [x.name for x in found.leaves] == [x["path"] for x in data["leaves"]]
    if "params" in data:
      sizes = [int(np.prod(x.shape, dtype=object)) for x in found.leaves]
      kinds = [x.kind for x in found.leaves]
      params = sum(s for s, k in zip(sizes, kinds, strict=True) if k is None)
      assert params == data["params"]


def entry(path="w", shape=(2,), dtype="float32"):
  return {"path": path, "shape": list(shape), "dtype": dtype}


def test_roots_are_stripped_and_state_is_dropped():
  found = Manifest.from_data(
    {
      "leaves": [
        entry("base.layers.w"),
        entry("base.rngs.key"),
        entry("base.n", dtype="int32"),
      ]
    }
  )
  assert [x.name for x in found.leaves] == ["layers.w"]
  assert [name for name, _ in found.dropped] == ["rngs.key", "n"]


@pytest.mark.parametrize(
  "leaf",
  [
    {"path": "w", "shape": [2]},
    {"shape": [2], "dtype": "float32"},
    entry(path=""),
    entry(path="a..b"),
    entry(path=3),
    entry(dtype="floaty"),
    {"path": "w", "shape": [2.5], "dtype": "float32"},
    {"path": "w", "shape": [-1], "dtype": "float32"},
    {"path": "w", "shape": [True], "dtype": "float32"},
    {"path": "w", "shape": 3, "dtype": "float32"},
    "w",
  ],
)
def test_a_malformed_leaf_is_named_by_its_number(leaf):
  with pytest.raises(ValueError, match="leaf 1 of the manifest needs"):
    Manifest.from_data({"leaves": [entry("a"), leaf]})


@pytest.mark.parametrize("text", ["", "[]", '{"leaves": 3}', "{", b"\xff"])
def test_text_that_is_no_manifest(text):
  with pytest.raises(ValueError, match="manifest"):
    Manifest.from_json(text)


def test_a_name_twice():
  with pytest.raises(ValueError, match="`w` is in the manifest twice"):
    Manifest.from_data({"leaves": [entry(), entry()]})


def test_files(tmp_path):
  plain = tmp_path / "m.json"
  plain.write_text(json.dumps({"leaves": [entry()]}))
  assert Manifest.load(plain).leaves[0].name == "w"
  broken = tmp_path / "m.json.gz"
  broken.write_bytes(plain.read_bytes())
  with pytest.raises(ValueError, match="is not a gzip file"):
    Manifest.load(broken)
  broken.write_bytes(gzip.compress(plain.read_bytes())[:-9])
  with pytest.raises(ValueError, match="is not a gzip file"):
    Manifest.load(broken)


def test_F38_sizes_are_exact():
  spec = LeafSpec(name="w", shape=(262144, 5376), dtype=np.dtype("bfloat16"))
  assert spec.size_bytes == 2_818_572_288
  assert str(spec) == "bfloat16[262144, 5376]"
