"""What each setting may be. Whether settings go together with the model is for `prepare` to ask."""

from __future__ import annotations

import math
from typing import Any

from tether.learning_settings import learning_violations

DTYPES = ("auto", "float32", "bfloat16")
ENGINES = ("local", "pd", "http")
STAGINGS = ("host", "shadow", "ipc")
SAVE_FORMATS = ("reshardable", "same_layout")
REMOTE_CODE = ("ours", "keep", "none")
CUTS = ("tensor_parallel", "expert_parallel", "expert_tensor_parallel", "pipeline_parallel", "context_parallel")
REPLAYS = ("rollout", "trainer", "none")


def violations(s: Any) -> list[tuple[str, str]]:
    """(field, what was expected) of every field of a `Settings` outside its range."""
    at_least = {name: 1 for name in ("prompts_per_update", "max_new_tokens", "tokens_per_microbatch")}
    at_least |= dict.fromkeys(CUTS, 1)
    at_least |= dict.fromkeys(("train_devices", "rollout_devices", "prefill", "decode", "max_concurrent_samples"), 1)
    at_least |= {
        name: 0 for name in ("seed", "lr_warmup_updates", "lr_decay_updates", "keep_last", "keep_every", "eval_every")
    }
    at_least["save_every"] = 0
    at_least |= {"group_size": 2, "kv_cache_bytes": 0, "eval_samples": 0, "prometheus_port": 0}
    bad = [(name, f"an integer >= {low}") for name, low in at_least.items() if getattr(s, name) < low]
    positive = ("temperature", "lr", "max_grad_norm", "deadline_seconds")
    bad += [(n, "a finite number > 0") for n in positive if not (math.isfinite(getattr(s, n)) and getattr(s, n) > 0)]
    rules = {
        "dtype": (s.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
        "engine": (s.engine in ENGINES, f"one of {', '.join(ENGINES)}"),
        "engine_url": (
            (s.engine == "http") == s.engine_url.startswith(("http://", "https://")),
            "the server's address with engine=http, such as http://host:8000, and nothing otherwise",
        ),
        "engine_directory": (s.engine == "http" or not s.engine_directory, "nothing unless engine=http"),
        "staging": (
            s.staging in (("host",) if s.engine == "http" else STAGINGS),
            f"one of {', '.join(STAGINGS)}; host with engine=http",
        ),
        "transports": (bool(s.transports), "auto, or names separated by commas"),
        "weight_decay": (math.isfinite(s.weight_decay) and s.weight_decay >= 0, "a finite number >= 0"),
        "remote_code": (s.remote_code in REMOTE_CODE, f"one of {', '.join(REMOTE_CODE)}"),
        "router_replay": (
            s.router_replay in (REPLAYS if s.reference_scorer == "trainer" else ("rollout",)),
            f"one of {', '.join(REPLAYS)}; rollout with reference_scorer=engine, which runs what the samples ran",
        ),
        "balance_coefficient": (math.isfinite(s.balance_coefficient) and s.balance_coefficient >= 0, "finite, >= 0"),
        "router_z_coefficient": (math.isfinite(s.router_z_coefficient) and s.router_z_coefficient >= 0, "finite, >= 0"),
        "save_format": (s.save_format in SAVE_FORMATS, f"one of {', '.join(SAVE_FORMATS)}"),
        "stop_after_seconds": (math.isfinite(s.stop_after_seconds) and s.stop_after_seconds >= 0, "finite, >= 0"),
        "overlap_param_gather": (
            not s.overlap_param_gather or (s.overlap_grad_reduce and s.distributed_optimizer),
            "true only with overlap_grad_reduce and distributed_optimizer",
        ),
        "peak_flops": (math.isfinite(s.peak_flops) and s.peak_flops >= 0, "a finite number >= 0"),
        "lr_floor": (0 <= s.lr_floor <= s.lr, "in [0, lr]"),
        "eval_data": (
            bool(s.eval_data) or s.eval_every == 0,
            "a file of held-out prompts, because eval_every is not 0",
        ),
        "reward": (len(s.reward.split(":")) == 2 and all(s.reward.split(":")), "module:function"),
    }
    for name in ("tensor_parallel", "expert_parallel"):
        rules[name] = (s.train_devices % max(1, getattr(s, name)) == 0, f"a divisor of train_devices={s.train_devices}")
    experts = max(1, s.expert_parallel) * max(1, s.expert_tensor_parallel)
    rules["expert_tensor_parallel"] = (
        s.train_devices % experts == 0,
        f"a divisor of train_devices / expert_parallel, of {s.train_devices} / {s.expert_parallel}",
    )
    return bad + [(name, want) for name, (holds, want) in rules.items() if not holds] + learning_violations(s)
