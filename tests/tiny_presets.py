"""Tiny tasks of KerasHub, and what they take."""

import json

import keras
import numpy as np
import safetensors.numpy
from keras_hub import models

TEXT = {
    "vocabulary_size": 60,
    "num_layers": 4,
    "hidden_dim": 16,
    "intermediate_dim": 16,
}
GROUPED = {"num_query_heads": 2, "num_key_value_heads": 1}


def llama(seed=0, num_layers=4):
    """Without a preprocessor, and with weights that are not as made."""
    return causal("Llama", seed, num_layers=num_layers, **GROUPED)


def livelier(task):
    """With weights far enough from their start that tokens differ."""
    rng = np.random.default_rng(1)
    for weight in task.weights:
        if keras.backend.is_float_dtype(weight.dtype):
            noise = rng.normal(0, 0.3, weight.shape)
            weight.assign(weight.numpy() + noise.astype(weight.dtype))
    return task


def gpt2(seed=0, length=12):
    """With a preprocessor, whose tokens are letters."""
    tokens = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "<|endoftext|>"]
    preprocessor = models.GPT2CausalLMPreprocessor(
        models.GPT2Tokenizer({t: i for i, t in enumerate(tokens)}, ["a b"]),
        sequence_length=length,
    )
    keras.utils.set_random_seed(seed)
    backbone = models.GPT2Backbone(
        vocabulary_size=len(tokens),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=16,
        max_sequence_length=16,
        dropout=0.0,
    )
    return livelier(models.GPT2CausalLM(backbone, preprocessor))


WORDS = ["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]"]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz"]
_ENCODER = {
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
    "intermediate_dim": 16,
    "max_sequence_length": 8,
    "dropout": 0.0,
}


def text_classifier(name, seed=0):
    """Of BERT or DistilBERT, whose words are letters."""
    keras.utils.set_random_seed(seed)
    vocabulary = [*WORDS, *LETTERS, *(f"##{a}" for a in LETTERS)]
    tokenizer = getattr(models, f"{name}Tokenizer")(vocabulary)
    make = getattr(models, f"{name}TextClassifierPreprocessor")
    backbone = getattr(models, f"{name}Backbone")(
        vocabulary_size=len(vocabulary), **_ENCODER
    )
    return getattr(models, f"{name}TextClassifier")(
        backbone=backbone,
        preprocessor=make(tokenizer, sequence_length=8),
        num_classes=3,
        dropout=0.0,
    )


def bert(seed=0):
    return text_classifier("Bert", seed)


def distil_bert():
    return text_classifier("DistilBert")


def roberta():
    """Learns words that are left out of a text, by chance."""
    keras.utils.set_random_seed(0)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *LETTERS, "Ġ", "ab"]
    preprocessor = models.RobertaMaskedLMPreprocessor(
        models.RobertaTokenizer({t: i for i, t in enumerate(tokens)}, ["a b"]),
        sequence_length=8,
        mask_selection_length=3,
    )
    backbone = models.RobertaBackbone(vocabulary_size=len(tokens), **_ENCODER)
    return models.RobertaMaskedLM(backbone, preprocessor)


def vit():
    keras.utils.set_random_seed(0)
    backbone = models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=16,
    )
    return models.ViTImageClassifier(backbone, num_classes=3)


def resnet():
    keras.utils.set_random_seed(0)
    backbone = models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(8, 8, 3),
    )
    return models.ResNetImageClassifier(backbone, num_classes=3)


def bart():
    keras.utils.set_random_seed(0)
    backbone = models.BartBackbone(
        **{**TEXT, "num_layers": 2},
        num_heads=2,
        dropout=0.0,
        max_sequence_length=20,
    )
    return livelier(models.BartSeq2SeqLM(backbone, preprocessor=None))


def t5():
    keras.utils.set_random_seed(0)
    backbone = models.T5Backbone(
        **{**TEXT, "num_layers": 2}, num_heads=2, dropout=0.0
    )
    return livelier(models.T5Seq2SeqLM(backbone, preprocessor=None))


def t5_gemma():
    """Beam and contrastive search fail, in KerasHub, too."""
    keras.utils.set_random_seed(0)
    half = {
        "hidden_dim": 16,
        "intermediate_dim": 16,
        "num_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    halves = {
        f"{part}_{name}": value
        for part in ("encoder", "decoder")
        for name, value in half.items()
    }
    backbone = models.T5GemmaBackbone(
        vocabulary_size=60, sliding_window=6, **halves
    )
    return livelier(models.T5GemmaSeq2SeqLM(backbone, preprocessor=None))


