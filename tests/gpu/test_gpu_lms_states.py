"""Large model support on a GPU: what lives long. Losses and weights are as without it."""

import pytest

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.device_memory


def test_optimizer_states_and_weights_leave_where_activations_do_not_suffice(trial):
    trial("""
        numbers = trains_within(0.5, steps=4, depth=16, width=4096, batch=256)
        assert numbers["state_evicted_bytes"] + numbers["streamed_bytes"] > 0, numbers
    """)


def test_weights_gradients_and_states_leave_where_nothing_else_can(trial):
    trial("""
        numbers = trains_within(0.35, steps=4, depth=16, width=4096, batch=256)
        assert numbers["state_evicted_bytes"] + numbers["streamed_bytes"] > 0, numbers
        assert numbers["weight_evicted_bytes"] + numbers["weight_host_bytes"] > 0, numbers
    """)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}])
def test_states_on_the_host_pass_through_in_steps(trial, options):
    trial(f"""
        from ebbtide import _core, torch_extension

        def run(away):
            model = make_model(4, 4096)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, **{options})
            losses = []
            for step in range(5):
                optimizer.zero_grad()
                loss = model(torch.randn(256, 4096, device="cuda")).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                away()
            return losses, [each.clone() for each in model.parameters()], optimizer

        def away():
            torch_extension.load("_lms").send_states_away(2**62)

        plain, weights, _ = run(lambda: None)
        from ebbtide.lms import optimizer_states
        optimizer_states._bring_states_back = lambda *_: None
        with lms.enable(limit="64GiB", min_size=SMALL):
            losses, found, optimizer = run(away)
            host_bytes, numbers = _core.query_tag("lms.optimizer").host_bytes, lms.stats()
            assert losses == plain
            assert all(map(torch.equal, weights, found))
            assert host_bytes >= 8 * 4096 * 4096 * 4, host_bytes
            assert numbers["streamed_bytes"] >= 4 * host_bytes // 2 and numbers["slow_reads"] == 0, numbers
    """)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}])
def test_updates_beside_a_backward(trial, options):
    """Weights are read right after it. A backward that fails leaves each updated as a whole, or not at all."""
    trial(f"""
        from ebbtide import torch_extension
        from ebbtide.lms import optimizer_states
        optimizer_states._bring_states_back = lambda *_: None

        def run(is_in_backward, fails_at=None):
            model = make_model(12, 4096)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4, **{options})
            if is_in_backward:
                lms.step_in_backward(optimizer)
            read = []
            for step in range(6):
                loss = model(torch.randn(512, 4096, device="cuda")).pow(2).mean()
                if step == fails_at:
                    next(model.parameters()).register_hook(lambda gradient: 1 / 0)
                    try:
                        loss.backward()
                    except ZeroDivisionError:
                        return read + [[each.detach().clone() for each in model.parameters()]]
                loss.backward()
                if not is_in_backward:
                    optimizer.step()
                read.append([each.detach().clone() for each in model.parameters()])
                if is_in_backward:
                    optimizer.step()
                    torch_extension.load("_lms").send_states_away(2**62)
                optimizer.zero_grad()
            return read

        plain = run(False)
        with lms.enable(limit="64GiB", min_size=SMALL):
            found = run(True)
            streamed = lms.stats()["streamed_bytes"]
            assert streamed >= 4 * 12 * 2 * 4 * 4096**2, streamed
            assert all(torch.equal(*pair) for step in zip(found, plain) for pair in zip(*step))
            *_, before, partly = run(True, fails_at=4)
        updated = [torch.equal(*pair) for pair in zip(partly, plain[4])]
        assert any(updated) and not all(updated), updated
        assert all(is_updated or torch.equal(*pair) for is_updated, *pair in zip(updated, partly, before))
    """)


