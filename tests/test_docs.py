"""Every code block of the README and the documentation runs, every link leads somewhere, no generated table is stale.

A block is ```python or ```bash. An HTML comment above a block says what else holds for it:
`not run: reason`; `output` (a text block that the block before printed, where ... stands for anything); `serves` (a
service on port 8000, which runs until the end of the page);
`from FILE` (lines that stand in that file, not run); `needs: PACKAGE` (a program of its own, skipped where the package
is not installed) or `torchrun: PROCESSES` (a program of `make test-cluster`). With VITLITE_WRITE_OUTPUT=1 outputs that
differ are written into the page; look at them before you commit.
"""

import contextlib
import doctest
import importlib
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from files_of_libraries import write_files
from parity.references import distance
from PIL import Image, ImageChops, ImageStat
from server import Hub
from torchrun import ENVIRONMENT, launcher

import vitlite
from vitlite.cli.main import main
from vitlite.nn.vit import ViT
from vitlite.zoo import registry

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SOURCE = ROOT / "src"
MODULES = [  # with an example
    ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>> " in file.read_text("utf-8")
]
HERE = "http://127.0.0.1:8000"  # of the service of a page
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"<!-- (not run|output|serves|from|needs|torchrun)(?::? (.*?))? -->\s*$")


class Block(NamedTuple):
    language: str
    note: str  # "not run", "output", "serves", "from", "needs", "torchrun" or ""
    detail: str  # the reason, the file, the package, or how many processes
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for match in FENCE.finditer(text):
        note = NOTE.search(text[: match.start()])
        kind, detail = (note[1], note[2] or "") if note else ("", "")
        line = text[: match.start()].count("\n") + 2
        found.append(Block(match[2].split(" ")[0], kind, detail, textwrap.dedent(match[3]), line))
    return found


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    """A Hub that has the default model's repository; its weights are random, so no page may show what they answer."""
    from safetensors.torch import save

    record = registry.find("vit_base_16")
    with Hub() as server:
        weights = ViT(record.config).half().state_dict()
        server.publish(record.repo, model_safetensors=save(weights), config_json=b"{}")
        yield server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages, so that the default model is downloaded once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def workplace(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a checkout, where pages may leave files."""
    shutil.copytree(ROOT / "examples" / "photos", tmp_path / "examples" / "photos")
    shutil.copy(ROOT / "examples" / "serve.py", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VITLITE_CACHE", str(cache))
    monkeypatch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
    return tmp_path


@pytest.fixture
def processes() -> Iterator[ExitStack]:
    """What ends the services of a page."""
    with ExitStack() as stack:
        yield stack


@contextlib.contextmanager
def serving(line: str) -> Iterator[str]:
    """The address of examples/serve.py, run as a page says, but on a free port."""
    command = [sys.executable, *shlex.split(line)[1:], "--port", "0"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        first = process.stderr.readline()
        found = re.search(r"http://[\d.:]+\d", first)
        assert found, first
        yield found[0]
        process.terminate()


@pytest.mark.parametrize("module", MODULES)
def test_every_example_in_a_docstring_runs(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    failed, attempted = doctest.testmod(importlib.import_module(module))
    assert attempted
    assert not failed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(
    page: Path, workplace: Path, processes: ExitStack, request: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = blocks_of(page)
    running = [block for block in blocks if block.note in ("", "output") and block.language in ("python", "bash")]
    online = any(re.search(r"vit_base_16\b(?!\.)", b.text) and " info " not in b.text for b in running)
    monkeypatch.setenv("HF_ENDPOINT", request.getfixturevalue("hub").url if online else "http://127.0.0.1:9")
    names: dict[str, Any] = {"__name__": "__main__"}
    theirs = write_files(workplace) if page.stem == "coming_from" else {}
    printed, address = "", HERE
    for block in blocks:
        place = f"{page.name}:{block.line}"
        if block.note == "not run":
            assert block.detail, f"{place}: say why this block is not run"
        elif block.note == "from":
            assert stands_in(block.text, ROOT / block.detail), f"{place}: these lines are not in {block.detail}"
        elif block.note == "output":
            options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
            same = doctest.OutputChecker().check_output(block.text, printed, options)
            if not same and "VITLITE_WRITE_OUTPUT" in os.environ:
                page.write_text(page.read_text(encoding="utf-8").replace(block.text, printed, 1), encoding="utf-8")
                continue
            assert same, f"{place}: shows\n{block.text}\nbut it printed\n{printed}"
        elif block.note in ("needs", "torchrun"):
            printed = ""  # see test_every_program_runs
        elif block.note == "serves":
            address = processes.enter_context(serving(block.text))
        elif block.language == "python":
            printed = run_python(block.text, place, names)
        elif block.language in ("bash", "sh", "console"):
            printed = "".join(run_line(line.replace(HERE, address), place) for line in commands(block.text))
    for name, answer in theirs.items():
        images = torch.randn(1, 3, *names[name].config.size, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            assert distance(names[name](images), answer(images)) < 1e-5, name


PROGRAMS = [
    pytest.param(page, block, id=f"{page.stem}:{block.line}", marks=[pytest.mark.cluster] * (block.note == "torchrun"))
    for page in PAGES
    for block in blocks_of(page)
    if block.note in ("needs", "torchrun")
]


@pytest.mark.parametrize(("page", "block"), PROGRAMS)
def test_every_program_runs(page: Path, block: Block, workplace: Path) -> None:
    if block.note == "needs" and find_spec(block.detail) is None:
        pytest.skip(f"{block.detail} is not installed")
    if block.detail == "torch":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of its tracer and its compiler
            run_python(block.text, f"{page.name}:{block.line}", {"__name__": "__main__"})
        torch._dynamo.reset()
        return
    # peft imports torchvision, which not every torch can load without what peers does.
    first = "import peers\n" if block.note == "needs" else ""
    Path("program.py").write_text(first + block.text, encoding="utf-8")
    command = [sys.executable, "program.py"]
    if block.note == "torchrun":
        command = launcher(int(block.detail), program=("program.py",))
    paths = os.pathsep.join([str(ROOT / "tests"), *sys.path])
    environment = ENVIRONMENT | os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{page.name}:{block.line}: {done.stderr}"


def run_python(code: str, place: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, place, "exec"), names)
    return out.getvalue()


def commands(text: str) -> list[str]:
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.lstrip().startswith("#")]


def run_line(line: str, place: str) -> str:
    """Runs a line of a shell block, in this process where it is only vitlite's own."""
    assert "pip install" not in line, f"{place}: {line!r} would change the environment: say `not run: installs` above"
    if line.startswith("vitlite ") and not set(line) & set("|<>$&;"):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            code = main(shlex.split(line, comments=True)[1:])
        assert code == 0, f"{place}: {line!r} ended with {code}: {err.getvalue()}"
        return out.getvalue()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-ec", line], env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{place}: {line!r} ended with {done.returncode}: {done.stderr}"
    return done.stdout


def stands_in(quoted: str, file: Path) -> bool:
    """Whether a file has these lines, one after the other, whatever their indent."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    wanted = [line.strip() for line in quoted.strip().splitlines()]
    return any(lines[i : i + len(wanted)] == wanted for i in range(len(lines)))


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub and Python-Markdown make them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title.lower())).strip("-") for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))], ids=lambda page: page.stem
)
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        there = page.parent / name if name else page
        assert there.exists(), f"{page.name} links to {target}, which is not there"
        if anchor:
            assert anchor in headings(there), f"{page.name} links to {target}, which has no such heading"


@pytest.mark.parametrize("script", sorted(ROOT.glob("docs/generate_*.py")), ids=lambda script: script.stem)
def test_generated_pages_are_fresh(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the scripts change
    code: str | int | None = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    assert not code, code


def test_the_page_on_parity_is_made_with_what_is_pinned() -> None:
    page = (ROOT / "docs" / "parity.md").read_text(encoding="utf-8")
    pins = (ROOT / "constraints.txt").read_text("utf-8") + (ROOT / "tests" / "peers.txt").read_text("utf-8")
    names = ("timm", "transformers", "torchvision", "vit-pytorch", "torch")
    pinned = dict(re.findall(rf"^({'|'.join(names)})==(\S+)$", pins, re.MULTILINE))
    assert set(pinned) == set(names)
    for name, version in pinned.items():
        assert re.search(rf"\b{name} {re.escape(version)}\b", page), f"{name} is {version}: make docs/parity.md anew"


LESSON = ROOT / "docs" / "how_a_vit_works.md"
NOTEBOOK = LESSON.with_suffix(".ipynb")


def code_cells(notebook: Path) -> list[tuple[str, str]]:
    """What each cell of code does, and what it printed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    found = []
    for cell in cells:
        if cell["cell_type"] == "code":
            printed = "".join("".join(output["text"]) for output in cell["outputs"])
            found.append(("".join(cell["source"]) + "\n", printed))
    return found


def test_the_notebook_is_the_page() -> None:
    page: list[list[str]] = []
    for block in blocks_of(LESSON):
        if block.note == "output":
            page[-1][1] = block.text.rstrip("\n")
        elif block.note == "" and block.language in ("python", "bash"):
            shell = re.sub(r"(?m)(?<!\\\n)^(?=.)", "!", block.text)  # not before lines that continue a command
            page.append([block.text if block.language == "python" else shell, ""])
    setup, *cells = code_cells(NOTEBOOK)
    assert "sysconfig" in setup[0]
    assert [list(cell) for cell in cells] == page
    assert f"({NOTEBOOK.name})" in LESSON.read_text(encoding="utf-8")


def test_the_notebook_runs_where_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("PATH", os.environ["PATH"])  # the notebook changes it
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, (code, expected) in enumerate(code_cells(NOTEBOOK)):
        if code.startswith("!"):
            for line in commands(code):
                run_line(line.removeprefix("!"), f"cell {number}")
        else:
            printed = run_python(code, f"cell {number}", names)
            assert printed.strip() == expected
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "filters.png", "positions.png", "map.png", "distances.png", "rollout.png"
    }  # fmt: skip


