"""The error vocabulary: what each kind is, what it says, and that it survives pickling and copying."""

import copy
import pickle

import pytest
import torch

from roundpipe import errors

PLACE = {"device": "cuda:1", "phase": "backward", "stage": 2, "layer": 7, "microbatch": 3}

SAMPLES = [
    errors.RoundPipeError("plain"),
    errors.StageError(KeyError("w"), **PLACE),
    errors.StageError("no place known"),
    errors.PartialStepError("half", layers=(0, 1)),
    errors.StallError("stuck", counters="weights 3/4"),
    errors.ConfigError("value"),
    errors.ConfigTypeError("type"),
    errors.PlanError("plan"),
    errors.SplitError("split"),
    errors.CheckpointError("disk"),
    errors.CheckpointMismatch("names"),
    errors.DeviceOutOfMemory("asked 3 GiB", asked_bytes=3 << 30, **PLACE),
    errors.HostOutOfMemory("asked 3 GiB", asked_bytes=3 << 30),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    "again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_survives_with_attributes(error, again):
    twin = again(error)
    assert twin is not error
    assert type(twin) is type(error)
    assert twin.args == error.args and len(twin.args) == 1
    assert str(twin) == str(error)
    assert twin.__dict__ == error.__dict__


def test_copy_keeps_the_cause():
    cause = KeyError("w")
    error = errors.locate(cause, **PLACE)
    assert copy.copy(error).__cause__ is cause


@pytest.mark.parametrize(
    ("kind", "bases"),
    [
        (errors.StageError, (errors.RoundPipeError,)),
        (errors.PartialStepError, (errors.RoundPipeError,)),
        (errors.StallError, (errors.RoundPipeError,)),
        (errors.ConfigError, (errors.RoundPipeError, ValueError)),
        (errors.ConfigTypeError, (errors.ConfigError, ValueError, TypeError)),
        (errors.PlanError, (errors.RoundPipeError, ValueError)),
        (errors.SplitError, (errors.RoundPipeError, ValueError)),
        (errors.CheckpointError, (errors.RoundPipeError,)),
        (errors.CheckpointMismatch, (errors.CheckpointError, ValueError)),
        (errors.DeviceOutOfMemory, (errors.RoundPipeError, torch.OutOfMemoryError)),
        (errors.HostOutOfMemory, (errors.RoundPipeError, MemoryError, RuntimeError)),
    ],
)
def test_bases(kind, bases):
    assert issubclass(kind, (RuntimeError,))
    for base in bases:
        assert issubclass(kind, base)


def test_stage_error_tells_place_and_original():
    error = errors.StageError(KeyError("w"), **PLACE)
    assert str(error) == "backward, device cuda:1, stage 2, layer 7, microbatch 3 failed: KeyError: 'w'"
    assert {name: getattr(error, name) for name in PLACE} == PLACE


def test_stage_error_leaves_out_what_is_unknown():
    error = errors.StageError(ValueError(), layer=0)
    assert str(error) == "layer 0 failed: ValueError"
    assert error.microbatch is None
    assert str(errors.StageError("reason")) == "a stage failed: reason"


def _retry_helper_recognises(error):
    # The check that batch-size finders make: a RuntimeError with a single string holding a known phrase.
    phrases = ("CUDA out of memory.", "DefaultCPUAllocator: can't allocate memory")
    return isinstance(error, RuntimeError) and len(error.args) == 1 and any(p in error.args[0] for p in phrases)


def test_out_of_memory_is_recognised_by_retry_helpers():
    assert _retry_helper_recognises(errors.DeviceOutOfMemory("asked 3 GiB of 2 GiB"))
    assert _retry_helper_recognises(errors.HostOutOfMemory("asked 3 GiB of 2 GiB"))
    assert not _retry_helper_recognises(errors.StageError("boom"))


def test_out_of_memory_phrase_is_not_repeated():
    assert str(errors.DeviceOutOfMemory("CUDA out of memory. Tried 2 MiB")).count("CUDA out of memory.") == 1
    simulated = errors.DeviceOutOfMemory("host:0: a job of 9 bytes")
    assert _retry_helper_recognises(simulated) and str(simulated).startswith("out of memory on a simulated device")
    text = "DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"
    assert str(errors.HostOutOfMemory(text)) == text


@pytest.mark.parametrize(
    ("original", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), errors.DeviceOutOfMemory),
        (MemoryError("no room"), errors.HostOutOfMemory),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"), errors.HostOutOfMemory),
        (ZeroDivisionError("division"), errors.StageError),
        (errors.ConfigError("inner wrapper misused"), errors.StageError),
        (KeyboardInterrupt(), errors.StageError),
    ],
)
def test_locate_types_and_chains(original, kind):
    error = errors.locate(original, **PLACE)
    assert type(error) is kind
    assert error.__cause__ is original
    assert "layer 7" in str(error) and "microbatch 3" in str(error) and type(original).__name__ in str(error)


def test_locate_keeps_failures_that_know_their_place():
    inner = errors.StageError("inner", layer=1)
    assert errors.locate(inner, layer=5) is inner
    assert inner.layer == 1 and inner.__cause__ is None
