"""Kill a real run with -9 at a random moment, resume it, compare with the unbroken run; 30 times. Not collected by pytest.

    python tests/kill.py [ROUNDS]
"""
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

TRAIN = Path(__file__).parent.parent / "train.py"
RUN = ["--steps", "10", "--questions", "4", "--group-size", "4", "--eval-questions", "4", "--eval-every", "3", "--save-every", "2",
       "--warm-steps", "20", "--method", "broadcast", "mosaic"]


def start(out, cache, *args):
    return subprocess.Popen([sys.executable, TRAIN, "--out", out, "--cache", cache, *args], stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)


def logs(run):
    """All that a run logged, save the times, and the weights that it ended with."""
    lines = {path.relative_to(run): [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in open(path)]
             for path in sorted(run.glob("*/*.jsonl"))}
    return lines, [path.read_bytes() for path in sorted(run.glob("*/model/model.safetensors"))]


def main(rounds):
    rng, outcomes = random.Random(0), Counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start(folder / "unbroken", folder / "cache", *RUN).wait()
        begin = time.perf_counter()
        start(folder / "timed", folder / "cache", *RUN).wait()      # with the warmed-up model at hand
        whole, expected = time.perf_counter() - begin, logs(folder / "unbroken")
        assert len(expected[0]) == 4 and len(expected[1]) == 2
        for i in range(rounds):
            out, kills = folder / str(i), 0
            process = start(out, folder / "cache", *RUN)
            while True:
                try:
                    process.wait(timeout=rng.uniform(.3 * whole, 1.05 * whole) if kills < 3 else None)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    kills += 1
                    process.wait()
                    begun = (out / "config.json").exists()
                    process = start(out, folder / "cache", *(["--resume"] if begun else RUN))
            same = process.returncode == 0 and logs(out) == expected
            outcomes[f"{'same' if same else 'DIFFERENT'} after {kills} kills"] += 1
            print(f"{i + 1:3}: {kills} kills, {'the same' if same else f'DIFFERENT: {process.stderr.read()[-300:]}'}", flush=True)
    print(dict(outcomes))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
