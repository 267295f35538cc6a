"""The evidence: every method, both scenarios, several seeds. Resumable: what is finished is not run again.

    python figures/sweep.py runs/sweep [--seeds 1 2 3 4 5] [--jobs 2]

One process per scenario and seed, each on one thread, `--jobs` at a time; a run that was cut off goes on with --resume.
`python figures/plot.py sweep runs/sweep` makes the table and the figure from what it wrote.
"""
import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plot import STYLE

TRAIN, METHODS = Path(__file__).parent.parent / "train.py", list(STYLE)


def run(out, scenario, seed):
    """Train all methods from one warm start on the same questions, unless that is done; the log lies beside the run."""
    folder = out / f"{scenario}-{seed}"
    if all((folder / method / "model").exists() for method in METHODS):
        return f"{folder}: finished before"
    flags = ["--resume"] if (folder / "config.json").exists() else ["--scenario", scenario, "--seed", str(seed), "--method", *METHODS]
    with open(out / f"{folder.name}.log", "w") as log:
        code = subprocess.call([sys.executable, TRAIN, "--out", folder, *flags], stdout=log, stderr=log,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    return f"{folder}: {'finished' if code == 0 else f'exit status {code}, see {log.name}'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        jobs = [(args.out, scenario, seed) for seed in args.seeds for scenario in ("subagent", "compaction")]
        for line in pool.map(run, *zip(*jobs)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
