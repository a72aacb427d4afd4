"""Sampling with vLLM, whose engine runs in a process of its own and reads the policy's weights from disk.

Legend: P prompts, G responses a prompt, N response tokens end to end.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from datc_train.rollout.check import TOLERANCE
from datc_train.rollout.policy_mode import sampling_mode
from datc_train.rollout.sampler import Sampler
from datc_train.rollout.versions import Versions, check_adapter, save_adapter, save_base, save_whole
from datc_train.types import Prompt, Rollout
from datc_train.vllm_engine.process import EngineProcess

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM takes no other
PROBE = "The quick brown fox jumps over the lazy dog. 1, 2, 3: naïve café"
# By so much the policy's own log-probabilities of the probe may move while the engine's stay the same to the bit.
STILL = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.02}


@dataclass(frozen=True)
class EngineSettings:
    """What the engine is, beside the model: the config's `vllm_` keys."""

    memory: float = 0.3
    max_model_len: int | None = None
    devices: tuple[int, ...] | None = None
    enforce_eager: bool | None = None
    sleep: bool = False
    timeout: float = 600.0


@dataclass
class _Served:
    """What the samplers of one engine share."""

    engine: EngineProcess | None = None
    versions: Versions | None = None
    version: int | None = None
    syncs: int = 0
    awake: bool = True
    probe: tuple[Tensor, Tensor] | None = None  # [n] policy's and engine's log-probabilities where the engine's last moved


