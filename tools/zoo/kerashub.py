"""Backbones and tasks of KerasHub, from configurations of a few weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tools.zoo.sample import ROWS, Sample, images, ones, tokens

_TEXT = {
    "vocabulary_size": 50,
    "num_layers": 4,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
_POSITIONS = {"num_heads": 2, "max_sequence_length": 16}
_GROUPED = {"num_query_heads": 2, "num_key_value_heads": 1}
_IMAGE = {"image_shape": (32, 32, 3)}
_PATCHES = {**_IMAGE, "patch_size": 8, "num_layers": 4, "num_heads": 2}


def _text() -> dict[str, Any]:
    return {"token_ids": tokens(), "padding_mask": ones()}


def _segments() -> dict[str, Any]:
    return {"token_ids": tokens(), "segment_ids": np.zeros((ROWS, 8), "int32")}


def _masked_segments() -> dict[str, Any]:
    return {**_segments(), "padding_mask": ones()}


def _pairs() -> dict[str, Any]:
    return {
        "encoder_token_ids": tokens(),
        "encoder_padding_mask": ones(),
        "decoder_token_ids": tokens(6),
        "decoder_padding_mask": ones(6),
    }


def _backbone(name: str, **config: Any) -> keras.Model:
    import keras_hub

    return getattr(keras_hub.models, name)(**config)


def _task(name: str, backbone: str, head: Any, **config: Any) -> keras.Model:
    import keras_hub

    cls = getattr(keras_hub.models, name)
    return cls(_backbone(backbone, **config), **head)


def _with_adapters(name: str, **config: Any) -> keras.Model:
    model = _backbone(name, **config)
    model.enable_lora(2)
    return model


def _sample(
    name: str,
    inputs: Callable[[], Any],
    make: Callable[..., keras.Model] = _backbone,
    is_whole: bool = False,
    **config: Any,
) -> Sample:
    return Sample(functools.partial(make, name, **config), inputs, is_whole)


_small_images = functools.partial(images, 32)
_language = {**_TEXT, **_POSITIONS, "dropout": 0.0}

SAMPLES = {
    "ALBERT": _sample(
        "AlbertBackbone", _masked_segments, embedding_dim=4, **_language
    ),
    "BART": _sample("BartBackbone", _pairs, **_language),
    "BERT": _sample("BertBackbone", _masked_segments, **_language),
    "BERT text classifier": _sample(
        "BertTextClassifier",
        _masked_segments,
        _task,
        backbone="BertBackbone",
        head={"num_classes": 3, "dropout": 0.0},
        **_language,
    ),
    "Bloom": _sample("BloomBackbone", _text, **_language),
    "DeBERTa v3": _sample(
        "DebertaV3Backbone", _text, bucket_size=4, **_language
    ),
    "DeiT": _sample(
        "DeiTBackbone",
        _small_images,
        hidden_dim=8,
        intermediate_dim=16,
        **_PATCHES,
    ),
    "DenseNet": _sample(
        "DenseNetBackbone",
        _small_images,
        is_whole=True,
        stackwise_num_repeats=[2, 2, 2],
        growth_rate=8,
        **_IMAGE,
    ),
    "DINOv2": _sample(
        "DINOV2Backbone",
        _small_images,
        hidden_dim=8,
        intermediate_dim=16,
        position_embedding_shape=(32, 32, 3),
        **_PATCHES,
    ),
    "DistilBERT": _sample("DistilBertBackbone", _text, **_language),
    "ELECTRA": _sample(
        "ElectraBackbone",
        _masked_segments,
        vocab_size=50,
        embedding_dim=8,
        **{k: v for k, v in _language.items() if k != "vocabulary_size"},
    ),
    "Falcon": _sample(
        "FalconBackbone",
        _text,
        num_attention_heads=2,
        **_TEXT,
    ),
    "FNet": _sample(
        "FNetBackbone",
        _segments,
        max_sequence_length=16,
        dropout=0.0,
        **_TEXT,
    ),
    "Gemma": _sample("GemmaBackbone", _text, head_dim=4, **_TEXT, **_GROUPED),
    "GPT-2": _sample("GPT2Backbone", _text, **_language),
    "GPT-2 language model": _sample(
        "GPT2CausalLM",
        _text,
        _task,
        backbone="GPT2Backbone",
        head={},
        **_language,
    ),
    "GPT-NeoX": _sample(
        "GPTNeoXBackbone", _text, rotary_percentage=0.5, **_language
    ),
    "Llama": _sample("LlamaBackbone", _text, **_TEXT, **_GROUPED),
    "Llama with LoRA": _sample(
        "LlamaBackbone", _text, _with_adapters, **_TEXT, **_GROUPED
    ),
    "MiT": _sample(
        "MiTBackbone",
        _small_images,
        is_whole=True,
        layerwise_depths=[2, 2],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[4, 2],
        max_drop_path_rate=0.0,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[8, 16],
        **_IMAGE,
    ),
    "Mistral": _sample("MistralBackbone", _text, **_TEXT, **_GROUPED),
    "Mixtral": _sample(
        "MixtralBackbone", _text, num_experts=2, **_TEXT, **_GROUPED
    ),
    "OPT": _sample("OPTBackbone", _text, **_language),
    "Phi-3": _sample("Phi3Backbone", _text, **_TEXT, **_GROUPED),
    "Qwen": _sample("QwenBackbone", _text, **_TEXT, **_GROUPED),
    "ResNet": _sample(
        "ResNetBackbone",
        _small_images,
        is_whole=True,
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[2, 2, 2],
        stackwise_num_strides=[1, 2, 2],
        block_type="basic_block",
        **_IMAGE,
    ),
    "RoBERTa": _sample("RobertaBackbone", _text, **_language),
    "Swin": _sample(
        "SwinTransformerBackbone",
        _small_images,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        patch_size=2,
        drop_path=0.0,
        **_IMAGE,
    ),
    "T5": _sample("T5Backbone", _pairs, num_heads=2, dropout=0.0, **_TEXT),
    "VGG": _sample(
        "VGGBackbone",
        _small_images,
        stackwise_num_repeats=[2, 2, 2],
        stackwise_num_filters=[8, 8, 16],
        **_IMAGE,
    ),
    "ViT": _sample(
        "ViTBackbone", _small_images, hidden_dim=8, mlp_dim=16, **_PATCHES
    ),
    "ViT image classifier": _sample(
        "ViTImageClassifier",
        _small_images,
        _task,
        backbone="ViTBackbone",
        head={"num_classes": 3},
        hidden_dim=8,
        mlp_dim=16,
        **_PATCHES,
    ),
    "Whisper": _sample(
        "WhisperBackbone",
        lambda: {
            "encoder_features": np.random.default_rng(0).random((ROWS, 16, 80)),
            "decoder_token_ids": tokens(6),
            "decoder_padding_mask": ones(6),
        },
        num_heads=2,
        max_encoder_sequence_length=16,
        max_decoder_sequence_length=16,
        **_TEXT,
    ),
    "XLM-RoBERTa": _sample("XLMRobertaBackbone", _text, **_language),
    "XLNet": _sample(
        "XLNetBackbone",
        _masked_segments,
        num_heads=2,
        **_TEXT,
    ),
}
