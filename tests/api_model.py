"""Rows of the table: the wrapper, its calls and its steps."""

from __future__ import annotations

import copy
import pickle
import re
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe
from roundpipe.errors import ConfigError

from .api_rows import Notes, config, net, row, sgd, square_sum, stages

X = torch.linspace(-1, 1, 24).view(6, 4)


# -- wrapping ---------------------------------------------------------------------------------------------------------
@row
def children_of_a_sequential_are_layers() -> None:
    """Children of a Sequential are the layers, in order; model, layers, num_layers, name are public."""
    model = net()
    wrapped = RoundPipe(model, name="mine")
    assert wrapped.model is model and wrapped.layers == list(model)
    assert (wrapped.num_layers, wrapped.name) == (3, "mine")


@row
def any_other_module_is_one_layer() -> None:
    """A module with a forward of its own is one layer."""
    model = nn.TransformerEncoderLayer(4, 1, 8)
    assert RoundPipe(model).layers == [model]


@row
def first_layer_gets_the_arguments_later_ones_one_value() -> None:
    """The first layer gets args and kwargs, later ones the output before; a tuple stays one argument."""

    class Pair(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float) -> Any:
            return x * scale, x.shape[0] * torch.ones(x.shape[0], dtype=torch.int64)

    notes = Notes()
    with torch.no_grad():
        out = RoundPipe(nn.Sequential(Pair(), notes))(X, scale=2.0)
    assert all(len(args) == 1 and isinstance(args[0], tuple) and not kwargs for args, kwargs in notes.seen)
    assert torch.equal(out[0], 2 * X)


@row
def weights_stay_on_the_host_in_their_dtype() -> None:
    """Weights keep object, place and dtype; optim_dtype is that of the optimizer's copy, by default the weights'."""
    model = net().bfloat16()
    objects = [id(p) for p in model.parameters()]
    finer, same = RoundPipe(model, optim_dtype=torch.float32), RoundPipe(net().bfloat16())
    assert [id(p) for p in model.parameters()] == objects
    assert all(p.device.type == "cpu" and p.dtype == torch.bfloat16 for p in model.parameters())
    assert {p.dtype for p in finer.optim_parameters()} == {torch.float32}
    assert {p.dtype for p in same.optim_parameters()} == {torch.bfloat16}


@row
def default_name_is_file_and_line() -> None:
    """name: by default file:line of the construction."""
    assert re.fullmatch(r".*api_model\.py:\d+", RoundPipe(net()).name)


@row
def attributes_go_through() -> None:
    """Attributes that the wrapper lacks are read, written and deleted on the wrapped model."""
    model = net()
    wrapped = RoundPipe(model)
    wrapped.colour = "red"
    assert model.colour == "red" and wrapped.colour == "red"
    del wrapped.colour
    assert not hasattr(model, "colour") and not hasattr(wrapped, "colour")


