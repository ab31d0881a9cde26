"""Floating-point operations of a model for one sample, counted without computing anything."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from muster.data.generators import kept_generators
from muster.train.config.keys import Config
from muster.train.config.parts import build
from muster.train.data.batches import first_inputs
from muster.train.data.load import Data
from muster.train.models.model_json import filled_in
from muster.train.strategies.step.call import Call

PASSES = 3
"""A step's operations in forward passes: backward takes two, for the gradients of inputs and of weights."""


def flops_per_sample(config: Config, data: Data) -> float | None:
    """Return the operations of forward and backward for one training sample; None if they cannot be counted.

    The model is built without storage and called once, on the device `meta`. What is counted are the matrix products,
    convolutions and attention of the forward pass, a multiplication and an addition as two, three times: for a
    transformer this is PaLM's 6N + 12LHQT per token, N the parameters of its products, L layers, H heads of size Q, T
    tokens. As there, a causal attention counts in full, and recomputed activations do not count. A model with frozen
    parameters is not counted, as its backward pass takes less.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B.
    """
    if config.freeze:
        return None
    try:
        inputs = first_inputs(config, data.train, size=1)
        with kept_generators(), torch.device("meta"):
            model = build(config.model, **filled_in(config.model, data)).eval()
            inputs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), inputs)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                Call(model)(model, inputs)
        if not all(parameter.requires_grad for parameter in model.parameters()):
            return None
    except Exception:  # a user's model may need real tensors: the run goes on without the figure
        return None
    return float(PASSES * counter.get_total_flops()) or None
