"""A night by program.md: a scripted agent takes every command from that text, and runs them in a clone.

The clone differs in budget, time limit, size and clock: a step lasts STEP_SECONDS and the weights begin at SEED, both
from the environment. So equal code gives equal scores, and the test decides when luck or the machine changes. The first
run is by uv itself; from then on a stand-in for it saves each run the loading of the libraries.
"""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HEADER = "commit\tval_bpb\tmemory_gb\tstatus\tdescription\n"
UV = os.environ.get("UV") or shutil.which("uv")  # `uv run` sets it
TAG = "mar5"
CHANGES = {  # of the clone: patterns and what replaces them
    "program.md": [("^timeout 600 ", 'timeout "$LIMIT" '), ("=1 timeout 600 ", '= timeout "$LIMIT" ')],
    "prepare.py": [(r"= 256, 20, 256 \* 256, 1024", "= 64, 2, 64 * 32, 1024")],
    "train.py": [(r"= 2, 2\*\*12, 8$", "= 2, 2**8, 4"), (r"^ASPECT_RATIO = \d+", "ASPECT_RATIO = 16"),
                 (r"^HEAD_DIM = \d+", "HEAD_DIM = 32"), (r"^SEED = \d+", 'SEED = int(os.environ["SEED"])'),
                 (r"^UNEMBEDDING_LR = \S+", "UNEMBEDDING_LR = 0.0004"),  # so that there is something to gain
                 (r"dt = time.perf_counter\(\) - step_start", 'dt = float(os.environ["STEP_SECONDS"])')],
}
OF_OTHERS = {"uv run prepare.py", "uv run prepare.py --toy", "uv sync"}  # for the human, or done for the test


def read_commands(text):
    """Every command of program.md: the lines of its code blocks up to those for reference, and its code spans."""
    fence = r"(?s)^```\n(.*?)^```$"
    lines = "".join(re.findall(fence, text.partition("\n## For reference\n")[0], flags=re.M)).splitlines()
    spans = [span.replace("\n", " ") for span in re.findall("`([^`]+)`", re.sub(fence, "", text, flags=re.M))]
    return {*lines, *(span for span in spans if re.match("(git|grep|ls|printf|tail|timeout|uv) ", span))}


def replace_once(path, changes):
    text = path.read_text(encoding="utf-8")
    for pattern, new in changes:
        text, count = re.subn(pattern, lambda _, new=new: new, text, flags=re.M)
        assert count == 1, f"{path.name} has {count} times {pattern!r}"
    path.write_text(text, encoding="utf-8")


