"""The usual advice for running out of memory, as users write it down: each block runs, and what it promises is so."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import ModelExecutePlan, RoundPipe, RoundPipeRunConfig, _ops
from roundpipe import engine as engines

from .at_rest import fresh_engine
from .oom_guide import (
    MORE_MICROBATCHES,
    ONE_CALL,
    PIN_MODES,
    RECOMPUTE_BY_LAYER,
    SEVERAL_CALLS,
    SMALLER_STAGES,
    filled,
)
from .pages import ROOT, python_blocks, run_block
from .plans import one_layer_stages

WIDTH = 64


def layers(count: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)])


def loss_fn(out: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (out - label).square().sum() / 4096


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec("from roundpipe import *\nfrom roundpipe import RoundPipe\n" + code, names)
    return names


def gradients_of(model: RoundPipe) -> list[torch.Tensor]:
    model.synchronize()
    return [p.grad.clone() for p in model.model.parameters() if p.grad is not None]


CONFIGS = [MORE_MICROBATCHES, MORE_MICROBATCHES.replace("16", "32"), RECOMPUTE_BY_LAYER]


@pytest.mark.parametrize("code", CONFIGS)
def test_configurations_change_memory_and_no_result(code: str) -> None:
    roundpipe.use_devices("host:2")
    model = RoundPipe(layers())
    x, label = torch.randn(32, WIDTH, dtype=torch.float32), torch.randn(32, WIDTH)
    config = run(code, {})["config"]
    loss = model.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)
    plain = layers()
    want = loss_fn(plain(x), label)
    want.backward()
    assert torch.allclose(loss, want, rtol=1e-5)
    for got, parameter in zip(gradients_of(model), plain.parameters(), strict=True):
        assert torch.allclose(got, parameter.grad, atol=1e-6)


def test_a_plan_within_a_limit() -> None:
    roundpipe.use_devices("host:2")
    model = RoundPipe(layers())
    plan = run(SMALLER_STAGES, {"model": model})["plan"]
    assert isinstance(plan, ModelExecutePlan)
    plan.check_valid(6, "fused")
    one = (WIDTH * WIDTH + WIDTH) * 4
    for limit in (6.0, 8.0, 16.0):  # in layers, with their gradients, two stages at a time
        plan = ModelExecutePlan.auto("fused", model, model_memory_limit=limit * 2.2 * one / 1e9)
        assert all(len(stage) * 2 * one <= limit * 1.1 * one for stage in plan.bwd_plan)
    with pytest.warns(UserWarning, match=r"layer \d.*GB"):
        plan = ModelExecutePlan.auto("fused", model, model_memory_limit=one / 1e9)
    assert all(len(stage) == 1 for stage in plan.bwd_plan)


class Names(dict[str, Any]):
    """What the block leaves to its reader: the loaded model as layers."""

    def __missing__(self, name: str) -> Any:
        if name != "my_model_sequential":
            raise KeyError(name)
        model = self["model"]
        return nn.Sequential(model.model.embed_tokens, model.model.norm, model.lm_head)


def test_pin_modes_and_a_model_from_files(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    roundpipe.use_devices("host:1")
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=4096)
    made = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**shape)).half()
    made.save_pretrained(tmp_path)
    names = Names(
        RoundPipe=RoundPipe,
        AutoModelForCausalLM=transformers.AutoModelForCausalLM,
        torch=torch,
        model_path=str(tmp_path),
        my_model=layers(),
    )
    registered, comment, off = PIN_MODES.partition("# 模型超过")
    exec(registered, {}, names)
    assert names["model"]._state.placement.mode == "register"
    assert _ops.host_claim_stats(0)[2] + _ops.host_claim_stats(0)[0] > 0
    exec(comment + off, {}, names)
    model = names["model"]
    assert model._state.placement.mode == "off"
    assert {p.dtype for p in model.model.parameters()} == {torch.float16}
    assert model._state.placement.needs.mapped_bytes >= 4096 * 32 * 2  # the weights lie in the file
    assert torch.equal(model.model[0].weight, made.model.embed_tokens.weight)
    with torch.no_grad():
        out = model(torch.randint(4096, (4, 8)))
    assert out.shape == (4, 8, 4096) and _ops.engine_bounced_bytes(engines.current().handle, 0) > 0


def test_fewer_rows_a_call_need_less_host_memory_and_give_the_same_gradients() -> None:
    code_once = filled(ONE_CALL, "label=label, loss_fn=loss_fn, run_config=config")
    code_twice = filled(SEVERAL_CALLS, "label=label1, loss_fn=loss_fn", "label=label2, loss_fn=loss_fn")
    rows = 4096
    x, label = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    peaks, gradients, states = [], [], []
    for code in (code_once, code_twice):
        fresh_engine("host:1")  # its peak is this run's
        model = RoundPipe(layers(), model_run_config=RoundPipeRunConfig(execute_plan=one_layer_stages(6)))
        with roundpipe.OptimizerCtx():
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        names = dict(
            model=model, optimizer=optimizer, loss_fn=loss_fn, large_batch=x, label=label,
            batch_part1=x[: rows // 2], batch_part2=x[rows // 2 :], label1=label[: rows // 2],
            label2=label[rows // 2 :], config=RoundPipeRunConfig(num_microbatch=16),
        )  # fmt: skip
        without_step, _, step = code.partition("model.step(")
        run(without_step, names)
        gradients.append(gradients_of(model))
        peaks.append(_ops.engine_live(engines.current().handle)[2])
        run("model.step(" + (step or "lambda: (optimizer.step(), optimizer.zero_grad()))"), names)
        model.synchronize()
        states.append(copy.deepcopy(model.state_dict()))
    assert all(map(torch.equal, gradients[0], gradients[1]))  # the same microbatches, added in the same order
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert peaks[1] < 0.7 * peaks[0]


def test_more_microbatches_of_one_batch_cost_no_host_memory() -> None:
    """What is kept for backward goes by rows, not by how they are cut."""
    peaks = []
    for pieces in (2, 16):
        fresh_engine("host:1")
        model = RoundPipe(layers())
        x, label = torch.randn(4096, WIDTH), torch.randn(4096, WIDTH)
        config = RoundPipeRunConfig(num_microbatch=pieces, execute_plan=one_layer_stages(6))
        model.forward_backward((x,), label=label, loss_fn=loss_fn, run_config=config)
        model.synchronize()
        peaks.append(_ops.engine_live(engines.current().handle)[2])
    assert peaks[1] <= 1.02 * peaks[0]


@pytest.mark.parametrize("page", ["memory.md", "memory.zh.md"])
def test_the_chapter_runs(page: str) -> None:
    path = ROOT / "docs" / page
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    for line, code in python_blocks(path):
        run_block(path, line, code, names)
    assert "config" in names
    names.clear()  # the skeletons' class holds it, and it holds the models
