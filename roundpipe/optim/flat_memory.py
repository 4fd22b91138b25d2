"""Parameters, gradients and states as the contiguous memory that the kernels take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import errors

_REAL_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
_DTYPES = _REAL_DTYPES | {torch.complex64}
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def _has_kernel(*tensors: Tensor) -> bool:
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

    def views(self, parameter: Tensor, gradient: Tensor, states: Sequence[Tensor]) -> tuple[Tensor, ...] | None:
        """Contiguous (parameter, gradient, states...); all but the gradient will be written.

        None if the kernels cannot update these, but torch's operators must: float64, other devices, sparse gradients,
        subclasses with behaviour of their own.
        """
        tensors = (parameter, gradient, *states)
        for tensor in tensors:  # what nearly all are; models have thousands, so each test here counts
            if not (
                tensor.dtype in _REAL_DTYPES
                and tensor.is_cpu
                and type(tensor) in _PLAIN_TYPES
                and tensor.layout == torch.strided
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                break
        else:
            return tensors
        return self._ordered_views(tensors) if _has_kernel(*tensors) else None

    def _ordered_views(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        tensors = [real(tensor) for tensor in given]
        shape = tensors[0]
        if any(stride == 0 and size > 1 for size, stride in zip(shape.shape, shape.stride(), strict=True)):
            raise errors.ConfigError(
                f"a parameter of shape {tuple(given[0].shape)} and strides {given[0].stride()} has several elements "
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
