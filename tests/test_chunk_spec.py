"""Recognising split and merge specs, without importing the package that defines them."""

import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _CustomReducer, _Replicate

from roundpipe import chunk_spec
from roundpipe.errors import ConfigTypeError

REDUCER = _CustomReducer(0, max)


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        (TensorChunkSpec(1), "chunk"),
        (_Replicate(), "replicate"),
        (_Replicate, "replicate"),
        (REDUCER, "reducer"),
        (None, ""),
        (TensorChunkSpec, ""),
        (0, ""),
        ((TensorChunkSpec(0),), ""),
    ],
)
def test_kinds(value, kinds):
    found = {
        "chunk": chunk_spec.is_chunk(value),
        "replicate": chunk_spec.is_replicate(value),
        "reducer": chunk_spec.is_reducer(value),
    }
    assert [kind for kind, is_it in found.items() if is_it] == ([kinds] if kinds else [])
    assert chunk_spec.is_spec(value) is bool(kinds)


def test_dimension():
    assert chunk_spec.chunk_dim(TensorChunkSpec(-1)) == -1


def test_check_spec_walks_trees():
    tree = {"a": [TensorChunkSpec(0), None], "b": (_Replicate, _Replicate())}
    chunk_spec.check_spec(tree, "spec", reducers=False)
    chunk_spec.check_spec([tree, REDUCER], "spec", reducers=True)
    with pytest.raises(ConfigTypeError, match="_CustomReducer"):
        chunk_spec.check_spec([tree, REDUCER], "spec", reducers=False)
    with pytest.raises(ConfigTypeError, match=r"merge_output.*'dim0'"):
        chunk_spec.check_spec({"a": "dim0"}, "merge_output", reducers=True)


def test_the_defining_package_is_not_imported():
    # In a process of its own, by file: the package's own __init__ may import whatever it likes.
    root = Path(chunk_spec.__file__).parent
    code = (
        "import importlib.util, sys, types\n"
        f"package = types.ModuleType('roundpipe'); package.__path__ = [{str(root)!r}]\n"
        "sys.modules['roundpipe'] = package\n"
        "import torch, roundpipe.batch, roundpipe.run_config\n"
        "roundpipe.run_config.RoundPipeRunConfig(merge_output=True)\n"
        "roundpipe.batch.split_inputs((torch.ones(4),), {}, 2)\n"
        "assert 'torch.distributed.pipelining.microbatch' not in sys.modules\n"
        "assert not roundpipe.batch_tree.is_spec(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
