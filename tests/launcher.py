"""A process that has the libraries loaded and starts the scripts as forks of itself: half a second, not five.

Each connection to its socket brings one job in JSON, with the files for stdin, stdout and stderr (None is a closed
one). The answer is the child's pid. {"wait": pid} is answered with its exit code, which is negative for a signal.

    python launcher.py serve FD                 the process itself; FD is a socket that listens
    python launcher.py SOCKET run SCRIPT ARGS   what `uv run SCRIPT ARGS` does, by way of that process
"""

import json
import os
import select
import signal
import socket
import sys


def ask(address, job, files=()):
    """Send a job with its files to the launcher at `address` and return its answer."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(job).encode()], files)
        return int(connection.recv(100))


def has_ended(pid, timeout=None):
    """Whether the process ends within `timeout` seconds."""
    ending = os.pidfd_open(pid)
    try:
        return bool(select.select([ending], [], [], timeout)[0])
    finally:
        os.close(ending)


def run(address, name, *args):
    """Run a script of this folder to its end and return its exit code, as a shell shows it."""
    job = dict(argv=[os.path.abspath(name), *args], open=[True] * 3, cwd=os.getcwd(), env=dict(os.environ))
    pid = ask(address, job, [0, 1, 2])
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))  # timeout sends it to us
    has_ended(pid)
    code = ask(address, {"wait": pid})
    return code if code >= 0 else 128 - code


def drop_capabilities():
    """Make root subject to the permissions of files, like any other user."""
    import ctypes

    version_3, no_bits = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(version_3, no_bits):
        raise OSError(ctypes.get_errno(), "capset")


def become(job, files):
    """In the child: run the script as if a shell had started it.

    `smaller` sets constants once the toy scale is set; `code` is run in place of the script.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test run under nohup ignores it
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
    if job.get("unprivileged"):
        drop_capabilities()
    del sys.modules["prepare"], sys.modules["train"]  # they are to read the new environment
    sys.argv, sys.path[0] = job["argv"], os.path.dirname(job["argv"][0])
    if job.get("smaller"):
        import prepare
        use_toy_scale = prepare.use_toy_scale

        def use_smaller_scale():
            use_toy_scale()
            for module in (prepare, sys.modules["__main__"]):
                vars(module).update({name: job["smaller"][name] for name in job["smaller"].keys() & vars(module)})

        prepare.use_toy_scale = use_smaller_scale
    if job.get("code"):
        exec(job["code"], {})
    else:
        runpy.run_path(job["argv"][0], run_name="__main__")


def serve(server):
    while True:
        connection, _ = server.accept()
        with connection:
            data, files, _, _ = socket.recv_fds(connection, 2**20, 3)
            job = json.loads(data)
            if "wait" in job:
                answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
            else:
                answer = os.fork()
                if answer == 0:
                    connection.close()
                    server.close()
                    return become(job, files)
                for file in files:
                    os.close(file)
            connection.sendall(b"%d\n" % answer)


if __name__ == "__main__":
    if sys.argv[1] != "serve":
        sys.exit(run(sys.argv[1], *sys.argv[3:]))
    import gc
    import runpy

    import rustbpe  # noqa: F401
    import torch

    import train  # noqa: F401

    torch.compiler.reset()  # loads what the first optimizer step would
    gc.collect()
    gc.freeze()  # else the collector in each fork would touch, and so copy, all of this process's memory
    serve(socket.socket(fileno=int(sys.argv[2])))
