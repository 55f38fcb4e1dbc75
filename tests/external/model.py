"""A model for the suites: random weights of a small llama, and a tokenizer of 440 tokens with the usual three special ones.

llama.cpp's suite is written for a model of about that size (its words and counts of tokens are that model's, and no package carries it); the
other suites ask for no particular model.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

__all__ = ["make_model"]

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, TOKENS, CONTEXT = 64, 4, 2, 128, 2, 440, 16384
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = (
    "Once upon a time there was a little girl who had a big red ball. She liked to play with it in the park every day. "
    "What is the best book? Write the fibonacci function in c++. You are a coding assistant. I believe the meaning of life is "
    "the quick brown fox jumps over the lazy dog. This is a test of what a model says when nobody has taught it anything. "
    "<|im_start|>system\n<|im_end|>\n<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
)


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([CORPUS] * 2, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return tokenizer


def _said(tokenizer: Tokenizer, token: int) -> bool:
    """Whether the model says a token: printable ASCII only, and no end, so that texts are text and as long as asked."""
    piece = tokenizer.id_to_token(token)
    text = tokenizer.decode([token]) if piece is not None else ""
    return text.isascii() and text.isprintable() and not text.startswith(("<", "|")) and text != ""


def make_model(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes the model as a Hugging Face folder; the same bytes each time."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) * 0.08).astype(np.float32)

    tokenizer = _tokenizer()
    vocab = tokenizer.get_vocab_size()
    embedding, output = weight(vocab, HIDDEN), weight(vocab, HIDDEN)
    embedding[:, 0] = 1.0  # a constant in every row, which the head reads as a bias:
    output[:, 0] = [0.0 if _said(tokenizer, token) else -5.0 for token in range(vocab)]
    head = HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": embedding, "lm_head.weight": output}
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        shapes = {"q_proj": (HEADS * head, HIDDEN), "k_proj": (KV_HEADS * head, HIDDEN), "v_proj": (KV_HEADS * head, HIDDEN), "o_proj": (HIDDEN, HIDDEN)}
        tensors |= {f"{at}.self_attn.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        tensors |= {f"{at}.mlp.{name}.weight": weight(FFN, HIDDEN) for name in ("gate_proj", "up_proj")}
        tensors[f"{at}.mlp.down_proj.weight"] = weight(HIDDEN, FFN)
        tensors |= {f"{at}.{name}.weight": np.ones(HIDDEN, np.float32) for name in ("input_layernorm", "post_attention_layernorm")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "vocab_size": vocab,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder
