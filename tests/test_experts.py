"""Mixtures of experts: routing is decided once, experts may stay without tokens, balancing losses are kept."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import roundpipe
from roundpipe import recompute
from roundpipe.hf import causal_lm_to_sequential, routing

from .architectures import BY_NAME, make_batch
from .test_models import both, check, one_layer_a_stage

QWEN = BY_NAME["Qwen3-MoE"]


@pytest.fixture(autouse=True)
def two_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


def test_recompute_takes_the_experts_of_the_forward():
    before, after = torch.randn(5, 8), torch.randn(5, 8, requires_grad=True)
    first = recompute.RecomputeScope(recomputing=False, keeps=True)
    with recompute.entered(first):
        chosen, routes = routing.call_replaying_routes(lambda: torch.topk(before, 2, dim=-1)[1], None)
    assert routes is True
    again = recompute.RecomputeScope(recomputing=True, keeps=False, data=first.data)
    with recompute.entered(again):
        (values, indices), _ = routing.call_replaying_routes(lambda: after.topk(2), True)
    assert torch.equal(indices, chosen)
    assert not torch.equal(indices, after.topk(2)[1]), "the other scores would choose the same: the test says nothing"
    (grad,) = torch.autograd.grad(values.sum(), after)
    assert torch.equal(grad, torch.zeros(5, 8).scatter_(1, chosen, 1.0))


def test_only_blocks_that_choose_are_watched():
    for name, expected in (("Qwen3-MoE", True), ("Qwen3", False)):
        layers = causal_lm_to_sequential(BY_NAME[name].make())
        state = layers[0](**make_batch())
        with recompute.entered(recompute.RecomputeScope(recomputing=False, keeps=True)):
            layers[1](state)
        assert layers[1]._routes is expected


@pytest.mark.parametrize("grain", ["stage", "layer"])
def test_routing_is_replayed_in_training(grain):
    model = roundpipe.wrap_model_to_roundpipe(QWEN.make(), use_sequential_preset=True)
    with mock.patch.object(routing, "_replayed", wraps=routing._replayed) as replayed:
        model.forward_backward(
            input_kwargs=make_batch(),
            loss_fn=lambda output, _: output.loss,
            run_config=roundpipe.RoundPipeRunConfig(
                num_microbatch=2, recompute_grain=grain, execute_plan=one_layer_a_stage(model.num_layers)
            ),
        )
        model.synchronize()
    assert replayed.call_count == 2 * 3, "once for each block and microbatch"


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral", "DeepSeek-V3", "GPT-OSS"])
def test_experts_without_tokens(name):
    many = {"num_experts": 16} if name == "Qwen3-MoE" else {"num_local_experts": 16}
    if name == "DeepSeek-V3":
        many = {"n_routed_experts": 16}
    check(*both(BY_NAME[name], **many), make_batch(rows=2, length=2))  # two tokens a microbatch


def test_the_balancing_loss_is_part_of_the_loss():
    batch = make_batch(padding="left")
    plain = QWEN.make(router_aux_loss_coef=0.5)
    with torch.no_grad():
        without, wanted = plain(**batch).loss, plain(**batch, output_router_logits=True)
    layers = causal_lm_to_sequential(QWEN.make(router_aux_loss_coef=0.5))
    state = layers[0](**batch, output_router_logits=True)
    for layer in layers[1:]:
        state = layer(state)
    assert abs(wanted.loss - without) > 0.1
    torch.testing.assert_close(state.loss, wanted.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(state.aux_loss, wanted.aux_loss, rtol=1e-6, atol=0)
    assert len(state.router_logits) == len(wanted.router_logits) == 3


def test_a_config_may_ask_for_router_logits():
    check(*both(QWEN, output_router_logits=True, router_aux_loss_coef=0.5), make_batch())


def test_router_logits_of_a_model_that_hides_its_routers_are_refused():
    layers = causal_lm_to_sequential(BY_NAME["Qwen3"].make())
    with pytest.raises(NotImplementedError, match="where its routers are"):
        layers[0](**make_batch(), output_router_logits=True)
