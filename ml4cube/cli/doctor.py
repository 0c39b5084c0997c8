"""`doctor`: what is damaged or slow in a store, a run or an environment, and what to change."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ml4cube.cli.command import Command
from ml4cube.cli.configuration import read_file
from ml4cube.cli.files import BEST, CONFIG, SNAPSHOT
from ml4cube.cli.inputs import samples_of
from ml4cube.cli.task import FAILED, Keep, Report, Task, as_table
from ml4cube.core.errors import CubeError, InvalidValueError

# Extras whose packages most users need.
_EXTRAS = ("torch", "netcdf")
OK, WARNING, ERROR = "ok", "warning", "error"
# Fractions from which something is worth a warning.
_DROPPED, _WAITS, _LEAST_FREE_GB = 0.5, 0.2, 5


class Finding(NamedTuple):
    """What was found out, and what to do about it."""

    level: str
    subject: str
    found: str
    advice: str = ""


def doctor(target: str | None = None, /, *, verify: bool = True) -> Task:
    """Check a sample store, a run of ml4cube train, or this environment: what to change.

    Exit code 1 if something is damaged or missing.

    Parameters
    ----------
    target : path or URL, optional
        Sample store, or folder of a run. Default: packages and devices of this machine.
    verify : bool
        Whether to read and hash every file of a store.
    """
    if target is not None and "://" not in target and not os.path.exists(target):
        raise InvalidValueError(f"target {target} does not exist")
    is_run = target is not None and any((Path(target) / n).exists() for n in (CONFIG, SNAPSHOT))
    kind = "environment" if target is None else "run" if is_run else "sample store"

    def run(keep: Keep) -> Report:
        if target is None:
            findings = [*_packages(), *_machine()]
        else:
            findings = list(_run(Path(target)) if is_run else _store(target, verify))
        rows = [finding._asdict() for finding in findings]
        code = 0
        if any(finding.level == ERROR for finding in findings):
            code = FAILED
        return Report({"kind": kind, "target": target, "findings": rows}, as_table(rows), code)

    return Task(lambda: Report.of(kind=kind, target=target, verify=verify), run)


def _packages() -> Iterator[Finding]:
    """Compare the packages that are installed with those that ml4cube needs."""
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires("ml4cube") or ()
    except importlib.metadata.PackageNotFoundError:
        yield Finding(WARNING, "ml4cube", "is not installed, but on the path", "pip install -e .")
        return
    for text in required:
        needed = Requirement(text)
        marker = needed.marker
        extras = ("", *_EXTRAS)
        wanted = [marker is None or marker.evaluate({"extra": extra}) for extra in extras]
        if not any(wanted):
            continue
        is_optional = not wanted[0]
        advice = f'pip install "{needed.name}{needed.specifier}"'
        try:
            version = importlib.metadata.version(needed.name)
        except importlib.metadata.PackageNotFoundError:
            level = ERROR
            if is_optional:
                level = WARNING
            yield Finding(level, needed.name, "is not installed", advice)
            continue
        is_new = needed.specifier.contains(version, prereleases=True)
        yield Finding(OK if is_new else ERROR, needed.name, version, "" if is_new else advice)


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    yield Finding(OK, "cores", f"{cores}, OMP_NUM_THREADS={threads}")
    free_gb = shutil.disk_usage(".").free / 1e9
    is_full = free_gb < _LEAST_FREE_GB
    advice = ""
    if is_full:
        advice = "free space, or write to another disk"
    yield Finding(WARNING if is_full else OK, "disk", f"{free_gb:,.0f} GB free here", advice)
    try:
        from ml4cube.training import torch
    except ModuleNotFoundError:
        return
    built = torch.version.cuda or torch.version.hip
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count()))
        yield Finding(OK, "GPU", names)
    elif built:
        advice = "check the driver (nvidia-smi), or CUDA_VISIBLE_DEVICES"
        yield Finding(WARNING, "GPU", f"torch is built for {built}, but finds none", advice)
    else:
        yield Finding(OK, "GPU", "torch is built for the CPU")


def _store(target: str, verify: bool) -> Iterator[Finding]:
    from ml4cube.datasets.store import StoreMetadata, open_store
    from ml4cube.sampling.identity.provenance import versions

    try:
        store = open_store(target, verify=verify)
    except CubeError as error:
        advice = "ml4cube rerun makes a store again; ml4cube inspect is for cubes"
        yield Finding(ERROR, "files", str(error), advice)
        return
    metadata = StoreMetadata.of(store)
    checked = "all files have their size"
    if verify:
        checked = "every byte is as written"
    yield Finding(OK, "files", f"{metadata.part}: {store.sizes['samples']:,} samples, {checked}")
    yield _dropped(metadata.accounting)
    yield from _provenance(metadata.provenance, versions())
    try:
        yield _mixing(target)
    except ModuleNotFoundError as error:
        yield Finding(WARNING, "shuffle", str(error))


def _dropped(accounting: Any) -> Finding:
    """Say how many windows of the cube became no sample, and why."""
    reasons = {n: k for n, k in accounting.items() if n not in ("total", "train", "test", "val")}
    share = sum(reasons.values()) / max(accounting["total"], 1)
    shown = ", ".join(f"{name} {n:,}" for name, n in reasons.items() if n)
    problem = f"{share:.0%} of {accounting['total']:,} dropped" + (f": {shown}" if shown else "")
    if share <= _DROPPED:
        return Finding(OK, "windows", problem)
    most = max(reasons, key=lambda name: reasons[name])
    advice = {
        "gap": "--drop-nan if_all_nan, with --fill-method",
        "mask": "--no-drop-sample",
        "straddle": "blocks that are multiples of the window, or smaller windows",
        "buffer": "a smaller buffer, or larger blocks",
        "edge": "windows that divide the cube",
        "unused": "a larger --data-fraq",
    }[most]
    return Finding(WARNING, "windows", problem, advice)


def _provenance(provenance: Any, now: dict[str, str]) -> Iterator[Finding]:
    """Check whether the store could be made again, and whether chunks of its source were absent."""
    then = provenance.get("versions", {})
    changed = [f"{n} {then.get(n)} → {v}" for n, v in now.items() if then.get(n) != v]
    if changed:
        advice = "install those versions to rerun it; reading is not affected"
        yield Finding(WARNING, "versions", ", ".join(changed), advice)
    source = provenance.get("source")
    if source is None:
        yield Finding(WARNING, "source", "a cube in memory", "it cannot be rerun")
    elif "://" not in source and not os.path.exists(source):
        yield Finding(WARNING, "source", f"{source} is gone", "it cannot be rerun")
    else:
        yield Finding(OK, "source", source)
    for name, number in provenance.get("absent_chunks", {}).items():
        problem = (
            f"{number:,} chunks of {name!r} were absent in the source, and read as fill values"
        )
        yield Finding(WARNING, "source", problem, "--missing-chunks raise refuses such a source")


def _mixing(target: str) -> Finding:
    """Say how well batches of 32 are mixed by a loader with default arguments."""
    from ml4cube.datasets.pytorch import prep_dataloader

    try:
        data = samples_of(target, {"to_pred": None})
        loader = prep_dataloader(data, batch_size=min(32, len(data)))
        report = str(loader.shuffle_report())
    except InvalidValueError as error:
        return Finding(WARNING, "shuffle", str(error))
    problem, _, advice = report.partition("; ")
    return Finding(WARNING if advice else OK, "shuffle", problem, advice)


def _run(folder: Path) -> Iterator[Finding]:
    from ml4cube.datasets.store import open_store
    from ml4cube.training.files.checkpoint import read_file as read_weights

    try:
        config = read_file(str(folder / CONFIG))
    except CubeError as error:
        config = {}
        yield Finding(ERROR, CONFIG, str(error), "the command that trains writes it again")
    for name in ("train_store", "val_store"):
        if config.get(name) is None:
            continue
        try:
            open_store(config[name])
        except CubeError as error:
            yield Finding(ERROR, name, str(error), "ml4cube rerun, or another path")
        else:
            yield Finding(OK, name, config[name])
    for name in (BEST, SNAPSHOT):
        try:
            content = read_weights(folder / name)
        except CubeError as error:
            yield Finding(ERROR, name, str(error), "restore a copy, or train again")
            continue
        if name == BEST:
            yield Finding(OK, name, f"{len(content):,} tensors")
        else:
            yield from _progress(content)


def _progress(snapshot: dict[str, Any]) -> Iterator[Finding]:
    """Say how far a run is, and what its ranks wait for."""
    from ml4cube.training.reports import RankReport

    state, history = snapshot["state"], snapshot["history"]
    if state["batch"]:
        state_text = f"stopped inside epoch {state['epoch'] + 1}, after {state['step']:,} steps"
        yield Finding(WARNING, SNAPSHOT, state_text, "the command that trains goes on from here")
    else:
        yield Finding(OK, SNAPSHOT, f"{state['epoch']} epochs, {state['step']:,} steps")
    if not history.get("ranks"):
        return
    row = {name: values[-1] for name, values in history.items()}
    ranks = row["ranks"]
    for name, cause, advice in (
        ("data_wait", "data", "data nearer to this machine, or more of --set loader.num_workers="),
        ("communicate", "one another", "larger batches, or --gradient-accumulation-steps"),
    ):
        shares = [rank[name] for rank in ranks if rank.get(name) is not None]
        if shares:
            mean = sum(shares) / len(shares)
            level, advice = (WARNING, advice) if mean > _WAITS else (OK, "")
            yield Finding(level, "ranks", f"wait {mean:.0%} of the time for {cause}", advice)
    sentence = RankReport.table(row).splitlines()[len(ranks) + 3 :]
    if sentence:
        yield Finding(WARNING, "ranks", sentence[0], "a faster disk or device for that rank")


DOCTOR = Command(doctor)
