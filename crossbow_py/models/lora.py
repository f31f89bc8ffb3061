"""LoRA: low-rank adapters over layers of a frozen model, put in by PEFT.

A layer of weights W becomes W·x + α/r · B·A·x, of which only A [r, in] and B [out, r] are trained (Hu et al. 2021,
https://arxiv.org/abs/2106.09685). Models that PEFT has wrapped elsewhere train as they are; those made here can also
share packs with others of another rank or α.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from crossbow_py.core.errors import UserError, one_line
from crossbow_py.core.settings import check, setting
from crossbow_py.models.frozen import frozen

SCALE = "adapter_scale"  # the buffer that holds α/r: PEFT would save a name with "lora_" in it
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
        for name, own in base.named_modules():
            if "running_mean" in own._buffers and not self._trains(name):
                frozen(own)  # an adapter would be saved without the statistics
        try:
            model: nn.Module = peft.get_peft_model(base, config)
        except Exception as error:
            few = ", ".join(layers[:_MOST_NAMED]) + (", ..." if len(layers) > _MOST_NAMED else "")
            raise UserError(
                f"PEFT cannot put adapters into {shown(self.targets)} ({one_line(error)[:200]}); choose targets among "
                f"the model's layers: {few or 'it has none'}."
            ) from error
        for name, layer in model.named_modules():
            if isinstance(layer, LoraLayer):
                self._check_rank(name, layer)
                _hold_scale(layer)
        return model

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


def is_adapter(name: str) -> bool:
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
        if not is_adapter(name) and not name.endswith(SCALE):
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
    layer.register_buffer(SCALE, torch.tensor(float(layer.scaling[name])), persistent=False)
    layer.scaling = _Scaling(layer, {name: None})


class _Scaling(dict[str, Any]):
    """The scales of a layer's adapters, as PEFT reads and sets them; None stands for the one that its buffer holds."""

    def __init__(self, layer: nn.Module, scales: Mapping[str, Any]) -> None:
        super().__init__(scales)
        self._layer = layer

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _Scaling, (self._layer, dict(super().items()))

    def __getitem__(self, adapter: str) -> Any:
        scale = super().__getitem__(adapter)
        return getattr(self._layer, SCALE) if scale is None else scale

    def __setitem__(self, adapter: str, scale: Any) -> None:
        if adapter in self and super().__getitem__(adapter) is None:
            with torch.no_grad():
                getattr(self._layer, SCALE).fill_(float(scale))
        else:
            super().__setitem__(adapter, scale)

    def copy(self) -> _Scaling:
        return _Scaling(self._layer, dict(super().items()))

    def get(self, adapter: str, default: Any = None) -> Any:
        return dict(self.items()).get(adapter, default)

    def items(self) -> Any:
        return {adapter: self[adapter] for adapter in self}.items()

    def values(self) -> Any:
        return {adapter: self[adapter] for adapter in self}.values()
