"""Add-ons: of one's own, and those that save, spawn ranks, mix precisions and log."""

import importlib
import itertools
import os
import pickle
import sys
from abc import ABC

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from ml4cube.errors import InvalidTypeError, InvalidValueError, RunError, StoreError
from ml4cube.training.addons import (
    AddOnBase,
    MultiGPUAddon,
    NeptuneLoggerAddon,
    PrecisionMixerAddon,
    StateManagerAddon,
    WandBLoggerAddon,
)
from ml4cube.training.addons.core import MixinAddOn
from ml4cube.training.addons.mpu import share_loader
from ml4cube.training.addons.precision import choose_precision
from ml4cube.training.callbacks import ModelCheckpoint
from ml4cube.training.ranks.dist import World
from ml4cube.training.trainer import Trainer
from tests.distributed_runner import kept_ranks, on_ranks
from tests.training.test_loggers import FakeNeptune, FakeWandB
from tests.training.test_trainer import make as make_trainer
from tests.training_parts import Planted, loader, network, weights


def make(*add_ons, base=Trainer, **arguments):
    return make_trainer(base.add_on(*add_ons), **{"loss": nn.MSELoss(), **arguments})


# -------------------------------------------------------------------- of one's own


class Diary(AddOnBase):
    """As users write them: takes an argument, and does something around everything."""

    @classmethod
    def apply(cls, base_cls):
        class WithDiary(base_cls):
            def __init__(self, *args, **kwargs):
                self.diary = [kwargs.pop("title", "untitled")]
                super().__init__(*args, **kwargs)

            def run(self, *args, **kwargs):
                result = super().run(*args, **kwargs)
                self.diary.append("ran")
                return result

            def run_epoch(self, loader, **kwargs):
                self.diary.append(f"{self.mode}:")
                result = super().run_epoch(loader, **kwargs)
                self.diary.append(f"({len(self.log_train['loss'])})")
                return result

            def run_batch(self, batch, **kwargs):
                steps = self.progress_checker.get_step()
                super().run_batch(batch, **kwargs)
                self.diary.append(f"{steps}")

            def logging(self, step_dict):
                super().logging({**step_dict, "seen": self.mode})

            def check_better(self, cur_epoch, cur_loss):
                better = super().check_better(cur_epoch, cur_loss)
                self.diary.append(f"epoch {cur_epoch} {'better' if better else 'worse'}")
                return better

        return WithDiary


class Twice(AddOnBase):
    """Changes what goes into a step."""

    @classmethod
    def apply(cls, base_cls):
        class WithTwice(base_cls):
            def run_batch(self, batch):
                return super().run_batch([2 * part for part in batch])

        return WithTwice


class OnRankOnly(AddOnBase):
    """Adds metrics that tell who computed them."""

    @classmethod
    def apply(cls, base_cls):
        class WithMetrics(base_cls):
            def metric_on_epoch_end(self):
                return {"batches": len(self.log_train["loss"]), "pid": os.getpid()}

        return WithMetrics


def test_a_users_add_on_works_around_runs_epochs_and_batches():
    run = make(Diary, title="today")
    plain = make()
    torch.manual_seed(1)
    run.run(1, loader(8), loader(4))
    torch.manual_seed(1)
    plain.run(1, loader(8), loader(4))
    # zae-engine counts a step once its batch is done; validation takes none of ours
    assert run.diary == [
        *("today", "train:", "1", "2", "(2)"),
        *("test:", "3", "(2)", "epoch 1 better", "ran"),
    ]
    assert run.log_train["seen"] == ["train", "train"]
    assert run.log_test["seen"] == ["test"]
    assert weights(run.model) == weights(plain.model)

    run.diary.clear()
    run.run_epoch(loader(8))
    assert run.diary[3] in ("epoch 2 better", "epoch 2 worse")
    assert run.diary[:3] + run.diary[4:] == ["train:", "3", "4", "(2)"]
    run.diary.clear()
    run.run_batch(next(iter(loader(4))))
    assert run.diary == ["5"]


