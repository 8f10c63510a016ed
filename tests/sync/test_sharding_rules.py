"""Logical axes of real trees, and the shardings that rules give them."""

import gzip
import json
import pathlib

import pytest

from laneweave.sync import logical_axes, meshes, sharding_rules

_MANIFESTS = pathlib.Path(__file__).parent.parent / "data" / "manifests"
# Axes that default rules shard, as the model code itself names them.
_SHARDED = ("embed", "mlp", "heads", "q_heads", "kv_heads", "vocab", "exp")


def rules(text="", trainer="fsdp=4", rollout="fsdp=2,tp=2"):
  return sharding_rules.parse(
    text,
    {
      "trainer": meshes.parse(trainer, "trainer_mesh"),
      "rollout": meshes.parse(rollout, "rollout_mesh"),
    },
  )


def declared(axes):
  """The model's own axis names, down to the families that are sharded."""
  families = [None if a is None else logical_axes.family(a) for a in axes]
  families = ["embed" if a == "embed_router" else a for a in families]
  return [a if a in _SHARDED else None for a in families]


@pytest.mark.parametrize(
  "path", sorted(_MANIFESTS.glob("*.rollout*")), ids=lambda p: p.name[:-8]
)
def test_the_table_agrees_with_the_axes_the_models_declare(path):
  with gzip.open(path) as file:
    leaves = json.load(file)["leaves"]
  for leaf in leaves:
    name, axes = leaf["path"], leaf["axes"]
    if not axes or ".indexer." in name:
      continue
    if name.endswith("o_a_proj.kernel"):
      axes = [axes[0], None, axes[2]]  # Declared heads, but heads * head_dim.
    found = declared(logical_axes.of_block(name, len(leaf["shape"])))
    assert found == declared(axes), name


def test_stacked_axes_are_layers():
  assert logical_axes.of_stacked("decoder.x.mlp.wi_0.kernel", 4, (1, 2)) == (
    "embed",
    "layers",
    "layers",
    "mlp",
  )


def test_a_name_that_merely_ends_like_one_is_unknown():
  assert logical_axes.of_block("a.unembedding", 2) == (None, None)
  assert logical_axes.of_block("a.query.kernel", 2) == (None, None)


def test_defaults_shard_embed_and_heads():
  both = rules()
  axes = ("embed_attn", "q_heads", "kv")
  assert both["rollout"].assign((64, 4, 32), axes).spec == (
    ("fsdp",),
    ("tp",),
    (),
  )
  assert both["trainer"].assign((64, 4, 32), axes).spec == (("fsdp",), (), ())


def test_an_axis_that_does_not_divide_is_whole_and_said_so():
  found = rules()["rollout"].assign((64, 3, 32), ("embed", "kv_heads", None))
  assert found.spec == (("fsdp",), (), ())
  assert found.skipped == (("kv_heads", "tp"),)


def test_the_trainer_takes_the_first_axis_that_divides():
  trainer = rules()["trainer"]
  assert trainer.assign((3, 8), (None, None)).spec == ((), ("fsdp",))
  stacked = trainer.assign((3, 4, 8), ("embed", "layers", None))
  assert stacked.spec == ((), (), ("fsdp",))
  assert trainer.assign((8,), ("norm",)).spec == ((),)


def test_no_mesh_axis_is_used_twice():
  rollout = rules("rollout:embed=tp,mlp=tp+fsdp")["rollout"]
  found = rollout.assign((8, 8), ("embed", "mlp"))
  assert found.spec == (("tp",), ("fsdp",))
  assert rollout.assign((8, 8), ("mlp", "embed")).spec == (("tp", "fsdp"), ())


def test_a_rule_for_a_member_goes_before_its_family():
  rollout = rules("rollout:mlp_moe=,exp=tp")["rollout"]
  assert rollout.of("mlp_moe") == ()
  assert rollout.of("activation_mlp") == ("tp",)
  assert rollout.of("exp") == ("tp",)


def test_a_rule_without_a_side_holds_for_both():
  both = rules("embed=", rollout="tp=2")
  assert both["trainer"].of("embed") == both["rollout"].of("embed") == ()


def test_parts_are_those_of_the_array_that_fits_them():
  rollout = rules("rollout:mlp=fsdp+tp")["rollout"]
  axes = ("exp", "embed_moe", "mlp_moe")
  assert rollout.parts("mlp_moe", (4, 8, 7), axes) == 2
  # embed cannot take fsdp, so mlp gets it.
  assert rollout.parts("mlp_moe", (4, 3, 7), axes) == 4


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("embed", "no `logical=mesh`"),
    ("=tp", "no `logical=mesh`"),
    ("side:embed=fsdp", "'side' is no side"),
    ("rollout:embd=fsdp", "did you mean `embed`"),
    ("rollout:embed=ep", "mesh fsdp=2,tp=2 has no axis `ep`"),
    ("mlp=tp", "the trainer's mesh fsdp=4 has no axis `tp`"),
    ("rollout:embed=tp+tp", "`tp` twice"),
  ],
)
def test_what_cannot_be_followed_is_refused(text, said):
  with pytest.raises(ValueError, match="`--sharding_rules`") as caught:
    rules(text)
  assert said in str(caught.value)
