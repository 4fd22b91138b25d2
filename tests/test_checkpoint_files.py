"""What stands in the files: the safetensors format, names and shards that transformers reads, tensors in any order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import OptimizerCtx, RoundPipe, optim, wrap_model_to_roundpipe
from roundpipe.checkpoint.chunks import bytes_of, chunks
from roundpipe.checkpoint.tensor_file import Spec, TensorFile, lay_out
from roundpipe.errors import CheckpointError, ConfigError
from roundpipe.roundpipe import AutoRoundPipe

from .checkpoint_runs import Run, network

safetensors = pytest.importorskip("safetensors")
safetensors_torch = pytest.importorskip("safetensors.torch")

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


@pytest.fixture(autouse=True)
def two_devices() -> None:
    roundpipe.use_devices("host:2")


def read(directory: Path, kind: str = "model") -> dict[str, torch.Tensor]:
    """With the library."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob(f"{kind}-*.safetensors")):
        found |= safetensors_torch.load_file(path)
    return found


def every_kind_of_tensor() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    bits = torch.randint(0, 256, (3, 5, 8), dtype=torch.uint8)
    made = {str(d): (bits % 2).bool() if d == torch.bool else bits.clone().view(d) for d in DTYPES}
    return made | {
        "0-dim": torch.tensor(1.5),
        "empty": torch.empty(0, 3, dtype=torch.bfloat16),
        "odd": torch.arange(3, dtype=torch.uint8),
    }


def test_the_library_reads_what_we_write_and_we_what_it_writes(tmp_path: Path) -> None:
    tensors = every_kind_of_tensor()
    layout = lay_out("a", {n: Spec(t.dtype, tuple(t.shape)) for n, t in tensors.items()}, {"format": "pt"})
    data = bytearray(layout.size_bytes)
    data[: len(layout.header)] = layout.header
    for name, tensor in tensors.items():
        if tensor.numel():
            piece = tensor.contiguous()
            begin = layout.offsets[name]
            assert begin % tensor.element_size() == 0
            data[begin : begin + tensor.numel() * tensor.element_size()] = bytes_of(piece)
    (tmp_path / "ours").write_bytes(data)
    safetensors_torch.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    got = safetensors_torch.load_file(tmp_path / "ours")
    file = TensorFile(tmp_path / "theirs")
    for name, tensor in tensors.items():
        for other in (got[name], file.tensor(name)):
            assert other.dtype == tensor.dtype and other.shape == tensor.shape
            assert torch.equal(other.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    with pytest.raises(ConfigError, match="complex128"):
        lay_out("a", {"x": Spec(torch.complex128, (2,))}, {})


@pytest.mark.parametrize("chunk_bytes", [1, 24, 1000, 1 << 20])
def test_chunks_are_the_tensor_in_row_major_order(chunk_bytes: int) -> None:
    torch.manual_seed(0)
    base = torch.randn(6, 10, 4, 3)
    for tensor in (
        base,
        base.permute(3, 0, 2, 1),
        base.to(memory_format=torch.channels_last),
        base[:, ::2],
        base[0, 0, :1].expand(5, 3),
        base[0, 0, :, 0],
        torch.tensor(2.0),
        base[:0],
    ):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            pieces = list(chunks(tensor, dtype, chunk_bytes))
            assert all(piece.is_contiguous() and piece.dtype == dtype for piece in pieces)
            # An element is not divided.
            assert all(p.nbytes <= max(chunk_bytes, 8) for p in pieces)
            got = torch.cat([p.reshape(-1) for p in pieces]) if pieces else torch.empty(0, dtype=dtype)
            assert torch.equal(got, tensor.to(dtype).reshape(-1))
    whole = next(chunks(base, torch.float32, 1 << 20))
    assert whole.data_ptr() == base.data_ptr()  # no copy where none is needed


@pytest.mark.parametrize(("how", "mode"), [("split", "async"), ("adamw", "exact"), ("adamw", "async")])
def test_names_and_values_are_those_of_the_state_dict(tmp_path: Path, how: str, mode: str) -> None:
    run = Run(how, mode).train(3)
    run.save(tmp_path / "a", max_shard_bytes=300).wait()
    state = run.model.state_dict()
    found = read(tmp_path / "a")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in state.items())
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == state.keys()
    assert len(set(index["weight_map"].values())) > 3
    for name, file in index["weight_map"].items():
        with safetensors.safe_open(tmp_path / "a" / file, "pt") as opened:
            assert name in opened.keys() and opened.metadata() == {"format": "pt"}  # noqa: SIM118 (no dictionary)
    sizes = [path.stat().st_size for path in (tmp_path / "a").glob("model-*")]
    assert max(sizes) < 1000
    states = read(tmp_path / "a", "optimizer")
    assert {"exp_avg/0.linear.weight", "exp_avg_sq/2.bias"} <= states.keys()
    assert ("master_low/2.weight" if how == "split" else "master/2.weight") in states
    assert bool(read(tmp_path / "a", "previous")) == (mode == "async")
    other = Run(how, mode, seed=2).load(tmp_path / "a")
    assert all(torch.equal(value, state[name]) for name, value in other.model.state_dict().items())