def test_what_an_override_passes_on_is_used():
    run, plain = (make(*add_ons, model=nn.Linear(3, 1)) for add_ons in ((Twice,), ()))
    plain.model.load_state_dict(run.model.state_dict())
    run.run(1, loader(8), loader(4))
    double = [[2 * x, 2 * y] for x, y in loader(8)]
    plain.run(1, double, [[2 * x, 2 * y] for x, y in loader(4)])
    assert weights(run.model) == weights(plain.model)
    assert run.history["val_loss"] == plain.history["val_loss"]


def test_every_batch_of_a_step_is_used_as_an_override_passes_it_on():
    run = make(Twice, model=nn.Linear(3, 1), gradient_accumulation_steps=2)
    plain = make(model=nn.Linear(3, 1))
    plain.model.load_state_dict(run.model.state_dict())
    run.run(1, loader(8))
    plain.run(1, [[2 * x, 2 * y] for x, y in loader(8, batch_size=8)])
    torch.testing.assert_close(run.model.state_dict(), plain.model.state_dict())


def test_add_ons_see_single_batches_when_gradients_are_accumulated():
    run = make(Diary, gradient_accumulation_steps=2)
    run.run(1, loader(16))
    assert run.diary[2:-2] == ["1", "1", "2", "2", "(4)"]


def test_an_override_must_call_super():
    class Silent(Trainer):
        def run_batch(self, batch):
            return None

    with pytest.raises(InvalidTypeError, match=r"Silent\.run_batch did not call super"):
        make(base=Silent).run(1, loader())


def test_the_first_add_on_is_innermost_and_none_is_added_twice():
    both = Trainer.add_on(Diary, Twice)
    assert [cls.__name__ for cls in both.__mro__[:3]] == ["WithTwice", "WithDiary", "Trainer"]
    assert Trainer.add_on(Diary).add_on(Twice) is both
    assert both.add_on(Diary, Diary) is both
    assert Trainer.add_on(Diary, Diary) is Trainer.add_on(Diary)
    assert Trainer.add_on() is Trainer
    assert both.add_ons == (Diary, Twice)
    assert Trainer.add_ons == ()
    assert Trainer.add_on(Twice, Diary) is not both


class Greeting:
    def greet(self):
        return "hello"


class Greeter(MixinAddOn):
    mixin = Greeting


def test_a_mixin_is_all_that_an_add_on_needs():
    run = make(Greeter)
    assert run.greet() == "hello"
    assert run.add_ons == (Greeter,)
    assert make().add_ons == ()
    assert type(run).__module__ == Trainer.__module__
    assert pickle.loads(pickle.dumps(type(run))) is type(run)  # noqa: S301


class Mine(Trainer.add_on(Diary, StateManagerAddon), ABC):
    """A class that a user derives from one with add-ons, and from another base."""


def test_classes_and_trainers_with_add_ons_can_be_pickled(tmp_path):
    made = Trainer.add_on(Diary, StateManagerAddon, PrecisionMixerAddon)
    for cls in (Trainer, made, Mine):
        assert pickle.loads(pickle.dumps(cls)) is cls  # noqa: S301
    run = make(Diary, StateManagerAddon, save_path=tmp_path, schedule=True, title="kept")
    run.run(1, loader(), loader(9))
    again = pickle.loads(pickle.dumps(run))  # noqa: S301
    assert type(again) is type(run)
    assert again.diary == run.diary
    for one in (run, again):
        torch.manual_seed(3)
        one.run(1, loader(), loader(9))
    assert weights(again.model) == weights(run.model)
    assert again.history["val_loss"] == run.history["val_loss"]


# ---------------------------------------------------------------- StateManagerAddon


FORMATS = ["ckpt", "safetensor", ".safetensors"]


