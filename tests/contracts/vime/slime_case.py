"""What the optional test gives slime: a tiny model, recorded samples, its flags; and the start of its processes."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.tiny import write_olmoe, write_ouro

REPOSITORY = Path(__file__).parents[3]
LENGTHS = ((3, 5), (2, 7), (5, 1), (4, 6))
"""Prompt and response tokens of the samples of a rollout: two prompts, two samples each."""


@dataclass(frozen=True)
class Case:
    """A model, and how many ranks share it how."""

    model: str
    world: int = 1
    tensor: int = 1
    expert: int = 1
    bf16: bool = False
    """As slime always trains; fp32 is for comparing exactly."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.world}rank-tp{self.tensor}-ep{self.expert}{'-bf16' * self.bf16}"


def write_case(folder: Path, model: str) -> Path:
    """The model directory, and samples_0.json and samples_1.json beside it."""
    path = (write_ouro if model == "ouro" else write_olmoe)(folder / "model")
    if model == "ouro":
        from providers.ouro import remote_code

        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "auto_map": remote_code.AUTO_MAP}))
        for name in remote_code.FILES:
            shutil.copy(remote_code.FOLDER / name, path / name)
    draw = random.Random(0)
    for rollout in range(2):
        samples = [_sample(draw, model, index, *LENGTHS[index]) for index in range(len(LENGTHS))]
        (folder / f"samples_{rollout}.json").write_text(json.dumps(samples))
    # Wrong log-probs are recorded on purpose: a ratio of 1 would hide a sample's place in the batch.
    for bf16 in (True, False):
        text = f"bf16: {str(bf16).lower()}\ntether_trip_score_difference: 'off'\n"
        (folder / f"config_{bf16}.yaml").write_text(text)
    return path


def _sample(draw: random.Random, model: str, index: int, prompt: int, response: int) -> dict[str, Any]:
    sample = {
        "group": index // 2,
        "tokens": [draw.randrange(256) for _ in range(prompt + response)],
        "reward": float(index % 2),
        "response_length": response,
        "logprobs": [-5.5 - draw.random() / 10 for _ in range(response)],
        "status": "completed",
    }
    if model == "ouro":
        return sample | {"depths": [4] * prompt + [draw.randint(1, 4) for _ in range(response - 1)] + [1]}
    rows = prompt + response - 1
    return sample | {"experts": [[sorted(draw.sample(range(8), 2)) for _ in range(2)] for _ in range(rows)]}


def flags(case: Case, folder: Path, *, out: Path) -> list[str]:
    """slime's command line, the same on every rank."""
    model = folder / "model"
    config = json.loads((model / "config.json").read_text())
    text = f"""
        --debug-train-only --actor-num-nodes 1 --actor-num-gpus-per-node {case.world} --num-gpus-per-node {case.world}
        --hf-checkpoint {model} --ref-load {model} --load {out}/checkpoints --save {out}/checkpoints --save-interval 1
        --num-rollout 2 --rollout-batch-size 2 --n-samples-per-prompt 2 --num-steps-per-rollout 2
        --use-dynamic-batch-size --max-tokens-per-gpu 16 --data-pad-size-multiplier 8
        --num-layers {config["num_hidden_layers"]} --hidden-size 128 --num-attention-heads 4 --kv-channels 32
        --seq-length 512 --max-position-embeddings 512 --vocab-size 256 --make-vocab-size-divisible-by 1
        --normalization RMSNorm --norm-epsilon {config["rms_norm_eps"]} --rotary-base {int(config["rope_theta"])}
        --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
        --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --attention-backend unfused --no-rope-fusion
        --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-persist-layer-norm
        --no-gradient-accumulation-fusion --tensor-model-parallel-size {case.tensor} --distributed-backend gloo
        --expert-model-parallel-size {case.expert} --expert-tensor-parallel-size 1
        --optimizer adam --lr 1e-2 --lr-decay-style constant
        --weight-decay 0.0 --adam-eps 1e-2 --advantage-estimator grpo
        --custom-config-path {folder}/config_{case.bf16}.yaml
        --update-weight-transport disk --update-weight-disk-keep-files --update-weight-disk-dir {out}/weights
        --custom-model-provider-path tether.vime.model_provider --custom-megatron-init-path tether.vime.init
        --custom-megatron-before-log-prob-hook-path tether.vime.before_log_prob
        --custom-megatron-before-train-step-hook-path tether.vime.before_train_step
        --rollout-data-postprocess-path tether.vime.check_scores
        --custom-generate-function-path tether.vime.generate
        --custom-convert-samples-to-train-data-path tether.vime.convert_samples
        --custom-update-weight-post-write-path tether.vime.after_publication
    """
    if case.tensor > 1:
        text += " --sequence-parallel"
    if case.model == "ouro":
        return f"{text} --ffn-hidden-size {config['intermediate_size']}".split()
    return f"""{text}
        --ffn-hidden-size 64 --moe-ffn-hidden-size 64 --num-experts 8 --moe-router-topk 2 --moe-router-pre-softmax
        --moe-aux-loss-coeff 0 --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
        --use-rollout-routing-replay --calculate-per-token-loss
    """.split()


def run(
    stage: str,
    case: Case,
    folder: Path,
    *,
    out: Path,
    mutate: str = "",
    words: list[str] | None = None,
    deadline_seconds: float = 500,
) -> str:
    """Runs a stage on all ranks, with slime's flags for the case or other `words`; its findings are in OUT/STAGE.pt.

    Returns:
        The ranks' output if one failed, or "".
    """
    out.mkdir(exist_ok=True)
    interpreter = os.environ.get("TETHER_SLIME_PYTHON", sys.executable)
    command = [interpreter, "-m", "tests.contracts.vime.slime_process", stage, "--folder", str(folder)]
    command += ["--out", str(out / f"{stage}.pt"), "--mutate", mutate, "--deadline", str(deadline_seconds)]
    command += ["--", *(words or flags(case, folder, out=out))]
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    paths = [str(REPOSITORY), os.environ["TETHER_SLIME"], os.environ.get("TETHER_MEGATRON", "")]
    shared = {"PYTHONPATH": ":".join(filter(None, paths)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"WORLD_SIZE": str(case.world), "HF_MODULES_CACHE": str(out / "modules"), "OMP_NUM_THREADS": "1"}
    # slime wraps groups to rebuild them after a sleep; torch 2.13's collectives pass by methods that it does not wrap.
    shared |= {"SLIME_DESTROY_WORLD_PROCESS_GROUP": "0"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "ENABLE_ROUTING_REPLAY": str(int(case.model == "olmoe"))}
    processes, logs = [], [out / f"{stage}.{rank}.log" for rank in range(case.world)]
    for rank, path in enumerate(logs):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with path.open("w") as log:
            processes.append(subprocess.Popen(command, env=environment, cwd=REPOSITORY, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout=deadline_seconds + 30) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return "\n".join(path.read_text()[-4000:] for path in logs) if any(codes) else ""
