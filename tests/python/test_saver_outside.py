"""saver.outside: which tensors of a model and its optimizer lie in no tag."""

import dataclasses
import json
import pickle
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from ebbtide.errors import StateError  # noqa: E402
from ebbtide.saver.check import optimizers  # noqa: E402
from ebbtide.saver.regions import startup  # noqa: E402
from ebbtide.saver.values.outside import Outside  # noqa: E402
from outside_model import WEIGHT, WIDTH, backward, make_model, trained  # noqa: E402

pytestmark = pytest.mark.usefixtures("quick_scans")

MIB = 1 << 20


def by_name(found):
    return {row.name: row for row in found.rows if row.bytes >= MIB}  # without AdamW's counters of steps


def large(found):
    return {kind: size // MIB for kind, size in found.by_kind.items()}


# --- what it lists ---


def test_gradients_and_states_made_later_are_outside(saver, tag):
    model, optimizer = trained(saver, tag)
    found = saver.outside(model, optimizer)
    assert found and found.tag is None
    assert found.inside == 2 * WEIGHT and large(found) == {"gradient": 1, "state": 2}
    assert found.bytes == sum(row.bytes for row in found.rows) == sum(found.by_kind.values())
    assert set(by_name(found)) == {
        "the gradient of Linear.weight",
        "AdamW exp_avg of Linear.weight",
        "AdamW exp_avg_sq of Linear.weight",
    }
    row = by_name(found)["AdamW exp_avg of Linear.weight"]
    assert (row.kind, row.bytes, row.device, row.tag) == ("state", WEIGHT, 0, None)
    assert row.address == optimizer.state[model.weight]["exp_avg"].data_ptr()
    assert [row.bytes for row in found.rows] == sorted((row.bytes for row in found.rows), reverse=True)


def test_what_the_region_covers_is_inside(saver, tag):
    memory = saver.region(tag)
    with memory:
        model = make_model(saver)
        model.weight.grad = torch.zeros_like(model.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(saver, model)
    with memory:
        optimizer.step()
    found = saver.outside(model, optimizer)
    assert not found and found.bytes == 0 and found.rows == () and found.inside >= 5 * WEIGHT
    assert str(found) == "all 5.0 MiB lie in tags"
    assert str(saver.outside(model, optimizer, tag=tag)) == f"all 5.0 MiB lie in tag {tag}"


def test_adopting_is_the_way_in(saver, tag):
    model, optimizer = trained(saver, tag)
    assert saver.outside(model, optimizer)
    saver.adopt(model, optimizer, tag=tag)
    assert not saver.outside(model, optimizer, tag=tag)


def test_another_tag_is_outside_only_of_the_tag_that_is_asked_for(saver, tag, tag2):
    with saver.region(tag):
        model = make_model(saver)
    with saver.region(tag2):
        model.register_buffer("table", torch.zeros(WIDTH, WIDTH, device=saver.device))
    assert not saver.outside(model)
    found = saver.outside(model, tag=tag)
    assert [(row.name, row.kind, row.tag) for row in found.rows] == [("Linear.table", "buffer", tag2)]
    assert set(by_name(saver.outside(model, tag=tag2))) == {"Linear.weight", "Linear.mask"}


def test_it_may_be_asked_while_everything_is_away(saver, tag):
    model, optimizer = trained(saver, tag)
    resident = saver.outside(model, optimizer)
    saver.adopt(optimizer, tag=tag)
    saver.pause(tag)
    assert not saver.outside(model, optimizer)
    saver.resume(tag)
    assert resident.bytes >= 3 * WEIGHT


@pytest.mark.parametrize("backup", ["ram", "pinned", "disk", None])
def test_it_does_not_depend_on_the_backup(saver, tag, backup):
    with saver.region(tag, backup=backup):
        model = make_model(saver)
    model.weight.grad = torch.zeros_like(model.weight)
    with saver.paused(tag):
        assert large(saver.outside(model)) == {"gradient": 1}
    assert large(saver.outside(model)) == {"gradient": 1}


def test_shared_storages_count_once(saver, tag):
    with saver.region(tag):
        inside = torch.zeros(4, WIDTH, device=saver.device)
    apart = torch.zeros(WIDTH, WIDTH, device=saver.device)
    found = saver.outside(apart, apart[1], [apart.t(), {"part": apart[2:4]}], inside, inside[1])
    assert [(row.kind, row.bytes) for row in found.rows] == [("tensor", WEIGHT)]
    assert found.inside == inside.nbytes
    assert found.rows[0].name.startswith("apart in test_shared_storages_count_once (test_saver_outside.py:")


def test_containers_and_dataclasses_are_looked_into(saver, tag):
    @dataclasses.dataclass
    class Job:
        model: torch.nn.Module
        rest: list

    saver.trim(missing_ok=True)
    job = Job(make_model(saver), [{"x": torch.zeros(WIDTH, WIDTH, device=saver.device)}, "name", 3])
    found = saver.outside(job)
    assert {row.name for row in found.rows} == {"Linear.weight", "Linear.mask", f"Tensor[{WIDTH}, {WIDTH}] float32"}
    assert large(found) == {"parameter": 1, "buffer": 1, "tensor": 1}


def test_an_optimizer_alone_names_parameters_by_their_place(saver):
    optimizer = torch.optim.SGD(
        [{"params": [torch.nn.Parameter(torch.ones(WIDTH, WIDTH, device=saver.device))]}, {"params": []}], momentum=0.9
    )
    optimizer.param_groups[0]["params"][0].grad = torch.zeros(WIDTH, WIDTH, device=saver.device)
    optimizer.step()
    assert {(row.name, row.kind) for row in saver.outside(optimizer).rows} == {
        ("SGD parameter 0 of group 0", "parameter"),
        ("the gradient of SGD parameter 0 of group 0", "gradient"),
        ("SGD momentum_buffer of parameter 0 of group 0", "state"),
    }


def test_sparse_gradients_give_their_parts(saver, tag):
    with saver.region(tag):
        table = torch.nn.Embedding(WIDTH, WIDTH, sparse=True).to(saver.device)
    table(torch.arange(WIDTH, device=saver.device)).sum().backward()
    found = saver.outside(table)
    assert {row.name for row in found.rows} == {"the gradient of Embedding.weight"}
    assert large(found) == {"gradient": 1} and len(found.rows) == 2  # indices and values


def test_a_learning_rate_that_is_a_tensor_is_a_state(saver, tag):
    with saver.region(tag):
        model = make_model(saver)
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, device=saver.device))
    (row,) = saver.outside(optimizer, tag=tag).rows
    assert (row.kind, row.bytes) == ("state", 4)