@pytest.mark.parametrize("kind", FORMATS)
def test_a_saved_state_is_the_best_epochs_and_goes_on_from_there(tmp_path, kind):
    def build(seed):
        model = network(seed)
        model[2] = nn.Identity()  # nothing random, so that both can be compared
        return make(
            StateManagerAddon, model=model, save_path=tmp_path, save_format=kind, schedule=True
        )

    run = build(0)
    run.run(2, loader(), loader(9))
    assert run.best_epoch == 2
    suffix = kind.removeprefix(".")
    assert sorted(os.listdir(tmp_path)) == [f"model.{suffix}", "state.ckpt"]
    again = build(7)
    (tmp_path / f"model.{suffix}").unlink()  # so a save that was cut off between the two is whole
    assert again.load_state() == 2
    assert weights(again.model) == weights(run.model)
    assert (again.best_epoch, again.best_loss) == (run.best_epoch, run.best_loss)
    run.run(2, loader(), loader(9))
    again.run(2, loader(), loader(9))
    assert weights(again.model) == weights(run.model)
    assert again.history["epoch"] == [3, 4]
    assert again.history["lr"] == run.history["lr"][2:]
    again.apply_weights()
    again.run_batch(next(iter(loader())))  # the weights are then no longer the best
    again.save_state()
    later = build(7)
    later.load_state()
    with pytest.raises(RunError, match="not that of the best epoch, 4"):
        later.apply_weights()


def test_a_saved_state_may_be_the_best_of_a_validation_between_steps(tmp_path):
    def build():
        return make(StateManagerAddon, save_path=tmp_path, validate_every_steps=2)

    run = build()
    run.run(1, loader(), loader(9))
    again = build()
    again.load_state()
    again.apply_weights()
    run.apply_weights()
    assert weights(again.model) == weights(run.model)


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_readable_by_the_formats_own_package(tmp_path, kind):
    model = network(norm=True)
    model.add_module("tied", nn.Linear(1, 1))
    model.tied.weight = nn.Parameter(torch.ones(1, 1))
    model.tied.bias = model.tied.weight  # safetensors refuses shared memory, we do not
    run = make(StateManagerAddon, save_path=tmp_path, model=model)
    path = tmp_path / f"deep/w.{kind.removeprefix('.')}"
    run.save_model(path)
    if kind == "ckpt":
        found = torch.load(path, weights_only=True)
    else:
        found = importlib.import_module("safetensors.torch").load_file(path)
    assert {name: value.tolist() for name, value in found.items()} == weights(model)
    other = make(StateManagerAddon, save_path=tmp_path, model=pickle.loads(pickle.dumps(model)))  # noqa: S301
    with torch.no_grad():
        other.model[0].weight.zero_()
    other.load_model(path)
    assert weights(other.model) == weights(model)


def test_the_path_may_name_the_file_and_so_the_format(tmp_path):
    run = make(StateManagerAddon, save_path=str(tmp_path / "run.safetensors"))
    run.run(1, loader())
    assert sorted(os.listdir(tmp_path)) == ["run.safetensors", "state.ckpt"]


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_and_planted_files_are_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    run = make(StateManagerAddon, save_path=tmp_path, save_format=kind)
    run.run(1, loader())
    model, state = tmp_path / f"model.{kind.removeprefix('.')}", tmp_path / "state.ckpt"
    state.write_bytes(model.read_bytes())
    if kind == "ckpt":  # a file of ours, but of weights alone
        with pytest.raises(StoreError, match="was not written by save_state"):
            run.load_state()

    mark = tmp_path / "executed"
    for name in (model, state):
        torch.save({"model": Planted(mark)}, name)
    with pytest.raises(StoreError):
        run.load_model(model)
    with pytest.raises(StoreError):
        run.load_state()
    assert not mark.exists()


def test_a_state_of_another_make_is_refused(tmp_path):
    make(StateManagerAddon, save_path=tmp_path, schedule=True).run(1, loader())
    with pytest.raises(InvalidValueError, match="has a scheduler, this Trainer has none"):
        make(StateManagerAddon, save_path=tmp_path).load_state()
    other = make(StateManagerAddon, save_path=tmp_path, schedule=True, model=nn.Linear(3, 1))
    with pytest.raises(InvalidValueError, match="weights of another model"):
        other.load_state()


# -------------------------------------------------------------------- MultiGPUAddon


