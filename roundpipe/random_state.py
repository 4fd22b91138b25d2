"""Random numbers that depend on the call, the microbatch and the layer, and on nothing else.

A call draws one number, its *call seed*, from the caller's default CPU generator; every (microbatch, layer) computes
under a generator seeded from that number. Forward and recompute of one (microbatch, layer) use the same seed, so they
see the same random numbers, and so does every device count: no generator is shared between layers.

Note [Derived seeds]
    mix(z)  = the finaliser of the splitmix64 generator, over unsigned 64-bit numbers:
                z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
                z = (z ^ (z >> 27)) * 0x94D049BB133111EB
                z ^ (z >> 31)
    seed(call, microbatch, layer) = mix(mix(call + G * (microbatch + 1)) + G * (layer + 1)) >> 1
    with G = 0x9E3779B97F4A7C15 and every sum and product modulo 2**64.
A reference run reproduces them by drawing the call seed as :func:`draw_call_seed` does and seeding its generator with
:func:`layer_seed` before each layer. PyTorch's CPU generator takes the low 32 bits of a seed only, which is why the
result must be well mixed in its low bits too.
"""

from __future__ import annotations

from types import TracebackType

import torch

from roundpipe.errors import ConfigError

__all__ = ["default_generator", "draw_call_seed", "layer_seed", "seeded"]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def draw_call_seed() -> int:
    """One draw from the default CPU generator of the calling thread's process: an integer in [0, 2**63).

    It is ``torch.empty((), dtype=torch.int64, device="cpu").random_()``, so ``torch.manual_seed`` makes a run
    repeatable, and two calls in a row differ.
    """
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_().item())


def layer_seed(call_seed: int, microbatch: int, layer: int) -> int:
    """The seed of one (microbatch, layer) of a call: an integer in [0, 2**63), see Note [Derived seeds]."""
    inner = _mix((call_seed + _GAMMA * (microbatch + 1)) & _MASK)
    return _mix((inner + _GAMMA * (layer + 1)) & _MASK) >> 1


class seeded:  # noqa: N801 - used like a function, as torch.no_grad is
    """Context in which a device's default generator starts from ``seed``; on exit its former state is back.

    Args:
        seed: an integer in [0, 2**63), usually from :func:`layer_seed`.
        device: ``"cpu"``, or a CUDA device (its index defaults to the current device).

    Attribute ``drew`` is None inside and, after the exit, tells whether random numbers were drawn from that generator.
    It is also set when the body raised.

    The default CPU generator is shared by all threads of the process. Whoever enters with the CPU holds the
    process-wide compute lock over the whole context; otherwise another thread's draws land in this layer's sequence,
    and its state is lost at the exit. A CUDA generator is entered by the one worker of its device. Neither form waits
    for a device. Do not enter while a CUDA graph is being captured.
    """

    __slots__ = ("_before", "_generator", "_seed", "_start", "drew")

    def __init__(self, seed: int, device: torch.device | str = "cpu") -> None:
        self._generator = default_generator(torch.device(device))
        self._seed = seed
        self._before: torch.Tensor | None = None
        self._start: torch.Tensor | None = None
        self.drew: bool | None = None

    def __enter__(self) -> seeded:
        self._before = self._generator.get_state()
        self._generator.manual_seed(self._seed)
        # The state is 16 bytes on CUDA (seed and offset) and 5 KB on the CPU: comparing it costs microseconds and,
        # unlike counting, also sees draws whose size is odd or which only fill the cache of the normal distribution.
        self._start = self._generator.get_state()
        self.drew = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._before is not None and self._start is not None, "left without having been entered"
        self.drew = not torch.equal(self._generator.get_state(), self._start)
        self._generator.set_state(self._before)
        self._before = self._start = None


def default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        raise ConfigError(f"seeded(device={str(device)!r}): random numbers are kept for 'cpu' and 'cuda' devices only")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator
