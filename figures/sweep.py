"""The evidence: every method, both scenarios, several seeds; then the ablation. Resumable: what is finished is not run again.

    python figures/sweep.py runs/sweep [--seeds 1 2 3 4 5] [--variants centered raw ...] [--jobs 2]

One process per scenario and seed, each on one thread, `--jobs` at a time; a run that was cut off goes on with --resume.
`python figures/evidence.py runs/sweep` makes the tables and figures from what it wrote.
"""
import argparse
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from plot import STYLE

HERE, METHODS = Path(__file__).parent, list(STYLE)


def run(folder, variant, scenario, seed):
    """Train all methods from one warm start, or one variant of Mosaic, unless that is done; the log lies beside the run."""
    methods = ["mosaic"] if variant else METHODS
    if all((folder / method / "model").exists() for method in methods):
        return f"{folder}: finished before"
    command = [HERE / "ablate.py", variant] if variant else [HERE.parent / "train.py"]
    flags = ["--resume"] if (folder / "config.json").exists() else ["--scenario", scenario, "--seed", str(seed), "--method", *methods]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        code = subprocess.call([sys.executable, *command, "--out", folder, *flags], stdout=log, stderr=log,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    return f"{folder}: {'finished' if code == 0 else f'exit status {code}, see {log.name}'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--variants", nargs="+", default=[], help="of Mosaic, see ablate.py; alone, instead of the methods")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    jobs = [(args.out / "ablation" / variant / f"{scenario}-{seed}" if variant else args.out / f"{scenario}-{seed}", variant, scenario, seed)
            for seed in args.seeds for variant in args.variants or [""] for scenario in ("compaction", "subagent")]
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(run, *zip(*jobs)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
