"""Malformed calls: each is refused with a type and words that help, loses nothing, and the same model trains on.

Before each call the model has accumulated the gradients of one batch; after it comes another batch and a step. Both
must be what a plain loop makes of the two batches: neither weights nor the gradients before the mistake are touched.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator

import pytest

import roundpipe
from roundpipe.errors import RoundPipeError

from .misuse_cases import CASES, World


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.model.synchronize()


def test_at_least_eighty() -> None:
    assert len(CASES) >= 80
    names = [c.name for c in CASES]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[c.name for c in CASES])
def test_refused_and_trained_on(number: int, world: World) -> None:
    one = CASES[number]
    roundpipe.use_devices("host:2")
    world.both_train(2 * number)
    with pytest.raises(one.kind) as caught, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is said besides is no business of this table
        one.call(world)
        world.model.synchronize()
    text = str(caught.value)
    assert any(part in text for part in one.said.split("|")), text
    if isinstance(caught.value, RoundPipeError):
        assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)
    world.both_train(2 * number + 1)
    world.both_step()


def test_a_failed_step_hides_no_mistake_of_a_later_scaler(world: World) -> None:
    """Failed steps are counted for the process, so that a scaler can tell them from steps that looked at nothing."""

    def fails() -> None:
        raise LookupError("no such rate")

    with pytest.raises(RoundPipeError, match="no such rate"):
        world.model.step(fails, is_async=False)
    with pytest.raises(RoundPipeError, match="no gradients were looked at"):
        roundpipe.GradScaler().update(is_async=False)
