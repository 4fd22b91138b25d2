"""Rows of the table: run configurations, splitting and merging, plans."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate
from torch.utils import _pytree as pytree

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, input_split
from roundpipe.batch import RoundPipePackedData
from roundpipe.errors import SplitError

from .api_rows import Notes, config, net, row, square_sum, stages

X = torch.linspace(-1, 1, 24).view(6, 4)


def pieces_of(*args: Any, split: Any = None, n: int = 3, **kwargs: Any) -> list[Any]:
    """What the first layer is called with, for each microbatch."""
    notes = Notes()
    with torch.no_grad():
        RoundPipe(notes)(*args, roundpipe_run_config=config(num_microbatch=n, split_input=split), **kwargs)
    return notes.seen


def merged(make: Any, n: int = 3, **fields: Any) -> Any:
    class Gives(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return make(x)

    with torch.no_grad():
        return RoundPipe(Gives(1, 1))(X, roundpipe_run_config=config(num_microbatch=n, **fields))


# -- configuration ----------------------------------------------------------------------------------------------------
@row
def none_is_not_set_and_a_call_overrides_the_model() -> None:
    """None means "not set here": the call's setting, else the model's, else the default."""
    assert all(getattr(RoundPipeRunConfig(), f.name) is None for f in dataclasses.fields(RoundPipeRunConfig))
    notes = Notes()
    wrapped = RoundPipe(notes, model_run_config=config(num_microbatch=2))
    for run_config, count in ((None, 2), (config(num_microbatch=3), 3), (config(merge_output=list), 2)):
        notes.seen.clear()
        with torch.no_grad():
            wrapped(X, roundpipe_run_config=run_config)
        assert len(notes.seen) == count


@row
def default_number_of_microbatches() -> None:
    """num_microbatch: devices + 1."""
    for devices in (1, 3):
        roundpipe.use_devices(f"host:{devices}")
        notes = Notes()
        with torch.no_grad():
            RoundPipe(notes)(X)
        assert len(notes.seen) == devices + 1


@row
def random_numbers_of_recompute() -> None:
    """preserve_rng_state (default True): recompute sees the forward's random numbers; False: others."""

    class Draws(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn.append(torch.rand(()).item())
            return super().forward(x)

    plan = stages([range(1)], [range(1, 2), range(1)])
    for preserve, same in ((None, True), (True, True), (False, False)):
        drawn: list[float] = []
        wrapped = RoundPipe(nn.Sequential(Draws(4, 4), nn.Linear(4, 1)))
        wrapped.forward_backward(
            (X,),
            loss_fn=square_sum,
            run_config=config(num_microbatch=2, preserve_rng_state=preserve, execute_plan=plan),
        )
        wrapped.synchronize()
        assert (drawn[:2] == drawn[2:]) is same


@row
def grain_of_recompute() -> None:
    """recompute_grain: "stage" repeats the whole stage before its backward, "layer" goes layer by layer."""

    class Tells(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:  # type: ignore[override]
            ctx.name = name
            order.append(("re " if roundpipe.doing_recompute() else "fwd ") + name)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            order.append("bwd " + ctx.name)
            return grad, None

    class Named(nn.Linear):
        name = ""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Tells.apply(super().forward(x), self.name)

    plan = stages([range(2)], [range(2, 3), range(2)])
    for grain, expected in (
        (None, ["re a", "re b", "bwd b", "bwd a"]),
        ("layer", ["re b", "bwd b", "re a", "bwd a"]),
    ):
        order: list[str] = []
        wrapped = RoundPipe(nn.Sequential(*(Named(4, 4) for _ in range(3))))
        for layer, name in zip(wrapped.layers, "abc", strict=True):
            layer.name = name
        wrapped.forward_backward(
            (X,), loss_fn=square_sum, run_config=config(num_microbatch=1, recompute_grain=grain, execute_plan=plan)
        )
        wrapped.synchronize()
        assert order[-4:] == expected


@row
def output_device_is_the_cpu() -> None:
    """output_device: merged outputs live on the CPU by default."""
    with torch.no_grad():
        assert RoundPipe(net())(X).device.type == "cpu"
        assert RoundPipe(net())(X, roundpipe_run_config=config(output_device="cpu")).device.type == "cpu"


@row
def wrong_configurations() -> None:
    """Wrong types, ranges, names and lengths are TypeError or ValueError."""
    for fields in (
        {"num_microbatch": 0},
        {"recompute_grain": "tree"},
        {"split_input": (None,)},
        {"requires_grad": 1},
        {"execute_plan": 3},
        {"nonsense": 1},
    ):
        with pytest.raises((TypeError, ValueError)):
            config(**fields)


# -- splitting --------------------------------------------------------------------------------------------------------
@row
def pieces_are_those_of_tensor_split() -> None:
    """Arguments: every tensor with dimensions is cut on dim 0, as tensor_split does; the rest is replicated."""
    seen = pieces_of(torch.arange(7.0), (torch.tensor(5), torch.arange(7), "text"))
    sizes = [(args[0].tolist(), args[1][1].numel(), args[1][2], args[1][0].item()) for args, _ in seen]
    assert sizes == [([0, 1, 2], 3, "text", 5), ([3, 4], 2, "text", 5), ([5, 6], 2, "text", 5)]


@row
def keyword_tensors_of_the_batch_size_are_cut() -> None:
    """Keyword arguments: tensors whose dim 0 is the batch size of the args; the rest is replicated."""
    seen = pieces_of(X, rows=torch.zeros(6), table=torch.zeros(5), flag=True)
    assert [tuple(kwargs["rows"].shape) for _, kwargs in seen] == [(2,)] * 3
    assert all(kwargs["table"].shape == (5,) and kwargs["flag"] is True for _, kwargs in seen)


@row
def the_first_keyword_tensor_sets_the_batch_size() -> None:
    """Without tensor args the batch size is the first tensor's among the keyword arguments."""

    class Keywords(Notes):
        def forward(self, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(kwargs["x"], **kwargs)

    notes = Keywords()
    with torch.no_grad():
        RoundPipe(notes)(x=X, mask=torch.ones(6), table=torch.ones(4), roundpipe_run_config=config(num_microbatch=2))
    assert [(k["x"].shape[0], k["mask"].shape[0], k["table"].shape[0]) for _, k in notes.seen] == [(3, 3, 4)] * 2


@row
def nothing_stays_undivided_in_silence() -> None:
    """An args or label tensor whose size does not fit is an error."""
    with pytest.raises(SplitError, match="args"):
        pieces_of(X, torch.zeros(5, 4))
    with pytest.raises(SplitError, match="label"):
        RoundPipe(net()).forward_backward((X,), label=torch.zeros(5), loss_fn=square_sum)


@row
def split_by_spec() -> None:
    """split_input: (args spec or None, kwargs spec or None) of TensorChunkSpec and _Replicate."""
    seen = pieces_of(X.T, X, split=((TensorChunkSpec(1), _Replicate()), {"k": TensorChunkSpec(0)}), k=torch.zeros(6))
    assert all(a[0].shape == (4, 2) and a[1].shape == (6, 4) and k["k"].shape == (2,) for a, k in seen)


@row
def split_by_function() -> None:
    """split_input: f(args, kwargs, n) -> (list, list); split_label: f(label, n) -> list."""
    seen = pieces_of(X, split=lambda args, kwargs, n: ([(args[0][i::n],) for i in range(n)], [kwargs] * n))
    assert torch.equal(seen[1][0][0], X[1::3])
    labels = []

    def loss_fn(output: torch.Tensor, label: Any) -> torch.Tensor:
        labels.append(label)
        return output.sum()

    RoundPipe(net()).forward_backward(
        (X,), label="ab", loss_fn=loss_fn, run_config=config(num_microbatch=2, split_label=lambda label, n: list(label))
    )
    assert labels == ["a", "b"]


@row
def label_by_spec() -> None:
    """split_label: a spec like the label."""
    shapes = []

    def loss_fn(output: torch.Tensor, label: Any) -> torch.Tensor:
        shapes.append((tuple(label[0].shape), tuple(label[1].shape)))
        return output.sum()

    RoundPipe(net()).forward_backward(
        (X,),
        label=(torch.zeros(2, 6), torch.zeros(6)),
        loss_fn=loss_fn,
        run_config=config(num_microbatch=2, split_label=(TensorChunkSpec(1), _Replicate())),
    )
    assert shapes == [((2, 3), (6,))] * 2


@dataclasses.dataclass
class Registered:
    x: torch.Tensor


@dataclasses.dataclass
class Unregistered:
    x: torch.Tensor


pytree.register_pytree_node(Registered, lambda r: ([r.x], None), lambda leaves, _: Registered(*leaves))


@row
def trees_are_pytrees() -> None:
    """Registered types work as arguments and outputs; others that hold tensors are an error that says how."""

    class Takes(nn.Linear):
        def forward(self, given: Registered) -> Registered:  # type: ignore[override]
            shapes.append(given.x.shape)
            return Registered(given.x + 1)

    shapes: list[Any] = []
    wrapped = RoundPipe(Takes(1, 1))
    with torch.no_grad():
        out = wrapped(Registered(X), roundpipe_run_config=config(num_microbatch=3))
        assert isinstance(out, Registered) and torch.equal(out.x, X + 1)
        assert shapes == [(2, 4)] * 3
        with pytest.raises(SplitError, match="register_pytree_node"):
            wrapped(Unregistered(X))


@row
def one_microbatch_calls_no_function() -> None:
    """With one microbatch split and merge functions are not called."""

    def refuse(*_: Any) -> Any:
        raise AssertionError("called")

    wrapped = RoundPipe(net())
    wrapped.forward_backward(
        (X,),
        label=X,
        loss_fn=square_sum,
        return_outputs=True,
        run_config=config(num_microbatch=1, split_input=refuse, split_label=refuse, merge_output=refuse),
    )


@row
def a_small_batch_runs_with_as_many_as_it_has_rows() -> None:
    """A batch smaller than num_microbatch runs with its rows as microbatches, and warns once."""
    input_split._warned_small_batch = False
    with pytest.warns(UserWarning, match="2 rows"):
        assert len(pieces_of(X[:2], n=4)) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(pieces_of(X[:3], n=4)) == 3


# -- merging ----------------------------------------------------------------------------------------------------------
@row
def automatic_merge() -> None:
    """Tensors are concatenated on dim 0, 0-dim ones averaged, other leaves must be equal."""
    out = merged(lambda x: {"rows": x, "mean": x.sum(), "tag": "a", "none": None})
    assert torch.equal(out["rows"], X) and torch.allclose(out["mean"], X.sum() / 3, atol=1e-6)
    assert (out["tag"], out["none"]) == ("a", None)
    with pytest.raises(SplitError):
        merged(lambda x: float(x.sum()))
    assert torch.equal(merged(lambda x: x, merge_output=True), X)


@row
def merge_by_spec() -> None:
    """merge_output: a spec of TensorChunkSpec, _Replicate, _CustomReducer."""
    total = _CustomReducer(torch.tensor(0.0), lambda a, b: a + b)
    out = merged(lambda x: (x.T, x.sum(), 5), merge_output=(TensorChunkSpec(1), total, _Replicate()))
    assert torch.equal(out[0], X.T) and torch.allclose(out[1], X.sum(), atol=1e-6) and out[2] == 5


@row
def merge_by_function() -> None:
    """merge_output: f(outputs) -> anything."""
    assert [o.shape[0] for o in merged(lambda x: x, merge_output=list)] == [2, 2, 2]


@row
def merge_false_gives_packed_data() -> None:
    """merge_output=False: each leaf is a RoundPipePackedData with transfer_event and synchronize()."""
    out = merged(lambda x: {"rows": x, "tag": "a"}, merge_output=False)
    rows = out["rows"]
    assert isinstance(rows, RoundPipePackedData) and isinstance(rows, list) and len(rows) == 3
    assert len(rows.transfer_event) == 3
    rows.synchronize()
    assert torch.equal(torch.cat(list(rows)), X)


@row
def the_next_model_takes_packed_outputs() -> None:
    """Another RoundPipe takes packed data as it is, and gradients go back through it."""
    first, second = RoundPipe(net()), RoundPipe(nn.Linear(2, 3))
    x, packed = X.clone().requires_grad_(True), config(num_microbatch=3, merge_output=False)
    out = second(first(x, roundpipe_run_config=packed))
    wanted = second.model(first.model(X))
    assert torch.allclose(out, wanted, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == X.shape


@row
def packed_inputs_set_the_number_of_microbatches() -> None:
    """Packed inputs set the microbatch count; the shortest wins, with a warning."""
    packed = merged(lambda x: x, merge_output=False)
    assert len(pieces_of(packed, n=5)) == 3
    packed.synchronize()
    with pytest.warns(UserWarning, match="shortest"):
        assert len(pieces_of(packed, RoundPipePackedData(list(packed)[:2]), n=5)) == 2


# -- plans ------------------------------------------------------------------------------------------------------------
@row
def a_new_plan_is_two_empty_lists() -> None:
    """ModelExecutePlan(): fwd_plan and bwd_plan."""
    plan = ModelExecutePlan()
    assert plan.fwd_plan == [] and plan.bwd_plan == []


@row
def check_valid_names_the_layer() -> None:
    """check_valid(num_layers, run_type): ValueError naming the layer that is wrong; every layer exactly once."""
    stages([range(2), range(2, 3)], []).check_valid(3, "infer")
    stages([range(3)], [range(2, 3), range(2)]).check_valid(3, "train")
    stages([range(2)], [range(2, 3), range(2)]).check_valid(3, "fused")
    for plan, run_type, layer in (
        (stages([range(2)], []), "infer", 2),
        (stages([range(1), range(2, 3)], []), "infer", 1),
        (stages([range(3)], [range(2), range(2, 3)]), "train", 0),
        (stages([range(3)], [range(2, 3), range(2)]), "fused", 2),
    ):
        with pytest.raises(ValueError, match=f"layer {layer}"):
            plan.check_valid(3, run_type)


@row
def a_given_plan_is_used() -> None:
    """execute_plan: its stages run, whatever the planner would choose."""
    roundpipe.use_devices("host:1")
    order = []

    class Tells(nn.Linear):
        index = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order.append(self.index)
            return super().forward(x)

    wrapped = RoundPipe(nn.Sequential(Tells(4, 4), Tells(4, 4)))
    wrapped.layers[1].index = 1
    for plan, expected in (
        (stages([range(2)], []), [0, 1, 0, 1]),
        (stages([range(1), range(1, 2)], []), [0, 0, 1, 1]),
    ):
        order.clear()
        with torch.no_grad():
            wrapped(X, roundpipe_run_config=config(num_microbatch=2, execute_plan=plan))
        assert order == expected


@row
def auto_gives_a_plan_or_a_list_with_the_last_fused() -> None:
    """auto(run_type, *models): a plan, or plans made together; only the last of a "fused" list is fused."""
    one, two = RoundPipe(net()), RoundPipe(net())
    for run_type in ("infer", "train", "fused"):
        ModelExecutePlan.auto(run_type, one).check_valid(3, run_type)
    first, second = ModelExecutePlan.auto("fused", one, two)
    first.check_valid(3, "train")
    second.check_valid(3, "fused")


@row
def auto_makes_at_least_min_stages() -> None:
    """min_stages: the number of devices by default."""
    roundpipe.use_devices("host:3")
    wrapped = RoundPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))))
    assert len(ModelExecutePlan.auto("infer", wrapped).fwd_plan) >= 3
    assert len(ModelExecutePlan.auto("infer", wrapped, min_stages=7).fwd_plan) >= 7