@pytest.mark.slow
def test_two_processes_train_as_one_does_and_give_everything_back(tmp_path):
    def build(device):
        model = network(norm=False)
        model[2] = nn.Identity()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        kind = Trainer.add_on(StateManagerAddon, MultiGPUAddon, OnRankOnly)
        return model, kind(
            model,
            device,
            "train",
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9),
            loss=nn.MSELoss(),
            callbacks=[ModelCheckpoint(tmp_path / f"kept{len(device)}", save_top_k=1)],
            init_method="tcp://localhost:12355",
            save_path=tmp_path / f"{len(device)}",
        )

    model, run = build(["cpu", "cpu"])
    with kept_ranks():
        history = run.run(2, loader(32, batch_size=4), loader(7, batch_size=2, seed=1))
    single, alone = build(["cpu"])
    expected = alone.run(2, loader(32, batch_size=8), loader(7, batch_size=2, seed=1))

    assert run.model is model
    assert history is run.history
    for name in ("train_loss", "val_loss"):
        assert history[name] == pytest.approx(expected[name], rel=1e-5)
    for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert [row["val_n"] for row in history["ranks"][0]] == [4, 3]
    assert history["batches"] == [8.0, 8.0]  # of both
    assert os.getpid() not in history["pid"]
    assert run.optimizer.param_groups[0]["lr"] == alone.optimizer.param_groups[0]["lr"]
    assert set(run.optimizer.state_dict()["state"]) == set(alone.optimizer.state_dict()["state"])
    assert run.progress_checker.step == alone.progress_checker.step == 8
    assert len(run.log_train["loss"]) == 4
    assert torch.load(tmp_path / "2" / "model.ckpt", weights_only=True).keys() == (
        model.state_dict().keys()
    )
    assert run.inference(loader(7)).shape == (7, 1)

    held_out = loader(7, batch_size=2, seed=1)
    with kept_ranks():
        again = run.run(1, loader(32, batch_size=4), held_out)
        row = make(MultiGPUAddon, device=["cpu", "cpu"]).run_epoch(loader(8))
    assert [rank["train_n"] for rank in row["ranks"]] == [4, 4]
    more = alone.run(1, loader(32, batch_size=8), held_out)
    assert again["val_loss"] == pytest.approx(more["val_loss"], rel=1e-5)
    assert again["epoch"] == [1, 2, 3]
    best = f"epoch-{run.best_epoch:04d}.pt"
    assert os.listdir(tmp_path / "kept2") == os.listdir(tmp_path / "kept1") == [best]


def test_loaders_are_shared_out_without_doubles():
    numbers = range(13)

    def seen(given, exact, size=3):
        parts = []
        for rank in range(size):
            world = World(rank, size, torch.device("cpu"))
            mine = share_loader(given, world, exact=exact, seed=4)
            parts.append([int(i) for batch in mine for i in batch])
        return parts

    for shuffle in (False, True):
        parts = seen(DataLoader(numbers, batch_size=2, shuffle=shuffle), exact=False)
        flat = list(itertools.chain.from_iterable(parts))
        assert [len(part) for part in parts] == [4, 4, 4]
        assert len(set(flat)) == 12
        assert (parts[0] == [0, 3, 6, 9]) is not shuffle
    batches = [torch.tensor([i]) for i in range(7)]
    assert seen(batches, exact=False) == [[0, 3], [1, 4], [2, 5]]
    assert seen(batches, exact=True) == [[0, 3, 6], [1, 4], [2, 5]]

    world = World(0, 2, torch.device("cpu"))
    picks = DataLoader(numbers, sampler=WeightedRandomSampler([1.0] * 13, 13))
    with pytest.raises(InvalidTypeError, match="got DataLoader with WeightedRandomSampler"):
        share_loader(picks, world, exact=False)
    some = DataLoader(numbers, sampler=RandomSampler(numbers, num_samples=4))
    with pytest.raises(InvalidTypeError, match="got DataLoader with RandomSampler"):
        share_loader(some, world, exact=False)
    assert share_loader(picks, world, exact=True) is picks

    class Stream(IterableDataset):
        def __iter__(self):
            return iter(range(4))

    with pytest.raises(InvalidTypeError, match="shared out over processes"):
        share_loader(DataLoader(Stream()), world, exact=False)


