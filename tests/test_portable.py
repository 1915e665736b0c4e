"""The code runs on every system: portable calls, the same files everywhere, and right answers on older CPUs."""

import ast
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import vitlite

SOURCE = Path(vitlite.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "msvcrt", "winreg", "signal"}
OF_POSIX = {
    "chown", "chroot", "ctermid", "fchmod", "fchown", "fork", "forkpty", "getegid", "geteuid", "getgid", "getgroups",
    "getloadavg", "getpgid", "getpgrp", "getpriority", "getsid", "getuid", "initgroups", "kill", "killpg", "lchown",
    "lockf", "mkfifo", "mknod", "nice", "O_CLOEXEC", "O_DIRECTORY", "O_NOFOLLOW", "O_NONBLOCK", "O_SYNC", "openpty",
    "posix_fadvise", "posix_fallocate", "posix_spawn", "pread", "preadv", "pwrite", "pwritev", "sched_getaffinity",
    "sched_setaffinity", "sendfile", "setpgid", "setsid", "setuid", "statvfs", "symlink", "sync", "sysconf", "ttyname",
    "uname", "wait", "wait3", "wait4", "WNOHANG",
}  # fmt: skip
METHODS = {"symlink_to", "hardlink_to", "rename"}  # of paths; `replace` overwrites on every system
ALTERNATIVES = {
    ("fast/measure.py", "os.getloadavg"): 'hasattr(os, "getloadavg")',
    ("inference/threads.py", "os.sched_getaffinity"): 'if hasattr(os, "sched_getaffinity") else',
    ("zoo/cache.py", "link.symlink_to"): "except (OSError, ValueError):",
}


def banned(tree: ast.AST) -> Iterator[str]:
    """Yield every name in a module that some systems lack."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from MODULES & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            yield from MODULES & {(node.module or "").split(".")[0]}
        elif isinstance(node, ast.Attribute):
            is_of_os = isinstance(node.value, ast.Name) and node.value.id == "os"
            if (is_of_os and node.attr in OF_POSIX | {"rename"}) or node.attr in METHODS:
                yield ast.unparse(node)


def careless(tree: ast.AST) -> Iterator[str]:
    """Yield every call that reads or writes text in the encoding, or with the line ends, of the system."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = {keyword.arg for keyword in node.keywords}
        text = ast.unparse(node)
        if name == "read_text" and "encoding" not in given:
            yield text
        elif name == "write_text" and isinstance(node.func, ast.Attribute) and "storage" not in ast.unparse(node.func):
            if not {"encoding", "newline"} <= given:
                yield text
        elif name == "open" and ast.unparse(node.func) in ("open", "path.open", "self.path.open", "io.open"):
            is_binary = any("b" in ast.unparse(argument).strip("'") for argument in node.args[-1:])
            if not is_binary and "encoding" not in given:
                yield text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_no_calls_that_some_systems_lack(file: Path) -> None:
    content, name = file.read_text("utf-8"), file.relative_to(SOURCE).as_posix()
    for found in set(banned(ast.parse(content))):
        alternative = ALTERNATIVES.get((name, found))
        assert alternative is not None, f"{found} is not on every system"
        assert alternative in content


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(SOURCE).as_posix())
def test_text_files_are_the_same_on_all_systems(file: Path) -> None:
    assert list(careless(ast.parse(file.read_text("utf-8")))) == []


def test_banned_calls_are_found() -> None:
    found = set(banned(ast.parse("import os, fcntl\nfrom signal import SIGKILL\nos.fork()\npath.symlink_to(x)")))
    assert found == {"fcntl", "signal", "os.fork", "path.symlink_to"}
    text = "open(a)\nopen(a, 'w')\nopen(a, 'rb')\npath.write_text(a, encoding='utf-8')\nopen(a, encoding='utf-8')"
    assert list(careless(ast.parse(text))) == ["open(a)", "open(a, 'w')", "path.write_text(a, encoding='utf-8')"]


# ---- CPUs with fewer instructions

ON_THIS_CPU = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from models import tiny_model
from vitlite import optimize
from vitlite import kernels
from vitlite.fast import blocks

floats = (torch.float32, torch.bfloat16)
choice = kernels.KernelChoice(linear=True, packed=floats, powers=floats)
kernels.kernel_choice = blocks.kernel_choice = lambda: choice  # whatever is right is used, even if it is slower here
registers = {"registers": 2, "cls_position": False}
for options in ({}, {"pool": "map"}, {"rope": {"reference": 3}, "mlp": "swiglu"}, {"mlp": "quick_gelu", **registers}):
    for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        model = tiny_model(dim=64, mlp_dim=96, **options)
        images = torch.randn(3, 3, 32, 48)
        with torch.no_grad():
            wanted = model.double()(images.double())
            plain = model.float()(images)
            found = optimize(model, dtype=dtype)(images)
        for answer, limit in ((plain, 1e-5), (found, near)):
            far = (answer - wanted).abs().max() / wanted.abs().max()
            assert far < limit, (options, dtype, far)
assert kernels.fastest_linear(torch.float32) is kernels.PackedLinear
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.usefixtures("uncovered")
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these limits are those of x86")
@pytest.mark.parametrize(
    ("onednn", "torch"), [("DEFAULT", ""), ("AVX2", ""), ("SSE41", "default"), ("DEFAULT", "avx2")], ids=str
)
def test_answers_are_right_on_a_cpu_with_fewer_instructions(onednn: str, torch: str, tmp_path: Path) -> None:
    variables = os.environ | {"ONEDNN_MAX_CPU_ISA": onednn, "VITLITE_CACHE": str(tmp_path)}
    if torch:
        variables["ATEN_CPU_CAPABILITY"] = torch
    words = [sys.executable, "-c", ON_THIS_CPU, str(Path(__file__).parent)]
    done = subprocess.run(words, capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    found = done.stdout.strip().lower().replace("no avx", "default")  # which is what older ones say
    assert not torch or found == torch