@pytest.mark.parametrize("forward_stream", ["torch.cuda.current_stream()", "torch.cuda.Stream()"])
def test_gradients_leave_beside_a_backward(trial, forward_stream):
    """They are read right after it, in the stream that called it and in another, and within it in another. One that
    fails leaves them right.
    """
    trial(f"""
        from ebbtide import _core, torch_extension

        def on_host(tensor):
            found = _core.find(tensor.data_ptr())
            return found is not None and found.host_bytes > 0

        def run(leave):
            model, other, forward = make_model(12, 4096), torch.cuda.Stream(), {forward_stream}
            parameters, read, seen, away = [*model.parameters()], [], [], 0
            leave()

            def read_some(module, *_):
                for each in parameters if is_first else ():  # a later backward writes what is read here
                    if each.grad is not None and each.nbytes >= MIB:
                        other.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(other):
                            seen.append(each.grad.sum())
                        each.grad.record_stream(other)

            def fail(module, *_):
                if step == 4:
                    raise ArithmeticError

            for module in model[::3]:
                module.register_full_backward_hook(read_some)
            model[4].register_full_backward_hook(fail)
            for step in range(10):
                is_first = all(each.grad is None for each in parameters)
                given = torch.randn(256, 4096, device="cuda")
                forward.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(forward):
                    loss = model(given).pow(2).mean()
                torch.cuda.current_stream().wait_stream(forward)
                try:
                    loss.backward()
                except ArithmeticError:
                    torch.cuda.current_stream().wait_stream(forward)  # torch waits only where a backward ends
                made = [each.grad for each in parameters if each.grad is not None and each.nbytes >= MIB]
                read.append([each.clone() for each in made])
                other.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(other):
                    read.append([each * 2 for each in made])
                torch.cuda.current_stream().wait_stream(other)
                away += sum(map(on_host, made))
                del made
                if step % 2 or step == 4:
                    model.zero_grad()
            return [*read, seen], away

        plain, _ = run(lambda: None)
        with lms.enable(limit="64GiB", min_size=SMALL):
            found, away = run(lambda: torch_extension.load("_lms").make_room_of_weights(0, 2**62))
            assert away == 9 * 12, away
            assert [len(each) for each in found] == [len(each) for each in plain]
            differing = [at for at, pair in enumerate(zip(found, plain)) if not all(map(torch.equal, *pair))]
            assert not differing, differing
    """)


def test_states_that_were_loaded_and_a_checkpoint(trial):
    trial("""
        import copy, io

        def run():
            model = make_model(8, 2048)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
            losses = []
            for step in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(256, 2048, device="cuda")).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if step == 1:
                    file = io.BytesIO()
                    torch.save([model.state_dict(), optimizer.state_dict()], file)
                    file.seek(0)
                    weights, states = torch.load(file)
                    model.load_state_dict(weights)
                    optimizer.load_state_dict(states)
            return losses

        torch.cuda.reset_peak_memory_stats()
        plain, needed = run(), torch.cuda.max_memory_reserved()
        torch.cuda.empty_cache()
        with lms.enable(limit=int(0.7 * needed), min_size=SMALL):
            assert run() == plain
    """)


def test_layers_use_copies_of_weights_on_the_host(trial):
    """A pass settles: nothing moves any more, and each weight on the host crosses the bus once."""
    trial("""
        def passes(model, times):
            given = [torch.full((2048, 4096), 0.01 * number, device="cuda") for number in range(times)]
            with torch.no_grad():
                return [model(each).sum().item() for each in given]

        def make():
            torch.manual_seed(0)
            return torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(40)))

        model = make().cuda()
        plain, needed = passes(model, 20), torch.cuda.max_memory_reserved()
        del model
        torch.cuda.empty_cache()
        with lms.enable(limit=int(0.6 * needed), min_size=SMALL), Held() as held:
            model = make().cuda()
            assert passes(model, 20) == plain
            before = lms.stats()
            assert passes(model, 20) == plain
            after = lms.stats()
        moved = after["weight_evicted_bytes"] - before["weight_evicted_bytes"]
        streamed = after["streamed_bytes"] - before["streamed_bytes"]
        assert moved == 0 and streamed > 0 and after["slow_reads"] == before["slow_reads"], (before, after)
        assert held.most_bytes <= int(0.6 * needed), (held.most_bytes, needed)
    """)
