"""Models that people bring: architectures of timm and of transformers, small and without trained weights.

Nothing is downloaded: models are made of their configurations, for small images or short sentences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossbow_py.engine.modules.losses import model_loss
from experiments.bench.torchvision import import_torchvision

PACKAGES = ("timm", "transformers")
NUM_CLASSES = 5
_IMAGE, _TOKENS, _VOCABULARY = 64, 12, 50


class Entry(NamedTuple):
    """One model: the function that makes it, and how it is trained.

    Attributes:
        sample: its inputs, as their shapes: one tensor, or several by name; those whose name ends in `_ids` are
            tokens, and a `mask` leaves out the last of them.
        has_tokens: whether its targets are the tokens themselves, of which it computes its loss.
    """

    build: Callable[[], nn.Module]
    sample: tuple[int, ...] | Mapping[str, tuple[int, ...]]
    has_tokens: bool = False

    @property
    def loss(self) -> Callable[[Any, Tensor], Tensor]:
        """The loss: cross-entropy, or the model's own."""
        return model_loss if self.has_tokens else nn.functional.cross_entropy

    def data(self, count: int) -> tuple[Any, Tensor]:
        """Samples to train on, drawn anew and always alike."""
        generator = torch.Generator().manual_seed(1)

        def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
            if name.endswith("_ids"):
                return torch.randint(3, _VOCABULARY, (count, *shape), generator=generator)
            if name.endswith("mask"):
                lengths = torch.randint(shape[0] // 2, shape[0] + 1, (count, 1), generator=generator)
                return (torch.arange(shape[0]) < lengths).long()
            return torch.randn(count, *shape, generator=generator)

        if not isinstance(self.sample, Mapping):
            return drawn("images", self.sample), torch.arange(count) % NUM_CLASSES
        inputs = {name: drawn(name, shape) for name, shape in self.sample.items()}
        if self.has_tokens:
            labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
            return {**inputs, "labels": labels}, labels
        return inputs, torch.arange(count) % NUM_CLASSES


# The smallest variant of each architecture, and what else it is told: to be shallower, and, where it learns positions,
# how large images are.
_SIZED: dict[str, Any] = {"img_size": _IMAGE}
_LAYERS, _DEPTHS = {"layers": [1, 1, 1, 1]}, {"depths": (1, 1, 1, 1)}
TIMM: Mapping[str, dict[str, Any]] = {
    "test_resnet": {}, "resnext26ts": {}, "seresnext26t_32x4d": _LAYERS, "resnetv2_18": _LAYERS,
    "legacy_seresnet18": _LAYERS, "skresnet18": _LAYERS, "resnest14d": {}, "res2next50": _LAYERS, "regnetx_002": {},
    "repvgg_a0": {}, "botnet26t_256": _SIZED, "lambda_resnet26t": {}, "test_nfnet": {},
    "densenet121": {"block_config": (1, 2, 2, 1)}, "dpn48b": {"k_sec": (1, 1, 1, 1)}, "dla46x_c": {},
    "hrnet_w18_small": {}, "selecsls42": {}, "tresnet_m": _LAYERS, "eca_vovnet39b": {}, "cs3darknet_focus_s": {},
    "test_efficientnet": {}, "mobilenetv2_035": {}, "mobilenetv3_small_050": {}, "mnasnet_small": {}, "fbnetc_100": {},
    "tinynet_e": {}, "hardcorenas_b": {}, "lcnet_035": {}, "rexnet_100": {"width_mult": 0.5}, "ghostnet_050": {},
    "ghostnetv2_100": {}, "repghostnet_050": {}, "hgnetv2_b0": {}, "fasternet_t0": _DEPTHS, "starnet_s050": {},
    "inception_next_atto": _DEPTHS, "test_convnext": {}, "convnextv2_atto": _DEPTHS, "test_mambaout": {},
    "test_vit": {}, "test_vit_relpos": _SIZED, "deit_tiny_patch16_224": _SIZED | {"depth": 2},
    "cait_xxs24_224": _SIZED | {"depth": 2}, "xcit_nano_12_p8_224": _SIZED | {"depth": 2},
    "beit_base_patch16_224": _SIZED | {"embed_dim": 48, "depth": 2, "num_heads": 3},
    "vit_tiny_patch16_dinov3_qkvb": {"depth": 2},
    "swin_tiny_patch4_window7_224": _SIZED | {"depths": (1, 1, 2, 1), "embed_dim": 24},
    "swinv2_tiny_window8_256": _SIZED | {"depths": (1, 1, 2, 1), "embed_dim": 24},
    "tnt_s_legacy_patch16_224": _SIZED | {"depth": 2}, "crossvit_tiny_240": {"depth": [[1, 2, 0]]},
    "coat_tiny": _SIZED | {"serial_depths": (1, 1, 1, 1)}, "convit_tiny": _SIZED | {"depth": 2}, "pit_ti_224": _SIZED,
    "pvt_v2_b0": _DEPTHS, "twins_svt_small": {"depths": [1, 2, 2, 2]}, "levit_128s": _SIZED | {"depth": (1, 1, 1)},
    "visformer_tiny": _SIZED | {"depth": (2, 1, 1)}, "edgenext_xx_small": {"depths": (1, 1, 2, 1)},
    "mobilevit_xxs": {}, "test_coatnet": _SIZED, "maxvit_pico_rw_256": _SIZED,
    "efficientformerv2_s0": _SIZED | _DEPTHS, "efficientvit_b0": {"depths": (1, 1, 1, 1, 1)},
    "efficientvit_m0": {"depth": (1, 1, 1)}, "fastvit_t8": _LAYERS, "repvit_m1": {"depth": (1, 1, 1, 1)},
    "swiftformer_xs": _LAYERS, "tiny_vit_5m_224": _DEPTHS, "gmlp_ti16_224": _SIZED,
    "hiera_tiny_224": _SIZED | {"stages": (1, 1, 2, 1)},
    "sequencer2d_s": _LAYERS | {"embed_dims": [32, 48, 48, 48], "hidden_sizes": [8, 12, 12, 12]},
    "davit_tiny": _DEPTHS, "gcvit_xxtiny": _SIZED, "mvitv2_tiny": {}, "nest_tiny": _SIZED, "volo_d1_224": _SIZED,
    "poolformerv2_s12": {}, "mixer_s32_224": _SIZED, "resmlp_12_224": _SIZED, "focalnet_tiny_srf": {},
}  # fmt: skip
TRANSFORMERS = (
    "Llama", "Mistral", "Qwen2", "GPT-2", "BERT", "RoBERTa", "ELECTRA", "ALBERT", "DistilBERT", "T5 encoder", "ViT",
    "CLIP", "Llama, next token", "GPT-2, next token", "BERT, masked tokens",
)  # fmt: skip


def _timm_model(name: str, options: Mapping[str, Any]) -> nn.Module:
    import timm  # noqa: PLC0415  of an extra of its own

    create = partial(timm.create_model, name, num_classes=NUM_CLASSES, **options)
    try:
        model: nn.Module = create(drop_path_rate=0.1)
    except TypeError:  # most take it
        model = create()
    return model


def _transformers_models() -> dict[str, Entry]:
    import transformers as hf  # noqa: PLC0415  of an extra of its own

    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**size, "vocab_size": _VOCABULARY, "max_position_embeddings": 32, "pad_token_id": 0}
    images = {**size, "image_size": 32, "patch_size": 8}
    labels = {"num_labels": NUM_CLASSES}

    sentence = {"input_ids": (_TOKENS,), "attention_mask": (_TOKENS,)}

    def text_entry(maker: Any, config: Any) -> Entry:
        return Entry(partial(maker, config), sentence)

    gpt2 = {"vocab_size": _VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    gpt2 |= {"bos_token_id": 1, "eos_token_id": 2}
    decoder = {**text, **labels, "num_key_value_heads": 1, "use_cache": False}
    return {
        "Llama": text_entry(hf.LlamaForSequenceClassification, hf.LlamaConfig(**decoder)),
        "Mistral": text_entry(hf.MistralForSequenceClassification, hf.MistralConfig(**decoder, sliding_window=4)),
        "Qwen2": text_entry(hf.Qwen2ForSequenceClassification, hf.Qwen2Config(**decoder)),
        "GPT-2": text_entry(
            hf.GPT2ForSequenceClassification,
            hf.GPT2Config(**gpt2, pad_token_id=0, use_cache=False, **labels),
        ),
        "BERT": text_entry(hf.BertForSequenceClassification, hf.BertConfig(**text, **labels)),
        "RoBERTa": text_entry(hf.RobertaForSequenceClassification, hf.RobertaConfig(**text, **labels)),
        "ELECTRA": text_entry(
            hf.ElectraForSequenceClassification, hf.ElectraConfig(**text, embedding_size=16, **labels)
        ),
        "ALBERT": text_entry(hf.AlbertForSequenceClassification, hf.AlbertConfig(**text, embedding_size=8, **labels)),
        "DistilBERT": text_entry(
            hf.DistilBertForSequenceClassification,
            hf.DistilBertConfig(vocab_size=_VOCABULARY, dim=16, n_layers=2, n_heads=2, hidden_dim=32, **labels),
        ),
        "T5 encoder": Entry(partial(_T5, hf), sentence),
        "ViT": Entry(
            partial(hf.ViTForImageClassification, hf.ViTConfig(**images, **labels)), {"pixel_values": (3, 32, 32)}
        ),
        "CLIP": Entry(partial(_Clip, hf, size, images), (3, 32, 32)),
        "Llama, next token": Entry(
            partial(hf.LlamaForCausalLM, hf.LlamaConfig(**text, num_key_value_heads=1)), sentence, has_tokens=True
        ),
        "GPT-2, next token": Entry(
            partial(hf.GPT2LMHeadModel, hf.GPT2Config(**gpt2)), sentence, has_tokens=True
        ),
        "BERT, masked tokens": Entry(
            partial(hf.BertForMaskedLM, hf.BertConfig(**text)), sentence, has_tokens=True
        ),
    }  # fmt: skip


class _T5(nn.Module):
    """An encoder without a head, and one on the mean of its tokens."""

    def __init__(self, hf: Any) -> None:
        super().__init__()
        size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        self.encoder = hf.T5EncoderModel(hf.T5Config(vocab_size=_VOCABULARY, use_cache=False, **size))
        self.head = nn.Linear(16, NUM_CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        scores: Tensor = self.head(hidden.mean(1))
        return scores


class _Clip(nn.Module):
    """CLIP that tells images of one caption each apart: as many captions as classes."""

    def __init__(self, hf: Any, size: dict[str, int], images: dict[str, int]) -> None:
        super().__init__()
        text = {**size, "vocab_size": _VOCABULARY, "max_position_embeddings": _TOKENS, "eos_token_id": 2}
        self.model = hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=images, projection_dim=8))
        captions = torch.randint(3, _VOCABULARY, (NUM_CLASSES, _TOKENS))
        captions[:, -1] = 2
        self.register_buffer("captions", captions)

    def forward(self, images: Tensor) -> Tensor:
        """The similarity of each image to each caption, by the learned temperature `logit_scale`."""
        similarity: Tensor = self.model(input_ids=self.captions, pixel_values=images).logits_per_image
        return similarity


def entry_of(name: str) -> Entry:
    """A model of `TIMM` or `TRANSFORMERS`; imports its package."""
    import_torchvision()
    if name in TIMM:
        return Entry(partial(_timm_model, name, TIMM[name]), (3, _IMAGE, _IMAGE))
    return _transformers_models()[name]
