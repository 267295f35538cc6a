"""Tables and figures from a sweep's metrics, with 95 % intervals over seeds; takes seconds.

    python figures/evidence.py figures/sweep

Prints the tables of the READMEs and writes sweep.png (learning curves), utility.png (gain per kind, sessions per attempt,
before and after training) and ablation.png beside the sweep's folder. All differences are paired: same seed, same start,
same questions.
"""
import argparse
import statistics
from pathlib import Path

import matplotlib
matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from plot import KIND_COLOUR, STYLE, read_lines, read_run  # noqa: E402

T_95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]      # Student's t for 2, 3, ... 10 seeds


def interval(values):
    """(mean, half width of its 95 % interval) of one number per seed."""
    half = T_95[len(values) - 2] * statistics.stdev(values) / len(values) ** .5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), half


def mean_of(lines, key):
    """The mean over seeds of an evaluation's metric; None where no seed has it."""
    values = [line[f"eval_{key}"] for line in lines if line[f"eval_{key}"] is not None]
    return statistics.fmean(values) if values else None


NEEDED = {"2": 1, "3": 3, "4": 5}   # clues -> the fewest sessions that can read all pages, in both scenarios


def evaluations(lines):
    return [line for line in lines if "eval_success" in line]


def read_sweep(folder):
    """{scenario: {method: {seed: evaluations}}} of the runs whose methods, broadcasting among them, are all finished."""
    sweep = {}
    for run in sorted(Path(folder).glob("*-*/"), key=lambda run: int(run.name.split("-")[1])):
        scenario, seed = run.name.split("-")
        runs = {method: evaluations(lines) for method, lines in read_run(run).items()}
        if "broadcast" in runs and len({len(lines) for lines in runs.values()}) == 1:
            for method, lines in runs.items():
                sweep.setdefault(scenario, {}).setdefault(method, {})[seed] = lines
    return dict(sorted(sweep.items()))


def last(lines, key):
    return lines[-1][f"eval_{key}"]


def on_the_way(lines, key):
    """The mean over all evaluations but the start's; None if one of them is."""
    values = [line[f"eval_{key}"] for line in lines[1:]]
    return None if None in values else statistics.fmean(values)


def read_ablation(folder, sweep):
    """{scenario: {variant: {seed: evaluations}}}, Mosaic itself, on the same seeds, first."""
    ablation = {}
    for path in sorted(Path(folder).glob("ablation/*/*-*/mosaic/metrics.jsonl")):
        variant, (scenario, seed) = path.parts[-4], path.parts[-3].split("-")
        lines, own = evaluations(read_lines(path)), sweep[scenario]["mosaic"]
        if seed in own and len(lines) == len(own[seed]):
            ablation.setdefault(scenario, {"mosaic": {}}).setdefault(variant, {})[seed] = lines
            ablation[scenario]["mosaic"][seed] = own[seed]
    return ablation


