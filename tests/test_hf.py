"""A converted causal language model computes what the model itself computes: logits, loss and every gradient."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
from torch import nn

from roundpipe.hf import causal_lm_to_sequential, is_causal_lm

from .causal_models import CONFIGS, SIZES, assert_close, grads, make_batch, make_model, run_layers, transformers


def check_against_plain(family, attention, tied, batch, relative=1e-6, **kwargs):
    plain = make_model(family, attention, tied)
    wanted = plain(**batch)
    wanted.loss.backward()

    model = make_model(family, attention, tied)
    sequential = causal_lm_to_sequential(model)
    got = run_layers(sequential, **batch, **kwargs)
    got.loss.backward()

    assert type(got) is type(wanted)
    assert_close(got.loss, wanted.loss, "loss", relative)
    if kwargs.get("return_logits", True):
        assert_close(got.logits, wanted.logits, "logits", relative)
    else:
        assert got.logits is None
    for name, grad in grads(plain).items():
        assert_close(grads(model)[name], grad, name, relative)
    return model, sequential


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "mistral"])
def test_equals_plain_model(family, attention, padding, tied):
    check_against_plain(family, attention, tied, make_batch(padding=padding))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_loss_without_logits_equals_plain_model(family):
    # gemma2 caps its logits before the loss: they are computed whole, and still not returned.
    check_against_plain(family, "eager", True, make_batch(padding="left"), 3e-6, return_logits=False)


def test_layers_hold_the_models_own_parameters_once():
    model = make_model("llama", tied=True)
    sequential = causal_lm_to_sequential(model)
    assert len(sequential) == model.config.num_hidden_layers + 2
    assert {id(p) for p in sequential.parameters()} == {id(p) for p in model.parameters()}
    owners: dict[int, set[int]] = {}
    for index, layer in enumerate(sequential):
        for parameter in layer.parameters():
            owners.setdefault(id(parameter), set()).add(index)
    names = {id(p): name for name, p in model.named_parameters()}
    shared = {names[key]: layers for key, layers in owners.items() if len(layers) > 1}
    assert shared == {"model.embed_tokens.weight": {0, len(sequential) - 1}}
    assert [b.block for b in sequential[1:-1]] == list(model.model.layers)


def test_conversion_leaves_model_and_generator_as_they_were():
    model = make_model("qwen3")
    batch = make_batch()
    before = model(**batch)
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    state = torch.get_rng_state()
    causal_lm_to_sequential(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert hooks == [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    assert torch.equal(model(**batch).logits, before.logits)


def test_embeddings_and_position_ids_are_followed():
    model = make_model("llama")
    sequential = causal_lm_to_sequential(model)
    embeds = torch.randn(2, 7, SIZES["hidden_size"], requires_grad=True)
    positions = torch.arange(5, 12).expand(2, 7)
    wanted = model(inputs_embeds=embeds, position_ids=positions).logits
    (wanted_grad,) = torch.autograd.grad(wanted.square().sum(), embeds)
    got = run_layers(sequential, inputs_embeds=embeds, position_ids=positions).logits
    (got_grad,) = torch.autograd.grad(got.square().sum(), embeds)
    assert_close(got, wanted, "logits")
    assert_close(got_grad, wanted_grad, "gradient of the embeddings")


def test_positional_arguments_tuple_output_and_item_count():
    model = make_model("qwen3")
    sequential = causal_lm_to_sequential(model)
    batch = make_batch()
    loss, logits = run_layers(sequential, **batch, return_dict=False, num_items_in_batch=torch.tensor(7.0))
    wanted = model(**batch, num_items_in_batch=torch.tensor(7.0))
    assert_close(loss, wanted.loss, "loss")
    assert_close(logits, wanted.logits, "logits")
    state = sequential[0](batch["input_ids"])
    for layer in sequential[1:]:
        state = layer(state)
    assert state.loss is None
    assert_close(state.logits, wanted.logits, "logits")
    short = run_layers(sequential, input_ids=batch["input_ids"], logits_to_keep=2).logits
    assert_close(short, wanted.logits[:, -2:], "logits_to_keep")
    chunked = run_layers(sequential, **batch, return_logits=False, num_items_in_batch=7)
    assert_close(chunked.loss, wanted.loss, "chunked loss with an item count")


def test_state_between_layers_keeps_constants_and_holds_plain_tensors():
    sequential = causal_lm_to_sequential(make_model("qwen2"))
    state = sequential[0](**make_batch(padding="left"))
    following = sequential[1](state)
    assert all(a is b for a, b in zip(state[1], following[1], strict=True))
    assert all(isinstance(t, torch.Tensor) and not t.requires_grad for t in state[1])
    leaves = [leaf for call in (*state[3].blocks, state[3].head) for leaf in call.leaves]
    assert not any(isinstance(leaf, torch.Tensor) for leaf in leaves)


def test_constants_may_live_elsewhere_than_where_they_were_made():
    # A later layer must use the tensors of the tuple it is given, never ones remembered from the prefix.
    model = make_model("llama", "eager")
    sequential = causal_lm_to_sequential(model)
    batch = make_batch(padding="left")
    wanted = model(**batch).logits
    hidden, constants, _, plan = sequential[0](**batch)
    state = (hidden.clone(), tuple(c.clone() for c in constants), (), plan)
    for constant in constants:
        constant.fill_(float("nan") if constant.is_floating_point() else 0)
    for layer in sequential[1:]:
        state = layer(state)
    assert_close(state.logits, wanted, "logits")


def test_replicas_in_threads_do_not_meet():
    sequential = causal_lm_to_sequential(make_model("llama"))
    batches = [make_batch(rows=2, length=5 + i, padding=[None, "left"][i % 2]) for i in range(4)]
    wanted = [run_layers(sequential, **batch).logits.detach() for batch in batches]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(10):
                assert torch.equal(run_layers(sequential, **batches[index]).logits, wanted[index])
        except BaseException as error:  # reported by the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]


def test_dropout_follows_train_and_eval():
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS["llama"](**SIZES, attention_dropout=0.5))
    sequential = causal_lm_to_sequential(model)
    batch = make_batch()
    sequential.train()
    assert not torch.equal(run_layers(sequential, **batch).logits, run_layers(sequential, **batch).logits)
    sequential.eval()
    assert torch.equal(run_layers(sequential, **batch).logits, run_layers(sequential, **batch).logits)


def test_deepcopy_of_the_layers_computes_the_same():
    sequential = causal_lm_to_sequential(make_model("qwen3", tied=True))
    batch = make_batch()
    twin = copy.deepcopy(sequential)
    assert torch.equal(run_layers(twin, **batch).logits, run_layers(sequential, **batch).logits)
    assert len(list(twin.parameters())) == len(list(sequential.parameters()))


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (dict(use_cache=True), ValueError, "use_cache"),
        (dict(output_hidden_states=True), NotImplementedError, "output_hidden_states"),
        (dict(return_logits=False), ValueError, "labels"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(kwargs, error, message):
    sequential = causal_lm_to_sequential(make_model("llama"))
    with pytest.raises(error, match=message):
        sequential[0](input_ids=make_batch()["input_ids"], **kwargs)


def test_trunk_that_computes_between_blocks_is_refused():
    model = make_model("llama")
    forward = type(model.model).forward

    class Doubling(type(model.model)):
        def forward(self, *args, **kwargs):
            self.layers[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2, *inputs[1:]))
            return forward(self, *args, **kwargs)

    model.model.__class__ = Doubling
    with pytest.raises(NotImplementedError, match="between block 0 and block 1"):
        causal_lm_to_sequential(model)[0](input_ids=make_batch()["input_ids"])


def test_a_trunk_may_ask_which_kind_a_block_is():
    """As trunks of mixed blocks do, to choose the mask that a block gets."""
    plain_forward = transformers.LlamaModel.forward
    asked = []

    class Asking(transformers.LlamaModel):
        @functools.wraps(plain_forward)
        def forward(self, *args, **kwargs):
            kinds = {type(block).__name__ for block in self.layers if isinstance(block, Special)}
            asked.append([isinstance(block, Special) for block in self.layers])
            assert all("Special" in kind for kind in kinds)
            return plain_forward(self, *args, **kwargs)

    model = make_model("llama")
    plain_logits = model(**make_batch()).logits

    class Special(type(model.model.layers[0])):
        def __init__(self) -> None:
            raise AssertionError("a stub is made without the block's own constructor")

        def __call__(self, *args, **kwargs):
            return super().__call__(*args, **kwargs)

    model.model.layers[1].__class__ = Special
    model.model.__class__ = Asking
    assert torch.equal(run_layers(causal_lm_to_sequential(model), **make_batch()).logits, plain_logits)
    assert len(asked) >= 4  # both probes, prefix and head; the head's trunk has stubs too
    assert all(kinds in ([False, True, False], []) for kinds in asked)


def test_only_causal_language_models_are_taken():
    assert is_causal_lm(make_model("llama"))
    assert not is_causal_lm(make_model("llama").model)
    assert not is_causal_lm(nn.Sequential(nn.Linear(2, 2)))