def test_one_process_trains_where_there_is_one_device_or_no_gpu(caplog):
    run = make(MultiGPUAddon, device="cpu")
    assert "one device, cpu, so one process trains" in caplog.text
    run.run(1, loader())
    if not torch.cuda.is_available():
        run = make(MultiGPUAddon, device=["cuda:0", "cuda:1"])
        assert run.devices == [torch.device("cpu")] * 2
        assert "no GPU; using the CPU" in caplog.text


# -------------------------------------------------------------- PrecisionMixerAddon


def test_precisions_are_chosen_and_computed_in():
    seen = []

    class Look(Trainer):
        def train_step(self, batch):
            output = self.model(batch[0])
            seen.append(output.dtype)
            return {"loss": (output - batch[1]).pow(2).mean()}

    for asked, chosen, dtype in (
        ("bf16", "bf16", torch.bfloat16),
        (["bf16", "fp32"], "bf16", torch.bfloat16),
        ("fp32", "fp32", torch.float32),
        ("auto", "fp32", torch.float32),
        (None, "fp32", torch.float32),
    ):
        run = make(PrecisionMixerAddon, base=Look, precision=asked)
        run.run(1, loader(8))
        assert (run.precision, seen.pop()) == (chosen, dtype)
    assert make(PrecisionMixerAddon, use_amp=True).precision == "bf16"  # asked for on a CPU, too


@pytest.mark.parametrize(("able", "chosen"), [(True, "bf16"), (False, "fp16")])
def test_on_a_gpu_auto_is_bf16_where_it_can(monkeypatch, able, chosen):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: able)
    gpu = torch.device("cuda", 0)
    assert choose_precision("auto", gpu) == chosen
    assert choose_precision(["bf16", "fp16"], gpu) == chosen


# --------------------------------------------------------------------- web loggers


