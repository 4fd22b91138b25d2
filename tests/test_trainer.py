"""RoundPipeTrainer beside the plain Trainer: the same losses, and a resumed run is the uninterrupted one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import roundpipe
from roundpipe import RoundPipeRunConfig
from roundpipe.errors import ConfigError

from .architectures import BY_NAME, NOT_AS_BLOCKS, VOCABULARY
from .test_models import with_lora

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
peft = pytest.importorskip("peft")
LLAMA = BY_NAME["Llama"]


@pytest.fixture(autouse=True)
def two_devices():
    roundpipe.use_devices("host:2")
    yield
    roundpipe.use_devices(None)


class Texts(torch.utils.data.Dataset):
    """Random tokens; every row ends in a different number of labels that do not count."""

    def __init__(self, rows: int, length: int = 8) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(3, VOCABULARY, (rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[row].clone()
        labels[len(labels) - row % 4 :] = -100
        return dict(input_ids=self.tokens[row], labels=labels)


def arguments(directory: Path, **options):
    defaults = dict(
        output_dir=str(directory),
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=7,
    )
    return transformers.TrainingArguments(**{**defaults, **options})


def trained(kind: type, directory: Path, model=None, checkpoint: str | None = None, config=None, **options):
    """(trainer, its log) after training."""
    keywords = {
        name: options.pop(name)
        for name in ("compute_metrics", "compute_loss_func", "callbacks", "optimizer_cls_and_kwargs")
        if name in options
    }
    if config is not None:
        keywords["run_config"] = config
    trainer = kind(
        model=LLAMA.make() if model is None else model,
        args=arguments(directory, **options),
        train_dataset=Texts(40),
        eval_dataset=Texts(10),
        **keywords,
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer, trainer.state.log_history


def assert_same_logs(got: list[dict], want: list[dict], relative: float = 1e-5) -> None:
    assert len(got) == len(want)
    compared = 0
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            if "runtime" in name or "per_second" in name or name == "total_flos":
                continue
            compared += 1
            assert one[name] == pytest.approx(value, rel=relative, abs=1e-7), (other["step"], name)
    assert compared > len(want)


def assert_same_weights(got: torch.nn.Module, want: torch.nn.Module, relative: float) -> None:
    others = want.state_dict()
    for name, value in got.state_dict().items():
        scale = others[name].abs().max().item()
        assert (value - others[name]).abs().max().item() <= relative * scale, name


def accuracy(prediction) -> dict[str, float]:
    hits = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(np.mean(hits)), "logit": float(np.abs(prediction.predictions).mean())}


@pytest.mark.parametrize("config", [None, RoundPipeRunConfig(num_microbatch=1)], ids=["3 pieces", "1 piece"])
def test_thirty_steps_are_those_of_the_plain_trainer(tmp_path, config):
    options = dict(
        max_steps=30,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        warmup_steps=5,
        weight_decay=0.1,
        eval_strategy="steps",
        eval_steps=10,
        compute_metrics=accuracy,
    )
    plain, wanted = trained(transformers.Trainer, tmp_path, **options)
    streamed, got = trained(roundpipe.hf.RoundPipeTrainer, tmp_path, config=config, **options)
    assert len([entry for entry in got if "loss" in entry]) == 30
    assert_same_logs(got, wanted, 1e-4)
    assert_same_weights(streamed.model, plain.model, 1e-3)


def test_adapters_train_as_under_the_plain_trainer(tmp_path):
    options = dict(max_steps=6, gradient_checkpointing=True)
    _, wanted = trained(transformers.Trainer, tmp_path, with_lora(LLAMA.make(), LLAMA), **options)
    streamed, got = trained(roundpipe.hf.RoundPipeTrainer, tmp_path, with_lora(LLAMA.make(), LLAMA), **options)
    assert_same_logs(got, wanted)
    streamed.save_model(str(tmp_path))
    again = peft.PeftModel.from_pretrained(LLAMA.make(), tmp_path)
    for name, value in again.state_dict().items():
        assert torch.equal(value, streamed.model.state_dict()[name]), name
    assert all(p.requires_grad == ("lora_" in n) for n, p in streamed.model.named_parameters())
    held = sum(state["exp_avg"].numel() for state in streamed.optimizer.state.values())
    assert held == sum(p.numel() for p in streamed.model.parameters() if p.requires_grad)


def doubled(kind: type) -> type:
    class Doubled(kind):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs) * 2

    return Doubled


@pytest.mark.parametrize("own", ["loss function", "subclass", "label smoothing", "balancing loss"])
def test_losses_of_ones_own(tmp_path, own):
    options: dict = dict(max_steps=4, gradient_accumulation_steps=2)
    kinds = [transformers.Trainer, roundpipe.hf.RoundPipeTrainer]
    model = LLAMA.make
    if own == "loss function":

        def compute_loss_func(outputs, labels, num_items_in_batch=None):
            logits = outputs.logits[:, :-1].flatten(0, 1)
            return (
                torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch
            )

        options["compute_loss_func"] = compute_loss_func
    elif own == "subclass":
        kinds = [doubled(kind) for kind in kinds]
    elif own == "label smoothing":
        options["label_smoothing_factor"] = 0.1
    else:
        # The balancing loss of a microbatch is not that of its batch, so each batch has one row.
        options.update(per_device_train_batch_size=1)
        model = lambda: BY_NAME["Qwen3-MoE"].make(output_router_logits=True, router_aux_loss_coef=0.1)  # noqa: E731
    (_, wanted), (_, got) = (trained(kind, tmp_path, model(), **options) for kind in kinds)
    assert_same_logs(got, wanted)


def test_mixed_precision(tmp_path):
    _, wanted = trained(transformers.Trainer, tmp_path, max_steps=4, bf16=True)
    _, got = trained(roundpipe.hf.RoundPipeTrainer, tmp_path, max_steps=4, bf16=True)
    assert_same_logs(got[:4], wanted[:4], 2e-2)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    options = dict(
        max_steps=24,
        save_strategy="steps",
        save_steps=13,
        lr_scheduler_type="linear",
        eval_strategy="steps",
        eval_steps=13,
    )

    def make():  # dropout needs the same random numbers, and weights of 16 bits masters that are finer
        return LLAMA.make(attention_dropout=0.3).bfloat16()

    whole, wanted = trained(roundpipe.hf.RoundPipeTrainer, tmp_path / "whole", make(), **options)
    checkpoint = str(tmp_path / "whole" / "checkpoint-13")
    again, got = trained(roundpipe.hf.RoundPipeTrainer, tmp_path / "again", make(), checkpoint, **options)
    assert_same_logs(got[:-1], wanted[:-1], 0.0)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value), name
    for one, other in zip(
        again.optimizer.param_groups[0]["params"], whole.optimizer.param_groups[0]["params"], strict=True
    ):
        assert one.dtype == torch.float32 and torch.equal(one, other)


def test_the_best_model_is_loaded_at_the_end(tmp_path):
    trainer, log = trained(
        roundpipe.hf.RoundPipeTrainer,
        tmp_path,
        max_steps=8,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        greater_is_better=True,  # so that the best model is not the last one
        metric_for_best_model="eval_loss",
    )
    best = max(entry["eval_loss"] for entry in log if "eval_loss" in entry)
    assert trainer.state.best_metric == best
    assert best > [entry["eval_loss"] for entry in log if "eval_loss" in entry][-1]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, rel=1e-6)
    again = transformers.AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert_same_weights(again, trainer.model, 0.0)


def test_a_wrapped_model_and_predictions(tmp_path):
    hf_model = LLAMA.make()
    wrapped = roundpipe.wrap_model_to_roundpipe(hf_model)
    trainer = roundpipe.hf.RoundPipeTrainer(model=wrapped, args=arguments(tmp_path))
    assert trainer.streamed is wrapped and trainer.model is hf_model
    plain = transformers.Trainer(model=LLAMA.make(), args=arguments(tmp_path))
    got, wanted = trainer.predict(Texts(6)), plain.predict(Texts(6))
    assert np.abs(got.predictions - wanted.predictions).max() <= 1e-5 * np.abs(wanted.predictions).max()
    assert got.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=1e-5)


def test_a_model_that_cannot_be_cut_is_refused(tmp_path):
    architecture = next(a for a in NOT_AS_BLOCKS if a.name == "CTRL")
    with pytest.raises(ConfigError, match="cannot be cut into layers"):
        roundpipe.hf.RoundPipeTrainer(model=architecture.make(), args=arguments(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(torch_compile=True), "torch_compile"),
        (dict(fsdp=True), "fsdp"),
        (dict(bf16_full_eval=True), "bf16_full_eval.*bf16=True"),
        (dict(fp16_full_eval=True), "fp16_full_eval.*fp16=True"),
    ],
)
def test_arguments_against_streaming_are_refused(tmp_path, options, message):
    args = arguments(tmp_path)
    for name, value in options.items():
        setattr(args, name, value)
    with pytest.raises(ConfigError, match=message):
        roundpipe.hf.RoundPipeTrainer(model=LLAMA.make(), args=args)


def test_without_transformers_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r'pip install "roundpipe\[hf\]"'):
        from roundpipe.hf import RoundPipeTrainer  # noqa: F401


def test_an_optimizer_of_the_host_weights_is_refused(tmp_path):
    model = LLAMA.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = roundpipe.hf.RoundPipeTrainer(
        model=model, args=arguments(tmp_path, max_steps=1), train_dataset=Texts(8), optimizers=(optimizer, None)
    )
    with pytest.raises(ConfigError, match="train nothing"):
        trainer.train()


@pytest.mark.parametrize("kind", [transformers.Trainer, transformers.Seq2SeqTrainer])
@pytest.mark.parametrize("parts", [False, True])
def test_the_plain_trainer_refuses_a_wrapped_model(kind: type, parts: bool, tmp_path: Path) -> None:
    options = dict(use_sequential_preset=False, lower_threshold=8, upper_threshold=0) if parts else {}
    model = roundpipe.wrap_model_to_roundpipe(LLAMA.make(), name="mine", **options)
    with pytest.raises(ConfigError, match=f"'mine' was given to .* {kind.__name__}, .*roundpipe.hf.RoundPipeTrainer"):
        kind(model=model, args=arguments(tmp_path), train_dataset=Texts(4))
    assert getattr(model, "hf_device_map", None) is None  # nobody is refused the attribute but a Trainer


def test_a_trainer_with_a_step_of_its_own_is_let_be(tmp_path: Path) -> None:
    class Mine(transformers.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            raise NotImplementedError

    model = roundpipe.wrap_model_to_roundpipe(LLAMA.make(), name="mine")
    assert Mine(model=model, args=arguments(tmp_path), train_dataset=Texts(4)).model is model


def test_a_trainer_that_only_evaluates_is_let_be(tmp_path: Path) -> None:
    model = roundpipe.wrap_model_to_roundpipe(LLAMA.make(), name="mine")
    seen = []

    def metrics(found):
        seen.append(found.predictions.shape)
        return {}

    trainer = transformers.Trainer(
        model=model,
        args=arguments(tmp_path, remove_unused_columns=False, label_names=["labels"]),
        eval_dataset=Texts(4),
        compute_metrics=metrics,
    )
    assert "eval_loss" in trainer.evaluate()
    assert len(seen) == 1 and seen[0][0] == 4
