"""The table of malformed calls, and the model that they are made on."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

import roundpipe
from roundpipe import (
    GradScaler,
    ModelExecutePlan,
    OptimizerCtx,
    RoundPipe,
    RoundPipeRunConfig,
    optim,
    wrap_model_to_roundpipe,
)
from roundpipe.batch import RoundPipePackedData
from roundpipe.errors import PlanError, RoundPipeError, SplitError, StageError

from . import oracle

PIECES = 2
Config = RoundPipeRunConfig


def loss_fn(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, label, reduction="sum") / 8


class World:
    """A wrapped model, its optimizer, and the same in plain PyTorch."""

    def __init__(self) -> None:
        roundpipe.use_devices("host:2")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 2))
        self.plain = copy.deepcopy(net)
        self.model = RoundPipe(net, name="misused", model_run_config=Config(num_microbatch=PIECES))
        with OptimizerCtx():
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.plain_optimizer = torch.optim.SGD(self.plain.parameters(), lr=0.05, momentum=0.9)
        self.x, self.y = torch.randn(8, 4), torch.randn(8, 2)

    def train(self, x: Any = None, **arguments: Any) -> Any:
        """A good call but for what is given."""
        arguments = {"label": self.y, "loss_fn": loss_fn, **arguments}
        return self.model.forward_backward((self.x,) if x is None else x, **arguments)

    def infer(self, *args: Any, **config: Any) -> Any:
        with torch.no_grad():
            return self.model(*(args or (self.x,)), roundpipe_run_config=Config(**config))

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def both_train(self, seed: int) -> None:
        torch.manual_seed(seed)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        state = torch.get_rng_state()
        loss = self.model.forward_backward((x,), label=y, loss_fn=loss_fn)
        torch.set_rng_state(state)
        wanted = oracle.forward_backward(list(self.plain), (x,), label=y, loss_fn=loss_fn, num_microbatch=PIECES)
        oracle.assert_close_to_scale(loss, wanted, "loss")

    def both_step(self) -> None:
        self.model.step(self.update, is_async=False)
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        oracle.assert_same_state(self.model.model, self.plain, 1e-5)


@dataclass
class Case:
    name: str
    call: Callable[[World], Any]
    kind: type[BaseException] | tuple[type[BaseException], ...]
    said: str


CASES: list[Case] = []


def case(name: str, kind: Any, said: str, call: Callable[[World], Any]) -> None:
    CASES.append(Case(name, call, kind, said))


# -- checkpoints ------------------------------------------------------------------------------------------------------
_SAVED = "/proc/there is no such directory"
case("save_plain_model", TypeError, "wrapped model", lambda w: roundpipe.save(w.plain, None, None, _SAVED))
case("save_plain_optimizer", ValueError, "OptimizerCtx",
     lambda w: roundpipe.save(w.model, w.plain_optimizer, None, _SAVED))  # fmt: skip
case("save_state_dict", ValueError, "torch.optim.Optimizer", lambda w: roundpipe.save(w.model, {}, None, _SAVED))
case("save_metadata", ValueError, "metadata", lambda w: roundpipe.save(w.model, None, None, _SAVED, metadata=w))
case("save_nowhere", RoundPipeError, "cannot be written", lambda w: roundpipe.save(w.model, None, None, _SAVED))
case("load_nothing", RoundPipeError, "no checkpoint", lambda w: roundpipe.load(w.model, w.optimizer, None, _SAVED))
case("load_scheduler", ValueError, "state_dict", lambda w: roundpipe.load(w.model, None, None, _SAVED, scheduler=3))


# -- wrapping ---------------------------------------------------------------------------------------------------------
def _aliased() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.second = nn.Parameter(layer.weight.data[:2])
    return layer


def _with_grad_buffer() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", torch.ones(2, requires_grad=True))
    return layer


def _sparse() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.eye(4).to_sparse())
    return layer


case("wrap_number", TypeError, "int", lambda w: RoundPipe(3))
case("wrap_class", TypeError, "expected an nn.Module", lambda w: RoundPipe(nn.Linear))
case("wrap_wrapped", ValueError, "already wrapped", lambda w: RoundPipe(w.model))
case("wrap_around_wrapped", ValueError, "contains a wrapped model", lambda w: RoundPipe(nn.Sequential(w.model)))
case("wrap_empty", ValueError, "empty nn.Sequential", lambda w: RoundPipe(nn.Sequential()))
case("wrap_part_of_wrapped", ValueError, "misused", lambda w: RoundPipe(nn.Sequential(w.model.model[0])))
case("wrap_meta", ValueError, "meta device", lambda w: RoundPipe(nn.Linear(2, 2, device="meta")))
case("wrap_lazy", ValueError, "lazy", lambda w: RoundPipe(nn.LazyLinear(3)))
case("wrap_sparse", ValueError, "layout", lambda w: RoundPipe(_sparse()))
case("wrap_aliases", ValueError, "one memory", lambda w: RoundPipe(_aliased()))
case("wrap_grad_buffer", ValueError, "table", lambda w: RoundPipe(_with_grad_buffer()))
case("wrap_optim_dtype_name", TypeError, "optim_dtype", lambda w: RoundPipe(nn.Linear(2, 2), optim_dtype="float32"))
case("wrap_optim_dtype_int", ValueError, "floating", lambda w: RoundPipe(nn.Linear(2, 2), optim_dtype=torch.int8))
case("wrap_pin_model", ValueError, "pin_model", lambda w: RoundPipe(nn.Linear(2, 2), pin_model="maybe"))
case("wrap_name", TypeError, "name", lambda w: RoundPipe(nn.Linear(2, 2), name=3))
case("wrap_config", TypeError, "model_run_config", lambda w: RoundPipe(nn.Linear(2, 2), model_run_config={"a": 1}))
case("wrap_unknown_argument", TypeError, "microbatches", lambda w: RoundPipe(nn.Linear(2, 2), microbatches=2))

case("auto_wrap_number", TypeError, "int", lambda w: wrap_model_to_roundpipe(3))
case("auto_wrap_wrapped", ValueError, "already wrapped", lambda w: wrap_model_to_roundpipe(w.model))
case("auto_wrap_lower", ValueError, "lower_threshold", lambda w: wrap_model_to_roundpipe(nn.Linear(2, 2), None, -1))
case("auto_wrap_upper", TypeError, "upper_threshold",
     lambda w: wrap_model_to_roundpipe(nn.Linear(2, 2), upper_threshold="big"))  # fmt: skip
case("auto_wrap_skips_one", TypeError, "write [module]",
     lambda w: wrap_model_to_roundpipe(nn.Linear(2, 2), skip_modules=nn.Linear(2, 2)))  # fmt: skip
case("auto_wrap_skips_names", TypeError, "expected modules",
     lambda w: wrap_model_to_roundpipe(nn.Linear(2, 2), skip_modules=["head"]))  # fmt: skip
case("auto_wrap_no_preset", NotImplementedError, "no preset",
     lambda w: wrap_model_to_roundpipe(nn.Linear(2, 2), use_sequential_preset=True))  # fmt: skip
case("auto_wrap_compiled", ValueError, "torch.compile",
     lambda w: wrap_model_to_roundpipe(torch.compile(nn.Linear(2, 2))))  # fmt: skip
case("auto_wrap_keyword", TypeError, "colour", lambda w: wrap_model_to_roundpipe(nn.Linear(2, 2), colour="red"))

# -- run configurations -----------------------------------------------------------------------------------------------
for field, value, kind, said in [
    ("requires_grad", 1, TypeError, "requires_grad"),
    ("requires_grad", "yes", TypeError, "requires_grad"),
    ("output_device", "tpu:0", ValueError, "output_device"),
    ("output_device", "mps", ValueError, "cpu"),
    ("output_device", 1.5, TypeError, "output_device"),
    ("preserve_rng_state", "no", TypeError, "preserve_rng_state"),
    ("recompute_grain", "block", ValueError, "'stage' or 'layer'"),
    ("recompute_grain", 2, TypeError, "recompute_grain"),
    ("num_microbatch", 0, ValueError, "at least 1"),
    ("num_microbatch", -3, ValueError, "-3"),
    ("num_microbatch", 1.5, TypeError, "num_microbatch"),
    ("num_microbatch", True, TypeError, "integer"),
    ("num_microbatch", "2", TypeError, "str"),
    ("split_input", 3, TypeError, "split_input"),
    ("split_input", (None,), ValueError, "1 entries"),
    ("split_input", (None, None, None), ValueError, "3 entries"),
    ("split_label", 3.5, TypeError, "split_label"),
    ("merge_output", "cat", TypeError, "merge_output"),
    ("execute_plan", [range(4)], TypeError, "ModelExecutePlan"),
    ("on_oom", "retry", ValueError, "on_oom"),
    ("on_oom", 1, TypeError, "on_oom"),
    ("colour", "red", TypeError, "colour"),
]:
    case(f"config_{field}_{value}", kind, said, lambda w, f=field, v=value: w.train(run_config=Config(**{f: v})))


# -- forward_backward -------------------------------------------------------------------------------------------------
@dataclass
class Hidden:
    x: torch.Tensor


def _plan(forward: Any, backward: Any) -> ModelExecutePlan:
    plan = ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = forward, backward
    return plan


def _train_by(w: World, **config: Any) -> Any:
    return w.train(run_config=Config(**config))


def _without_grad(w: World) -> Any:
    with torch.no_grad():
        return w.train()


def _in_inference_mode(w: World) -> Any:
    with torch.inference_mode():
        return w.train()


def _asks(model: Any) -> Callable[[Any, Any], torch.Tensor]:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output - model(label)).square().sum()

    return loss


def _waits(w: World) -> Callable[[Any, Any], torch.Tensor]:
    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        w.model.synchronize()
        return loss_fn(output, label)

    return loss


def _packed_sequence() -> Any:
    return nn.utils.rnn.pack_sequence([torch.randn(3, 4), torch.randn(2, 4)])


def _layer_that(does: Callable[[torch.Tensor], Any]) -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            does(x)
            return x

    RoundPipe(nn.Sequential(nn.Linear(4, 4), Asks()), name="asks").forward_backward(
        (torch.randn(4, 4),), loss_fn=lambda out, _: out.sum()
    )


def _hook_that(does: Callable[[], Any]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[0].weight.register_hook(lambda grad: does() and None)
    wrapped = RoundPipe(net, name="hooked")
    wrapped.forward_backward((torch.randn(4, 4),), loss_fn=lambda out, _: out.sum())
    wrapped.synchronize()


case("args_tensor", TypeError, "write (x,)", lambda w: w.train(w.x))
case("args_list", TypeError, "expected a tuple", lambda w: w.train([w.x]))
case("kwargs_list", TypeError, "input_kwargs", lambda w: w.train(input_kwargs=[w.x]))
case("kwargs_keys", TypeError, "input_kwargs", lambda w: w.train(input_kwargs={3: w.x}))
case("no_args", StageError, "missing", lambda w: w.train(()))
case("unexpected_kwarg", StageError, "colour", lambda w: w.train(input_kwargs={"colour": "red"}))
case("too_many_args", StageError, "positional argument", lambda w: w.train((w.x, w.x)))
case("args_of_another_width", StageError, "shapes cannot be multiplied", lambda w: w.train((torch.randn(8, 5),)))
case("args_integers", StageError, "dtype", lambda w: w.train((torch.ones(8, 4, dtype=torch.int64),)))
case("args_not_tensors", StageError, "layer=0|layer 0", lambda w: w.train(("text",), label=None))
case("args_of_two_sizes", SplitError, "args[1]", lambda w: w.train((w.x, torch.randn(5, 4))))
case("args_sparse", ValueError, "layout", lambda w: w.train((w.x.to_sparse(),)))
case("args_meta", ValueError, "meta", lambda w: w.train((w.x.to("meta"),)))
case("args_dataclass", SplitError, "register_pytree_node", lambda w: w.train((Hidden(w.x),)))
case("args_packed_sequence", SplitError, "pack inside of a layer", lambda w: w.train((_packed_sequence(),)))
case("args_packed_sequence_whole", SplitError, "pack inside of a layer",
     lambda w: w.train((_packed_sequence(),), run_config=Config(num_microbatch=1)))  # fmt: skip
case("label_packed_sequence", SplitError, "label is a PackedSequence", lambda w: w.train(label=_packed_sequence()))
case("label_of_another_size", SplitError, "label", lambda w: w.train(label=torch.randn(7, 2)))
case("label_dataclass", SplitError, "register_pytree_node", lambda w: w.train(label=Hidden(w.y)))
case("loss_fn_number", TypeError, "loss_fn", lambda w: w.train(loss_fn=3))
case("loss_fn_none", TypeError, "loss_fn", lambda w: w.train(loss_fn=None))
case("loss_vector", StageError, "one-element tensor", lambda w: w.train(loss_fn=lambda out, y: out.sum(0)))
case("loss_nothing", StageError, "NoneType", lambda w: w.train(loss_fn=lambda out, y: None))
case("loss_float", StageError, "float", lambda w: w.train(loss_fn=lambda out, y: 1.0))
case("loss_empty_list", StageError, "no loss in its list", lambda w: w.train(loss_fn=lambda out, y: []))
case("loss_detached", StageError, "requires grad", lambda w: w.train(loss_fn=lambda out, y: out.detach().sum()))
case("loss_of_default", StageError, "Pass label and loss_fn: model", lambda w: w.model.forward_backward((w.x,)))
case("loss_fn_forgotten", StageError, "label was given, but not the loss_fn",
     lambda w: w.model.forward_backward((w.x,), label=w.y))  # fmt: skip
case("loss_of_one_argument", TypeError, "called as loss_fn(output, label)",
     lambda w: w.train(loss_fn=lambda out: out.sum()))  # fmt: skip
case("loss_of_three_arguments", TypeError, "called as loss_fn(output, label)",
     lambda w: w.train(loss_fn=lambda out, y, z: out.sum()))  # fmt: skip
case("loss_raises", StageError, "KeyError", lambda w: w.train(loss_fn=lambda out, y: {}["lost"]))
case("return_outputs_text", TypeError, "return_outputs", lambda w: w.train(return_outputs="yes"))
case("run_config_dict", TypeError, "RoundPipeRunConfig", lambda w: w.train(run_config={"num_microbatch": 2}))
case("run_config_class", TypeError, "RoundPipeRunConfig", lambda w: w.train(run_config=Config))
case("loss_calls_the_model", StageError, "a layer or loss function on host", lambda w: w.train(loss_fn=_asks(w.model)))
case("loss_calls_another_model", StageError, "'teacher'",
     lambda w: w.train(loss_fn=_asks(RoundPipe(nn.Linear(2, 2), name="teacher"))))  # fmt: skip
case("loss_synchronizes", StageError, "a layer or loss function on", lambda w: w.train(loss_fn=_waits(w)))
case("layer_calls_the_model", StageError, "a layer or loss function on", lambda w: _layer_that(lambda x: w.infer()))
case("layer_reads_a_state_dict", StageError, "a layer or loss function on",
     lambda w: _layer_that(lambda x: w.model.state_dict()))  # fmt: skip
case("hook_calls_the_model", StageError, "a layer or loss function on", lambda w: _hook_that(lambda: w.infer()))
case("train_without_grad", RuntimeError, "gradients disabled", _without_grad)
case("train_in_inference_mode", RuntimeError, "inference_mode", _in_inference_mode)
case("announced_function", TypeError, "step", lambda w: w.train(step=w.update))
case("announced_other_kind", TypeError, "step", lambda w: w.train(step=w.optimizer))
case("train_unknown_argument", TypeError, "inputs", lambda w: w.model.forward_backward(inputs=(w.x,)))

# -- splits and merges ------------------------------------------------------------------------------------------------
case("split_spec_of_another_form", SplitError, "args", lambda w: _train_by(w, split_input=((None, None), None)))
case(
    "split_spec_dim",
    SplitError,
    "TensorChunkSpec(3) does not fit",
    lambda w: _train_by(w, split_input=((TensorChunkSpec(3),), None)),
)
case("split_function_raises", ZeroDivisionError, "by zero", lambda w: _train_by(w, split_input=lambda a, k, n: 1 / 0))
case("split_function_one_list", SplitError, "split_input", lambda w: _train_by(w, split_input=lambda a, k, n: [a] * n))
case("split_function_short", SplitError, "1",
     lambda w: _train_by(w, split_input=lambda a, k, n: ([a], [k])))  # fmt: skip
case("split_function_not_tuples", SplitError, "args",
     lambda w: _train_by(w, split_input=lambda a, k, n: ([w.x] * n, [k] * n)))  # fmt: skip
case("label_function_short", SplitError, "label", lambda w: _train_by(w, split_label=lambda y, n: [y]))
case("label_function_no_list", SplitError, "label", lambda w: _train_by(w, split_label=lambda y, n: y.sum()))
case("label_spec_of_another_form", SplitError, "label",
     lambda w: _train_by(w, split_label={"y": TensorChunkSpec(0)}))  # fmt: skip
case("label_replicated_by_spec", StageError, "size", lambda w: _train_by(w, split_label=_Replicate()))
case("merge_function_raises", ZeroDivisionError, "by zero", lambda w: w.infer(merge_output=lambda outputs: 1 / 0))
case("merge_spec_of_another_form", SplitError, "output", lambda w: w.infer(merge_output=(TensorChunkSpec(0),) * 2))
case("merge_of_unequal", SplitError, "output",
     lambda w: w.train(return_outputs=True, run_config=Config(merge_output=(_Replicate(),))))  # fmt: skip
case("packed_events", ValueError, "1 transfer events for 2", lambda w: RoundPipePackedData([1, 2], [None]))
case(
    "packed_of_a_number",
    (SplitError, TypeError, StageError),
    "must be Tensor, not int",
    lambda w: w.infer(RoundPipePackedData([3, 4])),
)

# -- plans ------------------------------------------------------------------------------------------------------------
case("plan_empty", PlanError, "layer", lambda w: _train_by(w, execute_plan=ModelExecutePlan()))
case(
    "plan_too_short",
    PlanError,
    "layer 3",
    lambda w: _train_by(w, execute_plan=_plan([range(2)], [range(2, 3), range(2)])),
)
case(
    "plan_too_long",
    PlanError,
    "4 layers",
    lambda w: _train_by(w, execute_plan=_plan([range(2)], [range(2, 5), range(2)])),
)
case("plan_of_lists", PlanError, "range", lambda w: _train_by(w, execute_plan=_plan([[0, 1]], [range(2, 4), range(2)])))
case("plan_of_numbers", PlanError, "range", lambda w: _train_by(w, execute_plan=_plan([0, 1], [2])))
case("plan_none", PlanError, "list", lambda w: _train_by(w, execute_plan=_plan(None, None)))
case(
    "plan_not_fused",
    PlanError,
    "twice",
    lambda w: _train_by(w, execute_plan=_plan([range(4)], [range(2, 4), range(2)])),
)
case("plan_gap", PlanError, "layer 1", lambda w: _train_by(w, execute_plan=_plan([range(1)], [range(2, 4), range(2)])))
case("plan_for_infer", PlanError, "layer 2", lambda w: w.infer(execute_plan=_plan([range(2)], [range(2, 4), range(2)])))
case("check_valid_run_type", ValueError, "'predict'", lambda w: ModelExecutePlan().check_valid(4, "predict"))
case("check_valid_layers", (TypeError, ValueError), "num_layers",
     lambda w: _plan([range(4)], []).check_valid("four", "infer"))  # fmt: skip
case("auto_run_type", ValueError, "'both'", lambda w: ModelExecutePlan.auto("both", w.model))
case("auto_no_model", TypeError, "no model", lambda w: ModelExecutePlan.auto("fused"))
case("auto_plain_module", TypeError, "Linear", lambda w: ModelExecutePlan.auto("fused", nn.Linear(2, 2)))
case("auto_model_first", (TypeError, ValueError), "run_type", lambda w: ModelExecutePlan.auto(w.model, "fused"))
case("auto_min_stages", ValueError, "min_stages", lambda w: ModelExecutePlan.auto("fused", w.model, min_stages=0))
case(
    "auto_threshold",
    ValueError,
    "upper_threshold",
    lambda w: ModelExecutePlan.auto("fused", w.model, upper_threshold=0.5),
)
case("auto_limit", ValueError, "model_memory_limit",
     lambda w: ModelExecutePlan.auto("fused", w.model, model_memory_limit=-1))  # fmt: skip
case("auto_limit_bytes", ValueError, "got 8e+09 GB, expected GB, not bytes; perhaps 8",
     lambda w: ModelExecutePlan.auto("fused", w.model, model_memory_limit=8e9))  # fmt: skip
case("auto_limit_text", TypeError, "model_memory_limit",
     lambda w: ModelExecutePlan.auto("fused", w.model, model_memory_limit="2GB"))  # fmt: skip


# -- inference and autograd -------------------------------------------------------------------------------------------
def _twice(w: World) -> None:
    for piece in w.x.chunk(PIECES):
        w.plain(piece).sum().backward()
    loss = w.model(w.x).sum()
    loss.backward(retain_graph=True)  # this one counts
    loss.backward()


def _grad(w: World) -> None:
    x = w.x.clone().requires_grad_(True)
    torch.autograd.grad(w.model(x).sum(), x)


def _backward_inputs(w: World) -> None:
    x = w.x.clone().requires_grad_(True)
    w.model(x).sum().backward(inputs=[x])


case("call_config_dict", TypeError, "RoundPipeRunConfig", lambda w: w.model(w.x, roundpipe_run_config={"a": 1}))
case("call_grad_without_grad", RuntimeError, "requires_grad=True", lambda w: w.infer(requires_grad=True))
case("call_wrong_keyword", StageError, "run_config", lambda w: w.model(w.x, run_config=Config()))
case("call_nothing", StageError, "missing", lambda w: w.model())
case("backward_twice", RuntimeError, "a second time", _twice)
case("autograd_grad", RuntimeError, "torch.autograd.grad", _grad)
case("backward_inputs", RuntimeError, "backward(inputs=...)", _backward_inputs)


# -- steps ------------------------------------------------------------------------------------------------------------
def _step_of(w: World, function: Callable[[], Any], is_async: bool = False) -> None:
    """A step whose function fails before it has done anything: its gradients wait in the optimizer's parameters, where
    those of the next step are added, as in plain PyTorch.
    """
    w.model.step(function, is_async=is_async)
    w.model.synchronize()


def _uses(verb: Callable[[World], Any]) -> Callable[[World], None]:
    return lambda w: _step_of(w, lambda: verb(w))


for name, verb in {
    "synchronize": lambda w: w.model.synchronize(),
    "forward": lambda w: w.infer(),
    "train": lambda w: w.train(),
    "step": lambda w: w.model.step(w.update),
    "state_dict": lambda w: w.model.state_dict(),
    "deepcopy": lambda w: copy.deepcopy(w.model),
}.items():
    case(f"step_function_uses_{name}", (RoundPipeError, ValueError), "step function|inside a step", _uses(verb))
case("step_function_raises", StageError, "LookupError", lambda w: _step_of(w, _raises))
case("step_function_raises_later", StageError, "LookupError", lambda w: _step_of(w, _raises, is_async=True))
case("step_function_takes_arguments", StageError, "argument", lambda w: _step_of(w, lambda lr: None))


def _raises() -> None:
    raise LookupError("no such rate")


case("step_number", TypeError, "step_fn", lambda w: w.model.step(3))
case("step_torch_optimizer", TypeError, "model.step(optimizer.step)", lambda w: w.model.step(w.optimizer))
case("step_optimizer", TypeError, "step_fn", lambda w: w.model.step(None))
case("step_by_hand", ValueError, "by hand", lambda w: w.optimizer.step())
case("step_nothing", TypeError, "step_fn", lambda w: w.model.step())
case("step_is_async", TypeError, "is_async", lambda w: w.model.step(w.update, "no"))


def _foreign_optimizer(w: World) -> None:
    other = RoundPipe(nn.Linear(4, 2), name="foreign")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other.forward_backward((w.x,), label=w.y, loss_fn=loss_fn)
    other.step(optimizer.step)


case("step_foreign_optimizer", ValueError, "OptimizerCtx", _foreign_optimizer)

# -- nn.Module verbs --------------------------------------------------------------------------------------------------
if not torch.cuda.is_available():
    case("to_cuda_without_one", ValueError, "cannot be moved to another device", lambda w: w.model.to("cuda"))
    case("cuda_without_one", ValueError, "cannot be moved to another device", lambda w: w.model.cuda())
case("to_meta", ValueError, "cannot be moved", lambda w: w.model.to("meta"))
case("to_empty_meta", ValueError, "cannot be moved", lambda w: w.model.to_empty(device="meta"))
case("half_in_training", ValueError, "dtype", lambda w: w.model.half())
case("load_wrong_names", RuntimeError, "Missing key", lambda w: w.model.load_state_dict({"a": torch.ones(1)}))
case("load_wrong_shape", RuntimeError, "size mismatch",
     lambda w: w.model.load_state_dict({**w.model.state_dict(), "0.weight": torch.ones(3, 3)}))  # fmt: skip
case("load_no_dict", TypeError, "state_dict", lambda w: w.model.load_state_dict([1, 2]))
case("attribute_missing", AttributeError, "colour", lambda w: w.model.colour)
case("delete_missing", AttributeError, "colour", lambda w: delattr(w.model, "colour"))
case("train_mode_text", (TypeError, ValueError), "expected to be boolean", lambda w: w.model.train("yes"))
case("requires_grad_of_numbers", RuntimeError, "floating", lambda w: RoundPipe(_with_integers()).requires_grad_(True))


def _with_integers() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.table = nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False)
    return layer


# -- recompute, devices, optimizers -----------------------------------------------------------------------------------
case("recompute_data_outside", AssertionError, "outside a recompute", lambda w: roundpipe.get_recompute_data())
case("devices_word", ValueError, "gpu", lambda w: roundpipe.use_devices("gpu"))
case("devices_none_of", ValueError, "host:0", lambda w: roundpipe.use_devices("host:0"))
case("devices_too_many", ValueError, "1000", lambda w: roundpipe.use_devices("host:1000"))
case("devices_unit", ValueError, "unit", lambda w: roundpipe.use_devices("host:2@3XB"))
case("devices_number", TypeError, "string", lambda w: roundpipe.use_devices(2))
case("devices_list", TypeError, "string", lambda w: roundpipe.use_devices(["cuda:0"]))
case("adam_lr", ValueError, "lr", lambda w: optim.Adam([nn.Parameter(torch.ones(1))], lr=-1.0))
case("adam_betas", ValueError, "beta", lambda w: optim.Adam([nn.Parameter(torch.ones(1))], betas=(0.9, 1.5)))
case("adam_capturable", ValueError, "capturable", lambda w: optim.Adam([nn.Parameter(torch.ones(1))], capturable=True))
case("adam_differentiable", ValueError, "differentiable",
     lambda w: optim.Adam([nn.Parameter(torch.ones(1))], differentiable=True))  # fmt: skip
case("adam_nothing", ValueError, "empty", lambda w: optim.Adam([]))
case("adam_tensor", TypeError, "params", lambda w: optim.Adam(torch.ones(3)))
case("sgd_momentum", ValueError, "momentum", lambda w: optim.SGD([nn.Parameter(torch.ones(1))], momentum=-1.0))
case("scaler_scale_number", ValueError, "init_scale", lambda w: GradScaler(init_scale=0.0))
case("scaler_growth", ValueError, "growth_factor", lambda w: GradScaler(growth_factor=1.0))
case("scaler_interval", ValueError, "growth_interval", lambda w: GradScaler(growth_interval=1.5))
case("scaler_scales_text", ValueError, "expected a tensor", lambda w: GradScaler().scale("loss"))
case(
    "scaler_updates_nothing", RuntimeError, "no gradients were looked at", lambda w: GradScaler().update(is_async=False)
)
case("scaler_new_scale", ValueError, "scale", lambda w: GradScaler().update(-1.0))
case("scaler_update_in_step", RuntimeError, "step function", _uses(lambda w: GradScaler().update()))
case("compact_master", ValueError, "master", lambda w: optim.AdamW(nn.Linear(2, 2), master="half"))
case("compact_state_dtype", ValueError, "state_dtype", lambda w: optim.AdamW(w.model, state_dtype="int4"))
case(
    "compact_plain_module",
    TypeError,
    "given a RoundPipe model",
    lambda w: optim.AdamW(nn.Linear(2, 2), master="float32"),
)
case("compact_max_grad_norm", ValueError, "max_grad_norm", lambda w: optim.AdamW(w.model, max_grad_norm=-1.0))
case("lion_lr", ValueError, "lr", lambda w: optim.Lion([nn.Parameter(torch.ones(1))], lr=-1.0))
