"""A Trainer whose steps you write: `train_step` and `test_step`.

Every call of `Trainer.run` makes a `Loop` that calls these steps. What one loop has reached is kept
in the Trainer (`TrainerState`), and the next loop continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import InvalidTypeError, check_choice
from ml4cube.training.addons.core import AddOnBase, combine
from ml4cube.training.addons.web_logger import web_loggers
from ml4cube.training.advanced import AdvancedTrainer
from ml4cube.training.callbacks import (
    Callback,
    EarlyStopping,
    ModelCheckpoint,
    as_callbacks,
    reporters,
)
from ml4cube.training.inputs.batches import agreed_samples, as_pair
from ml4cube.training.inputs.checks import check_count, check_model
from ml4cube.training.inputs.options import Options, pick_precision
from ml4cube.training.ranks.dist import join
from ml4cube.training.run.trainer_runs import TrainerRuns
from ml4cube.training.run.trainer_state import ProgressChecker
from ml4cube.training.state import History

__all__ = ["AdvancedTrainer", "EarlyStopping", "ModelCheckpoint", "ProgressChecker", "Trainer"]

DeviceOrDevices = str | torch.device | Sequence[str | torch.device] | None


class Trainer(TrainerRuns):
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
        "test": `run` only tests, and needs no optimizer. "train" or "min": `run` trains, and the
        epoch with the lowest `monitor` is the best. "max": `run` trains, and the epoch with the
        highest `monitor` is the best. The attribute `mode` is "train" or "test".
    optimizer : torch.optim.Optimizer, optional
        Made from the model's parameters; required for training.
    scheduler : object, optional
        Learning rate scheduler of torch or of `ml4cube.training.schedulers`.
    log_bar : bool
        The same as `progress`.
    gradient_clip : float
        Largest norm of the gradients; 0 clips nothing.
    loss : callable, optional
        ``loss(pred, target)`` → scalar tensor: the step where a subclass defines none.
    metrics : mapping, optional
        As for `ml4cube.training.pytorch.Trainer`, computed in testing. A `test_step` of your own
        must return ``"output"`` and ``"target"`` for them.
    use_amp : bool
        Whether to compute in half precision: bf16, or fp16 on a GPU without it.
    precision : {"fp32", "bf16", "fp16"}, optional
        The precision by name.
    callbacks : Callback or iterable of Callback
        Such as `EarlyStopping` and `ModelCheckpoint`.
    loggers : object or iterable of object
        Each with ``log(values, step)``; given every epoch's numbers.
    progress : bool
        Whether to show a bar and write a line to stderr for every epoch, on rank 0.
    web_logger : mapping, optional
        For `WandBLoggerAddon` and `NeptuneLoggerAddon`.
    **options : Any
        Further settings, as for `ml4cube.training.pytorch.Trainer`: ``snapshot_path``,
        ``save_every``, ``seed``, ``max_steps`` (over all calls of `run`), ``max_time``,
        ``gradient_accumulation_steps``, ``scheduler_step_on_batch``, ``limit_train_batches``,
        ``limit_val_batches``, ``fast_dev_run``, ``ema``, ``compile``, ``log_grad_norm``,
        ``find_unused_parameters``, ``strategy``, ``shard_modules``, ``monitor``,
        ``validate_every``, ``validate_every_steps``, ``version``.

    Attributes
    ----------
    log_train : dict of list
        Of the epoch under way, or the last one: by name, what `train_step` returned for each
        batch of this process, on the CPU once the epoch is over. Values other than single numbers
        stay in memory until the next epoch begins. Snapshots do not hold it: resumed inside an
        epoch, it has only the batches since, or none.
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

    add_ons: tuple[type[AddOnBase], ...] = ()  # all that are applied, the first one first

    def __init__(
        self,
        model: nn.Module,
        device: DeviceOrDevices = None,
        mode: str = "train",
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        log_bar: bool = True,
        gradient_clip: float | None = 0.0,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        metrics: Mapping[str, Any] | None = None,
        use_amp: bool = False,
        precision: str | None = None,
        callbacks: Iterable[Callback] = (),
        loggers: Iterable[Any] = (),
        progress: bool = True,
        web_logger: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        check_choice("mode", mode, ["train", "test", "min", "max"])
        check_model(model)
        web = web_loggers(web_logger, self.add_ons)
        world = join(device)
        chosen = Options.choose(
            Trainer,
            options,
            "run(n_epoch, ...)",
            gradient_clip=gradient_clip or None,
            mode={"max": "max"}.get(mode, "min"),
            precision=self._pick_precision(use_amp, precision, world.device),
        )
        self.mode = {"test": "test"}.get(mode, "train")
        super().__init__(
            model, optimizer, scheduler, loss, metrics=metrics, world=world, options=chosen
        )
        self.check_step(f"{self.mode}_step")
        if self.mode == "train":
            self._check_optimizer()
        self.log_bar = log_bar
        self._callbacks = [
            self._best,
            *reporters(log_bar and progress, loggers, web),
            *as_callbacks(callbacks),
        ]
        self._test_history = History()
        # False once a test_step has returned no "output".
        self._may_return_output = self._overrides("test_step")
        if not self.is_sharded:  # A sharded model may be too large for one device.
            self.model.to(world.device)

    # ------------------------------------------------- methods that subclasses define

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
        return {"loss": self.default_step("train_step")(self.model, batch).loss}

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
        return {"loss": self.default_step("test_step")(self.model, batch).loss}

    def count_samples(self, batch: Any) -> int | None:
        """Return how many samples a batch has; define it for batches of a kind of your own.

        The means that a step returns are weighted by it: in the History, in accumulated steps, and
        in averages over ranks.

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
        if self._may_return_output:
            output = self.test_step(batch).get("output")
            if output is not None:
                return output
            self._may_return_output = False
        return self.model(as_pair(batch)[0])

    # ------------------------------------------------- methods that users call

    def run(self, n_epoch: int, loader: Iterable[Any], valid_loader: Any = None) -> History:
        """Train, or test, for a number of epochs; called again, it continues.

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
            What every epoch gave so far; also in ``history``. In test mode, what this test gave:
            ``val_loss`` and the like.

        Raises
        ------
        RunError
            If a loss is not finite, another rank failed, or SIGTERM came.
        """
        check_count("n_epoch", n_epoch)
        if self.mode == "train":
            self._train(n_epoch, loader, valid_loader, ("run_epoch", "run_batch"))
            return self.history
        if valid_loader is not None:
            raise InvalidTypeError("mode='test' tests on loader; leave valid_loader out")
        self._test_history = History()
        for _ in range(n_epoch):
            self.run_epoch(loader)
        return self._test_history

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
        # Inside run(), the loop's step calls the override of this method and puts into `pending`
        # what the override's super().run_epoch() is to run: the loop's own pass.
        loop_method = self.pending.pop("run_epoch", None)
        if loop_method is not None:
            return loop_method(loader)
        if self.mode == "test":
            return self._test(loader)
        self._train(1, loader, None, ("run_batch",))
        last_row = {name: values[-1] for name, values in self.history.to_dict().items()}
        return {name: value for name, value in last_row.items() if value is not None}

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
        loop_method = self.pending.pop("run_batch", None)  # as in `run_epoch`
        if loop_method is not None:
            return loop_method(batch)
        if self.mode == "train":
            return self._train_batch(batch)
        row = self._evaluate([batch], wrapped=())
        return {name.removeprefix("val_"): value for name, value in row.items()}

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
        self.check_step("test_step")
        return self._evaluate(loader) | self.user_metrics()

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
        InvalidValueError
            If its samples hold several steps of a forecast, and no step of your own predicts them.
        """
        return self._predict(loader)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._world.device

    @property
    def precision(self) -> str:
        """The precision of the forward pass: fp32, bf16 or fp16."""
        return self._options.precision

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
            If one is not an add-on.
        """
        return combine(cls, add_on_cls)

    # ---------------------------------------------------------------------- internal

    def _overrides(self, name: str) -> bool:
        """Return True if a subclass or an add-on defines one of the methods of this class."""
        return getattr(type(self), name) is not getattr(Trainer, name)

    def _test(self, loader: Any) -> dict[str, Any]:
        self.log_reset()
        row = self.evaluate(loader)
        self.progress_checker.step += len(self.log_test["loss"])
        self.progress_checker.update_epoch()
        self._test_history.append(row)
        return row

    def _pick_precision(self, use_amp: bool, precision: Any, device: torch.device) -> str:
        """Return the precision; PrecisionMixerAddon overrides it."""
        return pick_precision(use_amp, precision, device)
