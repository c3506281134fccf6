"""A child process under guard: it never outlives this one."""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
# What a guard needs beyond its child's grace to kill and reap it.
GUARD_SECONDS = 5.0


class Child:
    """A running command whose output is appended to a log.

    It is ended by `stop`, or by this process's death. `keep` names descriptors that it holds open while it lives.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        stop_by: signal.Signals,
        grace: float,
        keep: Sequence[int] = (),
        unprivileged: Path | None = None,
    ) -> None:
        self.log = log
        self._grace = grace
        # -S -E: a guard is plain Python, ready in 20 ms, whatever is installed or set around it.
        guard = [sys.executable, "-S", "-E", "-m", "local.guard"]
        if unprivileged is not None:
            guard += ["--unprivileged", str(unprivileged)]
        with log.open("ab") as output:
            self._logged_before = output.tell()
            self._guard = subprocess.Popen(
                [*guard, stop_by.name, str(grace), *command],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=keep,
                start_new_session=True,
            )

    def status(self) -> int | None:
        """The exit status, 128 and the signal's number where a signal ended it, or None while it runs."""
        return self._guard.poll()

    def wait(self, seconds: float) -> int | None:
        """The exit status once it has ended by itself, or None when it still runs after so many seconds."""
        try:
            return self._guard.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int:
        """End it and wait until it, and all in its process group, is gone. Its exit status. Harmless when repeated."""
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        try:
            return self._guard.wait(self._grace + GUARD_SECONDS)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            return self._guard.wait()

    def said(self, lines: int = 12) -> str:
        """The last lines that it logged, for an error's text."""
        with self.log.open("rb") as output:
            output.seek(self._logged_before)
            text = output.read().decode(errors="replace")
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:])
