"""One of several processes is told that RoundPipe does not train over several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundpipe
from roundpipe import RoundPipe, wrap_model_to_roundpipe
from roundpipe.errors import ConfigError


@pytest.mark.parametrize("wrap", [RoundPipe, wrap_model_to_roundpipe])
def test_one_of_several_is_refused(wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    roundpipe.use_devices("host:1")
    model = nn.Linear(2, 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"one of 4 processes.*WORLD_SIZE.*single process.*torchrun"):
        wrap(model)
    for alone in ("1", "", "many"):  # a launcher with one process, and what no launcher sets
        monkeypatch.setenv("WORLD_SIZE", alone)
        wrapped = wrap(model)
        x = torch.randn(3, 2)
        assert torch.allclose(wrapped(x), model(x))


def test_a_process_group_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match=r"one of 2 processes.*process group"):
        RoundPipe(nn.Linear(2, 2))