def test_what_is_no_device_memory_is_left_out(saver, tag):
    with saver.region(tag):
        model = make_model(saver)
    others = [torch.nn.LazyLinear(3), torch.empty(5, device="meta"), torch.zeros(0, device=saver.device)]
    if saver.device == "cuda":
        others.append(torch.zeros(MIB))
    assert saver.outside(model, *others) == Outside(None, inside=2 * WEIGHT)


def test_cpu_tensors_beside_a_gpu_are_no_device_memory(saver, monkeypatch):
    """The counters of AdamW's steps, for one, and states that were offloaded."""
    on_cpu = torch.zeros(WIDTH, WIDTH)
    monkeypatch.setattr(startup, "backend", lambda: SimpleNamespace(device_type="cuda"))
    assert saver.outside({"step": on_cpu}) == Outside(None)
    assert list(optimizers._ranges({"step": on_cpu}, "cuda")) == []
    assert [size for _, size in optimizers._ranges({"step": on_cpu}, "cpu")] == [WEIGHT]


def test_the_rows_keep_nothing_alive_and_can_be_stored(saver, tag):
    model, optimizer = trained(saver, tag)
    found = saver.outside(model, optimizer)
    gone = weakref.ref(model.weight.grad)
    optimizer.zero_grad()
    assert gone() is None
    assert pickle.loads(pickle.dumps(found)) == found
    assert json.loads(found.to_json()) == found.to_dict()
    assert found.to_dict()["rows"][0] == dataclasses.asdict(found.rows[0])


def test_the_text_is_a_table_with_advice(saver, tag):
    model, optimizer = trained(saver, tag)
    head, columns, *rows, advice = str(saver.outside(model, optimizer, tag=tag)).splitlines()
    assert head.startswith(f"3.0 MiB of 5.0 MiB lie outside of tag {tag}: 1.0 MiB of gradients, 2.0 MiB of optimizer")
    assert columns.split() == ["size", "kind", "tag", "name"]
    assert any(row.split(maxsplit=4)[2:] == ["gradient", "-", "the gradient of Linear.weight"] for row in rows)
    assert advice.endswith(f"saver.adopt(*objects, tag={tag!r})")
    shown = saver.outside(model, optimizer)
    assert str(shown).startswith("3.0 MiB of 5.0 MiB lie in no tag: ")
    assert shown._repr_html_().count("<tr>") == 1 + len(shown.rows)
    assert saver.outside(model)._repr_html_().startswith("<table>")


