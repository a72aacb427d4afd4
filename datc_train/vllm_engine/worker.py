"""The process that runs vLLM: answers questions until it is told to close, or until the trainer is no more.

    python -m datc_train.vllm_engine.worker <file descriptor of the pipe>

Only vLLM's public interface is used. Token ids go in, token ids and log-probabilities come out; no tokenizer is loaded.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

NAN = float("nan")
GRACE = 3  # seconds between SIGTERM and SIGKILL


class Worker:
    """One engine. Every public method is a question that the trainer may ask."""

    def __init__(self, alive: Callable[[], None]) -> None:
        self._alive = alive
        self._llm: Any = None
        self._adapter: Any = None

    def start(self, options: dict[str, Any]) -> str:
        """The engine with these options of `vllm.LLM`; vLLM's version."""
        import vllm

        self._llm = vllm.LLM(**options)
        return vllm.__version__

    def use_adapter(self, name: str, number: int, path: str) -> None:
        """Sample from this adapter from here on. Name, number and path must be new: vLLM keeps what it knows by each of them."""
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest(name, number, path)
        self._llm.llm_engine.add_lora(self._adapter)

    def load_weights(self, path: str) -> None:
        """Sample from the weights of this folder from here on; what was cached of others is forgotten."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("the prefix cache of the weights before was not given up")

    def sample(self, rows: Sequence[Sequence[int]], seeds: Sequence[int], settings: dict[str, Any]) -> list[Any]:
        """For every row settings["n"] responses: (ids, their log-probabilities; NaN where the engine gave none)."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self._run(
            [TokensPrompt(prompt_token_ids=list(row)) for row in rows], [SamplingParams(seed=s, **settings) for s in seeds]
        )
        return [[_response(completion) for completion in output.outputs] for output in outputs]

    def read(self, row: Sequence[int]) -> list[float]:
        """log p of every token of the row but its first, over all columns, at temperature 1."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False, ignore_eos=True)
        (output,) = self._run([TokensPrompt(prompt_token_ids=list(row))], [params])
        return [entry[token].logprob for entry, token in zip(output.prompt_logprobs[1:], row[1:], strict=True)]

    def sleep(self) -> None:
        """Level 1: weights wait in the machine's memory (level 2 would lose them), the cache is forgotten."""
        self._llm.sleep(level=1)

    def wake_up(self) -> None:
        self._llm.wake_up()

    def shut_down(self) -> None:
        self._llm = None
        gc.collect()

    def _run(self, prompts: list[Any], params: list[Any]) -> list[Any]:
        """The requests' outputs in their order; a sign of life at every step of the engine."""
        self._llm.enqueue(prompts, params, lora_request=self._adapter, use_tqdm=False)
        engine, done = self._llm.llm_engine, []
        while engine.has_unfinished_requests():
            done += [output for output in engine.step() if output.finished]
            self._alive()
        return sorted(done, key=lambda output: int(output.request_id))


def _response(completion: Any) -> tuple[list[int], list[float]]:
    ids = list(completion.token_ids)
    known = [None] * len(ids) if completion.logprobs is None else completion.logprobs
    return ids, [_logprob(entry, token) for entry, token in zip(known, ids, strict=True)]


def _logprob(entry: Any, token: int) -> float:
    value = None if entry is None or token not in entry else entry[token].logprob
    return NAN if value is None else float(value)


def _end_with_the_trainer() -> None:
    """Its end of our standard input closes with it, however it ends; then nothing of this process group may stay.

    SIGTERM first: the engine gives its shared memory back. Whoever does not listen is killed by a process of no group of ours.
    """
    while os.read(sys.stdin.fileno(), 1):
        pass
    group = os.getpgrp()
    subprocess.Popen(["sh", "-c", f"sleep {GRACE}; kill -KILL -{group}"], start_new_session=True)
    os.killpg(group, signal.SIGTERM)
    os._exit(1)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: None)  # ours ends this way; the engine's processes have handlers of their own
    threading.Thread(target=_end_with_the_trainer, daemon=True).start()
    pipe = Connection(int(sys.argv[1]))
    worker = Worker(lambda: pipe.send(("alive", None)))
    while True:
        what, arguments = pipe.recv()
        if what == "close":
            worker.shut_down()
            sys.stdout.flush()
            os._exit(0)  # the interpreter's own end takes seconds more
        try:
            answer = getattr(worker, what)(**arguments)
        except Exception as error:
            import traceback

            traceback.print_exc()
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
        else:
            pipe.send(("done", answer))


if __name__ == "__main__":
    main()
