"""What layers without values are taken to keep: a GPU's kernels, masks that need no values, and the command."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundpipe.commands.parser import main
from roundpipe.estimate import estimate_memory
from roundpipe.gpu_kernels import kernels_of
from roundpipe.hf.assumed_values import assumed_values
from roundpipe.layer_memory import LayerMemory
from roundpipe.layer_run import LayerRun
from roundpipe.models.function import causal_lm_loss
from roundpipe.models.linear_cross_entropy import default_chunk_tokens

transformers = pytest.importorskip("transformers")


class Of(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., torch.Tensor], **weights: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs, **dict(self.named_parameters()))


def memory_of(layer: nn.Module, *inputs: torch.Tensor, kind: str = "cuda") -> LayerMemory:
    # Not the loss's memory, but that of a layer whose output a loss needs.
    return LayerRun([layer], kind).run(inputs, {}, None, lambda out, _: out.float().sum())[0].layers[0]


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta").requires_grad_(dtype.is_floating_point)


B, N, K, S, D = 2, 8, 2, 512, 64
Q_BYTES = B * N * S * D * 2
ROWS = B * N * S * 4


@pytest.mark.parametrize(
    ("groups", "dtype", "masked", "saved", "extra"),
    [
        # The log of each row's sum is kept; backward takes float32 sums of the queries' gradients and, in groups, the
        # gradients of keys and values for each head.
        (1, torch.bfloat16, False, ROWS, 2 * Q_BYTES + ROWS),
        (N // K, torch.bfloat16, False, ROWS, 4 * Q_BYTES + ROWS),
        (1, torch.float32, False, ROWS, Q_BYTES * 2 + ROWS),
        (1, torch.bfloat16, True, ROWS, 2 * Q_BYTES + ROWS),
    ],
)
def test_attention_of_a_gpu(groups: int, dtype: torch.dtype, masked: bool, saved: int, extra: int) -> None:
    query, key = empty(B, N, S, D, dtype=dtype), empty(B, N // groups, S, D, dtype=dtype)
    mask = [empty(S, S, dtype=torch.bool)] if masked else []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=groups > 1)

    memory = memory_of(Of(attend), query, key, key.clone(), *mask)
    size = query.nbytes
    assert memory.output_bytes == size
    assert memory.graph_bytes + memory.saved_output_bytes == pytest.approx(saved + size, abs=4096)
    gradients = query.nbytes + 2 * key.nbytes
    assert memory.backward_bytes == pytest.approx(saved + 2 * size + gradients + extra, rel=0.02)
    # The plain formula would hold the scores of all heads.
    assert memory.backward_bytes < B * N * S * S * dtype.itemsize + gradients + 3 * size


def test_rms_norm_of_a_gpu_keeps_a_number_a_row() -> None:
    x = empty(4096, 256)
    norm = nn.RMSNorm(256, dtype=torch.bfloat16, device="meta")
    memory = memory_of(norm, x)
    assert memory.graph_bytes == 4096 * 4
    assert memory_of(norm, x, kind="host").graph_bytes > x.nbytes  # the formula keeps float32 copies


def test_chunked_loss_of_a_gpu_holds_a_chunk_and_its_gradient() -> None:
    tokens, hidden, vocabulary = 4096, 64, 150_000
    layer = Of(lambda h, t, weight: causal_lm_loss(h, weight, t), weight=torch.empty(vocabulary, hidden, device="meta"))
    memory = memory_of(layer.to(torch.bfloat16), empty(1, tokens, hidden), empty(1, tokens, dtype=torch.int64))
    chunk = default_chunk_tokens(vocabulary, torch.device("cuda")) * vocabulary * 2
    assert chunk > 400 << 20
    gradients = vocabulary * hidden * 4 + tokens * hidden * 2
    assert memory.forward_bytes == pytest.approx(2 * chunk + gradients, rel=0.05)
    on_cpu = memory_of(layer, empty(1, 64, hidden), empty(1, 64, dtype=torch.int64), kind="host")
    assert on_cpu.forward_bytes < chunk


def test_values_are_computed_as_ever_outside() -> None:
    x = torch.randn(2, 4, 16, 8)
    with kernels_of("cuda"):
        pass
    want = torch.softmax(x @ x.transpose(-1, -2) / 8**0.5, -1) @ x
    assert torch.allclose(F.scaled_dot_product_attention(x, x, x), want, atol=1e-5)
    assert default_chunk_tokens(1000, torch.device("cpu")) == default_chunk_tokens(1000, torch.device("cpu"))
    with kernels_of("cuda"):
        assert default_chunk_tokens(1 << 18, torch.device("cpu")) == 1024
    assert default_chunk_tokens(1 << 18, torch.device("cpu")) == 64


def test_memory_of_attention_grows_with_the_sequence_not_its_square() -> None:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, intermediate_size=128, num_attention_heads=4, vocab_size=256
    )
    settings: dict[str, Any] = dict(num_devices=1, num_microbatch=1, host_memory_bytes=1 << 40)
    for kind in ("cuda", "host"):
        sizes = []
        for seq in (4096, 16384):
            found = estimate_memory(config, 1, seq, device_kind=kind, **settings)
            sizes.append(found.device.activations_bytes)
        assert sizes[1] < 4.5 * sizes[0], kind


def test_answers_are_assumed_for_tensors_without_values_alone() -> None:
    masking = pytest.importorskip("transformers.masking_utils")
    original = masking.is_tracing
    with assumed_values():
        assert bool((torch.empty(3, device="meta") == 0).all())
        assert not bool((torch.ones(3) == 0).all())
        assert not masking.is_tracing(torch.empty(3, device="meta"))
        with assumed_values():
            pass
        assert masking.is_tracing is not original
        seen: list[bool] = []
        with torch._subclasses.FakeTensorMode():
            fake = torch.empty(3)
        thread = threading.Thread(target=lambda: seen.append(masking.is_tracing(fake)))
        thread.start()
        thread.join()
        assert seen == [True]  # another thread, which may well be tracing
    assert masking.is_tracing is original
    with pytest.raises(RuntimeError):
        bool(torch.empty(1, device="meta"))


# -- the command -------------------------------------------------------------------------------------------------------
def configurations(folder: Path) -> list[Path]:
    """Folders with a Qwen3 and a Llama configuration, and one JSON file."""
    sizes = dict(
        num_hidden_layers=8, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8
    )
    transformers.Qwen3Config(head_dim=64, vocab_size=151_936, tie_word_embeddings=True, **sizes).save_pretrained(
        folder / "q"
    )
    transformers.LlamaConfig(vocab_size=32_000, **sizes).save_pretrained(folder / "l")
    return [folder / "q", folder / "l", folder / "l" / "config.json"]


def command(*arguments: object) -> list[str]:
    return ["estimate", *map(str, arguments)]


def test_the_command_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    qwen, llama, file = configurations(tmp_path)
    printed = {}
    for name, arguments in {
        "qwen": (qwen, "--gpu-memory", 24, "--host-memory", 128, "--seq", 8192, "--json"),
        "llama": (llama, "--gpu-memory", 24, "--host-memory", 128, "--seq", 2048, "--json"),
        "file": (file, "--gpu-memory", 24, "--host-memory", 128, "--seq", 2048, "--json"),
        "lora": (llama, "--gpu-memory", 24, "--host-memory", 128, "--seq", 2048, "--lora", 16, "--json"),
        "adamw": (llama, "--gpu-memory", 24, "--host-memory", 128, "--seq", 2048, "--optimizer", "adamw", "--json"),
        "announced": (llama, "--gpu-memory", 24, "--host-memory", 128, "--seq", 2048, "--announced", "--json"),
    }.items():
        if name == "lora":
            pytest.importorskip("peft")
        assert main(command("--config", *arguments)) == 0, name
        out = capsys.readouterr().out
        printed[name] = json.loads(out)
    assert printed["llama"] == printed["file"]
    block = 3 * 1024 * 3072 + 4 * 1024 * 1024 - 2 * 1024 * 512 + 2 * 1024 + 2 * 64  # MLP, q k v o, norms
    assert printed["qwen"]["parameters"] == 8 * block + 1024 + 151_936 * 1024  # the head is tied
    assert printed["llama"]["asked"]["configuration"]["optimizer"] == "compact:split/float32"
    assert printed["lora"]["trainable_parameters"] < 0.05 * printed["lora"]["parameters"]
    assert printed["lora"]["asked"]["host"]["total_bytes"] < printed["llama"]["asked"]["host"]["total_bytes"]
    assert printed["announced"]["asked"]["configuration"]["steps"] == "announced"
    assert (
        printed["announced"]["asked"]["host"]["gradients_bytes"] < printed["llama"]["asked"]["host"]["gradients_bytes"]
    )
    weights = printed["llama"]["parameters"]
    host = printed["adamw"]["asked"]["host"]
    assert host["optimizer_bytes"] == pytest.approx(16 * weights, rel=0.01)
    assert host["weights_bytes"] == pytest.approx(2 * weights, rel=0.01)


def test_the_command_says_what_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, llama, _ = configurations(tmp_path)
    assert main(command("--config", llama, "--gpu-memory", 8, "--host-memory", 64, "--seq", 1024, "--batch", 2)) == 0
    text = capsys.readouterr().out
    assert "of them trained" in text and "activations" in text and "fits" in text and "8.00" in text
    assert main(command("--config", llama, "--gpu-memory", 0.1, "--host-memory", 64, "--seq", 1024)) == 1
    assert "nothing that was tried fits" in capsys.readouterr().out


BAD = [
    ("--config", "/no/such/folder", "--gpu-memory", "8", "--seq", "64"),
    ("--config", "missing.json", "--gpu-memory", "8", "--seq", "64"),
    ("--config", "{broken}", "--gpu-memory", "8", "--seq", "64"),
    ("--config", "{other}", "--gpu-memory", "8", "--seq", "64"),
    ("--config", "{encoder}", "--gpu-memory", "8", "--seq", "64"),
    ("--config", "{good}", "--gpu-memory", "none", "--seq", "64"),
    ("--config", "{good}", "--gpu-memory", "-1", "--seq", "64"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "0"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "many"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "64", "--optimizer", "adafactor"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "64", "--lora", "0"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "64", "--pin-model", "maybe"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "64", "--exact", "--announced"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "64", "--announced", "--optimizer", "adamw"),
    ("--config", "{good}", "--gpu-memory", "8"),
    ("--config", "{good}", "--gpu-memory", "8", "--seq", "64", "--dtype", "int8"),
]


@pytest.mark.parametrize("arguments", BAD, ids=lambda a: " ".join(a)[:50])
def test_bad_values_are_one_line(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"hidden_size": 4}')
    transformers.T5Config(num_layers=1, d_model=16, d_ff=16, num_heads=1).save_pretrained(tmp_path / "encoder")
    names = {
        "{broken}": tmp_path / "broken.json",
        "{other}": tmp_path / "other.json",
        "{encoder}": tmp_path / "encoder",
        "{good}": configurations(tmp_path)[1],
    }
    try:
        code = main(command(*(names.get(argument, argument) for argument in arguments)))
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    printed = capsys.readouterr()
    assert code == 2 and printed.out == ""
    assert printed.err.count("\n") == 1 and printed.err.startswith("python -m roundpipe"), printed.err
