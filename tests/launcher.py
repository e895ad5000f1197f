"""A process that has the libraries loaded and starts the scripts as forks of itself: half a second, not five.

Each message on the socket is a job in JSON, with the files for stdin, stdout and stderr (None is a closed one). The
answer is the child's pid. {"wait": pid} is answered with its exit code, which is negative for a signal.
"""

import ctypes
import json
import os
import runpy
import socket
import sys

import rustbpe  # noqa: F401
import torch._dynamo  # noqa: F401

import train  # noqa: F401


def drop_capabilities():
    """Make root subject to the permissions of files, like any other user."""
    version_3, no_bits = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(version_3, no_bits):
        raise OSError(ctypes.get_errno(), "capset")


def become(job, files):
    """In the child: run the script as if a shell had started it. `smaller` sets constants of the toy scale."""
    streams = iter(files)
    for fd, is_open in enumerate(job["open"]):
        if is_open:
            os.dup2(next(streams), fd)
        else:
            os.close(fd)
    os.closerange(3, 256)
    for name, is_open in zip(("stdin", "stdout", "stderr"), job["open"], strict=True):
        if not is_open:
            setattr(sys, name, None)
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    if job["unprivileged"]:
        drop_capabilities()
    del sys.modules["prepare"], sys.modules["train"]  # they are to read the new environment
    if job["smaller"]:
        import prepare
        use_toy_scale = prepare.use_toy_scale
        prepare.use_toy_scale = lambda: (use_toy_scale(), vars(prepare).update(job["smaller"]))
    sys.argv = job["argv"]
    runpy.run_path(job["argv"][0], run_name="__main__")


def main(connection):
    while True:
        data, files, _, _ = socket.recv_fds(connection, 2**20, 3)
        if not data:
            return
        job = json.loads(data)
        if "wait" in job:
            answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                connection.close()
                return become(job, files)
            for file in files:
                os.close(file)
        connection.sendall(b"%d\n" % answer)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
