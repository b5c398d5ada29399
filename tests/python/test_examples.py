"""Every example runs in its own process on the device under test and prints the expected lines."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


AS_MAIN = """
import runpy, sys
import torch
sys.argv = {}
sys.path[0] = {!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def run_script(run_python):
    """Runs a script as `python SCRIPT ARGUMENTS` does. Variables are keywords."""

    def run(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        code = AS_MAIN.format([str(script), *arguments], str(script.parent))
        return run_python(code, timeout=300, trains=True, **environment)

    return run


@pytest.fixture
def run_example(root: Path, run_script, tmp_path: Path):
    """Runs examples/NAME and returns its output. Any exit status but 0 is a failure. A script that takes no sizes runs
    as a copy where the one text is the other: `shorter`."""

    def run(name: str, *arguments: str, shorter: tuple[str, str] | None = None, **environment: str) -> str:
        script = root / "examples" / name
        if shorter:
            before, after = script.read_text().split(shorter[0])
            script = tmp_path / name
            script.write_text(before + shorter[1] + after)
        result = run_script(script, *arguments, **environment)
        assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
        assert "leak" not in result.stderr and "failed" not in result.stderr, result.stderr
        return result.stdout

    return run


def test_every_example_is_run_here(root: Path) -> None:
    names = {path.name for path in (root / "examples").glob("*.py")}
    assert names == set(re.findall(r'run_example\(\s*"(\w+\.py)"', Path(__file__).read_text()))


def test_trainer_and_engine(run_example) -> None:
    place = {"EBBTIDE_SIM_SHARED": f"example-{os.getpid()}", "EBBTIDE_SHARED_FOLDER": f"/tmp/example-{os.getpid()}"}
    try:
        output = run_example("08_trainer_and_engine.py", "2", **place)
    finally:
        shutil.rmtree(place["EBBTIDE_SHARED_FOLDER"], ignore_errors=True)
        Path(f"/dev/shm/ebbtide-sim-{os.geteuid()}-{place['EBBTIDE_SIM_SHARED']}").unlink(missing_ok=True)
    assert re.findall(r"round (\d): loss \d\.\d+, handed over (?!0 MiB)", output) == ["1", "2"]


def test_pause_resume(run_example) -> None:
    output = run_example("01_pause_resume.py")
    assert "pause: freed 66.0 MiB" in output
    assert "resume: claimed 66.0 MiB" in output
    assert output.endswith("the same bytes at the same address\n")


def test_pause_resume_has_ten_lines(root: Path) -> None:
    assert sum(bool(line.strip()) for line in (root / "examples/01_pause_resume.py").read_text().splitlines()) == 10


def test_weight_swap(run_example, driver_name: str) -> None:
    steps = ("STEPS, BATCH, CONTEXT = 3, 30,", "STEPS, BATCH, CONTEXT = 3, 10,")
    output = run_example("02_rl_weight_swap.py", shorter=steps, OMP_NUM_THREADS="1")
    for tags in (r"generator [\d.]+ MiB, kv_cache [\d.]+ MiB", r"trainer [\d.]+ MiB"):
        assert len(re.findall(rf"pause: freed [\d.]+ MiB in [\d.]+ s \({tags}\)", output)) == 3
    rounds = re.findall(r"^round \d: loss ([\d.]+), generated .+$", output, re.MULTILINE)
    assert len(rounds) == 3 and float(rounds[-1]) < float(rounds[0]) - 0.1
    assert output.endswith("the generator has the trainer's weights, bit for bit\n")
    if driver_name == "sim":  # a GPU adds in another order in each run
        off = run_example("02_rl_weight_swap.py", shorter=steps, OMP_NUM_THREADS="1", EBBTIDE_DRIVER="off")
        assert re.findall(r"^round .*$", off, re.MULTILINE) == re.findall(r"^round .*$", output, re.MULTILINE)
        assert "freed 0 B" in off and "MiB" not in off


def test_cuda_graph(run_example, driver_name: str) -> None:
    output = run_example("03_cuda_graph.py")
    assert ("needs a GPU" if driver_name == "sim" else "the graph replays as before") in output


def test_lend_the_gpu(run_example) -> None:
    output = run_example("04_lend_the_gpu.py")
    assert "the same weights as without the pause" in output
    assert re.search(r"pause: freed [\d.]+ MiB", output)


def test_overflow(run_example) -> None:
    output = run_example("05_overflow.py")
    assert re.search(r"promote: claimed [\d.]+ MiB", output)
    assert output.endswith("MiB spilled and came home: the same bytes at the same address\n")


def test_train_spike(run_example) -> None:
    output = run_example("06_train_spike.py", "--steps", "3")
    spilled = re.findall(r"^(before|spike|after): .* ms a step, ([\d.]+ \w+) spilled$", output, re.MULTILINE)
    assert [name for name, _ in spilled] == ["before", "spike", "after"] * 2
    assert [size == "0 B" for _, size in spilled] == [True, True, True, True, False, True]
    assert output.endswith("the same losses as in ordinary memory\n")


@pytest.mark.sim_only  # large model support runs on the simulated device so far
def test_resnet152(run_example) -> None:
    output = run_example("07_resnet152.py", "--compare", "--steps", "3", OMP_NUM_THREADS="1")
    left, returned = re.findall(r"^left and came back +(\d+\.\d) MiB, (\d+\.\d) MiB$", output, re.MULTILINE)[0]
    assert left == returned and float(left) > 10
    assert output.endswith("the same losses as without a limit\n")


@pytest.mark.sim_only
def test_resnet152_with_images_of_a_folder(run_example, tmp_path: Path) -> None:
    import torch

    for name in ("cats", "dogs"):
        (tmp_path / name).mkdir()
        torch.save(torch.randint(256, (3, 40, 50), dtype=torch.uint8), tmp_path / name / "first.pt")
    arguments = ("--data", str(tmp_path), "--batch", "4", "--steps", "2", "--limit", "1GiB")
    assert "Nothing had to leave" in run_example("07_resnet152.py", *arguments)


# --- shared parts: the model, and the job of `ebbtide demo` ---


@pytest.fixture
def run_job():
    from ebbtide.demo.job import run_job
    from ebbtide.demo.size import JobSize

    return lambda **size: run_job(JobSize(**size), is_pausing=True)


def test_the_job_learns_and_pauses_every_tag(saver, run_job) -> None:
    result = run_job(rounds=2, steps=12, batch=8, context=32)
    assert result.mean_loss(-1) < result.mean_loss(0) - 0.2
    tags = {"trainer_weights", "gradients", "optimizer", "rollout_weights", "kv_cache"}
    assert {tag for tag, count in result.tensors_by_tag.items() if count > 0} == tags
    for kind in ("pause", "resume"):
        assert {tag for move in result.moves if move.report.kind == kind for tag in move.report.by_tag} == tags


def test_generation_with_a_cache_computes_what_the_whole_sequence_does(saver) -> None:
    import torch
    from ebbtide.demo.model import LanguageModel

    torch.manual_seed(0)
    model = LanguageModel(vocabulary_size=32, context=16, width=32, layers=2, heads=4).to(saver.device)
    tokens = torch.randint(32, (3, 16), device=saver.device)
    with torch.no_grad():
        whole = model(tokens)
        cache = model.make_cache(3)
        parts = [model(tokens[:, :5], cache, 0)] + [model(tokens[:, i : i + 1], cache, i) for i in range(5, 16)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_the_text_is_there_without_the_reference_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbtide.demo.text import VOCABULARY_SIZE, decode, encode, load_text

    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    text = load_text(50_000)
    assert len(text) == 50_000 and "def " in text
    assert max(encode(text)) < VOCABULARY_SIZE
    assert decode(encode(text)) == text


def test_a_difference_between_runs_is_found() -> None:
    import torch
    from ebbtide.demo.job import JobResult

    def result(**changes) -> JobResult:
        parts = {"losses": [[1.0]], "texts": ["a"], "weights": {"w": torch.ones(2)}, **changes}
        return JobResult(**parts)

    assert result().differences(result()) == []
    assert result(losses=[[1.0 + 1e-12]]).differences(result()) == ["losses"]
    assert result(texts=["b"]).differences(result()) == ["generated text"]
    assert result(weights={"w": torch.tensor([1.0, 1.0 + 1e-6])}).differences(result()) == ["final weights"]
    assert result(weights={}).differences(result()) == ["final weights"]
    assert result(are_addresses_kept=False).differences(result()) == ["addresses"]


FINISHED_SCRIPT = """
import os, signal, sys, threading
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
model.to("cuda" if torch.cuda.is_available() else "cpu")
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(6, 64, 256).to(model[0].weight.device)
if "lend" in sys.argv:  # as somebody else would; memory that is lent comes back after a while
    from ebbtide import saver
    take_back = lambda *_: threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
    saver.on("after_pause", "job", take_back)
for step, batch in enumerate(data):
    if step in (2, 4) and "lend" in sys.argv:
        os.kill(os.getpid(), signal.SIGUSR1)
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item().hex())
"""


def test_a_finished_script_is_pauseable(run_example, run_script, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FINISHED_SCRIPT)
    plain = run_script(script).stdout
    output = run_example("10_pauseable_script.py", str(script), "lend")
    assert re.findall(r"^\d 0x.*\n", output, re.MULTILINE) == plain.splitlines(keepends=True)
    assert len(re.findall(r"^adopt into job: [1-9].*$", output, re.MULTILINE)) >= 1
    assert len(re.findall(r"^pause: freed [1-9][\d.]* MiB", output, re.MULTILINE)) == 2
    assert len(re.findall(r"^resume: claimed [1-9][\d.]* MiB", output, re.MULTILINE)) == 2
