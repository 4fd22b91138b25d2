"""`transformers.Trainer` whose model is streamed by RoundPipe. Everything else of the Trainer stays as it is."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import nn

import roundpipe
from roundpipe import RoundPipe, RoundPipeRunConfig, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError
from roundpipe.hf.batch_loss import BatchLoss
from roundpipe.hf.layers import PrefixLayer
from roundpipe.hf.mixin import check_mixin, without_foreign_forward
from roundpipe.hf.streamed_optimizer import StreamedOptimizer, compact_optimizer, is_compact_class
from roundpipe.optim.compact import CompactOptimizer
from roundpipe.roundpipe import AutoRoundPipe

__all__ = ["RoundPipeTrainer"]

logger = logging.getLogger(__name__)

MASTERS_NAME = "roundpipe_masters.safetensors"


class RoundPipeTrainer(transformers.Trainer):
    """Takes the arguments of `transformers.Trainer`, and two of its own.

    Args:
        roundpipe_kwargs: for `wrap_model_to_roundpipe` (`optim_dtype`, `pin_model`, ...). `optim_dtype` is float32
            unless given: weights of 16 bits are trained through masters of 32.
        run_config: defaults for every call (`num_microbatch`, `recompute_grain`, ...).

    `model` is a model of transformers or PEFT on the CPU, or one that is wrapped already. `self.model` stays the model
    itself; `self.streamed` is the wrapper. `optimizer_cls_and_kwargs` may name a class of `roundpipe.optim`, which then
    trains the weights in place (a compact optimizer; `master`, `state_dtype` and the like are among its options, those
    that are not given follow from `args`). Steps are exact: training goes as under the plain Trainer. Each batch is cut
    into microbatches, whose losses are weighted so that their sum is the loss of the batch. Whole logits are computed
    only where something needs them.

    Raises:
        ConfigError: an argument contradicts streaming (`torch_compile`, FSDP, DeepSpeed, several processes), or the
            model cannot be wrapped; the message says what to do.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *positional: Any,
        roundpipe_kwargs: Mapping[str, Any] | None = None,
        run_config: RoundPipeRunConfig | None = None,
        **kwargs: Any,
    ) -> None:
        self._roundpipe_kwargs = {"optim_dtype": torch.float32, **(roundpipe_kwargs or {})}
        self._run_config = run_config
        self._wrapper: RoundPipe | None = None
        self._loss_only = False
        self._call = (-1, 0)  # the training step, and which of its calls comes next
        self._inside_call = False
        self._scaler: Any = None
        args = transformers.TrainingArguments("tmp_trainer") if args is None else args
        _refuse(args)
        check_mixin(type(self), RoundPipeTrainer, args)
        if isinstance(model, RoundPipe):
            if roundpipe_kwargs or run_config:
                raise ConfigError(
                    f"the model {model.name!r} is wrapped already: give roundpipe_kwargs and run_config to "
                    "wrap_model_to_roundpipe, or give the Trainer the model itself"
                )
            self._wrapper = model
            model = model._naming_model()
        # One process drives all devices, and nothing here belongs to a single one of them.
        args._setup_devices  # noqa: B018  (a property that sets what the next line corrects)
        args._n_gpu = min(args._n_gpu, 1)
        if args.gradient_checkpointing:
            logger.info("gradient_checkpointing is left out: RoundPipe recomputes every stage but the last anyway")
            args.gradient_checkpointing = False
        # The Trainer counts parameters, which may well be the host's.
        warnings.filterwarnings("ignore", message=r".*outside roundpipe\.OptimizerCtx", module=r"transformers\.")
        super().__init__(model, args, *positional, **kwargs)
        self.streamed  # noqa: B018  (what cannot be wrapped is refused here, not hours later)

    @property
    def streamed(self) -> RoundPipe:
        """The wrapper around `self.model`, which `model_init` may have replaced."""
        if self._wrapper is None or self._wrapper._naming_model() is not self.model:
            without_foreign_forward(self.model)
            self._wrapper = wrap_model_to_roundpipe(
                self.model, model_run_config=self._run_config, name="trainer", **self._roundpipe_kwargs
            )
            if isinstance(self._wrapper, AutoRoundPipe):
                raise ConfigError(
                    f"{type(self.model).__name__} cannot be cut into layers, so forward and backward cannot be "
                    "streamed together; see docs/models.md for what can"
                )
        return self._wrapper

    # -- placement -----------------------------------------------------------------------------------------------
    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False  # batches stay on the host until their microbatch is computed
        # Older versions clip by this, newer ones by the method that is overridden below.
        self.accelerator.clip_grad_norm_ = lambda _, max_norm, *args, **kwargs: self.optimizer.clip_at_step(max_norm)
        if self.args.fp16:
            self._scaler = self.accelerator.scaler = roundpipe.GradScaler()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The model stays in host memory."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        return self.streamed

    def _prepare_input(self, data: Any) -> Any:
        return data

    @contextlib.contextmanager
    def _call_environment(self) -> Iterator[None]:
        """Mixed precision as the arguments want it, and random numbers of the Trainer's own: what a streamed call draws
        must not move the generator that shuffles the data. In training they follow from seed, step and call, so that a
        resumed run draws what the uninterrupted one did."""
        if self._inside_call:
            yield
            return
        generator = torch.default_generator
        state = generator.get_state()
        if self.model.training:
            step = self.state.global_step
            self._call = (step, self._call[1] + 1 if self._call[0] == step else 0)
            generator.manual_seed(hash((self.args.seed, *self._call)) & (2**63 - 1))
        kind = "cuda" if any(device.kind == "cuda" for device in roundpipe.devices()) else "cpu"
        dtype = torch.float16 if self.args.fp16 else torch.bfloat16
        self._inside_call = True
        try:
            with torch.autocast(kind, dtype=dtype, enabled=bool(self.args.fp16 or self.args.bf16)):
                yield
        finally:
            self._inside_call = False
            generator.set_state(state)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; afterwards the weights of `self.model` are the newest."""
        output = super().train(*args, **kwargs)
        self.streamed.synchronize()
        return output

    # -- steps ---------------------------------------------------------------------------------------------------
    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        streamed = self.streamed
        streamed.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        if type(self).compute_loss is not RoundPipeTrainer.compute_loss:
            # A loss of the user's own, computed on merged outputs; autograd brings its gradients to the last stage.
            with self._call_environment():
                return super().training_step(streamed, inputs, num_items_in_batch).to(self.args.device)
        batch = self._batch_loss(self._prepare_inputs(inputs), num_items_in_batch)
        share = 1.0 if batch.is_share_of_window else 1.0 / self.current_gradient_accumulation_steps
        scaler = self._scaler

        def loss_fn(output: Any, label: Any) -> Any:
            loss = batch(output, label) * share
            return loss if scaler is None else [scaler.scale(loss), loss.detach()]

        with self._call_environment():
            loss = streamed.forward_backward(
                input_kwargs=batch.kwargs(return_logits=False),
                label=batch.label,
                loss_fn=loss_fn,
                run_config=self._pieces(batch.rows),
            )
        return (loss if scaler is None else loss[1]).to(self.args.device)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch without its backward, for evaluation and for overrides; `training_step` does not come
        here unless a subclass overrides this."""
        if model is not self._wrapper:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        batch = self._batch_loss(inputs, num_items_in_batch)
        needs_logits = return_outputs and not self._loss_only
        config = self._pieces(batch.rows)
        pieces = config.num_microbatch
        with self._call_environment():
            packed = model(
                **batch.kwargs(return_logits=needs_logits),
                roundpipe_run_config=replace(config, merge_output=lambda outputs: list(outputs)),
            )
        outputs = [packed] if pieces == 1 else packed
        loss = batch.total(outputs)
        merged = roundpipe.batch.merge_outputs(outputs, None)
        if isinstance(merged, dict):
            merged["loss"] = loss
        return (loss, _in_float32(merged)) if return_outputs else loss

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> Any:
        self._loss_only = prediction_loss_only
        try:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._loss_only = False

    def _batch_loss(self, inputs: dict[str, Any], num_items_in_batch: Any) -> BatchLoss:
        return BatchLoss(
            dict(inputs),
            num_items_in_batch,
            accepts_count=self.model_accepts_loss_kwargs,
            shifts=getattr(self, "_loss_shifts_labels", True),
            custom=self.compute_loss_func,
            smoother=self.label_smoother,
            aux_coefficient=float(getattr(self.model, "router_aux_loss_coef", 0.0) or 0.0),
            can_leave_logits_out=isinstance(self.streamed.layers[0], PrefixLayer),
        )

    def _pieces(self, rows: int) -> RoundPipeRunConfig:
        config = self.streamed._config
        wanted = config.num_microbatch or len(roundpipe.devices()) + 1
        return replace(config, num_microbatch=max(1, min(wanted, rows)))

    # -- optimizer -----------------------------------------------------------------------------------------------
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if isinstance(self.optimizer, StreamedOptimizer):
            return self.optimizer
        given = self.optimizer
        if given is None:
            kind, options = self.optimizer_cls_and_kwargs or (None, None)
            names = self.get_decay_parameter_names(self.model)
            if is_compact_class(kind):
                given = compact_optimizer(kind, options, self.streamed, self.args, names)
            else:
                given = self._created_from_view(names)
        self.optimizer = StreamedOptimizer(given, self.streamed, self._scaler)
        return self.optimizer

    def _created_from_view(self, decayed: list[str]) -> torch.optim.Optimizer:
        """As the Trainer makes it, but from the optimizer's parameters. (Older versions take no model.)"""
        model, view = self.model, _OptimizerView(self.streamed)
        self.get_decay_parameter_names = lambda _: decayed  # type: ignore[method-assign]
        self.model = view
        try:
            return super().create_optimizer()
        finally:
            self.model = model
            del self.get_decay_parameter_names

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        return self.optimizer.clip_at_step(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """A tensor that the step will fill: the gradients are complete only there."""
        return self.optimizer.clip_at_step(float("inf")) if grad_norm is None else grad_norm

    # -- checkpoints ---------------------------------------------------------------------------------------------
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        self.streamed.synchronize()
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        finer = self._masters()
        if finer and self.args.should_save:
            from safetensors.torch import save_file

            save_file(finer, os.path.join(output_dir, MASTERS_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        path = None if checkpoint is None else os.path.join(checkpoint, MASTERS_NAME)
        if path is not None and os.path.isfile(path):
            from safetensors.torch import load_file

            self.streamed.synchronize()  # masters follow the weights that were loaded; the finer values go over them
            saved = load_file(path)
            with torch.no_grad():
                for name, master in self._masters().items():
                    if name in saved:
                        master.copy_(saved[name])

    def _masters(self) -> dict[str, torch.Tensor]:
        """The optimizer's parameters that are finer than the weights they belong to."""
        if isinstance(self.optimizer.inner, CompactOptimizer):
            return {}  # its own state holds them
        weights = dict(self.model.named_parameters())
        return {
            name: master.detach()
            for name, master in self.streamed.optim_named_parameters()
            if master.dtype != weights[name].dtype
        }


class _OptimizerView(nn.Module):
    """What the Trainer builds its optimizer from: the optimizer's parameters under the model's names."""

    def __init__(self, streamed: RoundPipe) -> None:
        super().__init__()
        self._named = list(streamed.optim_named_parameters())

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        return iter(self._named)

    def parameters(self, recurse: bool = True) -> Any:
        return (parameter for _, parameter in self._named)


def _in_float32(output: Any) -> Any:
    """Outputs of mixed precision as accelerate gives them."""
    if isinstance(output, dict):
        for name, value in output.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                output[name] = value.float()
    return output


def _refuse(args: transformers.TrainingArguments) -> None:
    for name, remedy in (
        ("torch_compile", 'leave it out, and give roundpipe_kwargs={"compile": True}'),
        ("fsdp", "RoundPipe streams the model itself"),
        ("deepspeed", "RoundPipe streams the model itself"),
        ("fp16_full_eval", "it would cast the weights that are trained; fp16=True evaluates in float16 by autocast"),
        ("bf16_full_eval", "it would cast the weights that are trained; bf16=True evaluates in bfloat16 by autocast"),
    ):
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments({name}=...) cannot be used with RoundPipeTrainer: {remedy}")
    if args.world_size > 1:
        raise ConfigError(
            f"RoundPipeTrainer runs in one process that drives all GPUs, but there are {args.world_size}; start it "
            "with python, not with torchrun or accelerate launch"
        )
