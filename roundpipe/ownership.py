"""Which wrapper the weights of a model belong to: one at a time, because it moves them and orders their updates.

Note [Takeover]
  In a notebook the cell that wraps a model is run again while the old wrapper still has its name. So wrapping exactly
  the parameters of one living wrapper again takes them over: what is under way there ends, its newest weights are
  published, and from then on its use is an error that names the successor. Gradients that had accumulated are dropped,
  and optimizers built on the old wrapper belong to it alone. Parameters that are shared only in part stay an error.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import nn

from .call_site import caller_level
from .errors import ConfigError, RoundPipeError


class Owner(Protocol):
    name: str

    def synchronize(self) -> None: ...

    def retire(self, successor: str) -> None:
        """From now on every use raises, naming ``successor``. Lets go of all host memory but the weights."""


class _Owners:
    def __init__(self) -> None:
        self._of: dict[int, tuple[weakref.ref[nn.Parameter], weakref.ref[Owner]]] = {}
        self._lock = threading.RLock()  # covers the dictionary

    def _owner(self, parameter: nn.Parameter) -> Owner | None:
        entry = self._of.get(id(parameter))
        return entry[1]() if entry is not None and entry[0]() is parameter else None

    def _owned_by(self, owner: Owner) -> set[int]:
        return {key for key, (parameter, of) in self._of.items() if parameter() is not None and of() is owner}

    def of(self, parameter: nn.Parameter) -> Owner | None:
        """The living wrapper that owns a parameter."""
        with self._lock:
            return self._owner(parameter)

    def living(self) -> list[Owner]:
        """The wrappers that own parameters, the oldest first."""
        with self._lock:
            found = [owner for parameter, of in self._of.values() if parameter() is not None and (owner := of())]
        return list({id(owner): owner for owner in found}.values())

    def claim(self, parameters: Iterable[tuple[str, nn.Parameter]], claimant: Owner) -> None:
        """Makes ``claimant`` the owner of named parameters; see Note [Takeover].

        Raises:
            ConfigError: some of them belong to a living wrapper, which has others too or not all of them.
        """
        from .checkpoint.job import wait_for_saves_of

        named = dict(parameters)
        mine = {id(parameter) for parameter in named.values()}
        wait_for_saves_of(mine)  # of a wrapper that may be gone
        before: dict[int, Owner] = {}
        with self._lock:
            for name, parameter in named.items():
                owner = self._owner(parameter)
                if owner is None or id(owner) in before:
                    continue
                before[id(owner)] = owner
                if self._owned_by(owner) != mine:
                    raise ConfigError(
                        f"parameter {name!r} already belongs to the living wrapper {owner.name!r}, which streams and "
                        "updates it; weights can be in one wrapper only. Use that one, wrap both models as one, or "
                        "delete it before wrapping its parameters again."
                    )
        for owner in before.values():
            _end(owner, claimant.name)
        with self._lock:
            self._of = {
                key: entry for key, entry in self._of.items() if entry[0]() is not None and entry[1]() is not None
            }
            for parameter in named.values():
                self._of[id(parameter)] = (weakref.ref(parameter), weakref.ref(claimant))

    @contextlib.contextmanager
    def released_on_failure(self, claimant: Owner) -> Iterator[None]:
        """A wrapper that could not be made may live on in a traceback, and must not own the weights there."""
        try:
            yield
        except BaseException:
            with self._lock:
                self._of = {key: entry for key, entry in self._of.items() if entry[1]() is not claimant}
            raise


def _end(owner: Owner, successor: str) -> None:
    try:
        owner.synchronize()
    except RoundPipeError as error:
        warnings.warn(
            f"{owner.name} is replaced by {successor}; it had failed meanwhile: {type(error).__name__}: {error}",
            stacklevel=caller_level(),
        )
        owner.synchronize()  # told; what remains is well
    owner.retire(successor)


owners = _Owners()
