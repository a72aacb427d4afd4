"""Folders whose weights are not the model's, each in one way: `datc train` and `datc doctor` refuse them in the same words."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from test_doctor_agrees import both_refuse, both_run, findings, here, saved
from test_refusals import run_cli
from test_train import TINY
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from datc_train import doctor, train
from datc_train.cli import main
from datc_train.pretrained import causal_model, classifier, has_weights_here
from datc_train.quickstart import load_tiny_policy, load_tiny_reward_model
from datc_train.reward import RewardModel

__all__ = ["here"]  # a fixture for every test here: an empty folder, without the hub
LAYER = "model.layers.1.mlp.up_proj.weight"
Weights = dict[str, torch.Tensor]


def changed(kind: str, change: Callable[[Weights], Any], **settings: Any) -> str:
    """A tiny model's folder, its weights changed on the disk."""
    folder = saved(kind, **settings)
    path = Path(folder) / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def narrower(weights: Weights) -> None:
    weights[LAYER] = weights[LAYER][:-8].clone()


def without_weights(kind: str) -> str:
    folder = saved(kind)
    (Path(folder) / "model.safetensors").unlink()
    return folder


def of_the_other_kind(kind: str) -> str:
    other = saved("reward" if kind == "policy" else "policy")
    if kind == "reward":
        path = Path(other) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"num_labels": 1, "id2label": {"0": "LABEL_0"}}))
    return other


def adapter_alone(kind: str) -> str:
    base, tokenizer = load_tiny_policy() if kind == "policy" else load_tiny_reward_model()
    base.save_pretrained("base")
    base.config._name_or_path = base.name_or_path = "base"
    get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained("adapter")
    tokenizer.save_pretrained("adapter")
    return "adapter"


def embedded_adapter(kind: str) -> str:
    folder = adapter_alone(kind)
    shutil.copytree("base", folder, dirs_exist_ok=True)
    return folder


def cut_short(kind: str) -> str:
    path = Path(saved(kind)) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])
    return kind


def without_shard(kind: str) -> str:
    sharded(kind)
    sorted(Path(kind).glob("model-*.safetensors"))[0].unlink()
    return kind


def sharded(kind: str) -> str:
    shutil.rmtree(kind, ignore_errors=True)
    model, tokenizer = load_tiny_policy() if kind == "policy" else load_tiny_reward_model()
    model.save_pretrained(kind, max_shard_size="100KB")
    tokenizer.save_pretrained(kind)
    return kind


def without_ties(kind: str) -> str:
    """Untied by its config, with a head that was never saved."""
    return saved(kind, tie_word_embeddings=False)