@row
def attributes_go_to_the_original_model() -> None:
    """After set_original_model(m) they are those of m, and names are m's."""

    class Original(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.colour = net(), "red"

    original = Original()
    wrapped = RoundPipe(original.inside)
    wrapped.set_original_model(original)
    assert wrapped.colour == "red"
    wrapped.colour = "blue"
    assert original.colour == "blue"
    del wrapped.colour
    assert not hasattr(original, "colour") and not hasattr(wrapped, "colour")
    assert set(wrapped.state_dict()) == set(original.state_dict())


@row
def parameters_mean_the_optimizers_inside_a_context() -> None:
    """parameters() and named_parameters() warn outside an OptimizerCtx; inside they are the optimizer's."""
    wrapped = RoundPipe(net())
    with pytest.warns(UserWarning, match="OptimizerCtx"):
        outside = list(wrapped.parameters())
    assert [id(p) for p in outside] == [id(p) for p in wrapped.model.parameters()]
    with OptimizerCtx(), warnings.catch_warnings():
        warnings.simplefilter("error")
        inside = dict(wrapped.named_parameters())
    assert list(inside) == [name for name, _ in wrapped.model.named_parameters()]
    assert [id(p) for p in inside.values()] == [id(p) for p in wrapped.optim_parameters()]
    assert not {id(p) for p in inside.values()} & {id(p) for p in outside}


@row
def zero_grad_is_thorough() -> None:
    """zero_grad drops gradients accumulated, under way, and the optimizer's."""
    wrapped = RoundPipe(net())
    optimizer = sgd(wrapped)
    before = copy.deepcopy(wrapped.model.state_dict())
    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.zero_grad()
    wrapped.step(optimizer.step, is_async=False)
    assert all(torch.equal(value, before[name]) for name, value in wrapped.model.state_dict().items())
    assert all(p.grad is None for p in wrapped.model.parameters())


@row
def state_dict_has_the_models_names_and_waits() -> None:
    """state_dict: original names, the newest weights; load_state_dict takes keys with "model." in front too."""
    wrapped, other = RoundPipe(net()), RoundPipe(net(1))
    optimizer = sgd(wrapped)
    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.step(optimizer.step)  # asynchronous: only a wait makes it visible
    state = wrapped.state_dict()
    assert set(state) == set(net().state_dict())
    assert not torch.equal(state["0.weight"], net().state_dict()["0.weight"])
    other.load_state_dict({f"model.{name}": value for name, value in state.items()})
    assert torch.equal(other.model[2].weight, state["2.weight"])


@row
def module_verbs() -> None:
    """train/eval, requires_grad_, half/bfloat16/to(dtype) before training; moving is an error that says why."""
    wrapped = RoundPipe(net())
    assert not wrapped.eval().training and not wrapped.model[0].training
    assert wrapped.train().training and wrapped.model[0].training
    wrapped.requires_grad_(False)
    assert not any(p.requires_grad for p in wrapped.model.parameters())
    for verb, dtype in (
        (lambda m: m.half(), torch.float16),
        (lambda m: m.bfloat16(), torch.bfloat16),
        (lambda m: m.to(torch.float64), torch.float64),
    ):
        assert verb(wrapped) is wrapped
        assert {p.dtype for p in wrapped.model.parameters()} == {dtype}
    with pytest.raises(ConfigError, match="host memory"):
        wrapped.to("meta")
    assert wrapped.to("cpu") is wrapped


@row
def dtypes_change_before_training_only() -> None:
    """half/bfloat16/to(dtype): before training; afterwards an error."""
    wrapped = RoundPipe(net())
    wrapped.forward_backward((X,), loss_fn=square_sum)
    for verb in (wrapped.half, wrapped.bfloat16, lambda: wrapped.to(torch.float64)):
        with pytest.raises(ConfigError, match="dtype"):
            verb()


@row
def a_loaded_weight_is_never_reverted() -> None:
    """load_state_dict synchronises: a step under way does not write over what was loaded."""
    wrapped = RoundPipe(net())
    optimizer = sgd(wrapped)
    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.step(optimizer.step)
    loaded = net(5).state_dict()
    wrapped.load_state_dict(loaded)
    wrapped.synchronize()
    assert all(torch.equal(value, loaded[name]) for name, value in wrapped.state_dict().items())


@row
def copies_are_wrappers_of_their_own() -> None:
    """deepcopy and pickle."""
    wrapped = RoundPipe(net())
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert isinstance(twin, RoundPipe) and twin.model[0].weight is not wrapped.model[0].weight
        with torch.no_grad():
            assert torch.equal(twin(X), wrapped(X))


@row
def buffers_are_written_once_and_come_home() -> None:
    """A buffer written by a forward is back after the call; recompute does not write it twice."""
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    plan = stages([range(2)], [range(2, 3), range(2)])
    wrapped.forward_backward((X,), loss_fn=square_sum, run_config=config(num_microbatch=3, execute_plan=plan))
    assert int(wrapped.model[1].num_batches_tracked) == 3


@row
def recompute_sees_the_buffers_of_its_forward() -> None:
    """Recompute sees a buffer's value from before that forward."""

    class Counts(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((roundpipe.doing_recompute(), self.calls.item()))
            self.calls += 1
            return super().forward(x)

    seen: list[Any] = []
    wrapped = RoundPipe(nn.Sequential(Counts(), nn.Linear(4, 1)))
    plan = stages([range(1)], [range(1, 2), range(1)])
    wrapped.forward_backward((X,), loss_fn=square_sum, run_config=config(num_microbatch=2, execute_plan=plan))
    wrapped.synchronize()
    assert sorted(seen) == [(False, 0.0), (False, 1.0), (True, 0.0), (True, 1.0)]
    assert wrapped.model[0].calls.item() == 2


@row
def buffers_must_not_require_grad() -> None:
    """A buffer that requires grad is an error at construction."""
    layer = nn.Linear(4, 4)
    layer.register_buffer("table", torch.ones(2, requires_grad=True))
    with pytest.raises(ConfigError, match="table"):
        RoundPipe(layer)


@row
def parameters_may_be_shared_inside_one_wrapper_only() -> None:
    """Shared inside one model gradients are summed; between living wrappers sharing is an error."""
    shared = nn.Linear(4, 4, bias=False)
    wrapped = RoundPipe(nn.Sequential(shared, nn.Tanh(), shared))
    plain = copy.deepcopy(wrapped.model)
    square_sum(plain(X), None).backward()
    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.synchronize()
    assert torch.allclose(shared.weight.grad, plain[0].weight.grad, rtol=1e-5)
    with pytest.raises(ConfigError):
        RoundPipe(nn.Sequential(nn.Linear(4, 4), shared))


# -- forward ----------------------------------------------------------------------------------------------------------
@row
def forward_gives_merged_outputs() -> None:
    """forward returns the merged output, as the plain model's."""
    wrapped = RoundPipe(net())
    with torch.no_grad():
        assert torch.allclose(wrapped(X), net()(X), rtol=1e-6)
        assert torch.allclose(wrapped(X, roundpipe_run_config=config(num_microbatch=6)), net()(X), rtol=1e-6)


@row
def inference_uses_the_newest_complete_weights() -> None:
    """Under no_grad: an asynchronous step is seen for certain after synchronize()."""
    wrapped = RoundPipe(net())
    optimizer = sgd(wrapped)
    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.step(optimizer.step)
    with torch.no_grad():
        at_once = wrapped(X)
        wrapped.synchronize()
        later, wanted = wrapped(X), wrapped.model(X)
    assert torch.allclose(later, wanted, rtol=1e-5)
    assert any(torch.allclose(at_once, one, rtol=1e-5) for one in (net()(X), wanted))


@row
def forward_takes_part_in_autograd() -> None:
    """loss.backward() on an output brings the gradients of parameters and inputs."""
    wrapped, plain = RoundPipe(net()), net()
    ours, theirs = X.clone().requires_grad_(True), X.clone().requires_grad_(True)
    wrapped(ours).square().sum().backward()
    plain(theirs).square().sum().backward()
    wrapped.synchronize()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5)
    assert torch.allclose(wrapped.model[0].weight.grad, plain[0].weight.grad, rtol=1e-5)


@row
def forward_refuses_what_it_cannot_do() -> None:
    """autograd.grad, backward(inputs=...), a second backward, and requires_grad=True without grad: RuntimeError."""
    wrapped = RoundPipe(net())
    x = X.clone().requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"autograd\.grad"):
        torch.autograd.grad(wrapped(x).sum(), x)
    with pytest.raises(RuntimeError, match="inputs"):
        wrapped(x).sum().backward(inputs=[x])
    loss = wrapped(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="requires_grad"):
        wrapped(X, roundpipe_run_config=config(requires_grad=True))


