"""What batches and loaders hold, and what a step makes of a batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from ml4cube.core.errors import InvalidTypeError

# Of samples of torchgeo, what a model gets and what it is to give.
_PAIR_OF_NAMES = ("image", "mask")

Weight = float | Tensor


class StepResult(NamedTuple):
    """The result of one forward pass."""

    # The mean over the batch's samples: a scalar that requires grad in training.
    loss: Tensor
    pred: Any = None
    target: Any = None
    # Further means over the batch's samples. Each adds columns to the History: ``train_<name>``
    # and ``val_<name>``.
    logs: Mapping[str, Any] = {}
    # NaN where the target has a gap that the loss does not leave out. It is read only to explain a
    # loss that is NaN.
    gaps: Tensor | None = None
    # Those that the batch brings, for metrics.
    weights: Tensor | None = None


class Portion(NamedTuple):
    """One of the batches of a step, and the weight of its mean loss."""

    # In the form that the loader gave it, on the device of the run.
    batch: Any
    samples: int
    # What `Step.weigh` returned, or else the number of samples.
    weight: Weight


def as_pair(batch: Any) -> tuple[Tensor, Tensor]:
    """Return the features and the target of a batch."""
    match batch:
        case [Tensor() as features, Tensor() as target]:
            return features, target
        case [Tensor() as features, Tensor() as target, Tensor()]:  # with weights
            return features, target
        # X alone, or the variables of a dict as channels, are what the model is to reconstruct.
        case (Tensor() as features) | [Tensor() as features]:
            return features, features
        case Mapping() if _are_variables(batch):
            features = torch.stack(tuple(batch.values()), dim=1)
            return features, features
        case Mapping():
            x, y = _PAIR_OF_NAMES if batch.keys() >= set(_PAIR_OF_NAMES) else ("x", "y")
            raise InvalidTypeError(
                "a dict as a batch must have tensors of one shape, the variables that the model is "
                f"to reconstruct, got {describe_batch(batch)}; make it a pair, by a collate_fn (in "
                f"prep_dataloader: callback) that returns batch[{x!r}], batch[{y!r}] of what "
                "default_collate gives"
            )
    length = ""
    if isinstance(batch, Sized):
        length = f" of {len(batch)} items"
    raise InvalidTypeError(
        "a batch must be (X, y), (X, y, weights), X alone, or a dict of tensors, got a "
        f"{type(batch).__name__}{length}"
    )


def _are_variables(batch: Mapping[str, Any]) -> bool:
    """Return True if all items of a batch are tensors of one shape, and no image with its mask."""
    if batch.keys() >= set(_PAIR_OF_NAMES):
        return False
    are_tensors = all(isinstance(value, Tensor) for value in batch.values())
    return are_tensors and len({value.shape for value in batch.values()}) == 1


def weights_of(batch: Any) -> Tensor | None:
    """Return the weights that a batch ``(X, y, weights)`` brings."""
    match batch:
        case [_, _, Tensor() as weights]:
            pass
        case _:
            return None
    if not weights.is_floating_point() and weights.dtype != torch.bool:
        raise InvalidTypeError(
            "the third item of a batch must be weights, floating or bool, got "
            f"{weights.dtype}; convert it by .float() if it weighs the samples, and leave it out, "
            "for example in a collate function, if it is an index"
        )
    return weights


def count_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the length of its first tensor."""
    first: Tensor | None = None
    if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):
        first = batch[0]  # as nearly always, without a search
    else:
        first = next(_tensors(batch), None)
    if first is None or first.ndim == 0:
        raise InvalidTypeError(
            f"a batch must hold a tensor with a sample axis, got a {type(batch).__name__}; let the "
            "loader collate samples into tensors"
        )
    return first.shape[0]


def agreed_samples(batch: Any) -> int | None:
    """Return the common length of all tensors of a batch, or None if they differ."""
    lengths = {int(tensor.shape[0]) for tensor in _tensors(batch) if tensor.ndim}
    if len(lengths) != 1:
        return None
    return lengths.pop()


def fixed_sizes(loader: Any) -> tuple[int, int, int] | None:
    """Return the number of batches, their size, and that of the last one; None if unknown."""
    if not getattr(loader, "keeps_samples", True):  # a loader of ours that may drop samples
        return None
    if isinstance(loader, DataLoader):
        if (
            isinstance(loader.dataset, IterableDataset)
            or loader.batch_size is None
            or loader.collate_fn is not default_collate
            or not isinstance(loader.sampler, Sized)
        ):
            return None
        samples = len(loader.sampler)
    elif hasattr(loader, "num_samples"):
        samples = int(loader.num_samples)
    else:
        return None
    batches, size = len(loader), int(loader.batch_size)
    full_batches, rest = divmod(samples, size)
    if batches == full_batches:
        return batches, size, size if batches else 0
    if batches == full_batches + 1 and rest:
        return batches, size, rest
    return None  # neither drop_last=True nor False gives that many batches


