"""LoRA: low-rank adapters over layers of a frozen model, put in by PEFT.

A layer of weights W becomes W·x + α/r · B·A·x, of which only A [r, in] and B [out, r] are trained (Hu et al. 2021,
https://arxiv.org/abs/2106.09685). Models that PEFT has wrapped elsewhere train as they are; those made here can also
share packs with others of another rank or α.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import check, setting
from crossbow_py.models.frozen import frozen

SCALE = "adapter_scale"  # the buffer that holds α/r: PEFT would save a name with "lora_" in it
SAVE_MERGED = "save_merged"  # the attribute of a model that is to be saved with adapters merged into its base, too
_OF_PEFT = "base_model.model."  # before the names of the base's parameters
_KEPT, _TRAINED = ".original_module.", ".modules_to_save.default."  # in names of a layer that is trained whole
_MOST_NAMED = 8


@dataclass(frozen=True)
class LoRA:
    """A function that makes a model with adapters: `Trainer(LoRA(make_base, rank=4, targets=["query", "value"]), ...)`.

    The model is a `peft.PeftModel`, so that `save_pretrained`, `merge_and_unload` and so on are there.

    Raises UserError where it is called, if PEFT is not there or cannot adapt the model like that.
    """

    model: Callable[[], nn.Module]
    rank: int = setting(8, "r, the rank of every adapter's product", minimum=1)
    alpha: float = setting(16.0, "α; adapters are scaled by α/r", above=0)
    dropout: float = setting(0.0, "dropout before every adapter", minimum=0, below=1)
    targets: str | Sequence[str] = setting(
        "all-linear", "ends of the names of the layers to adapt, or a regular expression for whole names"
    )
    trained: Sequence[str] = setting((), "ends of the names of the layers to train whole, such as a new head")
    save_merged: bool = setting(False, "whether plain weights with the adapter merged in are saved, too")

    def __post_init__(self) -> None:
        check(self)
        for name in ("targets", "trained"):
            if not isinstance(given := getattr(self, name), str):
                object.__setattr__(self, name, tuple(given))
        if not self.targets:
            raise UserError("LoRA has no targets; name layers, as targets=['query', 'value'], or leave it out.")

    def __call__(self) -> nn.Module:
        """Make the base, and put adapters in."""
        return self.adapted(self.model())

    def adapted(self, base: nn.Module) -> nn.Module:
        """Return a base with adapters in it, of which only these and the layers in `trained` are trained.

        Other layers with running statistics keep these.
        """
        try:
            import peft  # noqa: PLC0415  two seconds
            from peft.tuners.lora import LoraLayer  # noqa: PLC0415
        except ImportError as error:
            raise UserError('LoRA needs PEFT, which is not installed; pip install "crossbow_py[lora]".') from error
        alpha: Any = self.alpha  # PEFT says int, and takes any number
        config = peft.LoraConfig(
            r=self.rank, lora_alpha=alpha, lora_dropout=self.dropout,
            target_modules=self.targets if isinstance(self.targets, str) else list(self.targets),
            modules_to_save=list(self.trained) or None,
        )  # fmt: skip
        layers = [name for name, own in base.named_modules() if isinstance(own, nn.Linear | nn.Embedding | nn.Conv2d)]
        few = ", ".join(layers[:_MOST_NAMED]) + (", ..." if len(layers) > _MOST_NAMED else "") or "it has none"
        self._check_names([name for name, _ in base.named_modules()], few)
        for name, own in base.named_modules():
            if "running_mean" in own._buffers and not self._trains(name):
                frozen(own)  # an adapter would be saved without the statistics
        try:
            model: nn.Module = peft.get_peft_model(base, config)
        except Exception as error:
            raise UserError(
                f"PEFT cannot put adapters into {shown(self.targets)} ({one_line(error)[:200]}); choose targets among "
                f"the model's layers: {few}."
            ) from error
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                self._check_rank(name, layer)
                _hold_scale(layer)
        if self.save_merged:
            setattr(model, SAVE_MERGED, True)
        return model

    def _check_names(self, names: Sequence[str], few: str) -> None:
        """Raise UserError for a name that no layer has, which PEFT passes over beside others."""
        targets = [] if isinstance(self.targets, str) else self.targets
        for key, every in (("targets", targets), ("trained", self.trained)):
            for own in every:
                if not any(f".{name}".endswith(f".{own}") for name in names):
                    raise UserError(f"{key} has {own!r}, and the model no such layer; choose among its layers: {few}.")

    def _trains(self, name: str) -> bool:
        """Return whether a layer is among those that are trained whole."""
        return any(f".{each}." in f".{name}." for each in self.trained)

    def _check_rank(self, name: str, layer: Any) -> None:
        weight = getattr(layer.get_base_layer(), "weight", None)
        if weight is None:  # several, as of an attention
            return
        rows, columns = weight.shape[0], weight[0].numel()
        if self.rank > min(rows, columns):
            raise UserError(
                f"rank={self.rank} is more than the matrix of {name.removeprefix(_OF_PEFT)} has, {rows} by {columns}; "
                f"take at most {min(rows, columns)}, or other targets."
            )


def in_one_form(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return models of which adapters over one architecture have one rank, and their scale in a buffer.

    Those are copies in evaluation mode that hold the model's own frozen weights, and are not to be trained. Narrower
    adapters are padded with zeros. Models without adapters, or with others than plain LoRA, are returned as they are.
    """
    found, groups = list(models), dict[object, list[int]]()
    for place, model in enumerate(models):
        if layers := _plain_layers(model):
            parts = [(name, type(own)) for name, own in model.named_modules() if ".lora_dropout." not in name]
            groups.setdefault(repr((parts, [name for name, _ in layers])), []).append(place)
    for places in groups.values():
        ranks = [{name: layer.r[layer.active_adapters[0]] for name, layer in _plain_layers(found[n])} for n in places]
        widest = {name: max(own[name] for own in ranks) for name in ranks[0]}
        configs: Any = found[places[0]]
        for place in places:
            found[place] = _padded(found[place], widest, configs.base_model.peft_config)
    return found


