"""A process that runs a reward function: one JSON line in, one out. Started by `tether.reward_process`.

    python -m tether.reward_worker module:function

Its standard output is the protocol, so whatever the function prints goes to standard error. It ends when its input
ends or its parent is gone, also while the function hangs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any

from tether.rewards import checked_reward, load_reward

WATCH_SECONDS = 0.5


def main(name: str) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    function = load_reward(name)
    print("ready", file=answers)
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"value": checked_reward(function, **json.loads(line))}
        except Exception as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), file=answers)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