REFUSED: dict[str, tuple[Callable[[str], str], dict[str, str]]] = {
    "another kind of model": (
        of_the_other_kind,
        {
            "policy": "expected a causal language model, got a checkpoint with score.weight (1 not used by LlamaForCausalLM) in "
            "reward (its config says LlamaForSequenceClassification)",
            "reward": "expected a trained reward model, got a checkpoint without score.weight (1 newly initialised) in policy",
        },
    ),
    "a weight is missing": (
        lambda kind: changed(kind, lambda weights: weights.pop(LAYER)),
        {
            "policy": f"expected a causal language model, got a checkpoint without {LAYER} (1 newly initialised) in policy",
            "reward": f"expected a trained reward model, got a checkpoint without {LAYER} (1 newly initialised) in reward",
        },
    ),
    "many are": (
        lambda kind: changed(kind, lambda weights: [weights.pop(key) for key in list(weights) if ".layers.1." in key]),
        dict.fromkeys(("policy", "reward"), "expected a"),
    ),
    "a weight is left over": (
        lambda kind: changed(kind, lambda weights: weights.update({"model.layers.2.mlp.gate.weight": torch.zeros(3)})),
        {
            "policy": "expected a causal language model, got a checkpoint with model.layers.2.mlp.gate.weight (1 not used by "
            "LlamaForCausalLM) in policy (its config says LlamaForCausalLM)",
            "reward": "expected a trained reward model, got a checkpoint with model.layers.2.mlp.gate.weight (1 not used by "
            "LlamaForSequenceClassification) in reward",
        },
    ),
    "another head beside the score": (
        lambda kind: changed(kind, lambda weights: weights.update({"gating.weight": torch.zeros(3)})),
        dict.fromkeys(("policy", "reward"), "expected a"),
    ),
    "other shapes": (
        lambda kind: changed(kind, narrower),
        {
            "policy": f"expected a causal language model, got a checkpoint with other shapes: {LAYER} [120, 64] for [128, 64]",
            "reward": f"expected a trained reward model, got a checkpoint with other shapes: {LAYER} [184, 96] for [192, 96]",
        },
    ),
    "a config alone": (without_weights, dict.fromkeys(("policy", "reward"), "expected quickstart, tiny, a folder")),
    "an adapter": (adapter_alone, dict.fromkeys(("policy", "reward"), "expected a whole model, got the adapter adapter: merge")),
    "an adapter beside its base": (embedded_adapter, dict.fromkeys(("policy", "reward"), "expected a whole model, got the ada")),
    "cut short": (cut_short, dict.fromkeys(("policy", "reward"), "expected quickstart, tiny, a folder")),
    "a shard is not there": (without_shard, dict.fromkeys(("policy", "reward"), "expected quickstart, tiny, a folder")),
    "a folder of nothing": (lambda kind: str(Path(kind).absolute()), dict.fromkeys(("policy", "reward"), "expected quickstart")),
}


@pytest.mark.parametrize("key", ["policy", "reward"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, key: str, capfd: pytest.CaptureFixture[str]) -> None:
    make, says = REFUSED[name]
    folder = make(key)
    capfd.readouterr()
    both_refuse({key: folder}, f"{key}: {says[key]}")
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_a_head_that_is_not_tied_must_be_there() -> None:
    both_refuse({"policy": without_ties("policy")}, "policy: expected a causal language model, got a checkpoint without lm_head")


def as_bin(kind: str) -> str:
    folder = Path(saved(kind))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return kind


def stored_in(dtype: torch.dtype) -> Callable[[str], str]:
    def make(kind: str) -> str:
        return changed(kind, lambda weights: weights.update({key: value.to(dtype) for key, value in weights.items()}))

    return make


def with_own_head(kind: str) -> str:
    """A head in the checkpoint beside the embedding: what a policy is tied to, and what a classifier does not read."""
    return changed(kind, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))


TAKEN: dict[str, Callable[[str], str]] = {
    "as it was saved": saved,
    "buffers of older versions": lambda kind: changed(
        kind, lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16)})
    ),
    "the language model's head": with_own_head,
    "in shards": sharded,
    "as a pickle": as_bin,
    "in bfloat16": stored_in(torch.bfloat16),
    "in float64": stored_in(torch.float64),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_taken(name: str) -> None:
    seen = {f.name: f for f in both_run({"policy": TAKEN[name]("policy"), "reward": TAKEN[name]("reward")})}
    for key in ("policy", "reward"):
        assert seen[f"{key} weights"].text == "all there, with the shapes of the config, and all used"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_another_type_are_cast_and_nothing_else(dtype: torch.dtype) -> None:
    folder = stored_in(torch.bfloat16)("policy")
    stored, read = load_file(Path(folder) / "model.safetensors"), causal_model(folder, dtype).state_dict()
    for key, value in stored.items():
        assert torch.equal(read[key], value.to(dtype))
    assert read["lm_head.weight"].data_ptr() == read["model.embed_tokens.weight"].data_ptr()


def test_a_reward_model_called_by_itself_says_path() -> None:
    for make, says in (
        (lambda: changed("reward", narrower), "path: expected a trained reward model, got a checkpoint with other shapes"),
        (lambda: adapter_alone("reward"), "path: expected a whole model, got the adapter"),
    ):
        with pytest.raises(ValueError, match=f"^{says}"):
            RewardModel.from_pretrained(make())