class VllmSampler(Sampler):
    """Draws from a vLLM engine that serves the policy's weights of the last `sync`.

    An adapter is saved to a new folder at every `sync` and named anew; without one the whole model is saved, and the engine
    reloads it in place. Nothing is merged. Every token's log-probability is the engine's own, after the temperature and
    over the support; NaN where it gave none. Ids at or above `vocab_size` are closed before the softmax.

    base      a folder or hub name of the model under the adapter; None: it is saved from `model`
    settings  of the engine
    start     makes the process; None: a real engine
    others    as `Sampler`; `max_batch_size` is the engine's `max_num_seqs`

    `sync` and `sample` raise RuntimeError for an engine that died, failed, hangs, answers with something that is no
    rollout, or still serves weights of before; the engine is ended then.
    """

    def __init__(
        self,
        *arguments: Any,
        base: str | None,
        settings: EngineSettings,
        start: Callable[..., EngineProcess] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.base = base
        self.settings = settings
        self.adapter = hasattr(self.model, "peft_config")
        if self.adapter:
            check_adapter(self.model)
        self._start = EngineProcess if start is None else start
        self._served = _Served()

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a prompt and its response that the engine has room for; None: the model's context."""
        if self.settings.max_model_len is None and self.max_prompt_tokens is not None:
            return self.max_prompt_tokens + self.max_new_tokens
        return self.settings.max_model_len

    def encode(self, prompts: Sequence[Prompt]) -> tuple[tuple[int, ...], ...]:
        rows = super().encode(prompts)
        longest = max(map(len, rows), default=0) + self.max_new_tokens
        if self.max_model_len is not None and longest > self.max_model_len:
            raise ValueError(
                f"vllm_max_model_len: expected at least {longest}, the longest prompt's {longest - self.max_new_tokens} tokens "
                f"and max_new_tokens {self.max_new_tokens}, got {self.max_model_len}"
            )
        return rows

    def open(self, folder: Path) -> None:
        assert self._served.versions is None, "opened before"
        self._served.versions = Versions(folder / "engine")

    def sync(self, version: int) -> None:
        served = self._served
        if served.version == version:
            return
        assert served.versions is not None, "not opened"
        path = str(served.versions.write(version, self._save))
        if served.engine is None:
            served.engine = self._start(
                served.versions.root / "engine.log", timeout=self.settings.timeout, environment=self._environment()
            )
            served.engine.ask("start", options=self.engine_options(path))
        else:
            self._wake_up()
            if not self.adapter:
                served.engine.ask("load_weights", path=path)
        served.syncs += 1
        if self.adapter:
            served.engine.ask("use_adapter", name=f"version-{version}", number=served.syncs, path=path)
        self._check_serves(served.engine, version)
        served.version = version

    def sample(self, prompts: Sequence[Prompt], *, seed: int) -> Rollout:
        prompt_ids = self._rows(prompts, seed)
        engine = self._served.engine
        assert engine is not None, "sync comes before sample"
        assert self._served.version is not None
        if self._wake_up():
            self._check_serves(engine, self._served.version)
        groups = engine.ask("sample", rows=prompt_ids, seeds=_seeds(seed, prompt_ids), settings=self.sampling_settings())
        self._sleep()
        return self._rollout(prompts, prompt_ids, groups)

    def close(self) -> None:
        served = self._served
        try:
            if served.engine is not None:
                served.engine.close()
        finally:
            if served.versions is not None:
                served.versions.clear()
            self._served.engine = self._served.versions = self._served.version = None

    def engine_options(self, weights: str) -> dict[str, Any]:
        """Arguments of `vllm.LLM`; `weights` is the folder of the first version."""
        settings = self.settings
        options: dict[str, Any] = {}
        assert self._served.versions is not None
        model = weights
        if self.adapter:
            model = self.base or str(self._served.versions.base(lambda to: save_base(self.model, to)))
            rank = self.model.peft_config[self.model.active_adapter].r
            options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in RANKS if r >= rank)}
        if self.vocab_size < self.columns:
            options["logits_processors"] = ["datc_train.vllm_engine.support:Support"]
            options["additional_config"] = {"datc_vocab_size": self.vocab_size}
        eager = self.device.type == "cpu" if settings.enforce_eager is None else settings.enforce_eager
        return options | {
            "model": model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",  # the model's own would set top_k, top_p and the like
            "logprobs_mode": "processed_logprobs",
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_batch_size,
            "gpu_memory_utilization": settings.memory,
            "tensor_parallel_size": len(settings.devices or (0,)),
            "enforce_eager": eager,
            "enable_sleep_mode": settings.sleep,
            "disable_log_stats": True,
        }

    def sampling_settings(self) -> dict[str, Any]:
        """Arguments of `vllm.SamplingParams`, but for the seed: exactly softmax(logits / temperature), our stops and no other."""
        return {
            "n": self.group_size,
            "max_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "stop_token_ids": list(self.stop_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "detokenize": False,
        }

    def _save(self, folder: Path) -> None:
        if self.adapter:
            save_adapter(self.model, folder)
        else:  # on CPUs vLLM packs a tied head at its start, and its reload does not see it
            save_whole(self.model, folder, untied=self.device.type == "cpu")

    def _environment(self) -> dict[str, str]:
        own = {"VLLM_NO_USAGE_STATS": "1"}
        if self.device.type != "cuda":
            return own
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = list(map(str, range(torch.cuda.device_count()))) if visible is None else visible.split(",")
        wanted = self.settings.devices
        if wanted is None:
            wanted = (torch.cuda.current_device() if self.device.index is None else self.device.index,)
        if max(wanted) >= len(names):
            raise ValueError(f"vllm_devices: expected indices below {len(names)}, the GPUs here, got {list(wanted)}")
        return own | {"CUDA_VISIBLE_DEVICES": ",".join(names[index] for index in wanted)}

    def _wake_up(self) -> bool:
        """Whether it slept."""
        if self._served.awake:
            return False
        assert self._served.engine is not None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the trainer's allocator only keeps is the engine's now
        self._served.engine.ask("wake_up")
        self._served.awake = True
        return True

    def _sleep(self) -> None:
        if self.settings.sleep:
            assert self._served.engine is not None
            self._served.engine.ask("sleep")
            self._served.awake = False

    def _check_serves(self, engine: EngineProcess, version: int) -> None:
        """Raises RuntimeError where the policy's log-probabilities of a text have moved and the engine's have not by a bit, and
        in float32 where the two differ: some of the weights are of before.

        What both were is kept from when the engine's last moved: small moves add up until they must show. (In half precision
        a text's less likely tokens differ by more than an update moves them; there the check of every rollout remains.)
        """
        ids = [token for token in self.tokenizer.encode(PROBE, add_special_tokens=False) if token < self.vocab_size][:32]
        with sampling_mode(self.model):
            logits = self.model(input_ids=torch.tensor([ids], device=self.device)).logits[0, :-1].float()
        policy = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:], device=self.device)[:, None])[:, 0].cpu()
        served = torch.tensor(engine.ask("read", row=ids), dtype=torch.float32)
        before, wrong = self._served.probe, None
        if before is not None and torch.equal(served, before[1]):
            moved = float((policy - before[0]).abs().mean())
            if moved > STILL[self.dtype]:
                wrong = f"the policy's log-probabilities of a text moved by {moved:.3g} in the mean, the engine's by nothing"
        else:
            self._served.probe = policy, served
        apart = float((policy - served).abs().mean())
        if wrong is None and self.dtype == torch.float32 and not apart <= TOLERANCE[self.dtype]:
            wrong = f"its log-probabilities of a text differ from the policy's by {apart:.3g} in the mean"
        if wrong is not None:
            engine.close()
            raise RuntimeError(f"sampler: the vLLM engine does not serve the weights after {version} updates: {wrong}")

    def _rollout(self, prompts: Sequence[Prompt], prompt_ids: tuple[tuple[int, ...], ...], groups: Any) -> Rollout:
        sizes = [len(group) for group in groups]
        if sizes != [self.group_size] * len(prompts):
            raise RuntimeError(f"sampler: expected {len(prompts)} groups of {self.group_size} responses of vLLM, got {sizes}")
        responses = [response for group in groups for response in group]
        for ids, logprob in responses:
            whole = 1 <= len(ids) == len(logprob) <= self.max_new_tokens
            if not whole or not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise RuntimeError(
                    f"sampler: expected 1 to {self.max_new_tokens} ids below {self.vocab_size} a response of vLLM, and as many "
                    f"log-probabilities, got ids {ids} and {len(logprob)} log-probabilities"
                )
        device = self.device
        return Rollout(
            prompts=tuple(prompts),
            prompt_ids=prompt_ids,
            group_size=self.group_size,
            response_ids=torch.tensor([token for ids, _ in responses for token in ids], device=device),
            lengths=torch.tensor([len(ids) for ids, _ in responses], device=device),
            sampler_logprob=torch.tensor([value for _, logprob in responses for value in logprob], device=device),
            finished=torch.tensor([ids[-1] in self.stop_ids for ids, _ in responses], device=device),
        )


def _seeds(seed: int, prompt_ids: Sequence[tuple[int, ...]]) -> list[int]:
    """[P]: of every (seed, prompt, how often it came before) its own; a group's G responses count up from it."""
    before: Counter[tuple[int, ...]] = Counter()
    seeds = []
    for ids in prompt_ids:
        stream = np.random.Generator(np.random.PCG64((seed, before[ids], len(ids), *ids)))
        seeds.append(int(stream.integers(2**62)))
        before[ids] += 1
    return seeds