@row
def requires_grad_false_keeps_nothing() -> None:
    """requires_grad=False: outputs without a graph, also where gradients are enabled."""
    assert RoundPipe(net())(X).requires_grad
    assert not RoundPipe(net())(X, roundpipe_run_config=config(requires_grad=False)).requires_grad


# -- forward_backward -------------------------------------------------------------------------------------------------
@row
def the_sum_of_the_losses_on_the_cpu() -> None:
    """forward_backward returns the sum of the microbatch losses, on the CPU."""
    loss = RoundPipe(net()).forward_backward((X,), loss_fn=square_sum, run_config=config(num_microbatch=3))
    assert loss.device.type == "cpu" and not loss.requires_grad
    assert torch.allclose(loss, square_sum(net()(X), None), rtol=1e-6)


@row
def forward_backward_needs_grad_mode() -> None:
    """forward_backward: an error under no_grad."""
    with torch.no_grad(), pytest.raises(RuntimeError, match="grad"):
        RoundPipe(net()).forward_backward((X,), loss_fn=square_sum)


@row
def several_losses_and_outputs() -> None:
    """Several losses give a list of sums; return_outputs gives (loss, outputs)."""
    wrapped = RoundPipe(net())
    losses, outputs = wrapped.forward_backward(
        (X,), loss_fn=lambda out, _: [out.sum(), out.abs().sum()], return_outputs=True
    )
    expected = net()(X)
    assert torch.allclose(losses[0], expected.sum(), rtol=1e-5)
    assert torch.allclose(losses[1], expected.abs().sum(), rtol=1e-5)
    assert torch.allclose(outputs, expected, rtol=1e-5)