def transformers_llama(folder):
    """Writes a folder as Hugging Face has it, of a tiny Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "tie_word_embeddings": False,
        "rope_theta": 1e4,
    }
    shapes = {"embed_tokens": (60, 16), "norm": (16,)}
    for i in range(2):
        block = {
            "input_layernorm": (16,),
            "post_attention_layernorm": (16,),
            "self_attn.q_proj": (16, 16),
            "self_attn.k_proj": (8, 16),
            "self_attn.v_proj": (8, 16),
            "self_attn.o_proj": (16, 16),
            "mlp.gate_proj": (24, 16),
            "mlp.up_proj": (24, 16),
            "mlp.down_proj": (16, 24),
        }
        shapes |= {f"layers.{i}.{name}": s for name, s in block.items()}
    names = {f"model.{name}.weight": shape for name, shape in shapes.items()}
    names["lm_head.weight"] = (60, 16)
    rng = np.random.default_rng(0)
    weights = {
        n: rng.normal(size=s).astype("float32") for n, s in names.items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    path = folder / "model.safetensors"
    safetensors.numpy.save_file(weights, path, {"format": "pt"})


def gemma3():
    """Its cache is a nest of tensors, one pair a layer."""
    keras.utils.set_random_seed(0)
    backbone = models.Gemma3Backbone(
        **{**TEXT, "num_layers": 2},
        **GROUPED,
        head_dim=8,
        image_size=16,
        vision_encoder=None,
        use_query_key_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=6,
    )
    return livelier(models.Gemma3CausalLM(None, backbone))


def qwen3_5():
    """Its cache is of three kinds."""
    return causal("Qwen3_5", **GROUPED, head_dim=8)


def rwkv7():
    """Its cache is a state, without positions."""
    keras.utils.set_random_seed(0)
    backbone = models.RWKV7Backbone(
        vocabulary_size=60,
        hidden_size=16,
        num_layers=2,
        intermediate_dim=16,
        head_size=8,
    )
    return livelier(models.RWKV7CausalLM(backbone, preprocessor=None))


def prompts(task, rows=5, length=12):
    """Prompts of unequal length, for a task without a preprocessor."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) < rng.integers(2, 7, (rows, 1))
    ids = np.where(mask, rng.integers(1, 60, (rows, length)), 0)
    found = {"token_ids": ids.astype("int32"), "padding_mask": mask}
    if isinstance(task, models.Seq2SeqLM):
        found = {f"decoder_{name}": value for name, value in found.items()}
        found["encoder_token_ids"] = rng.integers(1, 60, (rows, 7))
        found["encoder_padding_mask"] = np.ones((rows, 7), bool)
    if isinstance(task, models.RWKV7CausalLM):
        found["predict_token_ids"] = found["token_ids"]
        found["input_padding_mask"] = mask
    return found


_HEADS = {"num_heads": 2, "dropout": 0.0, "max_sequence_length": 20}

# What backbones take, of causal tasks that have no function above.
CAUSAL = {
    "GPT2": _HEADS,
    "Gemma": {**GROUPED, "head_dim": 8},
    "Llama3": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": 6},
    "Mixtral": {**GROUPED, "num_experts": 2, "top_k": 1},
    "OPT": _HEADS,
    "Bloom": _HEADS,
    "Falcon": {"num_attention_heads": 2},
    "GPTNeoX": {**_HEADS, "rotary_percentage": 0.5},
    "Phi3": GROUPED,
    "Qwen": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 8},
    "SmolLM3": {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True] * 4,
        "layer_types": ["full_attention"] * 4,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-6,
        "max_position_embeddings": 64,
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    },
}


def causal(name, seed=0, **kwargs):
    """A task of `CAUSAL`, or of a backbone that takes these."""
    keras.utils.set_random_seed(seed)
    make = getattr(models, f"{name}Backbone")
    backbone = make(**{**TEXT, **CAUSAL.get(name, {}), **kwargs})
    task = getattr(models, f"{name}CausalLM")
    return livelier(task(backbone=backbone, preprocessor=None))
