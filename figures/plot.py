"""The figures, from what a run wrote.

    python figures/plot.py curves RUN [PNG]         # learning curves of every method in a run's folder -> RUN/curves.png
    python figures/plot.py mosaic TRAJECTORIES [PNG]    # one attempt as a mosaic of its sessions -> mosaic.png beside it
    python figures/plot.py sweep FOLDER [PNG]       # several seeds of figures/sweep.py, with 95 % intervals -> FOLDER/sweep.png

Colours are Okabe and Ito's, which colour-blind readers can tell apart; in print they differ by line style or label too.
"""
import argparse
import json
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("Agg")       # writes files; needs no screen
import matplotlib.pyplot as plt

STYLE = {"broadcast": ("#0072B2", "--"), "usage": ("#009E73", ":"), "gain": ("#CC79A7", "-."), "mosaic": ("#D55E00", "-")}
KIND_COLOUR = {"ordinary": "#56B4E9", "compaction": "#E69F00", "subagent": "#009E73"}


def read_lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def read_run(run):
    """A run's folder -> {method: the lines of its metrics.jsonl}, in the order of STYLE."""
    files = {method: Path(run) / method / "metrics.jsonl" for method in STYLE}
    return {method: read_lines(file) for method, file in files.items() if file.exists()}


def plot_curves(run, path=None):
    """Learning curves of the methods in a run's folder -> a PNG, by default the run's curves.png."""
    panels = {"success": "success (sampled)", "sessions": "sessions per attempt", "out_of_turns": "share out of turns"}
    figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.6), layout="constrained")
    for method, lines in read_run(run).items():
        colour, dash = STYLE[method]
        for ax, (key, title) in zip(axes, panels.items()):
            steps = [(line["step"], line[key]) for line in lines if key in line]
            held_out = [(line["step"], line[f"eval_{key}"]) for line in lines if f"eval_{key}" in line]
            if steps:
                ax.plot(*zip(*steps), color=colour, alpha=.25, linewidth=1)
            ax.plot(*zip(*held_out), color=colour, linestyle=dash, marker="o", markersize=4, label=method)
            ax.set(title=title, xlabel="GRPO step")
            ax.grid(alpha=.3)
    axes[0].legend(title="held-out questions\n(faint: training)", frameon=False)
    figure.savefig(path or Path(run) / "curves.png", dpi=150)
    plt.close(figure)


def table(run):
    """The final table of a run's folder, in Markdown: held-out success and the use of sessions, at the start and per method."""
    columns = {"success": "success", "greedy": "success_greedy", "sessions": "sessions", "per success": "sessions_per_success",
               "out of turns": "out_of_turns", "gain ordinary": "gain_ordinary", "gain compaction": "gain_compaction",
               "gain subagent": "gain_subagent"}
    text = f"| method    | {' | '.join(columns)} | minutes |\n|---|{'---|' * len(columns)}---|"
    runs = read_run(run)
    for name, lines in {"(start)": next(iter(runs.values()))[:1], **runs}.items():
        last, minutes = lines[-1], sum(s for line in lines for key, s in line.items() if key.startswith("seconds")) / 60
        cells = ["" if last[f"eval_{key}"] is None else f"{last[f'eval_{key}']:.2f}" for key in columns.values()]
        cells.append("" if name == "(start)" else f"{minutes:.1f}")
        text += f"\n| {name:9} | " + " | ".join(f"{cell:>{len(title)}}" for cell, title in zip(cells, [*columns, "minutes"])) + " |"
    return text


def plot_mosaic(trajectory, path):
    """One attempt as a mosaic: a tile per session, as wide as the session is long, with its gain and its advantages.

    Pale: what the session was shown. Full colour: what the model wrote in it. trajectory: a line of trajectories.jsonl.
    """
    figure, (tiles, bars) = plt.subplots(2, 1, figsize=(11, 4.6), height_ratios=[1, 1.3], sharex=True, layout="constrained")
    left = 0
    for i, session in enumerate(trajectory["sessions"]):
        colour, width = KIND_COLOUR[session["kind"]], session["tokens"]
        tiles.barh(0, width, left=left, height=1, color=colour, alpha=.3, edgecolor="white", linewidth=3)
        for start, end in session["spans"]:
            tiles.barh(0, end - start, left=left + start, height=1, color=colour)
        gain = "no gain: only the answer" if session["gain"] is None else f"gain {round(session['gain'], 2) + 0:+.2f}"
        tiles.text(left + width / 2, .56, f"{session['kind']}\n{width} tokens, ended by: {session['stop']}", ha="center", va="bottom", fontsize=8)
        tiles.text(left + width / 2, -.56, f"{session['score_before']:.2f} → {session['score_after']:.2f}\n{gain}", ha="center", va="top", fontsize=8)
        places = [left + place + .5 for start, end in session["spans"] for place in range(start, end)]
        bars.bar(places, session["advantages"], width=.9, color=colour)
        left += width
    bars.axhline(trajectory["advantage"], color="black", linewidth=1, linestyle="--")
    bars.text(left, trajectory["advantage"], "  A′", va="center")
    bars.axhline(0, color="grey", linewidth=.5)
    bars.set(ylabel="advantage per token", xlabel="tokens of the sessions, one after the other")
    tiles.set(ylim=(-1.3, 1.3), yticks=[])
    tiles.set_title(f"Who fits “{trajectory['question']}”? {trajectory['answer']}.  The attempt: {trajectory['stop']} "
                    f"“{trajectory['answered']}”, reward {trajectory['reward']:.0f}, {len(trajectory['sessions'])} sessions", fontsize=10)
    for ax in (tiles, bars):
        ax.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


