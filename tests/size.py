"""How much there is to read: syntax nodes, lines and the longest line of each of the four files. Not collected by pytest."""
import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main():
    total = [0, 0]
    for name in ("mosaic.py", "infogain.py", "rollout.py", "train.py"):
        text = (ROOT / name).read_text()
        nodes, lines = sum(1 for _ in ast.walk(ast.parse(text))), text.splitlines()
        total = [total[0] + nodes, total[1] + len(lines)]
        print(f"{name:12} {nodes:6,} nodes {len(lines):6,} lines, the longest {max(map(len, lines))}")
    print(f"{'together':12} {total[0]:6,} nodes {total[1]:6,} lines")


if __name__ == "__main__":
    main()
