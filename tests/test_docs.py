"""The pages say what the code says: schema table, file tree, links, and the README's example.

``python tests/test_docs.py`` prints the schema table for ``docs/architecture.md``.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from torchrl_vla.schema import SCHEMA, Field

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def schema_table() -> str:
    head = ["key", "shape", "dtype", "meaning", "written by", "read by", "always"]
    return "\n".join([row(head), row(["---"] * len(head)), *map(schema_row, SCHEMA)])


def row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def schema_row(field: Field) -> str:
    key = field.key if isinstance(field.key, str) else ".".join(field.key)
    shape = ", ".join(map(str, field.shape))
    dtype = str(field.dtype).removeprefix("torch.")
    always = "yes" if field.required else "no"
    cells = [f"`{key}`", f"`[*, {shape}]`", dtype, field.meaning, field.written_by, field.read_by]
    return row([*cells, always])


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def tree_paths() -> set[Path]:
    """Paths of the README's file tree: two spaces of indent per folder, folders end in a slash."""
    paths, folders = set(), []
    for line in code_blocks("text")[-1].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = folders[:depth]
        paths.add(Path(*folders, name))
        if name.endswith("/"):
            folders.append(name)
    return paths


def test_schema_table_of_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"^\| key \|.*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)
    assert tables == [schema_table()], (
        "docs/architecture.md is not schema.py's: paste what `python tests/test_docs.py` prints"
    )


def test_file_tree_of_the_readme():
    listed = tree_paths()
    missing = sorted(str(path) for path in listed if not (ROOT / path).exists())
    assert missing == [], "the README lists files that do not exist"
    globs = ("torchrl_vla/**/*.py", "launch/**/*.*", "conf/**/*.yaml", "docs/**/*.md")
    files = [path for glob in globs for path in ROOT.glob(glob) if path.stat().st_size]
    files = {path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts}
    unlisted = sorted(str(path) for path in files - listed)
    assert unlisted == [], "add a line for each to the README's file tree"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)\s#]+)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize(
    "command",
    ["pip install -e . && torchrun launch/train.py algo=sac", "pip install -e '.[test]' && pytest"],
)
def test_two_commands_stand_alone(command):
    # Each is the only line of its block, so that it can be copied; .ci/run reads the second.
    assert f"{command}\n" in code_blocks("bash")


def test_example_runs():
    # 2 batches of 4 simulators x 16 decisions; log-probs per number of the chunk, [4, 16, H, A].
    (example,) = code_blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT, timeout=240
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if "episodes solved" in line]
    assert len(lines) == 2
    assert all(line.startswith("torch.Size([4, 16, 4, 4])") for line in lines)


if __name__ == "__main__":
    print(schema_table())