def test_the_notebook_runs_in_jupyter(tmp_path: Path) -> None:
    for module in ("nbclient", "nbformat", "ipykernel"):
        pytest.importorskip(module)
    code = """\
import sys, nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbformat.validate(notebook)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, "ran.ipynb")
"""
    scripts = Path(sysconfig.get_path("scripts"))
    others = [folder for folder in os.environ["PATH"].split(os.pathsep) if Path(folder) != scripts]
    environment = {**os.environ, "PATH": os.pathsep.join(others)}  # as where nothing was activated
    done = subprocess.run(
        [sys.executable, "-c", code, str(NOTEBOOK)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for (code, expected), (_, printed) in zip(code_cells(NOTEBOOK), code_cells(tmp_path / "ran.ipynb"), strict=True):
        if code.startswith("!"):
            assert "vitlite info" in code or printed.count("wrote ") == 1
        else:
            assert printed.strip() == expected


PICTURES = {  # what the commands of the lesson draw, and what stands on the page
    "filters.png": "filters.png",
    "positions.png": "positions.png",
    "map.png": "attention.jpg",
    "distances.png": "distances.png",
    "rollout.png": "rollout.jpg",
}


def test_the_figures_of_the_lesson_are_what_their_commands_draw(workplace: Path) -> None:
    text = LESSON.read_text(encoding="utf-8").replace("\\\n", " ")
    drawing = re.findall(r"vitlite [^`\n]* --out \S+\.png", text)
    assert {line.split()[-1] for line in drawing} == set(PICTURES)
    for line in sorted(set(drawing)):
        out = line.split()[-1]
        run_line(line, line)
        with Image.open(out) as drawn, Image.open(ROOT / "docs" / "images" / PICTURES[out]) as shown:
            assert drawn.size == shown.size, line
            apart = ImageStat.Stat(ImageChops.difference(drawn.convert("RGB"), shown.convert("RGB")))
            assert max(apart.mean) < 4, line  # of 255: some are kept as JPEG


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_navigation_has_every_page() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = set(re.findall(r"([\w/-]+\.md)", nav))
    pages = {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
    assert listed == pages


def test_every_page_says_what_kind_it_is_and_for_whom() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    sections = re.split(r"^  - (Tutorials|Guides|Reference|Explanation):$", nav, flags=re.MULTILINE)[1:]
    for kind, entries in zip(sections[::2], sections[1::2], strict=True):
        for page in re.findall(r"([\w/-]+\.md)$", entries, re.MULTILINE):
            head = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()[2]
            assert re.fullmatch(rf"\*{kind.removesuffix('s')} · for .+\.\*", head), f"{page}: {head}"


def test_messages_on_the_page_of_errors_are_in_the_code() -> None:
    source = "".join(file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("*.py")))
    source = re.sub(r'"\s+f?"', "", source)  # strings of several lines
    messages = re.findall(
        r"^\|`([^`]+ [^`]+)`\|", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(messages) > 10
    for message in messages:
        for part in message.split("…"):
            assert part.strip() in source, message


def test_reference_names_exist() -> None:
    for name in re.findall(r"^::: ([\w.]+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        module, _, attribute = name.rpartition(".")
        if module != "vitlite" or attribute not in ("draw", "errors"):
            assert hasattr(importlib.import_module(module), attribute), name


def test_the_citation_names_this_version() -> None:
    said = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {vitlite.__version__}\n" in said


def test_equations_are_for_the_typesetter() -> None:
    """A block of math is one that the site typesets, and its braces are closed."""
    math = [block for page in PAGES for block in blocks_of(page) if block.language == "math"]
    assert math
    for block in math:
        assert block.text.count("{") == block.text.count("}"), f"line {block.line}"
    assert "name: math" in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
