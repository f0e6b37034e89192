"""Every split from 1 to 64 ranks, and 512, without a process group, a GPU or an environment."""

import itertools

import pytest
import torch

from torchrl_vla.topology import Layout, backends, plan
from torchrl_vla.topology.environment import Launched, read_environment

SHAPES = [
    (nodes, per_node) for nodes, per_node in itertools.product(range(1, 65), range(1, 9))
    if nodes * per_node <= 64 or (nodes, per_node) == (64, 8)
]  # fmt: skip


def places(layout: Layout) -> list:
    return [layout.place(rank) for rank in range(layout.world_size)]


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_every_rank_has_one_shard_and_one_gpu(nodes: int, per_node: int):
    world = nodes * per_node
    for replicate in [n for n in range(1, world + 1) if world % n == 0]:
        layout = plan(world, ranks_per_node=per_node, gpus=8, replicate=replicate)
        assert layout.nodes == nodes
        assert layout.replicate * layout.shard == world
        found = places(layout)
        assert len({(p.replica, p.shard) for p in found}) == world
        assert {p.replica for p in found} == set(range(replicate))
        assert len({(p.node, p.device) for p in found}) == world
        assert {p.actor_device for p in found} == {"cpu"}
        # the mesh that torch builds over ranks 0, 1, ... has the same rows
        mesh = torch.arange(world).view(*layout.mesh.values())
        if replicate > 1:
            assert list(layout.mesh) == ["replicate", "shard"]
            assert all(int(mesh[p.replica, p.shard]) == p.rank for p in found)
        else:
            assert layout.mesh == {"shard": world}


@pytest.mark.parametrize(("nodes", "per_node"), SHAPES)
def test_one_replica_per_node_never_shards_across_nodes(nodes: int, per_node: int):
    layout = plan(nodes * per_node, ranks_per_node=per_node, gpus=per_node, replicate="node")
    assert all(p.replica == p.node and p.shard == p.local_rank for p in places(layout))


@pytest.mark.parametrize(("ranks", "actor_gpus"), [(6, 2), (4, 4), (7, 1), (5, 3), (1, 1)])
def test_servers_have_their_own_gpus(ranks: int, actor_gpus: int):
    layout = plan(
        2 * ranks, ranks_per_node=ranks, gpus=8, actors="server", actor_gpus=actor_gpus
    )  # fmt: skip
    on_first = [p for p in places(layout) if p.node == 0]
    used = {p.device for p in on_first}
    served = [p.actor_device for p in on_first]
    assert used == {f"cuda:{i}" for i in range(ranks)}
    # all of them are used, none is a learner's, and none serves over one rank more than another
    assert set(served) == {f"cuda:{ranks + i}" for i in range(actor_gpus)}
    loads = [served.count(device) for device in set(served)]
    assert max(loads) - min(loads) <= 1


def test_a_server_without_a_gpu_of_its_own_shares_its_ranks():
    shared = plan(4, ranks_per_node=2, gpus=2, actors="server")
    assert [p.actor_device for p in places(shared)] == ["cuda:0", "cuda:1"] * 2
    single = plan(1, ranks_per_node=1, gpus=4, device="cuda:3", actors="server")
    assert single.place(0).actor_device == single.place(0).device == "cuda:3"
    assert plan(2, ranks_per_node=2, gpus=0, actors="server").place(1).actor_device == "cpu"


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (6, {"ranks_per_node": 4}, "6 ranks with 4 per node do not fill whole nodes"),
        (0, {"ranks_per_node": 1}, "0 ranks"),
        (6, {"replicate": 4}, r"replicate is 4 with 6 ranks.*\[1, 2, 3, 6\], or 'node'"),
        (6, {"replicate": 0}, "replicate is 0"),
        (6, {"replicate": "rack"}, "replicate is 'rack'"),
        (2, {"device": "tpu"}, "device is 'tpu'; use 'auto'"),
        (2, {"device": "cuda:x"}, "device is 'cuda:x'"),
        (2, {"device": "cuda:1"}, "2 ranks, which would share one GPU; use 'cuda'"),
        (9, {"ranks_per_node": 9}, "needs GPU 8 but a node has 8; start at most 8 ranks"),
        (1, {"device": "cuda:8"}, "needs GPU 8 but a node has 8"),
        (2, {"actors": "moon"}, r"actors is 'moon'; use one of \['local', 'server'\]"),
        (2, {"actor_gpus": 1}, "actor_gpus is 1 with actors='local'"),
        (2, {"actor_gpus": 1, "actors": "server", "device": "cpu"}, "device='cpu'; GPUs for"),
        (2, {"actor_gpus": -1, "actors": "server"}, "actor_gpus is -1"),
        (2, {"actor_gpus": 3, "actors": "server"}, "1 GPUs would stay idle; use at most 2"),
        (6, {"actor_gpus": 4, "actors": "server"}, "need 10 GPUs per node.*start 4 ranks"),
        (2, {"server_groups": 0, "actors": "server"}, "server_groups is 0; it must be at least 1"),
    ],
)
def test_impossible_splits_say_what_would_do(world: int, options: dict, message: str):
    settings = {"ranks_per_node": max(1, world), "gpus": 8} | options
    with pytest.raises(ValueError, match=message):
        plan(world, **settings)


def test_cuda_without_a_gpu():
    with pytest.raises(RuntimeError, match="sees no GPU; use device=cpu"):
        plan(1, ranks_per_node=1, gpus=0, device="cuda")
    assert plan(1, ranks_per_node=1, gpus=0).device == "cpu"
    assert plan(1, ranks_per_node=1, gpus=1).device == "cuda"


def test_a_rank_that_is_not_there():
    layout = plan(2, ranks_per_node=2, gpus=0)
    with pytest.raises(IndexError, match="rank is 2; ranks go from 0 to 1"):
        layout.place(2)


def test_a_layout_in_one_line():
    layout = plan(12, ranks_per_node=6, gpus=8, replicate="node", actors="server", actor_gpus=2)
    assert str(layout) == (
        "12 ranks on 2 nodes, 2 replicate x 6 shard, cuda, actors: server, "
        "2 GPUs per node for actors"
    )


def test_cpu_tensors_can_cross_ranks_on_a_gpu_run():
    # NCCL refuses them: counters and masks of objectives live on the CPU.
    assert backends(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert backends(torch.device("cpu")) == "gloo"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch):
    given = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4}
    for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    return monkeypatch


def test_the_environment_of_a_launcher(launched: pytest.MonkeyPatch):
    assert read_environment() == Launched(5, 8, 1, 4)
    launched.setenv("LOCAL_RANK", "2")  # 5 = 4 + 1, so the first node cannot have had 4 ranks
    with pytest.raises(RuntimeError, match=r"rank 5 is number 2 of 4 .* another number"):
        read_environment()
    launched.setenv("LOCAL_RANK", "1")
    launched.setenv("TORCHELASTIC_MAX_RESTARTS", "3")  # torchrun --max-restarts=3
    launched.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    with pytest.raises(RuntimeError, match=r"max-restarts=3 without TORCH_DISABLE_SHARE_RDZV_TCP"):
        read_environment()
    launched.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    assert read_environment() == Launched(5, 8, 1, 4)
    launched.delenv("MASTER_PORT")
    with pytest.raises(RuntimeError, match=r"lacks \['MASTER_PORT'\]"):
        read_environment()


def test_no_launcher(launched: pytest.MonkeyPatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        launched.delenv(name)
    assert read_environment() is None