@row
def loss_fn_sees_one_microbatch_and_its_label() -> None:
    """loss_fn(output, label) is called for each microbatch; without one the output is the loss."""
    pieces = []

    def noting(output: torch.Tensor, label: Any) -> torch.Tensor:
        pieces.append((output.shape, label["y"].shape, label["name"]))
        return (output - label["y"]).square().sum()

    wrapped = RoundPipe(net())
    label = {"y": torch.zeros(6, 2), "name": "all"}
    wrapped.forward_backward((X,), label=label, loss_fn=noting, run_config=config(num_microbatch=3))
    assert pieces == [((2, 2), (2, 2), "all")] * 3

    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

    default = RoundPipe(nn.Sequential(net(), Sums()))
    assert torch.allclose(default.forward_backward((X,)), net()(X).sum(), rtol=1e-5)


@row
def keyword_arguments_reach_the_first_layer() -> None:
    """input_kwargs are the first layer's."""

    class Scales(nn.Linear):
        def forward(self, *, x: torch.Tensor, scale: float) -> torch.Tensor:
            return super().forward(x) * scale

    wrapped = RoundPipe(nn.Sequential(Scales(4, 2)))
    one, two = (
        wrapped.forward_backward(input_kwargs={"x": X, "scale": s}, loss_fn=lambda out, _: out.sum()) for s in (1, 2)
    )
    assert torch.allclose(two, 2 * one, rtol=1e-5)


@row
def gradients_accumulate_and_reach_inputs() -> None:
    """Gradients add up over calls until the step, and reach inputs that require grad."""
    wrapped, plain = RoundPipe(net()), net()
    ours, theirs = X.clone().requires_grad_(True), X.clone().requires_grad_(True)
    for _ in range(3):
        wrapped.forward_backward((ours,), loss_fn=square_sum)
        square_sum(plain(theirs), None).backward()
    wrapped.synchronize()
    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5)
    assert torch.allclose(wrapped.model[2].bias.grad, plain[2].bias.grad, rtol=1e-5)


