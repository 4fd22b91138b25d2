"""The engine's own plans: cautious, then fitting, then fast, and never to and fro."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig
from roundpipe import engine as engines
from roundpipe.auto_plan import iteration_ms
from roundpipe.layer_cost import LayerCost, activation_bytes
from roundpipe.measurements import Measurements
from roundpipe.plan_keeper import PlanKeeper
from roundpipe.planner import Request, plan_stages
from roundpipe.stage_search import Part, StageLists

from . import oracle
from .at_rest import at_rest, fresh_engine
from .gpu_history import PeakHistory


class Model:
    """Layers of known sizes; measurements are whatever the test notes."""

    def __init__(self, weights: list[int], devices: int = 1, memory: int | None = None) -> None:
        self.weights, self.devices, self.memory = weights, devices, memory
        self.measurements = Measurements(len(weights))

    def layer_costs(self, run_type: str) -> list[LayerCost]:
        timer, sizes = self.measurements.timer(run_type), self.measurements.sizes
        costs = []
        for i, weight in enumerate(self.weights):
            known = sizes.of_layer(i) or (None, None)
            times = (timer.estimate_ms(phase, i) for phase in ("fwd", "re", "bwd"))
            costs.append(LayerCost(weight, weight, *times, input_bytes=known[0], inner_bytes=known[1]))
        return costs

    def plan_limits(self) -> tuple[int, int | None]:
        return self.devices, self.memory

    def note_sizes(self, call_bytes: int, inner: int, boundary: int = 0) -> None:
        self.measurements.sizes.begin(call_bytes)
        for i in range(len(self.weights)):
            self.measurements.sizes.note(i, call_bytes, boundary, inner)


def true_times(length: int, rng: random.Random) -> list[tuple[float, float, float]]:
    """Nothing like the weights' sizes."""
    forward = [rng.choice([0.5, 1.0, 2.0, 5.0]) * rng.uniform(0.8, 1.2) for _ in range(length)]
    return [(f, f * rng.uniform(0.95, 1.05), f * rng.uniform(1.5, 2.5)) for f in forward]


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("noise", [0.02, 0.25])
@pytest.mark.parametrize("seed", range(4))
def test_noisy_times_improve_the_plan_and_never_make_it_flap(devices: int, noise: float, seed: int) -> None:
    rng = random.Random(f"{devices}{noise}{seed}")
    times = true_times(24, rng)
    model = Model([10**6] * 24, devices)
    keeper = PlanKeeper(model)
    used = [keeper.plan("fused", devices + 1, "stage")]
    for iteration in range(300):
        noisy = []
        for layer, ms in enumerate(times):
            factors = [max(0.1, rng.gauss(1.0, noise)) * (20 if rng.random() < 0.005 else 1) for _ in range(3)]
            noisy += [(phase, layer, t * f) for phase, t, f in zip(("fwd", "re", "bwd"), ms, factors, strict=True)]
        if iteration == 0:
            noisy = [(phase, layer, 100 * ms) for phase, layer, ms in noisy]  # compiles, allocates
        model.measurements.training.record(noisy)
        plan = keeper.plan("fused", devices + 1, "stage")
        if plan != used[-1]:
            used.append(plan)
    assert len(used) <= 4
    assert all(plan not in used[:i] for i, plan in enumerate(used))  # a plan that was left does not come back
    costs = tuple(LayerCost(10**6, 10**6, *ms) for ms in times)
    part, request = Part(costs, True, True), Request(devices, devices, microbatches=devices + 1)
    best = iteration_ms([part], plan_stages([part], request), request)
    first, last = (iteration_ms([part], [StageLists(p.fwd_plan, p.bwd_plan)], request) for p in (used[0], used[-1]))
    assert last <= first * 1.001
    assert last <= 1.25 * best


def test_exact_times_are_settled_after_two_iterations() -> None:
    times = true_times(16, random.Random(1))
    model = Model([10**6] * 16, 2)
    keeper = PlanKeeper(model)
    plans = []
    for _ in range(40):
        plans.append(keeper.plan("fused", 3, "stage"))
        phases = ("fwd", "re", "bwd")
        model.measurements.training.record(
            [(phase, i, t) for i, ms in enumerate(times) for phase, t in zip(phases, ms, strict=True)]
        )
    assert plans[0] == plans[1] != plans[2]
    assert all(plan is plans[2] for plan in plans[3:])


