"""With the network cut nothing changes: no name is looked up and no connection is tried once everything is set up."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Every way out of Python: connecting and looking up names. Local sockets of the system stay.
CUT = """
import socket, sys
def refuse(event, arguments):
    local = event == "socket.connect" and isinstance(arguments[1], (str, bytes))
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto") and not local:
        print(f"network used: {event} {arguments[1:]}", file=sys.stderr, flush=True)
        import os
        os._exit(97)
sys.addaudithook(refuse)
"""


def without_network(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a process, workers included, that ends with status 97 as soon as it asks for the network; in a
    namespace without interfaces too, where the system allows one.
    """
    (folder / "sitecustomize.py").write_text(CUT)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PIP_"))}
    environment |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    if shutil.which("unshare") and subprocess.run(["unshare", "-rn", "true"], capture_output=True).returncode == 0:
        command = ["unshare", "-rn", *command]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_cut_is_one(tmp_path: Path) -> None:
    """The hook would notice."""
    (tmp_path / "sitecustomize.py").write_text(CUT)
    script = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9/')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 97 and "network used" in done.stderr


@pytest.mark.parametrize("arguments", [("verify", "byte_account", "--run", "r"), ("doctor",), ("tables",), ("list",)])
def test_a_command_needs_no_network(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = without_network(tmp_path, "-m", "artifact", *arguments)
    assert done.returncode in (0, 3), done.stderr[-1000:]
    assert "network used" not in done.stderr
