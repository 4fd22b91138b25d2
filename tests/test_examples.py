"""The demo does what it says, and a wrong option costs one line. Benchmarks are imported, not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

ROOT = Path(__file__).parent.parent


def finetune(*options: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("ROUNDPIPE_DEVICES", None)
    command = [sys.executable, str(ROOT / "examples/finetune.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)


@pytest.mark.timeout(300)
def test_demo_learns_saves_and_reloads(tmp_path):
    output = tmp_path / "model"
    options = "--size tiny --steps 25 --batch 8 --seq 64 --microbatches 2 --grain layer --devices host:2 --exact"
    done = finetune(*options.split(), "--plan", "0-1,2|3-5,1-2,0", "--output", str(output))
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"held-out loss after: ([\d.]+) +\(before: ([\d.]+), token frequencies alone: ([\d.]+)\)", done.stdout
    )
    assert found, done.stdout
    after, before, unigram = map(float, found.groups())
    assert after < before - 0.5
    assert 5.0 < unigram < before
    assert "logits equal" in done.stdout
    assert "sample:     def __init__(self, " in done.stdout
    assert re.search(r"loss=[\d.]+, tokens_per_s=[\d,]+", done.stderr), done.stderr

    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    tokenizer = transformers.AutoTokenizer.from_pretrained(output)
    assert (output / "model.safetensors").exists()
    ids = tokenizer("import os\n", return_tensors="pt")["input_ids"]
    assert tokenizer.decode(ids[0]) == "import os\n"
    with torch.no_grad():
        assert model(input_ids=ids).logits.isfinite().all()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "huge"], "--size: invalid choice: 'huge'"),
        (["--devices", "gpu:1"], "--devices gpu:1"),
        (["--plan", "0-1|3-5,0-1"], "--plan '0-1|3-5,0-1' for 6 layers"),
    ],
)
def test_wrong_options_cost_one_line(options, message, tmp_path):
    done = finetune(*options, "--output", str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


@pytest.fixture
def examples_path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps: expected a whole number of at least 1, got '0'"),
        (["--batch", "four"], "--batch: expected a whole number of at least 1, got 'four'"),
        (["--lr", "-1"], "--lr: expected a positive number, got '-1'"),
        (["--lr", "nan"], "--lr: expected a positive number, got 'nan'"),
        (["--grain", "fine"], "--grain: invalid choice: 'fine'"),
        (["--exact", "--async"], "not allowed with argument"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
        (["--microbatches", "3", "--devices", "host:1"], "--microbatches 3: does not divide the 8 rows"),
        (["--microbatches", "17", "--devices", "host:1"], "--microbatches 17: a batch has only 8 rows"),
        (["--plan", "0,x|1", "--devices", "host:1"], "--plan '0,x|1'"),
        (["--plan", "0-5", "--devices", "host:1"], "no '|'"),
        (["--output", __file__, "--devices", "host:1"], "is a file, expected a directory"),
    ],
)
def test_wrong_options_are_explained(options, message, examples_path, capsys):
    import finetune as demo

    import roundpipe

    try:
        assert demo.main(["--size", "tiny", *options]) == 2
    finally:
        roundpipe.use_devices(None)
    written = capsys.readouterr()
    assert written.err.startswith("finetune.py: error: ")
    assert message in written.err
    assert written.err.count("\n") == 1


@pytest.fixture
def default_devices():
    import roundpipe

    yield
    roundpipe.use_devices(None)


def losses(text: str) -> tuple[float, float]:
    found = re.search(r"held-out loss after: ([\d.]+) +\(before: ([\d.]+)\)", text)
    assert found, text
    return float(found[1]), float(found[2])


@pytest.mark.timeout(300)
def test_adapters_on_mapped_files(examples_path, default_devices, capsys, tmp_path):
    import lora_mmap

    peft = pytest.importorskip("peft")
    options = "--devices host:2 --steps 8 --seq 32 --batch 4 --rank 4 --lr 1e-2 --output"
    assert lora_mmap.main([*options.split(), str(tmp_path)]) == 0
    written = capsys.readouterr().out
    found = re.search(r"frozen: ([\d.]+) MB, of which ([\d.]+) MB mapped from", written)
    assert found and float(found[1]) == float(found[2]) > 1
    after, before = losses(written)
    assert after < before
    assert "loaded again by PEFT" in written
    assert peft.PeftConfig.from_pretrained(tmp_path).r == 4
    # The base itself can be given, as any model's folder.
    base, second = str(tmp_path / "base"), str(tmp_path / "second")
    assert lora_mmap.main([*options.split(), second, "--steps", "1", "--model", base]) == 0


@pytest.mark.timeout(300)
def test_the_trainers_example_trains_and_goes_on(examples_path, default_devices, capsys, tmp_path):
    import trainer
    import transformers

    options = ["--devices", "host:2", "--seq", "32", "--batch", "4", "--accumulate", "2", "--output"]
    assert trainer.main([*options, str(tmp_path), "--steps", "6"]) == 0
    after, before = losses(capsys.readouterr().out)
    assert after < before
    assert trainer.main([*options, str(tmp_path), "--steps", "8", "--resume"]) == 0
    assert "8 steps in all" in capsys.readouterr().out
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) > 1e6


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("trainer", ["--optimizer", "sgd"], "--optimizer: invalid choice: 'sgd'"),
        ("trainer", ["--steps", "-3"], "--steps: expected a whole number of at least 1"),
        ("trainer", ["--resume", "--output", "/nonexistent"], "--resume: there is no checkpoint in /nonexistent"),
        ("trainer", ["--devices", "gpu"], "--devices gpu"),
        ("trainer", ["--microbatches", "5", "--devices", "host:1"], "--microbatches 5: does not divide the 8 rows"),
        ("lora_mmap", ["--rank", "0"], "--rank: expected a whole number of at least 1"),
        ("lora_mmap", ["--model", "/nonexistent"], "--model /nonexistent: is no directory"),
        ("lora_mmap", ["--model", str(ROOT / "docs"), "--devices", "host:1"], "--model"),
        ("lora_mmap", ["--output", __file__], "is a file, expected a directory"),
    ],
)
def test_wrong_options_of_the_other_examples(name, options, message, examples_path, default_devices, capsys):
    assert __import__(name).main(options) == 2
    written = capsys.readouterr()
    assert written.err.startswith(f"{name}.py: error: ") and message in written.err
    assert written.err.count("\n") == 1


@pytest.mark.parametrize("name", ["finetune", "trainer", "lora_mmap", "digits"])
def test_help_shows_how_to_run_it(name, examples_path, capsys):
    if name == "digits":
        pytest.importorskip("sklearn")
    with pytest.raises(SystemExit) as ended:
        __import__(name).main(["--help"])
    assert ended.value.code == 0
    written = capsys.readouterr().out
    assert "--devices" in written and "default" in written


@pytest.mark.parametrize(
    "name",
    [
        "baselines",
        "common",
        "copy_overlap",
        "cpu_overhead",
        "estimate",
        "hf_trainer",
        "large_finetune",
        "microbatch_memory",
        "models",
        "offload",
        "scaling",
        "step_time",
        "workers",
    ],
)
def test_benchmarks_import_and_say_what_they_ask(name, examples_path):
    module = __import__(name)
    assert module.__doc__
    if hasattr(module, "main"):
        assert "?" in module.__doc__.partition("\n")[0]


@pytest.mark.parametrize("steps_are", ["exact", "announced", "async"])
def test_all_weights_of_a_large_model_in_small(steps_are, examples_path, tmp_path, capsys):
    from large_finetune import main

    small = ["--device", "host:2", "--model", "tiny", "--rows", "4", "--tokens", "32", "--microbatches", "3"]
    assert main([*small, "--steps-are", steps_are, "--lr", "1e-3", "--results", str(tmp_path)]) == 0
    (written,) = tmp_path.glob("large_finetune-tiny-*.json")
    result = json.loads(written.read_text())
    assert len(result["losses"]) == 3 and result["losses"][0] > result["losses"][-1]
    assert result["peak_resident_bytes"] >= max(result["resident_bytes"].values())
    assert main([*small, "--steps-are", steps_are, "--lr", "0", "--results", str(tmp_path)]) == 1
    assert "did not fall" in capsys.readouterr().err


def test_overlap_of_copies_with_kernels(examples_path):
    from copy_overlap import summarize

    def event(category, name, begin, length, **args):
        return {"cat": category, "name": name, "ts": begin, "dur": length, "args": {"device": 0, **args}}

    summary = summarize(
        [
            event("kernel", "gemm", 0.0, 100.0),
            event("kernel", "gemm", 50.0, 100.0),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 140.0, 20.0, bytes=1_000_000),
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 200.0, 10.0, bytes=500),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 10.0, 20.0, device=1),
            event("cpu_op", "aten::mm", 0.0, 1000.0),
        ]
    )
    assert summary["kernel_s"] == pytest.approx(150e-6)
    assert summary["HtoD"]["copying_s"] == pytest.approx(40e-6)
    assert summary["HtoD"]["hidden_fraction"] == pytest.approx(0.25)
    assert summary["DtoH"]["hidden_fraction"] == 0.0
    assert summary["HtoD"]["bytes"] == 1_000_000


def test_benchmark_model_has_the_sizes_of_the_workloads(examples_path):
    import torch
    from models import MODELS, Block, Embedding, Head, build, random_batch

    with torch.device("meta"):
        for name, billions in (("q06", 0.60), ("q17", 1.72), ("q4", 4.0), ("l8", 8.0)):
            dims = MODELS[name]
            parts = [Embedding(dims), *(Block(dims) for _ in range(dims.layers)), Head(dims)]
            count = sum(p.numel() for part in parts for p in part.parameters())
            count -= dims.tied * dims.vocabulary * dims.hidden
            assert count / 1e9 == pytest.approx(billions, rel=0.01), name
    model = build(MODELS["tiny"], dtype=torch.float32)
    assert model[-1].projection.weight is model[0].tokens.weight
    state = model[0](*random_batch(MODELS["tiny"], 2, 8))
    for layer in model[1:]:
        state = layer(state)
    assert state.item() == pytest.approx(torch.tensor(1024.0).log().item(), abs=0.3)


def test_scaling_compares_devices_bit_for_bit(examples_path, tmp_path):
    import json

    import scaling

    import roundpipe

    options = ["--workloads", "tiny", "--devices", "host", "--counts", "1,3", "--iterations", "1", "--warmup", "1"]
    try:
        assert scaling.main([*options, "--results", str(tmp_path)]) == 0
    finally:
        roundpipe.use_devices(None)
    (path,) = tmp_path.iterdir()
    result = json.loads(path.read_text())["results"]["tiny"]
    assert result["losses_equal"] and [row["devices"] for row in result["strong"]] == [1, 3]
    one, three = result["strong"]
    for row in (one, three):
        assert set(row["workers"]) == {str(i) for i in range(row["devices"])}
        assert all(0 <= w["gil_wait_share"] < 1 and w["cpu_s"] > 0 for w in row["workers"].values())
    # The same plan moves the same bytes, on however many links. What layers hand on unchanged comes up once a device.
    for name, total in one["link_bytes"][0].items():
        moved = sum(link[name] for link in three["link_bytes"])
        assert moved == total or (name in ("up_activations", "up_inputs") and total < moved <= 3 * total), name
    assert one["link_bytes"][0]["up_weights"] > 0


def test_the_trainers_benchmark_measures(examples_path, default_devices, tmp_path):
    import json

    import hf_trainer

    options = ["--workloads", "tiny,tiny-lora", "--devices", "host:2", "--steps", "2", "--warmup", "1"]
    assert hf_trainer.main([*options, "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    results = json.loads(path.read_text())["results"]
    full, lora = results["tiny"], results["tiny-lora"]
    assert full["trained_parameters"] == full["parameters"] and 0 < lora["trained_parameters"] < lora["parameters"]
    for result in (full, lora):
        assert result["iterations"] == 2 and result["min_s"] > 0
        tokens = result["rows"] * result["tokens"] * result["accumulate"]
        assert result["tokens_per_s"] == pytest.approx(tokens / result["mean_s"])
        # A random model knows nothing: ln(256), and a little more for its random scores.
        assert 5.4 < result["train_loss"] < 6.0
    # Masters of 2 bytes and two moments of 4 for each parameter, in memory rounded up a little.
    assert 10 * full["parameters"] <= full["host_bytes"]["optimizer_bytes"] < 12 * full["parameters"]
    with pytest.raises(SystemExit):
        hf_trainer.main(["--workloads", "huge"])


def test_the_sizes_of_the_trainers_benchmark(examples_path):
    import hf_trainer
    import torch
    import transformers

    for name, billions in (("qwen3-1.7b", 1.72), ("llama-8b-lora", 8.03)):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(hf_trainer.WORKLOADS[name].config())
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01), name


def test_expert_and_adapter_layers_of_the_benchmarks(examples_path):
    from dataclasses import replace

    import torch
    import torch.nn.functional as F
    from models import MODELS, Experts, LoraLinear, add_lora, build, random_batch

    dims = replace(MODELS["tiny"], mlp=48, experts=5, experts_per_token=2)
    experts = Experts(dims)
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x = torch.randn(2, 7, dims.hidden)
    want = torch.zeros(14, dims.hidden)
    scores = experts.router(x.flatten(0, 1)).softmax(-1)
    for token in range(14):
        best = scores[token].topk(2)
        for share, expert in zip(best.values / best.values.sum(), best.indices, strict=True):
            gate, up = F.linear(x.flatten(0, 1)[token], experts.gate_up[expert]).chunk(2)
            want[token] += share * F.linear(F.silu(gate) * up, experts.down[expert])
    torch.testing.assert_close(experts(x).flatten(0, 1), want)

    model = build(MODELS["tiny"], dtype=torch.float32)
    batch = random_batch(MODELS["tiny"], 2, 8)

    def loss():
        state = model[0](*batch)
        for layer in model[1:]:
            state = layer(state)
        return state

    before = loss()
    add_lora(model, rank=4)
    assert torch.equal(loss(), before), "an adapter starts at zero"
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all(name.endswith((".a", ".b")) for name in trained)
    assert sum(isinstance(m, LoraLinear) for m in model.modules()) == 7 * MODELS["tiny"].layers
