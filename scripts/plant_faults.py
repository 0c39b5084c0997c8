"""Plant random faults in modules and say which of them no test catches.

    python scripts/plant_faults.py ml4cube/core ml4cube/cube/scan.py --count 20 --seed 1

Works on a copy of the last commit. A fault is one change of one expression: a comparison or a sign
turned round, `and` for `or`, a number off by one, a `not` or a keyword left out. Run for each are
the tests that import the module, or one that imports it, then those of its folder, with the options
after `--`, to the first failure or the time limit. A survivor may be no fault at all: look at each.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TURNED = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is},
    **{ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
}


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions of a module, without annotations and texts."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "decorator_list", "pattern"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.expr) and not isinstance(child, ast.JoinedStr):
                yield child
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from expressions(child)


def faulty(node: ast.expr) -> ast.expr | None:
    """Return another expression in place of this one, if it can be a fault."""
    fault = copy.deepcopy(node)
    match fault:
        case ast.Compare() if type(fault.ops[0]) in TURNED:
            fault.ops[0] = TURNED[type(fault.ops[0])]()
        case ast.BinOp() | ast.BoolOp() if type(fault.op) in TURNED:
            fault.op = TURNED[type(fault.op)]()
        case ast.Constant() if type(fault.value) is int:
            fault.value += 1
        case ast.UnaryOp(op=ast.Not()):
            fault = fault.operand
        case ast.Call() if fault.keywords:
            fault.keywords.pop()
        case _:
            return None
    return fault


def plant(source: str, node: ast.expr, fault: ast.expr) -> str:
    """Return the source with one expression replaced."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    after = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + f"({ast.unparse(fault)})".encode() + after).decode()


def files_that_import(module: Path, files: list[Path], tree: Path) -> list[Path]:
    """Return the files that import a module of ml4cube."""
    dotted = ".".join(module.with_suffix("").parts)
    parent, _, name = dotted.rpartition(".")
    needed = (dotted, f"from {parent} import {name}")
    texts = {path.relative_to(tree): path.read_text() for path in files}
    return [path for path, text in texts.items() if any(words in text for words in needed)]


def tests_of(module: Path, tree: Path) -> list[str]:
    """Return the test files that import a module, or one that imports it, then its folder."""
    tests = sorted((tree / "tests").rglob("test_*.py"))
    users = files_that_import(module, sorted((tree / "ml4cube").rglob("*.py")), tree)
    chosen = [path for one in (module, *users) for path in files_that_import(one, tests, tree)]
    folder = Path("tests", module.parts[1])
    if (tree / folder).is_dir():
        chosen.append(folder)
    return list(dict.fromkeys(map(str, chosen)))


def outcome(tree: Path, tests: list[str], options: list[str], limit_s: float) -> str:
    """Run tests one file after another, until one fails or does not end."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    pytest = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
    for path in tests:
        command = [*pytest, *options, path]
        try:
            run = subprocess.run(
                command, cwd=tree, env=environment, capture_output=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired:
            return "no end"
        if run.returncode not in (0, 5):  # 5: no test was chosen
            return "caught"
    return "survived"


def main() -> None:
    """Plant faults one by one, and print which were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="+", type=Path, help="files or folders of ml4cube")
    parser.add_argument("--also", nargs="+", default=[], help="tests to run for every fault")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=600)
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args, options = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", "HEAD"], check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        places = []
        for module in args.modules:
            path = tree / module
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                for node in expressions(ast.parse(file.read_text())):
                    fault = faulty(node)
                    if fault is not None:
                        places.append((file, node, fault))
        survivors = 0
        for file, node, fault in random.Random(args.seed).sample(places, args.count):
            source, module = file.read_text(), file.relative_to(tree)
            file.write_text(plant(source, node, fault))
            word = outcome(tree, tests_of(module, tree) + args.also, options, args.limit_s)
            file.write_text(source)
            survivors += word == "survived"
            change = f"{ast.unparse(node)[:60]}  ->  {ast.unparse(fault)[:60]}"
            print(f"{word:8} {module}:{node.lineno} {change}", flush=True)
    print(f"{args.count - survivors} of {args.count} caught")


if __name__ == "__main__":
    main()