def _plain_layers(model: Any) -> list[tuple[str, Any]]:
    """Return the adapted layers of a `peft.PeftModel`, by name; none if some may compute other than plain LoRA."""
    if "peft" not in sys.modules or not isinstance(model, sys.modules["peft"].PeftModel):
        return []
    layers = [(name, own) for name, own in model.named_modules() if hasattr(own, "lora_A") and hasattr(own, "scaling")]
    is_plain = all(
        len(own.r) == 1 and list(own.active_adapters) == list(own.r) and not own.merged and not own.disable_adapters
        and not own.lora_variant and len(own.lora_A) + len(own.lora_embedding_A) == 1
        and all(a.shape[0] == b.shape[1] for a, b in [_pair(own)])
        for _, own in layers
    )  # fmt: skip
    return layers if is_plain else []


def _pair(layer: Any) -> tuple[Tensor, Tensor]:
    """Return A [r, ...] and B [..., r, ...] of the only adapter of a layer."""
    (name,) = layer.r
    if len(layer.lora_A):
        return layer.lora_A[name].weight, layer.lora_B[name].weight
    return layer.lora_embedding_A[name], layer.lora_embedding_B[name]


def _padded(model: nn.Module, ranks: Mapping[str, int], configs: Any) -> nn.Module:
    """Return a copy, as of `in_one_form`, with these ranks by the names of layers."""
    memo: dict[int, Any] = {
        id(own): own for name, own in model.named_parameters() if not own.requires_grad and not _is_learned(name)
    }
    copied: nn.Module = copy.deepcopy(model, memo).eval()
    for layer_name, layer in _plain_layers(copied):
        (name,), rank = layer.r, ranks[layer_name]
        for own, dim in zip(_pair(layer), (0, 1), strict=True):
            shape = list(own.shape)
            shape[dim] = rank
            value = own.new_zeros(shape)
            value.narrow(dim, 0, own.shape[dim]).copy_(own.detach())
            own.data = value
        for part, ends in ((layer.lora_A, "out"), (layer.lora_B, "in")) if len(layer.lora_A) else ():
            for kind in ("features", "channels"):
                if hasattr(part[name], f"{ends}_{kind}"):
                    setattr(part[name], f"{ends}_{kind}", rank)
        if not isinstance(layer.scaling, Scaling):
            _hold_scale(layer)
        layer.r[name], layer.lora_alpha[name] = rank, None  # its scale is in the buffer
        layer.use_rslora[name], layer.lora_dropout[name] = False, nn.Identity()
    holders: list[Any] = [each for each in copied.modules() if "peft_config" in vars(each)]
    for holder in holders:
        holder.peft_config = configs  # which tell models apart; what layers compute by is in themselves
    for name, own in copied.named_parameters():
        own.requires_grad_(own.requires_grad or _is_learned(name))  # what is not is the base, and may be shared
    return copied


