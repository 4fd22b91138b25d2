"""``RoundPipe``: a model whose weights stay in host memory and are streamed to the devices, stage by stage."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import engine as engines
from . import runs, spans
from .arguments import check_bool, check_state_dict, keyword_arguments
from .call_site import asked_by_user, caller_level
from .compiled import compile_layers
from .construction import check_arguments, claim_weights
from .copying import contents, rebuild
from .errors import ConfigError, ConfigTypeError
from .grad_scaler import GradScaler
from .layer_list import PassedBy, layers_of, warn_of_one_layer
from .loss_call import check_loss_fn, output_as_loss
from .optim.compact import CompactOptimizer
from .optimizer_context import in_optimizer_context
from .optimizer_thread import thread as optimizer_thread
from .ownership import owners
from .plain_trainer import ASKED_FOR, refuse_plain_trainer
from .run_config import ResolvedConfig, RoundPipeRunConfig, resolve
from .training_state import TrainingState
from .weight_placement import place

# Methods of models of transformers and PEFT that read all weights, which an asynchronous step may not have published.
_READ_WEIGHTS = frozenset({"generate", "merge_and_unload", "push_to_hub", "save_pretrained"})
_OWN_ATTRIBUTES = frozenset({"model", "layers", "num_layers", "name", "original_model", "training"})


class RoundPipe(nn.Module):
    """Wraps a model for training in stages that are streamed round-robin over the devices.

    Args:
        model: an ``nn.Sequential`` (its children are the layers) or any other module (one layer), on the CPU. Its
            parameters are placed as ``pin_model`` says; the Parameter objects stay the same.
        optim_dtype: dtype of the optimizer's copy of the parameters; None: the weights' own.
        name: for messages; default ``file:line`` of the construction.
        model_run_config: defaults for every call.
        pin_model: where weights live on the host. "alloc": they are copied, layer by layer, into exact-size pinned
            memory. "register": they stay where they are, and their memory is page-locked. "off": they stay where they
            are, pageable or mapped from a file, and go up through a few pinned buffers; a frozen model may be larger
            than the memory. "auto": the first of the three that fits, with a log line why.
        compile: True: each layer is compiled (``layer.compile()``); a dict: with these options of ``torch.compile``.
            Layers that are compiled already, and those made of modules of torch.nn alone, stay as they are.

    Attributes that the wrapper does not have are read, written and deleted on the wrapped model. Wrapping the same
    model again, as a notebook cell does that is run twice, ends the wrapper before: using that one is an error then.

    Raises:
        ConfigError, ConfigTypeError: the model or an argument cannot be used; the message says what to do.
        HostOutOfMemory: there is not enough host memory to place the weights; they are in ordinary memory then.
    """

    def __init__(
        self,
        model: nn.Module,
        optim_dtype: torch.dtype | None = None,
        name: str | None = None,
        model_run_config: RoundPipeRunConfig | None = None,
        pin_model: str = "alloc",
        compile: bool | Mapping[str, Any] = False,
    ) -> None:
        super().__init__()
        config = check_arguments(model, optim_dtype, name, model_run_config, pin_model, compile)
        layers = layers_of(model)
        if asked_by_user():
            warn_of_one_layer(model)
        claim_weights(self, name, [(f"{i}.{n}", p) for i, x in enumerate(layers) for n, p in x.named_parameters()])
        with owners.released_on_failure(self):
            state = place(layers, optim_dtype, pin_model, self.name)
            compile_layers(layers, compile)
        self.__dict__["_compile"] = compile
        self._set_up(model, state, threading.RLock(), self.name, config)

    def _set_up(self, model: nn.Module, state: Any, lock: Any, name: str, config: RoundPipeRunConfig) -> None:
        """``lock``: one call at a time takes tickets and changes the window."""
        own = self.__dict__
        own.update(_lock=lock, _state=state, _config=config, name=name)
        own["layers"] = state.layers
        own["num_layers"] = len(state.layers)
        own["original_model"] = None
        own["training"] = model.training
        own["_modules"]["model"] = model
        own["_passed_by"] = self._find_passed_by(model)

    def _find_passed_by(self, *models: nn.Module) -> PassedBy:
        return PassedBy(models, self.layers)

    # -- running -------------------------------------------------------------------------------------------------
    def forward(self, *args: Any, roundpipe_run_config: RoundPipeRunConfig | None = None, **kwargs: Any) -> Any:
        """The model's output for a batch, merged from its microbatches, on the configured device (default: the CPU).

        With gradients enabled the output takes part in autograd: ``backward`` on what is computed from it runs the
        backward stages, adds to the gradients that the next ``step`` takes, and gives gradients to the inputs that
        require them. Under ``torch.no_grad()`` it uses the newest weights that are complete; call ``synchronize()``
        first to have those of a step that still runs. Returns when the outputs are on the host.
        """
        if torch.compiler.is_compiling():  # a part of what the caller has compiled
            return _outside_graphs(self._forward, args, roundpipe_run_config, kwargs)
        return self._forward(args, roundpipe_run_config, kwargs)

    def _forward(self, args: tuple[Any, ...], run_config: RoundPipeRunConfig | None, kwargs: dict[str, Any]) -> Any:
        self._passed_by.check()
        with self._entered(), spans.span("call", "forward"):
            config = self._resolve(run_config)
            if config.requires_grad:
                return runs.forward(self._state, self._entered, config, args, kwargs)
            return runs.infer(self._state, config, args, kwargs)

    def forward_backward(
        self,
        input_args: tuple[Any, ...] = (),
        input_kwargs: Mapping[str, Any] | None = None,
        label: Any = None,
        loss_fn: Callable[[Any, Any], Any] = output_as_loss,
        return_outputs: bool = False,
        run_config: RoundPipeRunConfig | None = None,
        step: CompactOptimizer | None = None,
    ) -> Any:
        """Forward, loss and backward of one batch.

        Args:
            input_args: positional arguments of the first layer, split into microbatches.
            input_kwargs: keyword arguments of the first layer, likewise.
            label: a tree, split like the arguments. No gradient reaches it.
            loss_fn: ``loss_fn(output, label)`` of one microbatch, called on its device; one-element tensor, or a list.
            return_outputs: also give the merged outputs.
            run_config: overrides the model's.
            step: a compact optimizer, whose exact step belongs to this call: it takes the gradients of this and all
                earlier calls of the window, updates each layer as soon as its gradients are complete, while lower
                layers still compute, and reads every hyperparameter before this returns. Do not call ``step`` after it.
                Not with ``max_grad_norm`` or a loss scale, which ask for all gradients first. The call computes with
                the newest weights: what an asynchronous step before it left is published first.

        Returns:
            The sum of the microbatch losses on the CPU (a list of sums if ``loss_fn`` returns several), or
            ``(loss, outputs)``. Gradients accumulate until the next ``step``. Returns when losses, outputs and input
            gradients are on the host; backward may still run, and what fails there is raised by the next call.

        Raises:
            RuntimeError: gradients are disabled.
            ConfigError, SplitError, PlanError: the arguments cannot be used; nothing was run.
            StageError, DeviceOutOfMemory, HostOutOfMemory: a layer or ``loss_fn`` failed; this call's gradients are
                dropped, those of earlier calls of the window are kept, and the next call works.
            PartialStepError: with ``step``, after some layers had been updated; all gradients are dropped.
        """
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "forward_backward was called with gradients disabled (torch.no_grad or inference_mode); call the model "
                "itself for inference, or leave the no_grad block"
            )
        if not isinstance(input_args, tuple):
            raise ConfigTypeError(
                f"forward_backward(input_args=...): got {type(input_args).__name__}, expected a tuple of positional "
                "arguments; write (x,) for a single one"
            )
        check_loss_fn(loss_fn)
        if step is not None:
            if not isinstance(step, CompactOptimizer):
                raise ConfigTypeError(
                    f"forward_backward(step=...): got {type(step).__name__}, expected an optimizer made for this model "
                    "by roundpipe.optim.AdamW(model, ...) or its like"
                )
            self._check_own(step)
        self._passed_by.check()
        with self._entered(), spans.span("call", "forward_backward"):
            return runs.train(
                self._state,
                self._resolve(run_config),
                input_args,
                keyword_arguments("forward_backward(input_kwargs=...)", input_kwargs),
                label,
                loss_fn,
                check_bool("forward_backward(return_outputs=...)", return_outputs),
                step,
            )

    def step(
        self, step_fn: Callable[..., Any] | CompactOptimizer, is_async: bool = True, *args: Any, **kwargs: Any
    ) -> None:
        """Takes a step of a compact optimizer, or runs ``step_fn(*args, **kwargs)`` on the optimizer thread, once the
        gradients are there.

        A compact optimizer (``roundpipe.optim.AdamW(model, ...)``) reads all its hyperparameters before this returns,
        and does not make the caller wait in either mode: an exact step updates each layer before that layer's next
        upload. With ``scaler=`` (a GradScaler, which scaled the losses) it unscales the gradients in the same pass and
        is skipped when one of them is not finite. The following is about functions.

        There ``parameters()`` means the optimizer's parameters, with their gradients in ``.grad``. Asynchronously it
        returns at once and the next iteration computes with the weights of one step before; with ``is_async=False`` it
        returns when the new weights are in place, and training goes as in plain PyTorch.

        Raises:
            ConfigError: there are gradients but no optimizer parameters (the optimizer was built outside OptimizerCtx).
            StageError: an earlier call failed, or (synchronously) ``step_fn`` raised.
        """
        check_bool("step(is_async=...)", is_async)
        if isinstance(step_fn, CompactOptimizer):
            self._compact_step(step_fn, is_async, args, kwargs)
            return
        if not callable(step_fn):
            raise ConfigTypeError(
                f"step(step_fn=...): got {type(step_fn).__name__}, expected a callable or an optimizer made for this "
                "model by roundpipe.optim.AdamW(model, ...) or its like"
                + (
                    ". Call model.step(optimizer.step) with another"
                    if isinstance(step_fn, torch.optim.Optimizer)
                    else ""
                )
            )
        with self._entered(), spans.span("call", "step"):
            self._state.step((lambda: step_fn(*args, **kwargs)) if args or kwargs else step_fn, is_async)

    def _compact_step(self, optimizer: CompactOptimizer, is_async: bool, args: Any, kwargs: Any) -> None:
        self._check_own(optimizer)
        scaler = kwargs.pop("scaler", None)
        if args or kwargs or not (scaler is None or isinstance(scaler, GradScaler)):
            given = f" (got scaler={type(scaler).__module__}.{type(scaler).__name__})" if scaler is not None else ""
            raise ConfigTypeError(
                "step(): arguments belong to a step function; a compact optimizer takes only scaler=, a "
                f"roundpipe.GradScaler{given}"
            )
        with spans.span("call", "step"):
            optimizer.step(is_async=is_async, scaler=scaler)

    def _check_own(self, optimizer: CompactOptimizer) -> None:
        if optimizer._model is not self:
            raise ConfigError(
                f"step: the optimizer was made for the model {optimizer._model.name!r}, not {self.name!r}"
            )

    def synchronize(self) -> None:
        """Waits for everything. Afterwards the host weights are the newest and ``.grad`` of the model's own parameters
        holds what has accumulated since the last step. Raises what failed meanwhile.
        """
        with self._entered():
            self._state.synchronize()

    # -- optimizer parameters ------------------------------------------------------------------------------------
    def optim_named_parameters(
        self, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, optimizer parameter) of every parameter that requires grad; made on first use."""
        # A step function must not wait for the lock: the caller of a synchronous step holds it, and waits for the step.
        if not optimizer_thread.is_current():
            with self._entered():
                self._state.ensure_optimizer_parameters()
        named = self._naming_model().named_parameters(prefix=prefix, remove_duplicate=remove_duplicate)
        for name, host in named:
            parameter = self._state.optimizer.get(host)
            if parameter is not None and host.requires_grad:
                yield name, parameter

    def optim_parameters(self) -> Iterator[nn.Parameter]:
        """The optimizer's own parameters, in the order of the model's."""
        for _, parameter in self.optim_named_parameters():
            yield parameter

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Inside an optimizer context the optimizer's parameters; outside, the host model's, with a warning."""
        if in_optimizer_context():
            yield from self.optim_named_parameters(prefix, remove_duplicate)
            return
        import warnings

        self._state.wait_for_weights()
        warnings.warn(
            f"{self.name}: parameters() outside roundpipe.OptimizerCtx gives the host weights, which an optimizer must "
            "not be built on; use `with roundpipe.OptimizerCtx():` or optim_parameters() for an optimizer.",
            stacklevel=caller_level(),
        )
        yield from self._naming_model().named_parameters(prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters(recurse=recurse):
            yield parameter

    def set_original_model(self, model: nn.Module) -> None:
        """``model``: the module as the user knows it, of which the wrapped one is a rearrangement. Its attributes are
        reachable through the wrapper, and state dict and parameter names are its own.
        """
        self.__dict__["original_model"] = model
        self.__dict__["_passed_by"] = self._find_passed_by(self.model, model)

    def _entered(self) -> threading.RLock:
        engines.check_process()  # before the lock: a fork may have copied it locked
        device = engines.worker_device()
        if device is not None:
            raise ConfigError(
                f"a layer or loss function on {device} used the wrapped model {self.name!r} in a way that waits for "
                "the devices themselves (a call, step, synchronize, ...). Do that before the call, and give what comes "
                "out to it as an argument or in the label."
            )
        if optimizer_thread.is_current():
            raise ConfigError(
                f"a step function used the wrapped model {self.name!r} in a way that waits for the step itself (a "
                "call, step, synchronize, state_dict, ...); do that after model.step() on the main thread."
            )
        return self._lock  # type: ignore[no-any-return]

    def retire(self, successor: str) -> None:
        """Called when the model was wrapped again, after ``synchronize``; see Note [Takeover] in ownership.py."""
        with self._entered():
            self.zero_grad()
            self._state.generation += 1  # a backward that is still to come would work on weights of nobody
            self._state.close()
            self.__dict__["_state"] = _Retired(self.name, successor)

    def _naming_model(self) -> nn.Module:
        original = self.original_model
        return self.model if original is None else original  # type: ignore[no-any-return]

    # -- nn.Module's verbs ---------------------------------------------------------------------------------------
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops gradients everywhere: accumulated, under way, and the optimizer's. Inside a step function, where only
        the optimizer's parameters are in sight: theirs.
        """
        if optimizer_thread.is_current():
            self._state.optimizer.zero_grad(set_to_none)
            return
        with self._entered():
            self._state.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's state with its original names; waits for everything first."""
        self.synchronize()
        return self._naming_model().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights by their original names, with or without the wrapper's ``model.`` prefix; waits first.

        Optimizer parameters take the loaded values too. Parameters stay the same objects, in pinned memory, whatever
        ``assign`` says.
        """
        del assign
        check_state_dict(state_dict)
        self.synchronize()
        self._state.wait_saved()
        target = self._naming_model()
        own = target.state_dict().keys()
        if not own & state_dict.keys() and any(key.startswith("model.") for key in state_dict):
            state_dict = {key.removeprefix("model."): value for key, value in state_dict.items()}
        # A weight that is loaded with the value it has keeps its finer master.
        unchanged = {
            id(parameter)
            for name, parameter in target.named_parameters()
            if isinstance(given := state_dict.get(name), torch.Tensor)
            and given.shape == parameter.shape
            and torch.equal(given.to(parameter), parameter)
        }
        result = target.load_state_dict(state_dict, strict=strict)
        with self._entered():
            self._state.adopt_edits(look_closely=True, unchanged=unchanged)
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Part of the loading of a module that this one is a child of, whose ``state_dict`` has the original names."""
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        try:
            found = self.load_state_dict(given, strict=False)
        except RuntimeError as error:
            error_msgs.append(str(error))
        else:
            missing_keys += [prefix + key for key in found.missing_keys]
            unexpected_keys += [prefix + key for key in found.unexpected_keys]
        # torch goes on to the wrapped model under this name and finds what it has already.
        present = self.model.state_dict(keep_vars=True)
        state_dict.update({f"{prefix}model.{key}": value for key, value in present.items()})

    def train(self, mode: bool = True) -> RoundPipe:
        self._naming_model().train(mode)
        self.model.train(mode)
        self.__dict__["training"] = mode
        return self

    def requires_grad_(self, requires_grad: bool = True) -> RoundPipe:
        self.model.requires_grad_(requires_grad)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        cause: Exception | None = None
        try:
            where = str(fn(torch.zeros(1)).device)
        except Exception as error:  # of a device that is not there, say
            where, cause = f"another device ({type(error).__name__}: {error})", error
        if where != "cpu":
            raise ConfigError(
                f"a RoundPipe model cannot be moved to {where}: its weights live in host memory and visit the devices "
                "only while they compute. Leave .to(device)/.cuda() out; inputs may be on any device."
            ) from cause
        with self._entered():
            dtypes = {tensor.dtype for tensor in (*self.model.parameters(), *self.model.buffers())}
            if all(fn(torch.empty(0, dtype=dtype)).dtype == dtype for dtype in dtypes):
                return self
            if self._state.in_use:
                raise ConfigError(
                    "the dtype of a model cannot be changed any more: it has gradients or optimizer parameters of the "
                    "old one. Convert it before the first call and before building the optimizer, best before wrapping "
                    "it (RoundPipe(model.bfloat16()))."
                )
            self._naming_model()._apply(fn, recurse)
            self.model._apply(fn, recurse)
            self._renew_state()
        return self

    def _renew_state(self) -> None:
        before = self._state
        before.close()
        self.__dict__["_state"] = place(self.layers, before.optimizer.dtype, before.placement.asked, self.name)

    def _rebuild_arguments(self) -> dict[str, Any]:
        """What the constructor takes besides, for a copy."""
        return {"compile": self._compile}

    def __deepcopy__(self, memo: dict[int, Any]) -> RoundPipe:
        made = memo[id(self)] = rebuild(contents(self, memo))
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild, (contents(self),)

    # -- attributes ----------------------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__.get("_modules", {})
        if "model" not in modules or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if name in ASKED_FOR:
            refuse_plain_trainer(self.name)
        original = self.__dict__.get("original_model")
        if name == "model":
            found: Any = modules["model"]
        elif original is not None and hasattr(original, name):
            found = getattr(original, name)
        else:
            found = getattr(modules["model"], name)
        if name in _READ_WEIGHTS:
            self.synchronize()
        if isinstance(found, (nn.Module, torch.Tensor)) and isinstance(self.__dict__.get("_state"), TrainingState):
            self._state.wait_for_weights()  # whoever asks for these may look at weights
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN_ATTRIBUTES or "model" not in self.__dict__.get("_modules", {}) or name in self.__dict__:
            super().__setattr__(name, value)
            return
        original = self.__dict__.get("original_model")
        target = original if original is not None and hasattr(original, name) else self.model
        setattr(target, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or name in _OWN_ATTRIBUTES:
            super().__delattr__(name)
            return
        original = self.__dict__.get("original_model")
        delattr(original if original is not None and hasattr(original, name) else self.model, name)

    # -- hooks of the planner ------------------------------------------------------------------------------------
    def _layer_costs(self, run_type: str) -> Any:
        with self._entered():
            self._state.measurements.read()
            return self._state.layer_costs(run_type)

    def _plan_limits(self) -> tuple[int, int | None]:
        return self._state.plan_limits()  # type: ignore[no-any-return]

    def _plan_run(self) -> tuple[int | None, str]:
        return self._config.num_microbatch, self._config.recompute_grain or "stage"

    def _resolve(self, config: RoundPipeRunConfig | None) -> ResolvedConfig:
        return resolve(
            self._config, config, devices=engines.current().device_count, grad_enabled=torch.is_grad_enabled()
        )


@torch._disable_dynamo
def _outside_graphs(function: Callable[..., Any], *args: Any) -> Any:
    """Calls it between two graphs of torch.compile, which cannot look into an engine."""
    return function(*args)


class _Retired:
    """In the place of the state of a wrapper whose weights another one has taken over."""

    def __init__(self, name: str, successor: str) -> None:
        self._message = (
            f"the wrapper {name!r} was replaced when its model was wrapped again, by {successor!r}, which owns the "
            "weights now; use that one, and build the optimizer anew from it."
        )

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(self._message)
