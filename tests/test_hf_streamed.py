"""A causal language model trained through RoundPipe goes where the plain loop over the same microbatches goes."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipeRunConfig, wrap_model_to_roundpipe

from .causal_models import assert_close, make_batch, make_model

PIECES = 2


@pytest.fixture(autouse=True)
def restore_devices():
    yield
    roundpipe.use_devices(None)


def plain_loss_and_backward(model, batch):
    total = 0.0
    for piece in range(PIECES):
        part = {name: tensor.tensor_split(PIECES)[piece] for name, tensor in batch.items()}
        loss = model(**part).loss / PIECES
        loss.backward()
        total += loss.detach()
    return total


def forward_backward(model, batch, **config):
    return model.forward_backward(
        input_kwargs=batch,
        loss_fn=lambda output, _: output.loss / PIECES,
        run_config=RoundPipeRunConfig(num_microbatch=PIECES, **config),
    )


def staged_plan(num_layers: int) -> ModelExecutePlan:
    """One layer a stage, so that every boundary between layers goes over the host."""
    plan = ModelExecutePlan()
    plan.fwd_plan = [range(i, i + 1) for i in range(num_layers - 1)]
    plan.bwd_plan = [range(i, i + 1) for i in reversed(range(num_layers))]
    return plan


@pytest.mark.parametrize("devices", ["host:1", "host:2"])
@pytest.mark.parametrize("grain", ["stage", "layer"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_equal_the_plain_loop(family, grain, devices):
    roundpipe.use_devices(devices)
    batch = make_batch(padding="left")
    plain, hf_model = make_model(family, "sdpa", tied=True), make_model(family, "sdpa", tied=True)
    model = wrap_model_to_roundpipe(hf_model, use_sequential_preset=True)
    assert model.num_layers == hf_model.config.num_hidden_layers + 2
    wanted = plain_loss_and_backward(plain, batch)
    for return_logits in (True, False):
        got = forward_backward(
            model,
            dict(batch, return_logits=return_logits),
            recompute_grain=grain,
            execute_plan=staged_plan(model.num_layers),
        )
        model.synchronize()
        assert_close(got, wanted, "loss")
        for (name, got_p), (_, wanted_p) in zip(hf_model.named_parameters(), plain.named_parameters(), strict=True):
            assert_close(got_p.grad, wanted_p.grad, name, 1e-6 if return_logits else 3e-6)
        model.zero_grad()


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_merged_output_equals_the_plain_model(family):
    roundpipe.use_devices("host:2")
    batch = make_batch(padding="right")
    wanted = make_model(family)(**batch)
    model = wrap_model_to_roundpipe(make_model(family))
    with torch.no_grad():
        got = model(**batch, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1))
        pieces = model(**batch, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=4))
    assert type(got) is type(wanted)
    assert_close(got.loss, wanted.loss, "loss")
    assert_close(got.logits, wanted.logits, "logits")
    assert_close(pieces.logits, wanted.logits, "logits of four microbatches")


def test_exact_training_equals_plain_training_and_saves_under_its_own_names(tmp_path):
    roundpipe.use_devices("host:2")
    plain, hf_model = make_model("qwen3", tied=True), make_model("qwen3", tied=True)
    batches = [make_batch(length=6 + i) for i in range(3)]
    model = wrap_model_to_roundpipe(hf_model)
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for batch in batches:
        plain_loss = plain_loss_and_backward(plain, batch)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        loss = forward_backward(model, dict(batch, return_logits=False))
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()), is_async=False)
        assert_close(loss, plain_loss, "loss", 1e-5)
    model.synchronize()
    assert model.state_dict().keys() == plain.state_dict().keys()
    hf_model.save_pretrained(tmp_path)
    again = type(plain).from_pretrained(tmp_path)
    for (name, got), (_, wanted) in zip(again.named_parameters(), plain.named_parameters(), strict=True):
        # Adam divides by the root of tiny second moments, which lifts rounding of the gradients into the step.
        assert_close(got, wanted, name, 1e-3)
    assert again.lm_head.weight is again.model.embed_tokens.weight


def test_saving_through_the_wrapper_writes_the_newest_weights(tmp_path):
    roundpipe.use_devices("host:2")
    hf_model = make_model("llama")
    model = wrap_model_to_roundpipe(hf_model)
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = hf_model.lm_head.weight.clone()
    forward_backward(model, make_batch())
    model.step(lambda: optimizer.step())  # asynchronous: its result is not in the host weights yet
    model.save_pretrained(tmp_path)
    saved = type(hf_model).from_pretrained(tmp_path).lm_head.weight
    newest = next(p for name, p in model.optim_named_parameters() if name == "lm_head.weight")
    assert torch.equal(saved, newest) and not torch.equal(saved, before)


@pytest.mark.parametrize("rows", [2, 3, 5])
def test_a_loss_by_counted_labels_is_that_of_the_batch(rows):
    """However the rows are dealt out, and differentiated by the caller or by us."""
    roundpipe.use_devices("host:2")
    batch = make_batch(rows=rows, padding="right")
    counted = batch["labels"][:, 1:].ne(-100).sum()
    plain, hf_model = make_model("qwen3", "sdpa"), make_model("qwen3", "sdpa")
    model = wrap_model_to_roundpipe(hf_model)
    config = RoundPipeRunConfig(num_microbatch=3)
    wanted = plain(**batch, num_items_in_batch=counted).loss
    wanted.backward()
    loss = model(**batch, num_items_in_batch=counted, roundpipe_run_config=config).loss
    assert_close(loss, wanted, "loss")
    loss.backward()
    model.synchronize()
    for (name, parameter), other in zip(hf_model.named_parameters(), plain.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, name)
    with torch.no_grad():
        assert_close(model(**batch, num_items_in_batch=counted, roundpipe_run_config=config).loss, wanted, "inference")
    loss, output = model.forward_backward(
        input_kwargs=dict(batch, num_items_in_batch=counted),
        loss_fn=lambda output, _: output.loss,
        run_config=config,
        return_outputs=True,
    )
    assert_close(loss, wanted, "loss of forward_backward")
    assert_close(output.loss, wanted, "its output's")


@pytest.mark.parametrize("preset", [True, False])
def test_gradient_checkpointing_is_switched_off(preset, caplog):
    roundpipe.use_devices("host:2")
    batch = make_batch()
    plain, hf_model = make_model("llama", "sdpa"), make_model("llama", "sdpa")
    hf_model.gradient_checkpointing_enable()
    hf_model.train()
    with caplog.at_level("INFO", logger="roundpipe"):
        model = wrap_model_to_roundpipe(hf_model, use_sequential_preset=preset)
    assert "gradient checkpointing of LlamaForCausalLM is switched off" in caplog.text
    assert not hf_model.is_gradient_checkpointing
    loss = model(**batch, use_cache=False, roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1)).loss
    wanted = plain(**batch).loss
    assert_close(loss, wanted, "loss")
    loss.backward()
    wanted.backward()
    model.synchronize()
    for (name, parameter), other in zip(hf_model.named_parameters(), plain.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, name)


@pytest.mark.filterwarnings("error:Dynamo detected")
@pytest.mark.parametrize("blocks", [3, 10])
def test_blocks_are_compiled_once_and_compute_the_same(blocks):
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    batch = make_batch(padding="left")
    plain, hf_model = (make_model("qwen3", "sdpa", tied=True, num_hidden_layers=blocks) for _ in range(2))
    graphs = []
    options = {"backend": lambda graph, inputs: graphs.append(graph) or graph.forward}
    model = wrap_model_to_roundpipe(hf_model, compile=options)
    wanted = plain_loss_and_backward(plain, batch)
    for _ in range(2):
        assert_close(forward_backward(model, batch), wanted, "loss")
        model.synchronize()
    assert 0 < len(graphs) <= 4, "one with a graph for autograd and one without, on each of two devices"
    for (name, got), (_, want) in zip(hf_model.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(got.grad, 2 * want.grad, name)


def test_blocks_with_experts_are_compiled_and_replay_their_routes():
    torch._dynamo.reset()
    roundpipe.use_devices("host:2")
    batch = make_batch(padding="left") | dict(output_router_logits=True)
    plain, hf_model = make_model("qwen3_moe", "sdpa"), make_model("qwen3_moe", "sdpa")
    graphs = []
    options = {"backend": lambda graph, inputs: graphs.append(graph) or graph.forward}
    model = wrap_model_to_roundpipe(hf_model, compile=options)
    config = RoundPipeRunConfig(num_microbatch=1, recompute_grain="layer")
    loss = model.forward_backward(input_kwargs=batch, loss_fn=lambda output, _: output.loss, run_config=config)
    wanted = plain(**batch).loss
    wanted.backward()
    assert_close(loss, wanted.detach(), "loss")
    model.synchronize()
    assert graphs
    for (name, got), (_, want) in zip(hf_model.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(got.grad, want.grad, name)
