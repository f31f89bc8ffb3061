"""Trees of tensors: what a model takes and returns, and what its loss compares with.

A tree is a tensor, or a dict, tuple, list, named tuple or registered pytree of trees. A model is called with the
entries of a dict by keyword, and with those of a tuple or list in order:

    x                          module(x)
    {"ids": x, "mask": m}      module(ids=x, mask=m)
    (image, features)          module(image, features)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from crossbow_py.core.errors import UnknownIdError

Tree: TypeAlias = Any


def leaves(tree: Tree) -> list[Tensor]:
    """Return the tensors of a tree, in order. Other leaves, such as None, are left out."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) is dict:  # four times as fast as by pytree, and a round has many
        return [leaf for own in tree.values() for leaf in leaves(own)]
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tree(function: Callable[..., Tensor], tree: Tree, *others: Tree) -> Tree:
    """Return the tree with `function(leaf, *their leaves)` in place of each tensor; `others` are of the same form."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if type(tree) is dict:
        return {key: map_tree(function, own, *(other[key] for other in others)) for key, own in tree.items()}

    def of_leaf(leaf: Any, *theirs: Any) -> Any:
        return function(leaf, *theirs) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(of_leaf, tree, *others)


def in_format(tree: Tree, dtype: torch.dtype) -> Tree:
    """Return the tree with its floating tensors cast."""
    return map_tree(lambda own: own.to(dtype) if own.is_floating_point() else own, tree)


def detached(tree: Tree) -> Tree:
    """Return the tree without its history of autograd."""
    return map_tree(Tensor.detach, tree)


def joined(trees: Sequence[Tree]) -> Tree:
    """Return the tree of several batches, one behind the other."""
    return map_tree(lambda *each: torch.cat(each), *trees)


def call(module: Callable[..., Tree], inputs: Tree) -> Tree:
    """Call a model with a batch's inputs; see the module's docstring.

    Raises UnknownIdError if an `nn.Embedding` on a CPU has no row for an id, which torch's own error does not name.
    """
    try:
        output = _called(module, inputs)
    except IndexError:
        if isinstance(module, nn.Module):
            raise_unknown_id(module, inputs)
        raise
    kind = type(output)
    if is_dataclass(kind) and kind not in pytree.SUPPORTED_NODES:
        pytree.register_dataclass(kind)  # so that it is a tree of its fields, here and for torch.export
    return output


def _called(module: Callable[..., Tree], inputs: Tree) -> Tree:
    if isinstance(inputs, Tensor):
        return module(inputs)
    return module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)


def raise_unknown_id(module: nn.Module, inputs: Tree) -> None:
    """Raise UnknownIdError if a model has failed on a batch because an embedding has no row for an id.

    The model is run again to find out, up to that embedding.
    """
    embeddings = [(name, own) for name, own in module.named_modules() if isinstance(own, nn.Embedding)]
    hooks = [own.register_forward_pre_hook(partial(_check_ids, name, inputs)) for name, own in embeddings]
    try:
        if hooks:
            _called(module, inputs)
    except UnknownIdError:
        raise
    except Exception:  # the one that the caller has, or another
        return
    finally:
        for hook in hooks:
            hook.remove()


def _check_ids(name: str, inputs: Tree, embedding: nn.Embedding, args: tuple[Any, ...]) -> None:
    ids, rows = args[0], embedding.num_embeddings
    outside = ids[(ids < 0) | (ids >= rows)] if ids.device.type == "cpu" else ids[:0]
    if outside.numel():
        of = f" {name}" if name else ""
        raise UnknownIdError(
            f"the model's embedding{of} looks up id {int(outside[0])}{_source(inputs, ids)} in a table of {rows} rows, "
            f"0 to {rows - 1}; correct the data, or give the table more rows."
        )


def _source(inputs: Tree, ids: Tensor) -> str:
    """Return, for a message, the input of several that the ids are a view of; an empty text if there is none."""
    for path, own in [] if isinstance(inputs, Tensor) else pytree.tree_flatten_with_path(inputs)[0]:
        if isinstance(own, Tensor) and own.untyped_storage().data_ptr() == ids.untyped_storage().data_ptr():
            return f" of inputs{pytree.keystr(path)}"
    return ""


def batch_key(inputs: Tree) -> tuple[object, ...]:
    """Return a key of the form of a batch: its shapes and dtypes, and the structure of its tree."""
    if isinstance(inputs, Tensor):
        return inputs.shape, inputs.dtype
    own, form = pytree.tree_flatten(inputs)
    return str(form), *(batch_key(leaf) for leaf in own if isinstance(leaf, Tensor))


def shape_of(tree: Tree) -> str:
    """Return the shape of a tensor for a message, with the batch; of several tensors their form."""
    return str(list(tree.shape)) if isinstance(tree, Tensor) else form_of(tree)


def values_per_sample(inputs: Tree) -> int:
    """Return how many numbers a sample of a batch has."""
    return sum(leaf[0].numel() for leaf in leaves(inputs))


def form_of(tree: Tree) -> str:
    """Return the form of a tree for a message, without the batch: `[3, 32, 32] of uint8`, `{ids: [128] of int64}`."""
    if isinstance(tree, Tensor):
        return f"{list(tree.shape[1:])} of {str(tree.dtype).removeprefix('torch.')}"
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {form_of(own)}" for key, own in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        return "(" + ", ".join(map(form_of, tree)) + ")"
    return type(tree).__name__