class Agent:
    """Does what program.md in `folder` says, by its commands and its rules. `env` is the machine that it works on."""

    def __init__(self, folder, env, start_run="timeout"):
        self.folder, self.env, self.start_run = folder, env, start_run
        self.commands, self.tried = read_commands((folder / "program.md").read_text(encoding="utf-8")), set()
        self.scores, self.noise, self.steps, self.tail = [], Decimal(0), None, ""

    def do(self, start, *values):
        """Run the command that is `start`, or the only one that begins so, its <places> filled. Returns its stdout."""
        found = {start} & self.commands or {command for command in self.commands if command.startswith(start)}
        assert len(found) == 1, f"program.md has {len(found)} commands that begin with {start!r}"
        self.tried |= found
        values = list(values)
        command = re.sub(r"<[^<>]+>", lambda _: values.pop(0), *found)
        assert not values, f"{command!r} has no place for {values}"
        run = subprocess.run(["bash", "-c", command], cwd=self.folder, env=self.env, capture_output=True, text=True)
        self.status = run.returncode
        return run.stdout

    def git(self, *args):
        """What git answers; for looking only."""
        return subprocess.check_output(["git", *args], cwd=self.folder, env=self.env, text=True).strip()

    def ledger(self):
        return [line.split("\t") for line in (self.folder / "results.tsv").read_text().splitlines()[1:]]

    def kept(self):
        """Descriptions of the kept experiments by commit."""
        return {commit: description for commit, _, _, status, description in self.ledger() if status == "keep"}

    def make_ledger(self):
        self.do("ls ~/.cache/autoresearch/data")
        if self.status:
            self.do("ls ~/.cache/autoresearch/toy")
        assert self.status == 0 and not (self.folder / "results.tsv").exists()
        self.do("printf 'commit")

    def set_up(self):
        assert self.do("git branch --list", TAG) == self.do("git status --short") == ""
        assert self.do("git config user.email")
        self.do("git switch -c", TAG)
        self.make_ledger()

    def resume(self):
        self.do("git switch autoresearch", TAG)
        self.do("git reset --hard")
        kept, log = self.kept(), re.findall("^[0-9a-f]{7}", self.do("git log"), flags=re.M)
        if log[0] not in kept:
            self.do("git reset --hard <the newest", next(commit for commit in log if commit in kept))

    def run(self, steps):
        """One run, its score or None. Notes whether its number of steps tells of other conditions than `steps` does."""
        self.do(self.start_run)
        self.exit_code = self.status
        found = dict(re.findall(r"(\w+): +(\S+)\n", self.do('grep "^val_bpb:')))
        if "val_bpb" not in found:
            self.tail = self.do("tail")
            return None
        self.memory = f"{float(found['peak_vram_mb']) / 1024:.1f}"
        shown = self.do('grep "^attention:')
        assert shown.startswith("attention: masked SDPA\n")
        self.last_steps = int(re.search(r"num_steps: +(\d+)", shown).group(1))
        self.changed = steps is not None and abs(self.last_steps / steps - 1) > 0.1
        return Decimal(found["val_bpb"])

    def log(self, score, status, description):
        memory = "0.0" if score is None else self.memory
        self.do(r"printf '%s", f"{score or 0:.6f}", memory, status, description)

    def run_head(self, status="discard", description="", resumed=False):
        """A run of the head: under `description`, or as the repeat of its kept row."""
        score = self.run(self.steps)
        assert score is not None, self.tail
        description = description or f"repeat: {self.kept()[self.git('rev-parse', 'HEAD')[:7]]}"
        if resumed or self.changed:
            self.scores = []
            description += " (new conditions)"
        self.log(score, status, description)
        self.scores.append(score)
        self.noise = max(self.noise, max(self.scores) - min(self.scores))
        self.steps = self.last_steps

    def begin(self, description, edit):
        """Steps 1 to 3 of the loop."""
        assert self.do("git status --short --branch") == f"## autoresearch/{TAG}\n"
        self.head = self.do("git rev-parse HEAD").strip()
        replace_once(self.folder / "train.py", edit)
        self.do("git commit train.py", description)
        assert self.status == 0

    def experiment(self, description, edit, repairs=(), simpler=False, seeds=()):
        """The loop once. `seeds` are for its runs, one after the other."""
        self.begin(description, edit)
        to_beat, seeds = sum(self.scores) / len(self.scores), list(seeds)
        self.env |= {"SEED": seeds.pop(0)} if seeds else {}
        score = self.run(self.steps)
        for repair in repairs:
            assert score is None
            replace_once(self.folder / "train.py", repair)
            self.do("git commit --amend")
            score = self.run(self.steps)
        if score is None:
            self.log(score, "crash", description)
            return self.reset()
        if self.changed:
            self.log(score, "discard", description)
            self.reset()
            return self.run_head()
        scores, keep = [score], to_beat - score > self.noise or (simpler and score - to_beat <= self.noise)
        if not keep and score < to_beat:
            self.env |= {"SEED": seeds.pop(0)}
            scores.append(self.run(self.last_steps))
            assert scores[1] is not None and not self.changed, self.tail
            self.noise = max(self.noise, abs(scores[0] - scores[1]))
            keep = scores[1] < to_beat
        self.log(score, "keep" if keep else "discard", description)
        if len(scores) > 1:
            self.log(scores[1], "discard", "repeat: " + description)
        if not keep:
            return self.reset()
        self.scores, self.steps = [min(score, to_beat)] if simpler else scores, self.last_steps

    def reset(self):
        self.do("git reset --hard <the commit", self.head)


