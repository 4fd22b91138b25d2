"""TRL's SFTTrainer with RoundPipeTrainer in front of it."""

from __future__ import annotations

import pytest
import torch

import roundpipe
from roundpipe.errors import ConfigError

from .test_trainer import LLAMA, VOCABULARY, assert_same_weights, two_devices

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
STREAMED = roundpipe.hf.RoundPipeTrainer
__all__ = ["two_devices"]  # a fixture


def test_a_loss_behind_the_streamed_trainer_is_never_passed_over(tmp_path):
    class Own(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            return 2 * super().compute_loss(*args, **kwargs)

    class Mixed(STREAMED, Own):
        pass

    with pytest.raises(ConfigError, match=r"in front of Own, whose own loss would not be used.*compute_loss_func"):
        Mixed(model=LLAMA.make(), args=transformers.TrainingArguments(str(tmp_path), use_cpu=True))


def test_losses_of_sft_that_are_not_the_models_are_refused(tmp_path):
    class SFTTrainer(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            raise AssertionError

    class Mixed(STREAMED, SFTTrainer):
        pass

    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    args.loss_type = "dft"
    with pytest.raises(ConfigError, match="loss_type='dft'"):
        Mixed(model=LLAMA.make(), args=args)


def _sft(kind: type, directory, model, **options):
    import datasets
    import tokenizers
    import trl

    words = {str(i): i for i in range(VOCABULARY)}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")),
        eos_token="1",
        pad_token="2",
        unk_token="0",
    )
    lengths = torch.arange(40) % 4 + 5
    tokens = torch.randint(3, VOCABULARY, (40, 8), generator=torch.Generator().manual_seed(5))
    rows = [{"input_ids": row[:length].tolist()} for row, length in zip(tokens, lengths, strict=True)]
    args = trl.SFTConfig(
        str(directory),
        per_device_train_batch_size=4,
        max_steps=6,
        logging_steps=1,
        learning_rate=1e-2,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=7,
    )
    data = datasets.Dataset.from_list(rows)
    trainer = kind(
        model=model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(10)),
        processing_class=tokenizer,
        **options,
    )
    trainer.train()
    return trainer, [trainer.evaluate()["eval_loss"], *trainer.state.log_history]


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
def test_sft_is_that_of_the_plain_one(tmp_path, adapters):
    trl = pytest.importorskip("trl")
    peft = pytest.importorskip("peft")

    class RoundPipeSFTTrainer(STREAMED, trl.SFTTrainer):
        pass

    options = dict(peft_config=peft.LoraConfig(r=4, target_modules=LLAMA.lora)) if adapters else {}
    torch.manual_seed(0)
    plain, wanted = _sft(trl.SFTTrainer, tmp_path, LLAMA.make(), **options)
    torch.manual_seed(0)
    streamed, got = _sft(RoundPipeSFTTrainer, tmp_path, LLAMA.make(), **options)
    assert got[0] == pytest.approx(wanted[0], rel=1e-4)
    compared = 0
    for one, other in zip(got[1:], wanted[1:], strict=True):
        for name in {"loss", "grad_norm", "learning_rate", "eval_loss"} & other.keys():
            assert float(one[name]) == pytest.approx(float(other[name]), rel=1e-4), name
            compared += 1
    assert compared == 19
    if not adapters:
        assert_same_weights(streamed.model, plain.model, 1e-3)
