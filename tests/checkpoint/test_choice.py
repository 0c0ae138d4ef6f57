"""Damage of any kind is found, named and passed over; what cannot be gone on from is told."""

import shutil

import pytest

from tests.checkpoint.helpers import manager, resume, save, snapshot, steps
from titanlite.errors import UserError


def _truncate(file, other):
    file.write_bytes(file.read_bytes()[:-1])


def _flip(file, other):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(bytes(data))


def _delete(file, other):
    file.unlink()


def _empty(file, other):
    file.write_bytes(b"")


def _replace(file, other):
    shutil.copy(other, file)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(folder, 5, 10)
    return folder


FILES = [".metadata", "__0_0.distcp", "lanes-0.json", "manifest.json"]


def test_those_are_all_the_files(saved):
    assert sorted(path.name for path in (saved / "checkpoint" / "step-10").iterdir()) == FILES


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [_truncate, _flip, _delete, _empty, _replace])
def test_a_damaged_file_is_named_and_passed_over(saved, tmp_path, file, damage, capsys):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoint" / "step-10"
    damage(newest / file, tmp_path / "checkpoint" / "step-5" / file)
    if file == "manifest.json" and damage is _replace:
        # The manifest of another step lists other bytes: it is some file that is named.
        file = "step-10"
    assert resume(tmp_path) == 5
    told = capsys.readouterr().err
    assert "step-10 is passed over" in told and (file in told or "manifest" in told)


def test_every_flipped_byte_of_a_file_is_found(saved, tmp_path):
    from titanlite.checkpoint import manifest as manifests

    shutil.copytree(saved / "checkpoint" / "step-10", tmp_path / "step-10")
    file = tmp_path / "step-10" / "lanes-0.json"
    whole = file.read_bytes()
    listed = manifests.read(tmp_path / "step-10")
    for i in range(len(whole)):
        file.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        with pytest.raises(manifests.Damaged, match=r"lanes-0.json"):
            manifests.check(tmp_path / "step-10", listed, "checksum")


def test_foreign_and_unfinished_folders_are_passed_over(saved, tmp_path, capsys):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoint" / "step-20").mkdir()
    (tmp_path / "checkpoint" / "step-25").write_text("a file")
    (tmp_path / "checkpoint" / "step-30.0abc.tmp").mkdir()
    (tmp_path / "checkpoint" / "steps").mkdir()
    assert resume(tmp_path) == 10
    assert "step-20 is passed over" in capsys.readouterr().err
    assert not (tmp_path / "checkpoint" / "step-30.0abc.tmp").exists()


def test_numbers_are_compared_as_numbers(tmp_path):
    save(tmp_path, 999, 1000)
    assert resume(tmp_path) == 1000


def test_when_all_are_damaged_nothing_starts_over_and_nothing_is_deleted(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    for step in (5, 10):
        _flip(tmp_path / "checkpoint" / f"step-{step}" / "__0_0.distcp", None)
    with pytest.raises(UserError, match=r"(?s)no checkpoint.*step-10.*step-5"):
        resume(tmp_path)
    assert steps(tmp_path) == [5, 10]


def test_a_step_that_is_asked_for_must_be_intact(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    assert resume(tmp_path, load_step=5) == 5
    _flip(tmp_path / "checkpoint" / "step-5" / "__0_0.distcp", None)
    with pytest.raises(UserError, match=r"step-5 cannot be loaded: __0_0.distcp has other bytes"):
        resume(tmp_path, load_step=5)
    with pytest.raises(UserError, match=r"step-7 cannot be loaded"):
        resume(tmp_path, load_step=7)


def test_sizes_alone_find_what_is_cut_short_and_never_open_a_changed_index(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    data, index = (tmp_path / "checkpoint" / "step-10" / file for file in ("__0_0.distcp", ".metadata"))
    whole = data.read_bytes()
    data.write_bytes(whole[:-1])
    assert resume(tmp_path, verify="size") == 5
    data.write_bytes(whole)
    # The index is a pickle: a changed one is not opened, however little is compared.
    _flip(index, None)
    assert resume(tmp_path, verify="size") == 5


@pytest.mark.parametrize(
    ("identity", "told"),
    [({"model.dim": "16"}, r"model.dim = 8, this run has 16"), ({"data.seed": "3"}, r"data.seed = 0.*allow_change")],
)
def test_another_run_is_told_what_differs(saved, tmp_path, identity, told):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    with manager(tmp_path) as made, pytest.raises(UserError, match=told):
        made.restore(snapshot(-1, identity))


def test_changed_data_may_be_allowed_but_not_a_changed_model(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    with manager(tmp_path, allow_change=True) as made:
        assert made.restore(snapshot(-1, {"data.seed": "3"})).step == 10
        with pytest.raises(UserError, match=r"model.dim"):
            made.restore(snapshot(-1, {"model.dim": "16"}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.model.pop("b.weight"), r"has model.b.weight, which this run does not"),
        (lambda s: s.optimizer.pop("a.weight.step"), r"has optimizer.a.weight.step"),
        (lambda s: s.model.update({"c.weight": s.model["b.weight"]}), r"has no model.c.weight"),
        (lambda s: s.optimizer.update({"b.weight.step": s.model["b.weight"]}), r"has no optimizer.b.weight.step"),
        (lambda s: s.model.update({"b.weight": s.model["b.weight"].double()}), r"b.weight is torch.float32"),
        (lambda s: s.model.update({"b.weight": s.model["a.weight"]}), r"b.weight is \(3,\), this run's is \(64, 8\)"),
    ],
)
def test_keys_shapes_and_types_are_never_silent(saved, tmp_path, change, told):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    state = snapshot(-1)
    change(state)
    with manager(tmp_path) as made, pytest.raises(UserError, match=told):
        made.restore(state)