@row
def auto_trades_balance_for_fewer_stages() -> None:
    """upper_threshold: how much slower than in the fastest plan the slowest stage may be, where that saves stages."""
    roundpipe.use_devices("host:4")
    wrapped = RoundPipe(nn.Sequential(*(nn.Linear(4, 4) for _ in range(32))))
    plans = [ModelExecutePlan.auto("fused", wrapped, upper_threshold=threshold) for threshold in (1.0, 4.0)]
    few, many = sorted(len(plan.fwd_plan) + len(plan.bwd_plan) for plan in plans)
    assert few < many == len(plans[0].fwd_plan) + len(plans[0].bwd_plan)


@row
def auto_stays_within_half_the_limit() -> None:
    """model_memory_limit in GB (1e9): a stage stays within half of it; one layer above warns and names it."""
    roundpipe.use_devices("host:1")
    wrapped = RoundPipe(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))))  # 16,384 bytes each
    plan = ModelExecutePlan.auto("fused", wrapped, model_memory_limit=8 * 16384 / 1e9)
    assert all(len(stage) <= 4 for stage in plan.fwd_plan) and all(len(stage) <= 2 for stage in plan.bwd_plan)
    with pytest.warns(UserWarning, match=r"layer \d \(Linear\)"):
        ModelExecutePlan.auto("fused", wrapped, model_memory_limit=1e-5)


@row
def auto_takes_60_percent_of_the_smallest_device() -> None:
    """model_memory_limit: by default 60 % of the smallest device."""
    roundpipe.use_devices("host:1@1MB")
    wrapped = RoundPipe(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(40))))
    most = int(0.3e6 // 16384)  # 18 layers in half of it
    plan = ModelExecutePlan.auto("infer", wrapped)
    assert max(len(stage) for stage in plan.fwd_plan) <= most
    assert len(plan.fwd_plan) == -(-40 // most)
    assert "Bound by: memory" in plan.explain()


@row
def plans_explain_themselves() -> None:
    """plan.explain() tells stages, bytes, times and what bounds them."""
    text = ModelExecutePlan.auto("fused", RoundPipe(net())).explain()
    assert "fused" in text and "predicted" in text and "Bound by" in text