def test_many_rows_are_cut_in_the_text_alone(saver):
    found = saver.outside([torch.zeros(WIDTH, device=saver.device) for _ in range(30)])
    text = str(found)
    assert len(found.rows) == 30 and len(text.splitlines()) == 2 + 10 + 2
    assert "  and 40.0 KiB in 20 more" in text
    assert found._repr_html_().count("<tr>") == 31


# --- what it refuses ---


def test_wrong_objects_are_refused(saver, tag):
    with pytest.raises(TypeError, match=r"at least one object: saver\.outside\(model, optimizer\)"):
        saver.outside()
    for wrong in (3, "weights", None, object(), torch.nn.Linear):
        with pytest.raises(TypeError, match=r"outside takes tensors, modules, optimizers, and containers .* not "):
            saver.outside(torch.zeros(1, device=saver.device), wrong)


def test_wrong_tags_are_refused(saver, tag):
    model = make_model(saver)
    with pytest.raises(StateError, match="never-named"):
        saver.outside(model, tag="never-named")
    with pytest.raises(TypeError):
        saver.outside(model, tag=3)
    with pytest.raises(ValueError):
        saver.outside(model, tag="")


def test_it_is_empty_where_ebbtide_is_off(run_python):
    code = """
    import torch
    from ebbtide import saver
    model = torch.nn.Linear(64, 64)
    print(bool(saver.outside(model)), saver.outside(model, tag="a"))
    try:
        saver.outside(3)
    except TypeError as error:
        print(error)
    """
    done = run_python(code, EBBTIDE_DRIVER="off")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False no device memory of a tensor was found\noutside takes tensors, ")


def test_before_the_first_region_everything_is_outside(run_python):
    code = """
    import torch
    from ebbtide import saver
    found = saver.outside(torch.nn.Linear(512, 512, bias=False, device=saver.device))
    print(found.inside, found.by_kind)
    """
    done = run_python(code)
    assert done.stdout == f"0 {{'parameter': {WEIGHT}}}\n", done.stderr


def test_a_forked_child_is_told_as_elsewhere(run_python):
    code = """
    import os, torch
    import ebbtide
    from ebbtide import saver
    with saver.region("weights"):
        model = torch.nn.Linear(512, 512, bias=False, device=saver.device)
    apart = torch.zeros(512, 512, device=saver.device)
    child = os.fork()
    if child == 0:
        try:
            saver.outside(model, apart)
        except ebbtide.StateError as error:
            os._exit(0 if "forked child" in str(error) else 1)
        os._exit(2)
    print(os.waitpid(child, 0)[1])
    """
    done = run_python(code)
    assert done.stdout == "0\n", done.stderr


def test_the_states_of_large_model_support_are_in_its_tags(lms, saver, tag):
    lms.enable(limit="1GiB")
    model = make_model(saver)
    optimizer = torch.optim.AdamW(model.parameters())
    backward(saver, model)
    optimizer.step()
    moments = [optimizer.state[model.weight][name] for name in ("exp_avg", "exp_avg_sq")]
    assert not saver.outside(moments)
    with saver.region(tag):
        elsewhere = torch.ones(4, device=saver.device)
    assert {row.tag for row in saver.outside(moments, elsewhere, tag=tag).rows} == {"lms.optimizer"}


def test_what_was_not_looked_into_is_named(saver, tag):
    with saver.region(tag):
        inside = torch.ones(4, device=saver.device)
    engine = SimpleNamespace(model=torch.nn.Linear(8, 8).to(saver.device))
    found = saver.outside({"engine": engine})
    assert not found and found.passed_by == {"engine": "SimpleNamespace"} == found.to_dict()["passed_by"]
    told = "  not looked into: engine (SimpleNamespace)"
    assert str(found) == f"no device memory of a tensor was found\n{told}"
    assert str(saver.outside({"engine": engine, "x": inside})).splitlines()[1] == told
    both = saver.outside(engine.model, [engine])
    assert str(both).splitlines()[-2] == "  not looked into: 0 (SimpleNamespace)"
    assert both._repr_html_().endswith("<p>not looked into: 0 (SimpleNamespace)</p>")
    assert saver.outside(inside).passed_by == {}
    assert str(saver.outside(torch.ones(0))) == "no device memory of a tensor was found"
