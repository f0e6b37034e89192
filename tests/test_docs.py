"""The pages say what the code says: schema table, file tree, links, and the README's example.

``python tests/test_docs.py`` prints the schema table for ``docs/architecture.md``,
``python tests/test_docs.py files`` the tree of ``docs/files.md``.
"""

import ast
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


def listed_files() -> list[Path]:
    """Every file that holds code, settings or text of the project, in reading order."""
    globs = ("launch/**/*.*", "conf/**/*.yaml", "torchrl_vla/**/*.py", "benchmarks/*.py")
    files = [path for glob in globs for path in sorted(ROOT.glob(glob)) if path.stat().st_size]
    files = [path for path in files if path.suffix != ".pyc"]
    return [path.relative_to(ROOT) for path in [*files, *sorted(ROOT.glob("docs/**/*.md"))]]


def says(path: Path) -> str:
    """The first sentence that a file says of itself."""
    text = (ROOT / path).read_text()
    if path.suffix == ".py":
        first = re.split(r"\.(?:\s|$)", ast.get_docstring(ast.parse(text)) or "")[0]
    elif path.suffix == ".md":
        first = text.splitlines()[0].lstrip("# ")
    else:
        lines = (line for line in text.splitlines() if not line.startswith(("#!", "# @package")))
        first = re.split(r"\.(?:\s|$)", next(lines, "").lstrip("# "))[0]
    return " ".join(first.split())


def file_tree() -> str:
    """One line per file: name and what it says of itself; two spaces of indent per folder."""
    lines, before = [], ()
    for path in listed_files():
        folders = path.parts[:-1]
        for depth, folder in enumerate(folders):
            if before[: depth + 1] != folders[: depth + 1]:
                lines.append(f"{'  ' * depth}{folder}/")
        before = folders
        name = f"{'  ' * len(folders)}{path.name}"
        lines.append(f"{name:<38} {says(path)}".rstrip())
    return "\n".join(lines)


def test_schema_table_of_the_architecture_page():
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.findall(r"^\| key \|.*?(?=\n\n)", page, re.DOTALL | re.MULTILINE)
    assert tables == [schema_table()], (
        "docs/architecture.md is not schema.py's: paste what `python tests/test_docs.py` prints"
    )


def test_file_tree():
    page = (ROOT / "docs" / "files.md").read_text()
    (tree,) = re.findall(r"^```text\n(.*?)\n^```$", page, re.DOTALL | re.MULTILINE)
    assert tree == file_tree(), "write what `python tests/test_docs.py files` prints to the page"


def test_every_file_says_what_it_is():
    assert [str(path) for path in listed_files() if not says(path)] == []


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
    print(file_tree() if sys.argv[1:] == ["files"] else schema_table())
