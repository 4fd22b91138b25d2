"""Parameters, gradients and states as the contiguous memory that the kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import errors

_REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_DTYPES = (*_REAL_DTYPES, torch.complex64)


def has_kernel(*tensors: Tensor) -> bool:
    """Whether the kernels can update these: plain host tensors of the dtypes that they know, all real or all complex.

    What they cannot, torch's operators update: float64, other devices, subclasses with behaviour of their own.
    """
    return all(
        t.dtype in _DTYPES
        and t.is_cpu
        and t.layout == torch.strided
        and type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        and t.is_complex() == tensors[0].is_complex()
        for t in tensors
    )


def real(tensor: Tensor) -> Tensor:
    """Complex numbers as pairs of real ones; lazy conjugation and negation carried out."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg()


class FlatMemory:
    """Views of tensors in one element order, and the copies where there is no such view.

    A parameter, its gradient and its states may have different strides. Where all are contiguous, or dense in the
    parameter's order (channels-last), the kernels work in place; otherwise on a copy, which :meth:`write_back` returns.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []

    def views(self, parameter: Tensor, gradient: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Contiguous (parameter, gradient, states...); all but the gradient will be written."""
        tensors = [real(tensor) for tensor in (parameter, gradient, *states)]
        if all(tensor.is_contiguous() for tensor in tensors):
            return tuple(tensors)
        shape = tensors[0]
        if any(stride == 0 and size > 1 for size, stride in zip(shape.shape, shape.stride(), strict=True)):
            raise errors.ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} has several elements "
                "at one place of memory; clone() it before it becomes a parameter"
            )
        strides = shape.stride() if _is_dense(shape) else torch.empty(shape.shape, device="meta").stride()
        return tuple(self._flat(tensor, strides, written=index != 1) for index, tensor in enumerate(tensors))

    def _flat(self, tensor: Tensor, strides: tuple[int, ...], written: bool) -> Tensor:
        if not _has_strides(tensor, strides):
            copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
            if written:
                self._copies.append((tensor, copy))
            tensor = copy
        return tensor.as_strided((tensor.numel(),), (1,))

    def write_back(self) -> None:
        """Puts the copies' values, once updated, where they belong."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._copies.clear()


def _has_strides(tensor: Tensor, strides: tuple[int, ...]) -> bool:
    return all(
        size == 1 or own == wanted for size, own, wanted in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )


def _is_dense(tensor: Tensor) -> bool:
    """Every place between the first and the last element is one element's, as in a permuted contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