class Tied(nn.Module):
    """A weight under two names, one without elements, a buffer that is not saved, and state that is no tensor."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.register_buffer("position", torch.arange(4.0), persistent=False)
        self.note: Any = {"count": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.empty.sum() + self.position

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


def tied(seed: int) -> RoundPipe:
    torch.manual_seed(seed)
    weight = nn.Parameter(torch.randn(4, 4).t())
    return RoundPipe(nn.Sequential(Tied(weight), nn.Linear(4, 4), Tied(weight)))


def test_shared_empty_and_extra(tmp_path: Path) -> None:
    first, second = tied(0), tied(1)
    first.model[0].note = {"count": 3, "list": [1.5, None]}
    roundpipe.save(first, None, None, tmp_path / "a").wait()
    assert sorted(read(tmp_path / "a")) == ["0.empty", "0.weight", "1.bias", "1.weight", "2.empty"]
    assert roundpipe.load(second, None, None, tmp_path / "a") is None
    assert torch.equal(second.model[2].weight, first.model[0].weight)
    assert second.model[2].weight is second.model[0].weight
    assert second.model[0].note == {"count": 3, "list": [1.5, None]} and second.model[2].note == {"count": 0}


def test_transformers_loads_the_directory(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from .causal_models import make_batch, make_model

    model = make_model("llama", tied=True)
    streamed = wrap_model_to_roundpipe(model, optim_dtype=torch.float32)
    with OptimizerCtx():
        optimizer = torch.optim.AdamW(streamed.parameters(), lr=1e-2)
    batch = make_batch()
    streamed.forward_backward(
        input_kwargs=dict(**batch, return_logits=False), loss_fn=lambda output, _: output.loss / 3
    )
    streamed.step(lambda: (optimizer.step(), optimizer.zero_grad()))
    roundpipe.save(streamed, optimizer, None, tmp_path / "a", max_shard_bytes=8000).wait()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a", attn_implementation="eager")
    assert type(plain) is type(model) and plain.lm_head.weight is plain.model.embed_tokens.weight
    state = streamed.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in plain.state_dict().items())


def test_only_what_trains(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from .architectures import BY_NAME
    from .causal_models import make_batch, make_model
    from .test_models import with_lora

    def adapted() -> tuple[RoundPipe, Any]:
        streamed = wrap_model_to_roundpipe(with_lora(make_model("llama"), BY_NAME["Llama"]))
        return streamed, optim.AdamW(streamed, lr=1e-2)

    def train(streamed: RoundPipe, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            streamed.forward_backward(
                input_kwargs=dict(**make_batch(), return_logits=False), loss_fn=lambda output, _: output.loss / 3
            )
            streamed.step(optimizer)

    first, optimizer = adapted()
    train(first, optimizer, 2)
    roundpipe.save(first, optimizer, None, tmp_path / "a", trainable_only=True).wait()
    saved = read(tmp_path / "a").keys()
    trained = {name for name, p in first._naming_model().named_parameters() if p.requires_grad}
    assert saved == trained and all("lora" in name for name in saved)
    train(first, optimizer, 2)
    second, other = adapted()
    train(second, other, 1)
    roundpipe.load(second, other, None, tmp_path / "a")
    train(second, other, 2)
    want = first.state_dict()
    assert all(torch.equal(value, want[name]) for name, value in second.state_dict().items())
    with pytest.raises(CheckpointError, match="lacks"):  # a model that trains all of it
        roundpipe.load(wrap_model_to_roundpipe(make_model("llama")), None, None, tmp_path / "a")


def test_a_model_with_a_forward_of_its_own(tmp_path: Path) -> None:
    from .auto_models import UNet

    def make(seed: int) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        wrapped = wrap_model_to_roundpipe(UNet(), lower_threshold=1)
        with OptimizerCtx():
            return wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-2)

    def train(wrapped: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
        images = torch.linspace(-1, 1, 4 * 64).view(4, 1, 8, 8)
        for _ in range(steps):
            wrapped(images, labels=images.square())["loss"].backward()
            wrapped.step(lambda: (optimizer.step(), optimizer.zero_grad()))

    first, optimizer = make(0)
    assert isinstance(first, AutoRoundPipe)
    train(first, optimizer, 2)
    roundpipe.save(first, optimizer, None, tmp_path / "a")
    train(first, optimizer, 2)
    second, other = make(1)
    roundpipe.load(second, other, None, tmp_path / "a")
    train(second, other, 2)
    want = first.state_dict()
    assert want.keys() == second.state_dict().keys()
    assert all(torch.equal(value, want[name]) for name, value in second.state_dict().items())


FORMATS: list[tuple[Any, Any]] = [
    (dict(master="float32"), dict(master="split")),
    (dict(master="split"), dict(master="float32", state_dtype="bfloat16")),
    (dict(master="float32"), dict(state_dtype="int8")),
    (dict(state_dtype="int8"), dict(state_dtype="float32")),
    ("torch", dict(master="split")),
    (dict(master="split"), "torch"),
    (dict(state_dtype="int8"), "torch"),
]


@pytest.mark.parametrize(("saved", "loaded"), FORMATS, ids=str)
def test_another_format_keeps_what_it_can(tmp_path: Path, saved: Any, loaded: Any) -> None:
    """Masters are exact in every format; moments as near as the coarser of the two is."""

    def make(how: Any, seed: int) -> tuple[RoundPipe, torch.optim.Optimizer]:
        model = RoundPipe(network(torch.bfloat16, seed), optim_dtype=torch.float32)
        if isinstance(how, dict):
            return model, optim.AdamW(model, lr=1e-2, **how)
        with OptimizerCtx():
            return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: RoundPipe, optimizer: torch.optim.Optimizer) -> None:
        torch.manual_seed(3)
        for _ in range(3):
            model.forward_backward((torch.randn(6, 8).bfloat16(),), loss_fn=lambda out, _: out.float().square().mean())
            compact = isinstance(optimizer, optim.CompactOptimizer)
            model.step(optimizer if compact else lambda: (optimizer.step(), optimizer.zero_grad()), False)
        model.synchronize()

    def masters(model: RoundPipe, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        if isinstance(optimizer, optim.CompactOptimizer):
            return dict(optimizer.named_masters())
        return {name: p.detach() for name, p in model.optim_named_parameters()}

    def moments(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        found = {}
        for number, state in optimizer.state_dict()["state"].items():
            for position, key in enumerate(("exp_avg", "exp_avg_sq")):
                value = state[key]
                if f"{key}_scale" in state:
                    flat = torch.empty(value.numel())
                    memory = value.as_strided((value.numel(),), (1,)) if value.numel() else value.reshape(0)
                    roundpipe._ops.decode_moment(memory, state[f"{key}_scale"], flat, position)
                    value = flat.as_strided(value.shape, value.stride())
                found[f"{key} {number}"] = value.float().clone()
            found[f"step {number}"] = state["step"].clone()
        return found

    first, second = make(saved, 0), make(loaded, 1)
    train(*first)
    roundpipe.save(*first, None, tmp_path / "a").wait()
    roundpipe.load(*second, None, tmp_path / "a")
    got, want = masters(*second), masters(*first)
    # torch rounds ties to even and a split master away from zero: such a weight begins anew from what it shows.
    assert all(float((got[n] != want[n]).float().mean()) < 0.02 for n in want)
    coarse = "int8" in str(saved) + str(loaded) or "bfloat16" in str(loaded)
    for name, value in moments(second[1]).items():
        expected = moments(first[1])[name]
        bound = 0.05 * float(expected.abs().max()) if coarse and "int8" not in str(saved) else 0.0
        assert float((value - expected).abs().max()) <= bound, name
    train(*second)  # it goes on


class Strange(torch.optim.Optimizer):
    """State that does not simply stand in its memory."""

    def __init__(self, params: Any, value: torch.Tensor) -> None:
        super().__init__(params, {})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["value"] = value

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise NotImplementedError


class Subclass(torch.Tensor):
    pass


def test_state_that_is_no_ordinary_tensor(tmp_path: Path) -> None:
    conjugate = torch.randn(3, 2, dtype=torch.complex64).conj()
    negative = torch.randn(4, 2, dtype=torch.complex64).conj().imag
    for value in (conjugate, negative):
        # torch brings loaded state into the dtype of its parameter.
        model = RoundPipe(nn.Sequential(nn.Linear(2, 2, dtype=value.dtype)))
        with OptimizerCtx():
            optimizer = Strange(model.parameters(), value)
            other = Strange(model.parameters(), torch.zeros_like(value))
        with torch.inference_mode():
            roundpipe.save(model, optimizer, None, tmp_path / "a", overwrite=True).wait()
        assert torch.equal(read(tmp_path / "a", "optimizer")["value/0.weight"], value)
        with torch.inference_mode():
            roundpipe.load(model, other, None, tmp_path / "a")
        assert all(torch.equal(state["value"], value) for state in other.state.values())
    for value in (torch.eye(2).to_sparse(), torch.ones(2).as_subclass(Subclass)):
        with OptimizerCtx():
            optimizer = Strange(model.parameters(), value)
        with pytest.raises(ConfigError, match="ordinary"):
            roundpipe.save(model, optimizer, None, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
