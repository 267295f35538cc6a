"""Kill a real run with -9 at random moments, resume it, compare it with the unbroken run; 30 kills. Not collected by pytest.

    python tests/kill.py [KILLS]
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
       "--warm-start", "20", "--method", "broadcast", "mosaic"]


def start(out, cache, *args):
    return subprocess.Popen([sys.executable, TRAIN, "--out", out, "--cache", cache, *args], stdout=subprocess.DEVNULL,
                            stderr=subprocess.PIPE, text=True)


def logs(run):
    """All that a run logged, save the times, and the weights that it ended with."""
    lines = {path.relative_to(run): [{k: v for k, v in json.loads(line).items() if not k.startswith("seconds")} for line in open(path)]
             for path in sorted(run.glob("*/*.jsonl"))}
    return lines, [path.read_bytes() for path in sorted(run.glob("*/model/model.safetensors"))]


def main(wanted):
    rng, outcomes, kills, rounds = random.Random(0), Counter(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        start(folder / "unbroken", folder / "cache", *RUN).wait()
        begin = time.perf_counter()
        start(folder / "timed", folder / "cache", *RUN).wait()      # with the warmed-up model at hand
        whole, expected = time.perf_counter() - begin, logs(folder / "unbroken")
        assert len(expected[0]) == 4 and len(expected[1]) == 2
        while kills < wanted:
            out, before, rounds = folder / str(rounds), kills, rounds + 1
            process = start(out, folder / "cache", *RUN)
            while True:
                try:
                    process.wait(timeout=rng.uniform(.3, .95) * whole if kills < wanted else None)
                    break
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    kills += 1
                    begun = (out / "config.json").exists()
                    process = start(out, folder / "cache", *(["--resume"] if begun else RUN))
            same = process.returncode == 0 and logs(out) == expected
            outcomes["same" if same else "DIFFERENT"] += 1
            print(f"run {rounds}: {kills - before} kills, {'the same' if same else f'DIFFERENT: {process.stderr.read()[-300:]}'}", flush=True)
    print(f"{kills} kills in {rounds} runs: {dict(outcomes)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
