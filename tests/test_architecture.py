"""The house rules that an import or a name can break, read from the syntax trees."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "torchrl_vla"
FLOORS = (
    ("schema", "signals"),
    ("topology",),
    ("envs", "policies", "objectives", "storage", "serving"),
    ("actors", "learner", "checkpoint", "metrics", "replay", "data", "video", "progress"),
    ("evaluate", "remote"),
    ("loops", "report"),
    ("launch",),
)
"""Rooms from the bottom up: a room imports from the floors below it."""
NEIGHBOURS = {("progress", "metrics")}
"""Imports between rooms of one floor that are allowed nevertheless."""
HOMES = {
    "hydra": "launch",
    "omegaconf": "launch",
    "mujoco": "envs",
    "gymnasium": "envs",
    "metaworld": "envs",
    "libero": "envs",
    "robosuite": "envs",
    "transformers": "policies",
    "peft": "policies",
    "huggingface_hub": "policies",
    "pyarrow": "data",
}
"""The one room that may import an outside library."""
RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}
DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "shared"}


def sources(root: Path = ROOT) -> list[Path]:
    return sorted([*(root / PACKAGE).rglob("*.py"), *(root / "launch").rglob("*.py")])


def module_of(path: Path, root: Path = ROOT) -> str:
    """Return the dotted name, such as ``torchrl_vla.envs.chunked`` or ``launch.train``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room of a dotted name: ``envs``, ``schema``, ``launch``; "" for the package."""
    parts = module.split(".")
    if parts[0] == "launch":
        return "launch"
    return parts[1] if len(parts) > 1 else ""


def floor_of(room: str) -> int:
    for floor, rooms in enumerate(FLOORS):
        if room in rooms:
            return floor
    raise AssertionError(f"room {room!r} has no floor; give it one in FLOORS")


def imports(path: Path, root: Path = ROOT) -> Iterator[tuple[str, int]]:
    """Yield every imported dotted name with its line, wherever in the file it is written."""
    package = module_of(path, root).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((name.name, node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            base = ".".join(part for part in (base, node.module) if part)
            # `from torchrl_vla import schema` names a room, `from x import y` rarely a module.
            yield from ((f"{base}.{name.name}", node.lineno) for name in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                yield str(node.args[0].value), node.lineno


def wrong_imports(root: Path = ROOT) -> list[str]:
    """Return the imports that do not go down."""
    found = []
    for path in sources(root):
        room = room_of(module_of(path, root))
        for name, line in imports(path, root):
            if name.split(".")[0] not in (PACKAGE, "launch"):
                continue
            other = room_of(name)
            same = other == room or not room or (room, other) in NEIGHBOURS
            if not same and floor_of(other) >= floor_of(room):
                found.append(f"{path.relative_to(root)}:{line} {room} imports {other}")
    return found


def strays(root: Path = ROOT) -> list[str]:
    """Return the outside libraries that are imported outside their room."""
    found = []
    for path in sources(root):
        room = room_of(module_of(path, root))
        for name, line in imports(path, root):
            home = HOMES.get(name.split(".")[0], room)
            if home != room:
                found.append(f"{path.relative_to(root)}:{line} {name} belongs to {home}")
    return found


def strings(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {value for value in constants if isinstance(value, str)}


def choices_by_algorithm(path: Path, names: set[str]) -> list[str]:
    """Return the branches that ask which algorithm runs."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            asked: ast.AST = node.test
        elif isinstance(node, ast.Match | ast.Compare):
            asked = node
        else:
            continue
        parts = list(ast.walk(asked))
        words = {getattr(p, "id", getattr(p, "attr", "")) for p in parts}
        values = {p.value for p in parts if isinstance(p, ast.Constant)}
        if any("algo" in word for word in words) or values & names:
            found.append(f"{path.name}:{node.lineno}")
    return found


def test_every_room_has_a_floor():
    rooms = {room_of(module_of(path)) for path in sources()} - {""}
    assert {floor_of(room) for room in rooms} == set(range(len(FLOORS)))


def test_imports_go_down():
    assert wrong_imports() == []


def test_one_outside_library_one_room():
    assert strays() == []


def test_no_drawers():
    names = [path for top in (PACKAGE, "launch", "tests") for path in (ROOT / top).rglob("*.py")]
    assert not [str(p) for p in names if DRAWERS & set(p.relative_to(ROOT).with_suffix("").parts)]


def test_ranks_are_read_in_one_file():
    readers = [path.name for path in sources() if strings(path) & RANKS]
    assert readers == ["environment.py"]


def test_slurm_is_the_launchers_business():
    readers = [p for p in sources() if any(text.startswith("SLURM_") for text in strings(p))]
    assert [p for p in readers if room_of(module_of(p)) != "launch"] == []


def test_loops_do_not_ask_which_algorithm_they_run():
    names = {path.stem for path in (ROOT / "conf" / "algo").glob("*.yaml")}
    assert {"ppo", "sac"} <= names
    rooms = ("loops", "learner", "actors", "replay", "topology")
    paths = [path for path in sources() if room_of(module_of(path)) in rooms]
    assert [line for path in paths for line in choices_by_algorithm(path, names)] == []


def test_no_config_objects_below_launch():
    found = []
    for path in sources():
        if room_of(module_of(path)) == "launch":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and node.arg in ("cfg", "config"):
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


BAD = {
    "objectives/a.py": "import torchrl_vla.envs.chunked\n",
    "envs/b.py": "def f():\n    from torchrl_vla import evaluate\n",
    "policies/c.py": "from ..learner import Learner\n",
    "metrics.py": "from torchrl_vla.replay import x\n",
    "topology.py": "from . import schema\nimport torchrl_vla.topology\n",
    "data/d.py": "import importlib\nimportlib.import_module('mujoco')\n",
    "loops/e.py": "from hydra.utils import instantiate\nfrom launch.train import main\n",
    "progress.py": "from torchrl_vla.metrics import x\n",
}


@pytest.fixture
def bad_house(tmp_path: Path) -> Path:
    for name, text in BAD.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "launch").mkdir()
    return tmp_path


def test_the_checks_find_what_they_look_for(bad_house: Path):
    assert wrong_imports(bad_house) == [
        "torchrl_vla/envs/b.py:2 envs imports evaluate",
        "torchrl_vla/loops/e.py:2 loops imports launch",
        "torchrl_vla/metrics.py:1 metrics imports replay",
        "torchrl_vla/objectives/a.py:1 objectives imports envs",
        "torchrl_vla/policies/c.py:1 policies imports learner",
    ]
    assert strays(bad_house) == [
        "torchrl_vla/data/d.py:2 mujoco belongs to envs",
        "torchrl_vla/loops/e.py:1 hydra.utils.instantiate belongs to launch",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "if algo == 1: pass",
        "x = 1 if run.algorithm else 2",
        "y = kind == 'ppo'",
        "match z:\n    case 'sac': pass",
        "while self.algo_name: pass",
    ],
)
def test_a_choice_by_algorithm_is_found(tmp_path: Path, line: str):
    path = tmp_path / "loop.py"
    path.write_text(line)
    assert choices_by_algorithm(path, {"ppo", "sac"})
    path.write_text("run(algorithm=algo)\nif step == 3: pass\nname = 'ppo'")
    assert not choices_by_algorithm(path, {"ppo", "sac"})