def named_sets(loader: Any) -> dict[str, Any]:
    """Return validation sets by name; the name of a single one is empty."""
    if isinstance(loader, Mapping):
        return dict(loader)
    return {"": loader}


def sets_by_argument(argument: str, loader: Any) -> dict[str, Any]:
    """Return validation sets by the expression that messages name them with: ``loader['sea']``."""
    if not isinstance(loader, Mapping):
        return {argument: loader}
    return {f"{argument}[{name!r}]": batches for name, batches in loader.items()}


def batch_limit(loader: Any, limit: float | None, name: str) -> int | None:
    """Return the largest number of batches to use; a float limit is a fraction of the loader."""
    if loader is None:
        return None
    if not isinstance(limit, float):
        return limit
    try:
        batches = len(loader)
    except TypeError:
        raise InvalidTypeError(
            f"{name}={limit!r} is a fraction of a loader without a length; give a count of batches"
        ) from None
    # Rounded, because 100 * 0.29 is 28.999999999999996 in floats.
    return max(1, int(round(batches * limit, 6)))


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the next epoch of a loader, or else of its sampler or data set."""
    for owner in (loader, *_samplers(loader), getattr(loader, "dataset", None)):
        if callable(getattr(owner, "set_epoch", None)):
            owner.set_epoch(epoch)
            return


def loader_generator(loader: Any) -> torch.Generator | None:
    """Return the random generator that a loader was given, if any."""
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator
    return None


def loader_seed(loader: Any) -> int | None:
    """Return the seed of a loader's shuffled order, if it has one of its own."""
    owners = [getattr(loader, "plan", None)]  # loaders and samplers of ours keep the seed there
    for sampler in _samplers(loader):
        owners += [getattr(sampler, "plan", None), sampler]
    seeds = (getattr(owner, "seed", None) for owner in owners)
    return next((seed for seed in seeds if isinstance(seed, int)), None)


def _samplers(loader: Any) -> list[Any]:
    # A loader with a batch sampler has a default sampler, too, that torch does not use.
    batches = getattr(loader, "batch_sampler", None)
    return [batches, getattr(batches, "sampler", None), getattr(loader, "sampler", None)]


@contextmanager
def kept_generators(loaders: Iterable[Any]) -> Iterator[None]:
    """Restore the state of the loaders' generators at the end of the body."""
    generators = [loader_generator(loader) for loader in loaders]
    states = [(g, g.get_state()) for g in generators if g is not None]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def data_facts(loader: Any) -> dict[str, Any]:
    """Return the names and statistics of the loader's data, for snapshots."""
    dataset = getattr(loader, "dataset", None)
    facts: dict[str, Any] = {}
    for name in ("features", "targets", "variables"):
        for owner in (dataset, getattr(dataset, "metadata", None)):
            names = getattr(owner, name, None)
            # A user's data set may have its arrays under such a name.
            if isinstance(names, str | tuple | list) and names:
                facts[name] = [names] if isinstance(names, str) else [str(item) for item in names]
                break
    statistics = statistics_of(dataset)
    if statistics is None:
        return facts
    return facts | {"statistics": statistics}


def statistics_of(dataset: Any) -> str | None:
    """Return the statistics of a data set as JSON, if it has any."""
    for owner in (dataset, getattr(dataset, "metadata", None)):
        to_json = getattr(getattr(owner, "statistics", None), "to_json", None)
        if callable(to_json):
            return str(to_json())
    return None


def describe_batch(batch: Any) -> str:
    """Describe a batch in an error that it caused."""
    if not isinstance(batch, Mapping):
        items = batch
        if not isinstance(batch, tuple | list):
            items = [batch]
        batch = dict(zip(("X", "y", "weights"), items, strict=False))
    arrays = {name: item for name, item in batch.items() if hasattr(item, "shape")}
    shapes = [f"{name} of shape {tuple(array.shape)}" for name, array in arrays.items()]
    return ", ".join(shapes) or "no tensor"


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch of nested lists, dicts and dataclasses, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, tuple | list):
        for item in batch:
            yield from _tensors(item)
    elif isinstance(batch, Mapping):
        yield from _tensors(list(batch.values()))
    elif is_dataclass(batch) and not isinstance(batch, type):
        yield from _tensors([getattr(batch, field.name) for field in fields(batch)])
