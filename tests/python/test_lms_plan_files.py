"""Plans that a run saves and another one follows."""

import warnings
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import lms_models  # noqa: E402
from ebbtide.lms import calls  # noqa: E402
from lms_calls import FAST, blocks_of, run  # noqa: E402

pytestmark = pytest.mark.sim_only


RULES = [{}, {"evict": lambda module: True}, {"recompute": lambda module: not isinstance(module, torch.nn.Linear)}]


def test_a_saved_plan_is_followed(lms, within, lms_extension, tmp_path):
    """By a model that is made anew, whose modules are called after another one, under rules that name layers, too."""
    file = tmp_path / "plan.json"

    def chosen():
        return {key for _, key, *_ in lms_extension.recomputed_blocks()}

    with within(lms_models.gpt, 0.7):
        run(lms_models.gpt())
        lms.save_plan(file)
        saved = calls.read_plan(file)
    # The bus is so fast that another choice is better.
    for rules in RULES:
        with within(lms_models.gpt, 0.7, FAST, plan=file, **rules):
            torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()
            run(lms_models.gpt())
            assert chosen() == set(saved.calls) != set(), rules
    with within(lms_models.gpt, 0.7, FAST):
        run(lms_models.gpt())
        assert chosen() != set(saved.calls)


PLAN = b'{"format": "ebbtide.lms plan 1", '


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "another"}',
        PLAN + b'"x": 1}',
        PLAN + b'"state_bytes": -1, "recompute": []}',
        PLAN + b'"state_bytes": Infinity, "recompute": []}',
        PLAN + b'"state_bytes": 0, "recompute": [{"key": "10000000000000000"}]}',
    ],
    ids=lambda content: content[-24:].decode("latin1"),
)
def test_another_file_is_no_plan(lms, tmp_path, content):
    (tmp_path / "plan.json").write_bytes(content)
    with pytest.raises(ValueError, match="is no plan that "):
        lms.enable(limit="1GiB", recompute="auto", plan=tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        lms.enable(limit="1GiB", recompute="auto", plan=tmp_path / "missing.json")
    assert not lms.enabled


def test_a_plan_of_another_program_is_told(lms, within, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(PLAN + b'"state_bytes": 0, "recompute": [{"key": "1"}, {"key": "2"}]}')
    said = "makes 0 of the 2 calls that the plan recomputes: it is of another program"
    with within(lms_models.gpt, 0.7, FAST, plan=file), pytest.warns(RuntimeWarning, match=said):
        run(lms_models.gpt())


def test_a_plan_that_can_not_be_written_leaves_the_earlier_one(lms, within, tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    with within(lms_models.gpt, 0.7):
        run(lms_models.gpt())
        lms.save_plan(file)
        before = file.read_bytes()

        def fill_disk(self, text, **_):
            self.write_bytes(text[:100].encode())
            raise OSError("No space left on device")

        monkeypatch.setattr(Path, "write_text", fill_disk)
        with pytest.raises(OSError, match="No space"):
            lms.save_plan(file)
    assert [each.name for each in tmp_path.iterdir()] == ["plan.json"] and file.read_bytes() == before


def test_a_plan_says_what_to_recompute(lms, tmp_path):
    with pytest.raises(ValueError, match="recompute=False forbids it"):
        lms.enable(limit="1GiB", recompute=False, plan=tmp_path / "plan.json")
    assert not lms.enabled


def test_a_plan_of_calls_inside_modules_that_can_not_be_recomputed(lms, within, lms_extension, tmp_path):
    """Such as the blocks of FSDP2. The first call of a step is of another module."""

    def make():
        blocks = blocks_of()
        for block in blocks:
            block.register_forward_hook(lambda *_: None)
        model, other = lms_models.Decoder(blocks, 64), torch.nn.Linear(4, 4)
        step = lms_models.language_step(model, torch.optim.SGD(model.parameters(), 0.1), 8, 32)
        return lambda number: (other(torch.ones(1, 4)), step(number))[1]

    file = tmp_path / "plan.json"
    with within(make):
        run(make())
        lms.save_plan(file)
    saved = set(calls.read_plan(file).calls)
    # Other rules, so that no step is known, as in another process.
    allowed = {"recompute": lambda module: True}
    with within(make, 0.6, FAST, plan=file, **allowed), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(make())
        assert {key for _, key, *_ in lms_extension.recomputed_blocks()} == saved != set()