def test_one_device_has_the_largest_fused_stage_whatever_the_times() -> None:
    rng = random.Random(0)
    model = Model([10**6] * 12)
    keeper = PlanKeeper(model)
    for _ in range(20):
        assert keeper.plan("fused", 2, "stage").bwd_plan == [range(12)]
        model.measurements.training.record([("fwd", i, rng.uniform(0.1, 9)) for i in range(12)])


def test_limited_memory_is_first_used_with_care_then_filled() -> None:
    memory = 100 * 10**6
    model = Model([10**6] * 12, memory=memory)
    keeper = PlanKeeper(model)
    careful = keeper.plan("fused", 2, "stage")
    assert [len(stage) for stage in careful.bwd_plan] == [1] * 12
    by_layer = keeper.plan("fused", 2, "layer")
    for plan in (careful, by_layer):  # and no more weights at a time than there must be
        assert all(len(stage) <= 2 for stage in plan.fwd_plan) and {len(stage) for stage in plan.bwd_plan} == {1}
    assert keeper.plan("infer", 2, "stage").fwd_plan == [range(12)]
    assert keeper.plan("fused", 2, "stage") == careful  # the call failed: still nothing known

    model.note_sizes(1000, inner=8 * 10**6, boundary=10**6)
    filled = keeper.plan("fused", 2, "stage")
    # 90 MB: two times the weights and gradients of the largest stage, three boundaries, activations and one layer more.
    assert len(filled.bwd_plan[0]) == 6
    for stage in filled.bwd_plan:
        costs = model.layer_costs("fused")[stage.start : stage.stop]
        assert 4 * 10**6 * len(filled.bwd_plan[0]) + activation_bytes(costs, by_layer=False) <= 0.9 * memory
    assert keeper.plan("fused", 2, "stage") is filled
    assert keeper.plan("fused", 2, "layer").bwd_plan == [range(12)]  # one layer's activations at a time


def test_a_larger_batch_makes_stages_smaller_a_smaller_one_changes_nothing() -> None:
    model = Model([10**6] * 12, memory=100 * 10**6)
    keeper = PlanKeeper(model)
    model.note_sizes(1000, inner=2 * 10**6)
    plans = []
    for size in (1000, 900, 1000, 2000, 1000, 2000):
        model.measurements.sizes.begin(size)  # known before the call runs, and so in proportion
        plans.append(keeper.plan("fused", 2, "stage"))
    lengths = [len(plan.bwd_plan[0]) for plan in plans]
    assert lengths[0] == lengths[1] == lengths[2] > lengths[3] == lengths[4] == lengths[5]
    assert plans[3] is plans[5]


def test_the_warning_of_a_large_layer_is_said_once() -> None:
    model = Model([10**6, 10**8, 10**6], memory=10**8)
    keeper = PlanKeeper(model)
    with pytest.warns(UserWarning, match="layer 1 needs 0.200 GB"):
        keeper.plan("fused", 2, "stage")
    with pytest.warns(UserWarning, match="layer 1 needs 0.100 GB"):
        keeper.plan("infer", 2, "stage")  # other bytes, another limit
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (100, 200, 300):
            model.note_sizes(size, inner=size)
            keeper.plan("fused", 2, "stage").check_valid(3, "fused")


def test_a_device_that_was_capped_meanwhile_is_noticed() -> None:
    model = Model([10**6] * 12, memory=100 * 10**6)
    keeper = PlanKeeper(model)
    model.note_sizes(100, inner=1000)
    before = keeper.plan("fused", 2, "stage")
    model.memory = 20 * 10**6
    after = keeper.plan("fused", 2, "stage")
    assert before.bwd_plan == [range(12)]
    assert max(len(stage) for stage in after.bwd_plan) == 3  # 6 MB of weights and gradients in half of 60 %
    model.memory = 100 * 10**6
    assert keeper.plan("fused", 2, "stage") == before