def _is_learned(name: str) -> bool:
    return is_part_of_adapter(name) or ".modules_to_save." in name


def is_part_of_adapter(name: str) -> bool:
    """Return whether a module or parameter of this name is part of an adapter."""
    return ".lora_" in name


def replaced_names(names: Iterable[str]) -> set[str]:
    """Return the names of parameters of layers that PEFT has kept as they were, and trains a copy of in their place."""
    every = set(names)
    return {name for name in every if _KEPT in name and name.replace(_KEPT, _TRAINED) in every}


def names_in_base(names: Iterable[str]) -> dict[str, str]:
    """Return the names that parameters and buffers of an adapted model have in its base, without those of adapters.

    A layer that is trained whole is there twice, as it was and as it is trained.
    """
    found = {}
    every = list(names)
    for name in every if any(name.startswith(_OF_PEFT) for name in every) else ():
        if not is_part_of_adapter(name) and not name.endswith(SCALE):
            own = name.removeprefix(_OF_PEFT)
            for part in (".base_layer.", _KEPT, _TRAINED):
                own = own.replace(part, ".")
            found[name] = own
    return found


def shown(targets: str | Sequence[str]) -> str:
    """Return targets as a sentence has them."""
    return repr(targets) if isinstance(targets, str) else ", ".join(map(repr, targets))


def _hold_scale(layer: Any) -> None:
    """Have an adapted layer read its scale from a buffer, which each model of a pack has its own of."""
    (name,) = layer.scaling
    scale = torch.tensor(float(layer.scaling[name]), dtype=_pair(layer)[0].dtype)
    layer.register_buffer(SCALE, scale, persistent=False)
    layer.scaling = Scaling(layer, {name: None})


class Scaling(dict[str, Any]):
    """The scales of a layer's adapters, as PEFT reads and sets them; None stands for the one that its buffer holds."""

    def __init__(self, layer: nn.Module, scales: Mapping[str, Any]) -> None:
        super().__init__(scales)
        self._layer = layer

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Scaling, (self._layer, dict(super().items()))

    def __getitem__(self, adapter: str) -> Any:
        scale = super().__getitem__(adapter)
        return getattr(self._layer, SCALE) if scale is None else scale

    def __setitem__(self, adapter: str, scale: Any) -> None:
        if adapter in self and super().__getitem__(adapter) is None:
            with torch.no_grad():
                getattr(self._layer, SCALE).fill_(float(scale))
        else:
            super().__setitem__(adapter, scale)

    def copy(self) -> Scaling:
        return Scaling(self._layer, dict(super().items()))

    def get(self, adapter: str, default: Any = None) -> Any:
        return dict(self.items()).get(adapter, default)

    def items(self) -> Any:
        return {adapter: self[adapter] for adapter in self}.items()

    def values(self) -> Any:
        return {adapter: self[adapter] for adapter in self}.values()
