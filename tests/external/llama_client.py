"""Asks the zygote for a server, and stands for it: a signal to this process goes to the server, and its exit code is the server's."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX) as stream:
    stream.connect(os.environ["FASTLLM_ZYGOTE"])
    message = {"arguments": sys.argv[1:], "folder": os.getcwd()}
    socket.send_fds(stream, [json.dumps(message).encode() + b"\n"], [1, 2])
    pid = int(stream.recv(64))
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    said = stream.recv(64)
sys.exit(int(said) if said else 1)