T_95 = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26]      # Student's t for 2, 3, ... 10 seeds


def interval(values):
    """(mean, half width of its 95 % interval) of one number per seed."""
    half = T_95[len(values) - 2] * statistics.stdev(values) / len(values) ** .5 if len(values) > 1 else float("nan")
    return statistics.fmean(values), half


def read_sweep(folder):
    """{scenario: {method: {seed: lines of metrics.jsonl}}} of the runs whose every method is finished."""
    sweep = {}
    for run in sorted(Path(folder).glob("*-*/")):
        scenario, seed = run.name.split("-")
        runs = read_run(run)
        if len(runs) == len(STYLE) and len({len(lines) for lines in runs.values()}) == 1:
            for method, lines in runs.items():
                sweep.setdefault(scenario, {}).setdefault(method, {})[seed] = lines
    return sweep


def sweep_table(folder):
    """Means over seeds at the last step, and paired differences to broadcast with 95 % intervals, in Markdown."""
    columns = {"success": "success", "greedy": "success_greedy", "sessions": "sessions", "per success": "sessions_per_success",
               "out of turns": "out_of_turns"}
    text = f"| scenario, method | seeds | {' | '.join(columns)} | success - broadcast's | sessions - broadcast's |\n|{'---|' * (len(columns) + 4)}"
    for scenario, methods in read_sweep(folder).items():
        for method, seeds in methods.items():
            last = {seed: lines[-1] for seed, lines in seeds.items()}
            cells = [f"{statistics.fmean(line[f'eval_{key}'] for line in last.values()):.2f}" for key in columns.values()]
            for key in ("eval_success", "eval_sessions"):
                mean, half = interval([line[key] - methods["broadcast"][seed][-1][key] for seed, line in last.items()])
                cells.append("" if method == "broadcast" else f"{mean:+.2f} ± {half:.2f}")
            text += f"\n| {scenario}, {method} | {len(last)} | {' | '.join(cells)} |"
    return text


def plot_sweep(folder, path=None):
    """Learning curves on held-out questions, mean over seeds with a band of its 95 % interval -> a PNG."""
    sweep, panels = read_sweep(folder), {"success": "success (sampled)", "sessions_per_success": "sessions per success"}
    figure, axes = plt.subplots(len(sweep), len(panels), figsize=(11, 3.6 * len(sweep)), layout="constrained", squeeze=False)
    for row, (scenario, methods) in zip(axes, sweep.items()):
        for ax, (key, title) in zip(row, panels.items()):
            for method, seeds in methods.items():
                curves = [{line["step"]: line[f"eval_{key}"] for line in lines if f"eval_{key}" in line} for lines in seeds.values()]
                points = {step: interval([curve[step] for curve in curves]) for step in curves[0]}
                colour, dash = STYLE[method]
                low, high = ([mean + sign * half for mean, half in points.values()] for sign in (-1, 1))
                ax.plot(list(points), [mean for mean, _ in points.values()], color=colour, linestyle=dash, label=method)
                ax.fill_between(list(points), low, high, color=colour, alpha=.15, linewidth=0)
            ax.set(title=f"{scenario}: {title}, {len(seeds)} seeds", xlabel="GRPO step")
            ax.grid(alpha=.3)
    axes[0][0].legend(frameon=False)
    figure.savefig(path or Path(folder) / "sweep.png", dpi=150)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figure", choices=["curves", "mosaic", "sweep"])
    parser.add_argument("source", type=Path, help="a run's folder, a trajectories.jsonl, or a sweep's folder")
    parser.add_argument("png", type=Path, nargs="?", help="where to write")
    args = parser.parse_args()
    if args.figure == "curves":
        plot_curves(args.source, args.png)
        print(table(args.source))
    elif args.figure == "sweep":
        plot_sweep(args.source, args.png)
        print(sweep_table(args.source))
    else:       # the last success with the most kinds and sessions: the one that shows most
        best = max(read_lines(args.source), key=lambda t: (t["reward"], len(t["sessions"]) < 6, len(t["sessions"]), t["step"]))
        plot_mosaic(best, args.png or args.source.parent / "mosaic.png")


if __name__ == "__main__":
    main()
