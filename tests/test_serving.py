"""A policy server and its clients in other processes: same answers, batches, deaths of both."""

import multiprocessing
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModuleBase, set_interaction_type
from tensordict.nn.probabilistic import InteractionType, interaction_type
from torch import nn

from torchrl_vla.serving import PolicyServer, PolicyServerError, examples


class Doubling(TensorDictModuleBase):
    """Chunk = weight * state (+ 100 when it explores); says how large the batch was."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))
        self.in_keys = [("observation", "state")]
        self.out_keys = [("vla_action", "chunk"), "rows"]

    def forward(self, td: TensorDict) -> TensorDict:
        state = td["observation", "state"]
        if state.isnan().any():
            raise FloatingPointError("the state is not a number")
        td["vla_action", "chunk"] = self.weight * state
        if interaction_type() is InteractionType.RANDOM:
            td["vla_action", "chunk"] = td["vla_action", "chunk"] + 100
        td["rows"] = torch.full((*td.batch_size, 1), td.numel())
        return td


def observations(value: float) -> TensorDict:
    state = torch.full((3, 2), value)
    return TensorDict({("observation", "state"): state, "other": torch.zeros(3)}, batch_size=[3])


def serve(clients: int, **settings) -> PolicyServer:
    request, response = examples(Doubling(), observations(0.0))
    return PolicyServer(Doubling, request, response, clients=clients, **settings)


def ask(policy, value: float, answers) -> None:
    """What a simulator process does; the answer is a plain list, so that nothing is shared."""
    with torch.no_grad(), set_interaction_type(InteractionType.RANDOM):
        td = policy(observations(value))
    answers.put((value, td["vla_action", "chunk"].tolist(), td["rows"].tolist()))


def test_processes_get_their_own_answers_in_one_batch():
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with serve(2, groups=1, window=60.0) as server:
        processes = [
            context.Process(target=ask, args=(server.policy(i), 1.0 + i, answers)) for i in range(2)
        ]
        for process in processes:
            process.start()
        found = {
            value: (chunk, rows)
            for value, chunk, rows in (answers.get(timeout=120) for _ in processes)
        }
        for process in processes:
            process.join()
    # 2 x 1 + 100 and 2 x 2 + 100; both clients' 3 rows went through the policy together
    assert found == {
        1.0: ([[102.0] * 2] * 3, [[6]] * 3),
        2.0: ([[104.0] * 2] * 3, [[6]] * 3),
    }


def test_one_server_through_its_life():
    with serve(2, groups=1, window=0.01) as server:
        policy = server.policy(0)
        mine = observations(3.0)
        with set_interaction_type(InteractionType.DETERMINISTIC):
            answer = policy(mine)
        # a lone request is answered when the window is over; the answer is in the caller's hands
        assert answer is mine
        assert answer["vla_action", "chunk"].tolist() == [[6.0] * 2] * 3
        assert answer["rows"].tolist() == [[3]] * 3
        server.check(ask=True)

        # what the policy raises reaches the client that asked, and the server goes on
        with pytest.raises(FloatingPointError, match="the state is not a number"):
            policy(observations(float("nan")))
        assert policy(observations(1.0))["rows"].tolist() == [[3]] * 3
        assert server.stats()["requests"] == 2  # answered

        pid = server.pid
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="closed"):
            policy(observations(1.0))
        with pytest.raises(PolicyServerError, match=rf"pid {pid}\) ended with exit code -9"):
            server.check()


class Gated(Doubling):
    """Acts once a file says so, and says in another file that it was asked."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def forward(self, td: TensorDict) -> TensorDict:
        (self.folder / "asked").touch()
        wait_for(self.folder / "go")
        return super().forward(td)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def ask_alone(policy) -> None:
    policy(observations(1.0))


def test_a_client_that_is_killed_while_it_waits_stops_nobody_else(tmp_path: Path):
    request, response = examples(Doubling(), observations(0.0))
    make = partial(Gated, tmp_path)
    with PolicyServer(make, request, response, clients=2, window=0.01) as server:
        doomed = multiprocessing.get_context("fork").Process(
            target=ask_alone, args=(server.policy(0),)
        )
        doomed.start()
        wait_for(tmp_path / "asked")
        doomed.kill()
        doomed.join()
        (tmp_path / "go").touch()  # now the answer for the dead one is ready
        assert server.policy(1)(observations(3.0))["vla_action", "chunk"].unique().tolist() == [6.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"groups": 3}, r"groups is 3 with 4 clients.*\[1, 2, 4\]"),
        ({"groups": 0}, "groups is 0"),
        ({"window": 0.0}, "window is 0.0 s; it must be above 0"),
    ],
)
def test_settings_out_of_range(settings: dict, message: str):
    make = partial(serve, 4, **settings)
    with pytest.raises(ValueError, match=message):
        make()
