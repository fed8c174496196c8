"""Run a command on another host of `tools/some_hosts.py`, over the network between them: what ssh is elsewhere.

    python -m tools.far_shell --serve ADDRESS     # on that host
    python -m tools.far_shell ADDRESS COMMAND...  # its input and output are the command's

Nobody is asked who he is: only for networks that nobody else reaches.
"""

import json
import os
import socket
import subprocess
import sys
import threading

PORT = 2222
CONNECT_DEADLINE_S = 5.0
BLOCK_BYTES = 1 << 16


def serve(address: str) -> None:
    """Run what comes in, until killed."""
    with socket.create_server((address, PORT)) as listener:
        while True:
            asked, _ = listener.accept()
            threading.Thread(target=_run, args=(asked,), daemon=True).start()


def _run(asked: socket.socket) -> None:
    with asked:
        line = b""
        while not line.endswith(b"\n"):
            line += asked.recv(1)
        subprocess.run(
            json.loads(line),
            stdin=asked.fileno(),
            stdout=asked.fileno(),
            cwd="/",
            env={"PATH": os.environ["PATH"]},
            check=False,
        )


def ask(address: str, command: list[str]) -> int:
    """Have a command run there; return 0 when its output ends."""
    try:
        far = socket.create_connection((address, PORT), timeout=CONNECT_DEADLINE_S)
    except OSError as exc:
        sys.exit(f"far_shell: {address}: {exc}")
    far.settimeout(None)
    far.sendall(json.dumps(command).encode() + b"\n")
    threading.Thread(target=_send, args=(far,), daemon=True).start()
    try:
        while data := far.recv(BLOCK_BYTES):
            os.write(1, data)
    except OSError as exc:
        sys.exit(f"far_shell: {address}: {exc}")
    return 0


def _send(far: socket.socket) -> None:
    while data := os.read(0, BLOCK_BYTES):
        far.sendall(data)
    far.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
