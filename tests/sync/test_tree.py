"""Names of leaves, and which of them are weights."""

import types

import jax
import numpy as np
import pytest

from laneweave.sync import tree as tree_lib
from laneweave.tests.sync.variables import (
  Box,
  Cache,
  MoEBiasVar,
  Param,
  RngKey,
)


def leaf(*dims, dtype="float32"):
  return jax.ShapeDtypeStruct(dims, np.dtype(dtype))


W = leaf(4, 4)


@pytest.mark.parametrize(
  "tree",
  [
    {"decoder": {"norm": {"scale": W}}},
    {"decoder.norm.scale": W},
    {("decoder", "norm", "scale"): W},
    {"decoder": {"norm": {"scale": {"value": W}}}},
    {"decoder.norm.scale.value": W},
    {"base": {"decoder": {"norm": {"scale": W}}}},
    {"model.model.decoder.norm.scale": W},
    {"params": {"params": {"decoder": {"norm.scale": W}}}},
    types.MappingProxyType({"decoder": {"norm": {"scale": W}}}),
    types.SimpleNamespace(
      to_pure_dict=lambda: {"decoder": {"norm": {"scale": W}}}
    ),
  ],
)
def test_one_canonical_name(tree):
  assert tree_lib.flatten(tree) == {"decoder.norm.scale": W}


def test_roots_stay_unless_all_weights_share_them():
  flat = tree_lib.flatten({"base": {"w": W}, "head": {"w": W}})
  assert list(flat) == ["base.w", "head.w"]
  # State beside the root is never synced, so it does not count.
  flat = tree_lib.flatten({"params": {"w": W}, "cache": {"k": W}})
  assert list(flat) == ["w", "cache.k"]
  # A weight that has the root's own name is no root.
  assert list(tree_lib.flatten({"model": W})) == ["model"]


def test_F08_two_roots_with_different_content():
  with pytest.raises(ValueError, match="roots base, model with different"):
    tree_lib.flatten({"base": {"w": W}, "model": {"w": leaf(4, 4)}})
  # nnx shares modules: the same arrays under both are one tree.
  assert tree_lib.flatten({"base": {"w": W}, "model": {"w": W}}) == {"w": W}


def test_value_is_a_name_where_it_has_siblings():
  names = list(tree_lib.flatten({"a": {"value": W, "key": W}}))
  assert names == ["a.value", "a.key"]


def test_a_name_twice():
  with pytest.raises(ValueError, match=r"`a\.b` is in the tree twice"):
    tree_lib.flatten({"a": {"b": W}, "a.b": W})


@pytest.mark.parametrize("key", [6, "6"])
def test_F03_integer_layers(key):
  tree = {"decoder": {"layers": {key: {"w": W}}}}
  assert list(tree_lib.flatten(tree)) == ["decoder.layers.6.w"]
  assert list(tree_lib.flatten(tree, integer_layers=True)) == [
    "decoder.layers_6.w"
  ]


def test_lists_are_numbered():
  names = list(tree_lib.flatten({"layers": [{"w": W}, {"w": W}]}))
  assert names == ["layers.0.w", "layers.1.w"]


def split(tree):
  weights, dropped = tree_lib.split_leaves(tree_lib.flatten(tree))
  return list(weights), dict(dropped)


def test_F15_keys_of_both_forms_are_dropped_with_reasons():
  names, dropped = split(
    {
      "w": {"kernel": np.zeros((8, 128), "bfloat16")},
      "new": jax.random.key(0),
      "old": jax.random.PRNGKey(0),
    }
  )
  assert names == ["w.kernel"]
  assert "key<fry>" in dropped["new"]
  assert "uint32" in dropped["old"]


@pytest.mark.parametrize(
  "part",
  [
    "cache",
    "kv_cache",
    "cached_prefill_key",
    "KVCache_0",
    "rngs",
    "rng",
    "intermediates",
  ],
)
def test_F16_state_is_named_by_a_whole_part(part):
  names, dropped = split({"a": {part: {"x": W}, f"x{part}": W}})
  assert names == [f"a.x{part}"]
  assert f"`{part}` names" in dropped[f"a.{part}.x"]


def test_F16_weights_whose_names_begin_like_state():
  tree = {"cache_proj": W, "kv_cache_norm_scale": W, "intermediates_norm": W}
  assert split(tree) == (list(tree), {})


def test_variables_count_by_type():
  names, dropped = split(
    {
      "w": Param(W),
      "bias": MoEBiasVar(W),
      "noise": RngKey(W),
      "k": Cache(W),
      "boxed": Box(W),
    }
  )
  assert names == ["w", "bias", "boxed"]
  assert dropped == {
    "noise": "a variable of type RngState",
    "k": "a variable of type Cache",
  }


def test_variables_and_boxes_are_unwrapped():
  weights, _ = tree_lib.split_leaves({"w": Param(W), "b": Box(W)})
  assert weights == {"w": W, "b": W}
  assert tree_lib.variable_kinds(Param(W)) >= {"Param", "Variable"}
  assert not tree_lib.variable_kinds(W)


def test_numbers_scalars_and_objects_are_no_weights():
  _, dropped = split({"w": W, "n": 3, "s": leaf(), "i": leaf(2, dtype="int8")})
  assert dropped["n"] == "a int, not an array"
  assert dropped["s"] == "rank 0"
  assert dropped["i"] == "dtype int8 is not floating-point"


def test_F17_a_tree_without_weights_names_the_first_leaves():
  tree = {f"x{i}": np.zeros((4, i + 1), np.int8) for i in range(5)}
  with pytest.raises(ValueError, match="0 of 5 leaves") as caught:
    split(tree)
  assert "`x0` int8[4, 1]: dtype int8 is not" in str(caught.value)
  assert "`x3`" not in str(caught.value)
  with pytest.raises(ValueError, match="the tree is empty"):
    split({})


@pytest.mark.parametrize(
  "dtype", ["bfloat16", "float32", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_F18_floating_by_the_lattice(dtype):
  assert split({"w": leaf(4, dtype=dtype)}) == (["w"], {})


def test_F05_names_sort_by_number():
  names = [f"layers_{i}.w" for i in (10, 9, 2, 0)] + ["decoder.w", "layers.w"]
  assert sorted(names, key=tree_lib.natural) == [
    "decoder.w",
    "layers.w",
    "layers_0.w",
    "layers_2.w",
    "layers_9.w",
    "layers_10.w",
  ]
