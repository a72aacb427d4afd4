"""What `test_trl_processes.py` runs in every process of a group of two; results go to a file a rank."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any


def run(rank: int, port: int, folder: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
        "ACCELERATE_USE_CPU": "true",
    }
    import torch

    torch.set_num_threads(1)
    import torch.distributed as dist
    import trl
    from accelerate.utils import gather_object
    from test_trl import length_reward, make, other_model, parameters, reward_model

    from datc_train.integrations.trl import DATCTrainer

    # Two rows a process, groups of four: every group lies on both.
    options: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": 2}
    results: dict[str, Any] = {}
    for name, kind, more in (
        ("stock", trl.GRPOTrainer, {}),
        ("grpo", DATCTrainer, {"datc": {"method": "grpo"}}),
        ("ones", DATCTrainer, {"datc": {"ceiling": 1.0}}),
        ("datc", DATCTrainer, {"rewards": [reward_model(), length_reward]}),
    ):
        trainer = make(kind, Path(folder, name), **options | more)
        seen: list[dict[str, Any]] = []
        if name == "datc":
            score = trainer._generate_and_score_completions

            def record(inputs: Any, score: Any = score, seen: Any = seen) -> Any:
                output = score(inputs)
                lengths = [len(ids) for ids in output["completion_ids"]]
                real = [int(mask.sum()) for mask in output["completion_mask"]]
                seen.append(
                    {
                        "prompts": [row["prompt"] for row in inputs],
                        "ids": [ids[:n].tolist() for ids, n in zip(output["completion_ids"], real, strict=True)],
                        "advantages": [a[:n].tolist() for a, n in zip(output["advantages"], real, strict=True)],
                        "padding": [a[n:].tolist() for a, n in zip(output["advantages"], real, strict=True)],
                        "lengths": lengths,
                    }
                )
                return output

            trainer._generate_and_score_completions = record
        trainer.train()
        results[name] = {key: value.numpy() for key, value in parameters(trainer).items()}
        if name == "datc":
            results["seen"] = [gather_object([step]) for step in seen]
            results["log"] = [line for line in trainer.state.log_history if "datc/ess" in line]
    if hasattr(trl.GRPOConfig(output_dir=folder, use_cpu=True, bf16=False), "multi_objective_aggregation"):
        rewards, how = [reward_model(), other_model()], {"multi_objective_aggregation": "normalize_then_sum", "max_steps": 1}
        trainer = make(DATCTrainer, Path(folder, "several"), rewards=rewards, **options | how)
        add_up = trainer._sum

        def watched(scored: Any, responses: Any) -> Any:
            total = add_up(scored, responses)
            results["several"] = {
                "total": total.reward_grad.numpy(),
                "parts": [(one.score.numpy(), one.reward_grad.numpy()) for one in scored.values()],
                "lengths": [len(ids) for ids in responses],
            }
            return total

        trainer._sum = watched
        trainer.train()
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()
