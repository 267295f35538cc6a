"""The evidence: every method, both scenarios, several seeds. Resumable: what is finished is not run again.

    python figures/sweep.py runs/sweep [--seeds 1 2 ... 10] [--jobs 2]                # the comparison
    python figures/sweep.py runs/sweep --habits hesitant hasty --seeds 1 2 3          # Mosaic from other starts
    python figures/sweep.py runs/sweep --variants product own ... --seeds 1 2 3       # the ablation

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

HERE = Path(__file__).parent


def run(folder, command, methods, flags):
    """Train some methods from one warm start, unless that is done; the log lies beside the run."""
    if all((folder / method / "model").exists() for method in methods):
        return f"{folder}: finished before"
    flags = ["--resume"] if (folder / "config.json").exists() else [*flags, "--method", *methods]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.log", "w") as log:
        code = subprocess.call([sys.executable, *command, "--out", folder, *flags], stdout=log, stderr=log,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    return f"{folder}: {'finished' if code == 0 else f'exit status {code}, see {log.name}'}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(1, 11)))
    parser.add_argument("--variants", nargs="+", default=[], help="of Mosaic, see ablate.py; instead of the methods")
    parser.add_argument("--habits", nargs="+", default=[], help="of the start, see rollout.HABITS; Mosaic alone")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    args = parser.parse_args()
    kinds = [(args.out / "ablation" / variant, [HERE / "ablate.py", variant], ["mosaic"], []) for variant in args.variants]
    kinds += [(args.out / "starts" / habits, [HERE.parent / "train.py"], ["mosaic"], ["--habits", habits])
              for habits in args.habits]
    jobs = [(folder / f"{scenario}-{seed}", command, methods, [*flags, "--scenario", scenario, "--seed", str(seed)])
            for seed in args.seeds
            for folder, command, methods, flags in kinds or [(args.out, [HERE.parent / "train.py"], list(STYLE), [])]
            for scenario in ("compaction", "subagent")]
    with ThreadPoolExecutor(args.jobs) as pool:
        for line in pool.map(run, *zip(*jobs)):
            print(line, flush=True)


if __name__ == "__main__":
    main()
