"""The vLLM sampler's own logic, with an engine of transformers that reads the same folders and gives the same answers.

T numbers: reports against other trainers. What only a real engine can show is in `test_vllm_engine.py`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from test_rollout import EOS, WORDS, make_model, split, teacher_forced, user, with_adapter
from test_rollout import tokenizer as tokenizer  # a fixture
from test_train import TINY, adapter, lines
from tolerances import FORWARD
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

import datc_train.rollout.vllm_sampler as module
from datc_train import train, vllm_engine
from datc_train.checkpoint import checkpoints
from datc_train.config import Config, config_from
from datc_train.rollout import VllmSampler, check_sampler
from datc_train.rollout.versions import Versions, check_adapter, save_adapter, save_base, save_whole
from datc_train.rollout.vllm_sampler import EngineSettings, _seeds

NAN = float("nan")


class TransformersEngine:
    """Answers as the worker does."""

    made: list[TransformersEngine]

    def __init__(self, log: Path, *, timeout: float, environment: dict[str, str]) -> None:
        self.log, self.timeout, self.environment = log, timeout, environment
        self.asked: list[str] = []
        self.names: list[tuple[str, int, str]] = []
        self.closed = False
        self.stale = self.asleep = False
        self.die_at: int | None = None  # the n-th time that it is to sample
        TransformersEngine.made.append(self)

    def ask(self, what: str, **arguments: Any) -> Any:
        assert not self.closed
        assert what == "wake_up" or not self.asleep
        self.asked.append(what)
        if what == "sample" and self.asked.count(what) == self.die_at:
            self.closed = True
            raise RuntimeError("sampler: the vLLM engine died (exit status -9), asked to sample")
        return getattr(self, what)(**arguments)

    def close(self) -> None:
        self.closed = True

    def start(self, options: dict[str, Any]) -> None:
        self.options = options
        self.base = AutoModelForCausalLM.from_pretrained(options["model"], dtype=getattr(torch, options["dtype"]))
        self.model = self.base.eval()

    def use_adapter(self, name: str, number: int, path: str) -> None:
        assert not {name, number, path} & {part for parts in self.names for part in parts}
        self.names.append((name, number, path))
        if not (self.stale and len(self.names) > 1):
            base = AutoModelForCausalLM.from_pretrained(self.options["model"], dtype=self.base.dtype)
            self.model = PeftModel.from_pretrained(base, path).eval()

    def load_weights(self, path: str) -> None:
        if not self.stale:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=self.base.dtype).eval()

    def sleep(self) -> None:
        self.asleep = True

    def wake_up(self) -> None:
        self.asleep = False

    @torch.no_grad()
    def read(self, row: list[int]) -> list[float]:
        logprob = torch.log_softmax(self.model(torch.tensor([row])).logits[0, :-1].float(), -1)
        return logprob.gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()

    @torch.no_grad()
    def sample(self, rows: Any, seeds: list[int], settings: dict[str, Any]) -> list[Any]:
        support = self.options.get("additional_config", {}).get("datc_vocab_size")
        groups = []
        for row, seed in zip(rows, seeds, strict=True):
            group = []
            for index in range(settings["n"]):
                dice, ids, logprobs = torch.Generator().manual_seed(seed + index), list(row), []
                while len(logprobs) < settings["max_tokens"]:
                    logits = self.model(torch.tensor([ids])).logits[0, -1, :support].float() / settings["temperature"]
                    logprob = torch.log_softmax(logits, -1)
                    ids.append(int(torch.multinomial(logprob.exp(), 1, generator=dice)))
                    logprobs.append(float(logprob[ids[-1]]))
                    if ids[-1] in settings["stop_token_ids"]:
                        break
                group.append((ids[len(row) :], logprobs))
            groups.append(group)
        return groups


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[TransformersEngine]:
    TransformersEngine.made = []
    monkeypatch.setattr(module, "EngineProcess", TransformersEngine)
    monkeypatch.setattr("datc_train.loop.check_installed", lambda: "0.32.0")
    return TransformersEngine.made


def sampler(model: Any, tokenizer: Any, folder: Path | None = None, base: str | None = None, **options: Any) -> VllmSampler:
    settings = EngineSettings(**options.pop("settings", {}))
    made = VllmSampler(
        model,
        tokenizer,
        base=base,
        settings=settings,
        **{"group_size": 3, "max_new_tokens": 8, "max_prompt_tokens": 40, **options},
    )
    if folder is not None:
        made.open(folder)
    return made


def move(model: Any, by: float = 0.1) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(by * torch.randn_like(parameter))


# ---------------------------------------------------------------- what the engine is asked


def test_the_engine_is_asked_for_exactly_the_softmax(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    """T48, T49: every knob that would bend the distribution is set, whatever vLLM's defaults or a generation config say."""
    made = sampler(with_adapter(make_model()), tokenizer, tmp_path, temperature=0.7, stop_ids=[EOS, 4], max_batch_size=5)
    made.sync(0)
    options = engines[0].options
    assert options["logprobs_mode"] == "processed_logprobs"
    assert options["generation_config"] == "vllm"
    assert (options["max_model_len"], options["max_num_seqs"], options["max_lora_rank"]) == (48, 5, 8)
    assert (options["dtype"], options["enforce_eager"], options["tensor_parallel_size"]) == ("float32", True, 1)
    assert options["additional_config"] == {"datc_vocab_size": len(WORDS)}  # T42
    assert made.sampling_settings() == {
        "n": 3,
        "max_tokens": 8,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "stop_token_ids": [EOS, 4],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_a_vocabulary_without_padding_needs_no_processor(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    made = sampler(make_model(columns=len(WORDS)), tokenizer, tmp_path, settings={"enforce_eager": False, "memory": 0.5})
    made.sync(0)
    assert "logits_processors" not in engines[0].options
    assert engines[0].options["enforce_eager"] is False
    assert engines[0].options["gpu_memory_utilization"] == 0.5
    assert "enable_lora" not in engines[0].options


@pytest.mark.parametrize("kind", ["adapter", "whole"])
def test_the_rollout_is_the_policys(tokenizer: Any, tmp_path: Path, engines: Any, kind: str) -> None:
    """After every sync: the log-probabilities of what was drawn are the policy's own at those weights."""
    model: Any = with_adapter(make_model()) if kind == "adapter" else make_model()
    made = sampler(model, tokenizer, tmp_path)
    earlier = []
    for version in (0, 1, 5):
        made.sync(version)
        rollout = made.sample(user("a", "b c", "a"), seed=3)
        expected = teacher_forced(model, rollout, 1.0, len(WORDS))
        assert check_sampler(rollout.sampler_logprob, expected, dtype=torch.float32) < FORWARD
        assert rollout.response_ids.max() < len(WORDS)
        assert rollout.sampler_logprob.dtype == torch.float32
        assert rollout.prompt_ids == made.encode(user("a", "b c", "a"))
        assert [row[-1] in made.stop_ids for row in split(rollout)] == rollout.finished.tolist()
        assert split(made.sample(user("a", "b c", "a"), seed=3)) == split(rollout)
        assert split(rollout)[:3] != split(rollout)[6:]  # the same prompt twice
        assert split(rollout) not in earlier
        earlier.append(split(rollout))
        move(model)
    made.close()
    assert engines[0].closed
    made.close()


def test_groups_of_another_size_share_the_engine(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    made = sampler(with_adapter(make_model()), tokenizer, tmp_path)
    other = made.with_group_size(2)
    other.sync(0)
    made.sync(0)
    assert len(engines) == 1
    assert engines[0].asked.count("use_adapter") == 1
    assert other.sample(user("a"), seed=0).group_size == 2
    assert len(made.sample(user("a"), seed=0).lengths) == 3


def test_seeds_are_of_the_prompt_alone() -> None:
    a, b = (1, 2), (3,)
    assert _seeds(5, [a, b, a])[:2] == _seeds(5, [a, b])
    assert _seeds(5, [b, a]) == _seeds(5, [a, b])[::-1]
    assert len(set(_seeds(5, [a, b, a, a]) + _seeds(6, [a, b]))) == 6
    assert all(0 <= seed < 2**62 for seed in _seeds(5, [a, b]))


def test_t56_t57_sleep_is_level_one_and_wakes_before_work(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    model = with_adapter(make_model())
    made = sampler(model, tokenizer, tmp_path, settings={"sleep": True})
    made.sync(0)
    made.sample(user("a"), seed=0)
    assert engines[0].asleep
    move(model)
    made.sync(1)
    made.sample(user("a"), seed=0)
    assert engines[0].options["enable_sleep_mode"]
    assert engines[0].asked[-6:] == ["sleep", "wake_up", "use_adapter", "read", "sample", "sleep"]
    made.sample(user("a"), seed=1)  # T58: what woke is read before it is sampled from
    assert engines[0].asked[-4:] == ["wake_up", "read", "sample", "sleep"]


def test_t58_an_engine_that_wakes_with_other_weights_is_found(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    made = sampler(with_adapter(make_model()), tokenizer, tmp_path, settings={"sleep": True})
    made.sync(0)
    made.sample(user("a"), seed=0)
    with torch.no_grad():
        engines[0].model.get_output_embeddings().weight.mul_(1.5)
    with pytest.raises(RuntimeError, match="does not serve the weights after 0 updates: its log-probabilities of a text differ"):
        made.sample(user("a"), seed=1)
    assert engines[0].closed


# ---------------------------------------------------------------- weights on disk


def test_t51_t52_every_version_has_a_folder_a_name_and_an_id_of_its_own(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    model = with_adapter(make_model())
    made = sampler(model, tokenizer, tmp_path)
    for version in (0, 3, 4, 9):
        made.sync(version)
        made.sync(version)  # nothing new
        move(model)
    names = engines[0].names
    assert [name for name, _, _ in names] == ["version-0", "version-3", "version-4", "version-9"]
    assert [number for _, number, _ in names] == [1, 2, 3, 4]
    left = sorted(path.name for path in (tmp_path / "engine" / "versions").iterdir())
    assert left == ["000004", "000009"]
    made.close()
    assert not (tmp_path / "engine" / "versions").exists()
    assert not (tmp_path / "engine" / "base").exists()


def test_t53_the_base_is_saved_without_its_adapter(tokenizer: Any, tmp_path: Path) -> None:
    bare, policy = make_model(), with_adapter(make_model())
    ids = torch.tensor([[1, 8, 9, 10]])
    before = policy(input_ids=ids).logits
    save_base(policy, tmp_path / "base")
    assert torch.equal(policy(input_ids=ids).logits, before)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    assert torch.equal(saved(input_ids=ids).logits, bare(input_ids=ids).logits)
    assert saved.state_dict().keys() == bare.state_dict().keys()


@pytest.mark.parametrize("untied", [False, True])
def test_a_whole_model_with_a_tied_head(tmp_path: Path, untied: bool) -> None:
    from datc_train.quickstart import load_tiny_policy

    model, _ = load_tiny_policy()
    ids = torch.tensor([[1, 8, 9, 10]])
    save_whole(model, tmp_path / "m", untied=untied)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    assert torch.equal(saved(input_ids=ids).logits, model(input_ids=ids).logits)
    assert saved.config.tie_word_embeddings is not untied
    assert (saved.lm_head.weight.data_ptr() == saved.model.embed_tokens.weight.data_ptr()) is not untied
    assert model.config.tie_word_embeddings is True
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_adapter_of_another_name_lies_at_the_top(tmp_path: Path) -> None:
    policy = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="mine")
    save_adapter(policy, tmp_path / "a")
    assert (tmp_path / "a" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "a" / "adapter_config.json").is_file()


def test_versions_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    versions = Versions(tmp_path / "engine")

    def half(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text("half")
        raise OSError("No space left on device")

    with pytest.raises(OSError, match=r"^sampler: the engine's weights in .*000001 could not be written \(No space"):
        versions.write(1, half)
    assert not list((tmp_path / "engine" / "versions").iterdir())
    versions.write(1, Path.mkdir)
    with pytest.raises(FileExistsError, match="^version: expected one that was not written yet"):
        versions.write(1, Path.mkdir)
    Versions(tmp_path / "engine")  # as a run that was killed goes on
    assert not list((tmp_path / "engine" / "versions").iterdir())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern="),
    ],
)
def test_an_adapter_that_vllm_would_serve_otherwise_is_refused(settings: dict, says: str) -> None:
    policy = get_peft_model(make_model(), LoraConfig(r=4, target_modules=["q_proj"], **settings))
    with pytest.raises(ValueError, match=f"^sampler: vllm serves plain LoRA of one rank, got an adapter with .*{says}"):
        check_adapter(policy)


def test_t39_t59_adapters_of_experts_are_refused() -> None:
    """T59: vLLM lays a mixture's experts out otherwise. T39: they are adapted by `target_parameters`."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1, "vocab_size": 24}
    mixture = MixtralForCausalLM(MixtralConfig(**shape, **experts))
    (name,) = {name.split(".", 3)[3] for name, _ in mixture.named_parameters() if name.endswith("gate_up_proj")}
    policy = get_peft_model(mixture, LoraConfig(r=2, target_modules=[], target_parameters=[name]))
    with pytest.raises(ValueError, match="^sampler: vllm serves plain LoRA of one rank, got an adapter with target_parameters="):
        check_adapter(policy)


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("kind", ["adapter", "whole"])
def test_t55_weights_that_are_stale_are_found_at_the_sync(tokenizer: Any, tmp_path: Path, engines: Any, kind: str) -> None:
    model: Any = with_adapter(make_model()) if kind == "adapter" else make_model()
    made = sampler(model, tokenizer, tmp_path)
    made.sync(0)
    engines[0].stale = True
    made.sync(1)  # nothing has moved: nothing to see
    for version in range(2, 5):
        move(model, 1e-7)  # too little to see, until it adds up
        made.sync(version)
    move(model)
    with pytest.raises(RuntimeError, match=r"^sampler: the vLLM engine does not serve the weights after 5 updates: .* moved by"):
        made.sync(5)
    assert engines[0].closed


def test_t55_weights_some_of_which_are_stale_are_found_at_the_sync(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    """As where a head that is the embedding keeps what it was packed from."""
    model = make_model()
    made = sampler(model, tokenizer, tmp_path)
    made.sync(0)
    real, head = engines[0].load_weights, engines[0].model.lm_head.weight.detach().clone()

    def all_but_the_head(path: str) -> None:
        real(path)
        engines[0].model.lm_head.weight.data = head

    engines[0].load_weights = all_but_the_head
    move(model)
    with pytest.raises(RuntimeError, match=r"does not serve the weights after 1 updates: its log-probabilities of a text differ"):
        made.sync(1)


def answers(*groups: Any) -> Any:
    return lambda **_: list(groups)


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ((), "expected 1 groups of 2 responses of vLLM, got \\[\\]"),  # T7
        (([([8], [-1.0])],), "expected 1 groups of 2 responses of vLLM, got \\[1\\]"),
        (([([8], [-1.0]), ([], [])],), "expected 1 to 8 ids below 16"),
        (([([8], [-1.0]), ([16], [-1.0])],), "expected 1 to 8 ids below 16 a response of vLLM.*got ids \\[16\\]"),  # T42
        (([([8], [-1.0]), ([8, 9], [-1.0])],), "expected .* as many log-probabilities, got ids \\[8, 9\\] and 1"),
        (([([8], [-1.0]), ([8] * 9, [-1.0] * 9)],), "expected 1 to 8 ids"),
    ],
)
def test_answers_that_are_no_rollout(tokenizer: Any, tmp_path: Path, engines: Any, groups: Any, says: str) -> None:
    """T7, T20, T21, T42: what does not fit together is an error, and nothing is padded or cut to make it fit."""
    made = sampler(with_adapter(make_model()), tokenizer, tmp_path, group_size=2)
    made.sync(0)
    engines[0].sample = answers(*groups)
    with pytest.raises(RuntimeError, match=f"^sampler: {says}"):
        made.sample(user("a"), seed=0)


def test_t5_a_log_probability_that_the_engine_does_not_know_is_nan(tokenizer: Any, tmp_path: Path, engines: Any) -> None:
    from datc_train.vllm_engine.worker import _response

    class Entry:
        def __init__(self, logprob: float | None) -> None:
            self.logprob = logprob

    class Completion:
        token_ids = (8, 9, 10, 11)
        logprobs = ({8: Entry(-1.0)}, None, {10: Entry(None)}, {11: Entry(NAN)})

    ids, logprobs = _response(Completion)
    assert ids == [8, 9, 10, 11]
    assert logprobs[0] == -1.0
    assert np.isnan(logprobs[1:]).all()
    Completion.logprobs = None  # type: ignore[assignment]
    assert np.isnan(_response(Completion)[1]).all()

    made = sampler(with_adapter(make_model()), tokenizer, tmp_path, group_size=2)
    made.sync(0)
    engines[0].sample = answers([([8, 1], [-1.0, NAN]), ([9], [NAN])])
    rollout = made.sample(user("a"), seed=0)
    assert rollout.sampler_logprob.isnan().tolist() == [False, True, True]
    assert rollout.finished.tolist() == [True, False]


def test_prompts_that_the_engine_has_no_room_for(tokenizer: Any) -> None:
    made = sampler(make_model(), tokenizer, settings={"max_model_len": 15})
    assert made.encode(user("a"))
    with pytest.raises(
        ValueError, match=r"^vllm_max_model_len: expected at least 16, the longest prompt's 8 tokens and max_new_tokens 8"
    ):
        made.encode(user("a", "b c d e"))


# ---------------------------------------------------------------- a run


RUN = TINY | {"sampler": "vllm", "steps": 3, "save_every": 1}


def untimed(run: Path) -> list[dict]:
    return [{k: v for k, v in m.items() if "second" not in k} for m in lines(run, "metrics.jsonl")]


def test_a_run_and_its_resume(tmp_path: Path, engines: Any) -> None:
    """T33: the first rollout after a resume is of the checkpoint's weights. The engine that died takes no step with it."""
    whole = train(RUN | {"run_dir": str(tmp_path / "whole"), "eval_prompts": "quickstart", "eval_limit": 1})
    for line in lines(whole, "metrics.jsonl"):
        assert 0 < line["sampler_difference"] < FORWARD
    assert engines[0].closed
    assert [name for name, _, _ in engines[0].names] == ["version-0", "version-1", "version-2", "version-3"]
    assert not (whole / "engine" / "versions").exists()

    first = TransformersEngine.__init__

    def doomed(self: Any, *a: Any, **k: Any) -> None:
        first(self, *a, **k)
        self.die_at = 3  # evaluation, step 1, step 2

    config = RUN | {"run_dir": str(tmp_path / "half"), "eval_prompts": "quickstart", "eval_limit": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformersEngine, "__init__", doomed)
        with pytest.raises(RuntimeError, match=r"^sampler: the vLLM engine died .* in step 2$"):
            train(config)
    assert engines[1].closed
    assert [path.name for path in checkpoints(tmp_path / "half")] == ["000001"]
    half = train(config | {"resume": "auto", "vllm_timeout": 900.0, "vllm_memory": 0.2})
    assert [name for name, _, _ in engines[2].names] == ["version-1", "version-2", "version-3"]
    assert untimed(half) == untimed(whole)
    a, b = adapter(whole), adapter(half)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_an_engine_that_serves_other_weights_stops_the_run(tmp_path: Path, engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the check at the sync does not see it, that of every rollout does, before the optimizer moves."""
    real = TransformersEngine.use_adapter

    def once(self: Any, **what: Any) -> None:
        self.stale = True
        real(self, **what)

    monkeypatch.setattr(TransformersEngine, "use_adapter", once)
    monkeypatch.setattr(VllmSampler, "_check_serves", lambda *_: None)
    config = RUN | {"run_dir": str(tmp_path / "r"), "learning_rate": 0.3}
    with pytest.raises(RuntimeError, match="the sampler's log-probabilities are not the policy's"):
        train(config)
    assert [line["step"] for line in lines(tmp_path / "r", "metrics.jsonl")] == [1]
    assert engines[0].closed


def test_full_fine_tuning(tmp_path: Path, engines: Any) -> None:
    run = train(RUN | {"lora": None, "learning_rate": 1e-3, "run_dir": str(tmp_path / "r")})
    assert engines[0].asked.count("load_weights") == 2
    assert engines[0].options["model"].endswith("000000")
    assert all(line["sampler_difference"] < FORWARD for line in lines(run, "metrics.jsonl"))


def test_the_engine_reads_the_base_where_it_is(tmp_path: Path, engines: Any) -> None:
    """A model that has a folder is not written once more; one that was given in Python is."""
    from datc_train.quickstart import load_tiny_policy

    model, tokenizer = load_tiny_policy()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = RUN | {"steps": 1, "policy": str(tmp_path / "model")}
    train(config | {"run_dir": str(tmp_path / "a")})
    assert engines[0].options["model"] == str(tmp_path / "model")
    train(config | {"run_dir": str(tmp_path / "b")}, *load_tiny_policy(seed=3))
    assert engines[1].options["model"] == str(tmp_path / "b" / "engine" / "base")


def test_without_vllm_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RUN | {"run_dir": str(tmp_path / "r"), "policy": "not/looked-at"}
    monkeypatch.setattr(vllm_engine, "vllm_version", lambda: None)
    with pytest.raises(
        ValueError, match=r"^sampler: 'vllm' asked for, but the package vllm is not installed: pip install 'datc\[vllm\]'"
    ):
        train(config)
    monkeypatch.setattr(vllm_engine, "vllm_version", lambda: "0.11.0")
    with pytest.raises(ValueError, match=r"^sampler: expected vllm 0\.32 or newer, got 0\.11\.0"):
        train(config)
    assert not (tmp_path / "r").exists()


def test_importing_the_trainer_imports_no_vllm() -> None:
    code = "import sys; sys.modules['vllm'] = None; import datc_train.loop, datc_train.doctor, datc_train.vllm_engine.worker"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_doctor_names_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from datc_train.doctor import examine

    config = config_from({"policy": "tiny", "reward": "tiny", "prompts": "quickstart", "sampler": "vllm"})
    for found, state in (("0.32.0", "ok"), (None, "wrong")):
        monkeypatch.setattr(vllm_engine, "vllm_version", lambda found=found: found)
        findings = {finding.name: finding for finding in examine(config, say=lambda _: None)}
        assert findings["sampler"].state == state
        assert "vllm" in findings["sampler"].text


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"sampler": "sglang"}, "sampler: expected one of transformers, vllm"),
        ({"vllm_memory": 1.0}, "vllm_memory: expected a share, above 0 and below 1, got 1.0"),
        ({"vllm_memory": 0.0}, "vllm_memory: expected"),
        ({"vllm_timeout": 0}, "vllm_timeout: expected a finite number above 0"),
        ({"vllm_max_model_len": 256}, "vllm_max_model_len: expected null or at least 257"),
        ({"vllm_devices": []}, "vllm_devices: expected null or indices of GPUs, each once"),
        ({"vllm_devices": [0, 0]}, "vllm_devices: expected null or indices"),
        ({"vllm_devices": ["0"]}, "vllm_devices: expected a list of whole numbers or null"),
        ({"vllm_devices": [0], "device": "cpu"}, "vllm_devices: expected null on device: cpu"),
        ({"vllm_sleep": True, "device": "cpu"}, "vllm_sleep: expected false on device: cpu"),
        ({"vllm_enforce_eager": 1}, "vllm_enforce_eager: expected true or false or null"),
        ({"temperature": 0.001}, "temperature: expected at least 0.01 with sampler: vllm"),
        ({"lora": {"r": 1024}}, "lora.r: expected at most 512 with sampler: vllm"),
    ],
)
def test_what_cannot_be_is_named(wrong: dict, says: str) -> None:
    with pytest.raises(ValueError, match=f"^{says}"):
        config_from({"sampler": "vllm"} | wrong)


def test_gpus_are_those_of_the_trainers_own_list(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VllmSampler, "device", torch.device("cuda:1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert sampler(make_model(), tokenizer)._environment()["CUDA_VISIBLE_DEVICES"] == "5"
    made = sampler(make_model(), tokenizer, settings={"devices": (2, 0)})
    assert made._environment()["CUDA_VISIBLE_DEVICES"] == "7,4"
    with pytest.raises(ValueError, match="^vllm_devices: expected indices below 3, the GPUs here"):
        sampler(make_model(), tokenizer, settings={"devices": (3,)})._environment()


def test_every_key_is_explained() -> None:
    for key in Config.__dataclass_fields__:
        assert f"        {key}:" in (Config.__doc__ or ""), key
