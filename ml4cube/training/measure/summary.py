"""What trainers print: how far they are, and what they train on what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from ml4cube.core.display import Summary, counted, shown
from ml4cube.training.inputs.batches import fixed_sizes
from ml4cube.training.inputs.options import Options
from ml4cube.training.ranks.dist import World
from ml4cube.training.state import History


def summary_of_run(
    progress: str,
    monitor: str | None,
    best: tuple[int, float] | None,
    next_step: str,
    facts: Mapping[str, object],
    history: History,
) -> Summary:
    """Return the summary of a trainer; `best` is the best epoch by `monitor`, and its value."""
    if best is not None:
        progress += f"; best {monitor} {shown(best[1])} in epoch {best[0]}"
    rows = None
    if len(history):
        rows = history
    return Summary(progress, {"Next": next_step, **facts}, {"History": rows})


def run_facts(
    model: nn.Module, world: World, options: Options, optimizer: Any, scheduler: Any
) -> dict[str, object]:
    """Return model, optimizer, device and files of a run."""
    rank = ""
    if world.size != 1:
        rank = f", rank {world.rank} of {world.size}, {options.strategy}"
    saved = counted(options.save_every, "epoch")
    snapshot = options.snapshot_path
    return {
        "Model": model_text(model),
        "Optimizer": optimizer_text(optimizer),
        "Scheduler": None if scheduler is None else type(scheduler).__name__,
        "Device": f"{world.device}{rank}, {options.precision}",
        "Snapshot": None if snapshot is None else f"{snapshot}, every {saved}",
    }


def model_text(model: nn.Module) -> str:
    """Return the class of a model and the number of its parameters."""
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    text = f"{type(model).__name__}, {counted(total, 'parameter')}"
    if trained == total:
        return text
    return f"{text}, {trained:,} of them trained"


def optimizer_text(optimizer: Any) -> str | None:
    """Return the class of an optimizer and its learning rates."""
    if optimizer is None:
        return None
    rates = dict.fromkeys(f"{float(group['lr']):.4g}" for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}, lr {', '.join(rates)}"


def data_text(data: Any) -> str | None:
    """Return the number of batches of a loader, or of loaders by name."""
    if data is None:
        return None
    if isinstance(data, Mapping):
        return "; ".join(f"{name}: {data_text(loader)}" for name, loader in data.items())
    sizes = fixed_sizes(data)
    if sizes is not None:
        return f"{counted(sizes[0], 'batch', 'batches')} of {counted(sizes[1], 'sample')}"
    try:
        return f"{type(data).__name__} of {counted(len(data), 'batch', 'batches')}"
    except TypeError:  # it has no length
        return type(data).__name__