@row
def results_do_not_depend_on_the_number_of_devices() -> None:
    """With the same num_microbatch the results are the same on any number of devices."""
    found = []
    for devices in (1, 2, 4):
        roundpipe.use_devices(f"host:{devices}")
        wrapped = RoundPipe(nn.Sequential(net(), nn.Dropout(0.5), nn.Linear(2, 2)))
        torch.manual_seed(3)
        wrapped.model[2].load_state_dict(nn.Linear(2, 2).state_dict())
        loss = wrapped.forward_backward((X,), loss_fn=square_sum, run_config=config(num_microbatch=3))
        wrapped.synchronize()
        found.append((loss, wrapped.model[0][0].weight.grad.clone()))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


# -- steps ------------------------------------------------------------------------------------------------------------
@row
def step_runs_on_the_optimizers_thread() -> None:
    """step(step_fn, is_async, *args, **kwargs): on the optimizer thread, where parameters() are the optimizer's."""
    wrapped = RoundPipe(net())
    own = {id(p) for p in wrapped.optim_parameters()}
    noted: list[Any] = []

    def step_fn(*args: Any, **kwargs: Any) -> None:
        noted.extend([threading.get_ident(), {id(p) for p in wrapped.parameters()}, args, kwargs])
        noted.append([p.grad is not None for p in wrapped.parameters()])

    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.step(step_fn, False, 1, key=2)
    assert noted[0] != threading.get_ident()
    assert noted[1:] == [own, (1,), {"key": 2}, [True] * 4]


@row
def asynchronous_steps_are_one_old_exact_ones_are_plain() -> None:
    """Async: the next iteration has weights one step old. is_async=False: as in plain PyTorch."""
    plain = net()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    wanted = []
    for _ in range(3):
        loss = square_sum(plain(X), None)
        wanted.append(loss.detach())
        loss.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
    for is_async in (False, True):
        wrapped = RoundPipe(net())
        optimizer = sgd(wrapped)

        def update(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        losses = []
        for _ in range(3):
            losses.append(wrapped.forward_backward((X,), loss_fn=square_sum, run_config=config(num_microbatch=1)))
            wrapped.step(update, is_async=is_async)
        if is_async:
            assert torch.equal(losses[1], losses[0]) and torch.allclose(losses[2], wanted[1], rtol=1e-5)
        else:
            assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(losses, wanted, strict=True))
        wrapped.synchronize()


@row
def nothing_trains_in_silence() -> None:
    """Gradients without optimizer parameters are a typed error."""
    wrapped = RoundPipe(net())
    wrapped.forward_backward((X,), loss_fn=square_sum)
    with pytest.raises(ConfigError, match="OptimizerCtx"):
        wrapped.step(lambda: None)


@row
def synchronize_shows_weights_and_gradients() -> None:
    """After synchronize host weights are the newest, and .grad is what has accumulated."""
    wrapped = RoundPipe(net())
    optimizer = sgd(wrapped)
    wrapped.forward_backward((X,), loss_fn=square_sum)
    wrapped.synchronize()
    gradient = wrapped.model[2].weight.grad.clone()
    before = wrapped.model[2].weight.detach().clone()
    wrapped.step(optimizer.step)
    wrapped.synchronize()
    assert torch.allclose(wrapped.model[2].weight, before - 0.1 * gradient)
    assert wrapped.model[2].weight.grad is None


@row
def optimizer_parameters_of_what_requires_grad() -> None:
    """optim_parameters / optim_named_parameters(prefix, remove_duplicate): of those that require grad."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    model[1].again = model[1].weight
    wrapped = RoundPipe(model)
    assert [name for name, _ in wrapped.optim_named_parameters("net")] == ["net.1.weight", "net.1.bias"]
    assert len(list(wrapped.optim_parameters())) == 2
    names = [name for name, _ in wrapped.optim_named_parameters(remove_duplicate=False)]
    assert sorted(names) == ["1.again", "1.bias", "1.weight"]
