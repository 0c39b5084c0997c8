"""A Trainer whose steps you write: `train_step` and `test_step`, over the one `Loop`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, check_choice
from ml4cube.training.addons.core import AddOnBase, combine
from ml4cube.training.advanced import AdvancedTrainer
from ml4cube.training.callbacks import (
    Callback,
    EarlyStopping,
    LoggerCallback,
    ModelCheckpoint,
    Progress,
)
from ml4cube.training.events import as_callbacks
from ml4cube.training.ranks.dist import World, ddp_init
from ml4cube.training.run.batches import agreed_samples, as_pair
from ml4cube.training.run.checks import check_loss
from ml4cube.training.run.loop import Supervised
from ml4cube.training.run.options import Options, check_count, refuse_unknown
from ml4cube.training.run.progress import ProgressChecker
from ml4cube.training.run.stepwise import Device, Stepwise, default
from ml4cube.training.run.user_steps import Follow, joined
from ml4cube.training.state import History, TrainState

__all__ = ["AdvancedTrainer", "EarlyStopping", "ModelCheckpoint", "ProgressChecker", "Trainer"]


class Trainer(Stepwise):
    """Train with steps of your own: subclass it, or give a `loss`.

    A subclass defines ``train_step(batch)`` and ``test_step(batch)``, which call ``self.model``
    and return a dict: its ``"loss"``, the mean over the batch's samples, is trained on; every
    other single number in it becomes columns ``train_<name>`` and ``val_<name>`` of the History:
    means over samples, over all ranks. Other values are only collected, see `log_train`. A batch
    may be anything; `count_samples` says how many samples it has.

    The model keeps the weights of the last epoch, so that `run` can go on; `apply_weights` puts
    those of the best epoch into it.

    Runs on all ranks of the process group there is; without torchrun that is one process, and
    `MultiGPUAddon` starts more.

    Parameters
    ----------
    model : torch.nn.Module
        Moved to the device, and trained in place.
    device : str, torch.device, list of them, or None
        Of a list, each rank of this machine takes its own. Default: the GPU of this rank, else
        the CPU.
    mode : {"train", "test", "min", "max"}
        Whether `run` trains, or only tests; testing needs no optimizer. "min" and "max" train, and
        say which way `monitor` is better; "train" is "min".
    optimizer : torch.optim.Optimizer, optional
        Made from the model's parameters; required for training.
    scheduler : object, optional
        Learning rate scheduler of torch or of `ml4cube.training.schedulers`.
    log_bar : bool
        The same as `progress`.
    scheduler_step_on_batch : bool
        Whether the scheduler moves on after every optimizer step, not every epoch.
    gradient_clip : float
        Largest norm of the gradients; 0 clips nothing.
    loss : callable, optional
        ``loss(pred, target)`` → scalar tensor: the step where a subclass defines none.
    metrics : mapping, optional
        As for `ml4cube.training.pytorch.Trainer`, computed in testing. A `test_step` of your own
        must return ``"output"`` and ``"target"`` for them.
    gradient_accumulation_steps : int
        Batches per optimizer step, weighted by their samples.
    use_amp : bool
        Whether to compute in half precision: fp16 on a GPU, bf16 elsewhere.
    precision : {"fp32", "bf16", "fp16"}, optional
        The precision by name.
    max_steps : int, optional
        Optimizer steps to take at most, over all calls of `run`.
    callbacks : Callback or iterable of Callback
        Such as `EarlyStopping` and `ModelCheckpoint`.
    loggers : object or iterable of object
        Each with ``log(values, step)``; given every epoch's numbers.
    snapshot_path : str or Path, optional
        File to save the full state of the run to, and to resume from.
    save_every : int
        Epochs between snapshots.
    seed : int, optional
        Seeds dropout and unseeded loaders for the time of training.
    progress : bool
        Whether to show a bar and write a line to stderr for every epoch, on rank 0.
    web_logger : mapping, optional
        For `WandBLoggerAddon` and `NeptuneLoggerAddon`.
    **options : Any
        Further settings, as for `ml4cube.training.pytorch.Trainer`: ``max_time``,
        ``limit_train_batches``, ``limit_val_batches``, ``fast_dev_run``, ``ema``, ``compile``,
        ``log_grad_norm``, ``find_unused_parameters``, ``strategy``, ``shard_modules``, ``monitor``,
        ``mode``, ``validate_every``, ``validate_every_steps``.

    Attributes
    ----------
    log_train : dict of list
        Of the epoch under way, or the last one: by name, what `train_step` returned for each
        batch of this process, on the CPU once the epoch is over. What is no single number stays
        in memory until the next epoch begins. Snapshots do not hold it: resumed inside an epoch,
        it has only the batches since, or none.
    log_test : dict of list
        The same of `test_step`, in validation and in testing.
    history : History
        What every epoch gave.
    progress_checker : ProgressChecker
        Epochs and steps so far.
    best_epoch : int or None
        The epoch, from 1, that `monitor` chose; by default the one with the least validation loss,
        or training loss without validation.
    best_loss : float or None
        Its value.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work; nothing has been started then.

    Examples
    --------
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> x = torch.linspace(0, 1, 32).reshape(-1, 1)
    >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
    >>> class Regression(Trainer):
    ...     def train_step(self, batch):
    ...         features, target = batch
    ...         error = self.model(features) - target
    ...         return {"loss": error.pow(2).mean(), "mae": error.abs().mean()}
    ...
    ...     def test_step(self, batch):
    ...         return self.train_step(batch)
    >>> model = nn.Linear(1, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> trainer = Regression(model, device="cpu", mode="train", optimizer=optimizer)
    >>> history = trainer.run(n_epoch=2, loader=loader, valid_loader=loader)
    >>> [name for name in history if "mae" in name]
    ['train_mae', 'val_mae']
    """

    add_ons: tuple[type[AddOnBase], ...] = ()

    def __init__(
        self,
        model: nn.Module,
        device: Device = None,
        mode: str = "train",
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        log_bar: bool = True,
        scheduler_step_on_batch: bool = False,
        gradient_clip: float | None = 0.0,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        metrics: Mapping[str, Any] | None = None,
        gradient_accumulation_steps: int = 1,
        use_amp: bool = False,
        precision: str | None = None,
        max_steps: int | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Any] = (),
        snapshot_path: str | Path | None = None,
        save_every: int = 10,
        seed: int | None = None,
        progress: bool = True,
        web_logger: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_choice("mode", mode, ["train", "test", "min", "max"])
        if mode in ("min", "max"):
            options["mode"], mode = mode, "train"
        if not isinstance(model, nn.Module):
            raise InvalidTypeError(f"model={model!r} is no torch.nn.Module; give the model itself")
        _refuse_web_logger(web_logger)
        self.loss_step = None if loss is None else Supervised(check_loss("loss", loss))
        self.mode = mode
        self._check_step("train_step" if mode == "train" else "test_step")
        ddp_init()
        self._world = World.current(self._own_device(device))
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self._options: dict[str, Any] = {
            "max_steps": max_steps,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "gradient_clip": gradient_clip or None,
            "precision": self._pick_precision(use_amp, precision, self._world.device),
            "scheduler_step_on_batch": scheduler_step_on_batch,
            "seed": seed,
            "snapshot_path": snapshot_path,
            "save_every": save_every,
            **options,
        }
        refuse_unknown(Trainer, options, "run(n_epoch, ...)")
        Options(**self._options)  # refuses here, not in run
        self._metrics = metrics
        self.log_bar = log_bar
        shown: list[Callback] = [Progress()] if log_bar and progress else []
        self._callbacks: list[Callback] = [
            Follow(self),
            *shown,
            LoggerCallback(loggers),
            *as_callbacks(callbacks),
        ]
        self.progress_checker = ProgressChecker()
        self.log_train, self.log_test = defaultdict(list), defaultdict(list)
        self.history = History()
        self.best_epoch: int | None = None
        self.best_loss: float | None = None
        self.best_weights: dict[str, torch.Tensor] | None = None
        self._state, self._scaler_state = TrainState(), {}
        self._ema_state: dict[str, Any] = {}
        self._tested = History()
        self._goal = 0  # epochs asked for so far
        self._started, self._running = False, None
        self._gives_output = self.overrides("test_step")  # as far as is known
        self._inner: dict[str, Callable[[Any], None]] = {}
        self.under_way: set[str] = set()
        if mode == "train":
            self._check_optimizer()
        if not self._is_cut:  # which may not fit on one device
            self.model.to(self._world.device)

    # ------------------------------------------------------------------ yours to define

    @default
    def train_step(self, batch: Any) -> dict[str, Any]:
        """Return what one training batch gives; define it in a subclass.

        Parameters
        ----------
        batch : Any
            As the loader gives it, on the device.

        Returns
        -------
        dict
            ``"loss"``, and whatever else is to be averaged or collected.
        """
        return self._loss_only(batch)

    @default
    def test_step(self, batch: Any) -> dict[str, Any]:
        """Return what one batch gives in validation or testing; define it in a subclass.

        Parameters
        ----------
        batch : Any
            As the loader gives it, on the device; the model is in eval mode, without gradients.

        Returns
        -------
        dict
            ``"loss"``, and whatever else is to be averaged or collected.
        """
        return self._loss_only(batch)

    @default
    def count_samples(self, batch: Any) -> int | None:
        """Return how many samples a batch has; define it for batches of a kind of your own.

        It is what the means that a step returns weigh: in the History, in accumulated steps, and
        beside the batches of other ranks.

        Parameters
        ----------
        batch : Any
            As the loader gives it, on the device: whatever your steps take, such as a graph.

        Returns
        -------
        int or None
            0 for a batch to leave out. By default, the length of the first axis of all its
            tensors; None where they differ, or there is none: then every batch counts the same,
            and a warning says so.
        """
        return agreed_samples(batch)

    @default
    def metric_on_epoch_end(self) -> Mapping[str, float] | None:
        """Return metrics of your own, from `log_train` and `log_test`; define it in a subclass.

        It is called on every rank after validation, or testing, with the logs of all ranks.

        Returns
        -------
        mapping of str to float, or None
            Columns of the History.
        """
        return None

    def predict_step(self, batch: Any) -> Any:
        """Return the predictions for one batch; used by `inference`.

        Parameters
        ----------
        batch : Any
            As the loader gives it, on the device.

        Returns
        -------
        torch.Tensor, or tuple or dict of them
            ``"output"`` of `test_step` where it returns one, else what the model gives for the
            batch, or for the first of a pair.
        """
        if self._gives_output:
            output = self.test_step(batch).get("output")
            if output is not None:
                return output
            self._gives_output = False
        return self.model(as_pair(batch)[0])

    # ---------------------------------------------------------------------- running

    def run(self, n_epoch: int, loader: Iterable[Any], valid_loader: Any = None) -> History:
        """Train, or test, for a number of epochs; called again, it goes on.

        Parameters
        ----------
        n_epoch : int
            How many. With `snapshot_path`, a run that finds a snapshot of itself trains what is
            left of them.
        loader : iterable
            Batches to train on; in test mode, to test on.
        valid_loader : iterable, or mapping of str to iterable, optional
            Batches to test on after every epoch of training; several sets by name each have
            columns of their own.

        Returns
        -------
        History
            What every epoch gave so far; also in `history`. In test mode, what this test gave:
            ``val_loss`` and the like.

        Raises
        ------
        RunError
            If a loss is not finite, another rank failed, or SIGTERM came.
        """
        check_count("n_epoch", n_epoch)
        if self.mode == "train":
            self._train(n_epoch, loader, valid_loader)
        elif valid_loader is not None:
            raise InvalidTypeError("mode='test' tests on loader; leave valid_loader out")
        else:
            self._tested = History()
            for _ in range(n_epoch):
                self.run_epoch(loader)
            return self._tested
        return self.history

    @default
    def run_epoch(self, loader: Iterable[Any]) -> dict[str, Any] | None:
        """Train for one epoch without validation, or test once; an add-on may override it.

        Where it is overridden, `run` calls the override around every pass over a loader, with
        `mode` "train" or "test".

        Parameters
        ----------
        loader : iterable
            Its batches.

        Returns
        -------
        dict or None
            The row of the History; None inside `run`.
        """
        if self._hand_on("run_epoch", loader):
            return None
        with self._from_outside("run_epoch"):
            if self.mode == "train":
                self._train(1, loader, None)
                last = {name: values[-1] for name, values in self.history.to_dict().items()}
                return {name: value for name, value in last.items() if value is not None}
            return self._test(loader)

    @default
    def run_batch(self, batch: Any) -> dict[str, float] | None:
        """Take one training step over a batch, or test on it; an add-on may override it.

        Where it is overridden, `run` calls the override around every batch.

        Parameters
        ----------
        batch : Any
            As a loader gives it.

        Returns
        -------
        dict or None
            Its numbers by name; None inside `run`.
        """
        if self._hand_on("run_batch", batch):
            return None
        with self._from_outside("run_batch"):
            if self.mode == "test":
                tested = self._make_loop(None, None).evaluate([batch])
                return {name.removeprefix("val_"): value for name, value in tested.items()}
            if self._is_cut:
                raise InvalidTypeError("strategy='fsdp' trains in run() only; call that")
            loop = self._make_loop([batch], None)
            if loop.ema is not None:
                loop.ema.apply(False)
            result = loop.train_batch(batch)
            self._take_from(loop)
            found: dict[str, Any] = {"loss": result.loss, **result.logs}
            return {name: float(torch.as_tensor(v).detach()) for name, v in found.items()}

    def evaluate(self, loader: Any) -> dict[str, Any]:
        """Test once, exactly on any number of ranks; every rank must call this.

        Parameters
        ----------
        loader : iterable, or mapping of str to iterable
            Batches to test on, or several sets by name.

        Returns
        -------
        dict of str to float
            ``val_loss``, metrics, and ``val_<name>`` for what `test_step` returns besides.

        Raises
        ------
        EmptyPartError
            If it gives no sample.
        """
        self._check_step("test_step")
        row: dict[str, Any] = dict(self._make_loop(None, None).evaluate(loader))
        return row | self.own_metrics()

    def inference(self, loader: Iterable[Any]) -> Any:
        """Return the model's predictions for every sample of a loader, in its order.

        Parameters
        ----------
        loader : iterable
            Batches, of which `predict_step` is given one after the other; on several ranks,
            every rank predicts what its own loader gives.

        Returns
        -------
        torch.Tensor, or tuple or dict of them
            On the CPU, samples first, computed in eval mode without gradients.

        Raises
        ------
        EmptyPartError
            If the loader gives no batch.
        """
        loop, training = self._make_loop(None, None), self.model.training
        try:
            return joined(list(loop.predict(loader, self._predict)))
        finally:
            self.model.train(training)

    @property
    def device(self) -> torch.device:
        """What this rank computes on."""
        return self._world.device

    @property
    def precision(self) -> str:
        """What the forward pass computes in: fp32, bf16 or fp16."""
        precision: str = self._options["precision"]
        return precision

    @classmethod
    def add_on(cls, *add_on_cls: type[AddOnBase]) -> Any:
        """Return a subclass with add-ons applied, the first one first.

        Parameters
        ----------
        *add_on_cls : type
            Subclasses of `ml4cube.training.addons.AddOnBase`. One that is there already is not
            added again.

        Returns
        -------
        type
            The subclass; it and its objects can be pickled if the add-ons can be imported.

        Raises
        ------
        InvalidTypeError
            If one is no add-on.
        """
        return combine(cls, add_on_cls)


def _refuse_web_logger(rest: Mapping[str, Any] | None) -> None:
    """Refuse services that no add-on has taken out."""
    known = {"wandb": "WandBLoggerAddon", "neptune": "NeptuneLoggerAddon"}
    if rest is not None and not isinstance(rest, Mapping):
        raise InvalidTypeError(
            f"web_logger={rest!r} is no mapping; write {{'wandb': {{'project': 'name'}}}}"
        )
    for name in rest or {}:
        check_choice("web_logger", name, known)
        raise InvalidTypeError(
            f"web_logger has {name!r}, but this Trainer has no {known[name]}; make it with "
            f"Trainer.add_on({known[name]})"
        )
