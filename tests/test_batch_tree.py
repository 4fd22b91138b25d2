"""Leaves with names and specs, in PyTorch's order, and the refusal of tensors hidden from its trees."""

import collections
import dataclasses

import pytest
import torch
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate
from torch.utils import _pytree as pytree

from roundpipe.batch_tree import leaves, reject_hidden_tensors, structure
from roundpipe.errors import SplitError
from roundpipe.packed import RoundPipePackedData

Pair = collections.namedtuple("Pair", ["left", "right"])
ZERO, REPLICATE = TensorChunkSpec(0), _Replicate()


@dataclasses.dataclass
class Hidden:
    name: str
    inner: object = None


@dataclasses.dataclass
class Known:
    x: object
    y: object


pytree.register_dataclass(Known)


class Opaque:
    """Registered without key paths, which some libraries do."""

    def __init__(self, *items):
        self.items = items

    def __repr__(self):  # names a test, which must be called the same in every process
        return f"Opaque{self.items}"


pytree.register_pytree_node(Opaque, lambda o: (list(o.items), None), lambda items, _: Opaque(*items))

TREES = [
    3,
    None,
    (),
    [1, (2, {"b": 3, "a": [4]}), None],
    Pair(1, [2]),
    collections.OrderedDict(z=1, a=2),
    collections.defaultdict(list, k=[1]),
    Known(1, {"q": 2}),
    Opaque(1, Opaque(2, 3)),
]


@pytest.mark.parametrize("tree", TREES, ids=repr)
def test_leaves_agree_with_pytorch(tree):
    found = leaves(tree, "t")
    assert [leaf.value for leaf in found] == pytree.tree_leaves(tree)
    assert structure(tree) == pytree.tree_structure(tree)
    assert len({leaf.name for leaf in found}) == len(found)


def test_names():
    tree = {"a": [1, Pair(2, Known(3, 4))], 5: Opaque(6)}
    assert [leaf.name for leaf in leaves(tree, "kwargs")] == [
        "kwargs['a'][0]",
        "kwargs['a'][1].left",
        "kwargs['a'][1].right.x",
        "kwargs['a'][1].right.y",
        "kwargs[5][0]",
    ]


def test_specs_reach_their_leaves():
    tree = {"a": (1, 2), "b": [3], "c": 4}
    found = leaves(tree, "t", {"c": REPLICATE, "a": ZERO, "b": [None]})
    assert [(leaf.value, leaf.spec, leaf.exact) for leaf in found] == [
        (1, ZERO, False),
        (2, ZERO, False),
        (3, None, False),
        (4, REPLICATE, True),
    ]
    assert [leaf.spec for leaf in leaves((1, 2), "t", [ZERO, None])] == [ZERO, None]
    assert [leaf.spec for leaf in leaves(Known(1, 2), "t", Known(None, ZERO))] == [None, ZERO]
    # PyTorch leaves None out of a registered dataclass, so its fields cannot be counted off against a spec's.
    assert [leaf.spec for leaf in leaves(Known(None, 2), "t", Known(ZERO, REPLICATE))] == [REPLICATE]
    assert [leaf.name for leaf in leaves(Known(None, 2), "t")] == ["t.y"]


@pytest.mark.parametrize(
    ("tree", "spec", "said"),
    [
        ({"a": 1}, {"b": ZERO}, r"lacks \['a'\] and has unknown \['b'\]"),
        ((1, 2), (ZERO,), "1 entries for 2 values"),
        ((1,), {"a": ZERO}, "dict"),
        (3, (ZERO,), "single int"),
        (Known(1, 2), (ZERO, ZERO), "Known"),
        ([1, [2]], [ZERO, [ZERO, ZERO]], r"t\[1\]"),
    ],
)
def test_specs_that_do_not_fit(tree, spec, said):
    with pytest.raises(SplitError, match=said):
        leaves(tree, "t", spec)


@pytest.mark.parametrize(
    "value",
    [
        Hidden("x", torch.ones(2)),
        Hidden("x", [{"k": Hidden("y", torch.ones(2))}]),
        collections.UserDict(mask=torch.ones(2)),
        type("MyList", (list,), {})([torch.ones(2)]),
        {1, torch.ones(2)},
    ],
    ids=lambda value: type(value).__name__,
)
def test_hidden_tensors_are_refused(value):
    with pytest.raises(SplitError, match="register_pytree_node") as info:
        reject_hidden_tensors(leaves({"a": value}, "kwargs"))
    assert "kwargs['a']" in str(info.value)
    assert type(value).__name__ in str(info.value)


@pytest.mark.parametrize(
    "value",
    [(x for x in "ab"), map(str, [1]), zip([1], [2], strict=True), iter([torch.ones(1)]), iter({1: 2})],
    ids=lambda value: type(value).__name__,
)
def test_iterators_are_refused(value):
    with pytest.raises(SplitError, match="iterator") as info:
        reject_hidden_tensors(leaves({"a": value}, "kwargs"))
    assert "kwargs['a']" in str(info.value)
    assert type(value).__name__ in str(info.value)


def test_harmless_leaves_pass():
    cycle = Hidden("x")
    cycle.inner = cycle
    values = [Hidden("x", "y"), Hidden, "text", range(3), {1, 2}, cycle, object(), RoundPipePackedData([torch.ones(1)])]
    reject_hidden_tensors(leaves(values, "args"))
    reject_hidden_tensors(leaves(Known(torch.ones(1), None), "args"))