def test_the_outline_of_a_model_is_read_without_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a file with a hole where 2 GB of weights would be; every load of the doctor's stays on the meta device."""
    model, _ = load_tiny_policy()
    model.config.vocab_size, header, end = 4_000_000, {"__metadata__": {"format": "pt"}}, 0
    model.config.save_pretrained("large")
    for key, value in model.state_dict().items():
        if key != "lm_head.weight":
            shape = [4_000_000, 64] if "embed" in key else list(value.shape)
            start, end = end, end + 8 * torch.Size(shape).numel()
            header[key] = {"dtype": "F64", "shape": shape, "data_offsets": [start, end]}
    words = json.dumps(header).encode()
    with Path("large/model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        file.truncate(8 + len(words) + end)
    read = causal_model("large", torch.float32, outline=True)
    assert {value.device.type for value in read.state_dict().values()} == {"meta"}
    assert sum(value.numel() for value in read.parameters()) * 8 == end

    devices = []
    for kind in (AutoModelForCausalLM, AutoModelForSequenceClassification):
        real = kind.from_pretrained

        def spy(*args: Any, real: Any = real, **options: Any) -> Any:
            devices.append(options["device_map"])
            return real(*args, **options)

        monkeypatch.setattr(kind, "from_pretrained", spy)
    assert {f.name: f for f in findings(TINY | {"policy": saved("policy"), "reward": saved("reward")})}["memory"].state == "ok"
    assert devices == ["meta", "meta"]


def test_a_name_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its weights are looked at where they have been downloaded, every shard; the doctor downloads none."""
    import datc_train.pretrained as module

    def cached(name: str, file: str) -> str | None:
        return str(tmp_path / file) if name == "owner/name" and (tmp_path / file).is_file() else None

    monkeypatch.setattr(module, "try_to_load_from_cache", cached)
    assert not has_weights_here("owner/name")
    assert not has_weights_here("./no/such/folder")
    sharded("policy")
    index = Path("policy/model.safetensors.index.json")
    shutil.copy(index, tmp_path / index.name)
    assert not has_weights_here("owner/name")
    for shard in Path("policy").glob("model-*.safetensors"):
        assert not has_weights_here("owner/name")
        shutil.copy(shard, tmp_path / shard.name)
    assert has_weights_here("owner/name")

    monkeypatch.setattr(module, "try_to_load_from_cache", lambda name, file: None)
    monkeypatch.setattr(doctor, "has_weights_here", lambda name: False)
    seen = {f.name: f for f in findings(TINY | {"policy": "policy", "reward": saved("reward")})}
    assert seen["policy weights"].state == seen["reward weights"].state == "note"
    assert seen["policy"].state == seen["reward"].state == "ok"


def test_the_command_line_says_it_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny", "--run_dir", "r", "--policy", of_the_other_kind("policy")]
    capfd.readouterr()
    with pytest.raises(SystemExit):
        main(["train", *words])
    error = capfd.readouterr().err.strip()
    assert error.startswith("datc: policy: expected a causal language model, got a checkpoint with score.weight (1 not used by")
    assert len(error.splitlines()) == 1


def test_a_classifier_of_several_labels(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(saved("reward"))
    settings = json.loads((folder / "config.json").read_text())
    settings |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}
    (folder / "config.json").write_text(json.dumps(settings))
    both_refuse({"reward": "reward"}, "reward: expected a reward model with num_labels=1, got num_labels=2 in reward")
    status, _ = run_cli(capsys, "doctor", "--config", "tiny", "--reward", "reward")
    assert status == 2
    with pytest.raises(ValueError, match="num_labels=1, got num_labels=2"):
        classifier("reward", torch.float32, outline=True)


def test_training_says_so_before_a_folder_is_made() -> None:
    with pytest.raises(ValueError, match="^policy: expected a causal language model"):
        train(TINY | {"run_dir": "r", "policy": of_the_other_kind("policy")})
    assert not Path("r").exists()
