"""Figures from what a run wrote.

    python figures/plot.py curves RUN_FOLDER            # learning curves of every method -> curves.png
"""
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_curves(metrics, path):
    fig, ax = plt.subplots()
    for method, file in metrics.items():
        lines = [json.loads(line) for line in open(file)]
        e = [l for l in lines if "eval_success" in l]
        ax.plot([l["step"] for l in e], [l["eval_success"] for l in e], label=method)
    ax.legend()
    fig.savefig(path)
