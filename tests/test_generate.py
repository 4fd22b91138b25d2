"""Inference of wrapped language models: logits of the plain model, and `generate` for short checks."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe import RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.roundpipe import AutoRoundPipe

from .causal_models import assert_close, make_batch, make_model

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def two_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


def prompt() -> dict[str, torch.Tensor]:
    batch = make_batch(rows=3, length=6, padding="left")
    return dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


GREEDY = dict(do_sample=False)
SAMPLED = dict(do_sample=True, temperature=0.8, top_k=20)


@pytest.mark.parametrize("use_cache", [False, True], ids=["no cache", "cache"])
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_generate_continues_as_the_plain_model(family, how, use_cache):
    arguments = dict(max_new_tokens=5, pad_token_id=0, use_cache=use_cache, **how)
    plain, hf_model = make_model(family).eval(), make_model(family).eval()
    model = wrap_model_to_roundpipe(hf_model)
    torch.manual_seed(3)
    wanted = plain.generate(**prompt(), **arguments)
    torch.manual_seed(3)
    got = model.generate(**prompt(), **arguments)
    assert got.shape == (3, 11) and torch.equal(got, wanted)
    with torch.no_grad():  # and the streamed model would have chosen the same
        config = RoundPipeRunConfig(num_microbatch=2)
        logits = model(input_ids=got, attention_mask=None, roundpipe_run_config=config).logits
    assert_close(logits, plain(input_ids=got).logits, "logits")


def test_generate_between_steps_uses_the_newest_weights_and_disturbs_nothing():
    plain, hf_model = make_model("llama"), make_model("llama")
    model = wrap_model_to_roundpipe(hf_model)
    with roundpipe.OptimizerCtx():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    batch = make_batch()
    for _ in range(2):
        model.forward_backward(
            input_kwargs=batch, loss_fn=lambda o, _: o.loss, run_config=RoundPipeRunConfig(num_microbatch=1)
        )
        model.step(lambda: (optimizer.step(), optimizer.zero_grad()))  # asynchronous
        got = model.generate(**prompt(), max_new_tokens=5, pad_token_id=0, use_cache=False, **GREEDY)
        plain(**batch).loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        wanted = plain.generate(**prompt(), max_new_tokens=5, pad_token_id=0, use_cache=False, **GREEDY)
        assert torch.equal(got, wanted)
    model.synchronize()
    for (name, one), (_, other) in zip(hf_model.named_parameters(), plain.named_parameters(), strict=True):
        assert_close(one, other, name, 1e-4)


def test_a_cache_in_the_streamed_forward_is_refused_with_the_alternative():
    model = wrap_model_to_roundpipe(make_model("llama"))
    with torch.no_grad(), pytest.raises(roundpipe.errors.RoundPipeError, match=r"use_cache=True.*generate\(\)"):
        model(input_ids=prompt()["input_ids"], use_cache=True)


def test_generate_of_an_encoder_decoder():
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    torch.manual_seed(0)
    plain = transformers.T5ForConditionalGeneration(config).eval()
    torch.manual_seed(0)
    model = wrap_model_to_roundpipe(transformers.T5ForConditionalGeneration(config).eval(), lower_threshold=16)
    assert type(model) is AutoRoundPipe
    tokens = torch.arange(2, 14).view(2, 6)
    assert torch.equal(
        model.generate(input_ids=tokens, max_new_tokens=5, do_sample=False),
        plain.generate(input_ids=tokens, max_new_tokens=5, do_sample=False),
    )