# -- on devices -----------------------------------------------------------------------------------------------------
class _Live:
    """Bytes that graphs hold now, by thread; the highest number seen."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.now: dict[int, int] = {}
        self.peak = 0

    def add(self, thread: int, size: int) -> None:
        with self.lock:
            self.now[thread] = self.now.get(thread, 0) + size
            self.peak = max(self.peak, self.now[thread])


class _Token:
    def __init__(self, live: _Live, size: int) -> None:
        self.live, self.size, self.thread = live, size, threading.get_ident()
        live.add(self.thread, size)

    def __del__(self) -> None:
        self.live.add(self.thread, -self.size)


class _Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, live: _Live, times: int) -> torch.Tensor:  # type: ignore[override]
        saved = x.repeat(times, 1)
        ctx.save_for_backward(saved)
        ctx.token = _Token(live, saved.nbytes)  # goes with the graph, as what is saved does
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        (saved,) = ctx.saved_tensors
        return grad * 2.0 + 0.0 * saved[0], None, None


class Wide(nn.Module):
    """Few weights, large activations."""

    def __init__(self, live: _Live, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.live, self.times = live, times

    def __deepcopy__(self, memo: Any) -> Wide:
        twin = Wide(_Live(), self.times)
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Keeps.apply(torch.tanh(self.linear(x)), self.live, self.times)


MIB = 1 << 20


@pytest.mark.parametrize("devices", [1, 2])
def test_activations_of_a_simulated_device_stay_within_its_memory(devices: int) -> None:
    """16 layers of 16 MiB of activations each, with 64 MiB a device: four times too much for one stage."""
    limit = 64 * MIB
    live = _Live()
    torch.manual_seed(0)
    rows = 512
    model = nn.Sequential(*(Wide(live, 4 * MIB // (rows * 16 * 4) * 2) for _ in range(16)))
    twin = oracle.twin(model)
    roundpipe.use_devices(f"host:{devices}@64MiB")
    wrapped = RoundPipe(model)
    plans = []
    batch = torch.randn(2 * rows, 16)
    for _ in range(3):
        torch.manual_seed(1)
        loss = wrapped.forward_backward(
            (batch,), loss_fn=lambda out, _: out.square().mean(), run_config=RoundPipeRunConfig(num_microbatch=2)
        )
        wrapped.synchronize()
        plans.append(wrapped._state.plans.plan("fused", 2, "stage"))
        torch.manual_seed(1)
        wanted = oracle.forward_backward(
            list(twin), (batch,), loss_fn=lambda out, _: out.square().mean(), num_microbatch=2
        )
        oracle.assert_close_to_scale(loss, wanted, "loss")
    oracle.assert_same_gradients(wrapped.model, twin)
    region = max(worker.region.numel() for worker in engines.current().workers)
    assert 8 * MIB <= live.peak <= limit - region
    longest = max(len(stage) for stage in plans[-1].bwd_plan)
    assert 1 < longest < 16
    if devices == 1:
        assert live.peak == longest * 8 * MIB  # and the memory is used


def test_weights_of_a_simulated_device_stay_within_its_memory() -> None:
    """32 MiB of weights, and as much of gradients, through devices of 8 MiB."""
    roundpipe.use_devices("host:2@8MiB")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(32)))
    twin = oracle.twin(model)
    wrapped = RoundPipe(model)
    for _ in range(3):
        x = torch.randn(6, 512)
        state = torch.get_rng_state()
        wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().mean())
        torch.set_rng_state(state)
        oracle.forward_backward(list(twin), (x,), loss_fn=lambda out, _: out.square().mean(), num_microbatch=3)
    wrapped.synchronize()
    oracle.assert_same_gradients(wrapped.model, twin)
    assert max(worker.region.numel() for worker in engines.current().workers) <= 0.6 * 8 * MIB


def test_a_layer_larger_than_the_device_is_an_error_with_its_size() -> None:
    roundpipe.use_devices("host:1@1MiB")
    wrapped = RoundPipe(nn.Sequential(nn.Linear(4, 1024), nn.Linear(1024, 1024)))
    with (
        pytest.warns(UserWarning, match="layer 1") as said,
        pytest.raises(roundpipe.errors.DeviceOutOfMemory, match="1048576"),
    ):
        wrapped.forward_backward((torch.randn(2, 4),), loss_fn=lambda out, _: out.sum())
    assert [warning.filename for warning in said] == [__file__]
    roundpipe.use_devices("host:1@64MiB")
    assert torch.isfinite(wrapped.forward_backward((torch.randn(2, 4),), loss_fn=lambda out, _: out.sum()))


def test_public_plans_follow_measurements_too() -> None:
    roundpipe.use_devices("host:1@64MiB")
    live = _Live()
    wrapped = RoundPipe(nn.Sequential(*(Wide(live, 256) for _ in range(8))))
    before = ModelExecutePlan.auto("fused", wrapped)
    assert before.bwd_plan == [range(8)]
    assert "estimated" in before.explain()
    for _ in range(2):
        wrapped.forward_backward((torch.randn(2048, 16),), loss_fn=lambda out, _: out.sum())
    wrapped.synchronize()
    after = ModelExecutePlan.auto("fused", wrapped)
    assert len(after.bwd_plan) > 1
    assert "estimated" not in after.explain()
    assert "activations" in after.explain()
    assert ModelExecutePlan.auto("infer", wrapped).fwd_plan == [range(8)]


class Growing(nn.Module):
    """About 5 times its input in activations."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


