"""A vLLM server started the way a user would, and `HttpEngine` on it."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

from adapters.vllm_engine.http.engine import HttpEngine
from adapters.vllm_engine.http.settings import HttpSettings, server_command
from adapters.vllm_engine.settings import EngineSettings
from tests.ports import free_port
from tether.launch import end_with_parent

START_SECONDS = 600.0
"""A server and its engine core each import everything."""


class RunningServer:
    """Ends with `stop`, and its processes with it."""

    def __init__(self, settings: EngineSettings, port: int) -> None:
        command, environment = server_command(settings, host="127.0.0.1", port=port)
        self.url = f"http://127.0.0.1:{port}"
        with open(settings.log_path, "ab") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    def stop(self, number: int = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(timeout=30)


class ServedEngine(HttpEngine):
    """An HttpEngine whose server ends with it."""

    def __init__(self, settings: EngineSettings, **overrides: Any) -> None:
        """`overrides` are fields of HttpSettings."""
        self.port = free_port()
        self.engine_settings = settings
        self.server = RunningServer(settings, self.port)
        values: dict[str, Any] = {"start_seconds": START_SECONDS, "deadline_seconds": 60, **overrides}
        try:
            super().__init__(HttpSettings(url=self.server.url, **values))
        except BaseException:
            self.server.stop()
            raise

    def start_server_again(self) -> None:
        self.server = RunningServer(self.engine_settings, self.port)

    def close(self) -> None:
        super().close()
        self.server.stop()