def test_two_services_are_logged_to_together(monkeypatch):
    wandb, neptune = FakeWandB(), FakeNeptune()
    for module in (wandb, neptune, neptune.utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    run = make(
        WandBLoggerAddon,
        NeptuneLoggerAddon,
        web_logger={
            "wandb": {"project": "sst", "mode": "offline"},
            "neptune": {"project_name": "me/sst", "api_tkn": "secret"},
        },
    )
    assert wandb.calls == neptune.calls == []  # nothing is opened before the run
    history = run.run(2, loader(8), loader(4))
    wanted = list(zip(history["val_loss"], (2, 4), strict=True))
    assert [call[:2] for call in wandb.calls if call[0] == "init"] == [("init", "sst")]
    logged = [call for call in wandb.calls if call[0] == "log"]
    assert [(values["val_loss"], step) for _, values, step in logged] == wanted
    assert wandb.calls[-1] == ("finish",)
    assert neptune.calls[0][:2] == ("init", "me/sst")
    sent = [call for call in neptune.calls if call[:2] == ("append", "val_loss")]
    assert [call[2:] for call in sent] == wanted
    assert neptune.calls[-1] == ("stop",)


def test_an_add_on_of_a_service_needs_no_service():
    make(WandBLoggerAddon).run(1, loader(4))


# -------------------------------------------------------------- what is refused


class Nothing(AddOnBase):
    @classmethod
    def apply(cls, base_cls):
        return None


def saving(path="folder", save_format=None):
    return make(StateManagerAddon, save_path=path, save_format=save_format)


def on_devices(*device, **arguments):
    return make(MultiGPUAddon, device=[*device], **arguments)


def in_precision(precision, **arguments):
    return make(PrecisionMixerAddon, precision=precision, **arguments)


def logging_to(services):
    return make(WandBLoggerAddon, web_logger=services)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Trainer.add_on(Nothing), InvalidTypeError, r"Nothing\.apply\(\) must .* got None"),
        (lambda: Trainer.add_on(nn.Linear), InvalidTypeError, "subclasses of AddOnBase, got .*Lin"),
        (lambda: saving(None), InvalidTypeError, "save_path must be given"),
        (lambda: saving(__file__), InvalidValueError, "save_path must be a folder"),
        (lambda: saving("state.ckpt"), InvalidValueError, "must not name the file state.ckpt"),
        (lambda: saving(save_format="h5"), InvalidValueError, r"must be '\.ckpt', .* got '\.h5'"),
        (lambda: saving("a.ckpt", "safetensor"), InvalidTypeError, "format must be '.ckpt' like"),
        (lambda: saving(save_format="safetensors"), ModuleNotFoundError, "install safetensors"),
        (lambda: saving().save_model("a.pth"), InvalidValueError, r"suffix of .* got '\.pth'"),
        (lambda: saving().load_model("a.onnx"), InvalidValueError, "suffix of filename must"),
        (lambda: saving().load_state(), StoreError, r"state\.ckpt does not exist"),
        (lambda: on_devices(), InvalidValueError, r"device must be a list .* got \[\]"),
        (
            lambda: on_devices("cpu", "cpu", init_method="tcp://10.0.0.1:1234"),
            InvalidValueError,
            "must be an address on this machine",
        ),
        (
            lambda: on_devices("cpu", "cpu", init_method="12355"),
            InvalidValueError,
            r"must be an address .* got '12355'",
        ),
        (
            lambda: on_devices("cpu", "cpu", strategy="fsdp"),
            InvalidTypeError,
            "MultiGPUAddon does not support",
        ),
        (lambda: in_precision("bf61"), InvalidValueError, "did you mean 'bf16'"),
        (lambda: in_precision(["half"]), InvalidValueError, "precision must be .* got 'half'"),
        (lambda: in_precision(["fp32", "auto"]), InvalidValueError, "must be .* got 'auto'"),
        (lambda: in_precision([]), InvalidValueError, "supports none of"),
        (lambda: in_precision("fp32", use_amp=True), InvalidTypeError, "must not be 'fp32'"),
        (lambda: logging_to("wandb"), InvalidTypeError, "web_logger must be a mapping"),
        (lambda: logging_to({"wandb": "a"}), InvalidTypeError, "must be a mapping"),
        (lambda: logging_to({"wandbb": {}}), InvalidValueError, "did you mean 'wandb'"),
        (lambda: logging_to({"neptune": {}}), InvalidTypeError, r"add_on\(NeptuneLoggerAddon"),
        (lambda: logging_to({"wandb": {}}), ModuleNotFoundError, "pip install wandb"),
    ],
)
def test_what_cannot_work_is_refused_by_name(tmp_path, monkeypatch, call, error, message):
    monkeypatch.chdir(tmp_path)
    for package in ("safetensors.torch", "wandb"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(error, match=message):
        call()


# --------------------------------------------------------------- models cut into shares


def _cut(folder, strategy):
    torch.set_num_threads(1)
    model = network(norm=False)
    model[2] = nn.Identity()
    run = make(StateManagerAddon, model=model, save_path=folder, strategy=strategy)
    run.run(2, loader(8), loader(4))
    again = None
    try:
        run.run(1, loader(8))
    except InvalidValueError as error:
        again = str(error)
    return run.best_epoch, weights(run.model), again


@pytest.mark.slow
def test_a_model_cut_over_two_ranks_is_saved_whole(tmp_path):
    (epoch, first, again), (_, second, _) = on_ranks(2, _cut, tmp_path, "fsdp")
    assert first == second
    assert "make a new optimizer and Trainer" in again
    alone = make(StateManagerAddon, model=network(seed=5), save_path=tmp_path)
    alone.model[2] = nn.Identity()
    assert alone.load_state() == epoch
    assert set(alone.optimizer.state_dict()["state"]) == {0, 1, 2, 3}

    model = network()
    model[2] = nn.Identity()
    single = make(model=model)
    single.run(2, loader(8), loader(4))  # both ranks saw the same batches
    assert single.best_epoch == epoch
    for name, value in single.model.state_dict().items():
        torch.testing.assert_close(torch.tensor(first[name]), value)
        torch.testing.assert_close(alone.model.state_dict()[name], single.best_weights[name])
