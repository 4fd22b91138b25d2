"""Derived seeds against an independent computation, and the generator context on the CPU (and a GPU when there is)."""

import ctypes

import pytest
import torch

from roundpipe import random_state
from roundpipe.errors import ConfigError

GAMMA = 0x9E3779B97F4A7C15


def _mix_with_c_integers(value):
    z = ctypes.c_uint64(value)
    z.value = (z.value ^ (z.value >> 30)) * 0xBF58476D1CE4E5B9
    z.value = (z.value ^ (z.value >> 27)) * 0x94D049BB133111EB
    return z.value ^ (z.value >> 31)


@pytest.mark.parametrize("call", [0, 1, 2**63 - 1, 987654321])
@pytest.mark.parametrize("microbatch", [0, 1, 31])
@pytest.mark.parametrize("layer", [0, 5, 1000])
def test_layer_seed_follows_its_note(call, microbatch, layer):
    inner = _mix_with_c_integers(call + GAMMA * (microbatch + 1))
    want = _mix_with_c_integers(inner + GAMMA * (layer + 1)) >> 1
    assert random_state.layer_seed(call, microbatch, layer) == want


def test_mix_is_splitmix64():
    # The first outputs of splitmix64 seeded with 0, as published with the generator.
    outputs = [random_state._mix(GAMMA * n & (2**64 - 1)) for n in (1, 2, 3)]
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_layer_seeds_are_valid_and_differ():
    seeds = {random_state.layer_seed(c, m, layer) for c in (0, 1, 7) for m in range(16) for layer in range(64)}
    assert len(seeds) == 3 * 16 * 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed & 0xFFFFFFFF for seed in seeds}) >= 3 * 16 * 64 - 2  # the CPU generator sees these bits only


def test_call_seed_is_one_draw_of_the_callers_generator():
    torch.manual_seed(5)
    first, second = random_state.draw_call_seed(), random_state.draw_call_seed()
    assert first != second and 0 <= first < 2**63
    torch.manual_seed(5)
    assert torch.empty((), dtype=torch.int64).random_().item() == first
    after_one = torch.get_rng_state()
    torch.manual_seed(5)
    random_state.draw_call_seed()
    assert torch.equal(torch.get_rng_state(), after_one)


def test_call_seed_ignores_the_default_device():
    torch.manual_seed(5)
    want = random_state.draw_call_seed()
    torch.manual_seed(5)
    with torch.device("meta"):
        assert random_state.draw_call_seed() == want


def test_seeded_repeats_and_restores():
    torch.manual_seed(1)
    torch.randn(3)  # leaves a cached normal value behind, which is state as well
    expected_next = None
    state = torch.get_rng_state()
    expected_next = torch.randn(4)
    torch.set_rng_state(state)
    draws = []
    for _ in range(2):
        with random_state.seeded(42) as context:
            draws.append(torch.nn.functional.dropout(torch.ones(64), 0.5))
        assert context.drew is True
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(torch.randn(4), expected_next)
    generator = torch.Generator().manual_seed(42)
    with random_state.seeded(42):
        assert torch.equal(torch.rand(5), torch.rand(5, generator=generator))


def test_seeded_different_seeds_differ():
    with random_state.seeded(1):
        one = torch.rand(8)
    with random_state.seeded(2):
        two = torch.rand(8)
    assert not torch.equal(one, two)


def test_seeded_tells_when_nothing_was_drawn():
    with random_state.seeded(42) as context:
        torch.ones(3).sum()
        assert context.drew is None
        torch.rand(1, generator=torch.Generator().manual_seed(0))  # another generator does not count
    assert context.drew is False


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: torch.randn(1), lambda: torch.randperm(3)])
def test_seeded_sees_every_kind_of_draw(draw):
    with random_state.seeded(7) as context:
        draw()
    assert context.drew is True


def test_seeded_restores_when_the_body_raises_or_reseeds():
    before = torch.get_rng_state()
    context = random_state.seeded(9)
    with pytest.raises(ZeroDivisionError), context:
        torch.rand(2)
        raise ZeroDivisionError
    assert context.drew is True
    with random_state.seeded(9) as context:
        torch.manual_seed(123)
    assert context.drew is True
    assert torch.equal(torch.get_rng_state(), before)


def test_seeded_nests():
    with random_state.seeded(3):
        want = torch.rand(2)
    with random_state.seeded(3) as outer:
        with random_state.seeded(4):
            torch.rand(5)
        assert torch.equal(torch.rand(2), want)
    assert outer.drew is True


def test_seeded_refuses_other_devices():
    with pytest.raises(ConfigError, match="meta"):
        random_state.seeded(1, "meta")


@pytest.mark.needs_cuda
def test_seeded_on_cuda():
    before = torch.cuda.get_rng_state()
    cpu_before = torch.get_rng_state()
    with random_state.seeded(11, "cuda") as context:
        first = torch.rand(3, device="cuda")
    assert context.drew is True
    with random_state.seeded(11, "cuda:0") as context:
        assert torch.equal(torch.rand(3, device="cuda"), first)
    with random_state.seeded(11, "cuda") as context:
        torch.ones(3, device="cuda").sum()
    assert context.drew is False
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), cpu_before)