@pytest.mark.parametrize("limit", [22, 24, 26, 28])
def test_regions_of_the_first_plan_leave_room_for_those_after_it(limit: int) -> None:
    """Before activations are known stages are single layers, in a region for hardly more than one of them. Later stages
    have several times the weights and the activations, and their regions grow as far as there is room.
    """
    engine = fresh_engine(f"host:1@{limit}MiB")
    torch.manual_seed(0)
    model = nn.Sequential(*(Growing(128) for _ in range(48)))
    twin = oracle.twin(model)
    wrapped = RoundPipe(model)
    x = torch.randn(2048, 128)
    config = RoundPipeRunConfig(num_microbatch=2)
    regions = []
    for _ in range(10):
        wrapped.zero_grad()
        wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().mean(), run_config=config)
        wrapped.synchronize()
        regions.append(engine.workers[0].region.numel())
    one_layer = wrapped._state.layer_costs("fused")[0].stage_bytes(gradients=True)
    assert one_layer <= regions[0] <= one_layer + (limit << 20) // 64
    assert regions[-1] == regions[-2] > 2 * one_layer
    assert len(set(regions)) <= 4
    for piece in x.chunk(2):
        twin(piece).square().mean().backward()
    oracle.assert_same_gradients(wrapped.model, twin)
    with torch.no_grad():  # which needs no more than it has, and takes it for weights
        assert torch.isfinite(wrapped(x[:8])).all()
    wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().mean(), run_config=config)
    wrapped.synchronize()


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("other", ["itself", "teacher"])
def test_training_that_alternates_with_inference_settles(other: str, devices: int) -> None:
    """Inference wants more weights at a time than there is room for beside training's activations. The plans are given:
    those of our own follow the times of layers.
    """
    engine = fresh_engine(f"host:{devices}@24MiB")
    torch.manual_seed(0)
    student = RoundPipe(nn.Sequential(*(Growing(128) for _ in range(48))))
    teacher = student if other == "itself" else RoundPipe(nn.Sequential(*(Growing(256) for _ in range(24))))
    x, seen = torch.randn(2048, 128), torch.randn(64, 128 if other == "itself" else 256)
    trains, infers = ModelExecutePlan(), ModelExecutePlan()
    trains.fwd_plan = [range(i, i + 4) for i in range(0, 44, 4)]
    trains.bwd_plan = [range(i, i + 4) for i in range(44, -1, -4)]
    infers.fwd_plan = [range(24), range(24, 48)] if other == "itself" else [range(i, i + 6) for i in range(0, 24, 6)]

    def train(model: RoundPipe, rows: int) -> None:
        model.zero_grad()
        run_config = RoundPipeRunConfig(num_microbatch=2, execute_plan=trains)
        model.forward_backward((x[:rows],), loss_fn=lambda out, _: out.square().mean(), run_config=run_config)
        model.synchronize()

    def infer() -> None:
        with torch.no_grad():
            run_config = RoundPipeRunConfig(num_microbatch=2, execute_plan=infers)
            assert torch.isfinite(teacher(seen, roundpipe_run_config=run_config)).all()

    train(student, 256)  # which fits anywhere, and shows how large activations are
    infer()  # which shows how much room there is for a region of two stages
    regions = []
    for _ in range(4):
        infer()
        regions.append([worker.region.numel() for worker in engine.workers])
        train(student, 2048)
        regions.append([worker.region.numel() for worker in engine.workers])
    first, settled = regions[0], regions[4]
    assert all(region == settled for region in regions[4:])
    assert all(now < then for now, then in zip(settled, first, strict=True))
    del student
    at_rest()
    if other == "teacher":  # nobody needs the room any more
        infer()
        assert [worker.region.numel() for worker in engine.workers] == first


