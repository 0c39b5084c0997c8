"""A Trainer whose steps you write: `train_step` and `test_step`, over the one `Loop`."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError, check_choice
from ml4cube.training.addons.core import AddOnBase, combine
from ml4cube.training.addons.web_logger import web_loggers
from ml4cube.training.advanced import AdvancedTrainer
from ml4cube.training.callbacks import EarlyStopping, ModelCheckpoint, note_best, reporting
from ml4cube.training.events import Callback, as_callbacks, as_list
from ml4cube.training.inputs.batches import agreed_samples, as_pair
from ml4cube.training.inputs.checks import check_loss, check_model
from ml4cube.training.inputs.options import Options, check_count, pick_precision
from ml4cube.training.ranks.dist import World, ddp_init, local_rank
from ml4cube.training.run.loop import Loop
from ml4cube.training.run.supervised_step import Supervised
from ml4cube.training.run.trainer_state import ProgressChecker, TrainerState
from ml4cube.training.run.user_steps import FollowTrainer, UserStep
from ml4cube.training.state import History

__all__ = ["AdvancedTrainer", "EarlyStopping", "ModelCheckpoint", "ProgressChecker", "Trainer"]

logger = logging.getLogger(__name__)

Device = str | torch.device | Sequence[str | torch.device] | None


class Trainer(TrainerState):
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
    gradient_clip : float
        Largest norm of the gradients; 0 clips nothing.
    loss : callable, optional
        ``loss(pred, target)`` → scalar tensor: the step where a subclass defines none.
    metrics : mapping, optional
        As for `ml4cube.training.pytorch.Trainer`, computed in testing. A `test_step` of your own
        must return ``"output"`` and ``"target"`` for them.
    use_amp : bool
        Whether to compute in half precision: fp16 on a GPU, bf16 elsewhere.
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
        ``validate_every``, ``validate_every_steps``.

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
        arguments = dict(locals())
        check_choice("mode", mode, ["train", "test", "min", "max"])
        check_model(model)
        loggers = [*as_list(loggers), *web_loggers(web_logger, self.add_ons)]
        ddp_init()
        world = World.current(_own_device(device))
        super().__init__(
            model,
            optimizer,
            scheduler,
            mode="test" if mode == "test" else "train",
            loss_step=None if loss is None else Supervised(check_loss("loss", loss)),
            metrics=metrics,
            world=world,
            options=Options.choose(
                Trainer,
                arguments,
                "run(n_epoch, ...)",
                gradient_clip=gradient_clip or None,
                mode=mode if mode in ("min", "max") else "min",
                precision=self._pick_precision(use_amp, precision, world.device),
            ),
        )
        self._check_step("train_step" if self.mode == "train" else "test_step")
        if self.mode == "train":
            self._check_optimizer()
        self.log_bar = log_bar
        self._follow = FollowTrainer(self)
        self._callbacks += [
            self._follow,
            *reporting(log_bar and progress, loggers),
            *as_callbacks(callbacks),
        ]
        self._tested = History()
        self._gives_output = self._overrides("test_step")  # as far as is known
        if not self._is_cut:  # which may not fit on one device
            self.model.to(world.device)

    # ------------------------------------------------------------------ yours to define

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
            What every epoch gave so far; also in `history`. In test mode, what this test gave:
            ``val_loss`` and the like.

        Raises
        ------
        RunError
            If a loss is not finite, another rank failed, or SIGTERM came.
        """
        check_count("n_epoch", n_epoch)
        if self.mode == "train":
            self._train(n_epoch, loader, valid_loader, wrapped=("run_epoch", "run_batch"))
        elif valid_loader is not None:
            raise InvalidTypeError("mode='test' tests on loader; leave valid_loader out")
        else:
            self._tested = History()
            for _ in range(n_epoch):
                self.run_epoch(loader)
            return self._tested
        return self.history

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
        work = self.pending.pop("run_epoch", None)
        if work is not None:  # inside run()
            return work(loader)
        if self.mode == "test":
            return self._test(loader)
        self._train(1, loader, None, wrapped=("run_batch",))
        last = {name: values[-1] for name, values in self.history.to_dict().items()}
        return {name: value for name, value in last.items() if value is not None}

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
        work = self.pending.pop("run_batch", None)
        if work is not None:  # inside run() or run_epoch()
            return work(batch)
        if self.mode == "test":
            with self.testing():
                tested = self._make_loop(wrapped=()).evaluate([batch])
            return {name.removeprefix("val_"): value for name, value in tested.items()}
        if self._is_cut:
            raise InvalidTypeError("strategy='fsdp' trains in run() only; call run()")
        loop = self._make_loop([batch], wrapped=())
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
        with self.testing():
            row: dict[str, Any] = dict(self._make_loop().evaluate(loader))
        return row | self.user_metrics()

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
        loop, training = self._make_loop(), self.model.training
        try:
            return _joined([_on_cpu(part) for part in loop.predict(loader, self.predict_step)])
        finally:
            self.model.train(training)

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

    def _train(self, epochs: int, loader: Any, valid_loader: Any, wrapped: tuple[str, ...]) -> None:
        self._check_optimizer()
        self._check_step("train_step")
        if valid_loader is not None:
            self._check_step("test_step")
        # An epoch that was left half done, since time was over, is finished from its snapshot.
        half_done = self._state.batch > 0 and self._options.snapshot_path is not None
        goal, resumes = self._goal + epochs, half_done or not self._started
        loop = self._make_loop(loader, valid_loader, goal, wrapped=wrapped)
        self._started, self._loop = True, loop
        self._follow.monitor = loop.monitor
        try:
            loop.run(resume=resumes)
        except KeyboardInterrupt as stop:
            note_best(stop, self.best_epoch)
            raise
        finally:
            self._loop = None
            self._take_from(loop)
            # A snapshot may be further than this call was to go: part of the next call's epochs.
            self._goal = min(goal, loop.state.epoch)

    def _test(self, loader: Any) -> dict[str, Any]:
        self.log_reset()
        row = self.evaluate(loader)
        self.progress_checker.step += len(self.log_test["loss"])
        self.progress_checker.update_epoch()
        self._tested.append(row)
        return row

    def _make_loop(
        self,
        train: Any = None,
        val: Any = None,
        epochs: int = 1,
        *,
        wrapped: tuple[str, ...] = ("run_batch",),
    ) -> Loop:
        """Make a loop that continues where the last one ended; without `train`, one that tests."""
        options = replace(self._options, epochs=epochs)
        if train is None:  # a share of no loader
            options = replace(options, limit_train_batches=None)
        loop = Loop(
            self.model,
            UserStep(self, wrapped),
            None if train is None else self.optimizer,
            train,
            val,
            world=self._world,
            options=options,
            scheduler=None if train is None else self.scheduler,
            metrics=self._metrics,
            callbacks=self._callbacks,
        )
        loop.state, loop.history = self._state, self.history
        if self._scaler_state:
            loop.scaler.load_state_dict(self._scaler_state)
        if loop.ema is not None and self._ema_state:
            # The model has the average, as a finished run leaves it.
            average = dict(loop.ema.average)
            loop.ema.load_state_dict({"updates": self._ema_state["updates"], "average": average})
            self.model.load_state_dict(self._ema_state["own"])
            loop.ema.apply(True)
        return loop

    def _take_from(self, loop: Loop) -> None:
        """Keep what the next loop needs."""
        self._state, self.history = loop.state, loop.history
        self._scaler_state = loop.scaler.state_dict()
        if loop.ema is not None and loop.model is self.model:
            loop.ema.apply(False)
            own = copy.deepcopy(self.model.state_dict())
            self._ema_state = {"updates": loop.ema.updates, "own": own}
            loop.ema.apply(True)
        self.progress_checker.follow(loop.state)

    def _pick_precision(self, use_amp: bool, precision: Any, device: torch.device) -> str:
        return pick_precision(use_amp, precision, device)

    @property
    def _is_cut(self) -> bool:
        return self._options.strategy == "fsdp" and self._world.size > 1

    def _loss_only(self, batch: Any) -> dict[str, Any]:
        if self.loss_step is None:
            raise self._no_step("train_step" if self.mode == "train" else "test_step")
        return {"loss": self.loss_step(self.model, batch).loss}

    def _check_optimizer(self) -> None:
        if not isinstance(self.optimizer, Optimizer):
            raise InvalidTypeError(
                "optimizer must be a torch.optim.Optimizer for mode='train', got "
                f"{self.optimizer!r}; give one, or mode='test'"
            )

    def _check_step(self, name: str) -> None:
        if self.loss_step is None and not self._overrides(name):
            raise self._no_step(name)

    def _no_step(self, name: str) -> InvalidTypeError:
        return InvalidTypeError(
            f"{type(self).__name__} has neither {name}() nor a loss; define {name}(self, batch) in "
            "a subclass, or give loss=torch.nn.MSELoss()"
        )


def _own_device(device: Device) -> str | torch.device | None:
    """Return this rank's device of those that were given."""
    if isinstance(device, str) or not isinstance(device, Sequence):
        return device
    devices = list(device)
    if not devices:
        raise InvalidValueError("device must name a device, got []; give e.g. 'cpu', or None")
    if len(devices) > 1 and World.current("cpu").size == 1:
        logger.warning(
            "device names %d devices, but there is one process, which uses %s; "
            "Trainer.add_on(MultiGPUAddon) trains on all of them",
            len(devices),
            devices[0],
        )
    return devices[local_rank() % len(devices)]


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _on_cpu(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_on_cpu(item) for item in value)
    raise InvalidTypeError(
        "predict_step must return tensors, or a tuple or dict of them, got a "
        f"{type(value).__name__}"
    )


def _joined(parts: list[Any]) -> Any:
    if not parts:
        raise EmptyPartError("loader gave no batch to predict; give one that is not empty")
    first = parts[0]
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(list(column)) for column in zip(*parts, strict=True))
    return torch.cat(parts)
