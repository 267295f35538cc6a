"""The figures, from what a run wrote.

    python figures/plot.py curves RUN [PNG]         # learning curves of every method in a run's folder -> RUN/curves.png
    python figures/plot.py mosaic TRAJECTORIES [PNG]    # one attempt as a mosaic of its sessions -> mosaic.png beside it

Colours are Okabe and Ito's, which colour-blind readers can tell apart; in print they differ by line style or label too.
"""
import argparse
import json
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
    columns = {"success    ": "success", "greedy": "success_greedy", "on the way": "on_the_way", "sessions": "sessions",
               "per success": "sessions_per_success", "tokens per success": "tokens_per_success", "out of turns": "out_of_turns"}
    runs = {method: [line for line in lines if "eval_success" in line] for method, lines in read_run(run).items()}
    pages = next(iter(runs.values()))[0]["eval_sessions_by_pages"]
    shown = list(pages) if len(pages) <= 4 else []
    head = ["method", *columns, *(f"sessions, {count} pages" for count in shown), "minutes"]
    rows = [head]
    if any(len(lines) > 1 for lines in runs.values()):      # else nothing was trained: every method is the start
        runs = {"(start)": next(iter(runs.values()))[:1], **runs}
    for name, lines in runs.items():
        way = [line["eval_success"] for line in lines if line["step"]] or [None]
        last = lines[-1] | {"eval_on_the_way": None if None in way else sum(way) / len(way)}
        values = [last[f"eval_{key}"] for key in columns.values()] + [last["eval_sessions_by_pages"].get(count) for count in shown]
        seconds = sum(s for line in read_run(run).get(name, []) for key, s in line.items() if key.startswith("seconds"))
        if last.get("eval_success_interval") is not None:
            values[0] = f"{values[0]:.2f} ± {last['eval_success_interval']:.2f}"
        rows.append([name, *("" if v is None else v if isinstance(v, str) else f"{v:.2f}" if v < 10 else f"{v:.0f}" for v in values),
                     f"{seconds / 60:.1f}" if seconds else ""])
    rows = [[f"{row[0]:9}", *(f"{cell:>{len(title)}}" for cell, title in zip(row[1:], head[1:]))] for row in rows]
    rows.insert(1, ["-" * len(cell) for cell in rows[0]])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
        gain = "no gain: it only closes" if session["gain"] is None else f"gain {round(session['gain'], 2) + 0:+.2f}"
        tiles.text(left + width / 2, .56, f"{session['kind']}\n{width} tokens\nended by: {session['stop']}", ha="center", va="bottom", fontsize=7)
        tiles.text(left + width / 2, -.56, f"{session['score_before']:.2f} → {session['score_after']:.2f}\n{gain}", ha="center", va="top", fontsize=7)
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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("figure", choices=["curves", "mosaic"])
    parser.add_argument("source", type=Path, help="a run's folder, or a trajectories.jsonl")
    parser.add_argument("png", type=Path, nargs="?", help="where to write")
    args = parser.parse_args()
    if args.figure == "curves":
        plot_curves(args.source, args.png)
        print(table(args.source))
    else:       # the last success with the most kinds and sessions: the one that shows most
        best = max(read_lines(args.source), key=lambda t: (t["reward"], len(t["sessions"]) < 6, len(t["sessions"]), t["step"]))
        plot_mosaic(best, args.png or args.source.parent / "mosaic.png")


if __name__ == "__main__":
    main()