def markdown(head, rows):
    return "\n".join(["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]) + "\n"


def number(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


MEASURES = {"success": (last, "success", 2), "greedy": (last, "success_greedy", 2), "on the way": (on_the_way, "success", 2),
            "sessions": (last, "sessions", 2), "per success": (last, "sessions_per_success", 2),
            "per success, on the way": (on_the_way, "sessions_per_success", 2),
            "tokens per success": (last, "tokens_per_success", 0), "out of turns": (last, "out_of_turns", 2)}


def result_table(sweep):
    """Means over seeds at the end, or over the evaluations on the way."""
    rows = []
    for scenario, methods in sweep.items():
        start = [lines[:1] for lines in methods["broadcast"].values()]
        for method, runs in {"(start)": start, **{method: [*seeds.values()] for method, seeds in methods.items()}}.items():
            cells = []
            for when, key, digits in MEASURES.values():
                values = [when(lines, key) for lines in runs if len(lines) > 1 or when is last]
                cells.append(number(statistics.fmean(values), digits) if values and None not in values else "")
            rows.append([f"{scenario}, {method}", str(len(runs)), *cells])
    return markdown(["scenario, method", "seeds", *MEASURES], rows)


def difference_table(sweep, base):
    """Paired differences to the method `base`, with 95 % intervals; bold where the interval is without 0."""
    rows = []
    for scenario, methods in sweep.items():
        for method in [method for method in methods if method != base]:
            cells = []
            for when, key, digits in MEASURES.values():
                pairs = [(when(methods[method][seed], key), when(methods[base][seed], key)) for seed in methods[method]]
                mean, half = interval([a - b for a, b in pairs if a is not None and b is not None])
                text = f"{mean:+.{digits}f} ± {half:.{digits}f}"
                cells.append(f"**{text}**" if abs(mean) > half else text)
            rows.append([f"{scenario}, {method}", str(len(methods[method])), *cells])
    return markdown([f"scenario, method - {base}", "seeds", *MEASURES], rows)


def clues_table(sweep):
    """Success and sessions by the number of clues at the end, beside the fewest sessions that can read all pages."""
    rows = []
    for scenario, methods in sweep.items():
        rows.append([f"{scenario}, fewest", "", "", "", *(str(count) for count in NEEDED.values())])
        for method, seeds in methods.items():
            cells = [number(statistics.fmean(lines[-1][f"eval_{key}_by_pages"][clues] for lines in seeds.values()))
                     for key in ("success", "sessions") for clues in NEEDED]
            rows.append([f"{scenario}, {method}", *cells])
    return markdown(["scenario, method", *(f"{key}, {clues} clues" for key in ("success", "sessions") for clues in NEEDED)], rows)


def starts_table(folder, sweep):
    """Mosaic from other starts: success at the start and at the end, sessions, attempts out of turns, per seed."""
    rows = []
    runs = {f"{path.parent.parent.name}, {path.parent.name}": evaluations(read_lines(path / "metrics.jsonl"))
            for path in sorted(Path(folder).glob("starts/*/*-*/mosaic"))}
    for scenario, methods in sweep.items():
        runs |= {f"careless, {scenario}-{seed}": methods["mosaic"][seed] for seed in ("1", "2", "3") if seed in methods["mosaic"]}
    for name, lines in runs.items():
        start, end = lines[0], lines[-1]
        rows.append([name, number(start["eval_success"]), number(end["eval_success"]), number(start["eval_sessions"]),
                     number(end["eval_sessions"]), number(end["eval_out_of_turns"])])
    return markdown(["start, scenario-seed", "success at the start", "at the end", "sessions at the start", "at the end",
                     "out of turns"], rows)


def allocation_table(sweep):
    """What the sessions are and what they gain, at the start and after training."""
    rows = []
    for scenario, methods in sweep.items():
        table = {"(start)": [lines[0] for lines in methods["broadcast"].values()]}
        table |= {method: [lines[-1] for lines in seeds.values()] for method, seeds in methods.items()}
        for method, lines in table.items():
            asked = mean_of(lines, "compactions_asked")
            rows.append([f"{scenario}, {method}", *(number(mean_of(lines, f"gain_{kind}")) for kind in KIND_COLOUR),
                         number(mean_of(lines, "sessions_subagent")), number(asked), number(mean_of(lines, "sessions_compaction") - asked),
                         *(f"{share:.0%}" for share in shares(lines).values())])
    return markdown(["scenario, method", *(f"gain {kind}" for kind in KIND_COLOUR), "forks", "compactions asked for", "forced",
                     *(f"{n} sessions" for n in shares([]))], rows)


def shares(lines):
    """{number of sessions: share of the attempts}, those with six and more together."""
    counts = {n: 0 for n in ("1", "2", "3", "4", "5", "6+")}
    for line in lines:
        for n, count in line["eval_attempts_by_sessions"].items():
            counts[n if n in counts else "6+"] += count
    return {n: count / max(sum(counts.values()), 1) for n, count in counts.items()}


def plot_sweep(sweep, path):
    """Learning curves on held-out questions: mean over seeds, with a band of its 95 % interval."""
    panels = {"success": "success (sampled)", "sessions_per_success": "sessions per success"}
    figure, axes = plt.subplots(len(sweep), len(panels), figsize=(11, 3.6 * len(sweep)), layout="constrained", squeeze=False)
    for row, (scenario, methods) in zip(axes, sweep.items()):
        for ax, (key, title) in zip(row, panels.items()):
            for method, seeds in methods.items():
                points = {lines[0]["step"]: interval([line[f"eval_{key}"] for line in lines if line[f"eval_{key}"] is not None])
                          for lines in zip(*seeds.values())}
                colour, dash = STYLE[method]
                low, high = ([mean + sign * half for mean, half in points.values()] for sign in (-1, 1))
                ax.plot(list(points), [mean for mean, _ in points.values()], color=colour, linestyle=dash, label=method)
                ax.fill_between(list(points), low, high, color=colour, alpha=.15, linewidth=0)
            ax.set(title=f"{scenario}: {title}, {len(seeds)} seeds", xlabel="GRPO step")
            ax.grid(alpha=.3)
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_utility(sweep, path):
    """Session utility and allocation: gain per kind and sessions per attempt, at the start and after training."""
    figure, axes = plt.subplots(len(sweep), 2, figsize=(11, 3.6 * len(sweep)), layout="constrained", squeeze=False)
    for (gains, counts), (scenario, methods) in zip(axes, sweep.items()):
        bars = {"start": ("#999999", [lines[0] for lines in methods["broadcast"].values()])}
        bars |= {method: (STYLE[method][0], [lines[-1] for lines in seeds.values()]) for method, seeds in methods.items()}
        kinds = [kind for kind in KIND_COLOUR if mean_of(bars["start"][1], f"gain_{kind}") is not None]
        for i, (name, (colour, lines)) in enumerate(bars.items()):
            place, width = (i - (len(bars) - 1) / 2) * .16, .15
            points = [interval([line[f"eval_gain_{kind}"] for line in lines if line[f"eval_gain_{kind}"] is not None]) for kind in kinds]
            gains.bar([k + place for k in range(len(kinds))], [mean for mean, _ in points], width, color=colour, label=name,
                      yerr=[half for _, half in points], error_kw={"linewidth": .8, "capsize": 2})
            counts.bar([k + place for k in range(6)], shares(lines).values(), width, color=colour)
        gains.set(title=f"{scenario}: gain per session, nats", xticks=range(len(kinds)), xticklabels=kinds)
        gains.axhline(0, color="black", linewidth=.6)
        counts.set(title=f"{scenario}: share of attempts by number of sessions", xticks=range(6), xticklabels=shares([]), xlabel="sessions of an attempt")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_ablation(ablation, path):
    """Success and sessions of each variant; a dot per seed, a bar at the mean."""
    figure, axes = plt.subplots(len(ablation), 2, figsize=(11, 3.6 * len(ablation)), layout="constrained", squeeze=False)
    for row, (scenario, variants) in zip(axes, ablation.items()):
        for ax, key in zip(row, ("success", "sessions")):
            for y, seeds in enumerate(variants.values()):
                values = [last(lines, key) for lines in seeds.values()]
                ax.plot(values, [y] * len(values), "o", color="#D55E00" if y == 0 else "#0072B2", markersize=5)
                ax.plot(statistics.fmean(values), y, "|", color="black", markersize=16)
            ax.set(title=f"{scenario}: {key} after training", yticks=range(len(variants)), yticklabels=list(variants))
            ax.invert_yaxis()
            ax.grid(alpha=.3, axis="x")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("sweep", type=Path, help="a sweep's folder")
    folder = parser.parse_args().sweep
    sweep = read_sweep(folder)
    ablation = read_ablation(folder, sweep)
    print(result_table(sweep), difference_table(sweep, "broadcast"), clues_table(sweep), starts_table(folder, sweep),
          allocation_table(sweep), sep="\n")
    plot_sweep(sweep, folder.parent / "sweep.png")
    plot_utility(sweep, folder.parent / "utility.png")
    if ablation:
        print(difference_table(ablation, "mosaic"))
        plot_ablation(ablation, folder.parent / "ablation.png")


if __name__ == "__main__":
    main()