@pytest.fixture
def clone(toy_home, tmp_path):
    """A repository with the working tree's files, smaller, and the environment of an agent in it."""
    if UV is None:
        pytest.skip("the commands of program.md need uv")
    folder = tmp_path / "autoresearch"
    folder.mkdir()
    others = ("GIT_", "PYTHON", "UV_", "VIRTUAL_ENV", "XDG_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(others)}
    env |= {"HOME": str(toy_home), "CUDA_VISIBLE_DEVICES": "", "PATH": f"{Path(UV).parent}:{env['PATH']}",
            "UV_PROJECT_ENVIRONMENT": sys.prefix, "UV_NO_SYNC": "1", "UV_OFFLINE": "1", "GIT_CONFIG_NOSYSTEM": "1",
            "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"STEP_SECONDS": "0.5", "SEED": "1", "LIMIT": "100"}
    for name in (".gitignore", ".python-version", "prepare.py", "program.md", "pyproject.toml", "train.py", "uv.lock"):
        shutil.copy(ROOT / name, folder)
        replace_once(folder / name, CHANGES.get(name, ()))
    for command in ("init -q -b main", "config user.name agent", "config user.email agent@example.com", "add .",
                    "commit -q -m start"):
        subprocess.run(["git", *command.split()], cwd=folder, env=env, check=True)
    return folder, env


@pytest.fixture
def fast_uv(launcher, tmp_path):
    """A folder with a program `uv` that runs scripts by tests/launcher.py."""
    folder = tmp_path / "bin"
    folder.mkdir()
    command = [sys.executable, "-I", "-S", str(ROOT / "tests" / "launcher.py"), launcher]
    (folder / "uv").write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    (folder / "uv").chmod(0o700)
    return folder


def processes_in(folder):
    """Numbers of the processes whose working directory is `folder`."""
    found = []
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if link.readlink() == folder:
                found.append(int(link.parent.name))
    return found


def check(agent, before, rows, head):
    """These rows came to the ledger `before`, the branch is at `head`, and nothing else is left of the experiment."""
    ledger = (agent.folder / "results.tsv").read_text()
    assert ledger.startswith(before) and ledger.endswith("\n")
    added = ledger[len(before):].splitlines()
    assert [tuple(row.split("\t")[3:]) for row in added] == rows
    for row in added:
        assert re.fullmatch(r"[0-9a-f]{7}\t(\d\.\d{6}\t\d+\.\d\t(keep|discard)|0\.000000\t0\.0\tcrash)\t[^\t]+", row)
        assert agent.git("cat-file", "-t", row[:7]) == "commit"
    assert agent.git("rev-parse", "HEAD") == agent.git("rev-parse", head)
    assert agent.git("branch", "--show-current").startswith(f"autoresearch/{TAG}")
    assert agent.git("status", "--short") == ""
    assert set(agent.git("status", "--short", "--ignored").splitlines()) <= {
        "!! results.tsv", "!! run.log", "!! worktrees/"}
    log = (agent.folder / "run.log").read_bytes()
    assert 0 < len(log) < 10_000 and b"\r" not in log and log.count(b"\nstep ") < 12  # of 15 steps, a line each 10 s
    assert not processes_in(agent.folder)


SAME = [("^WINDOW_PATTERN = ", "WINDOW_PATTERN =  ")]  # equal code: only luck can make its score better
LESS = [("^WINDOW_PATTERN.*", 'WINDOW_PATTERN = "SSSL"')]
HIGHER = [("^UNEMBEDDING_LR = 0.0004", "UNEMBEDDING_LR = 0.004")]
ZERO = [("^UNEMBEDDING_LR = 0.0004", "UNEMBEDDING_LR = 0.0")]
TYPO = [("^UNEMBEDDING_LR = 0.0004", "UNEMBEDDING_LR = = 0")]
LOST = [[("^import signal.*", f"import signal{i}")] for i in range(4)]  # three repairs that do not help
MEMORY = [(r"losses = \[\]$", "losses = [torch.empty(2**55)]")]
LOOP = [(r"losses = \[\]$", "losses = []\n        while step: pass")]


def test_a_night_by_program_md_leaves_branch_log_and_ledger_as_they_must_be(clone, fast_uv, run_notebook, monkeypatch,
                                                                            capsys):
    folder, env = clone
    agent = Agent(folder, env)
    agent.set_up()
    agent.run_head("keep", "baseline")
    env |= {"SEED": "2", "PATH": f"{fast_uv}:{env['PATH']}"}
    agent.run_head()
    check(agent, HEADER, [("keep", "baseline"), ("discard", "repeat: baseline")], "main")
    baseline = dict(zip("12", agent.scores, strict=True))
    luck, bad_luck = sorted(baseline, key=baseline.get)
    assert agent.noise > 0

    def play(description, *statuses, ends="", **how):
        """One experiment, the status of its row (and of its repeat), and what the end of its log shows."""
        before, source = (folder / "results.tsv").read_text(), (folder / "train.py").read_bytes()
        head = agent.git("rev-parse", "HEAD")
        agent.experiment(description, **how)
        rows = [(status, "repeat: " * i + description) for i, status in enumerate(statuses)]
        if statuses[0] == "keep":
            assert agent.git("rev-parse", "HEAD~1") == head
            head = agent.ledger()[-len(rows)][0]
        else:
            assert (folder / "train.py").read_bytes() == source
        check(agent, before, rows, head)
        assert ends in agent.tail

    play("luck once", "discard", "discard", edit=SAME, seeds=[luck, bad_luck])
    play("luck twice", "keep", "discard", edit=SAME, seeds=[luck, luck])
    play("equal from less", "keep", edit=LESS, simpler=True)
    play('50% "of" $HOME\\n', "discard", edit=ZERO)
    play("a typo", "discard", ends="SyntaxError", edit=TYPO, repairs=[[("= = 0", "= 0.0")]])
    play("beyond repair", "crash", ends="ModuleNotFoundError", edit=LOST[0], repairs=LOST[1:])
    play("too much memory", "crash", ends="allocate", edit=MEMORY)
    play("divergence", "crash", ends="\nFAIL: step", edit=[(r"^MATRIX_LR = \S+", "MATRIX_LR = 1e30")])
    env["LIMIT"] = "5"
    play("endless loop", "crash", ends="\nstep 00000 ", edit=LOOP)
    assert agent.exit_code == 124
    env["LIMIT"] = "100"

    env["STEP_SECONDS"] = "2"
    before, head = (folder / "results.tsv").read_text(), agent.git("rev-parse", "HEAD")
    agent.experiment("higher rate", HIGHER)
    check(agent, before, [("discard", "higher rate"),
                          ("discard", "repeat: equal from less (new conditions)")], head)
    play("higher rate again", "keep", edit=HIGHER)

    assert env["SEED"] == luck  # still, so that the scores below can be told beforehand

    # a power failure in the middle of a run; the next day a second agent works beside the first
    agent.begin("never judged", SAME)
    log = folder / "run.log"
    log.unlink()
    started = threading.Thread(target=agent.do, args=["timeout"])
    started.start()
    while started.is_alive() and not (log.exists() and "time budget" in log.read_text()):
        time.sleep(0.1)
    running = processes_in(folder)
    assert running
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    started.join()
    (folder / "train.py").write_text("half an edit")

    before, score = (folder / "results.tsv").read_text(), agent.scores[0]
    next_day, other = Agent(folder, env), folder / "worktrees" / "gpu1"
    next_day.resume()
    next_day.do("git worktree add", TAG + "-gpu1")
    other = Agent(other, env | {"STEP_SECONDS": "0.5"}, "CUDA_VISIBLE_DEVICES=")
    other.make_ledger()
    beside = threading.Thread(target=other.run_head, args=["keep", "baseline"])
    beside.start()
    next_day.run_head(resumed=True)
    beside.join()
    check(next_day, before, [("discard", "repeat: higher rate again (new conditions)")], before.split("\n")[-2][:7])
    check(other, HEADER, [("keep", "baseline")], "main")
    assert next_day.scores == [score] and other.scores == [baseline[luck]]  # neither disturbed the other

    # every command was tried, and the notebook reads what they left
    assert agent.tried | next_day.tried | other.tried == agent.commands - OF_OTHERS
    monkeypatch.chdir(folder)
    nights = run_notebook()["nights"]
    assert [folder / night.path.parent for night in nights] == [folder, other.folder]
    assert "  keep: 4, discard: 9, crash: 4" in capsys.readouterr().out
