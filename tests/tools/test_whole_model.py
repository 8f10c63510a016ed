"""A chip's part of a real model, from the model's own tree."""

import math

import pytest

from laneweave.tools import whole_model


@pytest.mark.parametrize(
  ("name", "parameters"),
  [
    ("qwen3-30b-a3b", 30.5e9),
    ("deepseek3-671b", 671e9),
    ("kimi-k2-1t", 1026e9),
  ],
)
def test_chips_hold_the_model_between_them(name, parameters):
  model = whole_model.MODELS[name]
  found = whole_model.parts(model)
  read = sum(math.prod(p.layout.shape) * p.layout.operands for p in found)
  # Router biases and the like, which the chips do not divide, are on all.
  assert read * model.chips == pytest.approx(parameters, rel=0.01)


def test_experts_lie_over_all_chips():
  found = whole_model.parts(whole_model.MODELS["qwen3-30b-a3b"])
  (experts,) = [p for p in found if len(p.sources) == 2]
  assert experts.layout.shape == (16, 48, 2048, 768)
  assert experts.layout.out_shape == (16, 2048, 2 * 768)
  assert experts.layout.num_outputs == 48
