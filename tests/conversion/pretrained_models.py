"""Small random models of transformers, and GGUF files of them, to convert."""

import json

import torch
import transformers

SIZES = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def random_model(kind="Llama", **changes):
    """Return a model whose biases and gains are not those of the start."""
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn_like(x) * 0.1)
    return model


def write_tokenizer(folder, vocab_size=290, **config):
    """Write a byte-level BPE with the special tokens of SmolLM2 and Qwen."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=sorted(alphabet)
    )
    words = "the cat sat on the mat, then that cat ran after another hat of several merchants"
    tokenizer.train_from_iterator([words, words[::-1]] * 9, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"eos_token": "<|im_end|>", "chat_template": "{{ messages[0].content }}"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(values))


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.o_proj": "attn_output",
    "self_attn": "attn",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "attn.q_proj": "attn_q",
    "attn.k_proj": "attn_k",
    "attn.v_proj": "attn_v",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path, model, tokenizer_folder):
    """Write a model as llama.cpp stores it, two matrices per layer in 8 bits; round these here."""
    import gguf

    config, kind = model.config, model.config.model_type
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_string("general.license", "apache-2.0")
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    special = {x["content"] for x in content["added_tokens"]}
    writer.add_token_types([3 if x in special else 1 for x in tokens])
    merges = [x if isinstance(x, str) else " ".join(x) for x in content["model"]["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(vocab["<|im_start|>"])
    writer.add_eos_token_id(vocab["<|im_end|>"])
    writer.add_chat_template("{{ messages[0].content }}")
    for name, x in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            n = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            x = x.unflatten(0, (n, 2, -1)).transpose(1, 2).flatten(0, 2)
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        if "ffn_gate" not in name and "ffn_up" not in name:
            writer.add_tensor(name, x.numpy())
            continue
        in_8_bits = gguf.GGMLQuantizationType.Q8_0
        stored = gguf.quants.quantize(x.numpy(), in_8_bits)
        x.copy_(torch.from_numpy(gguf.quants.dequantize(stored, in_8_bits)))
        writer.add_tensor(name, stored, raw_dtype=in_8_bits)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