def test_stages_that_no_gradient_reaches_need_no_room() -> None:
    engine = fresh_engine("host:1@24MiB")
    model = nn.Sequential(*(Growing(128) for _ in range(24)))
    model[:23].requires_grad_(False)
    wrapped = RoundPipe(model)
    plan, whole = ModelExecutePlan(), ModelExecutePlan()
    plan.fwd_plan, plan.bwd_plan = [range(23)], [range(23, 24), range(23)]
    whole.fwd_plan = [range(24)]
    regions = []
    for _ in range(5):  # the first call of either kind shows what it needs, the second may take more
        wrapped.forward_backward(
            (torch.randn(2048, 128),),
            loss_fn=lambda out, _: out.square().mean(),
            run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=plan),
        )
        wrapped.synchronize()
        regions.append(engine.workers[0].region.numel())
        with torch.no_grad():
            wrapped(torch.randn(8, 128), roundpipe_run_config=RoundPipeRunConfig(num_microbatch=1, execute_plan=whole))
        regions.append(engine.workers[0].region.numel())
    assert len(set(regions[5:])) == 1


@pytest.mark.needs_cuda
def test_a_capped_gpu_is_respected() -> None:
    """Blocks whose activations together are several times the cap; plain default planning, from the first call on."""
    from torch.utils.checkpoint import checkpoint

    roundpipe.use_devices("cuda:0")
    total = torch.cuda.get_device_properties(0).total_memory
    cap = 2 << 30
    width, rows, blocks = 1024, 8192, 48  # 32 MiB a boundary, about 160 MiB in a block, 7.5 GiB in all

    torch.manual_seed(0)
    model = nn.Sequential(*(Growing(width) for _ in range(blocks)))
    twin = oracle.twin(model).cuda()
    x = torch.randn(2 * rows, width)
    for piece in x.chunk(2):
        value = piece.cuda()
        for block in twin:
            value = checkpoint(block, value, use_reentrant=False)
        value.square().mean().backward()
    wanted = [parameter.grad.cpu() for parameter in twin.parameters()]
    del twin, value
    roundpipe.use_devices("host:1")  # nothing of an earlier test's engine counts
    RoundPipe(nn.Linear(1, 1))
    roundpipe.use_devices("cuda:0")
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    used = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    torch.cuda.set_per_process_memory_fraction((used + cap) / total, 0)
    try:
        wrapped = RoundPipe(model)
        config = RoundPipeRunConfig(num_microbatch=2)
        with PeakHistory() as history:
            for _ in range(4):
                wrapped.zero_grad()
                wrapped.forward_backward((x,), loss_fn=lambda out, _: out.square().mean(), run_config=config)
            wrapped.synchronize()
        peak = torch.cuda.max_memory_allocated(0) - used
        longest = max(len(stage) for stage in wrapped._state.plans.plan("fused", 2, "stage").bwd_plan)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
    assert peak <= cap, str(history)
    assert 3 <= longest < blocks
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        oracle.assert_close_to_scale(parameter.grad, grad, "gradient", 1e-4)
