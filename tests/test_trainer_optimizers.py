"""RoundPipeTrainer with compact optimizers: the plain Trainer's steps, and resuming that is exact."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe import _ops
from roundpipe import engine as engines
from roundpipe.errors import ConfigError
from roundpipe.optim.compact import CompactOptimizer

from .test_models import with_lora
from .test_trainer import LLAMA, Texts, arguments, assert_same_logs, assert_same_weights, trained, two_devices

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

__all__ = ["two_devices"]  # a fixture

PLAIN, STREAMED = transformers.Trainer, roundpipe.hf.RoundPipeTrainer
LOOP = dict(gradient_accumulation_steps=2, max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=5)


def compact(kind: type = roundpipe.optim.AdamW, **options):
    return dict(optimizer_cls_and_kwargs=(kind, options))


def test_thirty_steps_are_those_of_the_plain_trainer(tmp_path):
    options = dict(max_steps=30, weight_decay=0.1, adam_beta2=0.95, **LOOP)
    plain, wanted = trained(PLAIN, tmp_path, **options)
    streamed, got = trained(STREAMED, tmp_path, **options, **compact())
    assert isinstance(streamed.optimizer.inner, CompactOptimizer)
    assert [group["weight_decay"] for group in streamed.optimizer.param_groups] == [0.1, 0.0]
    assert len([entry for entry in got if "grad_norm" in entry]) == 30
    assert_same_logs(got, wanted, 1e-4)
    assert_same_weights(streamed.model, plain.model, 1e-3)


@pytest.mark.parametrize(
    ("kind", "plain_kind", "numbers"),
    [(roundpipe.optim.SGD, torch.optim.SGD, dict(lr=0.3, momentum=0.9)), (roundpipe.optim.Adam, torch.optim.Adam, {})],
)
def test_other_optimizers_and_no_clipping(tmp_path, kind, plain_kind, numbers):
    options = dict(max_steps=6, max_grad_norm=0.0)
    plain, wanted = trained(PLAIN, tmp_path, **options, optimizer_cls_and_kwargs=(plain_kind, {"lr": 1e-2, **numbers}))
    streamed, got = trained(STREAMED, tmp_path, **options, **compact(kind, **numbers))
    assert_same_logs(got, wanted, 1e-4)
    assert_same_weights(streamed.model, plain.model, 1e-3)


def test_split_masters_train_as_a_float32_copy(tmp_path):
    options = dict(max_steps=12, **LOOP)
    _, wanted = trained(STREAMED, tmp_path, LLAMA.make().bfloat16(), **options)
    streamed, got = trained(STREAMED, tmp_path, LLAMA.make().bfloat16(), **options, **compact())
    # The same gradients and float32 arithmetic, but a tie between two bfloat16 numbers is rounded otherwise.
    assert_same_logs(got, wanted, 1e-2)
    weights = streamed.model.state_dict()
    for name, master in streamed.optimizer.inner.named_masters():
        assert (master - weights[name].float()).abs().max() <= 2.0**-8 * master.abs().max(), name
        assert not torch.equal(master, weights[name].float()), name


def test_weights_are_complete_when_training_ends_though_steps_do_not_wait(tmp_path):
    """Nothing is logged, so that nobody asked for a norm."""
    options = dict(max_steps=3, logging_strategy="no")
    plain, _ = trained(PLAIN, tmp_path, **options)
    roundpipe.use_devices("host:1")
    engine = engines.current()
    _ops.engine_inject(engine.handle, "delay", 1, 20_000)  # gradients come late, and with them the updates
    try:
        streamed, _ = trained(STREAMED, tmp_path, **options, **compact())
        weights = {name: value.clone() for name, value in streamed.model.state_dict().items()}
    finally:
        _ops.engine_inject(engine.handle, "delay", 1, 0)
    for name, value in plain.model.state_dict().items():
        assert (weights[name] - value).abs().max() <= 1e-3 * value.abs().max(), name


def test_adapters_alone(tmp_path):
    options = dict(max_steps=4)
    _, wanted = trained(PLAIN, tmp_path, with_lora(LLAMA.make(), LLAMA), **options)
    streamed, got = trained(STREAMED, tmp_path, with_lora(LLAMA.make(), LLAMA), **options, **compact())
    assert_same_logs(got, wanted)
    held = sum(state["exp_avg"].numel() for state in streamed.optimizer.state.values())
    assert held == sum(p.numel() for p in streamed.model.parameters() if p.requires_grad)


@pytest.mark.parametrize("formats", [{}, dict(state_dtype="int8"), dict(master="float32", state_dtype="bfloat16")])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, formats):
    options = dict(max_steps=12, save_strategy="steps", save_steps=7, **LOOP)

    def make():
        return LLAMA.make(attention_dropout=0.3).bfloat16()

    whole, wanted = trained(STREAMED, tmp_path / "whole", make(), **options, **compact(**formats))
    checkpoint = str(tmp_path / "whole" / "checkpoint-7")
    again, got = trained(STREAMED, tmp_path / "again", make(), checkpoint, **options, **compact(**formats))
    assert_same_logs(got[:-1], wanted[:-1], 0.0)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    masters = dict(again.optimizer.inner.named_masters())
    for name, master in whole.optimizer.inner.named_masters():
        assert torch.equal(masters[name], master), name


class Scaled(STREAMED):
    """The arguments refuse fp16 without a GPU, so the scaler is put where the Trainer puts it."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._scaler = self.accelerator.scaler = roundpipe.GradScaler()


@pytest.mark.parametrize("optimizer", [compact(), {}], ids=["compact", "copy"])
def test_scaled_losses_change_nothing(tmp_path, optimizer):
    options = dict(max_steps=4, max_grad_norm=0.5)
    _, wanted = trained(STREAMED, tmp_path, **options, **optimizer)
    _, got = trained(Scaled, tmp_path, **options, **optimizer)
    # Powers of two scale exactly; the norm of the scaled gradients is summed in float32 on the copy's way.
    assert_same_logs(got, wanted, 1e-5)


@pytest.mark.parametrize("optimizer", [compact(), {}], ids=["compact", "copy"])
def test_gradients_that_are_not_finite_skip_the_step(tmp_path, optimizer):
    model = LLAMA.make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.lm_head.weight.register_hook(lambda grad: grad * float("inf"))
    trainer, _ = trained(Scaled, tmp_path, model, max_steps=1, **optimizer)
    assert trainer._scaler.get_scale(up_to_date=True) == 2.0**15
    for name, value in trainer.streamed.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_an_optimizer_that_was_made_by_hand(tmp_path):
    wrapped = roundpipe.wrap_model_to_roundpipe(LLAMA.make())
    optimizer = roundpipe.optim.AdamW(wrapped, lr=1e-2, weight_decay=0.0)
    options = dict(args=arguments(tmp_path, max_steps=3), train_dataset=Texts(40))
    trainer = STREAMED(model=wrapped, optimizers=(optimizer, None), **options)
    trainer.train()
    _, wanted = trained(PLAIN, tmp_path, max_steps=3)
    assert_same_logs(trainer.state.log_history, wanted)
    other = STREAMED(model=LLAMA.make(), optimizers=(optimizer, None), **options)
    with pytest.raises(ConfigError, match="was made for the model"):
        other.train()
