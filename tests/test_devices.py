"""Device strings, the order in which a choice is found, and the hooks that may refuse a change."""

import importlib
import threading
import warnings

import pytest
import torch

from roundpipe.errors import ConfigError, ConfigTypeError, RoundPipeError

# By its full name: the package's attribute `devices` is the function of that name.
room = importlib.import_module("roundpipe.devices")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(room, "_wanted", None)
    monkeypatch.setattr(room, "_resolved", None)
    monkeypatch.setattr(room, "_warned", False)
    monkeypatch.setattr(room, "on_change", [])
    monkeypatch.delenv(room.ENVIRONMENT_VARIABLE, raising=False)


def _gpus(monkeypatch, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("cuda", room.DeviceSpec("cuda", ())),
        ("cuda:0,cuda:1", room.DeviceSpec("cuda", (0, 1))),
        (" cuda:3 , cuda:1 ", room.DeviceSpec("cuda", (3, 1))),
        ("cuda:0*2,cuda:1", room.DeviceSpec("cuda", (0, 0, 1))),
        ("host", room.DeviceSpec("host", (0,))),
        ("host:4", room.DeviceSpec("host", (0, 1, 2, 3))),
        ("host:2@512MiB", room.DeviceSpec("host", (0, 1), 512 * 1024**2)),
        ("host:1@3KiB", room.DeviceSpec("host", (0,), 3072)),
        ("host:1@1.5GiB", room.DeviceSpec("host", (0,), 3 * 1024**3 // 2)),
        ("host:1@2GB", room.DeviceSpec("host", (0,), 2 * 10**9)),
        ("host:1@7mb", room.DeviceSpec("host", (0,), 7 * 10**6)),
    ],
)
def test_accepted_forms(text, want):
    assert room.parse_devices(text) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "''"),
        ("gpu:0", "gpu:0"),
        ("cuda:", "cuda:"),
        ("cuda:-1", "cuda:-1"),
        ("cuda:0,", "''"),
        ("cuda:0,cuda:0", "twice"),
        ("cuda:0*2,cuda:0", "twice"),
        ("cuda:0*0", "0 logical devices"),
        ("cuda:0*17", "17 logical devices"),
        ("cuda:0*", "cuda:0*"),
        ("cuda:0,host:1", "host:1"),
        ("host:1,cuda:0", "simulated"),
        ("host:0", "0 simulated"),
        ("host:100000", "between 1 and"),
        ("host:x", "simulated"),
        ("host:2@512", "simulated"),
        ("host:2@512Mib/s", "simulated"),
        ("host:2@5TiB", "unit"),
        ("host:2@0MiB", "without memory"),
        ("hosts:2", "simulated"),
    ],
)
def test_refused_forms_say_what_came_and_what_is_accepted(text, said):
    with pytest.raises(ConfigError) as info:
        room.parse_devices(text, source="use_devices")
    message = str(info.value)
    assert repr(text) in message and said in message and "host:2@512MiB" in message and "use_devices" in message


def test_refused_types():
    with pytest.raises(ConfigTypeError, match="got int"):
        room.parse_devices(4)


def test_no_gpu_gives_one_simulated_device_and_one_warning(monkeypatch):
    _gpus(monkeypatch, 0)
    with pytest.warns(UserWarning, match="simulated") as caught:
        found = room.devices()
        room.use_devices(None)
        room.devices()
    assert len(caught) == 1
    assert [(d.kind, d.index, d.name, d.device, d.memory_bytes) for d in found] == [
        ("host", 0, "host:0", torch.device("cpu"), None)
    ]


def test_one_warning_from_many_threads(monkeypatch):
    _gpus(monkeypatch, 0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=room.devices) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(caught) == 1


def test_all_gpus_are_the_default(monkeypatch):
    _gpus(monkeypatch, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [d.device for d in room.devices()] == [torch.device("cuda", i) for i in range(3)]


def test_environment_wins_over_gpus_and_use_devices_over_both(monkeypatch):
    _gpus(monkeypatch, 3)
    monkeypatch.setenv(room.ENVIRONMENT_VARIABLE, "host:2@1MiB")
    assert [(d.name, d.memory_bytes) for d in room.devices()] == [("host:0", 1 << 20), ("host:1", 1 << 20)]
    room.use_devices("cuda:2,cuda:0")
    found = room.devices()
    assert [(d.name, d.index, d.ordinal) for d in found] == [("cuda:2", 0, 2), ("cuda:0", 1, 0)]
    assert room.active_spec() == room.DeviceSpec("cuda", (2, 0))
    room.use_devices(None)
    assert len(room.devices()) == 2


def test_bad_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv(room.ENVIRONMENT_VARIABLE, "tpu:1")
    with pytest.raises(ConfigError, match=room.ENVIRONMENT_VARIABLE):
        room.devices()


@pytest.mark.parametrize(("built", "said"), [(None, "built without CUDA"), ("12.6", "nvidia-smi")])
def test_cuda_without_gpu_is_an_error_with_remedy(monkeypatch, built, said):
    _gpus(monkeypatch, 0)
    monkeypatch.setattr(torch.version, "cuda", built)
    for text in ("cuda", "cuda:0"):
        with pytest.raises(ConfigError, match=said):
            room.use_devices(text)
    monkeypatch.setenv(room.ENVIRONMENT_VARIABLE, "cuda")
    with pytest.raises(ConfigError, match=said):
        room.devices()


def test_missing_gpu_is_named(monkeypatch):
    _gpus(monkeypatch, 2)
    with pytest.raises(ConfigError, match=r"cuda:2 does not exist; 2 GPU"):
        room.use_devices("cuda:0,cuda:2")
    room.use_devices("cuda")
    assert room.active_spec().ordinals == (0, 1)


def test_gpu_memory_sees_the_cap(monkeypatch):
    _gpus(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("P", (), {"total_memory": 1000})())
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda i: 0.25)
    room.use_devices("cuda:0")
    assert room.devices()[0].memory_bytes == 250


def test_hooks_see_changes_only_and_can_refuse():
    seen = []
    room.on_change.append(seen.append)
    room.use_devices("host:2")
    room.use_devices("host:2")
    assert seen == [room.DeviceSpec("host", (0, 1))]

    def busy(_spec):
        raise RoundPipeError("work is in flight")

    room.on_change.append(busy)
    with pytest.raises(RoundPipeError, match="in flight"):
        room.use_devices("host:3")
    assert len(room.devices()) == 2
